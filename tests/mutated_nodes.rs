//! ONNX node tests with one thing changed: an attribute, an operator, an input or a number. Every provider must compute what the evaluator
//! of `sdrun-graph` computes, or refuse the model.
//!
//! `SDRUN_MUTATIONS=FIRST..LAST` chooses the seeds. A difference names its seed and leaves the model in the temporary folder.

#![allow(clippy::unwrap_used)]

use prost::Message;
use sdrun::{
    HostTensor, Model, Provider, Tensors,
    abi::{DType, ErrorCode},
    graph::{
        ExternalBase, Graph, Tensor, ValueId,
        proto::{AttributeProto, GraphProto, ModelProto, attribute_type as kind},
    },
};
use sdrun_tests::{
    evaluator::evaluate,
    lab::{ALL, Lab, compute},
    nodes,
    random::{Random, seeds},
};
use std::path::Path;

/// Operators that take the same inputs.
const SIBLINGS: [&[&str]; 8] = [
    &["Add", "Sub", "Mul", "Div", "Mod", "PRelu"],
    &["Max", "Min", "Sum", "Mean"],
    &["And", "Or", "Xor"],
    &["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"],
    &[
        "ReduceSum",
        "ReduceMax",
        "ReduceMin",
        "ReduceMean",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
    ],
    &["Softmax", "LogSoftmax", "Hardmax", "Flatten"],
    &["MaxPool", "AveragePool", "LpPool"],
    &[
        "Abs",
        "Neg",
        "Relu",
        "Sigmoid",
        "Tanh",
        "Exp",
        "Log",
        "Sqrt",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "Erf",
        "Elu",
        "Selu",
        "Softplus",
        "Softsign",
        "HardSigmoid",
        "HardSwish",
        "Mish",
        "Gelu",
        "LeakyRelu",
        "Celu",
        "ThresholdedRelu",
        "Sin",
        "Cos",
        "Tan",
        "Atan",
        "Sinh",
        "Reciprocal",
        "Identity",
        "Cast",
    ],
];

/// Texts that stand for each other.
const WORDS: [&[&str]; 7] = [
    &["linear", "nearest", "cubic"],
    &["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel", "output_half_pixel"],
    &["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"],
    &["constant", "reflect", "edge", "wrap"],
    &["none", "add", "mul", "max", "min"],
    &["DCR", "CRD"],
    &["stretch", "not_larger", "not_smaller"],
];

/// Changes one thing. Returns what, or `None` if there was nothing to change.
fn change(model: &mut ModelProto, inputs: &mut Tensors, random: &mut Random) -> Option<String> {
    let graph = model.graph.as_mut()?;
    let number = random.below(graph.node.len().max(1));
    let node = graph.node.get_mut(number)?;
    let op = node.op_type().to_string();
    match random.below(8) {
        0..=2 => {
            let at = random.below(node.attribute.len().max(1));
            let attribute = node.attribute.get_mut(at)?;
            changed(attribute, random)?;
            Some(format!(
                "{op}: {} is {:?} {:?} {:?} {:?}",
                attribute.name(),
                attribute.i,
                attribute.ints,
                attribute.f,
                attribute.s
            ))
        }
        3 => {
            let at = random.below(node.attribute.len().max(1));
            (at < node.attribute.len()).then(|| format!("{op} without {}", node.attribute.remove(at).name()))
        }
        4 => {
            let (a, b) = (random.below(node.input.len().max(1)), random.below(node.input.len().max(1)));
            (a < b && b < node.input.len()).then(|| {
                node.input.swap(a, b);
                format!("{op} with inputs {a} and {b} swapped")
            })
        }
        5 => {
            let family = SIBLINGS.iter().find(|family| family.contains(&&*op))?;
            let new = random.pick(family);
            node.op_type = Some(new.into());
            (new != op).then(|| format!("{new} for {op}"))
        }
        6 => {
            let at = random.below(node.input.len().max(1));
            let input = node.input.get_mut(at).filter(|_| at > 0)?;
            *input = String::new();
            Some(format!("{op} without input {at}"))
        }
        _ => {
            let at = random.below(inputs.len().max(1));
            let (name, tensor) = inputs.iter_mut().nth(at)?;
            let elements = tensor.shape().iter().product::<usize>();
            if elements == 0 {
                return None;
            }
            let element = random.below(elements);
            let bytes = match tensor.dtype() {
                // What becomes of NaN and infinities is in the READMEs of the providers.
                DType::F32 => {
                    random.pick(&[-0.0_f32, 0.0, 0.5, -2.5, 1.0, 3.0, 1e4, -1e6]).to_le_bytes().to_vec()
                }
                DType::I64 => random.pick(&[0_i64, -1, 1, 2, -3, 7]).to_le_bytes().to_vec(),
                DType::I32 => random.pick(&[0_i32, -1, 1, 2, -3, 7]).to_le_bytes().to_vec(),
                _ => return None,
            };
            let size = bytes.len();
            tensor.bytes_mut()[element * size..][..size].copy_from_slice(&bytes);
            Some(format!("{op} with {bytes:?} at {element} of {name}"))
        }
    }
}

/// Integers for one.
fn near(old: i64) -> [i64; 8] {
    [0, 1, -1, 2, 3, old + 1, old - 1, -old]
}

/// Gives an attribute another value; `None` if its type has no others.
fn changed(attribute: &mut AttributeProto, random: &mut Random) -> Option<()> {
    // Undefined for some numbers.
    if ["to", "dtype", "seed"].contains(&attribute.name()) {
        return None;
    }
    match attribute.r#type {
        Some(kind::INT) => {
            let old = attribute.i();
            attribute.i = Some(random.pick(&near(old)));
        }
        Some(kind::INTS) => {
            let at = random.below(attribute.ints.len().max(1));
            let old = *attribute.ints.get(at)?;
            match random.below(5) {
                0 => drop(attribute.ints.remove(at)),
                _ => attribute.ints[at] = random.pick(&near(old)),
            }
        }
        Some(kind::FLOAT) => attribute.f = Some(random.pick(&[0.0, 1.0, -1.0, 0.5, 1e-3, 3.0])),
        Some(kind::STRING) => {
            let family =
                WORDS.iter().find(|words| words.iter().any(|word| word.as_bytes() == attribute.s()))?;
            attribute.s = Some(random.pick(family).as_bytes().to_vec().into());
        }
        _ => return None,
    }
    Some(())
}

/// What the evaluator computes, by name; `None` if it does not support the graph, or if that is not valid.
fn expected(bytes: &[u8], inputs: &Tensors) -> Option<Vec<(String, HostTensor)>> {
    let graph = Graph::from_bytes(bytes.to_vec().into(), "test", ExternalBase::Stripped).ok()?;
    let values = evaluate(&graph, |name| {
        let tensor = inputs.get(name)?;
        Tensor::new(tensor.dtype(), tensor.shape().to_vec(), tensor.bytes().to_vec()).ok()
    })?;
    let output = |id: &ValueId| {
        let tensor = values.get(id)?;
        let host = HostTensor::from_bytes(tensor.dtype(), tensor.shape().to_vec(), tensor.data()).ok()?;
        Some((graph.value(*id).name.clone(), host))
    };
    graph.outputs.iter().map(output).collect()
}

fn is_finite(tensor: &HostTensor) -> bool {
    !tensor.dtype().is_float()
        || tensor.to_f64().is_some_and(|values| values.iter().all(|value| value.is_finite()))
}

/// Types and shapes of outputs follow from the rest.
fn forget_outputs(graph: &mut GraphProto) {
    for output in &mut graph.output {
        if let Some(tensor) = output.r#type.as_mut().and_then(|r#type| r#type.tensor_type.as_mut()) {
            tensor.shape = None;
        }
    }
    graph.value_info.clear();
}

#[test]
#[ignore = "needs the ONNX node tests in SDRUN_NODE_TESTS; run by `cargo xtask test`"]
fn every_provider_computes_changed_nodes() {
    let cases = nodes::find(Path::new(&std::env::var_os("SDRUN_NODE_TESTS").unwrap())).unwrap();
    let (lab, folder) = (Lab::default(), tempfile::tempdir().unwrap().keep());
    let (mut problems, mut compared) = (Vec::new(), 0);
    let mut providers: Vec<(&str, Provider)> = ALL.iter().map(|id| (*id, lab.open(id).unwrap())).collect();
    for seed in seeds("SDRUN_MUTATIONS", 0..500) {
        let mut random = Random(seed);
        let case = &cases[random.below(cases.len())];
        // Positions halfway between two pixels, axes of empty tensors that only the run knows, integers that overflow.
        if ["crop_and_resize", "empty_set", "pow_types"].iter().any(|part| case.name.contains(part)) {
            continue;
        }
        let Some((mut model, mut inputs)) = case.read() else { continue };
        let Some(what) = change(&mut model, &mut inputs, &mut random) else { continue };
        forget_outputs(model.graph.as_mut().unwrap());
        let bytes = model.encode_to_vec();
        let file = folder.join(format!("{seed}.onnx"));
        std::fs::write(&file, &bytes).unwrap();
        let expected =
            expected(&bytes, &inputs).filter(|outputs| outputs.iter().all(|(_, tensor)| is_finite(tensor)));
        let before = problems.len();
        for (id, provider) in &mut providers {
            let found = Model::open(&file).and_then(|model| compute(provider, &model, &inputs));
            let mut problem =
                |why: String| problems.push(format!("{id}, seed {seed}, {}, {what}: {why}", case.name));
            if provider.has_ended() {
                problem("the worker ended".into());
                *provider = lab.open(id).unwrap();
            }
            match (&found, &expected) {
                (Ok(found), Some(expected)) => {
                    compared += 1;
                    for (name, wanted) in expected {
                        let rounding = ["rounding", "saturated"];
                        if let Err((kind, detail)) = nodes::same(&found[name], wanted)
                            && !rounding.contains(&kind)
                        {
                            problem(format!("{kind} in {name}: {detail}"));
                        }
                    }
                }
                (Err(error), _) if error.code() == ErrorCode::Internal => problem(error.to_string()),
                _ => {}
            }
        }
        if problems.len() == before {
            std::fs::remove_file(file).unwrap();
        }
    }
    println!("{compared} results compared");
    assert!(compared > 100, "only {compared} results were compared");
    assert!(problems.is_empty(), "models in {}:\n{}", folder.display(), problems.join("\n"));
    std::fs::remove_dir_all(folder).unwrap();
}

//! Runs the ONNX node tests (`onnx.backend.test`) through inference and evaluation.
//!
//! `SDRUN_NODE_TESTS` names a folder with one subfolder per case: `model.onnx` and
//! `test_data_set_*/{input,output}_*.pb`. The Python package `onnx` 1.23 writes them for every case of
//! `onnx.backend.test.case.node.collect_testcases()`. Run with `SDRUN_NODE_TESTS=… cargo test -p sdrun-graph --test
//! node_tests -- --ignored --nocapture`.

#![allow(clippy::unwrap_used)]

use prost::Message;
use sdrun_abi::DType;
use sdrun_graph::{
    Graph, Initializer, OpenOptions, Tensor, ValueId, WeightData,
    eval::{EvalError, evaluate},
    infer::infer_shapes,
    proto::TensorProto,
};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

/// Number of cases known to pass, of 1884 in onnx 1.23.2.
const PASSING: usize = 1445;

enum Verdict {
    Passed {
        shapes_known: bool,
    },
    /// An out-of-scope type, operator or attribute.
    Skipped(String),
    Failed(String),
}

#[test]
#[ignore = "needs the cases' folder in SDRUN_NODE_TESTS"]
fn onnx_node_tests() {
    let root = std::env::var("SDRUN_NODE_TESTS").expect("SDRUN_NODE_TESTS names the folder of the cases");
    let mut cases: Vec<_> = fs::read_dir(&root).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    let (mut passed, mut known, mut failed) = (0, 0, Vec::new());
    let mut skipped: BTreeMap<String, usize> = BTreeMap::new();
    for case in &cases {
        let verdict =
            std::panic::catch_unwind(|| run(case)).unwrap_or_else(|_| Verdict::Failed("panic".into()));
        match verdict {
            Verdict::Passed { shapes_known } => {
                passed += 1;
                known += usize::from(shapes_known);
            }
            Verdict::Skipped(why) => *skipped.entry(why).or_default() += 1,
            Verdict::Failed(why) => failed.push(format!("{}: {why}", case.file_name().unwrap().display())),
        }
    }
    for (why, n) in &skipped {
        println!("skipped {n:4}  {why}");
    }
    for line in &failed {
        println!("FAILED {line}");
    }
    println!(
        "{passed} passed ({known} with all shapes inferred), {} failed, {} cases",
        failed.len(),
        cases.len()
    );
    assert!(failed.is_empty(), "{} cases give wrong results", failed.len());
    assert!(passed >= PASSING, "{passed} cases pass, {PASSING} passed before");
}

fn run(case: &Path) -> Verdict {
    let graph = match Graph::open(case.join("model.onnx"), &OpenOptions::default()) {
        Ok(graph) => graph,
        Err(e) => return Verdict::Skipped(format!("open: {}", first_words(&e.to_string(), case))),
    };
    let mut shapes_known = true;
    for i in 0.. {
        let data = case.join(format!("test_data_set_{i}"));
        if !data.is_dir() {
            return if i == 0 { Verdict::Failed("no data".into()) } else { Verdict::Passed { shapes_known } };
        }
        let (Some(inputs), Some(outputs)) = (tensors(&data, "input"), tensors(&data, "output")) else {
            return Verdict::Skipped("data of a type that is not supported".into());
        };
        match run_set(&graph, &inputs, &outputs) {
            Ok(known) => shapes_known &= known,
            Err(verdict) => return verdict,
        }
    }
    unreachable!()
}

/// The part of a message that many cases share.
fn first_words(message: &str, case: &Path) -> String {
    let message = message.replace(&*case.to_string_lossy(), "");
    message.chars().take(90).collect()
}

fn run_set(graph: &Graph, inputs: &[Tensor], outputs: &[Tensor]) -> Result<bool, Verdict> {
    let mut values: HashMap<ValueId, Tensor> =
        graph.inputs.iter().copied().zip(inputs.iter().cloned()).collect();
    for (id, initializer) in &graph.initializers {
        let tensor = match initializer {
            Initializer::Constant(t) => t.clone(),
            Initializer::Weight(w) => match &w.data {
                WeightData::Inline(bytes) => Tensor::new(w.dtype, w.shape.clone(), bytes.clone())
                    .map_err(|e| Verdict::Failed(e.to_string()))?,
                other => return Err(Verdict::Failed(format!("weight is at {other:?}"))),
            },
        };
        values.insert(*id, tensor);
    }
    for node in &graph.nodes {
        let operands: Vec<Option<&Tensor>> =
            node.inputs.iter().map(|i| i.and_then(|i| values.get(&i))).collect();
        let computed = evaluate(node, graph.opset(), &operands).map_err(|e| match e {
            EvalError::Unsupported { op, why } => {
                Verdict::Skipped(format!("{} {why}", op.split('-').next().unwrap_or_default()))
            }
            EvalError::Invalid(e) => Verdict::Failed(e),
        })?;
        for (id, value) in node.outputs.iter().zip(computed) {
            id.map(|id| values.insert(id, value));
        }
    }
    for (i, (id, expected)) in graph.outputs.iter().zip(outputs).enumerate() {
        compare(&values[id], expected).map_err(|e| Verdict::Failed(format!("output {i}: {e}")))?;
    }
    inferred_shapes(graph, inputs, &values).map_err(Verdict::Failed)
}

/// Infers shapes from the types and shapes of the inputs alone; returns whether every shape was inferred.
fn inferred_shapes(
    graph: &Graph,
    inputs: &[Tensor],
    values: &HashMap<ValueId, Tensor>,
) -> Result<bool, String> {
    let mut graph = graph.clone();
    for value in &mut graph.values {
        (value.dtype, value.shape) = (None, None);
    }
    for (id, input) in graph.inputs.clone().into_iter().zip(inputs) {
        let value = graph.value_mut(id);
        value.dtype = Some(input.dtype());
        value.shape = Some(input.shape().iter().map(|d| sdrun_graph::Dim::Known(*d)).collect());
    }
    infer_shapes(&mut graph).map_err(|e| format!("inference: {e}"))?;
    let mut all_known = true;
    for (id, real) in values {
        let value = graph.value(*id);
        all_known &= value.known_shape().is_some();
        let dims_agree = value.shape.as_ref().is_none_or(|s| {
            s.len() == real.shape().len()
                && s.iter().zip(real.shape()).all(|(d, n)| d.known().is_none_or(|d| d == *n))
        });
        if value.dtype.is_some_and(|t| t != real.dtype()) || !dims_agree {
            return Err(format!("inferred {:?} {:?} for {real:?}", value.dtype, value.shape));
        }
    }
    Ok(all_known)
}

/// All `{kind}_*.pb` of a folder in order; `None` if one is not a tensor of a supported type.
fn tensors(folder: &Path, kind: &str) -> Option<Vec<Tensor>> {
    (0..)
        .map(|i| folder.join(format!("{kind}_{i}.pb")))
        .take_while(|p| p.exists())
        .map(|p| {
            let proto = TensorProto::decode(fs::read(p).ok()?.as_slice()).ok()?;
            let shape = proto.dims.iter().map(|d| *d as usize).collect();
            Tensor::new(DType::from_onnx(proto.data_type?)?, shape, proto.raw_data.unwrap_or_default()).ok()
        })
        .collect()
}

fn compare(actual: &Tensor, expected: &Tensor) -> Result<(), String> {
    if (actual.dtype(), actual.shape()) != (expected.dtype(), expected.shape()) {
        return Err(format!("{actual:?} instead of {expected:?}"));
    }
    let (rtol, atol) = match expected.dtype() {
        DType::F16 | DType::BF16 => (1e-2, 1e-2),
        _ => (1e-3, 1e-5),
    };
    let floats =
        |t: &Tensor| t.elements::<f64>().or_else(|| Some(t.to_f32s()?.into_iter().map(f64::from).collect()));
    let (Some(a), Some(e)) = (floats(actual), floats(expected)) else {
        let same = actual.data() == expected.data();
        return if same { Ok(()) } else { Err(format!("{actual:?} instead of {expected:?}")) };
    };
    let close =
        |a: f64, e: f64| a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= atol + rtol * e.abs();
    let wrong = a.iter().zip(&e).position(|(a, e)| !close(*a, *e));
    match wrong {
        None => Ok(()),
        Some(i) => Err(format!("element {i} of {:?} is {} instead of {}", expected.shape(), a[i], e[i])),
    }
}

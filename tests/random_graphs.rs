//! Random graphs of a few operators. Every provider must compute what the evaluator of `sdrun-graph` computes, or refuse the graph.
//!
//! `SDRUN_RANDOM_GRAPHS=FIRST..LAST` chooses the seeds. A difference names its seed and leaves the model in the temporary folder.

#![allow(clippy::unwrap_used)]

use sdrun::{
    HostTensor, Model, Tensors,
    abi::{DType, ErrorCode},
    graph::{
        ExternalBase, Graph, Tensor,
        proto::{AttributeProto, GraphProto},
    },
};
use sdrun_tests::{
    evaluator::evaluate,
    lab::{ALL, Lab, compute},
    onnx::{encoded, floats, int, ints, node, stored, text, typed},
    random::{Random, seeds},
};
use std::collections::BTreeMap;

/// Version of the operators.
const OPSET: i64 = 20;
/// Nodes of a graph.
const NODES: usize = 7;
/// The most elements of a value.
const MOST_ELEMENTS: usize = 4096;
/// The largest value; larger ones, infinite ones and NaN are compared elsewhere.
const LARGEST: f32 = 1e4;
/// The largest difference, of the largest value. The evaluator and the runtimes sum in different orders.
const TOLERANCE: f32 = 2e-4;

/// A graph that grows node by node. Each node is evaluated at once, so that invalid ones are left out.
struct Growing {
    random: Random,
    graph: GraphProto,
    inputs: Tensors,
    /// All values of f32 so far.
    values: BTreeMap<String, Tensor>,
    /// Those without rounding errors: discontinuous operators get only these.
    exact: Vec<String>,
}

impl Growing {
    fn new(seed: u64) -> Self {
        let mut growing = Growing {
            random: Random(seed),
            graph: GraphProto::default(),
            inputs: Tensors::new(),
            values: BTreeMap::new(),
            exact: Vec::new(),
        };
        let shapes: [&[usize]; 8] =
            [&[2, 3], &[5], &[1, 4, 6, 5], &[2, 3, 4], &[1, 8, 4, 4], &[3, 1, 2], &[2, 4, 5, 5], &[6, 8]];
        for number in 0..1 + growing.random.below(2) {
            let (name, shape) = (format!("x{number}"), growing.random.pick(&shapes));
            let values = growing.random.numbers(shape.iter().product());
            growing.graph.input.push(typed(&name, DType::F32, shape));
            growing.inputs.insert(name.clone(), HostTensor::from_f32(shape.to_vec(), &values).unwrap());
            growing.values.insert(name.clone(), Tensor::from_elements(shape.to_vec(), &values).unwrap());
            growing.exact.push(name);
        }
        growing
    }

    /// A new weight.
    fn weight(&mut self, shape: &[usize]) -> String {
        let name = format!("w{}", self.graph.initializer.len());
        let values = self.random.numbers(shape.iter().product());
        self.graph.initializer.push(floats(&name, shape, &values));
        name
    }

    /// New constants: sizes, axes, indices.
    fn integers(&mut self, values: &[i64]) -> String {
        let name = format!("c{}", self.graph.initializer.len());
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.graph.initializer.push(stored(&name, DType::I64, &[values.len()], bytes));
        name
    }

    /// Adds a node, unless it is not valid or its result is too large.
    fn add(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) {
        let name = format!("y{}", self.graph.node.len());
        self.graph.node.push(node(op, inputs, &name, attributes));
        match self.last_value() {
            Some(value) => drop(self.values.insert(name, value)),
            None => drop(self.graph.node.pop()),
        }
    }

    /// The value of the last node; `None` if it has none that can be compared.
    fn last_value(&self) -> Option<Tensor> {
        let mut graph = self.graph.clone();
        graph.output = vec![typed(&graph.node.last()?.output[0], DType::F32, &[])];
        // Its rank is not known yet.
        graph.output[0].r#type.as_mut()?.tensor_type.as_mut()?.shape = None;
        let graph =
            Graph::from_bytes(encoded(graph, OPSET).into(), "growing", ExternalBase::Stripped).ok()?;
        let values = evaluate(&graph, |name| self.values.get(name).cloned());
        let value = values?.remove(&graph.outputs[0])?;
        let fits = |v: &f32| v.is_finite() && v.abs() <= LARGEST;
        let fine = (1..=MOST_ELEMENTS).contains(&value.len()) && value.to_f32s()?.iter().all(fits);
        fine.then_some(value)
    }

    /// Adds a random node.
    fn grow(&mut self) {
        let names: Vec<String> = self.values.keys().cloned().collect();
        // Later values are more likely, so that graphs become deep.
        let at = self.random.below(names.len()).max(self.random.below(names.len()));
        let x = &*names[at];
        let shape = self.values[x].shape().to_vec();
        let rank = shape.len();
        let axis = self.random.within(-(rank as i64)..rank as i64);
        match self.random.below(26) {
            0 => {
                let smooth = [
                    "Relu",
                    "Neg",
                    "Abs",
                    "Tanh",
                    "Sigmoid",
                    "Erf",
                    "Softplus",
                    "Softsign",
                    "HardSwish",
                    "Elu",
                    "Selu",
                    "LeakyRelu",
                    "Gelu",
                    "Mish",
                    "Sin",
                    "Cos",
                    "Atan",
                    "HardSigmoid",
                    "Celu",
                    "ThresholdedRelu",
                ];
                let op = self.random.pick(&smooth);
                self.add(op, &[x], vec![]);
            }
            1 => {
                let exact = self.exact[self.random.below(self.exact.len())].clone();
                let op =
                    self.random.pick(&["Floor", "Ceil", "Round", "Sign", "Exp", "Sqrt", "Reciprocal", "Log"]);
                self.add(op, &[&exact], vec![]);
            }
            2 | 3 => {
                let op = self.random.pick(&["Add", "Sub", "Mul", "Div", "Min", "Max", "PRelu"]);
                let from = self.random.below(rank + 1);
                let other: Vec<usize> = shape[from..]
                    .iter()
                    .map(|size| if self.random.below(3) == 0 { 1 } else { *size })
                    .collect();
                let other = self.weight(&other);
                self.add(op, &[x, &other], vec![]);
            }
            4 => {
                let other = &*names[self.random.below(names.len())];
                let op = self.random.pick(&["Add", "Sub", "Mul", "Min", "Max", "Mean", "Sum"]);
                self.add(op, &[x, other], vec![]);
            }
            5 => {
                let order = self.random.order(rank);
                self.add("Transpose", &[x], vec![ints("perm", &order)]);
            }
            6 => {
                let mut sizes: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
                if rank > 1 && self.random.below(2) == 0 {
                    let at = self.random.below(rank - 1);
                    sizes[at] *= sizes.remove(at + 1);
                } else {
                    sizes.insert(self.random.below(rank + 1), 1);
                }
                let order = self.random.order(sizes.len());
                sizes = order.iter().map(|at| sizes[*at as usize]).collect();
                if self.random.below(3) == 0 {
                    let open = self.random.below(sizes.len());
                    sizes[open] = -1;
                }
                let sizes = self.integers(&sizes);
                self.add("Reshape", &[x, &sizes], vec![]);
            }
            7 if rank > 0 => {
                let inner = shape[rank - 1];
                let columns = 1 + self.random.below(9);
                let weight = self.weight(&[inner, columns]);
                self.add("MatMul", &[x, &weight], vec![]);
            }
            8 if rank == 2 => {
                let columns = 1 + self.random.below(7);
                let [a, b] = [self.random.below(2), self.random.below(2)];
                let inner = shape[1 - a];
                let weight = self.weight(&if b == 1 { [columns, inner] } else { [inner, columns] });
                let bias = self.weight(&[columns]);
                self.add(
                    "Gemm",
                    &[x, &weight, &bias],
                    vec![int("transA", a as i64), int("transB", b as i64)],
                );
            }
            9 | 10 if rank == 4 => {
                let groups = self.random.pick(&[1, 1, 2, shape[1]]);
                if !shape[1].is_multiple_of(groups) {
                    return;
                }
                let [high, wide] = [0, 0].map(|_: i32| 1 + self.random.below(3));
                let channels = groups * (1 + self.random.below(3));
                let weight = self.weight(&[channels, shape[1] / groups, high, wide]);
                let bias = self.weight(&[channels]);
                let mut attributes = vec![int("group", groups as i64)];
                attributes.push(ints("pads", &[0; 4].map(|_: i64| self.random.within(0..3))));
                attributes.push(ints("strides", &[0; 2].map(|_: i64| self.random.within(1..3))));
                attributes.push(ints("dilations", &[0; 2].map(|_: i64| self.random.within(1..3))));
                self.add("Conv", &[x, &weight, &bias], attributes);
            }
            11 if rank == 4 => {
                let channels = 1 + self.random.below(3);
                let [high, wide] = [0, 0].map(|_: i32| 1 + self.random.below(3));
                let weight = self.weight(&[shape[1], channels, high, wide]);
                let mut attributes = vec![ints("pads", &[0; 4].map(|_: i64| self.random.within(0..2)))];
                attributes.push(ints("strides", &[0; 2].map(|_: i64| self.random.within(1..3))));
                self.add("ConvTranspose", &[x, &weight], attributes);
            }
            12 if rank == 4 => {
                let op = self.random.pick(&["MaxPool", "AveragePool"]);
                let size = [0; 2].map(|_: i64| self.random.within(1..4));
                let mut attributes = vec![ints("kernel_shape", &size)];
                attributes.push(ints("strides", &[0; 2].map(|_: i64| self.random.within(1..3))));
                // A window that holds only padding has no value.
                let pads = [0, 1, 0, 1].map(|axis: usize| self.random.within(0..size[axis].min(2)));
                attributes.push(ints("pads", &pads));
                if op == "AveragePool" {
                    attributes.push(int("count_include_pad", self.random.within(0..2)));
                }
                self.add(op, &[x], attributes);
            }
            13 if rank == 4 => {
                let op = self.random.pick(&["GlobalAveragePool", "GlobalMaxPool"]);
                self.add(op, &[x], vec![]);
            }
            14 if rank > 0 => {
                let scale = self.weight(&shape[rank - 1..]);
                let bias = self.weight(&shape[rank - 1..]);
                self.add("LayerNormalization", &[x, &scale, &bias], vec![int("axis", -1)]);
            }
            // Of a few elements, the variance may be nothing but rounding errors.
            15 if rank >= 3 && shape[2..].iter().product::<usize>() >= 8 => {
                let [scale, bias] = [0, 0].map(|_: i32| self.weight(&shape[1..2]));
                self.add("InstanceNormalization", &[x, &scale, &bias], vec![]);
            }
            16 if rank > 0 => {
                let op = self.random.pick(&["Softmax", "LogSoftmax"]);
                self.add(op, &[x], vec![int("axis", axis)]);
            }
            17 if rank > 0 => {
                let op = self.random.pick(&[
                    "ReduceMean",
                    "ReduceSum",
                    "ReduceMax",
                    "ReduceMin",
                    "ReduceL2",
                    "ReduceSumSquare",
                ]);
                let axes: Vec<i64> = (0..rank as i64).filter(|_| self.random.below(2) == 0).collect();
                let keep = int("keepdims", self.random.within(0..2));
                if axes.is_empty() {
                    self.add(op, &[x], vec![keep]);
                } else {
                    let axes = self.integers(&axes);
                    self.add(op, &[x, &axes], vec![keep]);
                }
            }
            18 if rank > 0 => {
                let mut other = shape.clone();
                other[axis.rem_euclid(rank as i64) as usize] = 1 + self.random.below(3);
                let other = self.weight(&other);
                let order = if self.random.below(2) == 0 { [x, &other] } else { [&other, x] };
                self.add("Concat", &order, vec![int("axis", axis)]);
            }
            19 if rank > 0 => {
                let size = shape[axis.rem_euclid(rank as i64) as usize] as i64;
                let step: i64 = self.random.pick(&[1, 1, 2, -1, -2]);
                let [from, to] = if step > 0 { [0, size] } else { [size - 1, -size - 1] };
                let from = from + step.signum() * self.random.within(0..size.min(2));
                let parts = [from, to, axis, step].map(|value| self.integers(&[value]));
                self.add("Slice", &[x, &parts[0], &parts[1], &parts[2], &parts[3]], vec![]);
            }
            20 if rank > 0 => {
                let mode = self.random.pick(&["constant", "edge", "reflect"]);
                // A single element has nothing to reflect.
                let most = |at: usize| if mode == "reflect" && shape[at % rank] < 2 { 1 } else { 2 };
                let pads: Vec<i64> = (0..2 * rank).map(|at| self.random.within(0..most(at))).collect();
                let pads = self.integers(&pads);
                self.add("Pad", &[x, &pads], vec![text("mode", mode)]);
            }
            21 if rank > 0 => {
                let size = shape[axis.rem_euclid(rank as i64) as usize] as i64;
                let count = 1 + self.random.below(4);
                let indices: Vec<i64> = (0..count).map(|_| self.random.within(-size..size)).collect();
                let indices = self.integers(&indices);
                self.add("Gather", &[x, &indices], vec![int("axis", axis)]);
            }
            22 => {
                let repeats: Vec<i64> = (0..rank).map(|_| self.random.within(1..3)).collect();
                let repeats = self.integers(&repeats);
                self.add("Tile", &[x, &repeats], vec![]);
            }
            23 if rank == 4 => {
                let op = self.random.pick(&["DepthToSpace", "SpaceToDepth"]);
                self.add(op, &[x], vec![int("blocksize", 2)]);
            }
            24 if rank == 4 => {
                let mode = self.random.pick(&["nearest", "linear"]);
                let scales = format!("s{}", self.graph.initializer.len());
                let factor = self.random.pick(&[2.0, 2.0, 3.0, 0.5]);
                self.graph.initializer.push(floats(&scales, &[4], &[1.0, 1.0, factor, factor]));
                let mut attributes = vec![text("mode", mode)];
                if mode == "nearest" {
                    attributes.push(text("coordinate_transformation_mode", "asymmetric"));
                    attributes.push(text("nearest_mode", "floor"));
                }
                self.add("Resize", &[x, "", &scales], attributes);
            }
            25 => {
                let condition = format!("b{}", self.graph.initializer.len());
                let bytes: Vec<u8> = shape.iter().product::<usize>().to_le_bytes().to_vec();
                let flags =
                    (0..shape.iter().product()).map(|i: usize| bytes[i % 8] ^ (i as u8) & 1).map(|b| b & 1);
                self.graph.initializer.push(stored(&condition, DType::Bool, &shape, flags.collect()));
                let other = self.weight(&shape);
                self.add("Where", &[&condition, x, &other], vec![]);
            }
            _ => {}
        }
    }
}

/// A random model, its inputs, and what it computes.
fn grown(seed: u64) -> Option<(Vec<u8>, Tensors, BTreeMap<String, Tensor>)> {
    let mut growing = Growing::new(seed);
    let mut tries = 0;
    while growing.graph.node.len() < NODES && tries < 60 {
        growing.grow();
        tries += 1;
    }
    let last = growing.graph.node.last()?.output[0].clone();
    // A second output, so that a runtime cannot fuse all nodes into one.
    let other = growing.graph.node[growing.random.below(growing.graph.node.len())].output[0].clone();
    let mut outputs = BTreeMap::new();
    for name in [last, other] {
        if outputs.contains_key(&name) {
            continue;
        }
        let value = growing.values.get(&name)?.clone();
        growing.graph.output.push(typed(&name, DType::F32, value.shape()));
        outputs.insert(name, value);
    }
    // Weights of nodes that were left out.
    let used: Vec<String> = growing.graph.node.iter().flat_map(|node| node.input.clone()).collect();
    growing.graph.initializer.retain(|weight| used.iter().any(|name| name == weight.name()));
    growing.graph.input.retain(|input| used.iter().any(|name| name == input.name()));
    growing.inputs.retain(|name, _| used.contains(name));
    Some((encoded(growing.graph, OPSET), growing.inputs, outputs))
}

#[test]
fn every_provider_computes_random_graphs() {
    let seeds = seeds("SDRUN_RANDOM_GRAPHS", 0..60);
    let lab = Lab::default();
    let folder = tempfile::tempdir().unwrap().keep();
    let mut problems = Vec::new();
    for id in ALL.iter().copied() {
        let mut provider = lab.open(id).unwrap();
        let (mut computed, mut refused) = (0u64, 0u64);
        for seed in seeds.clone() {
            let Some((bytes, inputs, expected)) = grown(seed) else { continue };
            let file = folder.join(format!("{seed}.onnx"));
            std::fs::write(&file, bytes).unwrap();
            let found = Model::open(&file).and_then(|model| compute(&provider, &model, &inputs));
            if provider.has_ended() {
                provider = lab.open(id).unwrap();
            }
            let found = match found {
                Ok(found) => found,
                Err(error) if error.code() == ErrorCode::Unimplemented => {
                    refused += 1;
                    continue;
                }
                Err(error) => {
                    problems.push(format!("{id}, seed {seed}: {error}"));
                    continue;
                }
            };
            computed += 1;
            for (name, expected) in expected {
                let expected = expected.to_f32s().unwrap();
                let found: Vec<f32> =
                    found[&name].bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                let largest = expected.iter().fold(1f32, |most, v| most.max(v.abs()));
                let worst = found.iter().zip(&expected).map(|(f, e)| (f - e).abs());
                let worst = worst.fold(0f32, |most, v| if v.is_nan() { f32::INFINITY } else { most.max(v) });
                if found.len() != expected.len() || worst > TOLERANCE * largest {
                    problems.push(format!("{id}, seed {seed}: {name} is off by {worst} of {largest}"));
                }
            }
        }
        println!("{id}: {computed} graphs computed, {refused} refused");
        assert!(computed > 4 * refused, "{id} refuses {refused} graphs and computes {computed}");
    }
    assert!(problems.is_empty(), "models in {}:\n{}", folder.display(), problems.join("\n"));
    std::fs::remove_dir_all(folder).unwrap();
}

use crate::{Graph, Node, ValueId};

/// A set of values.
struct Marks(Vec<bool>);

impl Marks {
    fn new<'a>(graph: &Graph, ids: impl IntoIterator<Item = &'a ValueId>) -> Self {
        let mut marks = Marks(vec![false; graph.values.len()]);
        ids.into_iter().for_each(|id| marks.set(*id, true));
        marks
    }
    fn set(&mut self, id: ValueId, is: bool) {
        self.0[id.0 as usize] = is;
    }
    fn has(&self, id: ValueId) -> bool {
        self.0[id.0 as usize]
    }
}

/// Removes nodes that return their first input unchanged: `Identity`, `Dropout` outside training, casts to the same
/// type, and reshapes, transposes, slices, … with no effect. Shapes must be inferred. Returns the number of removed
/// nodes.
pub fn eliminate_identity(graph: &mut Graph) -> usize {
    let captured = Marks::new(graph, graph.captures().values().flatten());
    let inputs = graph.nodes.iter().flat_map(|node| node.inputs.iter().flatten());
    let used = Marks::new(graph, inputs.chain(&graph.outputs));
    let mut by_node = Marks::new(graph, []);
    let mut outputs = Marks::new(graph, &graph.outputs);
    let mut source: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).collect();

    let nodes = std::mem::take(&mut graph.nodes);
    let before = nodes.len();
    for mut node in nodes {
        for id in node.inputs.iter_mut().flatten() {
            *id = source[id.0 as usize];
        }
        let handed_on = node.input(0).zip(node.output(0)).filter(|(_, to)| {
            // A used second output (a mask) keeps the node. Bodies refer to values by name, so captured values keep
            // theirs.
            let wanted = |id: &ValueId| used.has(*id) || captured.has(*id);
            !captured.has(*to) && !node.outputs[1..].iter().flatten().any(wanted)
        });
        match handed_on.filter(|(from, _)| changes_nothing(graph, &node, *from)) {
            Some((from, to)) if !outputs.has(to) => source[to.0 as usize] = from,
            // The producer takes the name of the graph output.
            Some((from, to)) if by_node.has(from) && !outputs.has(from) && !captured.has(from) => {
                take_over(graph, from, to);
                outputs.set(to, false);
                outputs.set(from, true);
                source[to.0 as usize] = from;
            }
            _ => {
                node.outputs.iter().flatten().for_each(|id| by_node.set(*id, true));
                graph.nodes.push(node);
            }
        }
    }
    before - graph.nodes.len()
}

/// Makes `from` a graph output in place of `to`.
fn take_over(graph: &mut Graph, from: ValueId, to: ValueId) {
    let (to_name, from_name) = (graph.value(to).name.clone(), graph.value(from).name.clone());
    let declared = graph.value(to).shape.clone();
    graph.value_mut(to).name = from_name;
    let value = graph.value_mut(from);
    value.name = to_name;
    value.shape = value.shape.take().or(declared);
    for output in graph.outputs.iter_mut().filter(|id| **id == to) {
        *output = from;
    }
}

/// Whether output 0 of the node always equals its input 0, which is `from`.
fn changes_nothing(graph: &Graph, node: &Node, from: ValueId) -> bool {
    let (input, output) = (graph.value(from), node.output(0).map(|id| graph.value(id)));
    let same_shape = || {
        let known = input.known_shape();
        known.is_some() && known == output.and_then(|value| value.known_shape())
    };
    let all = |slot: usize, wanted: i64| match node.input(slot) {
        Some(id) => {
            graph.constant(id).and_then(|t| t.to_few_i64s()).is_some_and(|v| v.iter().all(|v| *v == wanted))
        }
        None => true,
    };
    if !node.domain.is_empty() {
        return false;
    }
    match &*node.op_type {
        "Identity" => true,
        // Before opset 12 the mode is not part of the graph, and every runtime runs inference. Since then, an absent
        // training_mode means false.
        "Dropout" => all(2, 0),
        "Cast" | "CastLike" => input.dtype.is_some() && input.dtype == output.and_then(|value| value.dtype),
        "Reshape" | "Flatten" | "Squeeze" | "Expand" | "Tile" => same_shape(),
        "Transpose" => {
            node.ints("perm").is_some_and(|perm| perm.iter().enumerate().all(|(i, p)| i as i64 == *p))
        }
        // Steps are input 4 since opset 10; earlier versions have none.
        "Slice" => same_shape() && all(4, 1),
        // Negative pads crop, so equal shapes are not enough. The pads are an attribute before opset 11.
        "Pad" => {
            same_shape()
                && match node.ints("pads") {
                    Some(pads) => pads.iter().all(|p| *p == 0),
                    None => node.input(1).is_some() && all(1, 0),
                }
        }
        "Concat" | "Sum" | "Mean" | "Max" | "Min" => node.inputs.len() == 1,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, Tensor,
        infer::infer_shapes,
        proto::GraphProto,
        testing::{Model, model, node, value},
    };
    use sdrun_abi::DType;

    fn run(file: Model) -> Graph {
        let mut graph = file.graph();
        infer_shapes(&mut graph).unwrap();
        let before = graph.nodes.len();
        let gone = eliminate_identity(&mut graph);
        assert_eq!(gone, before - graph.nodes.len());
        graph
    }

    fn listing(graph: &Graph) -> Vec<String> {
        let name = |id: Option<ValueId>| id.map_or("", |id| graph.value(id).name.as_str());
        let line = |n: &Node| format!("{} {} {}", n.op_type, name(n.input(0)), name(n.output(0)));
        graph.nodes.iter().map(line).collect()
    }

    /// Whether a node on x [1, 2, 3] (f32) is removed; its other inputs are `i64s`.
    fn removed<const N: usize>(
        opset: i64,
        op: &str,
        i64s: &[&[i64]],
        attributes: [(&str, Attribute); N],
    ) -> bool {
        let mut file = model(opset).input("x", DType::F32, "1 2 3").node("Exp", &["x"], &["e"]);
        let names: Vec<String> = (0..i64s.len()).map(|i| format!("c{i}")).collect();
        for (name, values) in names.iter().zip(i64s) {
            file = file.initializer(name, &Tensor::from_i64s(values));
        }
        let mut inputs = vec!["e"];
        inputs.extend(names.iter().map(String::as_str));
        file = file.node_with(op, &inputs, &["o"], attributes).node("Log", &["o"], &["y"]).output("y", "?");
        match listing(&run(file)).as_slice() {
            [_, log] if log == "Log e y" => true,
            [_, _, log] if log == "Log o y" => false,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nodes_without_effect_are_removed_and_others_stay() {
        assert!(removed(17, "Identity", &[], []));
        assert!(removed(17, "Reshape", &[&[1, 2, 3]], []));
        assert!(removed(17, "Reshape", &[&[0, -1, 3]], []));
        assert!(!removed(17, "Reshape", &[&[2, 3]], []));
        assert!(removed(17, "Expand", &[&[2, 3]], []));
        assert!(!removed(17, "Expand", &[&[2, 2, 3]], []));
        assert!(removed(17, "Tile", &[&[1, 1, 1]], []));
        assert!(!removed(17, "Tile", &[&[1, 2, 1]], []));
        assert!(removed(17, "Cast", &[], [("to", Attribute::Int(1))]));
        assert!(!removed(17, "Cast", &[], [("to", Attribute::Int(10))]));
        assert!(removed(17, "Transpose", &[], [("perm", Attribute::Ints(vec![0, 1, 2]))]));
        assert!(!removed(17, "Transpose", &[], [("perm", Attribute::Ints(vec![1, 0, 2]))]));
        assert!(!removed(17, "Transpose", &[], []));
        assert!(removed(17, "Slice", &[&[0], &[9], &[1], &[1]], []));
        assert!(removed(17, "Slice", &[&[0], &[9]], []));
        assert!(!removed(17, "Slice", &[&[0], &[1], &[1]], []));
        assert!(!removed(17, "Slice", &[&[-1], &[-9], &[1], &[-1]], []), "it reverses");
        assert!(removed(
            9,
            "Slice",
            &[],
            [("starts", Attribute::Ints(vec![0])), ("ends", Attribute::Ints(vec![9]))]
        ));
        assert!(removed(17, "Pad", &[&[0; 6]], []));
        assert!(!removed(17, "Pad", &[&[0, 1, 0, 0, -1, 0]], []), "it shifts");
        assert!(removed(9, "Pad", &[], [("pads", Attribute::Ints(vec![0; 6]))]));
        assert!(!removed(9, "Pad", &[], [("pads", Attribute::Ints(vec![0, 1, 0, 0, -1, 0]))]));
        assert!(removed(17, "Concat", &[], [("axis", Attribute::Int(0))]));
        assert!(removed(17, "Max", &[], []));
        assert!(!removed(17, "Neg", &[], []));
    }

    #[test]
    fn dropout_is_removed_unless_it_trains_or_its_mask_is_used() {
        let dropout = |opset: i64, training: Option<bool>, mask: bool| {
            let mut file = model(opset).input("x", DType::F32, "2").node("Exp", &["x"], &["e"]);
            let mut inputs = vec!["e"];
            if let Some(training) = training {
                file = file.initializer("mode", &Tensor::scalar(training));
                inputs.extend(["", "mode"]);
            }
            file = file.node("Dropout", &inputs, &["o", "m"]).node("Log", &["o"], &["y"]).output("y", "2");
            if mask {
                file = file.node("Not", &["m"], &["n"]).output("n", "2");
                file.graph_mut().output[1] = value("n", DType::Bool, "2");
            }
            !run(file).nodes.iter().any(|n| n.op_type == "Dropout")
        };
        assert!(dropout(7, None, false) && dropout(12, None, false) && dropout(13, Some(false), false));
        assert!(!dropout(13, Some(true), false) && !dropout(12, None, true));
    }

    #[test]
    fn outputs_of_the_graph_keep_their_names() {
        let file = model(17)
            .input("x", DType::F32, "2")
            .node("Exp", &["x"], &["e"])
            .node("Identity", &["e"], &["y"])
            .node("Neg", &["e"], &["n"])
            .node("Abs", &["y"], &["a"])
            .node("Identity", &["y"], &["second"])
            .node("Identity", &["x"], &["of_input"])
            .output("y", "2")
            .output("n", "2")
            .output("a", "2")
            .output("second", "2")
            .output("of_input", "2");
        let graph = run(file);
        assert_eq!(
            listing(&graph),
            ["Exp x y", "Neg y n", "Abs y a", "Identity y second", "Identity x of_input"]
        );
        let outputs: Vec<_> = graph.outputs.iter().map(|id| graph.value(*id).name.as_str()).collect();
        assert_eq!(outputs, ["y", "n", "a", "second", "of_input"]);
    }

    #[test]
    fn values_that_bodies_capture_keep_their_names() {
        let body = Attribute::Graph(Box::new(GraphProto {
            node: vec![node("Neg", &["i"], &["inner"])],
            output: vec![value("inner", DType::F32, "2")],
            ..Default::default()
        }));
        let file = model(17)
            .input("x", DType::F32, "2")
            .input("c", DType::Bool, "")
            .node("Identity", &["x"], &["i"])
            .node_with("If", &["c"], &["y"], [("then_branch", body.clone()), ("else_branch", body)])
            .output("y", "2");
        assert_eq!(listing(&run(file)), ["Identity x i", "If c y"]);
    }
}

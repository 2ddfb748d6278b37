//! Inference on small graphs. The kernels' robustness test and ONNX's node tests check that the rules agree with the
//! operators.

use super::{Fact, PartialInt, infer_shapes, node_outputs};
use crate::testing::{Model, model, ramp};
use crate::{Attribute, Dim, Graph, Node, Tensor, ValueId};
use sdrun_abi::DType::{self, F16, F32, I64};

/// The shape inferred for `name`, as text.
fn inferred(model: &Model, name: &str) -> String {
    let mut graph = model.graph();
    infer_shapes(&mut graph).unwrap();
    shape_of(&graph, name)
}

fn shape_of(graph: &Graph, name: &str) -> String {
    let value = graph.values.iter().find(|v| v.name == name).unwrap();
    format!("{:?} {}", value.dtype.unwrap(), value.shape.as_deref().map_or("?".into(), super::dims::text))
}

fn error(model: &Model) -> String {
    infer_shapes(&mut model.graph()).unwrap_err().to_string()
}

fn ints(values: &[i64]) -> Tensor {
    Tensor::from_i64s(values)
}

/// Exporters produce this from `x.view(x.shape[0], -1, x.shape[1] // 2)`.
fn view(dims: &str) -> Model {
    let parts = ["batch", "minus_one", "half"];
    model(17)
        .input("x", F32, dims)
        .initializer("zero", &Tensor::scalar(0i64))
        .initializer("one", &Tensor::scalar(1i64))
        .initializer("two", &Tensor::scalar(2i64))
        .initializer("first", &ints(&[0]))
        .initializer("minus_one", &ints(&[-1]))
        .node("Shape", &["x"], &["shape"])
        .node("Gather", &["shape", "zero"], &["b"])
        .node("Gather", &["shape", "one"], &["c"])
        .node("Div", &["c", "two"], &["h"])
        .node("Unsqueeze", &["b", "first"], &["batch"])
        .node("Unsqueeze", &["h", "first"], &["half"])
        .node_with("Concat", &parts, &["target"], [("axis", Attribute::Int(0))])
        .node("Reshape", &["x", "target"], &["y"])
        .output("y", "? ? ?")
}

#[test]
fn shape_arithmetic_resolves_numbers_and_carries_names() {
    assert_eq!(inferred(&view("2 8 3"), "y"), "F32 [2, 6, 4]");
    // The name survives. The remaining dimension is 8 * 3 / 4.
    assert_eq!(inferred(&view("batch 8 3"), "y"), "F32 [batch, 6, 4]");
    // Half of an open dimension is not tracked: only the rank of the shape is known.
    assert_eq!(inferred(&view("2 channels 3"), "y"), "F32 [?, ?, ?]");
}

#[test]
fn names_survive_operators_that_preserve_sizes() {
    let conv = [("pads", Attribute::Ints(vec![1, 1, 1, 1]))];
    let m = model(17)
        .input("x", F32, "n 4 height width")
        .initializer("w", &ramp(&[8, 4, 3, 3]))
        .node_with("Conv", &["x", "w"], &["c"], conv)
        .node("Relu", &["c"], &["r"])
        .node_with("Transpose", &["r"], &["y"], [("perm", Attribute::Ints(vec![0, 2, 3, 1]))])
        .output("y", "? ? ? ?");
    assert_eq!(inferred(&m, "y"), "F32 [n, height, width, 8]");
}

#[test]
fn expand_chooses_by_comparing_names_with_minus_one() {
    // `Where(shape == -1, 1, shape)`, the form in which exporters write `expand`.
    let m = model(17)
        .input("x", F32, "1 3")
        .input("like", F32, "batch 3")
        .initializer("minus_one", &ints(&[-1]))
        .initializer("ones", &ints(&[1, 1]))
        .node("Shape", &["like"], &["shape"])
        .node("Equal", &["shape", "minus_one"], &["open"])
        .node("Where", &["open", "ones", "shape"], &["target"])
        .node("Expand", &["x", "target"], &["y"])
        .output("y", "? ?");
    assert_eq!(inferred(&m, "y"), "F32 [batch, 3]");
}

#[test]
fn inference_replaces_declarations_and_keeps_what_it_cannot_know() {
    let mut graph = model(17)
        .input("x", F32, "4")
        .input("flags", DType::Bool, "4")
        .node("Compress", &["x", "flags"], &["some"])
        .node("Relu", &["x"], &["y"])
        .output("some", "kept")
        .output("y", "wrong")
        .graph();
    infer_shapes(&mut graph).unwrap();
    assert_eq!(shape_of(&graph, "some"), "F32 [kept]");
    assert_eq!(shape_of(&graph, "y"), "F32 [4]");
}

#[test]
fn unknown_operators_leave_their_outputs_alone() {
    let m = model(17)
        .input("x", F32, "4")
        .node("Mystery", &["x"], &["m"])
        .node("Relu", &["m"], &["y"])
        .output("y", "2 2");
    assert_eq!(inferred(&m, "y"), "F32 [2, 2]");
}

#[test]
fn contradictions_name_the_node() {
    let m = model(17).input("a", F32, "2 3").input("b", F32, "4 5").output("y", "? ?");
    let e = error(&m.clone().node("MatMul", &["a", "b"], &["y"]));
    assert!(e.contains("MatMul") && e.contains("\"y\"") && e.contains("[2, 3] and [4, 5]"), "{e}");
    let e = error(&m.clone().node("Add", &["a", "b"], &["y"]));
    assert!(e.contains("do not broadcast"), "{e}");
    let e = error(&m.clone().node("Add", &["a"], &["y"]));
    assert!(e.contains("required input 1 is missing"), "{e}");
    let e = error(&m.clone().input("h", F16, "2 3").node("Mul", &["a", "h"], &["y"]));
    assert!(e.contains("f16, not f32"), "{e}");
    let e = error(&m.initializer("t", &ints(&[7])).node("Reshape", &["a", "t"], &["y"]));
    assert!(e.contains("[2, 3] cannot take the shape [7]"), "{e}");
}

/// Output shapes of one node for the given input shapes (`Err`: refused).
fn shapes_of(
    op: &str,
    opset: i64,
    attributes: &[(&str, Attribute)],
    inputs: &[Fact],
) -> Result<String, String> {
    let node = Node {
        name: "n".into(),
        domain: String::new(),
        op_type: op.into(),
        inputs: vec![],
        outputs: vec![Some(ValueId(0))],
        attributes: attributes.iter().map(|(n, a)| (n.to_string(), a.clone())).collect(),
        metadata: Default::default(),
    };
    let inputs: Vec<Option<Fact>> = inputs.iter().cloned().map(Some).collect();
    let facts = node_outputs(&node, opset, &inputs).map_err(|e| e.to_string())?.unwrap();
    Ok(facts[0].shape.as_deref().map_or("?".into(), super::dims::text))
}

fn f32s(shape: &[usize]) -> Fact {
    Fact::new(Some(F32), Some(super::dims::known(shape)))
}

#[test]
fn operators_of_every_family() {
    let x = f32s(&[2, 8, 6, 6]);
    let int = |n: &'static str, v| (n, Attribute::Int(v));
    let list = |n: &'static str, v: &[i64]| (n, Attribute::Ints(v.to_vec()));
    let constant = |v: &[i64]| Fact::constant(ints(v));
    let all = |op, opset, attributes: &[(&str, Attribute)], rest: &[Fact]| {
        shapes_of(op, opset, attributes, &[std::slice::from_ref(&x), rest].concat()).unwrap()
    };
    assert_eq!(
        all("MaxPool", 17, &[list("kernel_shape", &[3, 3]), list("strides", &[2, 2])], &[]),
        "[2, 8, 2, 2]"
    );
    let pool = [list("kernel_shape", &[3, 3]), list("strides", &[2, 2]), int("ceil_mode", 1)];
    assert_eq!(all("MaxPool", 17, &pool, &[]), "[2, 8, 3, 3]");
    let same = [list("kernel_shape", &[2, 2]), ("auto_pad", Attribute::String(b"SAME_LOWER".to_vec()))];
    assert_eq!(all("AveragePool", 17, &same, &[]), "[2, 8, 6, 6]");
    assert_eq!(
        all("ConvTranspose", 17, &[list("strides", &[2, 2])], &[f32s(&[8, 4, 2, 2])]),
        "[2, 4, 12, 12]"
    );
    assert_eq!(all("ReduceMean", 17, &[list("axes", &[2, -1]), int("keepdims", 0)], &[]), "[2, 8]");
    assert_eq!(all("ReduceMean", 18, &[], &[constant(&[1])]), "[2, 1, 6, 6]");
    assert_eq!(all("Pad", 17, &[], &[constant(&[0, 0, 1, 1, 0, 0, 2, -1])]), "[2, 8, 9, 6]");
    assert_eq!(
        all("Slice", 17, &[], &[constant(&[0]), constant(&[-1]), constant(&[3]), constant(&[2])]),
        "[2, 8, 6, 3]"
    );
    assert_eq!(all("Unsqueeze", 12, &[list("axes", &[0, -1])], &[]), "[1, 2, 8, 6, 6, 1]");
    assert_eq!(all("Squeeze", 17, &[], &[]), "[2, 8, 6, 6]");
    assert_eq!(all("Flatten", 17, &[int("axis", 2)], &[]), "[16, 36]");
    assert_eq!(all("DepthToSpace", 17, &[int("blocksize", 2)], &[]), "[2, 2, 12, 12]");
    assert_eq!(all("TopK", 17, &[int("axis", 1)], &[constant(&[3])]), "[2, 3, 6, 6]");
    assert_eq!(
        all("Gather", 17, &[int("axis", 1)], &[Fact::new(Some(I64), Some(super::dims::known(&[5, 3])))]),
        "[2, 5, 3, 6, 6]"
    );
    assert_eq!(all("NonZero", 17, &[], &[]), "[4, ?]");
    let equation = ("equation", Attribute::String(b"bchw,hd->bdc".to_vec()));
    assert_eq!(all("Einsum", 17, &[equation], &[f32s(&[6, 7])]), "[2, 7, 8]");
    assert_eq!(
        all("GroupNormalization", 21, &[int("num_groups", 4)], &[f32s(&[8]), f32s(&[8])]),
        "[2, 8, 6, 6]"
    );
    assert!(
        shapes_of("GroupNormalization", 18, &[int("num_groups", 4)], &[x.clone(), f32s(&[8]), f32s(&[8])])
            .is_err()
    );
    assert!(shapes_of("Conv", 17, &[], &[x.clone(), f32s(&[4, 5, 3, 3])]).is_err());
    assert!(shapes_of("Transpose", 17, &[list("perm", &[0, 0, 1, 2])], std::slice::from_ref(&x)).is_err());
}

#[test]
fn resizing_by_scales_and_sizes() {
    let x = Fact::new(
        Some(F32),
        Some(vec![Dim::Symbol("n".into()), Dim::Known(4), Dim::Known(5), Dim::Known(10)]),
    );
    let scales = Fact::constant(Tensor::from_elements(vec![4], &[1.0f32, 1.0, 2.0, 0.5]).unwrap());
    let empty = Fact::constant(Tensor::from_elements::<f32>(vec![0], &[]).unwrap());
    assert_eq!(shapes_of("Resize", 13, &[], &[x.clone(), empty.clone(), scales]).unwrap(), "[n, 4, 10, 5]");
    let sizes = Fact::constant(ints(&[20, 20]));
    let attributes = [
        ("axes", Attribute::Ints(vec![2, 3])),
        ("keep_aspect_ratio_policy", Attribute::String(b"not_larger".to_vec())),
    ];
    assert_eq!(
        shapes_of("Resize", 18, &attributes, &[x, empty.clone(), empty, sizes]).unwrap(),
        "[n, 4, 10, 20]"
    );
}

#[test]
fn attention_of_three_and_four_dimensions() {
    let heads = [("q_num_heads", Attribute::Int(4)), ("kv_num_heads", Attribute::Int(2))];
    let (q, kv) = (f32s(&[1, 5, 32]), f32s(&[1, 7, 16]));
    assert_eq!(
        shapes_of("Attention", 23, &heads, &[q.clone(), kv.clone(), kv.clone()]).unwrap(),
        "[1, 5, 32]"
    );
    let e = shapes_of("Attention", 23, &[], &[q, kv.clone(), kv]).unwrap_err();
    assert!(e.contains("q_num_heads is missing"), "{e}");
    let q = f32s(&[2, 4, 5, 8]);
    assert_eq!(
        shapes_of("Attention", 23, &[], &[q.clone(), q.clone(), f32s(&[2, 4, 5, 3])]).unwrap(),
        "[2, 4, 5, 3]"
    );
}

#[test]
fn shapes_of_open_tensors_are_partially_known() {
    let node = Node {
        name: String::new(),
        domain: String::new(),
        op_type: "Shape".into(),
        inputs: vec![],
        outputs: vec![Some(ValueId(0))],
        attributes: Default::default(),
        metadata: Default::default(),
    };
    let x = Fact::new(Some(F32), Some(vec![Dim::Symbol("n".into()), Dim::Known(4), Dim::Unknown]));
    let facts = node_outputs(&node, 17, &[Some(x)]).unwrap().unwrap();
    let expected = [PartialInt::Symbol("n".into()), PartialInt::Known(4), PartialInt::Unknown];
    assert_eq!(facts[0].elements.as_deref(), Some(&expected[..]));
}

use super::*;
use crate::{
    ExternalBase, OpenDims, Placement, Tensor, simplify,
    testing::{Model, model, ramp, run},
};

/// Fills in the weights of `original` with the types that `converted` wants, then writes and reads the graph.
fn filled(original: &Graph, converted: &Graph) -> Graph {
    let bytes = converted.to_onnx(|name, weight| {
        let (_, source) = original.weights().find(|(n, _)| *n == name).unwrap();
        let tensor = Tensor::new(source.dtype, source.shape.clone(), source.read(name)?)?;
        Ok(Placement::Inline(tensor.to_float_type(weight.dtype).unwrap().data().clone()))
    });
    Graph::from_bytes(bytes.unwrap().into(), "converted", ExternalBase::Stripped).unwrap()
}

fn inferred(model: &Model) -> Graph {
    let mut graph = model.graph();
    simplify(&mut graph, &BTreeMap::new(), OpenDims::Allow).unwrap();
    graph
}

fn dtype_of(graph: &Graph, name: &str) -> DType {
    graph.values.iter().find(|v| v.name == name).unwrap().dtype.unwrap()
}

/// A linear layer, a layer norm decomposed as exporters do, and a softmax.
fn block() -> Model {
    let noise = |shape: &[usize]| {
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0).collect();
        Tensor::from_elements(shape.to_vec(), &values).unwrap()
    };
    model(17)
        .input("x", DType::F32, "2 8")
        .initializer("w", &noise(&[8, 8]))
        .initializer("gamma", &noise(&[8]))
        .initializer("two", &Tensor::scalar(2f32))
        .initializer("eps", &Tensor::scalar(1e-5f32))
        .node("MatMul", &["x", "w"], &["h"])
        .node_with("ReduceMean", &["h"], &["mean"], [("axes", Attribute::Ints(vec![-1]))])
        .node("Sub", &["h", "mean"], &["centred"])
        .node("Pow", &["centred", "two"], &["squared"])
        .node_with("ReduceMean", &["squared"], &["variance"], [("axes", Attribute::Ints(vec![-1]))])
        .node("Add", &["variance", "eps"], &["plus"])
        .node("Sqrt", &["plus"], &["deviation"])
        .node("Div", &["centred", "deviation"], &["normed"])
        .node("Mul", &["normed", "gamma"], &["scaled"])
        .node("Softmax", &["scaled"], &["p"])
        .node("MatMul", &["p", "w"], &["y"])
        .output("y", "2 8")
}

#[test]
fn norms_and_softmax_stay_in_f32() {
    let original = inferred(&block());
    for to in [DType::F16, DType::BF16] {
        let mut graph = original.clone();
        let report = convert_precision(&mut graph, to);
        assert_eq!((report.converted, report.kept), (2, 9), "{report:?}");
        // The factor lies between norm and softmax, so it is not worth two casts.
        for name in
            ["mean", "centred", "squared", "variance", "plus", "deviation", "normed", "scaled", "gamma", "p"]
        {
            assert_eq!(dtype_of(&graph, name), DType::F32, "{name}");
        }
        for name in ["h", "w"] {
            assert_eq!(dtype_of(&graph, name), to, "{name}");
        }
        assert_eq!((dtype_of(&graph, "x"), dtype_of(&graph, "y")), (DType::F32, DType::F32));
        assert_eq!(dtype_of(&graph, "eps"), DType::F32);
        assert_eq!(graph.nodes.iter().filter(|n| n.op_type == "Cast").count(), report.casts);

        let x = ramp(&[2, 8]);
        let (expected, found) =
            (run(&original, &[("x", x.clone())]), run(&filled(&original, &graph), &[("x", x)]));
        assert_eq!(found[0].dtype(), DType::F32);
        let error = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        let error = error(&found[0].to_f32s().unwrap(), &expected[0].to_f32s().unwrap());
        // A few roundings of numbers around 1.
        let unit = if to == DType::F16 { 2f32.powi(-11) } else { 2f32.powi(-8) };
        assert!(error > 0.0 && error < 4.0 * unit, "{to}: {error}");
    }
}

#[test]
fn embeddings_of_time_stay_in_f32() {
    let file = model(17)
        .input("t", DType::F32, "1")
        .initializer("frequencies", &ramp(&[4]))
        .initializer("w", &ramp(&[4, 4]))
        .node("Mul", &["t", "frequencies"], &["angle"])
        .node("Sin", &["angle"], &["wave"])
        .node_with("Unsqueeze", &["wave", "axis"], &["row"], [])
        .initializer("axis", &Tensor::from_i64s(&[0]))
        .node("MatMul", &["row", "w"], &["y"])
        .output("y", "1 4");
    let mut graph = inferred(&file);
    convert_precision(&mut graph, DType::F16);
    for (name, dtype) in
        [("frequencies", DType::F32), ("angle", DType::F32), ("wave", DType::F32), ("w", DType::F16)]
    {
        assert_eq!(dtype_of(&graph, name), dtype, "{name}");
    }
}

/// Sums over all places, divided by their weights only afterwards, are beyond the range of f16.
#[test]
fn linear_attention_stays_in_f32() {
    let file = model(17)
        .input("x", DType::F32, "4 8")
        .initializer("w", &ramp(&[8, 8]))
        .initializer("eps", &Tensor::scalar(1e-15f32))
        .node("MatMul", &["x", "w"], &["q"])
        .node("Relu", &["q"], &["k"])
        .node_with("Transpose", &["k"], &["turned"], [("perm", Attribute::Ints(vec![1, 0]))])
        .node("MatMul", &["turned", "q"], &["sums"])
        .node("MatMul", &["k", "sums"], &["shares"])
        .node_with("Split", &["shares"], &["top", "bottom"], [("axis", Attribute::Int(1))])
        .node("Add", &["bottom", "eps"], &["total"])
        .node("Div", &["top", "total"], &["y"])
        .output("y", "4 4");
    for to in [DType::F16, DType::BF16] {
        let mut graph = inferred(&file);
        convert_precision(&mut graph, to);
        for (name, dtype) in [("q", to), ("sums", DType::F32), ("shares", DType::F32), ("total", DType::F32)]
        {
            assert_eq!(dtype_of(&graph, name), dtype, "{name}");
        }
    }
}

#[test]
fn a_half_precision_graph_is_widened_or_left_alone() {
    let half = |shape: &[usize]| ramp(shape).to_float_type(DType::F16).unwrap();
    let file = model(17)
        .input("x", DType::F16, "2 4")
        .initializer("w", &half(&[4, 4]))
        .node("MatMul", &["x", "w"], &["h"])
        .node_with("Cast", &["h"], &["wide"], [("to", Attribute::Int(1))])
        .node("Neg", &["wide"], &["y"])
        .output("y", "2 4");
    let original = inferred(&file);
    let mut graph = original.clone();
    let report = convert_precision(&mut graph, DType::F16);
    assert_eq!(report, PrecisionReport { converted: 1, kept: 1, casts: 0 });
    assert_eq!(graph, original, "what its exporter computes in f32 stays in f32");

    convert_precision(&mut graph, DType::F32);
    assert_eq!((dtype_of(&graph, "x"), dtype_of(&graph, "w")), (DType::F16, DType::F32));
    assert_eq!(dtype_of(&graph, "h"), DType::F32);
    let x = half(&[2, 4]);
    let (expected, found) =
        (run(&original, &[("x", x.clone())]), run(&filled(&original, &graph), &[("x", x)]));
    // All products are small integers.
    assert_eq!(expected, found);
}

#[test]
fn fixed_types_bodies_and_outputs_keep_their_types() {
    let body = |op: &str| {
        Attribute::Graph(Box::new(crate::proto::GraphProto {
            node: vec![crate::testing::node(op, &["captured"], &["inner"])],
            output: vec![crate::testing::value("inner", DType::F32, "2 4")],
            ..Default::default()
        }))
    };
    let file = model(17)
        .input("x", DType::F32, "2 4")
        .input("flag", DType::Bool, "")
        .initializer("w", &ramp(&[4, 4]))
        .initializer("huge", &Tensor::from_elements(vec![1], &[-3.4e38f32]).unwrap())
        .node("MatMul", &["x", "w"], &["captured"])
        .node("Add", &["captured", "huge"], &["masked"])
        .node_with("If", &["flag"], &["y"], [("then_branch", body("Neg")), ("else_branch", body("Abs"))])
        .node("Abs", &["masked"], &["z"])
        .output("y", "2 4")
        .output("z", "2 4");
    let mut graph = inferred(&file);
    convert_precision(&mut graph, DType::F16);
    assert_eq!(dtype_of(&graph, "captured"), DType::F32);
    assert_eq!(dtype_of(&graph, "masked"), DType::F16);
    let huge = graph.initializers.iter().find(|(id, _)| graph.value(**id).name == "huge").unwrap().1;
    assert!(matches!(huge, Initializer::Constant(t) if t.to_f32s().unwrap() == [-65504.0]));
    // Types are consistent: shape inference agrees with the pass.
    let stated = graph.values.clone();
    crate::infer::infer_shapes(&mut graph).unwrap();
    assert_eq!(
        graph.values.iter().map(|v| v.dtype).collect::<Vec<_>>(),
        stated.iter().map(|v| v.dtype).collect::<Vec<_>>()
    );
}

mod overflow;

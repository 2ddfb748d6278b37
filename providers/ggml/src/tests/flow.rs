//! Graphs with control flow.

use super::{Model, build, compare, from, noise, run, spec};
use sdrun_abi::{BuildSpec, NoHost, Precision, Result};
use sdrun_graph::{
    Attribute, Tensor, ValueId,
    proto::{Dimension, GraphProto, NodeProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto},
};

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
    NodeProto {
        op_type: Some(op.into()),
        input: names(inputs),
        output: names(outputs),
        ..NodeProto::default()
    }
}

/// A value with an ONNX element type, and with a rank if it is given.
fn typed(name: &str, elem_type: i32, rank: Option<usize>) -> ValueInfoProto {
    let shape = rank.map(|rank| TensorShapeProto { dim: vec![Dimension::default(); rank] });
    let tensor = TensorTypeProto { elem_type: Some(elem_type), shape };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { tensor_type: Some(tensor), ..TypeProto::default() }),
        ..ValueInfoProto::default()
    }
}

const F32: i32 = 1;
const I64: i32 = 7;
const BOOL: i32 = 9;

fn body(inputs: Vec<ValueInfoProto>, nodes: Vec<NodeProto>, outputs: Vec<ValueInfoProto>) -> Attribute {
    Attribute::Graph(Box::new(GraphProto {
        name: Some("body".into()),
        node: nodes,
        input: inputs,
        output: outputs,
        ..GraphProto::default()
    }))
}

fn name(model: &Model, id: ValueId) -> String {
    model.graph.value(id).name.clone()
}

/// The outputs for these inputs, on one thread and on two.
fn outputs(model: &Model, feeds: &[Tensor]) -> Result<Vec<Tensor>> {
    let run_on = |threads: usize| {
        let engine = build(model, &BuildSpec { threads: Some(threads), ..spec(Precision::Fp32) })?;
        run(&mut *engine.session(model, &NoHost)?, feeds)
    };
    let one = run_on(1)?;
    assert_eq!(run_on(2)?, one);
    Ok(one)
}

/// `condition ? x * w : x + x`, with `relu` of it after; the first branch reads a weight of the graph.
fn choosing() -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[3, 4], 1));
    let condition = model.input(Tensor::scalar(true));
    let w = model.weight(noise(&[4, 4], 2));
    let (x_name, w_name) = (name(&model, x), name(&model, w));
    let out = |name: &str| vec![typed(name, F32, Some(2))];
    let then = body(vec![], vec![node("MatMul", &[&x_name, &w_name], &["a"])], out("a"));
    let other = body(vec![], vec![node("Add", &[&x_name, &x_name], &["b"])], out("b"));
    let y = model.node("If", &[("then_branch", then), ("else_branch", other)], &[condition]);
    let y = model.node("Relu", &[], &[y]);
    model.output(y);
    model
}

/// What [`choosing`] computes.
fn chosen(model: &Model, condition: bool) -> Tensor {
    let mut plain = Model::new(17);
    let x = plain.input(model.feeds[0].clone());
    let w = plain.constant(model.weights.values().next().unwrap().clone());
    let y = if condition { plain.node("MatMul", &[], &[x, w]) } else { plain.node("Add", &[], &[x, x]) };
    let y = plain.node("Relu", &[], &[y]);
    plain.output(y);
    plain.reference().remove(0)
}

#[test]
fn the_branch_is_chosen_at_run_time_and_its_weights_are_refitted() {
    let (model, mut other) = (choosing(), choosing());
    for tensor in other.weights.values_mut() {
        *tensor = noise(&[4, 4], 7);
    }
    let engine = build(&model, &spec(Precision::Fp32)).unwrap();
    let engine = {
        let bytes = engine.serialize().unwrap();
        let (spec, provider) = (spec(Precision::Fp32), super::provider());
        sdrun_abi::Provider::load(&provider, &bytes, &spec, &NoHost).unwrap()
    };
    let mut session = engine.session(&model, &NoHost).unwrap();
    let check = |session: &mut dyn sdrun_abi::Session, weights: &Model| {
        for condition in [true, false, true] {
            let found = run(session, &[model.feeds[0].clone(), Tensor::scalar(condition)]).unwrap();
            compare("If", &found[0], &chosen(weights, condition), 1e-6);
        }
    };
    check(&mut *session, &model);
    let names: Vec<&str> = model.weights.keys().map(|name| &**name).collect();
    session.refit(&names, &other, &NoHost).unwrap();
    check(&mut *session, &other);
}

#[test]
fn branches_may_give_different_shapes() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[3, 4], 1));
    let condition = model.input(Tensor::scalar(true));
    let x_name = name(&model, x);
    let transposed =
        body(vec![], vec![node("Transpose", &[&x_name], &["a"])], vec![typed("a", F32, Some(2))]);
    let same = body(vec![], vec![node("Exp", &[&x_name], &["b"])], vec![typed("b", F32, Some(2))]);
    let y = model.node("If", &[("then_branch", transposed), ("else_branch", same)], &[condition]);
    let y = model.node("Neg", &[], &[y]);
    model.output(y);
    for (condition, shape) in [(true, [4, 3]), (false, [3, 4])] {
        let found = outputs(&model, &[model.feeds[0].clone(), Tensor::scalar(condition)]).unwrap();
        assert_eq!(found[0].shape(), shape);
        let x: Vec<f32> = model.feeds[0].elements().unwrap();
        let expected = from(&shape, |i| if condition { -x[i % 3 * 4 + i / 3] } else { -x[i].exp() });
        compare("If", &found[0], &expected, 1e-6);
    }
}

/// `for i in 0..count { x = x * w; y = concat(y, x); if sum(x) >= 20 { stop } }`
#[test]
fn a_loop_ends_by_its_count_or_its_condition_and_carries_what_grows() {
    let mut model = Model::new(17);
    let x = model.input(from(&[1, 2], |_| 1f32));
    let grown = model.input(from(&[1, 2], |_| 0f32));
    let count = model.input(Tensor::scalar(3i64));
    let w = model.weight(from(&[2, 2], |i| if i % 3 == 0 { 2f32 } else { 0.0 }));
    let limit = model.constant(Tensor::scalar(20f32));
    let (w_name, limit_name) = (name(&model, w), name(&model, limit));
    let body = body(
        vec![
            typed("i", I64, Some(0)),
            typed("go", BOOL, Some(0)),
            typed("x", F32, Some(2)),
            typed("y", F32, None),
        ],
        vec![
            node("MatMul", &["x", &w_name], &["next"]),
            node("Concat", &["y", "next"], &["longer"]),
            node("ReduceSum", &["next"], &["sum"]),
            node("Less", &["sum", &limit_name], &["on"]),
            node("Squeeze", &["on"], &["again"]),
        ],
        vec![
            typed("again", BOOL, None),
            typed("next", F32, Some(2)),
            typed("longer", F32, None),
            typed("next", F32, Some(2)),
        ],
    );
    let mut body = body;
    if let Attribute::Graph(body) = &mut body {
        let axis = sdrun_graph::proto::AttributeProto {
            name: Some("axis".into()),
            i: Some(0),
            r#type: Some(2),
            ..Default::default()
        };
        body.node[1].attribute.push(axis);
    }
    let inputs = [Some(count), None, Some(x), Some(grown)];
    let ids = model.node_n("Loop", &[("body", body)], &inputs, 3);
    let last = model.node("Neg", &[], &[ids[0]]);
    for (id, rank) in [(ids[1], 2), (ids[2], 3)] {
        let value = model.graph.value_mut(id);
        (value.dtype, value.shape) =
            (Some(sdrun_abi::DType::F32), Some(vec![sdrun_graph::Dim::Unknown; rank]));
    }
    let value = model.graph.value_mut(last);
    (value.dtype, value.shape) = (Some(sdrun_abi::DType::F32), Some(vec![sdrun_graph::Dim::Unknown; 2]));
    [last, ids[1], ids[2]].into_iter().for_each(|id| model.output(id));
    // 2, 4, 8, 16, of which the sum of two fours is 8 and of two sixteens 32.
    for (count, steps) in [(1, 1usize), (3, 3), (9, 4)] {
        let feeds = [model.feeds[0].clone(), model.feeds[1].clone(), Tensor::scalar(count as i64)];
        let found = outputs(&model, &feeds).unwrap();
        let power = |step: usize| (1 << step) as f32;
        assert_eq!(found[0], from(&[1, 2], |_| -power(steps)), "{count}");
        assert_eq!(found[1], from(&[1 + steps, 2], |i| if i < 2 { 0.0 } else { power(i / 2) }));
        assert_eq!(found[2], from(&[steps, 1, 2], |i| power(1 + i / 2)));
    }
}

#[test]
fn operators_without_translation_are_named_in_bodies_too() {
    let mut model = choosing();
    for branch in ["then_branch", "else_branch"] {
        if let Some(Attribute::Graph(body)) = model.graph.nodes[0].attributes.get_mut(branch) {
            body.node[0].op_type = Some("NonMaxSuppression".into());
        }
    }
    let error = build(&model, &spec(Precision::Fp32)).err().unwrap();
    assert_eq!(error.code, sdrun_abi::ErrorCode::Unimplemented);
    assert!(error.message.contains("NonMaxSuppression") && error.message.contains("/If_0"), "{error}");
}

#[test]
fn a_condition_of_several_elements_is_refused() {
    let model = choosing();
    let mut wrong = model.clone();
    wrong.feeds[1] = from(&[2], |_| true);
    let id = wrong.graph.inputs[1];
    wrong.graph.value_mut(id).shape = Some(vec![sdrun_graph::Dim::Known(2)]);
    let error = outputs(&wrong, &wrong.feeds).unwrap_err();
    assert!(error.message.contains("its condition has the shape [2]"), "{error}");
}

mod arithmetic;
mod data;
mod merged;

use super::{Model, check, compare, from, noise, outputs, spec};
use crate::ops;
use half::{bf16, f16};
use sdrun_abi::Precision;
use sdrun_graph::{
    Attribute, Tensor,
    fused::{DOMAIN, VERSION},
};
use std::collections::{BTreeMap, BTreeSet};

/// An input of a one-node graph.
pub(super) enum In {
    /// Given at run time.
    Fed(Tensor),
    /// A weight.
    Weight(Tensor),
    /// A constant, known when the engine is built.
    Constant(Tensor),
    Absent,
}
use In::{Absent, Constant, Fed, Weight};
use arithmetic::{convolutions, elementwise, normalisations, products, transposed_convolutions};
use data::{indexed, moves, quantised};
use merged::{fused, merged, pads, sums};

pub(super) struct Case {
    pub(super) op: &'static str,
    pub(super) model: Model,
    tolerance: f64,
}

pub(super) fn case(op: &'static str, opset: i64, attributes: &[(&str, Attribute)], inputs: Vec<In>) -> Case {
    several(op, opset, attributes, inputs, 1)
}

pub(super) fn several(
    op: &'static str,
    opset: i64,
    attributes: &[(&str, Attribute)],
    inputs: Vec<In>,
    outputs: usize,
) -> Case {
    let mut model = Model::new(opset);
    let ids: Vec<_> = inputs
        .into_iter()
        .map(|input| match input {
            Fed(tensor) => Some(model.input(tensor)),
            Weight(tensor) => Some(model.weight(tensor)),
            Constant(tensor) => Some(model.constant(tensor)),
            Absent => None,
        })
        .collect();
    for id in model.node_n(op, attributes, &ids, outputs) {
        model.output(id);
    }
    Case { op, model, tolerance: 2e-6 }
}

fn int(v: i64) -> Attribute {
    Attribute::Int(v)
}
fn ints(v: &[i64]) -> Attribute {
    Attribute::Ints(v.to_vec())
}
fn float(v: f32) -> Attribute {
    Attribute::Float(v)
}
fn text(v: &str) -> Attribute {
    Attribute::String(v.as_bytes().to_vec())
}
fn i64s(v: &[i64]) -> In {
    Constant(Tensor::from_i64s(v))
}
fn positive(shape: &[usize], seed: u64) -> Tensor {
    from(shape, |i| noise(shape, seed).elements::<f32>().unwrap()[i].abs() + 0.1)
}

/// At least one case of every operator in the table.
pub(super) fn native() -> Vec<Case> {
    let families = [elementwise(), products(), convolutions(), normalisations(), moves(), pads(), sums()];
    families
        .into_iter()
        .chain([
            fused(),
            merged(),
            quantised(),
            indexed(),
            transposed_convolutions(),
            super::recurrent::cases(),
        ])
        .flatten()
        .collect()
}

#[test]
fn every_operator_of_the_table_is_right_and_native() {
    let (mut covered, mut wrong) = (BTreeSet::new(), Vec::new());
    for case in native() {
        let Case { op, model, tolerance } = case;
        assert!(
            model.host_operators().is_empty(),
            "{op} is left to the reference implementation: {:?}",
            model.graph.nodes
        );
        let what = format!("{op} {:?}", model.graph.nodes[0].attributes);
        wrong.extend(std::panic::catch_unwind(|| check(&what, &model, tolerance)).err().map(|_| what));
        covered.insert(op);
    }
    assert!(wrong.is_empty(), "wrong (each with its own message above): {wrong:#?}");
    let table: BTreeSet<&str> = ops::all().map(|operator| operator.name).collect();
    assert_eq!(covered, table, "operators in the table and operators tested");
}

#[test]
fn half_precision_values_are_computed() {
    for (op, opset) in [("Exp", 17), ("Sigmoid", 17)] {
        let halves = [
            Fed(from(&[3, 5], |i| f16::from_f32(i as f32 / 4.0 - 2.0))),
            Fed(from(&[3, 5], |i| bf16::from_f32(i as f32 / 4.0 - 2.0))),
        ];
        for x in halves {
            let Case { model, .. } = case(op, opset, &[], vec![x]);
            assert!(model.host_operators().is_empty());
            // Half a unit in the last place of bf16.
            check(op, &model, 4e-3);
        }
    }
    let a = from(&[4, 6], |i| f16::from_f32(i as f32 / 8.0));
    let Case { model, .. } =
        case("MatMul", 17, &[], vec![Fed(a.clone()), Weight(from(&[6, 3], |i| f16::from_f32(i as f32)))]);
    check("MatMul in f16", &model, 1e-3);
}

#[test]
fn what_ggml_lacks_is_evaluated() {
    let x = || Fed(noise(&[2, 3, 5], 1));
    let numbers = || Fed(from(&[2, 5], |i| i as i64 * 3 - 7));
    let element_wise = [
        case("Floor", 17, &[], vec![Fed(from(&[4], |i| i as f64 * 0.7))]),
        case("PRelu", 17, &[], vec![numbers(), numbers()]),
        case("Max", 17, &[], vec![numbers(), Constant(Tensor::scalar(2i64))]),
        case("Mean", 17, &[], vec![x(), Fed(noise(&[5], 2)), Fed(noise(&[3, 1], 3))]),
        case("Add", 17, &[], vec![numbers(), Constant(Tensor::scalar(5i64))]),
        case("Mul", 17, &[], vec![Fed(from(&[3, 1], |i| i as i64)), Fed(from(&[1, 4000], |i| i as i64))]),
        case("Cast", 17, &[("to", int(1))], vec![numbers()]),
        case("Cast", 17, &[("to", int(7))], vec![Fed(from(&[4], |i| i as f32 * 1.5))]),
        case("Cast", 17, &[("to", int(9))], vec![Fed(from(&[20_000], |i| (i % 3) as f32))]),
        case("Less", 17, &[], vec![x(), Fed(noise(&[5], 2))]),
        case("Equal", 17, &[], vec![numbers(), numbers()]),
        case("Where", 17, &[], vec![Fed(from(&[2, 1, 5], |i| i % 2 == 0)), x(), Fed(noise(&[3, 1], 2))]),
        case("Exp", 17, &[], vec![Fed(from(&[4], |i| i as f64))]),
        case("Clip", 17, &[], vec![x(), Fed(Tensor::scalar(-0.25f32)), Fed(Tensor::scalar(0.5f32))]),
        case("Add", 17, &[], vec![Fed(Tensor::scalar(3i64)), Fed(Tensor::scalar(4i64))]),
        case("Round", 17, &[], vec![Fed(from(&[9], |i| f16::from_f32(i as f32 / 2.0)))]),
    ];
    for Case { op, model, .. } in element_wise {
        assert!(model.host_operators().is_empty(), "{op}");
        check(op, &model, 1e-6);
    }
    let cases = [
        several("TopK", 17, &[("axis", int(-1))], vec![x(), i64s(&[2])], 2),
        several("MaxPool", 17, &[("kernel_shape", ints(&[2]))], vec![x()], 2),
    ];
    for Case { op, model, .. } in cases {
        assert_eq!(model.host_operators().get(op), Some(&1), "{op}");
        check(op, &model, 1e-6);
    }
}

#[test]
fn low_precisions_store_matrices_narrowly_and_stay_close() {
    let mut model = Model::new(17);
    let x = model.input(noise(&[1, 16, 12, 12], 1));
    let filters = model.weight(noise(&[32, 16, 3, 3], 2));
    let y = model.node("Conv", &[("pads", ints(&[1, 1, 1, 1]))], &[x, filters]);
    let shape = model.constant(Tensor::from_i64s(&[32, 144]));
    let y = model.node("Reshape", &[], &[y, shape]);
    let matrix = model.weight(noise(&[144, 64], 3));
    let y = model.node("MatMul", &[], &[y, matrix]);
    model.output(y);
    let exact = &model.reference()[0];
    for (precision, low, high) in
        [(Precision::Fp32, 0.0, 1e-6), (Precision::Fp16, 1e-5, 1e-3), (Precision::Bf16, 1e-4, 1e-2)]
    {
        let found = &outputs(&model, &spec(precision))[0];
        let error = super::distance(&found.to_f32s().unwrap(), &exact.to_f32s().unwrap());
        assert!((low..=high).contains(&error), "{precision}: {error:e}");
    }
    compare("fp32", &outputs(&model, &spec(Precision::Fp32))[0], exact, 1e-6);
}

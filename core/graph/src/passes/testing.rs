//! Runs passes on models and compares values before and after.

use crate::{
    Dim, Graph, Tensor,
    infer::infer_shapes,
    testing::{Model, run},
};
use sdrun_abi::DType;
use std::collections::BTreeMap;

/// Sizes for open dimensions. They are distinct primes, so no two dimensions or products can be confused.
const SIZES: [usize; 6] = [2, 3, 5, 7, 11, 13];

/// Runs a pass on a model twice, once with open dimensions and once with one of [`SIZES`] for each, and compares the
/// values before and after. The pass must report `changes` both times. Returns the graph with open dimensions.
pub(crate) fn check(file: &Model, pass: impl Fn(&mut Graph) -> usize, changes: usize) -> Graph {
    let mut open = file.graph();
    infer_shapes(&mut open).unwrap();
    let mut bound = file.graph();
    let (mut symbols, mut sizes) = (BTreeMap::new(), SIZES.into_iter());
    for id in bound.inputs.clone() {
        let dims = bound.value_mut(id).shape.iter_mut().flatten();
        for dim in dims {
            *dim = Dim::Known(match &*dim {
                Dim::Known(size) => *size,
                Dim::Symbol(name) => {
                    *symbols.entry(name.clone()).or_insert_with(|| sizes.next().expect("enough sizes"))
                }
                Dim::Unknown => sizes.next().expect("enough sizes"),
            });
        }
    }
    infer_shapes(&mut bound).unwrap();
    let feeds: Vec<(String, Tensor)> = bound
        .inputs
        .iter()
        .map(|id| {
            let value = bound.value(*id);
            let noise = noise(&value.known_shape().unwrap(), id.0);
            let dtype = value.dtype.unwrap();
            (value.name.clone(), cast(&noise, dtype))
        })
        .collect();
    let feeds: Vec<(&str, Tensor)> = feeds.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    let expected = run(&bound, &feeds);
    for graph in [&mut open, &mut bound] {
        let stated: Vec<_> = graph.weights().map(|(name, w)| (name.to_owned(), w.clone())).collect();
        let found = pass(graph);
        assert_eq!(found, changes, "{:?}", ops(graph));
        for (name, weight) in graph.weights() {
            assert!(stated.iter().any(|(n, w)| n == name && w == weight), "weight {name} changed");
        }
        infer_shapes(graph).unwrap();
        for (i, (found, expected)) in run(graph, &feeds).iter().zip(&expected).enumerate() {
            compare(&format!("output {i}"), found, expected);
        }
    }
    open
}

/// Converts a float tensor to another type.
fn cast(tensor: &Tensor, dtype: DType) -> Tensor {
    let values = tensor.to_f32s().unwrap();
    let halves: Vec<half::f16> = values.iter().copied().map(half::f16::from_f32).collect();
    match dtype {
        DType::F32 => tensor.clone(),
        DType::F16 => Tensor::from_elements(tensor.shape().to_vec(), &halves).unwrap(),
        other => panic!("no test has inputs of type {other}"),
    }
}

/// The operators in order.
pub(crate) fn ops(graph: &Graph) -> Vec<&str> {
    graph.nodes.iter().map(|n| n.op_type.as_str()).collect()
}

fn compare(what: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!((found.dtype(), found.shape()), (expected.dtype(), expected.shape()), "{what}");
    let (Some(f), Some(e)) = (found.to_f32s(), expected.to_f32s()) else {
        assert_eq!(found, expected, "{what}");
        return;
    };
    let largest = e.iter().fold(0f32, |m, v| m.max(v.abs()));
    let tolerance = if found.dtype().size() == 2 { 4e-3 } else { 4e-6 } * largest;
    for (f, e) in f.iter().zip(&e) {
        assert!((f - e).abs() <= tolerance, "{what}: {f} instead of {e}");
    }
}

/// Numbers in [-1, 1) that look random but are the same in every run.
pub(crate) fn noise(shape: &[usize], seed: u32) -> Tensor {
    let number = |i: usize| {
        let mut z = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(seed) << 32);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z >> 40) as f32) / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_elements(shape.to_vec(), &values).unwrap()
}

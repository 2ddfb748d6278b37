//! Outputs of the reference provider in fp32, which come with sdrun.
//!
//! Of each output at most 2048 values are kept, spread over it by a fixed rule. A wrong channel, row or layout shows in them, and
//! the files stay small.

use crate::{
    networks::CASES,
    rig::{Problem, Synthetic},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Provider, Result, Tensors,
    abi::{DType, Error, Host},
    inputs,
    verify::{self, Comparison},
};
use std::collections::{BTreeMap, HashMap};

/// Seed of the inputs.
pub(crate) const SEED: u64 = 0;

/// Most values of an output.
const VALUES: usize = 2048;

const STORED: &[u8] = include_bytes!("../references/outputs.safetensors");

/// What a network computes at one size: by output, its shape and some of its values.
pub(crate) struct Expected(BTreeMap<String, (Vec<usize>, HostTensor)>);

/// Indices of the values to keep of an output with `count` values. Steps of a prime, so that they fall into every row and column.
fn places(count: usize) -> Vec<usize> {
    const PRIME: usize = 2_654_435_761;
    match count <= VALUES {
        true => (0..count).collect(),
        false => (0..VALUES).map(|at| at.wrapping_mul(PRIME) % count).collect(),
    }
}

fn some_values(tensor: &HostTensor) -> Result<Vec<f32>> {
    let values =
        tensor.to_f64().ok_or_else(|| Error::unsupported("this type of outputs cannot be compared"))?;
    Ok(places(values.len()).into_iter().map(|at| values[at] as f32).collect())
}

impl Expected {
    /// Compares the values that are kept.
    pub(crate) fn compare(&self, outputs: &Tensors) -> Result<Vec<Comparison>, Problem> {
        let (mut found, mut kept) = (Tensors::new(), Tensors::new());
        for (name, (shape, values)) in &self.0 {
            let output = outputs
                .get(name)
                .filter(|output| output.shape() == &shape[..])
                .ok_or_else(|| Problem::Wrong(format!("there is no output {name:?} of shape {shape:?}")))?;
            let values_found = some_values(output)?;
            found.insert(name.clone(), HostTensor::from_f32(vec![values_found.len()], &values_found)?);
            kept.insert(
                name.clone(),
                HostTensor::from_bytes(DType::F32, values.shape().to_vec(), values.bytes())?,
            );
        }
        Ok(verify::compare(&found, &kept)?)
    }
}

/// `MODEL|SIZE|OUTPUT|SHAPE`
fn key(model: &str, size: usize, output: &str, shape: &[usize]) -> String {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    format!("{model}|{size}|{output}|{}", dims.join("x"))
}

/// The stored outputs of a network at its two sizes.
pub(crate) fn stored(model: &str) -> Result<[Expected; 2]> {
    let damaged = |why: String| Error::internal(format!("the stored outputs are damaged: {why}"));
    let file = SafeTensors::deserialize(STORED).map_err(|e| damaged(e.to_string()))?;
    let mut sizes = [Expected(BTreeMap::new()), Expected(BTreeMap::new())];
    for (name, tensor) in file.tensors() {
        let parts: Vec<&str> = name.split('|').collect();
        let [of, size, output, shape] = parts[..] else { return Err(damaged(name).into()) };
        if of != model {
            continue;
        }
        let dims =
            shape.split('x').filter(|dim| !dim.is_empty()).map(str::parse).collect::<Result<Vec<usize>, _>>();
        let dims = dims.map_err(|e| damaged(format!("{name}: {e}")))?;
        let size: usize = size.parse().map_err(|e| damaged(format!("{name}: {e}")))?;
        let values = HostTensor::from_bytes(DType::F32, tensor.shape().to_vec(), tensor.data())?;
        let expected = sizes.get_mut(size).ok_or_else(|| damaged(name.clone()))?;
        expected.0.insert(output.into(), (dims, values));
    }
    if sizes.iter().any(|expected| expected.0.is_empty()) {
        return Err(damaged(format!("they lack {model}")).into());
    }
    Ok(sizes)
}

/// Computes the stored outputs: the content of `references/outputs.safetensors`. `provider` is the reference.
///
/// # Errors
/// Those of building and running the networks.
pub fn compute(provider: &Provider, host: &dyn Host) -> Result<Vec<u8>> {
    let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
    for case in CASES {
        for (size, shapes) in case.shapes().into_iter().enumerate() {
            let network = Synthetic::open(case.model, provider.paths(), host)?;
            let mut options = BuildOptions::new(provider.device(None)?).cache(CachePolicy::Off);
            options.shapes = shapes;
            let given = inputs::seeded(&network.model, &network.model.bound(&options.shapes)?, SEED)?;
            let engine = provider.build_with(&network.model, &network.weights, &options, host)?;
            let outputs = engine.session(&network.weights, host)?.run(&given, host)?;
            for (output, tensor) in &outputs {
                let bytes = some_values(tensor)?.iter().flat_map(|value| value.to_le_bytes()).collect();
                kept.push((key(case.model, size, output, tensor.shape()), bytes));
            }
        }
    }
    let cannot = |e: safetensors::SafeTensorError| Error::internal(format!("cannot write the outputs: {e}"));
    let view = |(name, bytes): &'_ (String, Vec<u8>)| -> Result<(String, Vec<u8>, usize)> {
        Ok((name.clone(), bytes.clone(), bytes.len() / 4))
    };
    let owned = kept.iter().map(view).collect::<Result<Vec<_>>>()?;
    let views = owned
        .iter()
        .map(|(name, bytes, count)| {
            Ok((name.as_str(), TensorView::new(Dtype::F32, vec![*count], bytes).map_err(cannot)?))
        })
        .collect::<Result<Vec<_>>>()?;
    let about = HashMap::from([(
        "about".to_string(),
        format!("{} {}, fp32, seed {SEED}", provider.runtime().name, provider.runtime().version),
    )]);
    Ok(safetensors::serialize(views, Some(about)).map_err(cannot)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_spread_and_different() {
        for count in [1, 2048, 2049, 59_136, 196_608, 1 << 20] {
            let mut places = places(count);
            assert_eq!(places.len(), count.min(VALUES));
            // Every column of a width of 64, and every part of the output.
            if count > 4096 {
                let columns: std::collections::BTreeSet<usize> = places.iter().map(|at| at % 64).collect();
                assert_eq!(columns.len(), 64, "{count}");
                let parts: std::collections::BTreeSet<usize> =
                    places.iter().map(|at| at * 16 / count).collect();
                assert_eq!(parts.len(), 16, "{count}");
            }
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), count.min(VALUES), "{count}");
        }
    }

    #[test]
    fn every_network_has_stored_outputs() {
        for case in CASES {
            for (expected, shapes) in stored(case.model).unwrap().iter().zip(case.shapes()) {
                assert!(!expected.0.is_empty() && !shapes.is_empty(), "{}", case.model);
                for (_, values) in expected.0.values() {
                    assert!(values.to_f64().unwrap().iter().all(|value| value.is_finite()));
                }
            }
        }
    }

    #[test]
    fn a_wrong_layout_is_seen() {
        let values: Vec<f32> = (0..6 * 4096).map(|at| ((at * 7919) % 1000) as f32).collect();
        let tensor = HostTensor::from_f32(vec![6, 4096], &values).unwrap();
        let kept = some_values(&tensor).unwrap();
        let kept = HostTensor::from_f32(vec![kept.len()], &kept).unwrap();
        let expected = Expected([("y".to_string(), (vec![6, 4096], kept))].into());
        let same = expected.compare(&[("y".to_string(), tensor)].into()).unwrap();
        assert_eq!(same[0].max_abs_error, 0.0);
        let turned: Vec<f32> = (0..values.len()).map(|at| values[at % 6 * 4096 + at / 6]).collect();
        let turned = HostTensor::from_f32(vec![6, 4096], &turned).unwrap();
        assert!(expected.compare(&[("y".to_string(), turned)].into()).unwrap()[0].cosine < 0.9);
        let other = HostTensor::from_f32(vec![4096, 6], &values).unwrap();
        assert!(matches!(expected.compare(&[("y".to_string(), other)].into()), Err(Problem::Wrong(_))));
    }
}

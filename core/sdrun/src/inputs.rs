//! Deterministic inputs for `bench`, `verify` and `run` when none are given.

use crate::{HostTensor, Model, Result, Tensors, memory};
use sdrun_abi::{DType, Error as AbiError};
use sdrun_graph::{Graph, ValueId};
use sha2::{Digest, Sha256};

/// Inputs for a bound graph. Built-in models describe their own. For other models, floating-point values have about unit
/// variance, and integers and booleans are 0 or 1, which are valid indices everywhere.
pub fn seeded(model: &Model, bound: &Graph, seed: u64) -> Result<Tensors> {
    check_room(bound)?;
    let mut inputs = Tensors::new();
    for id in &bound.inputs {
        let value = bound.value(*id);
        let dtype =
            value.dtype.ok_or_else(|| AbiError::invalid(format!("input {:?} has no type", value.name)))?;
        let shape = value
            .known_shape()
            .ok_or_else(|| AbiError::invalid(format!("input {:?} has open dimensions", value.name)))?;
        let described =
            model.builtin().and_then(|b| Some((b, b.inputs.iter().find(|i| i.name == value.name)?)));
        let tensor = match described {
            Some((builtin, input)) => {
                let made = input.tensor(&format!("{}/{seed}", builtin.name), &shape)?;
                HostTensor::from_bytes(dtype, shape, made.data())?
            }
            None => HostTensor::from_f64(dtype, shape.clone(), plain(&value.name, dtype, &shape, seed)?)?,
        };
        inputs.insert(value.name.clone(), tensor);
    }
    Ok(inputs)
}

/// Fails if there is no memory for the inputs.
fn check_room(bound: &Graph) -> Result<()> {
    let bytes = |id: &ValueId| {
        let value = bound.value(*id);
        value.dtype?.bytes_of(&value.known_shape()?)
    };
    let needed = bound.inputs.iter().filter_map(bytes).fold(0u64, |sum, n| sum.saturating_add(n as u64));
    Ok(memory::check_free("the inputs need", needed)?)
}

fn plain(name: &str, dtype: DType, shape: &[usize], seed: u64) -> Result<impl Iterator<Item = f64>> {
    let values = sdrun_weights::synthetic::inputs(&format!("inputs/{seed}"), name, shape)?;
    let as_index = |v: f32| if v > 0.0 { 1.0 } else { 0.0 };
    Ok(values.into_iter().map(move |v| if dtype.is_float() { f64::from(v) } else { as_index(v) }))
}

/// SHA-256 over names, types, shapes and bytes.
pub fn sha256(inputs: &Tensors) -> String {
    let mut hash = Sha256::new();
    for (name, tensor) in inputs {
        hash.update(format!("{name} {} {:?}\n", tensor.dtype(), tensor.shape()));
        hash.update(tensor.bytes());
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

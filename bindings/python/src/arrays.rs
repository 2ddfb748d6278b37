//! NumPy arrays from and to tensors. Arrays are contiguous; `sdrun/__init__.py` sees to it. NumPy has no bfloat16 and no 8-bit floats,
//! so they are float32 in Python, which holds their values exactly.

use crate::{failed, invalid};
use bytemuck::{AnyBitPattern, NoUninit};
use numpy::{Element, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use sdrun::{
    HostTensor, Tensors,
    abi::{DType, TensorSpec},
};
use std::collections::BTreeMap;

/// The tensors for a session's inputs.
pub(crate) fn inputs(given: &BTreeMap<String, Bound<'_, PyAny>>, specs: &[TensorSpec]) -> PyResult<Tensors> {
    let one = |(name, array): (&String, &Bound<'_, PyAny>)| {
        // The session names unknown inputs.
        let dtype = specs.iter().find(|spec| spec.name == *name).map_or(DType::F32, |spec| spec.dtype);
        Ok((name.clone(), tensor(name, array, dtype)?))
    };
    given.iter().map(one).collect()
}

fn tensor(name: &str, array: &Bound<'_, PyAny>, dtype: DType) -> PyResult<HostTensor> {
    use DType::*;
    match dtype {
        F32 => same::<f32>(array, dtype),
        F64 => same::<f64>(array, dtype),
        U8 | Bool => same::<u8>(array, dtype),
        I8 => same::<i8>(array, dtype),
        U16 => same::<u16>(array, dtype),
        I16 => same::<i16>(array, dtype),
        U32 => same::<u32>(array, dtype),
        I32 => same::<i32>(array, dtype),
        U64 => same::<u64>(array, dtype),
        I64 => same::<i64>(array, dtype),
        F16 | BF16 | F8E4M3 | F8E5M2 => array.extract::<PyReadonlyArrayDyn<'_, f32>>().ok().map(|array| {
            let values: Vec<f64> = array.as_slice()?.iter().map(|value| f64::from(*value)).collect();
            HostTensor::from_f64(dtype, array.shape().to_vec(), &values).map_err(failed)
        }),
    }
    .unwrap_or_else(|| {
        let given = array.getattr("dtype").map(|dtype| dtype.to_string()).unwrap_or_default();
        Err(invalid(format!("the input `{name}` is {dtype}, and its array is {given}")))
    })
}

/// A tensor of the array's own type; `None` if that is another.
fn same<T: Element + NoUninit>(array: &Bound<'_, PyAny>, dtype: DType) -> Option<PyResult<HostTensor>> {
    let array = array.extract::<PyReadonlyArrayDyn<'_, T>>().ok()?;
    let tensor = |bytes: &[u8]| HostTensor::from_bytes(dtype, array.shape().to_vec(), bytes).map_err(failed);
    Some(array.as_slice().map_err(PyErr::from).and_then(|values| tensor(bytemuck::cast_slice(values))))
}

/// An array with the tensor's values.
pub(crate) fn array<'py>(py: Python<'py>, tensor: &HostTensor) -> PyResult<Bound<'py, PyAny>> {
    use DType::*;
    match tensor.dtype() {
        F32 => copied::<f32>(py, tensor),
        F64 => copied::<f64>(py, tensor),
        U8 => copied::<u8>(py, tensor),
        Bool => copied::<u8>(py, tensor)?.call_method1("view", ("bool",)),
        I8 => copied::<i8>(py, tensor),
        U16 => copied::<u16>(py, tensor),
        I16 => copied::<i16>(py, tensor),
        U32 => copied::<u32>(py, tensor),
        I32 => copied::<i32>(py, tensor),
        U64 => copied::<u64>(py, tensor),
        I64 => copied::<i64>(py, tensor),
        F16 | BF16 | F8E4M3 | F8E5M2 => {
            let values = tensor.values().into_iter().flatten();
            shaped(py, values.map(|value| value as f32).collect(), tensor.shape())
        }
    }
}

fn copied<'py, T: Element + AnyBitPattern + NoUninit>(
    py: Python<'py>,
    tensor: &HostTensor,
) -> PyResult<Bound<'py, PyAny>> {
    shaped(py, bytemuck::pod_collect_to_vec::<u8, T>(tensor.bytes()), tensor.shape())
}

fn shaped<'py, T: Element>(py: Python<'py>, values: Vec<T>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    let array: Bound<'py, PyArrayDyn<T>> = numpy::PyArray::from_vec(py, values).reshape(shape.to_vec())?;
    Ok(array.into_any())
}

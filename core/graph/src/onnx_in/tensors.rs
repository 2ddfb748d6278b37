//! Reads tensors and types from their messages.

use crate::{
    Dim,
    external::Location,
    proto::{self, TensorProto, TypeProto},
};
use bytes::Bytes;
use half::{bf16, f16};
use sdrun_abi::DType;

/// What is wrong with part of a file.
#[derive(Debug)]
pub(super) enum Fault {
    /// Violates the format.
    Malformed(String),
    /// Valid but unsupported.
    Unsupported(String),
}

/// A tensor whose data is located but not yet read.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) source: Source,
}

/// Where the elements are stored.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// Contiguous little-endian bytes, exactly as many as the type and shape need.
    Inline(Bytes),
    External(Location),
}

impl Stored {
    /// Size of all elements in bytes. Cannot overflow, because `read` has checked it.
    pub(super) fn bytes(&self) -> usize {
        self.dtype.bytes_of(&self.shape).unwrap_or(usize::MAX)
    }
    pub(super) fn elements(&self) -> usize {
        self.bytes() / self.dtype.size()
    }
}

/// Reads the type, shape and data of a tensor. Bytes in `raw_data` are shared, not copied.
pub(super) fn read(tensor: &TensorProto) -> Result<Stored, Fault> {
    let dtype = dtype(tensor.data_type.unwrap_or(0))?;
    let shape = shape(&tensor.dims).map_err(Fault::Malformed)?;
    let Some(bytes) = dtype.bytes_of(&shape).filter(|n| isize::try_from(*n).is_ok()) else {
        return Err(Fault::Malformed(format!("shape {shape:?} is too large")));
    };
    if tensor.segment.is_some() {
        return Err(Fault::Unsupported("it is split into segments".into()));
    }
    let source = if tensor.data_location == Some(proto::EXTERNAL) {
        if tensor.raw_data.as_ref().is_some_and(|raw| !raw.is_empty())
            || typed_fields(tensor).next().is_some()
        {
            return Err(Fault::Malformed("it has both inline and external data".into()));
        }
        Source::External(
            Location::parse(&tensor.external_data)
                .map_err(|e| Fault::Malformed(format!("external data: {e}")))?,
        )
    } else {
        Source::Inline(inline(tensor, dtype, bytes).map_err(Fault::Malformed)?)
    };
    Ok(Stored { dtype, shape, source })
}

/// The element type with this ONNX code.
pub(super) fn dtype(code: i32) -> Result<DType, Fault> {
    const OTHERS: [(i32, &str); 13] = [
        (8, "string"),
        (14, "complex64"),
        (15, "complex128"),
        (18, "float8e4m3fnuz"),
        (20, "float8e5m2fnuz"),
        (21, "uint4"),
        (22, "int4"),
        (23, "float4e2m1"),
        (24, "float8e8m0"),
        (25, "uint2"),
        (26, "int2"),
        (27, "float6e2m3"),
        (28, "float6e3m2"),
    ];
    DType::from_onnx(code).ok_or_else(|| match OTHERS.iter().find(|(number, _)| *number == code) {
        Some((_, name)) => Fault::Unsupported(format!("elements of type {name} are not supported")),
        None => Fault::Malformed(format!("{code} is not a valid element type")),
    })
}

fn shape(dims: &[i64]) -> Result<Vec<usize>, String> {
    let size = |d: &i64| usize::try_from(*d).map_err(|_| negative(*d));
    dims.iter().map(size).collect()
}

fn negative(dim: i64) -> String {
    format!("its shape has a negative dimension, {dim}; an integer may have overflowed in the exporter")
}

/// Names of the typed data fields that are not empty.
fn typed_fields(tensor: &TensorProto) -> impl Iterator<Item = &'static str> {
    let fields = [
        ("float_data", tensor.float_data.is_empty()),
        ("int32_data", tensor.int32_data.is_empty()),
        ("string_data", tensor.string_data.is_empty()),
        ("int64_data", tensor.int64_data.is_empty()),
        ("double_data", tensor.double_data.is_empty()),
        ("uint64_data", tensor.uint64_data.is_empty()),
    ];
    fields.into_iter().filter(|(_, empty)| !empty).map(|(name, _)| name)
}

fn inline(tensor: &TensorProto, dtype: DType, bytes: usize) -> Result<Bytes, String> {
    let expected = typed_field(dtype);
    if let Some(raw) = tensor.raw_data.as_ref().filter(|raw| !raw.is_empty()) {
        if let Some(field) = typed_fields(tensor).next() {
            return Err(format!("it has data in both raw_data and {field}"));
        }
        if raw.len() != bytes {
            return Err(format!("it has {} bytes of data, but its type and shape need {bytes}", raw.len()));
        }
        return Ok(raw.clone());
    }
    if let Some(field) = typed_fields(tensor).find(|field| *field != expected) {
        return Err(format!("it has data in {field}, but {dtype} elements belong in {expected}"));
    }
    let data = match expected {
        "float_data" => pack(&tensor.float_data, f32::to_le_bytes),
        "double_data" => pack(&tensor.double_data, f64::to_le_bytes),
        "int64_data" => pack(&tensor.int64_data, i64::to_le_bytes),
        "uint64_data" if dtype == DType::U32 => narrow(&tensor.uint64_data, u32::to_le_bytes)?,
        "uint64_data" => pack(&tensor.uint64_data, u64::to_le_bytes),
        _ => {
            let values = &tensor.int32_data;
            match dtype {
                DType::U8 | DType::F8E4M3 | DType::F8E5M2 => narrow(values, u8::to_le_bytes)?,
                DType::Bool => narrow(values, |v: u8| [u8::from(v != 0)])?,
                DType::I8 => narrow(values, i8::to_le_bytes)?,
                DType::I16 => narrow(values, i16::to_le_bytes)?,
                DType::U16 => narrow(values, u16::to_le_bytes)?,
                // The low half holds the 16 bits of the float.
                DType::F16 => narrow(values, |v: u16| f16::from_bits(v).to_le_bytes())?,
                DType::BF16 => narrow(values, |v: u16| bf16::from_bits(v).to_le_bytes())?,
                _ => pack(values, i32::to_le_bytes),
            }
        }
    };
    if data.len() != bytes {
        let (found, wanted) = (data.len() / dtype.size(), bytes / dtype.size());
        return Err(format!("it has {found} elements, but its shape needs {wanted}"));
    }
    Ok(data.into())
}

/// The typed data field for elements of this type (`onnx.proto`, comments of `TensorProto`).
fn typed_field(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float_data",
        DType::F64 => "double_data",
        DType::I64 => "int64_data",
        DType::U32 | DType::U64 => "uint64_data",
        _ => "int32_data",
    }
}

fn pack<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|v| bytes(*v)).collect()
}

/// Converts elements that are stored in a wider type.
fn narrow<W: Copy + std::fmt::Display, T: TryFrom<W>, const N: usize>(
    values: &[W],
    bytes: impl Fn(T) -> [u8; N],
) -> Result<Vec<u8>, String> {
    let mut data = Vec::with_capacity(values.len() * N);
    for value in values {
        let element = T::try_from(*value).map_err(|_| format!("element {value} does not fit its type"))?;
        data.extend(bytes(element));
    }
    Ok(data)
}

/// Element type and shape of a value; both are unknown if the IR has no such type.
pub(super) fn value_type(r#type: Option<&TypeProto>) -> Result<(Option<DType>, Option<Vec<Dim>>), String> {
    let Some(tensor) = r#type.and_then(|t| t.tensor_type.as_ref()) else { return Ok((None, None)) };
    let Some(dtype) = DType::from_onnx(tensor.elem_type.unwrap_or(0)) else { return Ok((None, None)) };
    let Some(shape) = &tensor.shape else { return Ok((Some(dtype), None)) };
    let mut dims = Vec::with_capacity(shape.dim.len());
    for dim in &shape.dim {
        dims.push(match (dim.dim_value, dim.dim_param.as_deref()) {
            // Paddle and older exporters write open dimensions like this. Two of them need not be equal.
            (Some(-1), _) | (None, None | Some("" | "?" | "-1")) => Dim::Unknown,
            (Some(n), _) => Dim::Known(usize::try_from(n).map_err(|_| negative(n))?),
            (None, Some(name)) => Dim::Symbol(name.to_owned()),
        });
    }
    Ok((Some(dtype), Some(dims)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(tensor: TensorProto) -> Result<Bytes, String> {
        match read(&tensor) {
            Ok(Stored { source: Source::Inline(bytes), .. }) => Ok(bytes),
            Ok(other) => panic!("not inline: {other:?}"),
            Err(Fault::Malformed(reason) | Fault::Unsupported(reason)) => Err(reason),
        }
    }

    fn typed(dtype: DType, n: i64) -> TensorProto {
        TensorProto { data_type: Some(dtype as i32), dims: vec![n], ..Default::default() }
    }

    fn int32(dtype: DType, values: &[i32]) -> Result<Bytes, String> {
        data(TensorProto { int32_data: values.to_vec(), ..typed(dtype, values.len() as i64) })
    }

    #[test]
    fn typed_fields_become_little_endian_bytes() {
        let floats = TensorProto { float_data: vec![1.0, -2.5], ..typed(DType::F32, 2) };
        assert_eq!(data(floats).unwrap(), [1.0f32.to_le_bytes(), (-2.5f32).to_le_bytes()].concat());
        let doubles = TensorProto { double_data: vec![0.1], ..typed(DType::F64, 1) };
        assert_eq!(data(doubles).unwrap(), &0.1f64.to_le_bytes()[..]);
        let longs = TensorProto { int64_data: vec![-3], ..typed(DType::I64, 1) };
        assert_eq!(data(longs).unwrap(), &(-3i64).to_le_bytes()[..]);
        let u64s = TensorProto { uint64_data: vec![u64::MAX], ..typed(DType::U64, 1) };
        assert_eq!(data(u64s).unwrap(), &[255u8; 8][..]);
        let u32s = TensorProto { uint64_data: vec![u32::MAX.into()], ..typed(DType::U32, 1) };
        assert_eq!(data(u32s).unwrap(), &[255u8; 4][..]);
        assert_eq!(int32(DType::I32, &[-1]).unwrap(), &[255u8; 4][..]);
        assert_eq!(int32(DType::I8, &[-1, 127]).unwrap(), &[255, 127][..]);
        assert_eq!(int32(DType::U8, &[200]).unwrap(), &[200][..]);
        assert_eq!(int32(DType::Bool, &[0, 1]).unwrap(), &[0, 1][..]);
        assert_eq!(int32(DType::I16, &[-2]).unwrap(), &[254, 255][..]);
        assert_eq!(int32(DType::F16, &[0x3c00]).unwrap(), &[0x00, 0x3c][..]);
        assert_eq!(int32(DType::BF16, &[0xbf80]).unwrap(), &(-1.0f32).to_le_bytes()[2..]);
        assert_eq!(int32(DType::F8E4M3, &[0x38]).unwrap(), &[0x38][..]);
    }

    #[test]
    fn elements_out_of_range_are_an_error() {
        for (dtype, value) in [(DType::U8, 256), (DType::U8, -1), (DType::I8, 128), (DType::F16, 65536)] {
            assert!(int32(dtype, &[value]).unwrap_err().contains("does not fit"), "{dtype}");
        }
        let wide = TensorProto { uint64_data: vec![1 << 32], ..typed(DType::U32, 1) };
        assert!(data(wide).unwrap_err().contains("does not fit"));
    }

    #[test]
    fn data_must_fit_type_and_shape() {
        let raw = |n: usize, dims: &[i64]| TensorProto {
            raw_data: Some(vec![0; n].into()),
            dims: dims.to_vec(),
            ..typed(DType::F32, 0)
        };
        assert_eq!(data(raw(24, &[2, 3])).unwrap().len(), 24);
        assert_eq!(data(raw(0, &[2, 0])).unwrap().len(), 0);
        assert!(data(raw(20, &[2, 3])).unwrap_err().contains("20 bytes"));
        assert!(data(raw(4, &[-1])).unwrap_err().contains("negative dimension, -1;"));
        assert!(data(raw(4, &[i64::MAX, 8])).unwrap_err().contains("too large"));
        assert!(data(typed(DType::F32, 3)).unwrap_err().contains("0 elements"));
        let both = TensorProto { float_data: vec![0.0], ..raw(4, &[1]) };
        assert!(data(both).unwrap_err().contains("both raw_data"));
        let wrong = TensorProto { int64_data: vec![0], ..typed(DType::F32, 1) };
        assert!(data(wrong).unwrap_err().contains("belong in float_data"));
    }

    #[test]
    fn unsupported_element_types_are_named() {
        for (code, part) in [(8, "string"), (22, "int4"), (0, "0 is not"), (99, "99 is not")] {
            let tensor = TensorProto { data_type: Some(code), ..Default::default() };
            assert!(data(tensor).unwrap_err().contains(part));
        }
    }
}

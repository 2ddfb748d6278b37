//! NumPy files, which the command line reads and writes.

use sdrun::{HostTensor, abi::DType};
use std::{fs, io, path::Path};

/// Writes format 1.0: a header of text, padded to 64 bytes, then the elements.
pub fn write(path: &Path, tensor: &HostTensor) -> io::Result<()> {
    let descr = match tensor.dtype() {
        DType::F32 => "<f4",
        DType::I64 => "<i8",
        other => panic!("{other}"),
    };
    let shape: String = tensor.shape().iter().map(|d| format!("{d},")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    header += &" ".repeat(63 - (10 + header.len()) % 64);
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(tensor.bytes());
    fs::write(path, bytes)
}

/// Reads a tensor of the type and shape of `like`.
///
/// # Errors
///
/// If the file does not contain the elements of such a tensor.
pub fn read(path: &Path, like: &HostTensor) -> io::Result<HostTensor> {
    let bytes = fs::read(path)?;
    let header = bytes.get(8..10).map_or(0, |two| usize::from(u16::from_le_bytes([two[0], two[1]])));
    let elements = bytes.get(10 + header..).unwrap_or_default();
    HostTensor::from_bytes(like.dtype(), like.shape().to_vec(), elements).map_err(io::Error::other)
}

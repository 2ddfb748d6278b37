//! The header of a GGUF file, versions 2 and 3, little-endian (`docs/gguf.md` in github.com/ggml-org/ggml).
//!
//! No allocation takes its size from the file: a count only limits how many items are read.

use crate::safetensors::MOST_TENSORS;
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

pub(super) const MAGIC: &[u8] = b"GGUF";
/// Most dimensions that the format allows.
const MAX_DIMS: u32 = 4;
/// Deepest nesting of arrays that is read.
const MAX_DEPTH: u32 = 4;
/// Length of the longest array that is kept: shapes are kept; of vocabularies, only their places.
const MAX_KEPT: u64 = 8;
const DEFAULT_ALIGNMENT: u64 = 32;

/// What is wrong with a file.
#[derive(Debug, PartialEq)]
pub(super) enum Fault {
    Damaged(String),
    Unsupported(String),
}

fn damaged<T>(why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Damaged(why.into()))
}

/// A tensor as the header describes it.
#[derive(Debug, PartialEq)]
pub(super) struct TensorInfo {
    pub(super) name: String,
    /// The fastest dimension first.
    pub(super) dims: Vec<usize>,
    /// The number of its type.
    pub(super) code: u32,
    /// Bytes from the start of the data.
    pub(super) offset: u64,
}

/// An array in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Place {
    /// The number of its elements' type.
    kind: u32,
    len: u64,
    bytes: Range<usize>,
}

impl Place {
    /// The array's strings; `None` if it has other elements.
    pub(super) fn strings(&self, file: &[u8]) -> Option<Vec<String>> {
        let mut input = Input { file: file.get(..self.bytes.end)?, at: self.bytes.start };
        (self.kind == STRING).then(|| (0..self.len).map(|_| input.string().ok()).collect())?
    }

    /// The array's numbers; `None` if it has other elements.
    pub(super) fn numbers<T: std::str::FromStr>(&self, file: &[u8]) -> Option<Vec<T>> {
        let mut input = Input { file: file.get(..self.bytes.end)?, at: self.bytes.start };
        (0..self.len).map(|_| input.scalar(self.kind).ok()?.parse().ok()).collect()
    }

    /// The array's bytes; `None` if its elements are no bytes.
    pub(super) fn bytes<'a>(&self, file: &'a [u8]) -> Option<&'a [u8]> {
        matches!(self.kind, 0 | 1).then(|| file.get(self.bytes.clone()))?
    }
}

/// Everything before the data.
#[derive(Debug, Default)]
pub(super) struct Header {
    /// Strings, numbers and booleans, as text.
    pub(super) metadata: BTreeMap<String, String>,
    /// Short arrays of whole numbers that are sizes.
    pub(super) arrays: HashMap<String, Vec<usize>>,
    /// Where other arrays are.
    pub(super) places: HashMap<String, Place>,
    pub(super) tensors: Vec<TensorInfo>,
    /// Where the data begins.
    pub(super) data_start: usize,
}

/// Reads the header.
pub(super) fn read(file: &[u8]) -> Result<Header, Fault> {
    let mut input = Input { file, at: 0 };
    if input.take(4)? != MAGIC {
        return damaged("it does not begin with the format's magic number");
    }
    match input.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() <= 3 => {
            return Err(Fault::Unsupported("it is big-endian".into()));
        }
        version => return Err(Fault::Unsupported(format!("it is of version {version} of the format"))),
    }
    let (tensors, entries) = (input.u64()?, input.u64()?);
    if tensors > MOST_TENSORS as u64 {
        return Err(Fault::Unsupported(format!(
            "it has {tensors} tensors; sdrun reads at most {MOST_TENSORS}"
        )));
    }
    let mut header = Header::default();
    for _ in 0..entries {
        let key = input.string()?;
        match input.value()? {
            Value::Text(text) => {
                header.metadata.insert(key, text);
            }
            Value::Sizes(sizes) => {
                header.arrays.insert(key, sizes);
            }
            Value::Place(place) => {
                header.places.insert(key, place);
            }
            Value::Passed => {}
        }
    }
    let alignment = match header.metadata.get("general.alignment").map(|text| text.parse::<u64>()) {
        None => DEFAULT_ALIGNMENT,
        Some(Ok(alignment)) if alignment.is_power_of_two() && alignment <= 1 << 20 => alignment,
        Some(_) => return damaged("its alignment is no power of two"),
    };
    for _ in 0..tensors {
        let tensor = input.tensor()?;
        if tensor.offset % alignment != 0 {
            return damaged(format!("tensor {:?} is not aligned to {alignment} bytes", tensor.name));
        }
        header.tensors.push(tensor);
    }
    let start = (input.at as u64).next_multiple_of(alignment);
    header.data_start = usize::try_from(start).or_else(|_| damaged("its header is too long"))?;
    Ok(header)
}

/// A metadata value; only the kinds used here are kept.
enum Value {
    Text(String),
    Sizes(Vec<usize>),
    Place(Place),
    Passed,
}

struct Input<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    fn take(&mut self, len: u64) -> Result<&'a [u8], Fault> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        let Some(bytes) = end.and_then(|end| self.file.get(self.at..end)) else {
            return damaged("it ends within its header");
        };
        self.at += bytes.len();
        Ok(bytes)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        self.take(N as u64)?.try_into().or_else(|_| damaged("it ends within its header"))
    }
    fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }
    fn string(&mut self) -> Result<String, Fault> {
        let len = self.u64()?;
        let bytes = self.take(len)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_string()),
            Err(_) => damaged("a name in its header is not UTF-8"),
        }
    }

    fn value(&mut self) -> Result<Value, Fault> {
        let kind = self.u32()?;
        if kind != ARRAY {
            return self.scalar(kind).map(Value::Text);
        }
        let (kind, len) = (self.u32()?, self.u64()?);
        if len > MAX_KEPT || kind == ARRAY || kind == STRING {
            let start = self.at;
            self.pass(kind, len, 0)?;
            return Ok(Value::Place(Place { kind, len, bytes: start..self.at }));
        }
        let mut sizes = Vec::new();
        let mut all = true;
        for _ in 0..len {
            match self.scalar(kind)?.parse() {
                Ok(size) => sizes.push(size),
                Err(_) => all = false,
            }
        }
        Ok(if all { Value::Sizes(sizes) } else { Value::Passed })
    }

    fn scalar(&mut self, kind: u32) -> Result<String, Fault> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array()?).to_string(),
            1 => i8::from_le_bytes(self.array()?).to_string(),
            2 => u16::from_le_bytes(self.array()?).to_string(),
            3 => i16::from_le_bytes(self.array()?).to_string(),
            4 => self.u32()?.to_string(),
            5 => i32::from_le_bytes(self.array()?).to_string(),
            6 => f32::from_le_bytes(self.array()?).to_string(),
            BOOL => (self.array::<1>()? != [0]).to_string(),
            STRING => self.string()?,
            10 => self.u64()?.to_string(),
            11 => i64::from_le_bytes(self.array()?).to_string(),
            12 => f64::from_le_bytes(self.array()?).to_string(),
            other => return damaged(format!("its header has a value of unknown type {other}")),
        })
    }

    /// Skips the values of an array.
    fn pass(&mut self, kind: u32, len: u64, depth: u32) -> Result<(), Fault> {
        let size = match kind {
            0 | 1 | BOOL => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            STRING => {
                // Each takes at least the bytes of its length, so a wrong count soon reaches the end of the file.
                for _ in 0..len {
                    let len = self.u64()?;
                    self.take(len)?;
                }
                return Ok(());
            }
            ARRAY if depth < MAX_DEPTH => {
                for _ in 0..len {
                    let (kind, len) = (self.u32()?, self.u64()?);
                    self.pass(kind, len, depth + 1)?;
                }
                return Ok(());
            }
            other => return damaged(format!("its header has an array of type {other}")),
        };
        match len.checked_mul(size) {
            Some(bytes) => self.take(bytes).map(|_| ()),
            None => damaged("it ends within its header"),
        }
    }

    fn tensor(&mut self) -> Result<TensorInfo, Fault> {
        let name = self.string()?;
        let count = self.u32()?;
        if count > MAX_DIMS {
            return damaged(format!("tensor {name:?} has {count} dimensions"));
        }
        let mut dims = Vec::new();
        for _ in 0..count {
            match usize::try_from(self.u64()?) {
                Ok(dim) => dims.push(dim),
                Err(_) => return damaged(format!("the size of tensor {name:?} overflows")),
            }
        }
        Ok(TensorInfo { name, dims, code: self.u32()?, offset: self.u64()? })
    }
}

const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

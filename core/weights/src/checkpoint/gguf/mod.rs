//! GGUF files (stable-diffusion.cpp, ComfyUI-GGUF, llama.cpp): tensors under the original keys, many of them quantised in
//! blocks. Blocks are decoded to f32, or delivered as they are to a caller that asks for their encoding. Other tensors are
//! borrowed from the file.

mod quants;
mod reader;

use super::{
    container::{Container, slice_rows},
    vocabulary::Vocabulary,
};
use crate::memory::zeroed;
use quants::Kind;
use rayon::prelude::*;
use reader::{Header, Place, TensorInfo};
use sdrun_abi::{DType, EncodedWeight, Error, ErrorCode, Result, Weight};
use sdrun_files::{Links, Map, open_regular};
use std::{
    collections::{BTreeMap, HashMap},
    io::Read,
    ops::Range,
    path::{Path, PathBuf},
};

/// Metadata of ComfyUI-GGUF: the shape of a tensor that was stored under another.
const ORIGINAL_SHAPE: &str = "comfy.gguf.orig_shape.";
/// Elements dequantised at a time; a multiple of every block.
const ELEMENTS: usize = 1 << 14;

/// Whether the file has GGUF's first bytes or extension.
pub(super) fn is_gguf(path: &Path) -> Result<bool> {
    let failed = |error| Error::io("read", path, &error);
    if !path.metadata().map_err(failed)?.is_file() {
        return Ok(false);
    }
    let mut magic = Vec::new();
    open_regular(path, Links::Follow)?.take(4).read_to_end(&mut magic).map_err(failed)?;
    Ok(magic == reader::MAGIC || path.extension().is_some_and(|extension| extension == "gguf"))
}

/// The tensors of a mapped GGUF file.
#[derive(Debug)]
pub(super) struct GgufWeights {
    path: PathBuf,
    mapping: Map,
    tensors: HashMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
    /// Arrays of the header.
    places: HashMap<String, Place>,
}

#[derive(Debug)]
struct Tensor {
    /// As in PyTorch: the slowest dimension first.
    shape: Vec<usize>,
    kind: Option<&'static Kind>,
    /// The type's number in the format.
    code: u32,
    /// Byte range in the file; empty for unknown types.
    range: Range<usize>,
}

impl GgufWeights {
    /// Opens a file. `DataLoss` where it is damaged, `Unimplemented` for unsupported versions of the format.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mapping = Map::open(path, Links::Follow)?;
        let header = reader::read(&mapping).map_err(|error| {
            let (code, why) = match error {
                reader::Fault::Damaged(why) => (ErrorCode::DataLoss, why),
                reader::Fault::Unsupported(why) => (ErrorCode::Unimplemented, why),
            };
            Error::new(code, format!("{} cannot be read as GGUF: {why}", path.display())).with_file(path)
        })?;
        let damaged = |why: String| {
            let message = format!("{} is not a valid GGUF file: {why}", path.display());
            Error::new(ErrorCode::DataLoss, message)
                .with_file(path)
                .with_hint("it is damaged or not completely downloaded: get it again")
        };
        let mut tensors = HashMap::new();
        for info in &header.tensors {
            let tensor = Tensor::new(info, &header, mapping.len()).map_err(damaged)?;
            if tensors.insert(info.name.clone(), tensor).is_some() {
                return Err(damaged(format!("it holds tensor {:?} twice", info.name)));
            }
        }
        check_overlap(&tensors).map_err(damaged)?;
        let Header { metadata, places, .. } = header;
        Ok(GgufWeights { path: path.to_owned(), mapping, tensors, metadata, places })
    }

    fn find(&self, key: &str) -> Result<&Tensor> {
        self.tensors
            .get(key)
            .ok_or_else(|| Error::not_found(format!("{} has no tensor {key:?}", self.path.display())))
    }

    fn kind(&self, key: &str, tensor: &Tensor) -> Result<&'static Kind> {
        tensor.kind.ok_or_else(|| {
            let (path, name) = (self.path.display(), quants::name(tensor.code));
            Error::unsupported(format!(
                "tensor {key:?} in {path} is of GGUF type {name}, which sdrun does not read"
            ))
            .with_file(&self.path)
            .with_hint("get a version in Q8_0, Q6_K, Q5_K, Q4_K or another of the common types")
        })
    }
}

impl Tensor {
    fn new(info: &TensorInfo, header: &Header, file_len: usize) -> Result<Self, String> {
        let name = &info.name;
        let mut shape: Vec<usize> = info.dims.iter().rev().copied().collect();
        let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let count = elements(&shape).ok_or_else(|| format!("the size of tensor {name:?} overflows"))?;
        if let Some(original) = header.arrays.get(&format!("{ORIGINAL_SHAPE}{name}")) {
            if elements(original) != Some(count) {
                return Err(format!("tensor {name:?} has {count} elements, which do not make {original:?}"));
            }
            shape.clone_from(original);
        } else if name.ends_with("pos_embed") && shape.len() == 2 {
            // The format drops leading dimensions of 1; SD 3's table of positions has one.
            shape.insert(0, 1);
        }
        let kind = quants::kind(info.code);
        let bytes = match kind {
            // Blocks run along the innermost dimension.
            Some(kind) if info.dims.first().copied().unwrap_or(1) % kind.elements != 0 => {
                return Err(format!("rows of tensor {name:?} are no whole blocks of {}", kind.name));
            }
            Some(kind) => (count / kind.elements).checked_mul(kind.bytes),
            None => Some(0),
        };
        let start =
            usize::try_from(info.offset).ok().and_then(|offset| header.data_start.checked_add(offset));
        let end = start.zip(bytes).and_then(|(start, bytes)| start.checked_add(bytes));
        match start.zip(end) {
            Some((start, end)) if end <= file_len => {
                Ok(Tensor { shape, kind, code: info.code, range: start..end })
            }
            _ => Err(format!("tensor {name:?} ends past the end of the file")),
        }
    }
}

/// No two tensors may share bytes.
fn check_overlap(tensors: &HashMap<String, Tensor>) -> Result<(), String> {
    let mut places: Vec<(&Range<usize>, &String)> = tensors
        .iter()
        .map(|(name, tensor)| (&tensor.range, name))
        .filter(|(range, _)| !range.is_empty())
        .collect();
    places.sort_unstable_by_key(|(range, _)| range.start);
    for pair in places.windows(2) {
        if let [(first, a), (second, b)] = pair
            && first.end > second.start
        {
            return Err(format!("tensors {a:?} and {b:?} overlap"));
        }
    }
    Ok(())
}

impl Container for GgufWeights {
    fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }
    fn stored(&self, key: &str) -> Option<(String, Vec<usize>)> {
        self.tensors.get(key).map(|tensor| (quants::name(tensor.code), tensor.shape.clone()))
    }
    fn describe(&self, key: &str) -> Result<(DType, Vec<usize>)> {
        let tensor = self.find(key)?;
        Ok((self.kind(key, tensor)?.dtype(), tensor.shape.clone()))
    }
    fn read(&self, key: &str, rows: Option<Range<usize>>) -> Result<Weight<'_>> {
        let tensor = self.find(key)?;
        let kind = self.kind(key, tensor)?;
        // In range: checked against the size of the mapping, which cannot change.
        let data = self.mapping.part(tensor.range.clone());
        let data = data.ok_or_else(|| Error::internal(format!("{key:?} has left its file")))?;
        let Some(decode) = kind.decode else {
            let place = tensor.range.start as u64;
            let weight =
                Weight::new(kind.dtype(), tensor.shape.clone(), data)?.in_file(self.path.clone(), place);
            return match rows {
                Some(rows) => slice_rows(weight, rows),
                None => Ok(weight),
            };
        };
        let row_elements = tensor.shape.iter().skip(1).fold(1, |n: usize, d| n.saturating_mul(*d));
        let all = tensor.shape.first().copied().unwrap_or(1);
        match rows {
            // Only the blocks of these rows.
            Some(rows)
                if row_elements.is_multiple_of(kind.elements)
                    && rows.start <= rows.end
                    && rows.end <= all =>
            {
                let row_bytes = row_elements / kind.elements * kind.bytes;
                let mut shape = tensor.shape.clone();
                if let Some(first) = shape.first_mut() {
                    *first = rows.len();
                }
                let part = &data[rows.start * row_bytes..rows.end * row_bytes];
                Weight::new(DType::F32, shape, dequantised(part, kind, decode)?)
            }
            rows => {
                let whole = Weight::new(DType::F32, tensor.shape.clone(), dequantised(&data, kind, decode)?)?;
                match rows {
                    Some(rows) => slice_rows(whole, rows),
                    None => Ok(whole),
                }
            }
        }
    }
    fn encoded(
        &self,
        key: &str,
        rows: Option<Range<usize>>,
        encodings: &[&str],
    ) -> Result<Option<EncodedWeight<'_>>> {
        let tensor = self.find(key)?;
        let kind = self.kind(key, tensor)?;
        let [all, columns] = tensor.shape[..] else { return Ok(None) };
        let rows = rows.unwrap_or(0..all);
        // A tensor stored under another shape may have blocks across the ends of its rows.
        let whole = columns.is_multiple_of(kind.elements) && rows.start <= rows.end && rows.end <= all;
        if kind.decode.is_none() || !encodings.contains(&kind.name) || !whole {
            return Ok(None);
        }
        let row_bytes = columns / kind.elements * kind.bytes;
        let start = tensor.range.start + rows.start * row_bytes;
        let data = self.mapping.part(start..start + rows.len() * row_bytes);
        let data = data.ok_or_else(|| Error::internal(format!("{key:?} has left its file")))?;
        let weight = EncodedWeight::new(kind.name, vec![rows.len(), columns], data);
        Ok(Some(weight.in_file(self.path.clone(), start as u64)))
    }
    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
    fn vocabulary(&self) -> Option<Vocabulary> {
        // The keys are `tokenizer.PROGRAM.NAME`.
        let is =
            |key: &str, name: &str| key.starts_with("tokenizer.") && key.rsplit('.').next() == Some(name);
        let place = |name: &str| Some(self.places.iter().find(|(key, _)| is(key, name))?.1);
        let is_set = |name: &str| self.metadata.iter().any(|(key, value)| is(key, name) && value == "true");
        let file = &self.mapping;
        Some(Vocabulary::Pieces {
            texts: place("tokens")?.strings(file)?,
            scores: place("scores")?.numbers(file)?,
            kinds: place("token_type")?.numbers(file)?,
            charsmap: place("precompiled_charsmap")
                .and_then(|place| place.bytes(file))
                .unwrap_or_default()
                .to_vec(),
            space_prefix: is_set("add_space_prefix"),
            collapse_spaces: is_set("remove_extra_whitespaces"),
        })
    }
}

/// The values of whole blocks of a quantised GGUF type, by its number in the format (`ggml_type`).
///
/// `Unimplemented` for types that are not quantised or not supported; `InvalidArgument` where a block is incomplete.
pub fn dequantize(code: u32, blocks: &[u8]) -> Result<Vec<f32>> {
    let kind = quants::kind(code);
    let Some((kind, decode)) = kind.and_then(|kind| Some((kind, kind.decode?))) else {
        return Err(Error::unsupported(format!(
            "GGUF type {} has no blocks that sdrun reads",
            quants::name(code)
        )));
    };
    if !blocks.len().is_multiple_of(kind.bytes) {
        let message =
            format!("{} bytes are no whole blocks of {}, {} each", blocks.len(), kind.name, kind.bytes);
        return Err(Error::invalid(message));
    }
    let values = dequantised(blocks, kind, decode)?;
    Ok(values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Decodes whole blocks to f32.
fn dequantised(data: &[u8], kind: &Kind, decode: quants::Decode) -> Result<Vec<u8>> {
    let blocks = ELEMENTS / kind.elements;
    let size = data.len() / kind.bytes * kind.elements * DType::F32.size();
    let mut out = zeroed(size)?;
    out.par_chunks_mut(ELEMENTS * DType::F32.size()).zip(data.par_chunks(blocks * kind.bytes)).for_each(
        |(target, source)| {
            let mut values = [0f32; quants::MAX_ELEMENTS];
            let values = &mut values[..kind.elements];
            let targets = target.chunks_exact_mut(kind.elements * DType::F32.size());
            for (block, target) in source.chunks_exact(kind.bytes).zip(targets) {
                decode(block, values);
                for (bytes, value) in target.as_chunks_mut::<4>().0.iter_mut().zip(&*values) {
                    *bytes = value.to_le_bytes();
                }
            }
        },
    );
    Ok(out)
}

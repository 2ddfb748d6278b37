//! What a checkpoint's tensors are read from, whatever the file format: keys as they stand in the file.

use crate::SafetensorsWeights;
use sdrun_abi::{DType, Error, Result, Weight, WeightSource};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    ops::{Deref, Range},
};

/// Tensors by the keys of the file.
pub(super) trait Container: Debug + Send + Sync {
    /// All keys, sorted.
    fn keys(&self) -> Vec<&str>;
    /// Element type as the format calls it, in lower case, and dimensions; also of types that cannot be read.
    fn stored(&self, key: &str) -> Option<(String, Vec<usize>)>;
    /// Element type and dimensions of what [`read`](Container::read) delivers.
    fn describe(&self, key: &str) -> Result<(DType, Vec<usize>)>;
    /// The tensor, or some of its rows (indices of the first dimension, within it). Borrowed where the file holds
    /// these very bytes.
    fn read(&self, key: &str, rows: Option<Range<usize>>) -> Result<Weight<'_>>;
    /// What the file says about itself.
    fn metadata(&self) -> &BTreeMap<String, String>;
}

impl Container for SafetensorsWeights {
    fn keys(&self) -> Vec<&str> {
        self.names()
    }
    fn stored(&self, key: &str) -> Option<(String, Vec<usize>)> {
        SafetensorsWeights::stored(self, key).map(|(dtype, shape)| (dtype.to_lowercase(), shape.to_vec()))
    }
    fn describe(&self, key: &str) -> Result<(DType, Vec<usize>)> {
        WeightSource::describe(self, key)
    }
    fn read(&self, key: &str, rows: Option<Range<usize>>) -> Result<Weight<'_>> {
        let weight = self.get(key)?;
        match rows {
            Some(rows) => slice_rows(weight, rows),
            None => Ok(weight),
        }
    }
    fn metadata(&self) -> &BTreeMap<String, String> {
        SafetensorsWeights::metadata(self)
    }
}

/// Some bytes of a weight, which stays where it is.
struct Part<'a> {
    whole: Weight<'a>,
    range: Range<usize>,
}

impl Deref for Part<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.whole.data().get(self.range.clone()).unwrap_or_default()
    }
}

/// Rows of a weight, not copied.
pub(super) fn slice_rows(weight: Weight<'_>, rows: Range<usize>) -> Result<Weight<'_>> {
    let mut shape = weight.shape.clone();
    let Some(first) = shape.first_mut().filter(|first| rows.start <= rows.end && rows.end <= **first) else {
        return Err(Error::internal(format!("there are no rows {rows:?} in shape {:?}", weight.shape)));
    };
    let row_bytes = weight.data().len().checked_div(*first).unwrap_or(0);
    *first = rows.len();
    let range = rows.start * row_bytes..rows.end * row_bytes;
    let (dtype, place) = (weight.dtype, weight.file.clone());
    let start = range.start as u64;
    let part = Weight::new(dtype, shape, Part { whole: weight, range })?;
    Ok(match place {
        Some((path, offset)) => part.in_file(path, offset + start),
        None => part,
    })
}

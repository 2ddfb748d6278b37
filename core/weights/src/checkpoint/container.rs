//! Tensors of a checkpoint file of any format, by the file's own keys.

use super::vocabulary::Vocabulary;
use crate::SafetensorsWeights;
use sdrun_abi::{DType, EncodedWeight, Error, Result, Weight, WeightSource};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    ops::{Deref, Range},
};

/// Tensors by the keys of the file.
pub(super) trait Container: Debug + Send + Sync {
    /// All keys, sorted.
    fn keys(&self) -> Vec<&str>;
    /// Element type by the format's name in lower case, and dimensions; also for unsupported types.
    fn stored(&self, key: &str) -> Option<(String, Vec<usize>)>;
    /// Element type and dimensions of what [`read`](Container::read) delivers.
    fn describe(&self, key: &str) -> Result<(DType, Vec<usize>)>;
    /// The tensor, or some of its rows (indices of the first dimension, within it). Borrowed where the file holds
    /// exactly these bytes.
    fn read(&self, key: &str, rows: Option<Range<usize>>) -> Result<Weight<'_>>;
    /// A matrix, or some of its rows, in one of these block encodings. `None` where the file holds it in none of them.
    fn encoded(
        &self,
        key: &str,
        rows: Option<Range<usize>>,
        encodings: &[&str],
    ) -> Result<Option<EncodedWeight<'_>>> {
        let _ = (key, rows, encodings);
        Ok(None)
    }
    /// The file's own metadata.
    fn metadata(&self) -> &BTreeMap<String, String>;
    /// The vocabulary that the file's metadata hold.
    fn vocabulary(&self) -> Option<Vocabulary> {
        None
    }
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

/// A range of a weight's bytes, not copied.
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

/// Takes rows of a weight without a copy.
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

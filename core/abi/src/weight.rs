use crate::{DType, Error, Hint, Result};
use std::{fmt, ops::Deref, path::PathBuf};

/// Bytes that a weight borrows or owns.
pub(crate) type Bytes<'a> = Box<dyn Deref<Target = [u8]> + Send + 'a>;

/// Ends the name of an encoding whose blocks hold the transpose of a matrix: `q8_0:transposed`.
pub const TRANSPOSED: &str = ":transposed";

/// Takes rows of a weight from the given one on; see [`WeightSource::rows`].
pub type TakeRows<'a> = &'a mut dyn FnMut(usize, Weight<'_>) -> Result<()>;

/// Named tensors, delivered one at a time by initializer name.
pub trait WeightSource: Sync {
    /// The weight with this name, in the dtype and shape of the graph's initializer. Fails with `NotFound` if there
    /// is none.
    fn get(&self, name: &str) -> Result<Weight<'_>>;

    /// Element type and shape of the result of [`get`](WeightSource::get). Sources that compute or convert values on
    /// demand answer this without doing so.
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        self.get(name).map(|weight| (weight.dtype, weight.shape))
    }

    /// Fails where [`get`](WeightSource::get) would fail. Sources that compute values on demand find that out without
    /// doing so, where they can. A refit in place checks every weight before it writes the first.
    fn check(&self, name: &str) -> Result<()> {
        self.get(name).map(drop)
    }

    /// The weight in one of `encodings`, the block encodings that the caller supports, under their ggml names
    /// (`q8_0`, `q4_k`). Blocks run along the last dimension of the graph's initializer. Exporters transpose most
    /// matrices, so the blocks of their files run along the first dimension. A caller that supports those asks for
    /// `q8_0:transposed` ([`TRANSPOSED`]).
    ///
    /// `f32`, `f16` and `bf16` are plain values, of a type whose numbers the graph's type holds. With them, a caller takes
    /// what a file stores without a conversion or a transpose, and makes these while it packs.
    ///
    /// `None` if the source has the weight in none of them; use [`get`](WeightSource::get) then. A source only returns
    /// blocks that it holds: it never encodes.
    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let _ = (name, encodings);
        Ok(None)
    }

    /// Delivers the rows of a weight in order, a few at a time, so that the caller packs them while they are in the cache. Rows run along the
    /// first dimension of the graph's initializer, or of its transpose if `transposed`. `take` receives the index of the first row, and some
    /// rows in the type of [`get`](WeightSource::get): a multiple of `step`, except at the end.
    ///
    /// False, before any call of `take`, if the source gains nothing from this or has no such rows; use `get` then. Sources that
    /// compute values on demand implement it.
    fn rows(&self, name: &str, transposed: bool, step: usize, take: TakeRows<'_>) -> Result<bool> {
        let _ = (name, transposed, step, take);
        Ok(false)
    }

    /// Version of the weight that `get` would return now. Two equal versions for the same name mean the same bytes,
    /// so a refit can skip that weight. `None` if the source cannot tell.
    fn version(&self, name: &str) -> Option<u128> {
        let _ = name;
        None
    }
}

/// One tensor from a [`WeightSource`]: contiguous, little-endian, row-major; valid while it lives.
pub struct Weight<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Where a file holds the same bytes, unchanged: path and offset. Runtimes that map files use it.
    pub file: Option<(PathBuf, u64)>,
    data: Bytes<'a>,
}

impl<'a> Weight<'a> {
    /// A weight over `data` (a borrowed slice, a `Vec`, or a guard). Fails with `InvalidArgument` if the length does
    /// not match.
    pub fn new(dtype: DType, shape: Vec<usize>, data: impl Deref<Target = [u8]> + Send + 'a) -> Result<Self> {
        match dtype.bytes_of(&shape) {
            Some(n) if n == data.len() => Ok(Weight { dtype, shape, file: None, data: Box::new(data) }),
            _ => Err(Error::invalid(format!(
                "{} bytes do not match a {dtype} tensor of shape {shape:?}",
                data.len()
            ))),
        }
    }
    /// Sets the file that holds the same bytes.
    pub fn in_file(mut self, path: PathBuf, offset: u64) -> Self {
        self.file = Some((path, offset));
        self
    }
    /// The bytes.
    pub fn data(&self) -> &[u8] {
        &self.data
    }
    pub(crate) fn into_bytes(self) -> Bytes<'a> {
        self.data
    }
}

impl fmt::Debug for Weight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} {:?}, file {:?})", self.dtype, self.shape, self.file)
    }
}

/// A weight in a block encoding, as in a file; valid while it lives.
pub struct EncodedWeight<'a> {
    /// ggml's name of the encoding: `q8_0`, `q4_k`, `f16`. With [`TRANSPOSED`] after it, blocks run along the first of two
    /// dimensions, column after column.
    pub encoding: String,
    /// Dimensions of the graph's initializer. Other blocks run along the last one, row after row.
    pub shape: Vec<usize>,
    /// Where a file holds the same bytes, unchanged: path and offset.
    pub file: Option<(PathBuf, u64)>,
    data: Bytes<'a>,
}

impl<'a> EncodedWeight<'a> {
    /// A weight over the blocks in `data`. The reader, who knows the encoding, must check the number of blocks.
    pub fn new(
        encoding: impl Into<String>,
        shape: Vec<usize>,
        data: impl Deref<Target = [u8]> + Send + 'a,
    ) -> Self {
        EncodedWeight { encoding: encoding.into(), shape, file: None, data: Box::new(data) }
    }
    /// Plain values, under the name of their type.
    pub fn plain(weight: Weight<'a>) -> Self {
        let Weight { dtype, shape, file, data } = weight;
        EncodedWeight { encoding: dtype.name().into(), shape, file, data }
    }
    /// Sets the file that holds the same bytes.
    pub fn in_file(mut self, path: PathBuf, offset: u64) -> Self {
        self.file = Some((path, offset));
        self
    }
    /// The blocks.
    pub fn data(&self) -> &[u8] {
        &self.data
    }
    pub(crate) fn into_bytes(self) -> Bytes<'a> {
        self.data
    }
}

impl fmt::Debug for EncodedWeight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EncodedWeight({} {:?}, file {:?})", self.encoding, self.shape, self.file)
    }
}

/// A source without weights, for engines that need none, such as baked ones.
pub struct NoWeights;

impl WeightSource for NoWeights {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        Err(Error::not_found(format!("there is no weight {name:?}")).with_hint(Hint::GiveWeights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_checks_its_length() {
        assert!(Weight::new(DType::F32, vec![2, 3], vec![0u8; 24]).is_ok());
        let error = Weight::new(DType::F32, vec![2, 3], vec![0u8; 20]).unwrap_err();
        assert!(error.message.contains("20 bytes"), "{error}");
        assert!(Weight::new(DType::F32, vec![usize::MAX, 2], &[][..]).is_err());
    }

    #[test]
    fn no_weights_has_none() {
        assert_eq!(NoWeights.get("w").unwrap_err().code, crate::ErrorCode::NotFound);
        assert!(NoWeights.encoded("w", &["q8_0"]).unwrap().is_none());
    }
}

use safetensors::{Dtype, SafeTensorError, SafeTensors};
use sdrun_abi::{DType, Error, ErrorCode, Result, Weight, WeightSource};
use sdrun_files::{Links, Map};
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

/// Bytes of the header's length, which comes first.
const LENGTH_BYTES: u64 = 8;
/// Largest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// The most tensors of a checkpoint. The largest diffusion models have a few thousand, adapters of them some ten thousand. A file of
/// nothing but names would keep sdrun busy for seconds.
pub(crate) const MOST_TENSORS: usize = 100_000;

/// The tensors of one or several safetensors files, by key. The files are mapped, nothing is copied.
#[derive(Debug)]
pub struct SafetensorsWeights {
    files: Vec<File>,
    tensors: HashMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    mapping: Map,
}

#[derive(Debug)]
struct Tensor {
    /// Index into the files.
    file: usize,
    /// Byte range of the tensor in the file.
    start: usize,
    end: usize,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl SafetensorsWeights {
    /// Opens a checkpoint: one file, or all shards of one.
    ///
    /// `NotFound` or another I/O error if a file cannot be read; `DataLoss` if it is not safetensors, is truncated or
    /// contradicts itself; `InvalidArgument` if two files hold the same key; `Unimplemented` for pickled checkpoints, which
    /// are programs and never run.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut weights =
            SafetensorsWeights { files: Vec::new(), tensors: HashMap::new(), metadata: BTreeMap::new() };
        for path in paths {
            weights.add(path.as_ref())?;
        }
        Ok(weights)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let mapping = Map::open(path, Links::Follow)?;
        refuse_other_formats(path, &mapping)?;
        let (header, metadata) =
            SafeTensors::read_metadata(&mapping).map_err(|error| malformed(path, &error))?;
        let tensors = metadata.tensors();
        let count = self.tensors.len() + tensors.len();
        if count > MOST_TENSORS {
            let message =
                format!("{} has {count} tensors; sdrun reads at most {MOST_TENSORS}", path.display());
            return Err(Error::unsupported(message).with_file(path));
        }
        let data = LENGTH_BYTES as usize + header;
        for (key, info) in tensors {
            let (start, end) = (data + info.data_offsets.0, data + info.data_offsets.1);
            let tensor =
                Tensor { file: self.files.len(), start, end, dtype: info.dtype, shape: info.shape.clone() };
            if let Some(other) = self.tensors.get(&key) {
                let first = self.files.get(other.file).map_or(path, |file| &file.path);
                return Err(Error::invalid(format!(
                    "both {} and {} hold {key:?}",
                    first.display(),
                    path.display()
                ))
                .with_file(path)
                .with_hint("give the shards of one checkpoint only"));
            }
            self.tensors.insert(key, tensor);
        }
        for (key, value) in metadata.metadata().iter().flatten() {
            self.metadata.entry(key.clone()).or_insert_with(|| value.clone());
        }
        self.files.push(File { path: path.to_owned(), mapping });
        Ok(())
    }

    /// All keys, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// The files' `__metadata__`. If several files have a key, the first wins.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Element type as the format writes it (`BF16`, `F8_E4M3`) and dimensions, also of unsupported types.
    pub(crate) fn stored(&self, name: &str) -> Option<(String, &[usize])> {
        self.tensors.get(name).map(|tensor| (tensor.dtype.to_string(), &*tensor.shape))
    }

    fn find(&self, name: &str) -> Result<(&Tensor, &File, DType)> {
        let tensor = self.tensors.get(name).ok_or_else(|| {
            let files: Vec<String> = self.files.iter().map(|file| file.path.display().to_string()).collect();
            Error::not_found(format!("{} has no tensor {name:?}", files.join(", ")))
        })?;
        let file = &self.files[tensor.file];
        let dtype = element_type(tensor.dtype).ok_or_else(|| {
            let (path, dtype) = (file.path.display(), tensor.dtype);
            Error::unsupported(format!(
                "tensor {name:?} in {path} has elements of type {dtype}, which sdrun does not read"
            ))
            .with_file(&file.path)
        })?;
        Ok((tensor, file, dtype))
    }
}

impl WeightSource for SafetensorsWeights {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let (tensor, file, dtype) = self.find(name)?;
        // In range: the header was checked against the size of the mapping, which cannot change.
        let data = file.mapping.part(tensor.start..tensor.end);
        let data = data.ok_or_else(|| Error::internal(format!("{name:?} has left its file")))?;
        Ok(Weight::new(dtype, tensor.shape.clone(), data)?.in_file(file.path.clone(), tensor.start as u64))
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let (tensor, _, dtype) = self.find(name)?;
        Ok((dtype, tensor.shape.clone()))
    }
}

/// The element type; `None` for unsupported ones.
fn element_type(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::F8_E5M2 => DType::F8E5M2,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::U16 => DType::U16,
        Dtype::I16 => DType::I16,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::U32 => DType::U32,
        Dtype::I32 => DType::I32,
        Dtype::F32 => DType::F32,
        Dtype::U64 => DType::U64,
        Dtype::I64 => DType::I64,
        Dtype::F64 => DType::F64,
        _ => return None,
    })
}

/// Refuses pickles (bare, or in PyTorch's zip archives) and GGUF, by their first bytes or their name.
fn refuse_other_formats(path: &Path, data: &[u8]) -> Result<()> {
    let refuse = |what: &str, hint: &str| {
        let message = format!("{} is {what}, not a safetensors file", path.display());
        Err(Error::unsupported(message).with_file(path).with_hint(hint))
    };
    // A pickle's first bytes, read as a header length, are beyond the format's bound.
    let length = data.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let pickled = data.starts_with(b"PK\x03\x04") || (data.starts_with(&[0x80]) && length > MAX_HEADER);
    if pickled || ["ckpt", "pt", "pth", "bin"].contains(&&*extension) {
        let hint = "pickled checkpoints can run any code when they are read: convert it to safetensors on a machine you can lose, \
                    or download the safetensors version";
        return refuse("a pickled PyTorch checkpoint", hint);
    }
    if data.starts_with(b"GGUF") {
        return refuse("a GGUF file", "open it as a checkpoint, or convert it to safetensors");
    }
    Ok(())
}

fn malformed(path: &Path, error: &SafeTensorError) -> Error {
    let why = match error {
        SafeTensorError::HeaderTooSmall => "it is shorter than the length of its header".into(),
        SafeTensorError::HeaderTooLarge => format!("its header is said to be longer than {MAX_HEADER} bytes"),
        SafeTensorError::InvalidHeaderLength => "it ends within its header".into(),
        SafeTensorError::MetadataIncompleteBuffer => "its size is not what its header says".into(),
        other => other.to_string(),
    };
    Error::new(ErrorCode::DataLoss, format!("{} is not a valid safetensors file: {why}", path.display()))
        .with_file(path)
        .with_hint("it is damaged or not completely downloaded: get it again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }
    const HEADER: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b.weight":{"dtype":"F16","shape":[3,1],"data_offsets":[8,14]},"c":{"dtype":"F4","shape":[4],"data_offsets":[14,16]}}"#;

    fn sample() -> Vec<u8> {
        file(HEADER, &(0..16).collect::<Vec<u8>>())
    }
    fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn tensors_are_delivered_with_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = sample();
        let path = write(folder.path(), "m.safetensors", &bytes);
        let weights = SafetensorsWeights::open(&[&path]).unwrap();
        assert_eq!(weights.names(), ["a", "b.weight", "c"]);
        let b = weights.get("b.weight").unwrap();
        assert_eq!((b.dtype, &*b.shape, b.data()), (DType::F16, &[3, 1][..], &[8, 9, 10, 11, 12, 13][..]));
        let (place, offset) = b.file.clone().unwrap();
        assert_eq!((place, &bytes[offset as usize..][..6]), (path, b.data()));
        assert_eq!(weights.describe("a").unwrap(), (DType::F32, vec![2]));
        assert_eq!(weights.get("d").unwrap_err().code, ErrorCode::NotFound);
        let error = weights.get("c").unwrap_err();
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.message.contains("F4"), "{error}");
    }

    #[test]
    fn shards_join_and_may_not_repeat_a_key() {
        let folder = tempfile::tempdir().unwrap();
        let one = write(folder.path(), "1.safetensors", &sample());
        let header = r#"{"d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let two = write(folder.path(), "2.safetensors", &file(header, &[42]));
        let weights = SafetensorsWeights::open(&[&one, &two]).unwrap();
        assert_eq!(weights.get("d").unwrap().data(), [42]);
        assert_eq!(weights.get("a").unwrap().data(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let error = SafetensorsWeights::open(&[&one, &two, &one]).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("1.safetensors"), "{error}");
    }

    #[test]
    fn of_a_key_in_the_metadata_of_several_files_the_first_counts() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["1", "2"].map(|n| {
            let header = format!(r#"{{"__metadata__":{{"all":"{n}","only{n}":"x"}}}}"#);
            write(folder.path(), &format!("{n}.safetensors"), &file(&header, &[]))
        });
        let weights = SafetensorsWeights::open(&files).unwrap();
        let found: Vec<(&str, &str)> = weights.metadata().iter().map(|(k, v)| (&**k, &**v)).collect();
        assert_eq!(found, [("all", "1"), ("only1", "x"), ("only2", "x")]);
    }

    #[test]
    fn a_file_of_nothing_but_names_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let empty = |i: usize| format!(r#""{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#);
        let header = |count| format!("{{{}}}", (0..count).map(empty).collect::<Vec<_>>().join(","));
        let open = |count| {
            let path = write(folder.path(), "m.safetensors", &file(&header(count), &[]));
            SafetensorsWeights::open(&[path]).map(|weights| weights.names().len())
        };
        assert_eq!(open(1000).unwrap(), 1000);
        let error = open(MOST_TENSORS + 1).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.message.contains("100001 tensors"), "{error}");
    }

    #[test]
    fn other_formats_are_refused_with_a_hint() {
        let folder = tempfile::tempdir().unwrap();
        let pickle = [0x80, 2, b'}', b'q', 0, b'.', 0, 0, 0, 0, 0, 0];
        for (name, bytes) in [
            ("a.ckpt", &pickle[..]),
            ("b.safetensors", &pickle),
            ("c.safetensors", b"PK\x03\x04aaaaaaaaaa"),
            ("d.pt", &sample()),
            ("e.BIN", b""),
            ("f.gguf", b"GGUF\x03\0\0\0aaaa"),
        ] {
            let error = SafetensorsWeights::open(&[write(folder.path(), name, bytes)]).unwrap_err();
            assert_eq!(error.code, ErrorCode::Unimplemented, "{name}: {error}");
            assert!(error.hint.unwrap().to_string().contains("safetensors"), "{name}");
        }
        // 640 bytes of header begin like a pickle.
        let header = format!("{{}}{}", " ".repeat(638));
        let path = write(folder.path(), "g.safetensors", &file(&header, b""));
        assert!(SafetensorsWeights::open(&[path]).unwrap().names().is_empty());
    }

    #[test]
    fn damage_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let whole = sample();
        let mut longer = whole.clone();
        longer.push(0);
        let mut blind = whole.clone();
        blind[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        for (bytes, words) in [
            (&whole[..0], "shorter"),
            (&whole[..7], "shorter"),
            (&whole[..50], "within its header"),
            (&whole[..whole.len() - 1], "size"),
            (&longer, "size"),
            (&blind, "longer than"),
            (&file("[]", b""), "safetensors"),
        ] {
            let error =
                SafetensorsWeights::open(&[write(folder.path(), "m.safetensors", bytes)]).unwrap_err();
            assert_eq!(error.code, ErrorCode::DataLoss, "{error}");
            assert!(error.message.contains(words) && error.message.contains("m.safetensors"), "{error}");
        }
        let error = SafetensorsWeights::open(&[folder.path().join("absent")]).unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound);
        assert!(SafetensorsWeights::open(&[folder.path()]).unwrap_err().message.contains("is a folder"));
    }

    /// Opens the bytes as a file; what opens must also deliver every tensor it names.
    fn open_and_read(bytes: &[u8]) -> Result<(), TestCaseError> {
        let folder = tempfile::tempdir().unwrap();
        if let Ok(weights) = SafetensorsWeights::open(&[write(folder.path(), "m.safetensors", bytes)]) {
            for name in weights.names() {
                if let Ok(weight) = weights.get(name) {
                    prop_assert_eq!(Some(weight.data().len()), weight.dtype.bytes_of(&weight.shape));
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(edits in prop::collection::vec((0usize..250, any::<u8>()), 1..6), cut in 0usize..400) {
            let mut bytes = sample();
            for (place, byte) in edits {
                let place = place % bytes.len();
                bytes[place] = byte;
            }
            bytes.truncate(cut);
            open_and_read(&bytes)?;
        }

        #[test]
        fn mutated_numbers_never_panic(
            shape in prop::collection::vec(prop_oneof![any::<u64>(), 0u64..5], 0..4),
            start in prop_oneof![any::<u64>(), 0u64..20],
            end in prop_oneof![any::<u64>(), 0u64..20],
        ) {
            let header = format!(r#"{{"a":{{"dtype":"F16","shape":{shape:?},"data_offsets":[{start},{end}]}}}}"#);
            open_and_read(&file(&header, &[0; 16]))?;
        }
    }
}

//! Hashes of model files, as A1111 and civitai use them to recognise models.
//!
//! All are the first hex digits of a SHA-256. "AutoV2" has 10 digits, of the whole file. An adapter's hash has 12, of its tensors
//! without the header of the safetensors file ("AutoV3", kohya's `sshs_model_hash`), so that new metadata does not change it.

use sdrun::{
    Paths,
    abi::{self, Error, ErrorCode, Flow, Host},
    files::{self, Existing, Links, open_regular, read_small},
    private_dir,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{File, Metadata},
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// The largest file of known hashes, in bytes: room for tens of thousands.
const MOST_BYTES: u64 = 16 << 20;
/// Version of that file's format.
const VERSION: u64 = 1;
/// Bytes to hash at a time.
const BLOCK: usize = 256 << 10;

/// Hashes files, and remembers the hashes of files that have not changed since. They are in the file `hashes.json` of the cache
/// folder. If it is damaged or cannot be written, files are hashed anew.
pub struct HashCache {
    file: PathBuf,
}

/// What was hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Part {
    Whole,
    Tensors,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    path: String,
    size: u64,
    modified_ns: u64,
    part: Part,
    sha256: String,
}

#[derive(Default, Serialize, Deserialize)]
struct Document {
    format_version: u64,
    hashes: Vec<Known>,
}

impl HashCache {
    /// The user's hashes.
    pub fn of_user(paths: &Paths) -> Self {
        HashCache { file: paths.cache.join("hashes.json") }
    }

    /// AutoV2 of a checkpoint or an autoencoder.
    ///
    /// # Errors
    /// Errors of reading the file, and `Cancelled` by the host.
    pub fn model(&self, file: &Path, host: &dyn Host) -> abi::Result<String> {
        self.digits(file, Part::Whole, 10, host)
    }

    /// The hash of an adapter's tensors; of the whole file if it is not a safetensors file.
    ///
    /// # Errors
    /// As [`model`](Self::model), and `DataLoss` for a damaged safetensors file.
    pub fn adapter(&self, file: &Path, host: &dyn Host) -> abi::Result<String> {
        let safetensors = file.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("safetensors"));
        self.digits(file, if safetensors { Part::Tensors } else { Part::Whole }, 12, host)
    }

    /// The hash of an embedding: 12 digits, of the whole file.
    ///
    /// # Errors
    /// As [`model`](Self::model).
    pub fn embedding(&self, file: &Path, host: &dyn Host) -> abi::Result<String> {
        self.digits(file, Part::Whole, 12, host)
    }

    fn digits(&self, path: &Path, part: Part, count: usize, host: &dyn Host) -> abi::Result<String> {
        let mut file = open_regular(path, Links::Follow)?;
        let state = state(path, &file, part);
        let known = state.as_ref().and_then(|state| {
            self.read()
                .hashes
                .into_iter()
                .find(|known| *known == Known { sha256: known.sha256.clone(), ..state.clone() })
        });
        if let Some(known) = known {
            return Ok(known.sha256[..count].into());
        }
        let sha256 = sha256(path, &mut file, part, host)?;
        // A file that changed meanwhile is hashed anew the next time.
        if let Some(known) = state.filter(|before| self::state(path, &file, part).as_ref() == Some(before)) {
            self.remember(Known { sha256: sha256.clone(), ..known });
        }
        Ok(sha256[..count].into())
    }

    fn read(&self) -> Document {
        if !self.file.exists() {
            return Document::default();
        }
        let parse = || -> Result<Document, String> {
            let bytes = read_small(&self.file, Links::Refuse, MOST_BYTES).map_err(|error| error.message)?;
            let mut document: Document = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
            if document.format_version != VERSION {
                return Err(format!("it is not of format version {VERSION}"));
            }
            let valid = |hash: &str| hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
            document.hashes.retain(|known| valid(&known.sha256));
            Ok(document)
        };
        parse().unwrap_or_else(|why| {
            tracing::warn!("{} is not used: {why}", self.file.display());
            Document::default()
        })
    }

    /// Adds a hash and forgets those of files that are gone.
    fn remember(&self, new: Known) {
        let mut hashes = self.read().hashes;
        hashes.retain(|known| {
            (&known.path, known.part) != (&new.path, new.part) && Path::new(&known.path).exists()
        });
        hashes.push(new);
        let document = Document { format_version: VERSION, hashes };
        let write = || -> Result<(), String> {
            private_dir(self.file.parent().unwrap_or(Path::new("."))).map_err(|error| error.to_string())?;
            let written =
                files::write(&self.file, Existing::Ours, |out| Ok(serde_json::to_writer(out, &document)?));
            written.map_err(|error| error.message)
        };
        if let Err(why) = write() {
            tracing::warn!("the hash of a file is not kept: {why}");
        }
    }
}

/// What a hash is remembered under; `None` if the file cannot be told from others.
fn state(path: &Path, file: &File, part: Part) -> Option<Known> {
    let metadata: Metadata = file.metadata().ok()?;
    let age = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Known {
        path: std::path::absolute(path).ok()?.to_str()?.into(),
        size: metadata.len(),
        modified_ns: u64::try_from(age.as_nanos()).ok()?,
        part,
        sha256: String::new(),
    })
}

fn sha256(path: &Path, file: &mut File, part: Part, host: &dyn Host) -> abi::Result<String> {
    let failed = |error: std::io::Error| Error::io("read", path, &error);
    let size = file.metadata().map_err(failed)?.len();
    let start = match part {
        Part::Whole => 0,
        Part::Tensors => {
            let mut length = [0; 8];
            file.read_exact(&mut length).map_err(failed)?;
            let end = u64::from_le_bytes(length).checked_add(8).filter(|end| *end <= size);
            end.ok_or_else(|| {
                let message = format!("{} is damaged: its header is longer than the file", path.display());
                Error::new(ErrorCode::DataLoss, message).with_file(path)
            })?
        }
    };
    file.seek(SeekFrom::Start(start)).map_err(failed)?;
    let (mut hash, mut block, mut done) = (Sha256::new(), vec![0; BLOCK], 0);
    loop {
        let count = match file.read(&mut block) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error)),
        };
        hash.update(&block[..count]);
        done += count as u64;
        if host.progress("hashing", done, size - start) == Flow::Cancel || host.cancelled() {
            return Err(Error::new(ErrorCode::Cancelled, "cancelled"));
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun::abi::{LogLevel, NoHost};
    use std::fs;

    struct Folder {
        dir: tempfile::TempDir,
        cache: HashCache,
    }

    impl Folder {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let cache = HashCache { file: dir.path().join("cache/hashes.json") };
            Folder { dir, cache }
        }

        fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
            let path = self.dir.path().join(name);
            fs::write(&path, bytes).unwrap();
            path
        }
    }

    /// A safetensors file: the header's length, the header, the tensors.
    const LORA: &[u8] = b"\x10\0\0\0\0\0\0\0{\"a\":\"padding\"} tensors";

    #[test]
    fn hashes_are_those_of_hashlib() {
        let folder = Folder::new();
        let zeros = folder.put("zeros.ckpt", &vec![0; (2 << 20) + 5]);
        // hashlib.sha256(bytes((2 << 20) + 5)).hexdigest()
        assert_eq!(folder.cache.model(&zeros, &NoHost).unwrap(), ZEROS[..10]);
        assert_eq!(folder.cache.embedding(&zeros, &NoHost).unwrap(), ZEROS[..12]);
        let lora = folder.put("lora.safetensors", LORA);
        // hashlib.sha256(b"tensors").hexdigest(), and of the whole file
        assert_eq!(folder.cache.adapter(&lora, &NoHost).unwrap(), TENSORS[..12]);
        assert_eq!(folder.cache.model(&lora, &NoHost).unwrap(), WHOLE[..10]);
        let old = folder.put("lora.pt", LORA);
        assert_eq!(folder.cache.adapter(&old, &NoHost).unwrap(), WHOLE[..12]);
    }

    const ZEROS: &str = "64fd2e4967cabd6182fc63e4e49ba8864445ea69fbd1156e52f7572636050d80";
    const TENSORS: &str = "26cc73f9fbf623d9a49bbf3f3d88f70195f2de68d7f25b5161f6700e6644cf44";
    const WHOLE: &str = "27a2ff44e6dd698dfa74f9fa8b1f8e99a289d1ae1847d7872532773cbfcad4a4";

    /// Counts the blocks that are hashed, and cancels after some.
    struct Count(std::sync::atomic::AtomicU64, u64);

    impl Host for Count {
        fn log(&self, _: LogLevel, _: &str, _: &str) {}
        fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
            let before = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if before + 1 < self.1 { Flow::Continue } else { Flow::Cancel }
        }
        fn cancelled(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_file_is_hashed_once_until_it_changes() {
        let folder = Folder::new();
        let blocks = |path: &Path| {
            let count = Count(0.into(), u64::MAX);
            let hash = folder.cache.model(path, &count).unwrap();
            (hash, count.0.into_inner())
        };
        let (a, b) = (folder.put("a.ckpt", b"a"), folder.put("b.ckpt", b"b"));
        let (first, count) = blocks(&a);
        assert_eq!(count, 1);
        blocks(&b);
        assert_eq!(blocks(&a), (first.clone(), 0));
        folder.put("a.ckpt", b"aa");
        let (second, count) = blocks(&a);
        assert!(count == 1 && second != first);
        // The same size and another time.
        folder.put("a.ckpt", b"bb");
        fs::File::options().write(true).open(&a).unwrap().set_modified(UNIX_EPOCH).unwrap();
        assert_eq!(blocks(&a).1, 1);
        // Files that are gone are forgotten.
        fs::remove_file(&b).unwrap();
        blocks(&folder.put("c.ckpt", b"c"));
        let text = fs::read_to_string(&folder.cache.file).unwrap();
        assert!(text.contains("a.ckpt") && text.contains("c.ckpt") && !text.contains("b.ckpt"), "{text}");
    }

    #[test]
    fn a_damaged_cache_is_replaced() {
        let folder = Folder::new();
        let path = folder.put("a.ckpt", b"a");
        let hash = folder.cache.model(&path, &NoHost).unwrap();
        let good = fs::read_to_string(&folder.cache.file).unwrap();
        for bad in [
            "",
            "{",
            "[]",
            "{\"format_version\":2,\"hashes\":[]}",
            &good.replace("sha256\":\"", "sha256\":\"ü"),
        ] {
            fs::write(&folder.cache.file, bad).unwrap();
            assert_eq!(folder.cache.model(&path, &NoHost).unwrap(), hash, "{bad}");
            assert_eq!(fs::read_to_string(&folder.cache.file).unwrap(), good, "{bad}");
        }
        // A folder in place of the file: nothing is kept.
        fs::remove_file(&folder.cache.file).unwrap();
        fs::create_dir(&folder.cache.file).unwrap();
        assert_eq!(folder.cache.model(&path, &NoHost).unwrap(), hash);
    }

    #[test]
    fn faults_are_reported() {
        let folder = Folder::new();
        let code = |error: Error| error.code;
        let absent = folder.dir.path().join("absent");
        assert_eq!(code(folder.cache.model(&absent, &NoHost).unwrap_err()), ErrorCode::NotFound);
        for bytes in [&b"\xff\xff\xff\xff\xff\xff\xff\xff{}"[..], b"\x10\0\0\0\0\0\0\0{}", b"\x10"] {
            let path = folder.put("bad.safetensors", bytes);
            assert_eq!(code(folder.cache.adapter(&path, &NoHost).unwrap_err()), ErrorCode::DataLoss);
        }
        let large = folder.put("large.ckpt", &vec![0; 3 << 20]);
        let cancel = Count(0.into(), 2);
        assert_eq!(code(folder.cache.model(&large, &cancel).unwrap_err()), ErrorCode::Cancelled);
        assert!(cancel.0.into_inner() == 2 && !folder.cache.file.exists());
    }
}

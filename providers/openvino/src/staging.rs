//! Private folders for OpenVINO's ONNX reader, which reads large weights only from files in the model's folder.
//!
//! OpenVINO does not follow links out of the model's folder, but it cannot tell a hard link from an ordinary file. So
//! the folder gets a hard link to each file that holds weights unchanged, and the model refers to their offsets in
//! it. Linked weights are not copied. Weights that cannot be linked (computed weights, files on another file system
//! or of another user) are written to one file in the folder.
//!
//! In a sandbox, links can be made only in a folder where no file can be written. So the model's folder is made there, its files are written
//! elsewhere, and then they move in.
//!
//! The folder is removed as soon as the model is read, because the reader has mapped its files by then. Links are
//! created last, so that the files have a second name for as short a time as possible: other programs may refuse
//! files with several names. If a process is killed, or if the system does not remove mapped files, the next process
//! that initialises the provider removes the folder.

use sdrun_abi::{Error, Host, LogLevel, Result, Weight, WeightSource, WeightSpec};
use sdrun_graph::{Graph, GraphError, Placement};
use sdrun_provider_common::{WeightFiles, graph_error, phase, weight};
use std::{
    collections::HashMap,
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};
use tempfile::TempDir;

/// Prefix of the folders' names.
const PREFIX: &str = "openvino-";
/// A file in each folder. The owner holds a lock on it while it lives.
const LOCK: &str = "lock";
/// The staged model.
const MODEL: &str = "model.onnx";
/// The copied weights.
const COPIES: &str = "weights.bin";
/// Weights with fewer bytes than this in total are copied, because that is faster than linking files.
const LINK_FROM: u64 = 4 << 20;
/// A folder without a lock may still be under construction. If it is older than this, it is abandoned.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A private folder, removed on drop.
pub(crate) struct Staging {
    // Closed before the folder is removed.
    _lock: File,
    dir: TempDir,
    /// The folder of the model, if it is apart because of links.
    linked: Option<TempDir>,
}

impl Staging {
    /// Creates an empty folder below `temp_dir` that only this user can access.
    pub(crate) fn new(temp_dir: &Path) -> Result<Self> {
        let dir = private_folder(temp_dir)?;
        let path = dir.path().join(LOCK);
        let lock = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
        lock.lock().map_err(|e| Error::io("lock", &path, &e))?;
        Ok(Staging { _lock: lock, dir, linked: None })
    }

    /// Creates a folder with `graph` and its weights, below the second folder if it can link weights there, else below the first.
    pub(crate) fn with_weights(
        (temp_dir, links_dir): (&Path, Option<&Path>),
        graph: &Graph,
        weights: &[WeightSpec],
        source: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Self> {
        let mut staging = Self::new(temp_dir)?;
        let link = weights.iter().map(bytes_of).fold(0, u64::saturating_add) >= LINK_FROM;
        let mut originals = WeightFiles::default();
        let mut copies = Copies::new(staging.file(COPIES));
        let mut places = HashMap::new();
        let mut in_files = Vec::new();
        for (index, spec) in weights.iter().enumerate() {
            phase(host, "stage weights", index as u64, weights.len() as u64)?;
            let weight = weight(source, spec)?;
            match originals.place(&spec.name, &weight)? {
                Some((path, offset)) if link => in_files.push((spec, path.to_path_buf(), offset)),
                _ => {
                    places.insert(spec.name.as_str(), copies.append(&weight)?);
                }
            }
        }
        if let Some(folder) = links_dir.filter(|_| !in_files.is_empty()) {
            staging.linked = Some(private_folder(folder)?);
        }
        let mut links = Links { dir: staging.folder(), names: HashMap::new() };
        for (spec, path, offset) in in_files {
            let place = match links.name(&path, host) {
                Some(name) => (name, offset),
                None => copies.append(&weight(source, spec)?)?,
            };
            places.insert(spec.name.as_str(), place);
        }
        let copied = copies.finish()?;
        staging.write_model(graph, |name| places.get(name).cloned())?;
        if staging.linked.is_some() {
            staging.move_to_links(MODEL)?;
            if copied {
                staging.move_to_links(COPIES)?;
            }
        }
        Ok(staging)
    }

    fn move_to_links(&self, name: &str) -> Result<()> {
        let to = self.folder().join(name);
        fs::rename(self.file(name), &to).map_err(|e| Error::io("move a file to", &to, &e))
    }

    /// Creates a folder with `graph` and all-zero weights: enough to test whether OpenVINO can read the graph.
    pub(crate) fn with_placeholders(temp_dir: &Path, graph: &Graph, weights: &[WeightSpec]) -> Result<Self> {
        let staging = Self::new(temp_dir)?;
        let path = staging.file(COPIES);
        let longest = weights.iter().map(bytes_of).max().unwrap_or(0);
        // All weights share one sparse file.
        File::create(&path).and_then(|f| f.set_len(longest)).map_err(|e| Error::io("write", &path, &e))?;
        staging.write_model(graph, |_| Some((COPIES.to_string(), 0)))?;
        Ok(staging)
    }

    /// Path of the staged model.
    pub(crate) fn model(&self) -> PathBuf {
        self.folder().join(MODEL)
    }

    /// Where the model is in the end.
    fn folder(&self) -> &Path {
        self.linked.as_ref().unwrap_or(&self.dir).path()
    }

    /// Path of a file to write.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write_model(&self, graph: &Graph, place: impl Fn(&str) -> Option<(String, u64)>) -> Result<()> {
        let onnx = graph
            .to_onnx(|name, weight| {
                let (location, offset) = place(name)
                    .ok_or_else(|| GraphError::Invalid(format!("weight `{name}` was not staged")))?;
                let length = weight.dtype.bytes_of(&weight.shape).unwrap_or(usize::MAX) as u64;
                Ok(Placement::External { location, offset, length })
            })
            .map_err(graph_error)?;
        let path = self.file(MODEL);
        fs::write(&path, onnx).map_err(|e| Error::io("write", &path, &e))
    }
}

/// A new folder that only this user can access.
fn private_folder(parent: &Path) -> Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    builder.tempdir_in(parent).map_err(|e| Error::io("make a folder in", parent, &e))
}

fn bytes_of(spec: &WeightSpec) -> u64 {
    spec.dtype.bytes_of(&spec.shape).unwrap_or(usize::MAX) as u64
}

/// Hard links in a folder to files elsewhere.
struct Links<'a> {
    dir: &'a Path,
    /// Name in the folder by original path; `None` if the file cannot be linked.
    names: HashMap<PathBuf, Option<String>>,
}

impl Links<'_> {
    /// Links `original` into the folder and returns its name there, or `None` if that fails. The path must contain no
    /// symbolic links, because a hard link to a symbolic link is itself one.
    fn name(&mut self, original: &Path, host: &dyn Host) -> Option<String> {
        if let Some(name) = self.names.get(original) {
            return name.clone();
        }
        let name = format!("linked-{}", self.names.len());
        let name = match fs::hard_link(original, self.dir.join(&name)) {
            Ok(()) => Some(name),
            Err(why) => {
                let message = format!("{} is copied because it cannot be linked: {why}", original.display());
                host.log(LogLevel::Debug, "openvino", &message);
                None
            }
        };
        self.names.insert(original.to_path_buf(), name.clone());
        name
    }
}

/// The file of copied weights, created with the first of them.
struct Copies {
    path: PathBuf,
    file: Option<BufWriter<File>>,
    position: u64,
}

impl Copies {
    fn new(path: PathBuf) -> Self {
        Copies { path, file: None, position: 0 }
    }

    /// Appends a weight, aligned like a tensor in memory. Returns the file's name and the weight's offset.
    fn append(&mut self, weight: &Weight<'_>) -> Result<(String, u64)> {
        let failed = |e| write_error(&self.path, &e);
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(BufWriter::new(File::create(&self.path).map_err(failed)?)),
        };
        let offset = self.position.next_multiple_of(64);
        let padding = [0u8; 64];
        file.write_all(&padding[..(offset - self.position) as usize]).map_err(failed)?;
        file.write_all(weight.data()).map_err(failed)?;
        self.position = offset + weight.data().len() as u64;
        Ok((COPIES.to_string(), offset))
    }

    /// Returns whether there are any.
    fn finish(self) -> Result<bool> {
        let Some(mut file) = self.file else { return Ok(false) };
        file.flush().map_err(|e| write_error(&self.path, &e))?;
        Ok(true)
    }
}

fn write_error(path: &Path, error: &std::io::Error) -> Error {
    Error::io("write", path, error).with_hint("the weights need room in the folder for temporary files")
}

/// Removes the folders that earlier processes left behind.
pub(crate) fn remove_stale(temp_dir: &Path, host: &dyn Host) {
    let Ok(entries) = fs::read_dir(temp_dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if ours && path.is_dir() && is_stale(&path) {
            let result = fs::remove_dir_all(&path);
            let outcome = result.map_or_else(|e| format!("cannot remove: {e}"), |()| "removed".into());
            host.log(LogLevel::Debug, "openvino", &format!("stale folder {}: {outcome}", path.display()));
        }
    }
}

fn is_stale(dir: &Path) -> bool {
    match File::open(dir.join(LOCK)) {
        Ok(lock) => lock.try_lock().is_ok(),
        Err(_) => {
            let modified = fs::metadata(dir).and_then(|m| m.modified());
            modified.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > ABANDONED))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::{DType, NoHost};
    use sdrun_graph::{Initializer, Value, WeightData, WeightRef};

    /// Provides every weight as this many equal bytes, some of them from a file.
    struct Source {
        bytes: usize,
        file: Option<(PathBuf, u64)>,
    }

    impl WeightSource for Source {
        fn get(&self, name: &str) -> Result<Weight<'_>> {
            let fill = if name == "b" { 2u8 } else { 1 };
            let weight = Weight::new(DType::U8, vec![self.bytes], vec![fill; self.bytes])?;
            Ok(match &self.file {
                Some((path, offset)) if name == "a" => weight.in_file(path.clone(), *offset),
                _ => weight,
            })
        }
    }

    fn graph(bytes: usize) -> (Graph, Vec<WeightSpec>) {
        let mut graph = Graph { ir_version: 8, ..Default::default() };
        graph.opsets.insert(String::new(), 17);
        let mut specs = Vec::new();
        for name in ["a", "b"] {
            let id = graph.add_value(Value { name: name.into(), dtype: Some(DType::U8), shape: None });
            let data = WeightData::Absent { location: name.into(), offset: 0 };
            let weight = WeightRef { dtype: DType::U8, shape: vec![bytes], data };
            graph.initializers.insert(id, Initializer::Weight(weight));
            specs.push(WeightSpec { name: name.into(), dtype: DType::U8, shape: vec![bytes] });
        }
        (graph, specs)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn stage(temp: &Path, bytes: usize, file: Option<(PathBuf, u64)>) -> Staging {
        let (graph, specs) = graph(bytes);
        Staging::with_weights((temp, None), &graph, &specs, &Source { bytes, file }, &NoHost).unwrap()
    }

    #[test]
    fn links_are_made_where_the_host_says_and_written_files_move_there() {
        let temp = tempfile::tempdir().unwrap();
        let [files, links] = ["files", "links"].map(|name| temp.path().join(name));
        for folder in [&files, &links] {
            fs::create_dir(folder).unwrap();
        }
        let original = temp.path().join("checkpoint");
        let bytes = 3 << 20;
        fs::write(&original, vec![1u8; bytes]).unwrap();
        let (graph, specs) = graph(bytes);
        let source = Source { bytes, file: Some((original, 0)) };
        let staging =
            Staging::with_weights((&files, Some(&links)), &graph, &specs, &source, &NoHost).unwrap();
        let folder = staging.model().parent().unwrap().to_path_buf();
        assert!(folder.starts_with(&links));
        assert_eq!(names(&folder), ["linked-0", MODEL, COPIES]);
        drop(staging);
        assert!(names(&files).is_empty() && names(&links).is_empty());
        // Without weights to link, everything is in one folder.
        let source = Source { bytes, file: None };
        let staging =
            Staging::with_weights((&files, Some(&links)), &graph, &specs, &source, &NoHost).unwrap();
        assert!(staging.model().starts_with(&files));
    }

    #[test]
    fn small_weights_are_copied_and_the_folder_goes() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("checkpoint");
        fs::write(&file, vec![1u8; 1001]).unwrap();
        let staging = stage(temp.path(), 1000, Some((file, 1)));
        let folder = staging.dir.path().to_path_buf();
        assert_eq!(names(&folder), [LOCK, MODEL, COPIES]);
        let copies = fs::read(folder.join(COPIES)).unwrap();
        // The second weight starts at the next multiple of 64.
        assert_eq!(copies.len(), 1024 + 1000);
        assert!(copies[..1000].iter().all(|b| *b == 1) && copies[1024..].iter().all(|b| *b == 2));
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        }
        drop(staging);
        assert_eq!(names(temp.path()), ["checkpoint"]);
    }

    #[cfg(unix)]
    #[test]
    fn large_weights_in_files_are_linked_also_through_symbolic_links() {
        use std::os::unix::fs::MetadataExt;
        let temp = tempfile::tempdir().unwrap();
        let (file, link) = (temp.path().join("checkpoint"), temp.path().join("soft"));
        let bytes = 3 << 20;
        fs::write(&file, vec![1u8; bytes + 7]).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let staging = stage(temp.path(), bytes, Some((link, 7)));
        let folder = staging.dir.path().to_path_buf();
        assert_eq!(names(&folder), ["linked-0", LOCK, MODEL, COPIES]);
        let linked = fs::symlink_metadata(folder.join("linked-0")).unwrap();
        assert!(linked.is_file());
        assert_eq!(linked.ino(), fs::metadata(&file).unwrap().ino());
        assert_eq!(fs::metadata(folder.join(COPIES)).unwrap().len(), bytes as u64);
        drop(staging);
        assert_eq!(fs::metadata(&file).unwrap().nlink(), 1);
    }

    #[test]
    fn what_cannot_be_linked_is_copied() {
        let temp = tempfile::tempdir().unwrap();
        let staging = stage(temp.path(), 3 << 20, Some((temp.path().join("gone"), 0)));
        assert_eq!(names(staging.dir.path()), [LOCK, MODEL, COPIES]);
        assert_eq!(fs::metadata(staging.file(COPIES)).unwrap().len(), 2 * (3 << 20));
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let (graph, specs) = graph(1000);
        let source = Source { bytes: 999, file: None };
        assert!(Staging::with_weights((temp.path(), None), &graph, &specs, &source, &NoHost).is_err());
        assert!(names(temp.path()).is_empty());
    }

    #[test]
    fn only_stale_folders_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let alive = Staging::new(temp.path()).unwrap();
        let dead = temp.path().join("openvino-dead");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), b"").unwrap();
        fs::create_dir(temp.path().join("openvino-young")).unwrap();
        fs::create_dir(temp.path().join("other")).unwrap();
        remove_stale(temp.path(), &NoHost);
        assert!(alive.dir.path().exists());
        let left = names(temp.path());
        assert!(
            !dead.exists() && left.contains(&"openvino-young".into()) && left.contains(&"other".into()),
            "{left:?}"
        );
    }
}

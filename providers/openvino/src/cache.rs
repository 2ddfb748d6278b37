//! OpenVINO's own cache of compiled models (`CACHE_DIR`), in the folder that the host gives this provider.
//!
//! OpenVINO names an entry by a hash of the graph, its weights and the properties. An entry holds the weights, so the
//! folder is private to this user and its size is limited. OpenVINO writes entries in place and does not verify them.
//! So only one process uses the cache at a time. If a process died while using it, the next one finds its mark and
//! empties the cache.
//!
//! The CPU does without. Its entries save at most a fifth of a compilation, and OpenVINO 2026.4 loses attributes of nodes in them (see
//! `openvino/rotary.rs` in the common code of providers). An entry for a GPU holds compiled kernels.

use sdrun_abi::{Host, LogLevel};
use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Size limit in bytes. The most recently used entries are kept.
const LIMIT: u64 = 8 << 30;
/// Lock file. The process that uses the cache holds a lock on it.
const LOCK: &str = "lock";
/// Exists while entries may be incomplete.
const MARK: &str = "in-use";

/// The cache for one build of this plugin and one build of OpenVINO.
pub(crate) struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// Creates the folder for `build` (this plugin with the loaded OpenVINO) in `dir` and removes the folders of
    /// other builds. Returns `None` and logs a warning if that fails.
    pub(crate) fn open(dir: &Path, build: &str, host: &dyn Host) -> Option<Self> {
        let own = dir.join(format!("models-{build}"));
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with("models-"));
            if ours && entry.path() != own && lock(&entry.path()).is_some() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        match make_private(&own) {
            Ok(()) => Some(Cache { dir: own }),
            Err(error) => {
                let message = format!("compiled models are not kept in {}: {error}", own.display());
                host.log(LogLevel::Warn, "openvino", &message);
                None
            }
        }
    }

    /// Locks the cache for a compilation. `None` if another process uses it or on a disk error.
    pub(crate) fn enter(&self) -> Option<InUse<'_>> {
        let lock = lock(&self.dir)?;
        if self.dir.join(MARK).exists() {
            self.entries().into_iter().for_each(|(_, _, path)| drop(fs::remove_file(path)));
        }
        File::create(self.dir.join(MARK)).ok()?;
        Some(InUse { cache: self, _lock: lock })
    }

    /// Last use, bytes and path of every entry.
    fn entries(&self) -> Vec<(SystemTime, u64, PathBuf)> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let entries = entries.filter(|entry| entry.file_name() != LOCK && entry.file_name() != MARK);
        let described = entries.filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            let used = metadata.modified().ok()?.max(metadata.accessed().unwrap_or(SystemTime::UNIX_EPOCH));
            Some((used, metadata.len(), entry.path()))
        });
        described.collect()
    }

    fn prune(&self, limit: u64) {
        let mut entries = self.entries();
        entries.sort();
        let mut kept = 0;
        for (_, bytes, path) in entries.into_iter().rev() {
            kept += bytes;
            if kept > limit {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// The cache while this process holds it.
pub(crate) struct InUse<'a> {
    cache: &'a Cache,
    _lock: File,
}

impl InUse<'_> {
    /// The value for `CACHE_DIR`; `None` if the path is not Unicode.
    pub(crate) fn dir(&self) -> Option<&str> {
        self.cache.dir.to_str()
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.cache.prune(LIMIT);
        let _ = fs::remove_file(self.cache.dir.join(MARK));
    }
}

/// Whether to cache a model with this many bytes of weights for a device, as OpenVINO names it. An entry saves work on
/// the graph, not on the weights. Large models would write gigabytes for every set of weights.
pub(crate) fn is_worthwhile(device: &str, weights: u64) -> bool {
    device != "CPU" && weights <= 1 << 30
}

fn make_private(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

/// Locks a cache folder; `None` if another process holds the lock.
fn lock(dir: &Path) -> Option<File> {
    let file = File::options().create(true).append(true).open(dir.join(LOCK)).ok()?;
    match file.try_lock() {
        Ok(()) => Some(file),
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::NoHost;
    use std::time::Duration;

    fn open(dir: &Path, build: &str) -> Cache {
        Cache::open(dir, build, &NoHost).unwrap()
    }

    fn names(cache: &Cache) -> Vec<String> {
        let name = |(_, _, path): (_, _, PathBuf)| path.file_name().unwrap().to_str().unwrap().to_string();
        let mut names: Vec<String> = cache.entries().into_iter().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn one_build_has_one_folder_and_one_user() {
        let dir = tempfile::tempdir().unwrap();
        let old = open(dir.path(), "1");
        let using = old.enter().unwrap();
        assert!(old.enter().is_none(), "another user compiles without the cache");
        fs::write(dir.path().join("other"), "").unwrap();
        let new = open(dir.path(), "2");
        assert!(old.dir.exists(), "it is in use");
        drop(using);
        let new_again = open(dir.path(), "2");
        assert!(!old.dir.exists() && dir.path().join("other").exists());
        assert_eq!(new.dir, new_again.dir);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            assert_eq!(fs::metadata(&new.dir).unwrap().permissions().mode() & 0o777, 0o700);
        }
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(Cache::open(&file, "3", &NoHost).is_none());
    }

    #[test]
    fn what_a_process_left_that_died_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path(), "1");
        let entry = |name: &str| fs::write(cache.dir.join(name), "blob").unwrap();
        {
            let _using = cache.enter().unwrap();
            entry("whole.blob");
        }
        drop(cache.enter().unwrap());
        assert_eq!(names(&cache), ["whole.blob"]);
        entry("half.blob");
        fs::write(cache.dir.join(MARK), "").unwrap();
        drop(cache.enter().unwrap());
        assert!(names(&cache).is_empty());
    }

    #[test]
    fn large_models_and_those_of_the_cpu_are_not_kept() {
        assert!(is_worthwhile("GPU", 1 << 30) && is_worthwhile("GPU.1", 0));
        assert!(!is_worthwhile("GPU", (1 << 30) + 1) && !is_worthwhile("CPU", 0));
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let dir = tempfile::tempdir().unwrap();
        let cache = open(dir.path(), "1");
        for (age, name) in [(3, "oldest"), (1, "newest"), (2, "middle")] {
            let path = cache.dir.join(name);
            fs::write(&path, [0; 10]).unwrap();
            let then = SystemTime::now() - Duration::from_secs(1000 * age);
            let times = fs::FileTimes::new().set_modified(then).set_accessed(then);
            File::options().append(true).open(path).unwrap().set_times(times).unwrap();
        }
        cache.prune(25);
        assert_eq!(names(&cache), ["middle", "newest"]);
    }
}

//! The engine cache: content-addressed engine files in a private folder.

use crate::{EngineFile, EngineManifest, Error, Result, paths::private_dir};
use sdrun_abi::{Error as AbiError, ErrorCode, Flow, Host};
use sdrun_files::{Existing, Links, open_lock};
use serde::Serialize;
use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

const SUFFIX: &str = "sdengine";
/// How often a process checks whether another one has finished a build.
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

/// The cache in one folder. A damaged entry, or one that holds another engine, counts as a miss and is set aside. A
/// failed write never fails the caller's run. If two processes need the same engine, only one builds it.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// One cached engine.
#[derive(Clone, Debug, Serialize)]
pub struct CacheEntry {
    /// Key: SHA-256 over everything the engine depends on.
    pub key: String,
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Seconds since it was last used.
    pub idle_seconds: u64,
    /// Provider and model if the file can be read; otherwise what is wrong with it.
    pub content: Result<CacheContent, String>,
}

/// The content of a cached engine.
#[derive(Clone, Debug, Serialize)]
pub struct CacheContent {
    /// Provider id.
    pub provider: String,
    /// Model name.
    pub model: String,
    /// Precision.
    pub precision: String,
    /// Runtime and version.
    pub runtime: String,
}

/// What [`Cache::gc`] deletes.
#[derive(Clone, Debug, Default)]
pub struct GcLimits {
    /// Delete the least recently used engines until at most this many bytes are left.
    pub max_bytes: Option<u64>,
    /// Delete engines unused for longer than this.
    pub max_age: Option<Duration>,
}

impl Cache {
    /// The cache in `root`. The folder is created when the first engine is stored.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Cache { root: root.into() }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.root.join(format!("{key}.{SUFFIX}"))
    }

    /// Whether there is a file for `key`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.path(key).is_file()
    }

    /// Locks `key` for building its engine. While another process builds it, this reports progress and waits. `None`
    /// if locking is impossible; the caller then builds without a lock.
    ///
    /// Errors: `Cancelled` if the host cancels while waiting.
    pub(crate) fn lock(&self, key: &str, host: &dyn Host) -> Result<Option<File>> {
        let open = || {
            private_dir(&self.root).ok()?;
            open_lock(&self.root.join(format!("{key}.lock"))).ok()
        };
        let Some(file) = open() else { return Ok(None) };
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::Error(_)) => return Ok(None),
                Err(TryLockError::WouldBlock) => {}
            }
            let flow = host.progress("waiting for another process that builds this engine", 0, 0);
            if flow == Flow::Cancel || host.cancelled() {
                return Err(AbiError::new(ErrorCode::Cancelled, "cancelled").into());
            }
            std::thread::sleep(LOCK_INTERVAL);
        }
    }

    /// The engine stored under `wanted`'s key. A damaged file, or one that holds another engine, counts as absent and
    /// is renamed to `….corrupt`.
    pub(crate) fn get(&self, wanted: &EngineManifest) -> Option<EngineFile> {
        // Without the folder there is no entry. A file in its place is reported when the engine is stored.
        if !self.root.is_dir() {
            return None;
        }
        let path = self.path(&wanted.key);
        let why = match EngineFile::open_with(&path, Links::Refuse) {
            Ok(file) => match file.manifest.differs(wanted) {
                None => {
                    // The modification time records the last use. If it cannot be set, gc is only less exact.
                    let _ = File::options()
                        .append(true)
                        .open(&path)
                        .and_then(|f| f.set_modified(SystemTime::now()));
                    return Some(file);
                }
                Some(what) => format!("{} holds another engine: its {what} differs", path.display()),
            },
            Err(e) if e.code() == ErrorCode::NotFound => return None,
            Err(e) => e.to_string(),
        };
        tracing::warn!("setting a cache entry aside: {why}");
        set_aside(&path);
        None
    }

    /// Stores an engine under its key. A failure is only logged.
    pub(crate) fn put(&self, manifest: &EngineManifest, payload: &[u8]) -> Option<PathBuf> {
        let path = self.path(&manifest.key);
        match private_dir(&self.root)
            .and_then(|()| EngineFile::write_over(&path, Existing::Ours, manifest, payload))
        {
            Ok(()) => Some(path),
            Err(e) => {
                tracing::warn!("the engine was built but not cached: {e}");
                None
            }
        }
    }

    /// All engines, least recently used first. Reads their manifests, not their payloads.
    pub fn list(&self) -> Result<Vec<CacheEntry>> {
        self.entries(EngineFile::read_manifest)
    }

    /// Checks all engines completely, and that each is stored under its own key. Damaged and misplaced engines are
    /// set aside, so that [`gc`](Cache::gc) deletes them, and returned.
    pub fn verify(&self) -> Result<Vec<CacheEntry>> {
        let entries = self.entries(|path| Ok(EngineFile::open(path)?.manifest))?;
        for damaged in entries.iter().filter(|entry| entry.content.is_err()) {
            set_aside(&damaged.path);
        }
        Ok(entries)
    }

    fn entries(&self, read: impl Fn(&Path) -> Result<EngineManifest>) -> Result<Vec<CacheEntry>> {
        let mut entries = Vec::new();
        for path in self.files(SUFFIX)? {
            let Ok(meta) = std::fs::metadata(&path) else { continue };
            let idle = meta.modified().ok().and_then(|t| t.elapsed().ok()).unwrap_or_default();
            let key = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
            let content = read(&path).map_err(|e| e.to_string()).and_then(|manifest| {
                if manifest.key != key {
                    return Err(format!("{} holds the engine of another key", path.display()));
                }
                Ok(CacheContent {
                    precision: manifest.spec.precision.to_string(),
                    runtime: format!("{} {}", manifest.runtime.0, manifest.runtime.1),
                    provider: manifest.provider,
                    model: manifest.model,
                })
            });
            entries.push(CacheEntry { key, bytes: meta.len(), idle_seconds: idle.as_secs(), content, path });
        }
        entries.sort_by_key(|e| std::cmp::Reverse(e.idle_seconds));
        Ok(entries)
    }

    /// Deletes engines over the limits, damaged ones, and files of interrupted writers. With `dry_run`, deletes
    /// nothing. Returns the files (to be) deleted and their sizes in bytes. Only touches files with this cache's own
    /// extensions, directly in its folder.
    pub fn gc(&self, limits: &GcLimits, dry_run: bool) -> Result<Vec<(PathBuf, u64)>> {
        let mut doomed = Vec::new();
        let mut total: u64 = 0;
        let entries = self.list()?;
        for entry in &entries {
            total += entry.bytes;
        }
        for entry in entries {
            let too_old = limits.max_age.is_some_and(|age| entry.idle_seconds > age.as_secs());
            let too_much = limits.max_bytes.is_some_and(|max| total > max);
            if too_old || too_much || entry.content.is_err() {
                total -= entry.bytes;
                doomed.push((entry.path, entry.bytes));
            }
        }
        for path in self.files("corrupt")? {
            let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
            doomed.push((path, bytes));
        }
        for path in self.files("tmp")?.into_iter().chain(self.files("lock")?) {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let ours = name.starts_with(".sdrun-") || name.ends_with(".lock");
            let meta = std::fs::metadata(&path);
            let old = meta.as_ref().ok().and_then(|m| m.modified().ok()?.elapsed().ok());
            // A lock that is held belongs to a running build, however old the file is.
            let held = || path.extension().is_some_and(|e| e == "lock") && is_held(&path);
            if ours && old.is_some_and(|age| age > Duration::from_secs(24 * 3600)) && !held() {
                doomed.push((path, meta.map_or(0, |m| m.len())));
            }
        }
        if !dry_run {
            for (path, _) in &doomed {
                std::fs::remove_file(path).map_err(|e| Error::io("delete", path, &e))?;
            }
        }
        Ok(doomed)
    }

    /// Regular files directly in the folder with this extension, sorted.
    fn files(&self, extension: &str) -> Result<Vec<PathBuf>> {
        // For a path below a file, Windows reports "not found", as if the cache were only empty.
        let is_below_a_file = || self.root.ancestors().find(|p| p.exists()).is_some_and(Path::is_file);
        let dir = match std::fs::read_dir(&self.root) {
            Ok(dir) => dir,
            Err(e) if e.kind() == io::ErrorKind::NotFound && is_below_a_file() => {
                return Err(Error::io(
                    "read the cache folder",
                    &self.root,
                    &io::ErrorKind::NotADirectory.into(),
                ));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("read the cache folder", &self.root, &e)),
        };
        let mut files: Vec<PathBuf> = dir
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.extension().unwrap_or_default() == extension)
            .filter(|p| std::fs::symlink_metadata(p).is_ok_and(|m| m.is_file()))
            .collect();
        files.sort();
        Ok(files)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// Whether a process holds a lock.
fn is_held(lock: &Path) -> bool {
    open_lock(lock).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Renames an entry to `….corrupt`, where [`Cache::gc`] finds it. In a folder that cannot be written it stays.
fn set_aside(path: &Path) {
    let _ = std::fs::rename(path, path.with_extension("corrupt"));
}

#[cfg(test)]
mod tests;

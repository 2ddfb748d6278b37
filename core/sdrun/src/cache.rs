//! The engine cache: content-addressed engine files below one private folder.

use crate::{Error, Result, engine_file::EngineFile, paths::private_dir};
use serde::Serialize;
use std::{
    fs::{File, OpenOptions},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

const SUFFIX: &str = "sdengine";

/// The cache in one folder. A corrupt entry counts as a miss and is set aside; a write that fails never
/// fails the caller's run; two processes that want one key build it once.
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
    /// Provider and model, where the file can be read; else what is wrong with it.
    pub content: Result<CacheContent, String>,
}

/// What a cached engine is.
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
    /// Delete the longest unused engines until at most this many bytes are left.
    pub max_bytes: Option<u64>,
    /// Delete engines unused for longer than this.
    pub max_age: Option<Duration>,
}

impl Cache {
    /// The cache in `root`; the folder is made when something is stored.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Cache { root: root.into() }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.root.join(format!("{key}.{SUFFIX}"))
    }

    /// Waits for the lock on `key`: whoever holds it builds, the others find the result afterwards.
    /// `None` where locking is impossible; the caller then builds without it.
    pub(crate) fn lock(&self, key: &str) -> Option<File> {
        private_dir(&self.root).ok()?;
        let file =
            OpenOptions::new().create(true).append(true).open(self.root.join(format!("{key}.lock"))).ok()?;
        file.lock().ok()?;
        Some(file)
    }

    /// The engine stored under `key`. A damaged file is renamed to `….corrupt` and counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<EngineFile> {
        let path = self.path(key);
        if !path.exists() {
            return None;
        }
        match EngineFile::open(&path) {
            Ok(file) => {
                // "Last used" is the file's modification time; failing to set it only makes gc less exact.
                let _ =
                    File::options().append(true).open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                Some(file)
            }
            Err(e) => {
                tracing::warn!("setting a damaged cache entry aside: {e}");
                let _ = std::fs::rename(&path, path.with_extension("corrupt"));
                None
            }
        }
    }

    /// Stores an engine; a failure is logged and changes nothing else.
    pub(crate) fn put(&self, key: &str, manifest: &crate::EngineManifest, payload: &[u8]) -> Option<PathBuf> {
        let path = self.path(key);
        match private_dir(&self.root).and_then(|()| EngineFile::write(&path, manifest, payload)) {
            Ok(()) => Some(path),
            Err(e) => {
                tracing::warn!("the engine was built but not cached: {e}");
                None
            }
        }
    }

    /// All engines, longest unused first.
    pub fn list(&self) -> Result<Vec<CacheEntry>> {
        let mut entries = Vec::new();
        for path in self.files(SUFFIX)? {
            let content = EngineFile::open(&path).map_err(|e| e.to_string()).map(|file| CacheContent {
                provider: file.manifest.provider.clone(),
                model: file.manifest.model.clone(),
                precision: file.manifest.spec.precision.to_string(),
                runtime: format!("{} {}", file.manifest.runtime.0, file.manifest.runtime.1),
            });
            let Ok(meta) = std::fs::metadata(&path) else { continue };
            let idle = meta.modified().ok().and_then(|t| t.elapsed().ok()).unwrap_or_default();
            entries.push(CacheEntry {
                key: path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default(),
                bytes: meta.len(),
                idle_seconds: idle.as_secs(),
                content,
                path,
            });
        }
        entries.sort_by_key(|e| std::cmp::Reverse(e.idle_seconds));
        Ok(entries)
    }

    /// Deletes engines over the limits, damaged ones, and what interrupted writers left behind. With
    /// `dry_run` nothing is deleted. Returns what is (or would be) deleted and its bytes. Only files with
    /// this cache's own endings, directly in its folder, are ever touched.
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
        for path in self.files("")?.into_iter().chain(self.files("lock")?) {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let ours = name.starts_with(".engine-") || name.ends_with(".lock");
            let meta = std::fs::metadata(&path);
            let old = meta.as_ref().ok().and_then(|m| m.modified().ok()?.elapsed().ok());
            if ours && old.is_some_and(|age| age > Duration::from_secs(24 * 3600)) {
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
        let dir = match std::fs::read_dir(&self.root) {
            Ok(dir) => dir,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_file::tests::manifest;

    #[test]
    fn a_corrupt_entry_is_a_miss_and_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().join("c"));
        let path = cache.put("k", &manifest(), b"payload").unwrap();
        assert_eq!(cache.get("k").unwrap().payload(), b"payload");
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(cache.get("k").is_none());
        assert!(path.with_extension("corrupt").exists() && !path.exists());
    }

    #[test]
    fn gc_deletes_the_longest_unused_and_nothing_foreign() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path());
        for (key, age) in [("a", 300), ("b", 200), ("c", 100)] {
            let path = cache.put(key, &manifest(), &[1; 5000]).unwrap();
            let then = SystemTime::now() - Duration::from_secs(age);
            File::options().append(true).open(path).unwrap().set_modified(then).unwrap();
        }
        let foreign = dir.path().join("my-model.onnx");
        std::fs::write(&foreign, b"precious").unwrap();
        let size = cache.list().unwrap()[0].bytes;
        let limits = GcLimits { max_bytes: Some(size * 2), max_age: None };
        assert_eq!(cache.gc(&limits, true).unwrap().len(), 1);
        assert_eq!(cache.list().unwrap().len(), 3, "a dry run deletes nothing");
        assert!(cache.gc(&limits, false).unwrap()[0].0.ends_with("a.sdengine"));
        let old = GcLimits { max_age: Some(Duration::from_secs(150)), max_bytes: None };
        assert!(cache.gc(&old, false).unwrap()[0].0.ends_with("b.sdengine"));
        assert!(foreign.exists());
    }

    #[test]
    fn an_unwritable_cache_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a-file");
        std::fs::write(&file, b"").unwrap();
        let cache = Cache::at(file.join("below-a-file"));
        assert!(cache.put("k", &manifest(), b"x").is_none());
        assert!(cache.get("k").is_none());
    }
}

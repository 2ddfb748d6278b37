//! Writes a built-in model as files that open like any other model.

use super::Builtin;
use crate::WeightMap;
use sdrun_abi::{Error, ErrorCode, Flow, Result};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Version of the written files for unchanged built-in data.
const GENERATION: u8 = 1;
const GRAPH: &str = "model.onnx";
/// The marker, written last: states what the files were generated from.
const MARKER: &str = "complete";
const LOCK: &str = "lock";

/// As [`Builtin::materialise`].
pub(super) fn materialise(
    model: &Builtin,
    models_dir: &Path,
    progress: &dyn Fn(u64, u64) -> Flow,
) -> Result<PathBuf> {
    let map = model.weight_map()?;
    let folder = models_dir.join(model.name);
    let target = Target { model, map: &map, folder: &folder, marker: marker(model, &map) };
    let graph = folder.join(GRAPH);
    if target.is_complete() {
        return Ok(graph);
    }
    fs::create_dir_all(&folder).map_err(|error| Error::io("create", &folder, &error))?;
    let _lock = lock(&folder.join(LOCK))?;
    // Another process may have made it while this one waited.
    if !target.is_complete() {
        target.make(progress)?;
    }
    Ok(graph)
}

/// Waits for other processes that write the same model. The lock is held until the file is dropped; the system releases it
/// when the process ends.
fn lock(path: &Path) -> Result<File> {
    let failed = |error| Error::io("lock", path, &error);
    let file = File::create(path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            tracing::info!(lock = %path.display(), "waiting for another process that makes this model");
            file.lock().map_err(failed)?;
        }
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    Ok(file)
}

/// The marker's text, which covers everything the files are made from.
fn marker(model: &Builtin, map: &WeightMap) -> String {
    let mut digest = Sha256::new();
    digest.update([GENERATION]);
    for part in [model.graph_xz, model.map_xz] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let digest: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digest} {}\n", map.tag)
}

/// Temporary name of a file.
fn partial(name: &str) -> String {
    format!("{name}.partial")
}

struct Target<'a> {
    model: &'a Builtin,
    map: &'a WeightMap,
    folder: &'a Path,
    marker: String,
}

impl Target<'_> {
    fn is_complete(&self) -> bool {
        let size = |name: &str| fs::metadata(self.folder.join(name)).map(|file| file.len()).ok();
        fs::read_to_string(self.folder.join(MARKER)).is_ok_and(|text| text == self.marker)
            && size(&self.map.weights_file) == Some(self.map.weights_bytes)
            && size(GRAPH).is_some_and(|len| Some(len) == self.model.graph_len())
    }

    fn make(&self, progress: &dyn Fn(u64, u64) -> Flow) -> Result<()> {
        let graph = self.model.graph_bytes()?;
        // Files of an interrupted or older version only take space.
        self.clear()?;
        let needed = self.map.weights_bytes + graph.len() as u64;
        let free = fs4::available_space(self.folder)
            .map_err(|e| Error::io("find the free space of", self.folder, &e))?;
        if free < needed {
            return Err(self.disk_full(needed, &format!("only {free} are free there")));
        }
        self.write(&self.map.weights_file, needed, &mut |out| self.map.write(&self.map.tag, out, progress))
            .and_then(|()| self.write(GRAPH, needed, &mut |out| out.write_all(&graph)))
            .and_then(|()| self.write(MARKER, needed, &mut |out| out.write_all(self.marker.as_bytes())))
            .inspect_err(|_| {
                // Report the first failure.
                let _ = self.clear();
            })
    }

    /// Removes all but the lock. Tries all, then returns the first failure.
    fn clear(&self) -> Result<()> {
        // The marker is removed first and written last: while it exists, the others are complete.
        let names = [MARKER, GRAPH, &self.map.weights_file];
        let mut result = Ok(());
        for path in
            names.into_iter().flat_map(|name| [self.folder.join(name), self.folder.join(partial(name))])
        {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    result = result.and(Err(Error::io("remove", &path, &error)));
                }
                _ => {}
            }
        }
        result
    }

    /// Writes a file under a temporary name, syncs it, then renames it.
    fn write(
        &self,
        name: &str,
        needed: u64,
        fill: &mut dyn FnMut(&mut File) -> io::Result<()>,
    ) -> Result<()> {
        let path = self.folder.join(name);
        let partial = self.folder.join(partial(name));
        let written = (|| {
            let mut file = File::create(&partial)?;
            fill(&mut file)?;
            file.sync_all()?;
            drop(file);
            fs::rename(&partial, &path)
        })();
        written.map_err(|error| match Error::io("write", &path, &error) {
            // Only a cancelled `progress` has this kind: `write_all` retries if a system call is interrupted.
            _ if error.kind() == io::ErrorKind::Interrupted => Error::new(ErrorCode::Cancelled, "cancelled"),
            full if full.code == ErrorCode::ResourceExhausted => {
                self.disk_full(needed, &format!("it ran full: {error}"))
            }
            other => other,
        })
    }

    fn disk_full(&self, needed: u64, why: &str) -> Error {
        let (name, folder) = (self.model.name, self.folder.display());
        let message =
            format!("built-in model {name} needs {needed} bytes on the disk of {folder}, but {why}");
        Error::new(ErrorCode::ResourceExhausted, message)
            .with_file(self.folder)
            .with_hint("free some space, or choose another cache folder")
    }
}

//! Keeps the kernels that the library compiled for one GPU, for later processes. They are the library's runtime cache,
//! which checks the GPU, the driver and the engine itself, and ignores kernels that do not fit.

use sdrun_abi::{Host, LogLevel};
use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};
use xxhash_rust::xxh3::xxh3_128;

/// Number of files kept, most recently used first.
const FILES: usize = 64;
/// Maximum file size in bytes; larger caches are not written.
const LIMIT: u64 = 1 << 30;

/// The cache file of one engine on one kind of GPU.
pub(crate) struct Kernels {
    file: Option<PathBuf>,
    /// Hash of what the file holds, as far as this process knows.
    kept: Option<u128>,
}

impl Kernels {
    /// The file for a plan on a GPU of a compute capability (times ten).
    pub(crate) fn of(dir: Option<&Path>, version: &str, plan: &[u8], capability: u32) -> Self {
        let hash = xxh3_128(plan);
        let file = dir.map(|dir| dir.join(format!("{version}-sm{capability}-{hash:032x}.kernels")));
        Kernels { file, kept: None }
    }

    /// Reads the stored kernels.
    pub(crate) fn load(&mut self) -> Option<Vec<u8>> {
        let file = self.file.as_ref()?;
        let size = fs::metadata(file).ok().filter(|m| m.is_file())?.len();
        let bytes = (size <= LIMIT).then(|| fs::read(file).ok()).flatten()?;
        // Marks the file as used, so that pruning removes older ones first.
        let _ = fs::File::options().append(true).open(file).and_then(|f| f.set_modified(SystemTime::now()));
        self.kept = Some(xxh3_128(&bytes));
        Some(bytes)
    }

    /// Stores the kernels for the next process if they have changed. A failure is only logged, because the kernels can be
    /// compiled again.
    pub(crate) fn store(&mut self, bytes: &[u8], host: &dyn Host) {
        let hash = Some(xxh3_128(bytes));
        let Some(file) = self.file.as_ref().filter(|_| self.kept != hash) else { return };
        self.kept = hash;
        let Some(dir) = file.parent() else { return };
        let written = tempfile::NamedTempFile::new_in(dir)
            .and_then(|temporary| fs::write(temporary.path(), bytes).map(|()| temporary))
            .and_then(|temporary| temporary.as_file().sync_all().map(|()| temporary))
            .and_then(|temporary| temporary.persist(file).map(drop).map_err(|e| e.error));
        if let Err(error) = written {
            let message = format!("cannot keep compiled kernels in {}: {error}", file.display());
            host.log(LogLevel::Warn, "tensorrt-rtx", &message);
        }
        forget_old(dir);
    }
}

fn forget_old(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    let mut files: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "kernels"))
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .collect();
    files.sort();
    let surplus = files.len().saturating_sub(FILES);
    files.iter().take(surplus).for_each(|(_, path)| drop(fs::remove_file(path)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::NoHost;

    #[test]
    fn kernels_are_kept_by_plan_and_gpu() {
        let dir = tempfile::tempdir().unwrap();
        let of = |plan: &[u8], gpu| Kernels::of(Some(dir.path()), "1.7.1.116", plan, gpu);
        assert_eq!(of(b"a", 89).load(), None);
        of(b"a", 89).store(b"compiled", &NoHost);
        assert_eq!(of(b"a", 89).load().unwrap(), b"compiled");
        assert_eq!(of(b"b", 89).load(), None);
        assert_eq!(of(b"a", 86).load(), None);
        assert_eq!(Kernels::of(None, "", b"a", 89).load(), None);
        for plan in 0..FILES as u32 + 5 {
            of(&plan.to_le_bytes(), 89).store(b"x", &NoHost);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), FILES);
    }
}

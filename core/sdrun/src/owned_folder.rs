//! Temporary folders that are always cleaned up. A process removes its own when it ends. If it was killed, the next process that makes
//! one in the same place removes what is left.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::Path,
};
use tempfile::TempDir;

const LOCK: &str = "lock";

/// A folder that only this user can access. Removed on drop.
#[derive(Debug)]
pub struct OwnedFolder {
    /// Held while the folder is in use. Closed before the folder is removed: Windows cannot remove a folder with an open file.
    _lock: File,
    dir: TempDir,
}

impl OwnedFolder {
    /// Makes one in `base`, with this prefix of its name, and removes those that killed processes left there.
    pub(crate) fn make(base: &Path, prefix: &str) -> io::Result<Self> {
        sweep(base, prefix);
        // Until the lock is held, another process may take the new folder for a stale one: then try again.
        for _ in 0..8 {
            let mut builder = tempfile::Builder::new();
            builder.prefix(prefix).rand_bytes(12);
            #[cfg(unix)]
            builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
            let dir = builder.tempdir_in(base)?;
            let path = dir.path().join(LOCK);
            let Ok(lock) = new_file(&path) else { continue };
            if lock.try_lock().is_ok() && path.exists() {
                return Ok(OwnedFolder { dir, _lock: lock });
            }
        }
        Err(io::Error::other("its new folders disappear"))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for OwnedFolder {
    fn drop(&mut self) {
        let _ = empty(self.path());
    }
}

/// Removes everything but the lock, which goes last: a folder with other files and without a lock would not be recognised as stale.
fn empty(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != LOCK {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A new file that only this user can open.
pub(crate) fn new_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Removes folders left by killed processes: ours, and not locked.
fn sweep(base: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) || !is_own_folder(&entry) {
            continue;
        }
        let stale = match File::open(entry.path().join(LOCK)) {
            Ok(lock) => lock.try_lock().is_ok().then(|| {
                let removed = empty(&entry.path()).and_then(|()| fs::remove_dir_all(entry.path()));
                // Windows may keep the folder while the lock is open.
                drop(lock);
                removed.or_else(|_| fs::remove_dir(entry.path()))
            }),
            // It is being created or removed. Only an empty folder is removed, and its creator tries again.
            Err(_) => Some(fs::remove_dir(entry.path())),
        };
        if let Some(Ok(())) = stale {
            tracing::debug!("removed {}, left by a process that died", entry.path().display());
        }
    }
}

fn is_own_folder(entry: &fs::DirEntry) -> bool {
    // Does not follow links: a link is not a folder.
    let Ok(meta) = entry.metadata() else { return false };
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::uid(&meta) != rustix::process::geteuid().as_raw() {
        return false;
    }
    meta.is_dir()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_dead_processes_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let dead = base.path().join("x-dead");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        fs::write(dead.join("3"), "x").unwrap();
        fs::create_dir(base.path().join("other")).unwrap();
        let alive = OwnedFolder::make(base.path(), "x-").unwrap();
        assert!(!dead.exists());
        let second = OwnedFolder::make(base.path(), "x-").unwrap();
        assert!(base.path().join("other").exists() && alive.path().join(LOCK).exists());
        let path = second.path().to_path_buf();
        drop(second);
        assert!(!path.exists());
    }
}

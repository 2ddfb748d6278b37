//! Hashes of an installed runtime's files: written when it is installed, compared before it is loaded.

use crate::{Error, Result};
use sdrun_abi::{Error as AbiError, ErrorCode};
use sdrun_files::{Existing, Links, Map, read_small};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Path of each file in the folder, with `/`, and its SHA-256 in lower-case hex.
type Hashes = BTreeMap<String, String>;

/// The file with the hashes.
const SEAL: &str = "sdrun-files.json";
/// What the files looked like when the hashes were last compared.
const SEEN: &str = ".sdrun-seen.json";
/// More than any list of files takes.
const MOST_BYTES: u64 = 16 << 20;

/// Whether a folder was sealed.
pub(super) fn is_sealed(dir: &Path) -> bool {
    dir.join(SEAL).is_file()
}

/// Makes a new folder writable for its owner only, and stores the hashes of its files.
pub(super) fn seal(dir: &Path) -> Result<()> {
    let mut hashes = Hashes::new();
    for path in files(dir)? {
        for place in path.ancestors().take_while(|place| *place != dir) {
            protect(place)?;
        }
        hashes.insert(name_in(dir, &path), sha256(&path)?);
    }
    protect(dir)?;
    store(&dir.join(SEAL), &hashes)
}

/// Compares the files of a sealed folder with their hashes. Skips this if no size, inode or time has changed since the last comparison,
/// because reading the libraries of a large runtime takes half a second.
///
/// # Errors
/// `DataLoss` if a file is missing or differs.
pub(super) fn check(dir: &Path) -> Result<()> {
    let seal = dir.join(SEAL);
    let damaged = |what: &str, why: &str| -> Error {
        AbiError::new(ErrorCode::DataLoss, format!("the installed runtime is damaged: {what} {why}"))
            .with_file(dir)
            .with_hint("remove the runtime and install it again")
            .into()
    };
    if !is_sealed(dir) {
        return Err(damaged(&seal.display().to_string(), "is missing"));
    }
    let text = read_small(&seal, Links::Refuse, MOST_BYTES)?;
    let hashes: Hashes =
        serde_json::from_slice(&text).map_err(|e| damaged(&seal.display().to_string(), &e.to_string()))?;
    let seen_file = dir.join(SEEN);
    let seen = read_small(&seen_file, Links::Refuse, MOST_BYTES).ok();
    let seen: Option<Vec<Stamp>> = seen.and_then(|text| serde_json::from_slice(&text).ok());
    let stamps = || hashes.keys().map(|name| stamp(&dir.join(name))).collect::<io::Result<Vec<Stamp>>>();
    let now = stamps().ok();
    if now.is_some() && now == seen {
        return Ok(());
    }
    for (name, expected) in &hashes {
        let path = dir.join(name);
        if !path.is_file() {
            return Err(damaged(&path.display().to_string(), "is missing"));
        }
        if sha256(&path)? != *expected {
            return Err(damaged(&path.display().to_string(), "has changed since it was installed"));
        }
    }
    // Where the folder cannot be written, the next check compares again.
    if let Err(error) = store(&seen_file, &now) {
        tracing::debug!("{error}");
    }
    Ok(())
}

/// What shows that a file has changed: size, modification time, and on Unix the inode and its change time, which no program can set.
type Stamp = (u64, u64, u64, i64);

fn stamp(path: &Path) -> io::Result<Stamp> {
    let meta = fs::metadata(path)?;
    let modified =
        meta.modified()?.duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    #[cfg(unix)]
    let (inode, changed) = {
        use std::os::unix::fs::MetadataExt;
        (meta.ino(), meta.ctime().wrapping_mul(1_000_000_000).wrapping_add(meta.ctime_nsec()))
    };
    #[cfg(not(unix))]
    let (inode, changed) = (0, 0);
    Ok((meta.len(), modified, inode, changed))
}

/// All regular files below a folder, not through links.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e: io::Error| Error::io("list", dir, &e);
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// The path of a file in a folder, the same on every system.
fn name_in(dir: &Path, path: &Path) -> String {
    let parts = path.strip_prefix(dir).unwrap_or(path).components();
    parts.map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

#[cfg(unix)]
fn protect(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |e: io::Error| Error::io("set the mode of", path, &e);
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    fs::set_permissions(path, PermissionsExt::from_mode(mode & !0o022)).map_err(failed)
}

#[cfg(not(unix))]
fn protect(_: &Path) -> Result<()> {
    Ok(())
}

fn store(path: &Path, what: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_vec(what).map_err(|e| AbiError::internal(e.to_string()))?;
    Ok(sdrun_files::write(path, Existing::Ours, |out| out.write_all(&text))?)
}

/// SHA-256 of a file, in lower-case hex.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let map = Map::open(path, Links::Follow)?;
    Ok(Sha256::digest(&*map).iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("libs")).unwrap();
        fs::write(dir.path().join("libs/a.so"), b"code").unwrap();
        fs::write(dir.path().join("LICENSE"), b"").unwrap();
        seal(dir.path()).unwrap();
        dir
    }

    #[test]
    fn what_was_installed_passes_again_and_again() {
        let dir = sealed();
        for _ in 0..3 {
            check(dir.path()).unwrap();
        }
        let seen: Vec<Stamp> = serde_json::from_slice(&fs::read(dir.path().join(SEEN)).unwrap()).unwrap();
        assert_eq!(seen.len(), 2);
        // A copy has other inodes and times.
        let copy = tempfile::tempdir().unwrap();
        fs::create_dir(copy.path().join("libs")).unwrap();
        for file in files(dir.path()).unwrap() {
            fs::copy(&file, copy.path().join(name_in(dir.path(), &file))).unwrap();
        }
        check(copy.path()).unwrap();
    }

    /// Also after a comparison that found everything right.
    #[test]
    fn changed_and_missing_files_are_found() {
        for checked in [false, true] {
            let changes: [(&str, Option<&[u8]>); 3] = [
                ("has changed since it was installed", Some(b"c0de")),
                ("has changed since it was installed", Some(b"")),
                ("is missing", None),
            ];
            for (words, content) in changes {
                let dir = sealed();
                if checked {
                    check(dir.path()).unwrap();
                }
                // Some systems count time in steps of 10 ms.
                std::thread::sleep(std::time::Duration::from_millis(30));
                let file = dir.path().join("libs/a.so");
                match content {
                    Some(content) => fs::write(file, content).unwrap(),
                    None => fs::remove_file(file).unwrap(),
                }
                let error = check(dir.path()).unwrap_err();
                assert_eq!(error.code(), ErrorCode::DataLoss);
                assert!(error.to_string().contains(words), "{error}");
                assert!(error.to_string().contains("a.so"), "{error}");
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_can_write_what_is_sealed() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let libs = dir.path().join("libs");
        fs::create_dir(&libs).unwrap();
        fs::write(libs.join("a.so"), b"code").unwrap();
        for path in [dir.path(), &libs, &libs.join("a.so")] {
            fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
        }
        seal(dir.path()).unwrap();
        for path in [dir.path(), &libs, &libs.join("a.so")] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o755, "{}", path.display());
        }
    }
}

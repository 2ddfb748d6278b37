#[cfg(windows)]
use same_file::is_same_file as same_file;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    collections::BTreeSet,
    fs::{File, Metadata, OpenOptions},
    io::Read,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock},
};

/// Whether a path may end in a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Follow it: the user named this file or allowed links.
    Follow,
    /// Refuse it: the name was derived, for example from the name of a model in a downloaded folder.
    Refuse,
}

/// Opens a regular file for reading. Fails at once for pipes and devices.
///
/// # Errors
/// `NotFound` if the file does not exist; `InvalidArgument` for folders, pipes, devices and refused links; otherwise
/// as [`Error::io`].
pub fn open_regular(path: &Path, links: Links) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    let file = open_checked(path, &options, links)?;
    remember_input(path);
    Ok(file)
}

/// Reads a whole small file, such as a JSON table.
///
/// # Errors
/// Those of [`open_regular`]; `DataLoss` if the file has more than `limit` bytes. Holds at most `limit` bytes.
pub fn read_small(path: &Path, links: Links, limit: u64) -> Result<Vec<u8>> {
    let file = open_regular(path, links)?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| Error::io("read", path, &error))?;
    if bytes.len() as u64 > limit {
        let message = format!("{} is larger than {limit} bytes, the limit for such a file", path.display());
        return Err(Error::new(ErrorCode::DataLoss, message).with_file(path));
    }
    Ok(bytes)
}

/// Opens a lock file, or creates it.
///
/// # Errors
/// As [`open_regular`] without following links.
pub fn open_lock(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    open_checked(path, &options, Links::Refuse)
}

fn open_checked(path: &Path, options: &OpenOptions, links: Links) -> Result<File> {
    let file = open_without_waiting(path, options, links)?;
    let metadata = file.metadata().map_err(|error| Error::io("read", path, &error))?;
    if metadata.is_file() { Ok(file) } else { Err(not_regular(path, Some(&metadata))) }
}

#[cfg(unix)]
fn open_without_waiting(path: &Path, options: &OpenOptions, links: Links) -> Result<File> {
    use rustix::{fs::OFlags, io::Errno};
    use std::os::unix::fs::OpenOptionsExt;
    // Without NONBLOCK, opening a pipe waits for its other end.
    let mut flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    if links == Links::Refuse {
        flags |= OFlags::NOFOLLOW;
    }
    let opened = options.clone().custom_flags(flags.bits() as i32).open(path);
    opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) if links == Links::Refuse => is_link(path),
        // Sockets, and pipes opened for writing without a reader.
        Some(Errno::NXIO) => not_regular(path, None),
        _ => Error::io("open", path, &error),
    })
}

#[cfg(not(unix))]
fn open_without_waiting(path: &Path, options: &OpenOptions, links: Links) -> Result<File> {
    if links == Links::Refuse && path.is_symlink() {
        return Err(is_link(path));
    }
    if let Ok(metadata) = std::fs::metadata(path)
        && !metadata.is_file()
    {
        return Err(not_regular(path, Some(&metadata)));
    }
    options.open(path).map_err(|error| Error::io("open", path, &error))
}

fn is_link(path: &Path) -> Error {
    Error::invalid(format!("{} is a symbolic link", path.display()))
        .with_file(path)
        .with_hint("copy the file, or allow links if you trust the folder")
}

pub(crate) fn not_regular(path: &Path, metadata: Option<&Metadata>) -> Error {
    let why = match metadata {
        Some(metadata) if metadata.is_dir() => "is a folder, not a file",
        _ => "is not a regular file",
    };
    Error::invalid(format!("{} {why}", path.display())).with_file(path)
}

/// Files opened since [`remember_inputs`].
static INPUTS: OnceLock<Mutex<BTreeSet<PathBuf>>> = OnceLock::new();

/// From now on, [`write()`](crate::write()) refuses to replace a file that this process has opened with
/// [`open_regular`]. For programs that run one command and exit, so that outputs cannot destroy inputs.
pub fn remember_inputs() {
    INPUTS.get_or_init(Mutex::default);
}

/// The files that this process has opened since [`remember_inputs`], without links in their paths.
pub fn inputs() -> Vec<PathBuf> {
    let Some(inputs) = INPUTS.get() else { return Vec::new() };
    let inputs = inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    inputs.iter().filter_map(|path| path.canonicalize().ok()).collect()
}

/// Records a file that was opened in another way as an input.
pub fn remember_input(path: &Path) {
    if let Some(inputs) = INPUTS.get()
        && let Ok(path) = std::path::absolute(path)
    {
        inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(path);
    }
}

/// Forgets a file that was read to be replaced by its own continuation.
pub fn forget_input(path: &Path) {
    if let Some(inputs) = INPUTS.get() {
        let mut inputs = inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        inputs.retain(|input| !same_file(input, path).unwrap_or(false));
    }
}

/// Whether `path` is a file that was opened for reading, under any name.
pub(crate) fn is_input(path: &Path) -> bool {
    let Some(inputs) = INPUTS.get() else { return false };
    let inputs = inputs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    inputs.iter().any(|input| same_file(input, path).unwrap_or(false))
}

/// Compares identities, so that hard links count as one file.
#[cfg(unix)]
fn same_file(a: &Path, b: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    // The crate `same-file` would open them, and opening a pipe waits.
    let (a, b) = (std::fs::metadata(a)?, std::fs::metadata(b)?);
    Ok((a.dev(), a.ino()) == (b.dev(), b.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn reads_regular_files_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table.json");
        fs::write(&path, b"12345").unwrap();
        assert_eq!(read_small(&path, Links::Refuse, 5).unwrap(), b"12345");
        let long = read_small(&path, Links::Refuse, 4).unwrap_err();
        assert_eq!(long.code, ErrorCode::DataLoss);
        assert!(long.message.contains("table.json") && long.message.contains("4 bytes"), "{long}");
        // A sparse file: 20 GB that use no disk space.
        File::create(&path).unwrap().set_len(20 << 30).unwrap();
        assert_eq!(read_small(&path, Links::Refuse, 1 << 20).unwrap_err().code, ErrorCode::DataLoss);
        let gone = read_small(&dir.path().join("gone"), Links::Refuse, 4).unwrap_err();
        assert_eq!(gone.code, ErrorCode::NotFound);
        let folder = open_regular(dir.path(), Links::Follow).unwrap_err();
        assert_eq!(folder.code, ErrorCode::InvalidArgument);
    }

    #[cfg(unix)]
    #[test]
    fn pipes_devices_sockets_and_links_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
        std::os::unix::fs::symlink("/dev/zero", at("endless")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        for name in ["pipe", "endless", "socket"] {
            let error = open_regular(&at(name), Links::Follow).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
            assert!(error.message.ends_with("is not a regular file"), "{error}");
            assert!(open_lock(&at(name)).is_err(), "{name} as a lock");
        }
        fs::write(at("file"), b"x").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        open_regular(&at("link"), Links::Follow).unwrap();
        let error = open_regular(&at("link"), Links::Refuse).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.ends_with("is a symbolic link") && error.hint.is_some(), "{error}");
        assert!(open_lock(&at("link")).is_err());
        open_lock(&at("lock")).unwrap().lock().unwrap();
    }
}

//! Tensors and reports in files.

pub(crate) mod npy;
pub(crate) mod npz;
pub(crate) mod png;

use crate::exit::cannot_write;
use sdrun::abi::{Error, ErrorCode};
use std::{
    fs::{self, File},
    io::{self, BufWriter, Cursor, Seek, Write},
    path::{Path, PathBuf},
};

/// Where a file is written to.
pub(crate) trait Out: Write + Seek {}
impl<T: Write + Seek> Out for T {}

/// Opens a regular file for reading, and its size. Pipes and devices are refused, since a pipe that nobody
/// writes to would wait for ever.
pub(crate) fn open(path: &Path) -> Result<(File, u64), Error> {
    let size = fs::metadata(path).and_then(|meta| {
        if meta.is_file() { Ok(meta.len()) } else { Err(io::Error::other("it is not a regular file")) }
    });
    match size.and_then(|size| Ok((File::open(path)?, size))) {
        Ok(opened) => Ok(opened),
        Err(e) => Err(Error::io("read", path, &e)),
    }
}

/// The error of a file that is not what it should be.
pub(crate) fn damaged(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::DataLoss, format!("{} {why}", path.display())).with_file(path)
}

/// Writes a file completely or not at all: into a temporary file beside it, which then takes its name. A pipe
/// or a device (`/dev/stdout`) is written to directly.
pub(crate) fn write(path: &Path, fill: impl FnOnce(&mut dyn Out) -> io::Result<()>) -> anyhow::Result<()> {
    let special = fs::metadata(path).is_ok_and(|meta| !meta.is_file());
    let written = if special { write_special(path, fill) } else { write_regular(path, fill) };
    Ok(written.map_err(|e| cannot_write(&path.display().to_string(), &e))?)
}

fn write_special(path: &Path, fill: impl FnOnce(&mut dyn Out) -> io::Result<()>) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
    }
    let mut buffer = Cursor::new(Vec::new());
    fill(&mut buffer)?;
    File::options().write(true).open(path)?.write_all(&buffer.into_inner())
}

fn write_regular(path: &Path, fill: impl FnOnce(&mut dyn Out) -> io::Result<()>) -> io::Result<()> {
    // The file behind a symbolic link is replaced, not the link.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mut builder = tempfile::Builder::new();
    builder.prefix(".sdrun-").suffix(".tmp");
    #[cfg(unix)]
    {
        // What the user's umask leaves of it, as for any file a program makes.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let mut file = BufWriter::new(builder.tempfile_in(folder_of(&target))?);
    fill(&mut file)?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(&target)?;
    Ok(())
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Whether a file can be made at `path`, asked before the work that ends there begins.
pub(crate) fn check_target(path: &Path) -> Result<(), Error> {
    let folder = folder_of(path);
    let refuse = |code, why: &str| {
        Err(Error::new(code, format!("cannot write {}: {why}", path.display())).with_file(path))
    };
    if path.is_dir() {
        return refuse(ErrorCode::InvalidArgument, "it is a folder");
    }
    match fs::metadata(&folder) {
        Ok(meta) if !meta.is_dir() => {
            refuse(ErrorCode::InvalidArgument, &format!("{} is not a folder", folder.display()))
        }
        Ok(_) => Ok(()),
        Err(e) => {
            refuse(Error::io("use", &folder, &e).code, &format!("its folder {}: {e}", folder.display()))
        }
    }
}

/// The file is replaced when it is complete; a device or a pipe must not be.
pub(crate) fn check_engine_target(path: &Path) -> Result<(), Error> {
    check_target(path)?;
    if path.exists() && !path.is_file() {
        return Err(Error::invalid(format!(
            "cannot write an engine to {}: it is not a regular file",
            path.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_fails_leaves_the_former_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.txt");
        write(&path, |out| out.write_all(b"first")).unwrap();
        let failed = write(&path, |out| {
            out.write_all(&[b'x'; 100_000])?;
            Err(io::Error::new(io::ErrorKind::StorageFull, "no room"))
        });
        let error = failed.unwrap_err();
        assert_eq!(error.downcast_ref::<Error>().unwrap().code, ErrorCode::ResourceExhausted);
        assert!(error.to_string().contains("out.txt"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn links_and_devices_stay_what_they_are() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, b"old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        write(&link, |out| out.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&real).unwrap(), b"new");
        // Readable by whom the umask allows, not by the owner alone.
        let plain = dir.path().join("plain");
        fs::write(&plain, b"").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&real), mode(&plain));
        write(Path::new("/dev/null"), |out| out.write_all(b"gone")).unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn targets_are_checked_before_the_work() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, b"").unwrap();
        check_target(&file).unwrap();
        check_target(&dir.path().join("new")).unwrap();
        check_target(Path::new("new-in-the-working-directory")).unwrap();
        let code = |path: &Path| check_target(path).unwrap_err().code;
        assert_eq!(code(dir.path()), ErrorCode::InvalidArgument);
        assert_eq!(code(&dir.path().join("absent/f")), ErrorCode::NotFound);
        assert_eq!(code(&file.join("below-a-file")), ErrorCode::InvalidArgument);
    }
}

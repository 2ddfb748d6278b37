//! Tensors, pictures and reports in files.

pub(crate) mod picture;

use crate::exit::cannot_write;
use sdrun::{abi::Error, files::Existing};
use std::{
    fs::{self, File},
    io::{self, Cursor, Write},
    path::{Path, PathBuf},
};

pub(crate) use sdrun::files::Output as Out;

/// A path with `ending` after its last name.
pub(crate) fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Writes a file that the user named, completely or not at all; see [`sdrun::files::write`]. A pipe or a device
/// (`/dev/stdout`) is written to directly.
pub(crate) fn write(path: &Path, fill: impl FnOnce(&mut dyn Out) -> io::Result<()>) -> anyhow::Result<()> {
    if !is_special(path) {
        return Ok(sdrun::files::write(path, Existing::OfUser, fill)?);
    }
    let write = || -> io::Result<()> {
        let mut buffer = Cursor::new(Vec::new());
        fill(&mut buffer)?;
        File::options().write(true).open(path)?.write_all(&buffer.into_inner())
    };
    Ok(write().map_err(|e| cannot_write(&path.display().to_string(), &e))?)
}

/// Whether a path names a pipe or a device.
fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
}

/// Checks that [`write`] may create a file at `path`. Call it before the work whose result goes there.
pub(crate) fn check_target(path: &Path) -> Result<(), Error> {
    if is_special(path) { Ok(()) } else { check_file_target(path) }
}

/// Like [`check_target`], for files that must be regular: engines, and tables whose name is derived from a model's.
pub(crate) fn check_file_target(path: &Path) -> Result<(), Error> {
    sdrun::files::check_target(path).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun::abi::ErrorCode;

    #[test]
    fn a_failed_write_keeps_the_old_file_and_leaves_nothing_else() {
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
    fn links_are_refused_and_devices_are_not_replaced() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, b"old").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let error = write(&link, |out| out.write_all(b"new")).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(check_target(&link).unwrap_err().code, ErrorCode::InvalidArgument);
        assert_eq!(fs::read(&real).unwrap(), b"old");
        // A replaced file keeps its mode.
        write(&real, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o600);
        write(Path::new("/dev/null"), |out| out.write_all(b"gone")).unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert_eq!(check_file_target(Path::new("/dev/null")).unwrap_err().code, ErrorCode::InvalidArgument);
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

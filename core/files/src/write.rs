use crate::read::{is_input, not_regular};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    fs::{self, Permissions},
    io::{self, BufWriter, Seek, Write},
    path::Path,
};

/// What [`write()`] may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// The user named the file. Links, read-only files and inputs of this process are never replaced. A replaced file
    /// keeps its mode.
    OfUser,
    /// The file is in a private folder of ours and may always be replaced. A new file is private.
    Ours,
}

/// A destination for [`write()`].
pub trait Output: Write + Seek {}
impl<T: Write + Seek> Output for T {}

/// Writes a file completely or not at all: to a temporary file in the same folder, which is synced and then renamed.
/// Never follows a symbolic link.
///
/// # Errors
/// Those of [`check_target`], and as [`Error::io`]. The previous file is then unchanged.
pub fn write(
    path: &Path,
    existing: Existing,
    fill: impl FnOnce(&mut dyn Output) -> io::Result<()>,
) -> Result<()> {
    let mode = match existing {
        Existing::OfUser => Some(check_target(path)?),
        Existing::Ours => None,
    };
    let replace = || -> io::Result<()> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".sdrun-").suffix(".tmp");
        #[cfg(unix)]
        if mode.is_some() {
            // Applies the umask, as for any new file of a program.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(Permissions::from_mode(0o666));
        }
        let mut file = BufWriter::new(builder.tempfile_in(folder_of(path))?);
        fill(&mut file)?;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        if let Some(Some(kept)) = &mode {
            file.as_file().set_permissions(kept.clone())?;
        }
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    replace().map_err(|error| Error::io("write", path, &error))
}

/// Whether [`write()`] may create or replace a file that the user named. Programs call it before expensive work.
/// Returns the permissions of the file to be replaced.
///
/// # Errors
/// `InvalidArgument` for folders, links, pipes, devices and inputs of this process; `PermissionDenied` for read-only
/// files; the folder's error if the folder cannot be used.
pub fn check_target(path: &Path) -> Result<Option<Permissions>> {
    let refuse = |code, why: &str, hint: &str| {
        let error = Error::new(code, format!("cannot write {}: {why}", path.display()));
        Err(error.with_file(path).with_hint(hint))
    };
    let folder = folder_of(path);
    match fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => {
            let why = format!("{} is not a folder", folder.display());
            return refuse(ErrorCode::InvalidArgument, &why, "name a file in a folder");
        }
        Err(error) => {
            let why = format!("its folder {}: {error}", folder.display());
            return refuse(Error::io("use", folder, &error).code, &why, "create the folder first");
        }
    }
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("write", path, &error)),
    };
    if metadata.is_symlink() {
        return refuse(
            ErrorCode::InvalidArgument,
            "it is a symbolic link",
            "name the target of the link, or remove the link",
        );
    }
    if !metadata.is_file() {
        let error = not_regular(path, Some(&metadata));
        return refuse(error.code, &error.message, "name a file");
    }
    if metadata.permissions().readonly() {
        return refuse(
            ErrorCode::PermissionDenied,
            "it is read-only",
            "name another file, or make this one writable",
        );
    }
    if is_input(path) {
        return refuse(ErrorCode::InvalidArgument, "it is an input of this command", "name another file");
    }
    Ok(Some(metadata.permissions()))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Links, open_regular, remember_inputs};

    fn put(path: &Path, bytes: &[u8]) -> Result<()> {
        write(path, Existing::OfUser, |out| out.write_all(bytes))
    }

    #[test]
    fn a_failed_write_keeps_the_previous_file_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.txt");
        put(&path, b"first").unwrap();
        let error = write(&path, Existing::OfUser, |out| {
            out.write_all(&[b'x'; 100_000])?;
            Err(io::Error::new(io::ErrorKind::StorageFull, "no room"))
        })
        .unwrap_err();
        assert_eq!(error.code, ErrorCode::ResourceExhausted);
        assert!(error.message.contains("out.txt"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_input_is_not_replaced_under_any_name() {
        remember_inputs();
        let dir = tempfile::tempdir().unwrap();
        let (model, other) = (dir.path().join("model.onnx"), dir.path().join("other.onnx"));
        put(&model, b"model").unwrap();
        fs::hard_link(&model, &other).unwrap();
        put(&model, b"MODEL").unwrap();
        fs::remove_file(&other).unwrap();
        fs::hard_link(&model, &other).unwrap();
        open_regular(&model, Links::Refuse).unwrap();
        for path in [&model, &other, &dir.path().join("./model.onnx")] {
            let error = put(path, b"engine").unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert!(error.message.ends_with("it is an input of this command"), "{error}");
        }
        assert_eq!(fs::read(&model).unwrap(), b"MODEL");
        // A cache may replace an entry that it has read.
        write(&model, Existing::Ours, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&model).unwrap(), b"new");
    }

    #[cfg(unix)]
    #[test]
    fn links_read_only_files_and_modes_are_preserved() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        fs::write(at("secret"), b"keep").unwrap();
        fs::set_permissions(at("secret"), Permissions::from_mode(0o600)).unwrap();
        symlink("secret", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        for name in ["link", "dangling"] {
            let error = put(&at(name), b"{}").unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert!(error.message.ends_with("it is a symbolic link"), "{error}");
            assert!(at(name).is_symlink());
        }
        assert_eq!((fs::read(at("secret")).unwrap(), mode(&at("secret"))), (b"keep".to_vec(), 0o600));
        assert!(!at("nowhere").exists());

        put(&at("secret"), b"new").unwrap();
        assert_eq!((fs::read(at("secret")).unwrap(), mode(&at("secret"))), (b"new".to_vec(), 0o600));
        fs::set_permissions(at("secret"), Permissions::from_mode(0o444)).unwrap();
        let error = put(&at("secret"), b"newer").unwrap_err();
        assert_eq!(error.code, ErrorCode::PermissionDenied);
        assert_eq!(fs::read(at("secret")).unwrap(), b"new");

        fs::write(at("reference"), b"").unwrap();
        put(&at("fresh"), b"x").unwrap();
        assert_eq!(mode(&at("fresh")), mode(&at("reference")), "a new file has the mode the umask gives");

        // In our own folders, the link itself is replaced.
        write(&at("link"), Existing::Ours, |out| out.write_all(b"entry")).unwrap();
        assert!(!at("link").is_symlink());
        assert_eq!(fs::read(at("secret")).unwrap(), b"new");
        assert_eq!(mode(&at("link")), 0o600);
    }

    #[test]
    fn folders_are_refused_as_targets() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(put(dir.path(), b"").unwrap_err().code, ErrorCode::InvalidArgument);
        assert_eq!(put(&dir.path().join("no/file"), b"").unwrap_err().code, ErrorCode::NotFound);
        fs::write(dir.path().join("file"), b"").unwrap();
        let below = put(&dir.path().join("file/x"), b"").unwrap_err();
        assert_eq!(below.code, ErrorCode::InvalidArgument);
    }
}

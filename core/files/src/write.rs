use crate::read::{is_input, not_regular};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    fs::{self, File, Permissions},
    io::{self, BufWriter, Seek, Write},
    path::Path,
};

/// How names of temporary files begin and end.
const PREFIX: &str = ".sdrun-";
const SUFFIX: &str = ".tmp";

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

/// Writes a file completely or not at all. The new file has no name until it is written and synced, or a temporary one if the system has no
/// unnamed files. Never follows a symbolic link.
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
    let finish = |file: BufWriter<File>| -> io::Result<File> {
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        if let Some(Some(kept)) = &mode {
            file.set_permissions(kept.clone())?;
        }
        file.sync_all()?;
        Ok(file)
    };
    let replace = || -> io::Result<()> {
        #[cfg(target_os = "linux")]
        if let Some(file) = nameless::open(folder_of(path), mode.is_some()) {
            let mut file = BufWriter::new(file);
            fill(&mut file)?;
            return nameless::put(&finish(file)?, path);
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).suffix(SUFFIX);
        #[cfg(unix)]
        if mode.is_some() {
            // Applies the umask, as for any new file of a program.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(Permissions::from_mode(0o666));
        }
        let (file, place) = builder.tempfile_in(folder_of(path))?.into_parts();
        let mut file = BufWriter::new(file);
        fill(&mut file)?;
        drop(finish(file)?);
        Ok(place.persist(path)?)
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

/// Files without a name, which vanish with a process that is killed while it writes.
#[cfg(target_os = "linux")]
mod nameless {
    use super::{PREFIX, SUFFIX, folder_of};
    use crate::{Links, open_regular};
    use rustix::{
        fs::{AtFlags, CWD, Mode, OFlags, linkat},
        io::Errno,
    };
    use std::{
        ffi::OsString,
        fs::{self, File},
        io,
        os::{fd::AsRawFd, unix::fs::MetadataExt},
        path::Path,
    };
    use tempfile::TempPath;

    /// A new one in a folder. Only files that the user named may be read by others. `None` if the file system has no unnamed files.
    pub(super) fn open(folder: &Path, of_user: bool) -> Option<File> {
        // Its entries give them their names.
        if !Path::new("/proc/self/fd").is_dir() {
            return None;
        }
        // The umask is applied, as for any new file of a program.
        let mode = Mode::from_bits_truncate(if of_user { 0o666 } else { 0o600 });
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(folder, flags, mode).ok().map(File::from)
    }

    /// Gives it its name. If a file with that name exists, this takes two steps, through a temporary name. A process that is killed between
    /// them leaves the temporary name behind, and the next write of the same file removes it.
    pub(super) fn put(file: &File, path: &Path) -> io::Result<()> {
        let link = |to: &Path| {
            let this = format!("/proc/self/fd/{}", file.as_raw_fd());
            linkat(CWD, this, CWD, to, AtFlags::SYMLINK_FOLLOW)
        };
        match link(path) {
            Err(Errno::EXIST) => {}
            linked => return Ok(linked?),
        }
        // Shows others that the file is in use.
        let _ = file.try_lock();
        let mut name = OsString::from(PREFIX);
        name.push(path.file_name().unwrap_or_default());
        name.push(SUFFIX);
        let usual = folder_of(path).join(name);
        remove_abandoned(&usual);
        let other = match link(&usual) {
            Ok(()) => TempPath::try_from_path(&usual)?,
            // Another process writes the same file now, or its name is too long.
            Err(_) => tempfile::Builder::new()
                .prefix(PREFIX)
                .suffix(SUFFIX)
                .make_in(folder_of(path), |to| Ok(link(to)?))?
                .into_temp_path(),
        };
        // On failure, the other name goes when it is dropped.
        fs::rename(&other, path)?;
        let _ = other.keep();
        Ok(())
    }

    /// Removes a file that nobody has locked.
    fn remove_abandoned(path: &Path) {
        let Ok(file) = open_regular(path, Links::Refuse) else { return };
        // Only the holder of its lock removes it, so nobody can put another file under this name meanwhile.
        let same = || Some(fs::symlink_metadata(path).ok()?.ino() == file.metadata().ok()?.ino());
        if file.try_lock().is_ok() && same() == Some(true) {
            let _ = fs::remove_file(path);
        }
    }
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

    #[cfg(target_os = "linux")]
    #[test]
    fn what_a_killed_process_left_goes_with_the_next_write() {
        let dir = tempfile::tempdir().unwrap();
        let (path, left) = (dir.path().join("out.txt"), dir.path().join(".sdrun-out.txt.tmp"));
        fs::write(&path, b"first").unwrap();
        fs::write(&left, b"half").unwrap();
        put(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert!(!left.exists());
        // One that another process is about to rename stays.
        let other = File::create(&left).unwrap();
        other.lock().unwrap();
        put(&path, b"third").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"third");
        assert!(left.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
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

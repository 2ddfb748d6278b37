//! Which files and environment variables may decide what code is loaded (docs/security.md).

use std::{ffi::OsString, path::Path};

/// Whether the process runs with more rights than the user who started it. Then the environment cannot be trusted.
pub fn elevated() -> bool {
    #[cfg(unix)]
    {
        rustix::process::geteuid() != rustix::process::getuid()
            || rustix::process::getegid() != rustix::process::getgid()
    }
    #[cfg(not(unix))]
    {
        false
    }
}

/// An environment variable that determines what is loaded. `None` if it is unset or empty, or if the process is
/// elevated.
pub fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|v| !v.is_empty() && !elevated())
}

/// Checks that only root and the current user can change `path` and its folder. Otherwise code from it must not be
/// loaded, and the error says why.
pub fn check_owner(path: &Path) -> Result<(), String> {
    for place in [Some(path), path.parent()].into_iter().flatten() {
        let meta =
            std::fs::metadata(place).map_err(|e| format!("cannot look at {}: {e}", place.display()))?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            if meta.mode() & 0o022 != 0 {
                return Err(format!(
                    "{} can be written by its group or by everyone (mode {:o}); `chmod go-w` it",
                    place.display(),
                    meta.mode() & 0o777
                ));
            }
            let user = rustix::process::geteuid().as_raw();
            if meta.uid() != 0 && meta.uid() != user {
                return Err(format!("{} belongs to another user (uid {})", place.display(), meta.uid()));
            }
        }
        #[cfg(not(unix))]
        let _ = meta;
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn refuses_files_that_others_can_write() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("lib.so");
        std::fs::write(&file, b"x").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        check_owner(&file).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o664)).unwrap();
        assert!(check_owner(&file).unwrap_err().contains("group"));
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(check_owner(&file).unwrap_err().contains("everyone"));
    }
}

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

/// Checks that only root and the current user can change `path` and its folder, and if it is a link, what it leads to. Otherwise code
/// from it must not be loaded, and the error says why.
pub fn check_owner(path: &Path) -> Result<(), String> {
    let real = std::fs::canonicalize(path).ok().filter(|real| real != path);
    let real = real.as_deref();
    for place in [Some(path), path.parent(), real, real.and_then(Path::parent)].into_iter().flatten() {
        let meta =
            std::fs::metadata(place).map_err(|e| format!("cannot look at {}: {e}", place.display()))?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let user = rustix::process::geteuid().as_raw();
            let shared = if is_private_group(meta.gid(), user) { 0o002 } else { 0o022 };
            if meta.mode() & shared != 0 {
                return Err(format!(
                    "{} can be written by its group or by everyone (mode {:o}); `chmod go-w` it",
                    place.display(),
                    meta.mode() & 0o777
                ));
            }
            if meta.uid() != 0 && meta.uid() != user {
                return Err(format!("{} belongs to another user (uid {})", place.display(), meta.uid()));
            }
        }
        #[cfg(not(unix))]
        let _ = meta;
    }
    Ok(())
}

/// Whether only this user is in a group. Most distributions of Linux make such a group for each user, with the user's number, and let
/// the group write all new files.
#[cfg(unix)]
fn is_private_group(group: u32, user: u32) -> bool {
    cfg!(target_os = "linux") && user != 0 && group == user
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_group_of_a_user_is_private_and_that_of_root_is_not() {
        assert_eq!(is_private_group(1000, 1000), cfg!(target_os = "linux"));
        assert!(!is_private_group(100, 1000) && !is_private_group(0, 0));
    }

    #[test]
    fn refuses_files_that_others_can_write() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("lib.so");
        std::fs::write(&file, b"x").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        check_owner(&file).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o646)).unwrap();
        assert!(check_owner(&file).unwrap_err().contains("by everyone"));
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(check_owner(&file).unwrap_err().contains(&*dir.path().to_string_lossy()));
    }
}

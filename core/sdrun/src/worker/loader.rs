//! Runtimes that bring their own C library.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The command prefix that starts a worker with the dynamic loader and libraries in a vendor runtime's folder. Some
/// runtimes bring their own loader because they were built for a newer C library than the system's. Empty if the
/// folder has no loader (the usual case) or if its loader is the system's.
///
/// A program that uses the system's loader cannot load such a runtime. A worker started this way can, and searches
/// that folder first for every library.
pub fn loader_of(runtime_dir: &Path) -> Vec<OsString> {
    let Some((name, system)) = system_loader() else { return Vec::new() };
    let own = runtime_dir.join(name);
    let is_system = || matches!((own.canonicalize(), system.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if !own.is_file() || is_system() {
        return Vec::new();
    }
    vec![own.into(), "--library-path".into(), runtime_dir.into()]
}

/// Name and path of the loader that programs on this system use.
fn system_loader() -> Option<(&'static str, PathBuf)> {
    let (name, folder) = match (std::env::consts::OS, std::env::consts::ARCH) {
        ("linux", "x86_64") => ("ld-linux-x86-64.so.2", "/lib64"),
        ("linux", "aarch64") => ("ld-linux-aarch64.so.1", "/lib"),
        _ => return None,
    };
    Some((name, Path::new(folder).join(name)))
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loader_other_than_the_systems_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let Some((name, system)) = system_loader() else { return };
        assert!(loader_of(dir.path()).is_empty());
        std::os::unix::fs::symlink(&system, dir.path().join(name)).unwrap();
        assert!(loader_of(dir.path()).is_empty(), "the system's own");
        std::fs::remove_file(dir.path().join(name)).unwrap();
        std::fs::copy(&system, dir.path().join(name)).unwrap();
        let own = dir.path().join(name);
        assert_eq!(
            loader_of(dir.path()),
            [own.as_os_str(), "--library-path".as_ref(), dir.path().as_os_str()]
        );
    }
}

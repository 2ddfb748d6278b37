use crate::{Paths, trust};
use sdrun_abi::{Error, ErrorCode, Result};
use std::path::{Path, PathBuf};

/// Finds the `sdrun-worker` executable: the path in the environment variable `SDRUN_WORKER` (unless the process is
/// elevated), else beside the running executable, in `../libexec/sdrun` from there, in the user's provider folder, or
/// in a system folder. The working directory and `PATH` are ignored: a program that embeds sdrun may start anywhere,
/// including through a dynamic loader that hides its own path.
pub fn find_worker() -> Result<PathBuf> {
    let name = format!("sdrun-worker{}", std::env::consts::EXE_SUFFIX);
    if let Some(named) = trust::environment("SDRUN_WORKER") {
        let path = PathBuf::from(named);
        return if path.is_absolute() && path.is_file() {
            trusted(path)
        } else {
            let message =
                format!("SDRUN_WORKER names {}, which is not the absolute path of a file", path.display());
            Err(Error::not_found(message).with_file(&path))
        };
    }
    let mut folders = Vec::new();
    let executable = std::env::current_exe().and_then(dunce::canonicalize);
    if let Some(folder) = executable.as_deref().ok().and_then(Path::parent) {
        // Anyone who can write here can replace the running program itself.
        let beside = folder.join(&name);
        if beside.is_file() {
            return Ok(beside);
        }
        folders.push(folder.to_path_buf());
        folders.extend(folder.parent().map(|prefix| prefix.join("libexec").join("sdrun")));
    }
    folders.extend(Paths::default_for_user().ok().map(|paths| paths.providers()));
    #[cfg(unix)]
    folders.extend(["/usr/local/libexec/sdrun", "/usr/libexec/sdrun"].map(PathBuf::from));
    match folders.iter().map(|folder| folder.join(&name)).find(|path| path.is_file()) {
        Some(path) => trusted(path),
        None => {
            let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
            Err(Error::not_found(format!("there is no {name} in {}", looked.join(", ")))
                .with_hint("set SDRUN_WORKER to its path, or install it beside this program"))
        }
    }
}

fn trusted(path: PathBuf) -> Result<PathBuf> {
    trust::check_owner(&path).map_err(|why| {
        Error::new(ErrorCode::PermissionDenied, format!("will not start {}: {why}", path.display()))
            .with_file(&path)
    })?;
    Ok(path)
}

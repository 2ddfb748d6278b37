//! Finds, lists, installs and removes vendor runtimes. Everything vendor-specific comes from the plugins' manifests.

use crate::{Error, Paths, Result, trust};
use sdrun_abi::{Error as AbiError, ErrorCode, PipPackage, RuntimeSpec, Wheel};
use serde::Serialize;
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A place that may hold a runtime, and whether it does.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// The folder.
    pub dir: PathBuf,
    /// Why this folder is searched.
    pub origin: String,
    /// The library that identifies the runtime, if found.
    pub library: Option<PathBuf>,
}

/// All places to look for `spec`'s runtime, in order: its environment variable (which replaces the rest), the user's
/// data folder, then the system's library folders.
pub fn candidates(spec: &RuntimeSpec, paths: &Paths) -> Vec<Candidate> {
    let look = |dir: PathBuf, origin: &str| Candidate {
        library: find_library(&dir, &spec.library_names),
        dir,
        origin: origin.to_string(),
    };
    if let Some(dir) = trust::environment(&spec.env) {
        return vec![look(PathBuf::from(dir), &spec.env)];
    }
    let mut found = Vec::new();
    if let Some(pip) = &spec.pip {
        found.push(look(install_dir(spec, paths).join(&pip.library_dir), "installed by sdrun"));
    }
    for dir in system_dirs() {
        let candidate = look(dir, "system");
        if candidate.library.is_some() {
            found.push(candidate);
        }
    }
    found
}

/// The folder to load the runtime from: the first candidate that has the library.
pub fn find(spec: &RuntimeSpec, paths: &Paths) -> Option<Candidate> {
    candidates(spec, paths).into_iter().find(|c| c.library.is_some())
}

fn system_dirs() -> Vec<PathBuf> {
    let dirs: &[&str] = if cfg!(target_os = "linux") {
        &[
            "/usr/local/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/opt/rocm/lib",
        ]
    } else if cfg!(target_os = "macos") {
        &["/opt/homebrew/lib", "/usr/local/lib"]
    } else {
        &[]
    };
    dirs.iter().map(PathBuf::from).collect()
}

/// The newest file (by name) in `dir` that matches one of `patterns`.
fn find_library(dir: &Path, patterns: &[String]) -> Option<PathBuf> {
    let patterns: Vec<glob::Pattern> = patterns.iter().filter_map(|p| glob::Pattern::new(p).ok()).collect();
    let mut names: Vec<PathBuf> = std::fs::read_dir(dir)
        .ok()?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            patterns.iter().any(|pattern| pattern.matches(name)) && p.is_file()
        })
        .collect();
    names.sort();
    names.pop()
}

/// Folder of an installed runtime.
pub fn install_dir(spec: &RuntimeSpec, paths: &Paths) -> PathBuf {
    paths.runtimes().join(format!("{}-{}", spec.name, spec.version))
}

/// What an installation downloads, and the space it takes.
#[derive(Clone, Debug, Serialize)]
pub struct InstallPlan {
    /// Package and version, in pip's notation.
    pub requirement: String,
    /// The wheel for this machine.
    pub wheel: Wheel,
    /// Target folder.
    pub dir: PathBuf,
    /// Whether it is already installed.
    pub installed: bool,
    #[serde(skip)]
    pip: PipPackage,
}

/// Plans the installation of `spec`'s runtime on this machine. `Unimplemented` if there is no package for it.
pub fn plan(spec: &RuntimeSpec, paths: &Paths) -> Result<InstallPlan> {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let pip = spec.pip.clone().ok_or_else(|| {
        AbiError::unsupported(format!("{} cannot be installed by sdrun", spec.name)).with_hint(by_hand(spec))
    })?;
    let wheel = pip.wheels.iter().find(|w| w.os == os && w.arch == arch).cloned().ok_or_else(|| {
        AbiError::unsupported(format!(
            "the package {} {} has no build for {os} {arch}",
            pip.package, spec.version
        ))
        .with_hint(by_hand(spec))
    })?;
    let dir = install_dir(spec, paths);
    Ok(InstallPlan {
        requirement: format!("{}=={}", pip.package, spec.version),
        installed: find_library(&dir.join(&pip.library_dir), &spec.library_names).is_some(),
        wheel,
        dir,
        pip,
    })
}

/// What to do if sdrun cannot install it.
pub(crate) fn by_hand(spec: &RuntimeSpec) -> String {
    let own = format!("set {} to the folder of its libraries", spec.env);
    match &spec.by_hand {
        Some(words) => format!("{words}; if it is still not found, {own}"),
        None => format!("install it the vendor's way and {own}"),
    }
}

/// Downloads the package with the machine's `pip` client (pinned version and hash), keeps the files that the manifest
/// names and finally moves them into place. An interrupted installation leaves nothing in [`InstallPlan::dir`].
pub fn install(plan: &InstallPlan) -> Result<()> {
    let parent = plan.dir.parent().unwrap_or(Path::new("."));
    crate::paths::private_dir(parent)?;
    let stage = tempfile::Builder::new()
        .prefix(".install-")
        .tempdir_in(parent)
        .map_err(|e| Error::io("create a folder in", parent, &e))?;
    let requirements = stage.path().join("requirements.txt");
    std::fs::write(&requirements, format!("{} --hash=sha256:{}\n", plan.requirement, plan.wheel.sha256))
        .map_err(|e| Error::io("write", &requirements, &e))?;
    let target = stage.path().join("package");
    run_pip(|pip| {
        pip.args([
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--no-deps",
            "--no-compile",
        ])
        .args(["--only-binary=:all:", "--require-hashes", "--implementation", "cp"])
        .args(["--python-version", &plan.wheel.python]);
        for platform in &plan.wheel.platforms {
            pip.args(["--platform", platform]);
        }
        pip.arg("--target").arg(&target).arg("-r").arg(&requirements);
    })?;
    prune(&target, &plan.pip.keep)?;
    if plan.dir.exists() {
        std::fs::remove_dir_all(&plan.dir).map_err(|e| Error::io("replace", &plan.dir, &e))?;
    }
    std::fs::rename(&target, &plan.dir).map_err(|e| Error::io("move the runtime to", &plan.dir, &e))
}

/// Runs `python -m pip` with the arguments from `arguments`; tries `python3`, then `python`.
fn run_pip(arguments: impl Fn(&mut Command)) -> Result<()> {
    let mut problems = Vec::new();
    for python in ["python3", "python"] {
        let mut command = Command::new(python);
        command.args(["-m", "pip"]);
        arguments(&mut command);
        let output = match command.stdin(std::process::Stdio::null()).output() {
            Ok(output) => output,
            Err(e) => {
                problems.push(format!("{python}: {e}"));
                continue;
            }
        };
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("No module named pip") {
            problems.push(format!("{python}: has no pip"));
            continue;
        }
        let last: Vec<&str> = stderr.lines().rev().filter(|l| !l.trim().is_empty()).take(3).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        return Err(AbiError::new(ErrorCode::Unavailable, format!("pip failed: {}", last.join(" | ")))
            .with_hint("check the connection to the package index and the free disk space, then try again")
            .into());
    }
    Err(AbiError::precondition(format!("no usable pip client ({})", problems.join("; ")))
        .with_hint("install Python 3 with pip, or install the runtime the vendor's way")
        .into())
}

/// Deletes every file below `root` whose relative path matches no pattern in `keep`, then empty folders.
fn prune(root: &Path, keep: &[String]) -> Result<()> {
    let keep: Vec<glob::Pattern> = keep.iter().filter_map(|p| glob::Pattern::new(p).ok()).collect();
    if keep.is_empty() {
        return Ok(());
    }
    fn walk(root: &Path, dir: &Path, keep: &[glob::Pattern]) -> std::io::Result<()> {
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                walk(root, &path, keep)?;
                if std::fs::read_dir(&path)?.next().is_none() {
                    std::fs::remove_dir(&path)?;
                }
            } else if !keep.iter().any(|k| path.strip_prefix(root).is_ok_and(|p| k.matches_path(p))) {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(())
    }
    walk(root, root, &keep).map_err(|e| Error::io("tidy up", root, &e))
}

/// Deletes an installed runtime. Returns whether there was one.
pub fn remove(spec: &RuntimeSpec, paths: &Paths) -> Result<bool> {
    let dir = install_dir(spec, paths);
    match std::fs::remove_dir_all(&dir) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("delete", &dir, &e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(root: &Path) -> Paths {
        Paths { data: root.join("data"), cache: root.join("cache") }
    }
    fn spec(env: &str) -> RuntimeSpec {
        RuntimeSpec {
            name: "thing".into(),
            version: "1.2".into(),
            env: env.into(),
            library_names: vec!["libthing.so.*".into()],
            pip: Some(PipPackage {
                package: "thing".into(),
                keep: vec!["thing/libs/libthing.so.*".into()],
                library_dir: "thing/libs".into(),
                wheels: vec![],
            }),
            by_hand: None,
        }
    }

    #[test]
    fn finds_the_installed_runtime_and_the_newest_library() {
        let root = tempfile::tempdir().unwrap();
        let (paths, spec) = (paths(root.path()), spec("SDRUN_TEST_UNSET_VARIABLE"));
        assert!(find(&spec, &paths).is_none());
        let libs = install_dir(&spec, &paths).join("thing/libs");
        std::fs::create_dir_all(&libs).unwrap();
        for name in ["libthing.so.1", "libthing.so.2", "libother.so.3"] {
            std::fs::write(libs.join(name), b"").unwrap();
        }
        assert_eq!(find(&spec, &paths).unwrap().library.unwrap(), libs.join("libthing.so.2"));
        assert!(remove(&spec, &paths).unwrap());
        assert!(!remove(&spec, &paths).unwrap());
    }

    #[test]
    fn prunes_to_what_is_kept() {
        let root = tempfile::tempdir().unwrap();
        for file in [
            "thing/libs/libthing.so.1",
            "thing/libs/big.so",
            "thing/__init__.py",
            "thing-1.2.dist-info/RECORD",
        ] {
            let file = root.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, b"").unwrap();
        }
        prune(root.path(), &["thing/libs/libthing.so.*".into()]).unwrap();
        let left: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["thing"]);
        assert!(root.path().join("thing/libs/libthing.so.1").exists());
        assert!(!root.path().join("thing/libs/big.so").exists());
    }

    #[test]
    fn without_a_package_the_hint_says_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let error = plan(&spec("SDRUN_THING_DIR"), &paths(root.path())).unwrap_err();
        assert!(error.hint().unwrap().to_string().contains("SDRUN_THING_DIR"), "{error}");
        let words =
            RuntimeSpec { pip: None, by_hand: Some("ask its vendor".into()), ..spec("SDRUN_THING_DIR") };
        let error = plan(&words, &paths(root.path())).unwrap_err();
        let hint = error.hint().unwrap().to_string();
        assert!(hint.contains("ask its vendor") && hint.contains("SDRUN_THING_DIR"), "{hint}");
    }
}

//! Installs a runtime: with the machine's `pip`, or from a local wheel.

use super::{
    InstallPlan, Package, run_tool, seal,
    wheel::{self, Wheel},
};
use crate::{Error, OwnedFolder, Result};
use sdrun_abi::{Error as AbiError, ErrorCode, Flow, Host};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

/// Downloads the package with the machine's `pip` client (pinned version and hash), keeps the files that the manifest
/// names, and moves them into place at the end. An interrupted installation leaves nothing in [`InstallPlan::dir`].
/// `host` can cancel at any time.
///
/// # Errors
/// `FailedPrecondition` if there is no usable `pip`, or with the end of pip's output if it fails; `ResourceExhausted` if
/// the disk is full; `Cancelled`.
pub fn install(plan: &InstallPlan, host: &dyn Host) -> Result<()> {
    plan.check_room()?;
    staged(plan, |stage, target| {
        let requirements = stage.join("requirements.txt");
        let pinned = |package: &Package| {
            let pin = format!("--hash=sha256:{}", package.wheel.sha256);
            format!("{} {pin}\n", package.requirement)
        };
        std::fs::write(&requirements, plan.packages.iter().map(pinned).collect::<String>())
            .map_err(|e| Error::io("write", &requirements, &e))?;
        let arguments = |pip: &mut Command| {
            pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"])
                .args(["--no-compile", "--only-binary=:all:", "--require-hashes", "--implementation", "cp"])
                // Nothing in the package is run by Python, so any Python may fetch it.
                .arg("--ignore-requires-python")
                .args(["--python-version", &plan.packages[0].wheel.python]);
            let platforms: BTreeSet<&String> =
                plan.packages.iter().flat_map(|package| &package.wheel.platforms).collect();
            for platform in platforms {
                pip.args(["--platform", platform]);
            }
            pip.arg("--target").arg(target).arg("-r").arg(&requirements);
        };
        run_pip(arguments, &format!("downloading {}", plan.requirements()), host)?;
        let keep: Vec<String> = plan.packages.iter().flat_map(|package| package.pip.keep.clone()).collect();
        prune(target, &keep)
    })
}

/// Installs from a wheel, or from the pinned wheels in a folder, without Python and without a network. Keeps the same files
/// in the same place as [`install`].
///
/// # Errors
/// `NotFound` if the file does not exist or the folder has no matching wheel; `InvalidArgument` for a wheel other than the
/// pinned one; `DataLoss` for a damaged one; `ResourceExhausted`; `Cancelled`.
pub fn install_from(plan: &InstallPlan, from: &Path, host: &dyn Host) -> Result<()> {
    plan.check_room()?;
    let wheels = wheel::open(plan, from, host)?;
    staged(plan, |_, target| {
        let unpack = |(wheel, package): (&Wheel, &Package)| {
            wheel.unpack(&package.pip.keep, package.wheel.installed_bytes, target, host)
        };
        wheels.iter().zip(&plan.packages).try_for_each(unpack)
    })
}

/// Fills a folder next to [`InstallPlan::dir`], then renames it to that.
fn staged(plan: &InstallPlan, fill: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<()> {
    let parent = plan.dir.parent().unwrap_or(Path::new("."));
    crate::paths::private_dir(parent)?;
    let stage =
        OwnedFolder::make(parent, ".install-").map_err(|e| Error::io("make a folder in", parent, &e))?;
    let target = stage.path().join("package");
    fill(stage.path(), &target)?;
    gather(plan, &target)?;
    seal::seal(&target)?;
    put(&target, &plan.dir, &stage.path().join("replaced"))
        .map_err(|e| Error::io("move the runtime to", &plan.dir, &e))
}

/// Moves the libraries of the further packages beside those of the first.
fn gather(plan: &InstallPlan, target: &Path) -> Result<()> {
    fn take(from: &Path, place: &Path) -> std::io::Result<()> {
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => take(&entry.path(), place)?,
                false => std::fs::rename(entry.path(), place.join(entry.file_name()))?,
            }
        }
        std::fs::remove_dir(from)
    }
    let Some((first, others)) = plan.packages.split_first() else { return Ok(()) };
    // Packages of one vendor may share a folder.
    let folders: BTreeSet<&PathBuf> = others.iter().map(|package| &package.pip.library_dir).collect();
    for folder in folders {
        let from = target.join(folder);
        take(&from, &target.join(&first.pip.library_dir))
            .map_err(|e| Error::io("move the libraries in", &from, &e))?;
    }
    Ok(())
}

/// Renames `new` to `place`. The folder that was there moves to `new` or `aside`, so `place` never holds half a folder.
fn put(new: &Path, place: &Path, aside: &Path) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        // In one step, if the file system can exchange them.
        if renameat_with(CWD, new, CWD, place, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
    }
    if place.exists() {
        std::fs::rename(place, aside)?;
    }
    std::fs::rename(new, place)
}

/// `Cancelled` if the host wants to stop.
pub(super) fn go_on(host: &dyn Host, phase: &str, step: u64, total: u64) -> Result<()> {
    if host.progress(phase, step, total) == Flow::Cancel || host.cancelled() {
        return Err(cancelled());
    }
    Ok(())
}

fn cancelled() -> Error {
    AbiError::new(ErrorCode::Cancelled, "cancelled").into()
}

/// Runs `python -m pip` with the arguments that `arguments` adds, trying `python3` and `python`.
fn run_pip(arguments: impl Fn(&mut Command), phase: &str, host: &dyn Host) -> Result<()> {
    let mut problems = Vec::new();
    for python in ["python3", "python"] {
        let mut command = Command::new(python);
        command.args(["-m", "pip"]);
        arguments(&mut command);
        let ended = match run_tool(command, phase, host) {
            Ok(ended) => ended.ok_or_else(cancelled)?,
            Err(e) => {
                problems.push(format!("{python}: {e}"));
                continue;
            }
        };
        if ended.success {
            return Ok(());
        }
        if ended.stderr.contains("No module named pip") {
            problems.push(format!("{python}: has no pip"));
            continue;
        }
        return Err(AbiError::precondition(format!("pip failed: {}", ended.last_words()))
            .with_hint("check the connection to the package index and the free disk space, then try again")
            .into());
    }
    Err(AbiError::precondition(format!("no usable pip client ({})", problems.join("; ")))
        .with_hint("install Python 3 with pip, install from a wheel, or install the runtime the vendor's way")
        .into())
}

/// Patterns of files to keep.
pub(super) fn patterns(keep: &[String]) -> Vec<glob::Pattern> {
    keep.iter().filter_map(|p| glob::Pattern::new(p).ok()).collect()
}

/// Deletes every file below `root` whose relative path matches none of `keep`, then empty folders.
fn prune(root: &Path, keep: &[String]) -> Result<()> {
    let keep = patterns(keep);
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

#[cfg(test)]
mod tests {
    use super::*;

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
}

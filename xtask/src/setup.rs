//! Installs what is missing, saying so first. Everything goes into the target folder, except for system
//! packages, which are installed only by root on Debian and its kin; anybody else is told what to install.

use crate::{
    dist::Dist,
    python::{Packages, Python, system_has_pip},
    workspace::{Workspace, output, run, step},
};
use anyhow::{Context, Result, bail};
use sdrun_abi::RuntimeSpec;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The C and C++ compilers that the ggml provider is built with.
pub(crate) fn compilers() -> Result<()> {
    let works = |variable: &str, default: &str| {
        let program = std::env::var_os(variable).unwrap_or_else(|| default.into());
        output(Command::new(program).arg("--version")).is_ok()
    };
    if works("CC", "cc") && works("CXX", "c++") {
        return Ok(());
    }
    apt_install(&["gcc", "g++", "libc6-dev"], "there is no C or no C++ compiler (`cc`, `c++`, or $CC, $CXX)")
}

/// The vendor runtimes of all plugins in `dist`, through `sdrun runtime install`.
pub(crate) fn runtimes(workspace: &Workspace, dist: &Dist) -> Result<()> {
    step("Vendor runtimes");
    for spec in specs(dist) {
        let dir = runtime_root(workspace, spec);
        if dir.is_dir() {
            println!("   {} {} is there", spec.name, spec.version);
            continue;
        }
        println!("   {} {} is missing and goes into {}", spec.name, spec.version, dir.display());
        let mut sdrun = dist.sdrun(workspace);
        if !system_has_pip() {
            sdrun.env("PATH", Python::bare(workspace)?.path()?);
        }
        run(sdrun.args(["runtime", "install", &spec.name, "--yes"]))?;
    }
    Ok(())
}

/// For every vendor runtime: the environment variable that names its folder, and the folder.
pub(crate) fn runtime_dirs<'a>(workspace: &Workspace, dist: &'a Dist) -> Vec<(&'a str, PathBuf)> {
    specs(dist)
        .filter_map(|spec| {
            let libraries = &spec.pip.as_ref()?.library_dir;
            Some((spec.env.as_str(), runtime_root(workspace, spec).join(libraries)))
        })
        .collect()
}

/// Runtimes that can be installed with pip.
fn specs(dist: &Dist) -> impl Iterator<Item = &RuntimeSpec> {
    dist.manifests.iter().filter_map(|m| m.provider.runtime.as_ref()).filter(|spec| spec.pip.is_some())
}

fn runtime_root(workspace: &Workspace, spec: &RuntimeSpec) -> PathBuf {
    workspace.data().join("runtimes").join(format!("{}-{}", spec.name, spec.version))
}

/// The ONNX backend node tests as files, written once for each version of the package `onnx`.
pub(crate) fn node_tests(workspace: &Workspace) -> Result<PathBuf> {
    step("ONNX node tests");
    let python = Python::with(workspace, Packages::Test)?;
    let version = output(python.python().args(["-c", "import onnx; print(onnx.__version__)"]))?;
    let dir = workspace.target.join(format!("onnx-node-tests-{}", version.trim()));
    if dir.is_dir() {
        println!("   {} is there", dir.display());
        return Ok(dir);
    }
    println!("   writing {}", dir.display());
    let stage = workspace.target.join(format!("onnx-node-tests.{}", std::process::id()));
    let script = workspace.root.join("xtask/python/node_tests.py");
    // Making the tests divides by zero on purpose, about which numpy warns.
    run(python.python().args(["-W", "ignore"]).arg(script).arg(&stage))?;
    fs::rename(&stage, &dir).with_context(|| format!("cannot move {} into place", stage.display()))?;
    Ok(dir)
}

/// Installs system packages as root with apt-get; tells others what to install. `why` is the reason.
pub(crate) fn apt_install(packages: &[&str], why: &str) -> Result<()> {
    let names = packages.join(" ");
    let root = output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    if !root || !Path::new("/usr/bin/apt-get").exists() {
        bail!("{why}: install it (Debian and Ubuntu: `sudo apt-get install {names}`) and run this again");
    }
    println!("   {why}: installing {names} with apt-get");
    run(Command::new("apt-get").args(["update", "--quiet", "--quiet"]))?;
    run(Command::new("apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["install", "--quiet", "--quiet", "--yes", "--no-install-recommends"])
        .args(packages))
}

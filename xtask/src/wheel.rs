//! `cargo xtask wheel`: the Python package `sdrun` as a wheel, in `target/wheel`.

use crate::{
    dist::Dist,
    python::{Packages, Python},
    workspace::{Workspace, run, step},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Limit in bytes for the wheel of a release.
const SIZE_LIMIT: u64 = 40_000_000;

/// Packs the package with the plugins and the native part from `dist`. Returns the wheel.
pub(crate) fn pack(workspace: &Workspace, dist: &Dist) -> Result<PathBuf> {
    let module = dist.library("_sdrun")?;
    step("Packing the Python package");
    let version = env!("CARGO_PKG_VERSION");
    let folder = workspace.target.join("wheel");
    let stage = folder.join("stage");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot delete {}", folder.display()))?;
    }
    fs::create_dir_all(&stage).with_context(|| format!("cannot create {}", stage.display()))?;
    let package = workspace.root.join("bindings/python");
    let mut copy = Command::new("cp");
    run(copy.arg("-r").arg(package.join("python/sdrun")).arg(&stage))?;
    let home = stage.join("sdrun");
    let mut copy = Command::new("cp");
    run(copy.arg("-r").arg(dist.dir.join("providers")).arg(dist.program("sdrun-worker")).arg(&home))?;
    fs::copy(module, home.join("_sdrun.abi3.so"))
        .with_context(|| format!("cannot copy {}", module.display()))?;
    let info = stage.join(format!("sdrun-{version}.dist-info"));
    fs::create_dir(&info)?;
    let readme = fs::read_to_string(package.join("README.md"))?;
    fs::write(
        info.join("METADATA"),
        format!(
            "Metadata-Version: 2.1\nName: sdrun\nVersion: {version}\nSummary: Diffusion models on the compiler that suits your machine\n\
             License: MIT OR Apache-2.0\nRequires-Python: >=3.10\nRequires-Dist: numpy\nRequires-Dist: pillow\n\
             Description-Content-Type: text/markdown\n\n{readme}"
        ),
    )?;
    // What the system's loader needs is that of the machine that built it.
    let tag = format!("cp310-abi3-linux_{}", std::env::consts::ARCH);
    fs::write(
        info.join("WHEEL"),
        format!("Wheel-Version: 1.0\nGenerator: sdrun\nRoot-Is-Purelib: false\nTag: {tag}\n"),
    )?;
    let wheel = folder.join(format!("sdrun-{version}-{tag}.whl"));
    let python = Python::bare(workspace)?;
    run(python.python().arg(workspace.root.join("xtask/python/wheel.py")).arg(&stage).arg(&wheel))?;
    fs::remove_dir_all(&stage)?;
    println!("   {:>8.1} MB  {}", fs::metadata(&wheel)?.len() as f64 / 1e6, wheel.display());
    Ok(wheel)
}

/// Fails if the wheel of a release is too large.
pub(crate) fn check_size(wheel: &Path) -> Result<()> {
    let size = fs::metadata(wheel)?.len();
    ensure!(size <= SIZE_LIMIT, "{} has {size} bytes; the limit is {SIZE_LIMIT}", wheel.display());
    Ok(())
}

/// Installs the wheel into a folder of its own and runs the package's tests. `cli` is the command line that draws the same pictures.
pub(crate) fn try_out(workspace: &Workspace, wheel: &Path, cli: &Path) -> Result<()> {
    Python::with(workspace, Packages::Test)?;
    let python = Python::with(workspace, Packages::Serve)?;
    let site = workspace.target.join("wheel/site");
    let mut pip = python.python();
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"]);
    run(pip.arg(&site).arg(wheel))?;
    run(&mut tests(workspace, &python, "test_sdrun.py", cli))
}

/// Draws on a local Ray cluster with the package that [`try_out`] has installed.
pub(crate) fn try_cluster(workspace: &Workspace, cli: &Path) -> Result<()> {
    let python = Python::with(workspace, Packages::Cluster)?;
    run(&mut tests(workspace, &python, "test_cluster.py", cli))
}

/// The command that runs tests of the installed package.
fn tests(workspace: &Workspace, python: &Python, file: &str, cli: &Path) -> Command {
    let folder = workspace.target.join("wheel");
    let mut tests = python.python();
    tests
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .arg(workspace.root.join("bindings/python/tests").join(file))
        .env("PYTHONPATH", folder.join("site"))
        .env("SDRUN_CLI", cli)
        .env("SDRUN_DATA_DIR", folder.join("data"))
        .env("SDRUN_CACHE_DIR", folder.join("cache"));
    tests
}

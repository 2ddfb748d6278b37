//! The packages for crates.io: whether they can be published, and whether their version numbers keep the rules.

use crate::workspace::{Workspace, output, run, step};
use anyhow::{Context, Result};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Version of cargo-semver-checks to install if there is none.
const SEMVER_CHECKS: &str = "0.49.0";

/// Packs all packages that are meant for crates.io. With `compile`, compiles each from its archive, as `cargo publish` does before it
/// uploads.
pub(crate) fn rehearse(workspace: &Workspace, compile: bool) -> Result<()> {
    let mut cargo = workspace.cargo();
    cargo.args(["publish", "--workspace", "--dry-run", "--allow-dirty", "--quiet"]);
    if !compile {
        cargo.arg("--no-verify");
    }
    run(&mut cargo)
}

/// Compares the public interface of these packages with that of a revision, or of the last release. A change that breaks users needs another
/// version number.
pub(crate) fn semver(workspace: &Workspace, revision: Option<&str>) -> Result<()> {
    step("Public interfaces");
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(&workspace.root).args(arguments));
    let last = match revision {
        Some(revision) => revision.to_string(),
        None => match git(&["tag", "--list", "v*", "--sort=-version:refname"])?.lines().next() {
            Some(tag) => tag.to_string(),
            None => {
                println!("   there is no release to compare with: no tag starts with `v`");
                return Ok(());
            }
        },
    };
    let checks = tool(workspace, "cargo-semver-checks", SEMVER_CHECKS)?;
    run(Command::new(checks).current_dir(&workspace.root).args([
        "semver-checks",
        "--workspace",
        "--baseline-rev",
        &last,
    ]))
}

/// A subcommand of cargo: the one that is installed, or else one that this builds and puts into the target folder.
pub(crate) fn tool(workspace: &Workspace, name: &str, version: &str) -> Result<PathBuf> {
    let own = workspace.target.join("tools/bin").join(name);
    let works =
        |program: &Path| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if let Some(found) = [Path::new(name), &own].into_iter().find(|program| works(program)) {
        return Ok(found.to_path_buf());
    }
    println!("   {name} is missing; installing it into {}", own.display());
    let mut cargo = workspace.cargo();
    cargo.args(["install", "--locked", "--quiet", "--debug", "--root"]);
    cargo.arg(workspace.target.join("tools")).arg(format!("{name}@{version}"));
    // It runs once, and debug information takes a third of the build time.
    run(cargo.env("CARGO_PROFILE_DEV_DEBUG", "0")).with_context(|| format!("cannot install {name}"))?;
    Ok(own)
}

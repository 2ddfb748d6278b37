//! The packages for crates.io: whether they can be published, and whether their version numbers keep the rules.

use crate::{
    setup,
    workspace::{Workspace, output, run, step},
};
use anyhow::Result;
use std::process::Command;

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
    let checks = setup::cargo_tool(workspace, "cargo-semver-checks", SEMVER_CHECKS)?;
    run(Command::new(checks).current_dir(&workspace.root).args([
        "semver-checks",
        "--workspace",
        "--baseline-rev",
        &last,
    ]))
}

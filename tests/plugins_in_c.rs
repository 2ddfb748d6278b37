//! Providers in C follow every rule of the provider specification: one built against this version's header, one against that of
//! version 1.0, and one of a future version.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "mock/c_plugins.rs"]
mod c_plugins;

use c_plugins::{Version, compile};
use std::process::Command;

fn keeps_every_rule(version: Version) {
    let dir = tempfile::tempdir().unwrap();
    let (_, manifest) = compile(version, dir.path());
    let mut conformance = Command::new(env!("CARGO_BIN_EXE_sdrun-conformance"));
    let output = conformance.args(["--spec", "--plugin"]).arg(&manifest).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{version:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    // A runner that finds nothing to check would succeed too.
    assert!(text.contains("a_newer_host_is_served") && text.contains("refit_is_exact"), "{text}");
}

#[test]
fn the_example() {
    keeps_every_rule(Version::Current);
}

#[test]
fn a_plugin_of_version_1_0() {
    keeps_every_rule(Version::First);
}

#[test]
fn a_plugin_of_a_future_version() {
    keeps_every_rule(Version::Newer);
}

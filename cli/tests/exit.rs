//! The exit codes that `sdrun --help` documents, each with a cause. Those that take a provider which misbehaves are in the
//! tests of the whole system: 9 and 11 (`tests/bad_input.rs`). 130 is in `providers.rs`. 70 is a fault of sdrun itself; nothing is known to
//! cause it, and a unit test shows that such errors get it.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Sandbox, model};
use serde_json::json;

/// Codes with a line in the help.
fn documented(sandbox: &Sandbox) -> Vec<i32> {
    let help = sandbox.run(&["--help"]).succeeds().stdout.clone();
    let lines = help.lines().skip_while(|line| !line.starts_with("Exit codes:")).skip(1);
    let list = lines.take_while(|line| !line.is_empty());
    list.filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
}

#[test]
fn every_documented_code_has_a_cause() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("m.onnx", model("x"));
    let cut = sandbox.file("cut.onnx", &model("x")[..20]);
    sandbox.provider("junk", |_| {});
    let runtime = |name: &str, bytes: u64| {
        json!({
            "name": name, "version": "1", "env": "SDRUN_THING_DIR", "library_names": ["libsdrun_no_such_thing.so"],
            "pip": { "package": name, "keep": [], "library_dir": "libs", "wheels": [{
                "os": std::env::consts::OS, "arch": std::env::consts::ARCH, "python": "312", "platforms": ["any"],
                "sha256": "00", "download_bytes": bytes, "installed_bytes": bytes }] }
        })
    };
    sandbox.provider("huge", |p| p["runtime"] = runtime("huge", 1 << 60));
    sandbox.provider("manual", |p| {
        p["runtime"] = runtime("manual", 1);
        p["runtime"]["pip"] = serde_json::Value::Null;
    });
    let mut seen = vec![9, 11, 70, 130];
    let mut cause = |code: i32, args: &[&str]| {
        let outcome = sandbox.run(args);
        assert_eq!(outcome.code, Some(code), "{args:?}: {}{}", outcome.stdout, outcome.stderr);
        seen.push(code);
    };
    cause(0, &["inspect", &file]);
    cause(1, &["doctor"]);
    cause(2, &["inspect", "--no-such-flag"]);
    cause(3, &["inspect", "absent.onnx"]);
    cause(3, &["build", &file, "--shape", "x=1,4", "--weights", "absent.safetensors"]);
    cause(3, &["run", "absent.sdengine"]);
    cause(4, &["build", &file, "--shape", "x=1,5"]);
    // A folder in place of a model is wrong, not forbidden.
    cause(4, &["build", ".", "--shape", "x=1,4"]);
    cause(5, &["build", &file, "--shape", "x=1,4", "-p", "junk"]);
    cause(6, &["runtime", "install", "manual", "--yes"]);
    cause(7, &["runtime", "install", "huge", "--yes"]);
    cause(10, &["inspect", &cut]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // A worker that others can change is not started.
        let worker = sandbox.file("worker", b"");
        std::fs::set_permissions(&worker, PermissionsExt::from_mode(0o777)).unwrap();
        let output =
            sandbox.command(&["devices", "-p", "junk"]).env("SDRUN_WORKER", &worker).output().unwrap();
        let outcome = common::outcome(output);
        outcome.fails(8, &["will not start", "worker"]);
        seen.push(8);
    }
    #[cfg(not(unix))]
    seen.push(8);
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, documented(&sandbox));
}

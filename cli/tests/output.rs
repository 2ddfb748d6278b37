//! The cache commands, and the output of results and errors.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Sandbox, model};
use serde_json::{Value, json};
use std::{io::Read, process::Stdio};

#[test]
fn an_empty_cache() {
    let sandbox = Sandbox::new();
    assert!(sandbox.run(&["cache", "list"]).succeeds().stdout.contains("0 engines, 0 B"));
    assert!(sandbox.run(&["cache", "verify"]).succeeds().stdout.contains("0 engines checked"));
    assert!(sandbox.run(&["cache", "gc", "--max-size", "0"]).succeeds().stdout.contains("0 files"));
    assert_eq!(sandbox.json(&["cache", "list"]).1["engines"], json!([]));
    assert!(!sandbox.path("cache").exists());
    sandbox.run(&["cache", "gc", "--max-size", "5 parsecs"]).fails(2, &["parsecs", "GiB"]);
    sandbox.run(&["cache", "gc", "--max-age", "5"]).fails(2, &["unit"]);
}

#[test]
fn damaged_engines_are_found_and_only_they_are_deleted() {
    let sandbox = Sandbox::new();
    let engines = sandbox.path("cache/engines");
    std::fs::create_dir_all(&engines).unwrap();
    let damaged = engines.join("0123456789abcdef.sdengine");
    std::fs::write(&damaged, b"half an engine").unwrap();
    let foreign = engines.join("thesis.docx");
    std::fs::write(&foreign, b"precious").unwrap();
    assert!(sandbox.run(&["cache", "list"]).succeeds().stdout.contains("(damaged)"));
    let verified = sandbox.run(&["cache", "verify"]);
    assert_eq!(verified.code, Some(1));
    assert!(verified.stdout.contains("0123456789abcdef.sdengine") && verified.stdout.contains("1 damaged"));
    // It is set aside, so that nothing loads it before its deletion.
    let aside = damaged.with_extension("corrupt");
    assert!(!damaged.exists() && aside.exists());
    let (_, dry) = sandbox.json(&["cache", "gc", "--dry-run"]);
    assert_eq!((&dry["dry_run"], &dry["bytes"]), (&true.into(), &14.into()));
    assert!(aside.exists());
    sandbox.run(&["cache", "gc"]).succeeds();
    assert!(!aside.exists() && foreign.exists());
    sandbox.run(&["cache", "verify"]).succeeds();
}

#[test]
fn a_cache_that_cannot_be_read_is_an_error() {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("cache"), b"a file").unwrap();
    let outcome = sandbox.run(&["cache", "list"]);
    assert!(outcome.code != Some(0) && outcome.stderr.starts_with("error: "), "{}", outcome.stderr);
}

#[test]
fn errors_are_json_too() {
    let sandbox = Sandbox::new();
    let (code, json) = sandbox.json(&["inspect", "absent.onnx"]);
    let error = &json["error"];
    assert_eq!(code, Some(3));
    assert_eq!((&error["code"], &error["exit_code"]), (&"not_found".into(), &3.into()));
    assert!(
        error["message"].as_str().unwrap().contains("absent.onnx") && error["hint"].is_string(),
        "{error}"
    );
    let text = sandbox.run(&["inspect", "absent.onnx", "--json"]).stderr;
    assert!(text.starts_with("error: "), "people read stderr: {text}");
}

#[test]
fn json_goes_to_a_file_beside_the_text() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x"));
    let outcome = sandbox.run(&["inspect", &path, "--json=report.json"]);
    assert!(outcome.succeeds().stdout.contains("Mul 1"));
    let report: Value =
        serde_json::from_slice(&std::fs::read(sandbox.path("work/report.json")).unwrap()).unwrap();
    assert_eq!(report["kind"], "onnx");
    // An error is a report too.
    assert_eq!(sandbox.run(&["inspect", "absent.onnx", "--json=report.json"]).code, Some(3));
    let report: Value =
        serde_json::from_slice(&std::fs::read(sandbox.path("work/report.json")).unwrap()).unwrap();
    assert_eq!(report["error"]["code"], "not_found");
    sandbox.run(&["cache", "list", "--json=absent/report.json"]).fails(3, &["absent/report.json"]);
    let names: Vec<_> =
        std::fs::read_dir(sandbox.path("work")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let sandbox = Sandbox::new();
    for args in [&["models"][..], &["completions", "bash"], &["--help"], &["models", "--json"]] {
        let mut child = sandbox.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "{args:?}");
    }
    // The verdict does not change.
    let mut child =
        sandbox.command(&["doctor"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let sandbox = Sandbox::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = sandbox.command(&["models"]).stdout(full()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(7), "{stderr}");
    assert!(stderr.contains("standard output"), "{stderr}");
    sandbox.run(&["cache", "list", "--json=/dev/full"]).fails(7, &["/dev/full"]);
}

#[cfg(unix)]
#[test]
fn closed_streams_do_not_panic() {
    let sandbox = Sandbox::new();
    let shell = format!("{} cache list >&- 2>&-", env!("CARGO_BIN_EXE_sdrun"));
    let status = std::process::Command::new("sh")
        .args(["-c", &shell])
        .env("SDRUN_CACHE_DIR", sandbox.path("cache"))
        .env("SDRUN_DATA_DIR", sandbox.path("data"))
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn log_lines_go_to_stderr_at_the_level_asked_for() {
    let sandbox = Sandbox::new();
    let path = sandbox.file("m.onnx", model("x"));
    let quiet = sandbox.run(&["inspect", &path, "--shape", "x=1,4"]);
    assert_eq!(quiet.stderr, "");
    let loud = sandbox.run(&["inspect", &path, "--shape", "x=1,4", "--log-level", "debug"]);
    assert!(loud.stderr.contains("DEBUG") && !loud.stderr.contains('\u{1b}'), "{}", loud.stderr);
    assert_eq!(loud.stdout, quiet.stdout);
    sandbox.run(&["cache", "list", "--log-level", "loud"]).fails(2, &["loud", "trace"]);
}

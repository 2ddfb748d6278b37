//! Help, completions and man pages.

#![allow(clippy::unwrap_used)]

mod common;

use common::Sandbox;
use std::path::Path;

/// Every command, as its arguments.
const COMMANDS: &[&[&str]] = &[
    &[],
    &["providers"],
    &["devices"],
    &["doctor"],
    &["runtime"],
    &["runtime", "list"],
    &["runtime", "install"],
    &["runtime", "remove"],
    &["models"],
    &["inspect"],
    &["build"],
    &["generate"],
    &["serve"],
    &["upscale"],
    &["run"],
    &["refit"],
    &["import"],
    &["verify"],
    &["bench"],
    &["bench", "compare"],
    &["baseline"],
    &["baseline", "list"],
    &["baseline", "install"],
    &["baseline", "remove"],
    &["tune"],
    &["selftest"],
    &["cache"],
    &["cache", "list"],
    &["cache", "gc"],
    &["cache", "verify"],
    &["completions"],
    &["man"],
];

/// The help of every command matches its snapshot. `SDRUN_BLESS=1 cargo test -p sdrun-cli --test help` rewrites the snapshots.
#[test]
fn help_matches_the_snapshots() {
    let sandbox = Sandbox::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots");
    let mut wrong = Vec::new();
    for command in COMMANDS {
        let outcome = sandbox.run(&[command, &["--help"][..]].concat());
        outcome.succeeds();
        assert!(outcome.stderr.is_empty());
        let file = folder.join(format!("{}.txt", [&["sdrun"], *command].concat().join("-")));
        if std::env::var_os("SDRUN_BLESS").is_some() {
            std::fs::write(&file, &outcome.stdout).unwrap();
        } else if std::fs::read_to_string(&file).unwrap_or_default() != outcome.stdout {
            wrong.push(format!("{}:\n{}", file.display(), outcome.stdout));
        }
    }
    assert!(wrong.is_empty(), "help has changed (SDRUN_BLESS=1 writes the snapshots):\n{}", wrong.join("\n"));
    let snapshots = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(snapshots, COMMANDS.len(), "a snapshot belongs to no command");
}

#[test]
fn every_command_has_an_example_and_is_in_the_manual() {
    let sandbox = Sandbox::new();
    let manual = include_str!("../../docs/cli.md");
    let help = sandbox.run(&["--help"]).stdout;
    for command in COMMANDS.iter().filter(|c| c.len() == 1) {
        let own = sandbox.run(&[command[0], "--help"]).stdout;
        assert!(own.contains("Example: sdrun "), "{command:?} has no example");
        // Whole words: `run` also begins `runtime`.
        let listed = |line: &str| line.split_whitespace().next() == Some(command[0]);
        assert!(help.lines().any(listed), "{command:?} is not in the help");
        let named = |rest: &str| rest.split(|c: char| !c.is_alphanumeric()).next() == Some(command[0]);
        assert!(manual.split("sdrun ").skip(1).any(named), "{command:?} is not in docs/cli.md");
    }
    // Every exit code of the help is in the manual too.
    let codes =
        help.lines().skip_while(|l| !l.starts_with("Exit codes")).skip(1).take_while(|l| !l.is_empty());
    let mut count = 0;
    for line in codes {
        let code = line.split_whitespace().next().unwrap();
        assert!(manual.contains(&format!("| {code} |")), "exit code {code} is not in docs/cli.md");
        count += 1;
    }
    assert!(count >= 12, "only {count} exit codes in the help");
}

#[test]
fn version_and_usage() {
    let sandbox = Sandbox::new();
    assert_eq!(
        sandbox.run(&["--version"]).succeeds().stdout,
        format!("sdrun {}\n", env!("CARGO_PKG_VERSION"))
    );
    let nothing = sandbox.run(&[]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (Some(2), ""));
    assert!(nothing.stderr.contains("Usage: sdrun"));
    sandbox.run(&["buidl"]).fails(2, &["buidl", "build"]);
    sandbox.run(&["build", "x", "--precision", "fp8"]).fails(2, &["fp8", "bf16"]);
    sandbox.run(&["build", "x", "--threads", "0"]).fails(2, &["--threads"]);
    sandbox.run(&["build", "x", "--rebuild", "--no-cache"]).fails(2, &["cannot be used"]);
    let (code, json) = sandbox.json(&["build"]);
    assert_eq!((code, &json["error"]["exit_code"]), (Some(2), &2.into()));
}

#[test]
fn completions_offer_current_names() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = sandbox.run(&["completions", shell]).succeeds().stdout.clone();
        assert!(script.contains("SDRUN_COMPLETE") && script.contains("sdrun"), "{shell}: {script}");
    }
    sandbox.run(&["completions", "cmd.exe"]).fails(2, &["cmd.exe"]);
    // As fish calls it: the words so far, the last one unfinished.
    let offered = |words: &[&str]| -> Vec<String> {
        let mut command = sandbox.command(&[&["--", "sdrun"], words].concat());
        let output = command.env("SDRUN_COMPLETE", "fish").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.split('\t').next().unwrap_or_default().to_string()).collect()
    };
    let commands = offered(&[""]);
    for command in COMMANDS.iter().filter(|c| c.len() == 1) {
        assert!(commands.iter().any(|name| name == command[0]), "{command:?}: {commands:?}");
    }
    assert_eq!(offered(&["build", "sd15/une"])[0], "sd15/unet");
    sandbox.file("own.onnx", b"");
    assert_eq!(offered(&["bench", "mobilenet-v2", "ow"]), ["own.onnx"]);
    assert!(offered(&["build", "x", "--provi"]).contains(&"--provider".to_string()));
    sandbox.provider("acme", |_| ());
    assert_eq!(offered(&["build", "x", "--provider", ""]), ["acme"]);
}

#[test]
fn man_pages_exist_for_every_command() {
    let sandbox = Sandbox::new();
    let page = sandbox.run(&["man"]);
    assert!(page.succeeds().stdout.contains(".TH sdrun 1"), "{}", page.stdout);
    let dir = sandbox.path("new/man1");
    sandbox.run(&["man", "--dir", dir.to_str().unwrap()]).succeeds();
    for command in COMMANDS {
        let name = format!("{}.1", [&["sdrun"], *command].concat().join("-"));
        let text = std::fs::read_to_string(dir.join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(text.contains(".SH SYNOPSIS"), "{name}");
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), COMMANDS.len());
    let file = sandbox.file("a-file", b"");
    sandbox.run(&["man", "--dir", &format!("{file}/below")]).fails(4, &["a-file"]);
}

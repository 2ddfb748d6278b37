//! The config file, the log filter, and which setting overrides which.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Sandbox, outcome};

/// A sandbox with two providers that cannot be loaded, and this config file in the default place.
fn configured(text: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.provider("first", |p| p["priority"] = 90.into());
    sandbox.provider("second", |p| p["priority"] = 10.into());
    let folder = sandbox.path(if cfg!(windows) { "home/sdrun" } else { "home/.config/sdrun" });
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.toml"), text).unwrap();
    sandbox
}

fn providers(sandbox: &Sandbox) -> Vec<String> {
    let (_, devices) = sandbox.json(&["devices"]);
    devices["providers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["provider"].as_str().unwrap().to_string())
        .collect()
}

#[test]
fn the_file_orders_providers() {
    assert_eq!(providers(&configured("")), ["first", "second"]);
    assert_eq!(providers(&configured("providers = ['second', 'absent']")), ["second", "first"]);
}

#[test]
fn folders_come_from_the_environment_and_then_from_the_file() {
    let sandbox = Sandbox::new();
    let there = sandbox.path("there");
    let file = sandbox.file("other.toml", format!("[folders]\ncache = {:?}\n", there.to_str().unwrap()));
    let folder = |keep: bool| {
        let mut command = sandbox.command(&["cache", "list", "--json"]);
        command.env("SDRUN_CONFIG", &file);
        if !keep {
            command.env_remove("SDRUN_CACHE_DIR");
        }
        let outcome = outcome(command.output().unwrap());
        let json: serde_json::Value = serde_json::from_str(&outcome.succeeds().stdout).unwrap();
        json["folder"].as_str().unwrap().to_string()
    };
    assert!(folder(false).starts_with(there.to_str().unwrap()));
    assert!(folder(true).starts_with(sandbox.path("cache").to_str().unwrap()));
}

#[test]
fn a_wrong_file_is_one_sentence_and_nothing_runs() {
    configured("threds = 4").run(&["providers"]).fails(4, &["config.toml, line 1", "threds"]);
    configured("log = 'loud'").run(&["providers"]).fails(4, &["loud"]);
    let sandbox = Sandbox::new();
    for (value, code) in [("/nowhere/config.toml", 3), (sandbox.path("work").to_str().unwrap(), 4)] {
        let mut command = sandbox.command(&["providers"]);
        outcome(command.env("SDRUN_CONFIG", value).output().unwrap()).fails(code, &[value]);
    }
    // No file at all, even if there is one in the default place.
    let sandbox = configured("threds = 4");
    outcome(sandbox.command(&["providers"]).env("SDRUN_CONFIG", "").output().unwrap()).succeeds();
    // Help needs no config.
    sandbox.run(&["--help"]).succeeds();
}

#[test]
fn doctor_names_the_file() {
    let sandbox = configured("precision = 'q4_k'");
    let (_, doctor) = sandbox.json(&["doctor"]);
    let checks = doctor["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "config file").unwrap();
    assert!(check["detail"].as_str().unwrap().ends_with("config.toml"), "{check}");
}

#[test]
fn log_filters_come_from_flags_then_the_environment() {
    let sandbox = Sandbox::new();
    let run = |args: &[&str], filter: &str| {
        outcome(sandbox.command(args).env("SDRUN_LOG", filter).output().unwrap())
    };
    run(&["models"], "sdrun=debug,acme=info").succeeds();
    run(&["models"], "sdrun=loud").fails(4, &["SDRUN_LOG", "sdrun=loud", "hint: "]);
    run(&["models", "-vv"], "sdrun=loud").succeeds();
    run(&["models", "-v", "--log-level", "info"], "").fails(2, &["cannot be used"]);
}

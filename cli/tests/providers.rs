//! Commands about providers and runtimes on incomplete machines.

#![allow(clippy::unwrap_used)]

mod common;

use common::Sandbox;
use serde_json::json;

/// A runtime that no machine has, installable on this one.
fn runtime() -> serde_json::Value {
    json!({
        "name": "thing", "version": "1.2.3", "env": "SDRUN_THING_DIR", "library_names": ["libsdrun_no_such_thing.so"],
        "pip": {
            "package": "sdrun-no-such-package", "keep": ["*"], "library_dir": "libs",
            "wheels": [{
                "os": std::env::consts::OS, "arch": std::env::consts::ARCH, "python": "312", "platforms": ["any"],
                "sha256": "00", "download_bytes": 12_300_000, "installed_bytes": 45_600_000
            }]
        }
    })
}

#[test]
fn every_command_works_without_providers() {
    let sandbox = Sandbox::new();
    for args in [&["providers"][..], &["providers", "--explain"], &["devices"], &["runtime", "list"]] {
        let outcome = sandbox.run(args);
        assert_eq!(outcome.succeeds().stdout, "", "{args:?}");
        assert!(outcome.stderr.contains("provider"), "{args:?} says nothing");
        assert_eq!(sandbox.run(&[args, &["--quiet"]].concat()).stderr, "", "{args:?}");
    }
    assert_eq!(sandbox.json(&["providers"]).1, json!({ "providers": [] }));
    assert_eq!(sandbox.json(&["devices"]).1, json!({ "providers": [] }));
    assert_eq!(sandbox.json(&["runtime", "list"]).1, json!({ "runtimes": [] }));
    let (code, doctor) = sandbox.json(&["doctor"]);
    assert_eq!((code, &doctor["usable"]), (Some(1), &false.into()));
    assert!(!sandbox.path("cache").exists() && !sandbox.path("data").exists(), "looking created a folder");
}

#[test]
fn skipped_providers_are_listed_with_the_reason() {
    let sandbox = Sandbox::new();
    sandbox.provider("good", |_| {});
    sandbox.provider("gone", |p| p["library"]["path"] = "libgone-away.so".into());
    sandbox.provider("future", |p| p["library"]["abi_major"] = 99.into());
    sandbox.provider("foreign", |p| p["library"]["target"] = "pdp11-unknown-unix".into());
    std::fs::write(sandbox.path("providers/sdrun-provider-broken.json"), b"{").unwrap();
    let explained = sandbox.run(&["providers", "--explain"]).succeeds().stdout.clone();
    for (id, why) in [
        ("good", "usable"),
        ("gone", "libgone-away.so is missing"),
        ("future", "needs ABI 99.0"),
        ("foreign", "built for pdp11-unknown-unix"),
        ("sdrun-provider-broken", "not a manifest"),
    ] {
        let line =
            explained.lines().find(|l| l.starts_with(&format!("{id}: "))).unwrap_or_else(|| panic!("{id}"));
        assert!(line.contains(why), "{line}");
    }
    let list = sandbox.run(&["providers"]).stdout;
    assert!(list.contains("good") && list.contains("4 skipped") && !list.contains("future"), "{list}");
    let (_, json) = sandbox.json(&["providers"]);
    let rows = json["providers"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for row in rows {
        assert_eq!(row["usable"].as_bool().unwrap(), row["skipped"].is_null(), "{row}");
    }
    sandbox.run(&["devices", "-p", "gone"]).fails(5, &["`gone` is not usable", "missing", "hint: "]);
    sandbox.run(&["devices", "-p", "nothing"]).fails(3, &["no provider `nothing`", "good", "hint: "]);
}

#[test]
fn provider_path_comes_first_and_the_environment_selects() {
    let (sandbox, other) = (Sandbox::new(), Sandbox::new());
    sandbox.provider("same", |p| p["version"] = "1.0.0".into());
    other.provider("same", |p| p["version"] = "2.0.0".into());
    let path = other.path("providers");
    let (_, json) = sandbox.json(&["providers", "--provider-path", path.to_str().unwrap()]);
    let used = json["providers"].as_array().unwrap().iter().find(|p| p["usable"] == true).unwrap();
    assert_eq!(
        (&used["provide"]["version"], &used["origin"]),
        (&"2.0.0".into(), &"given by the program".into())
    );
    let disabled =
        sandbox.command(&["providers", "--json"]).env("SDRUN_PROVIDERS_DISABLE", "s*").output().unwrap();
    assert!(String::from_utf8(disabled.stdout).unwrap().contains("disabled by SDRUN_PROVIDERS_DISABLE"));
}

#[cfg(unix)]
#[test]
fn files_that_others_can_change_are_not_trusted() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = Sandbox::new();
    sandbox.provider("open", |_| {});
    let library = sandbox.path("providers/libopen.so");
    std::fs::set_permissions(&library, PermissionsExt::from_mode(0o666)).unwrap();
    sandbox.run(&["devices", "-p", "open"]).fails(5, &["can be written by", "libopen.so"]);
}

#[test]
fn a_file_that_is_not_a_library_is_an_error_and_not_a_crash() {
    let sandbox = Sandbox::new();
    sandbox.provider("junk", |_| {});
    let model = sandbox.file("m.onnx", common::model("x"));
    sandbox.run(&["build", &model, "--shape", "x=1,4", "-p", "junk"]).fails(5, &["libjunk.so"]);
    let (code, doctor) = sandbox.json(&["doctor"]);
    assert_eq!(code, Some(1));
    let checks = doctor["providers"][0]["checks"].as_array().unwrap();
    let loading = checks.iter().find(|c| c["name"] == "loading").unwrap();
    assert_eq!(loading["state"], "problem");
    let text = sandbox.run(&["doctor"]).stdout;
    assert!(text.contains("problem  loading") && text.contains("no provider works here"), "{text}");
}

#[test]
fn a_missing_runtime_is_reported_with_what_to_do() {
    let sandbox = Sandbox::new();
    sandbox.provider("needy", |p| p["runtime"] = runtime());
    let listed = sandbox.run(&["runtime", "list"]).succeeds().stdout.clone();
    assert!(
        listed.contains("thing") && listed.contains("12.3 MB") && listed.contains("not installed"),
        "{listed}"
    );
    sandbox
        .run(&["devices", "-p", "needy"])
        .fails(5, &["not installed", "hint: run `sdrun runtime install thing`"]);
    let devices = sandbox.run(&["devices"]).succeeds().stdout.clone();
    assert!(devices.contains("needy") && devices.contains("hint: "), "{devices}");
    let doctor = sandbox.run(&["doctor"]);
    assert_eq!(doctor.code, Some(1));
    assert!(
        doctor.stdout.contains("SDRUN_THING_DIR") && !doctor.stdout.contains("loading"),
        "{}",
        doctor.stdout
    );
    // The environment names a folder that does not exist either.
    let named = sandbox.command(&["doctor"]).env("SDRUN_THING_DIR", "/nowhere/at/all").output().unwrap();
    assert!(String::from_utf8(named.stdout).unwrap().contains("/nowhere/at/all (SDRUN_THING_DIR)"));
}

#[test]
fn installing_asks_first() {
    let sandbox = Sandbox::new();
    sandbox.provider("needy", |p| p["runtime"] = runtime());
    sandbox.provider("alone", |p| {
        p["runtime"] = runtime();
        p["runtime"]["name"] = "manual".into();
        p["runtime"]["pip"] = serde_json::Value::Null;
    });
    let asked = sandbox.run(&["runtime", "install", "thing"]);
    assert_eq!(asked.code, Some(4));
    for words in ["sdrun-no-such-package==1.2.3", "12.3 MB", "45.6 MB", "thing-1.2.3", "--yes"] {
        assert!(asked.stderr.contains(words), "{words:?} is not in: {}", asked.stderr);
    }
    sandbox.run(&["runtime", "install", "nothing"]).fails(3, &["nothing", "thing"]);
    sandbox
        .run(&["runtime", "install", "manual", "--yes"])
        .fails(6, &["cannot be installed by sdrun", "SDRUN_THING_DIR"]);
    let removed = sandbox.run(&["runtime", "remove", "thing"]).succeeds().stdout.clone();
    assert!(removed.contains("was not installed by sdrun"), "{removed}");
    assert!(!sandbox.path("data").exists());
}

#[cfg(unix)]
#[test]
fn a_failed_installation_leaves_nothing() {
    let sandbox = Sandbox::new();
    sandbox.provider("needy", |p| p["runtime"] = runtime());
    let args = ["runtime", "install", "thing", "--yes"];
    let output =
        sandbox.with_python(&args, "echo 'ERROR: hashes do not match' >&2; exit 1").output().unwrap();
    common::outcome(output).after_notes().fails(5, &["pip failed", "hashes do not match", "hint: "]);
    assert_eq!(std::fs::read_dir(sandbox.path("data/runtimes")).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn ctrl_c_cancels_and_leaves_nothing() {
    use std::os::unix::process::CommandExt;
    let sandbox = Sandbox::new();
    sandbox.provider("needy", |p| p["runtime"] = runtime());
    let started = sandbox.path("started");
    let script = format!("touch {}; exec sleep 60", started.display());
    let mut command = sandbox.with_python(&["runtime", "install", "thing", "--yes"], &script);
    // The signal reaches the whole group, as when a shell interrupts a job.
    command.process_group(0).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    while !started.exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let group = format!("-{}", child.id());
    assert!(std::process::Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let outcome = common::outcome(child.wait_with_output().unwrap());
    assert_eq!(outcome.code, Some(130), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("error: cancelled"), "{}", outcome.stderr);
    assert_eq!(std::fs::read_dir(sandbox.path("data/runtimes")).unwrap().count(), 0);
}

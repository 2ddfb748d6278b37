//! Failures on a user's machine, through the command line and the real providers. Each gives one sentence, a hint and the right
//! exit code, never hangs, and leaves nothing half-written.

#![allow(clippy::unwrap_used)]
#![cfg(unix)]

#[path = "hostile/mod.rs"]
mod hostile;

use sdrun::abi::{ABI_MAJOR, Manifest};
use sdrun_tests::{
    machine::{Machine, PROVIDERS, compile, finish, npy, refuses, succeeds},
    spec::small_model,
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

#[test]
fn valid_inputs_work() {
    let machine = Machine::new();
    for provider in PROVIDERS {
        succeeds(&mut machine.run_model(provider));
        let y = fs::read(machine.work().join("y.npy")).unwrap();
        assert!(y.starts_with(b"\x93NUMPY"), "{provider}");
        fs::remove_file(machine.work().join("y.npy")).unwrap();
    }
}

#[test]
fn missing_files() {
    let machine = Machine::new();
    refuses(&mut machine.sdrun(&["run", "missing.onnx", "-p", "ggml"]), 3, &["missing.onnx"]);
    refuses(&mut machine.sdrun(&["inspect", "missing.onnx"]), 3, &["missing.onnx"]);
    let input = ["run", "model.onnx", "-p", "ggml", "-i", "x=missing.npy", "-i", "r=r.npy"];
    refuses(&mut machine.sdrun(&input), 3, &["missing.npy"]);
}

#[test]
fn truncated_models_and_inputs() {
    let machine = Machine::new();
    let whole = small_model();
    for cut in (1..whole.len()).step_by(whole.len() / 25) {
        machine.file("cut.onnx", &whole[..cut]);
        let outcome = finish(&mut machine.sdrun(&["inspect", "cut.onnx"]));
        let told = outcome.stderr.starts_with("error: ") && outcome.stderr.contains("cut.onnx");
        // A cut between two fields leaves a valid message of another model. That model is refused later or not at all.
        assert!(matches!(outcome.code, Some(4 | 10)) && told, "{cut}: {:?} {}", outcome.code, outcome.stderr);
    }
    for provider in PROVIDERS {
        let arguments =
            ["run", "cut.onnx", "-p", provider, "-i", "x=x.npy", "-i", "r=r.npy", "--output", "y=y.npy"];
        refuses(&mut machine.sdrun(&arguments), 10, &["cut.onnx"]);
    }
    let x = npy("<f4", &[2, 4]);
    machine.file("x.npy", &x[..x.len() - 1]);
    refuses(&mut machine.run_model("ggml"), 10, &["x.npy"]);
    assert!(!machine.names().contains(&"y.npy".into()));
}

#[test]
fn inputs_of_the_wrong_type_or_shape() {
    for (content, words) in [
        (npy("<i8", &[2, 4]), ["i64", "f32"]),
        (npy("<f4", &[4, 2]), ["[4, 2]", "[2, 4]"]),
        (npy("<f4", &[8]), ["[8]", "[2, 4]"]),
    ] {
        let machine = Machine::new();
        machine.file("x.npy", content);
        for provider in PROVIDERS {
            refuses(&mut machine.run_model(provider), 4, &["input", "x", words[0], words[1], "hint: "]);
        }
        assert!(!machine.names().contains(&"y.npy".into()));
    }
    let machine = Machine::new();
    let missing = ["run", "model.onnx", "-p", "ggml", "-i", "x=x.npy"];
    refuses(&mut machine.sdrun(&missing), 4, &["r f32", "--input"]);
}

#[test]
fn names_that_no_file_can_have() {
    let machine = Machine::new();
    let long = "a".repeat(300);
    let (model, output) = (format!("{long}.onnx"), format!("y={long}.npy"));
    refuses(&mut machine.sdrun(&["inspect", &model]), 4, &["too long"]);
    let run = ["run", "model.onnx", "-p", "ggml", "-i", "x=x.npy", "-i", "r=r.npy", "--output", &output];
    refuses(&mut machine.sdrun(&run), 4, &["too long"]);
}

/// The command line overrides the config file.
#[test]
fn a_config_file_gives_defaults() {
    let machine = Machine::new();
    let config = machine.file("config.toml", "providers = ['ggml']\nprecision = 'bf16'\n");
    let built = |arguments: &[&str]| {
        let arguments = [&["build", "model.onnx"], arguments].concat();
        succeeds(machine.sdrun(&arguments).env("SDRUN_CONFIG", &config)).stdout
    };
    let default = built(&[]);
    assert!(default.contains("ggml") && default.contains("bf16"), "{default}");
    let chosen = built(&["--precision", "fp32"]);
    assert!(chosen.contains("ggml") && chosen.contains("fp32"), "{chosen}");
}

#[test]
fn an_unknown_provider() {
    let machine = Machine::new();
    refuses(
        &mut machine.run_model("nothere"),
        3,
        &["`nothere`", "ggml", "onnxruntime", "openvino", "hint: "],
    );
}

/// For every provider with a vendor runtime: the folder is empty, or the library is garbage or cut in half.
/// The extension that adds such devices is not installed.
#[test]
fn a_device_of_a_missing_extension() {
    let machine = Machine::new();
    refuses(
        machine.run_model("onnxruntime").args(["--device", "webgpu:0"]),
        3,
        &["no device `webgpu:0`", "runtime install onnxruntime-webgpu"],
    );
}

#[test]
fn missing_and_damaged_runtimes() {
    let machine = Machine::new();
    let empty = machine.dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    for manifest in machine.manifests() {
        let (id, Some(runtime)) = (&manifest.provider.id, &manifest.provider.runtime) else { continue };
        let install = format!("sdrun runtime install {}", runtime.name);
        refuses(
            machine.run_model(id).env("SDRUN_DATA_DIR", &empty),
            5,
            &["not installed", &install, &runtime.env],
        );
        refuses(machine.run_model(id).env(&runtime.env, &empty), 5, &[&runtime.env, empty.to_str().unwrap()]);

        let garbage = machine.dir.path().join(format!("garbage-{id}"));
        fs::create_dir(&garbage).unwrap();
        let name = runtime.library_names[0].replace('*', "1");
        fs::write(garbage.join(&name), b"not a library").unwrap();
        let outcome = finish(machine.run_model(id).env(&runtime.env, &garbage));
        assert!(matches!(outcome.code, Some(5 | 10)), "{id}: {:?} {}", outcome.code, outcome.stderr);
        assert!(outcome.stderr.contains(&name) && !outcome.stderr.contains("panick"), "{}", outcome.stderr);

        // Everything else still works.
        for arguments in [&["providers"][..], &["doctor"], &["devices"]] {
            let outcome = finish(machine.sdrun(arguments).env(&runtime.env, &garbage));
            assert_eq!(outcome.code, Some(0), "{arguments:?}: {}", outcome.stderr);
            assert!(outcome.stdout.contains("ggml"), "{arguments:?}: {}", outcome.stdout);
        }
    }
}

/// Runtimes that somebody else could change: the folder, the library, another library that it may pull in. The last one belongs to
/// another user, which only root can arrange.
#[test]
fn runtimes_that_others_can_change() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let machine = Machine::new();
    let mode = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    for manifest in machine.manifests() {
        let (id, Some(runtime)) = (&manifest.provider.id, &manifest.provider.runtime) else { continue };
        let dir = machine.dir.path().join(format!("open-{id}"));
        fs::create_dir(&dir).unwrap();
        mode(&dir, 0o755);
        let [library, other] = [
            runtime.library_names[0].replace('*', "1"),
            format!("libother{}.2", std::env::consts::DLL_SUFFIX),
        ]
        .map(|name| dir.join(name));
        for file in [&library, &other] {
            fs::write(file, b"not a library").unwrap();
            mode(file, 0o644);
        }
        let refused = |place: &Path, words: &str| {
            let run = &mut machine.run_model(id);
            refuses(run.env(&runtime.env, &dir), 8, &["will not load", place.to_str().unwrap(), words]);
        };
        for (place, usual) in [(&dir, 0o755), (&library, 0o644), (&other, 0o644)] {
            mode(place, usual | 0o002);
            refused(place, "chmod go-w");
            mode(place, usual);
        }
        if fs::metadata(&dir).unwrap().uid() == 0 {
            chown(&other, Some(12_345), None).unwrap();
            refused(&other, "another user");
        }
    }
}

/// A byte of an installed runtime changes. A run before that found everything right.
#[test]
fn installed_runtimes_that_changed() {
    let machine = Machine::new();
    let manifests = machine.manifests();
    let runtime =
        manifests.iter().find_map(|m| m.provider.runtime.as_ref().filter(|_| m.provider.id == "onnxruntime"));
    let runtime = runtime.unwrap();
    let name = format!("{}-{}", runtime.name, runtime.version);
    let data = machine.dir.path().join("data");
    fs::create_dir_all(data.join("runtimes")).unwrap();
    let installed = data.join("runtimes").join(&name);
    let copy =
        Command::new("cp").arg("-r").arg(machine.data.join("runtimes").join(&name)).arg(&installed).status();
    assert!(copy.unwrap().success());
    succeeds(machine.run_model("onnxruntime").env("SDRUN_DATA_DIR", &data));
    let libraries = installed.join(&runtime.pip.as_ref().unwrap().library_dir);
    let library = fs::read_dir(libraries)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .max_by_key(|path| fs::metadata(path).unwrap().len());
    let library = library.unwrap();
    let mut bytes = fs::read(&library).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&library, bytes).unwrap();
    let words = ["has changed since it was installed", library.to_str().unwrap(), "install it again"];
    refuses(machine.run_model("onnxruntime").env("SDRUN_DATA_DIR", &data), 10, &words);
}

/// A byte of a library that comes with a plugin changes.
#[test]
fn plugins_whose_libraries_changed() {
    let machine = Machine::new();
    let copy = machine.dir.path().join("dist");
    assert!(Command::new("cp").arg("-r").arg(&machine.dist).arg(&copy).status().unwrap().success());
    let changed = Machine { dist: copy, ..machine };
    let manifests = changed.manifests();
    let ggml = manifests.iter().find(|m| m.provider.id == "ggml").unwrap();
    let names: Vec<&String> = ggml.provider.library.companions.keys().collect();
    assert!(names.len() > 3, "{names:?}");
    succeeds(&mut changed.run_model("ggml"));
    for name in [names[0], names[names.len() - 1]] {
        let file = changed.dist.join("providers/ggml").join(name);
        let good = fs::read(&file).unwrap();
        let mut bytes = good.clone();
        bytes[good.len() / 2] ^= 1;
        fs::write(&file, bytes).unwrap();
        refuses(&mut changed.run_model("ggml"), 10, &[name, "install it again"]);
        fs::write(&file, good).unwrap();
    }
}

/// A program with more rights than its user does not load what that user's environment names.
#[test]
fn elevated_processes_ignore_the_environment() {
    use std::os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::CommandExt,
    };
    let machine = Machine::new();
    if fs::metadata(machine.dir.path()).unwrap().uid() != 0 {
        eprintln!("not run: only root can make a program that others start with root's rights");
        return;
    }
    let everyone = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    everyone(machine.dir.path(), 0o755);
    let program = machine.work().join("sdrun");
    fs::copy(machine.dist.join("sdrun"), &program).unwrap();
    for (mode, names) in [(0o755, true), (0o4755, false)] {
        everyone(&program, mode);
        let mut command = Command::new(&program);
        machine.environment(command.args(["providers", "--explain"]).uid(65534).gid(65534));
        let outcome = finish(command.env("SDRUN_PROVIDER_FILES", "/no/such.json"));
        let told = outcome.stdout + &outcome.stderr;
        assert_eq!(told.contains("/no/such.json"), names, "{mode:o}: {told}");
        assert_eq!(told.contains("no provider found"), !names, "{mode:o}: {told}");
    }
}

/// Libraries with the right names and old versions.
#[test]
fn outdated_runtimes() {
    let openvino = r#"
        typedef struct { const char *build_number, *description; } ov_version_t;
        int ov_get_openvino_version(ov_version_t *v) { v->build_number = "2021.4.0-1-old"; v->description = ""; return 0; }
        void ov_version_free(ov_version_t *v) { (void)v; }"#;
    let onnxruntime = r#"
        #include <stdio.h>
        struct Base { const void *(*get_api)(unsigned); const char *(*version)(void); };
        static const void *get_api(unsigned v) { (void)v; return NULL; }
        static const char *version(void) { return "1.10.0"; }
        static const struct Base base = { get_api, version };
        const struct Base *OrtGetApiBase(void) { return &base; }"#;
    let machine = Machine::new();
    for manifest in machine.manifests() {
        let (id, Some(runtime)) = (&manifest.provider.id, &manifest.provider.runtime) else { continue };
        let (source, version) = match id.as_str() {
            "openvino" => (openvino, "2021.4"),
            "onnxruntime" => (onnxruntime, "1.10.0"),
            other => panic!("write an old runtime for {other}"),
        };
        let dir = machine.dir.path().join(id);
        fs::create_dir(&dir).unwrap();
        compile(source, &dir.join(runtime.library_names[0].replace('*', "1")));
        refuses(machine.run_model(id).env(&runtime.env, &dir), 5, &[version, "too old", "hint: "]);
    }
}

/// Builds a plugin from C source in its own folder, and returns its manifest. `isolate` asks for a worker.
fn plugin(machine: &Machine, id: &str, source: &str, abi_major: u16, isolate: bool) -> PathBuf {
    let dir = machine.dir.path().join(id);
    fs::create_dir(&dir).unwrap();
    compile(source, &dir.join("libplugin.so"));
    let manifest: Value = json!({ "file_format_version": "1.0.0", "provider": {
        "id": id, "summary": "s", "vendor": "v", "version": "1", "build_id": "1", "isolate": isolate,
        "library": { "path": "libplugin.so", "sha256": "", "target": "", "abi_major": abi_major } } });
    let file = dir.join(Manifest::file_name(id));
    fs::write(&file, manifest.to_string()).unwrap();
    file
}

/// Plugins that this host must not call.
#[test]
fn plugins_of_another_abi() {
    // The first fields of a plugin's table: its size and its ABI version.
    let table = |major: u16, size: u32| {
        format!(
            "static const struct {{ unsigned size; unsigned short major, minor; void *rest[64]; }} table = {{ {size}, {major}, 0 }};
             const void *sdrun_plugin_query_v1(unsigned max_minor) {{ (void)max_minor; return &table; }}"
        )
    };
    let null = "void *sdrun_plugin_query_v1(unsigned max_minor) { (void)max_minor; return 0; }";
    let machine = Machine::new();
    let cases = [
        ("wrong-major", ABI_MAJOR, table(ABI_MAJOR + 1, 208), &["ABI", "hint: "][..]),
        ("short-table", ABI_MAJOR, table(ABI_MAJOR, 16), &["16 bytes", "hint: "]),
        ("needs-newer", ABI_MAJOR, null.into(), &["newer host", "hint: "]),
        ("no-plugin", ABI_MAJOR, "int x;".into(), &["sdrun_plugin_query_v1", "hint: "]),
        ("says-so", ABI_MAJOR + 1, table(ABI_MAJOR + 1, 208), &["needs ABI", "hint: "]),
    ];
    for (id, manifest_major, source, words) in cases {
        let file = plugin(&machine, id, &source, manifest_major, false);
        refuses(machine.run_model(id).arg("--provider-path").arg(&file), 5, words);
        let providers = finish(machine.sdrun(&["providers", "--explain"]).arg("--provider-path").arg(&file));
        assert!(providers.code == Some(0) && providers.stdout.contains(id), "{}", providers.stdout);
    }
}

/// A plugin that never returns is stopped at the time limit.
#[test]
fn a_plugin_that_hangs() {
    let machine = Machine::new();
    let source = "const void *sdrun_plugin_query_v1(unsigned minor) { (void)minor; volatile int on = 1; while (on) {} return 0; }";
    let file = plugin(&machine, "hangs", source, ABI_MAJOR, false);
    let mut run = machine.run_model("hangs");
    refuses(run.args(["--time-limit", "1s", "--provider-path"]).arg(&file), 9, &["hangs", "limit", "hint: "]);
}

/// Whatever ends the process of a provider, the command ends with an exit code of its own.
#[test]
fn a_plugin_that_crashes() {
    let machine = Machine::new();
    for (id, crash, signal) in [
        ("aborts", "abort()", "SIGABRT"),
        ("faults", "*(volatile int *)8 = 0", "SIGSEGV"),
        ("is-killed", "raise(SIGKILL)", "SIGKILL"),
    ] {
        let includes = "#include <signal.h>\n#include <stdlib.h>\n";
        let source = format!("{includes}__attribute__((constructor)) static void crash(void) {{ {crash}; }}");
        let file = plugin(&machine, id, &source, ABI_MAJOR, true);
        refuses(machine.run_model(id).arg("--provider-path").arg(&file), 11, &[signal, "hint: "]);
    }
}

/// A user whose home folder does not exist and cannot be made.
#[test]
fn no_home_folder() {
    let machine = Machine::new();
    let mut run = machine.run_model("ggml");
    run.env_remove("SDRUN_CACHE_DIR").env_remove("SDRUN_DATA_DIR").env("HOME", "/proc/nowhere");
    succeeds(&mut run);
    let mut list = machine.sdrun(&["cache", "list"]);
    succeeds(list.env_remove("SDRUN_CACHE_DIR").env("HOME", "/proc/nowhere"));
}

#[test]
fn an_unusable_cache() {
    let machine = Machine::new();
    // A file blocks the cache folder's path. The run works without a cache and says what is not cached.
    let file = machine.file("not-a-folder", "");
    let outcome = succeeds(machine.run_model("ggml").env("SDRUN_CACHE_DIR", &file));
    assert!(
        outcome.stderr.contains("not cached") && outcome.stderr.contains("not-a-folder"),
        "{}",
        outcome.stderr
    );
    assert_eq!(fs::read(&file).unwrap(), b"");
    // Only storing engines fails. The run works without that.
    let cache = machine.dir.path().join("cache");
    fs::create_dir_all(&cache).unwrap();
    fs::write(cache.join("engines"), "").unwrap();
    let outcome = succeeds(&mut machine.run_model("ggml"));
    assert!(outcome.stderr.contains("not cached"), "{}", outcome.stderr);
    assert!(machine.names().contains(&"y.npy".into()));
}

#[test]
fn damaged_engines() {
    for provider in PROVIDERS {
        let machine = Machine::new();
        succeeds(&mut machine.run_model(provider));
        let right = fs::read(machine.work().join("y.npy")).unwrap();
        let engines = machine.dir.path().join("cache/engines");
        let stored: Vec<PathBuf> = fs::read_dir(&engines)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == "sdengine"))
            .collect();
        assert_eq!(stored.len(), 1, "{provider}");
        // In the cache: set aside, reported, built again.
        let whole = fs::read(&stored[0]).unwrap();
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&stored[0], &flipped).unwrap();
        let outcome = succeeds(&mut machine.run_model(provider));
        assert!(outcome.stderr.contains("damaged"), "{provider}: {}", outcome.stderr);
        assert_eq!(fs::read(machine.work().join("y.npy")).unwrap(), right);
        assert_eq!(
            fs::read(&stored[0]).unwrap().len(),
            whole.len(),
            "{provider}: the engine is in the cache again"
        );
        // Named by the user: refused.
        for damaged in [&flipped[..], &whole[..whole.len() - 1], &whole[..20], b""] {
            machine.file("bad.sdengine", damaged);
            let run = ["run", "bad.sdengine", "--weights", "model.onnx", "-i", "x=x.npy", "-i", "r=r.npy"];
            refuses(&mut machine.sdrun(&run), 10, &["bad.sdengine", "hint: "]);
        }
    }
}

#[test]
fn a_full_disk() {
    let machine = Machine::new();
    let before = machine.names();
    // There is no room for the weights of a built-in model.
    refuses(&mut machine.with_little_disk(200, &["run", "mobilenet-v2", "-p", "ggml"]), 7, &["mobilenet"]);
    let models = machine.dir.path().join("cache/models");
    assert_eq!(bytes_below(&models), 0, "part of the model was left behind");
    // The engine cannot be written where the user wants it.
    let build = ["build", "model.onnx", "-p", "ggml", "-o", "out.sdengine"];
    refuses(&mut machine.with_little_disk(2, &build), 7, &["out.sdengine"]);
    // A result cannot be written.
    let arguments =
        ["run", "model.onnx", "-p", "ggml", "-i", "x=x.npy", "-i", "r=r.npy", "--output", "y=y.npy"];
    refuses(&mut machine.with_little_disk(0, &arguments), 7, &["y.npy"]);
    assert_eq!(machine.names(), before, "a half-written file was left behind");
    assert_eq!(bytes_below(&machine.dir.path().join("cache/engines")), 0);
    // A report's page cannot be written. What fits, and the measurement, are kept.
    let bench =
        ["bench", "model.onnx", "-p", "ggml", "--min-time", "0s", "--export", "json,html", "--continue"];
    std::os::unix::fs::symlink("/dev/full", machine.work().join("sdrun-bench.html")).unwrap();
    refuses(&mut machine.sdrun(&bench), 7, &["cannot write sdrun-bench.html"]);
    fs::remove_file(machine.work().join("sdrun-bench.html")).unwrap();
    let report = || fs::read(machine.work().join("sdrun-bench.json")).unwrap();
    let cases = |report: &[u8]| serde_json::from_slice::<Value>(report).unwrap()["cases"].clone();
    let first = cases(&report());
    assert_eq!(first.as_array().unwrap().len(), 1);
    succeeds(&mut machine.sdrun(&bench));
    assert_eq!(cases(&report()), first, "it was measured again");
    assert!(machine.work().join("sdrun-bench.html").is_file());
    // With free space, everything works again.
    succeeds(&mut machine.run_model("ggml"));
}

/// Bytes of all files below a folder.
fn bytes_below(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let size =
        |path: PathBuf| if path.is_dir() { bytes_below(&path) } else { fs::metadata(path).unwrap().len() };
    entries.map(|e| size(e.unwrap().path())).sum()
}

//! The invariants of docs/architecture.md that the compiler does not enforce.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const VENDORS: [&str; 5] = ["openvino", "onnxruntime", "ggml", "tensorrt", "migraphx"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Rust files below a folder.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

/// `core/`, `server/` and `cli/` know no vendor: no line of their code names one. Comments may name vendors as examples.
#[test]
fn the_core_names_no_vendor() {
    let mut files = 0;
    for dir in [
        "core/abi/src",
        "core/files/src",
        "core/graph/src",
        "core/weights/src",
        "core/sdrun/src",
        "core/diffusion/src",
        "selftest/src",
        "server/src",
        "cli/src",
    ] {
        for file in sources(&root().join(dir)) {
            files += 1;
            for (number, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
                let code = line.split("//").next().unwrap().to_lowercase();
                let named = VENDORS.iter().find(|v| code.contains(**v));
                assert_eq!(named, None, "{}:{}: {line}", file.display(), number + 1);
            }
        }
    }
    assert!(files > 50, "only {files} files were checked");
}

/// Files that others name are opened and written by `core/files`, which refuses pipes, links that lead out, and files without an end.
/// These files open others themselves; the reason is beside each.
const OWN_FILES: [(&str, &str); 27] = [
    ("bench/src/install.rs", "the list and the mark of an environment of ours"),
    ("bench/src/lib.rs", "an adapter that comes with sdrun, in a folder of ours"),
    ("cli/src/files/mod.rs", "pipes and devices that the user names as outputs"),
    ("core/diffusion/src/demo.rs", "the demo model in the cache"),
    ("core/sdrun/src/bench/baseline.rs", "outputs of a process of ours, in a folder of ours"),
    ("core/sdrun/src/bench/disturbance.rs", "/proc"),
    ("core/sdrun/src/bench/environment.rs", "/proc and /sys"),
    ("core/sdrun/src/cache.rs", "times of engines in the cache"),
    ("core/sdrun/src/memory.rs", "/proc and /sys"),
    ("core/sdrun/src/runtime/install.rs", "a new folder of ours"),
    ("core/sdrun/src/runtime/wheel.rs", "a new folder of ours"),
    ("core/sdrun/src/worker/proxy.rs", "/proc"),
    ("core/sdrun/src/owned_folder.rs", "a new folder of ours"),
    ("core/sdrun/src/windows.rs", "NUL"),
    ("core/sdrun/src/worker/serve.rs", "/dev/null"),
    ("core/sdrun/src/worker/shm.rs", "memory shared with a worker, in a folder of ours"),
    ("core/weights/src/builtin/materialise.rs", "built-in models in the cache"),
    ("providers/common/src/image.rs", "a runtime's library"),
    ("providers/ggml/src/ffi/pages.rs", "a weight file that the host has checked"),
    ("providers/migraphx/src/compile.rs", "a new folder of ours"),
    ("providers/migraphx/src/engine.rs", "a new file of ours"),
    ("providers/migraphx/src/ffi/hip.rs", "/sys"),
    ("providers/migraphx/src/runtime.rs", "a new file of ours"),
    ("providers/onnxruntime/src/provider.rs", "/proc"),
    ("providers/openvino/src", "a new folder of ours, and the provider's cache"),
    ("providers/tensorrt-rtx/src/kernels.rs", "the provider's cache"),
    ("selftest/src/anonymous.rs", "/proc"),
];

#[test]
fn files_that_others_name_are_opened_in_one_place() {
    let words = [
        "File::open(",
        "File::create",
        "File::options(",
        "OpenOptions::new(",
        "fs::read(",
        "fs::read_to_string(",
        "fs::write(",
        "fs::copy(",
        "MmapOptions",
    ];
    let mut unused: Vec<&str> = OWN_FILES.iter().map(|(file, _)| *file).collect();
    for top in ["bench/src", "bindings", "cli/src", "core", "providers", "selftest/src", "server/src"] {
        for file in sources(&root().join(top)) {
            let name = file.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/");
            let is_test =
                ["/tests/", "/tests.rs", "/testing", "/examples/", "/build/", "/build", "/manual.rs"];
            if name.starts_with("core/files/") || is_test.iter().any(|part| name.contains(part)) {
                continue;
            }
            let text = fs::read_to_string(&file).unwrap();
            // Test modules are at the end of a file.
            let code = text.split("mod tests {").next().unwrap().lines();
            let mut code = code.map(|line| line.split("//").next().unwrap());
            // Not `EngineFile::open(`.
            let opens = |line: &&str| {
                let before = |word| line.split_once(word).map(|(before, _)| before.chars().next_back());
                words.iter().filter_map(before).any(|before| !before.is_some_and(char::is_alphanumeric))
            };
            let Some(line) = code.find(opens) else { continue };
            let own = OWN_FILES.iter().find(|(own, _)| name.starts_with(own));
            let (own, _) = own.unwrap_or_else(|| panic!("{name} opens a file itself: {}", line.trim()));
            unused.retain(|file| file != own);
        }
    }
    assert_eq!(unused, [""; 0], "they open no files");
}

/// Dependencies point down only: cli → server → diffusion → sdrun, cli → {baselines → sdrun, selftest → diffusion}; fuzz → {diffusion, providers}; sdrun → {weights, graph, files, abi}; providers → {graph, abi}.
#[test]
fn dependencies_point_down() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut depends: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let own = |d: &&Value| d["kind"].is_null() && d["path"].is_string();
        let names = package["dependencies"].as_array().unwrap().iter().filter(own);
        let mut names: Vec<String> = names.map(|d| d["name"].as_str().unwrap().to_string()).collect();
        names.sort();
        depends.insert(package["name"].as_str().unwrap().to_string(), names);
    }
    let may = |package: &str, allowed: &[&str]| {
        let found = depends.get(package).unwrap_or_else(|| panic!("there is no package {package}"));
        let wrong = found.iter().find(|d| !allowed.contains(&d.as_str()));
        assert_eq!(wrong, None, "{package} must not depend on it");
    };
    may("sdrun-abi", &[]);
    may("sdrun-files", &["sdrun-abi"]);
    may("sdrun-graph", &["sdrun-abi", "sdrun-files"]);
    may("sdrun-weights", &["sdrun-abi", "sdrun-files", "sdrun-graph"]);
    may("sdrun", &["sdrun-abi", "sdrun-files", "sdrun-graph", "sdrun-weights"]);
    may("sdrun-diffusion", &["sdrun"]);
    may("sdrun-fuzz", &["sdrun", "sdrun-diffusion", "sdrun-provider-tensorrt-rtx"]);
    may("sdrun-server", &["sdrun", "sdrun-diffusion"]);
    may("sdrun-baselines", &["sdrun"]);
    may("sdrun-selftest", &["sdrun", "sdrun-diffusion"]);
    may("sdrun-cli", &["sdrun", "sdrun-baselines", "sdrun-diffusion", "sdrun-selftest", "sdrun-server"]);
    for provider in depends.keys().filter(|name| name.starts_with("sdrun-provider-")) {
        may(provider, &["sdrun-abi", "sdrun-graph", "sdrun-provider-common"]);
    }
}

/// String literals of Rust code up to its tests, each with its line number. Escapes are left undecoded.
fn literals(code: &str) -> Vec<(usize, String)> {
    let code = code.split("#[cfg(test)]").next().unwrap();
    let (mut found, mut line) = (Vec::new(), 1);
    let mut chars = code.chars().peekable();
    let mut before = ' ';
    while let Some(c) = chars.next() {
        match c {
            '\n' => line += 1,
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|c| *c != '\n').is_some() {},
            // A quote in a character literal does not start a string.
            '\'' if chars.next_if_eq(&'"').is_some() => {}
            '"' => {
                let (start, raw) = (line, before == 'r' || before == '#');
                let mut text = String::new();
                while let Some(c) = chars.next() {
                    match c {
                        '"' if !raw || before != '#' || chars.peek() == Some(&'#') => break,
                        '\\' if !raw => text.extend([Some(c), chars.next()].into_iter().flatten()),
                        _ => text.push(c),
                    }
                    line += usize::from(text.ends_with('\n'));
                }
                found.push((start, text));
            }
            _ => {}
        }
        before = c;
    }
    found
}

/// Whether a message names a flag or a command of `sdrun`. It must not, because a host is not the command line.
fn speaks_command_line(text: &str) -> bool {
    let flag = |(at, _): (usize, &str)| {
        let before = text[..at].chars().next_back();
        // A literal of one word is an argument for another program.
        text.contains(' ')
            && before.is_some_and(|c| c == ' ' || c == '`' || c == '(')
            && text[at + 2..].starts_with(|c: char| c.is_ascii_lowercase())
    };
    let commands = [
        "`sdrun ",
        "run sdrun ",
        "sdrun build",
        "sdrun run",
        "sdrun import",
        "sdrun inspect",
        "sdrun doctor",
    ];
    text.match_indices("--").any(flag) || commands.iter().any(|command| text.contains(command))
}

/// Messages and hints of the library and the providers name no flags and no commands, because hosts without a command line
/// show them to their users.
#[test]
fn messages_do_not_speak_the_command_line() {
    for (text, expected) in [
        ("add `--bake`", true),
        ("run `sdrun build` first", true),
        ("leave out --vram-budget", true),
        ("--quiet", false),
        ("a dash -- between words", false),
        ("build the engine again", false),
    ] {
        assert_eq!(speaks_command_line(text), expected, "{text}");
    }
    let code = "// \"--no\"\nlet a = '\"'; let b = \"x\\\"y\"; let c = r#\"raw \"q\" z\"#;\n\"last\"";
    let texts: Vec<(usize, String)> = literals(code);
    assert_eq!(texts.last(), Some(&(3, "last".to_string())), "{texts:?}");
    assert!(texts.contains(&(2, "x\\\"y".to_string())), "{texts:?}");
    let mut found = Vec::new();
    let mut files = 0;
    for dir in ["core", "providers"] {
        for crate_dir in fs::read_dir(root().join(dir)).unwrap() {
            let src = crate_dir.unwrap().path().join("src");
            if !src.is_dir() {
                continue;
            }
            for file in sources(&src) {
                let name = file.strip_prefix(root()).unwrap().display().to_string();
                if name.contains("/tests") {
                    continue;
                }
                files += 1;
                for (line, text) in literals(&fs::read_to_string(&file).unwrap()) {
                    if speaks_command_line(&text) {
                        found.push(format!("{name}:{line}: {text:?}"));
                    }
                }
            }
        }
    }
    assert!(files > 200, "only {files} files were looked at");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Whoever adds a package says what it is for.
#[test]
fn docs_name_every_dependency() {
    let record = fs::read_to_string(root().join("docs/dependencies.md")).unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let named = metadata["packages"].as_array().unwrap().iter().flat_map(|p| p["dependencies"].as_array());
    let foreign = named.flatten().filter(|dependency| dependency["path"].is_null());
    let names: BTreeSet<&str> = foreign.map(|dependency| dependency["name"].as_str().unwrap()).collect();
    assert!(names.len() > 50, "{names:?}");
    let rows = record.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    let listed: BTreeSet<&str> =
        rows.flat_map(|row| row.split(", ").map(|name| name.trim_matches('`'))).collect();
    assert_eq!(listed, names, "docs/dependencies.md and the manifests differ");
}

/// Each guarantee names tests, and they exist.
#[test]
fn guarantees_have_tests() {
    let page = fs::read_to_string(root().join("docs/security.md")).unwrap();
    let (_, section) = page.split_once("## Guarantees").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let code: String = ["core", "server", "cli", "tests", "fuzz", "providers"]
        .iter()
        .flat_map(|folder| sources(&root().join(folder)))
        .map(|file| fs::read_to_string(file).unwrap())
        .collect();
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 15, "{} guarantees", rows.len());
    for row in rows {
        let tests: Vec<&str> = row.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).collect();
        assert!(!tests.is_empty(), "no test: {row}");
        for test in tests {
            assert!(code.contains(&format!("fn {test}()")), "there is no test `{test}`");
        }
    }
}

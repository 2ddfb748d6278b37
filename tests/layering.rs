//! The invariants of docs/architecture.md that a compiler does not enforce.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::{
    collections::BTreeMap,
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

/// `core/` and `cli/` know no vendor: no line of their code names one. Comments may, as examples.
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

/// Dependencies point down only: cli → sdrun → {weights, graph, files, abi}; providers → {graph, abi}.
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
    may("sdrun-diffusion", &[]);
    may("sdrun-cli", &["sdrun"]);
    for provider in depends.keys().filter(|name| name.starts_with("sdrun-provider-")) {
        may(provider, &["sdrun-abi", "sdrun-graph", "sdrun-provider-common"]);
    }
}

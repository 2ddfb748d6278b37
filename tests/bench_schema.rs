//! Validates `sdrun bench --json` against docs/bench-schema.json with Python's `jsonschema`.

#![allow(clippy::unwrap_used)]

use sdrun_tests::{place::Place, spec::small_model};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The validator's complaint; `None` for a valid document.
fn complaint(dir: &Path, document: &Value) -> Option<String> {
    let python = std::env::var_os("SDRUN_PYTHON")
        .expect("SDRUN_PYTHON names a Python with `jsonschema`; `cargo xtask test` sets it");
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/bench-schema.json");
    let file = dir.join("document.json");
    fs::write(&file, document.to_string()).unwrap();
    let script = "import json, sys, jsonschema\n\
        schema, document = (json.load(open(path)) for path in sys.argv[1:])\n\
        validator = jsonschema.Draft202012Validator\n\
        validator.check_schema(schema)\n\
        error = jsonschema.exceptions.best_match(validator(schema).iter_errors(document))\n\
        print(f'{error.json_path}: {error.message}' if error else 'valid')";
    let output = Command::new(python).args(["-c", script]).arg(schema).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap().trim().to_string();
    (text != "valid").then_some(text)
}

fn bench(dir: &Path, arguments: &[&str], environment: &[(&str, &Path)]) -> Value {
    let place = |place: Place| -> PathBuf { place.find().unwrap_or_else(|why| panic!("{why}")) };
    let model = dir.join("model.onnx");
    fs::write(&model, small_model()).unwrap();
    let output = Command::new(place(Place::Dist).join("sdrun"))
        .arg("bench")
        .arg(&model)
        .args(["--min-runs", "3", "--min-time", "0s", "--no-save", "--json"])
        .args(arguments)
        .env("SDRUN_DATA_DIR", place(Place::Data))
        .env("SDRUN_CACHE_DIR", dir.join("cache"))
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn reports_match_the_schema() {
    let dir = tempfile::tempdir().unwrap();
    let all = ["--all-providers", "--precision", "fp32", "--precision", "low"];
    let report = bench(dir.path(), &all, &[]);
    assert_eq!(complaint(dir.path(), &report), None);
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    let rows = cases[0]["rows"].as_array().unwrap();
    for id in ["ggml", "onnxruntime", "openvino"] {
        let row = rows.iter().find(|row| row["system"] == id).unwrap_or_else(|| panic!("no row for {id}"));
        assert_eq!(row["status"], "ok", "{row}");
        assert!(row["stats"]["runs"].as_u64().unwrap() >= 3 && row["accuracy"]["accepted"] == true, "{row}");
    }

    // A provider without its runtime has a row too.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let report = bench(dir.path(), &[], &[("SDRUN_OPENVINO_DIR", &empty)]);
    assert_eq!(complaint(dir.path(), &report), None);
    let rows = report["cases"][0]["rows"].as_array().unwrap();
    let absent = rows.iter().find(|row| row["system"] == "openvino").unwrap();
    assert_eq!(absent["status"], "absent", "{absent}");

    // The validator detects errors.
    let mut wrong = report.clone();
    wrong["cases"][0]["rows"][0]["status"] = json!("fine");
    assert!(complaint(dir.path(), &wrong).unwrap().contains("status"));
    let mut wrong = report;
    wrong.as_object_mut().unwrap().remove("schema_version");
    assert!(complaint(dir.path(), &wrong).unwrap().contains("schema_version"));
}

//! Reports of `sdrun bench`: the JSON against docs/bench-schema.json with Python's `jsonschema`, the page in a browser, comparisons.

#![allow(clippy::unwrap_used)]

use sdrun::{
    abi::{Error, NoHost, Precision},
    bench::{Baseline, BenchOptions, CaseReport, Kind, PrecisionChoice, Status},
};
use sdrun_diffusion::{
    bench::pictures,
    demo,
    pipeline::{Files, Parts, Request},
};
use sdrun_tests::{
    lab::{Lab, folder},
    place::Place,
    spec::small_model,
};
use serde_json::{Value, json};
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
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

fn sdrun(dir: &Path, arguments: &[&str]) -> Output {
    let place = |place: Place| -> PathBuf { place.find().unwrap_or_else(|why| panic!("{why}")) };
    Command::new(place(Place::Dist).join("sdrun"))
        .args(arguments)
        .current_dir(dir)
        .env("SDRUN_DATA_DIR", place(Place::Data))
        .env("SDRUN_CACHE_DIR", dir.join("cache"))
        .output()
        .unwrap()
}

/// One benchmark with every format.
fn exported(dir: &Path) {
    fs::write(dir.join("<b>model.onnx"), small_model()).unwrap();
    let measure = ["bench", "<b>model.onnx", "--min-runs", "3", "--min-time", "0s", "--no-save"];
    let output =
        sdrun(dir, &[&measure[..], &["--export", "html,json,csv,md", "--export-to", "report"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn reports_are_exported_and_compared() {
    let dir = tempfile::tempdir().unwrap();
    exported(dir.path());
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let report: Value = serde_json::from_str(&read("report.json")).unwrap();
    assert_eq!(complaint(dir.path(), &report), None);
    let rows = report["cases"][0]["rows"].as_array().unwrap();
    assert_eq!(read("report.csv").lines().count(), 1 + rows.len());
    assert_eq!(read("report.md").lines().filter(|line| line.starts_with('|')).count(), 2 + rows.len());
    let page = read("report.html");
    let (_, document) = page.split_once("id=\"report\">").unwrap();
    let (document, _) = document.split_once("</script>").unwrap();
    assert_eq!(serde_json::from_str::<Value>(document).unwrap(), report);

    let write = |name: &str, report: &Value| fs::write(dir.path().join(name), report.to_string()).unwrap();
    let compare = |before: &str, after: &str| {
        let output = sdrun(dir.path(), &["bench", "compare", before, after, "--fail-if-slower", "5%"]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, text) = compare("report.json", "report.json");
    assert!(code == Some(0) && text.contains("same") && !text.contains("slower"), "{text}");
    let mut slow = report.clone();
    for row in slow["cases"][0]["rows"].as_array_mut().unwrap() {
        if let Some(median) = row["stats"]["median_ms"].as_f64() {
            row["stats"]["median_ms"] = json!(median * 100.0);
        }
    }
    slow["sdrun_version"] = json!("9.9.9");
    write("slow.json", &slow);
    let (code, text) = compare("report.json", "slow.json");
    assert!(code == Some(1) && text.contains("slower") && text.contains("9.9.9"), "{text}");
    let (code, text) = compare("slow.json", "report.json");
    assert!(code == Some(0) && text.contains("faster"), "{text}");
    for (content, words) in
        [("{", "is not JSON"), ("{}", "is not a report"), ("{\"schema_version\": 1}", "schema version 1")]
    {
        fs::write(dir.path().join("bad.json"), content).unwrap();
        let (code, text) = compare("report.json", "bad.json");
        assert!(code == Some(4) && text.contains(words), "{code:?} {text}");
    }
    let (code, text) = compare("report.json", "none.json");
    assert_eq!(code, Some(3), "{text}");
    // Nothing is measured if the files cannot be written.
    let output =
        sdrun(dir.path(), &["bench", "<b>model.onnx", "--export", "json", "--export-to", "no/such/folder"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

/// Whole pictures: every provider draws the same, and nothing is kept for the choice of providers for networks.
#[test]
fn whole_pictures_are_measured() {
    let dir = tempfile::tempdir().unwrap();
    // Where tests have an interpreter among their devices, it would draw for hours.
    let providers = ["-p", "ggml", "-p", "onnxruntime", "-p", "openvino"];
    let measure =
        ["bench", "--suite", "pipeline", "--min-runs", "3", "--min-time", "0s", "--precision", "fp32"];
    let measure = [&measure[..], &providers].concat();
    let output = sdrun(dir.path(), &[&measure[..], &["--json", "--no-save"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(complaint(dir.path(), &report), None);
    let case = &report["cases"][0];
    assert!(case["model"].as_str().unwrap().contains("a picture of 64x64"), "{case}");
    assert_eq!((&case["reference"], &case["steps"]), (&json!("onnxruntime"), &json!(20)));
    let rows = case["rows"].as_array().unwrap();
    for id in ["ggml", "onnxruntime", "openvino"] {
        let row = rows.iter().find(|row| row["system"] == id).unwrap();
        assert!(row["status"] == "ok" && row["stats"]["runs"].as_u64().unwrap() >= 3, "{row}");
        assert!(row["settings"][0].as_str().unwrap().contains("thread"), "{row}");
    }
    for (arguments, words) in [
        (&["--baseline", "pytorch"][..], "runs networks, not whole pictures"),
        (&["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (&["--shape", "sample=1,4,8,8"], "size of the model's family"),
    ] {
        let output = sdrun(dir.path(), &[&measure[..], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{arguments:?}: {said}");
    }
}

/// Stands in for stable-diffusion.cpp: answers every request with a black picture and saves the request to a file.
const PAINTER: &str = r#"
import json, os, struct, sys
for line in sys.stdin:
    request = json.loads(line)
    if "open" in request:
        asked = request["open"]
        with open(os.environ["ASKED"], "w") as file:
            json.dump(asked, file)
        answer = {"opened": {"system": "Painter", "version": "1", "precision": "fp32", "load_seconds": 0.5}}
    elif "run" in request:
        answer = {"seconds": [0.004] * request["run"]}
    else:
        shape = [asked["picture"]["height"], asked["picture"]["width"], 3]
        size = 4 * shape[0] * shape[1] * shape[2]
        header = json.dumps({"picture": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
        with open(request["outputs"], "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + bytes(size))
        answer = {"saved": True}
    print(json.dumps(answer), flush=True)
"#;

/// Other software gets the picture's settings, and its picture is compared with ours.
#[test]
fn other_software_draws_whole_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let painter = dir.path().join("painter.py");
    fs::write(&painter, PAINTER).unwrap();
    let asked = dir.path().join("asked.json");
    let python = folder("SDRUN_PYTHON");
    let env = format!("ASKED={}", asked.display());
    let command = ["env".as_ref(), env.as_ref(), python.as_os_str(), painter.as_os_str()];
    let baseline = |name: &str, command| Baseline { name: name.into(), command };
    let lab = Lab::default();
    let model = demo::find(demo::NAME, &lab.paths).unwrap().unwrap();
    let parts = Parts::open(&Files { model: Some(model.clone()), ..Files::default() }, &lab.paths, &NoHost);
    let parts = parts.unwrap();
    let request =
        Request { prompt: "three green stars".into(), steps: Some(2), seed: 7, ..Request::default() };
    let request = request.resolve(&parts).unwrap();
    let options = BenchOptions {
        providers: vec!["ggml".into()],
        baselines: vec![
            baseline("painter", Ok(command.map(OsString::from).to_vec())),
            baseline("away", Err(Error::precondition("is not installed"))),
        ],
        min_runs: 3,
        min_time: Duration::ZERO,
        ..BenchOptions::default()
    };
    let draw = |checkpoint| {
        let fp32 = PrecisionChoice::Fixed(Precision::Fp32);
        pictures(&lab.registry, "stars", &parts, checkpoint, &request, fp32, &options, &NoHost, &mut |_| {})
            .unwrap()
    };
    let row =
        |case: &CaseReport, system: &str| case.rows.iter().find(|row| row.system == system).unwrap().clone();
    let case = draw(Ok(&model));
    assert_eq!(row(&case, "ggml").status, Status::Ok);
    let black = row(&case, "painter");
    assert_eq!((black.kind, black.status), (Kind::Baseline, Status::Inaccurate), "{black:?}");
    assert_eq!(black.load_seconds, Some(0.5));
    assert_eq!(row(&case, "away").status, Status::Absent);
    let asked: Value = serde_json::from_slice(&fs::read(&asked).unwrap()).unwrap();
    let picture = &asked["picture"];
    assert_eq!(asked["model"], json!(model), "{asked}");
    assert_eq!((&picture["prompt"], &picture["seed"]), (&json!("three green stars"), &json!(7)));
    assert_eq!((&picture["width"], &picture["sampler"]), (&json!(64), &json!("dpmpp_2m")));
    let sigmas = picture["sigmas"].as_array().unwrap();
    assert!(sigmas.len() == 3 && sigmas[0].as_f64().unwrap() > 10.0 && sigmas[2] == json!(0.0), "{picture}");

    let refused = row(&draw(Err("it knows no shapes")), "painter");
    assert_eq!(refused.reason.as_deref(), Some("painter: it knows no shapes"));
}

/// What a reader of the page sees, in both themes, at two widths and in print.
#[test]
#[ignore = "needs SDRUN_SERVE_PYTHON and a browser; run by `cargo xtask test`"]
fn the_page_works_in_a_browser() {
    let dir = tempfile::tempdir().unwrap();
    exported(dir.path());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/page.py");
    let mut python = Command::new(std::env::var_os("SDRUN_SERVE_PYTHON").unwrap());
    let status =
        python.arg(script).args(["report.html", "report.json"]).current_dir(dir.path()).status().unwrap();
    assert!(status.success(), "{status}");
}

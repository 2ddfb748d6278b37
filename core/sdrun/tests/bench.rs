//! Benchmarks in which systems misbehave, and how measurements decide which provider is chosen.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "../../../tests/mock/c_plugins.rs"]
mod c_plugins;
mod lab;
#[path = "worker/support.rs"]
mod support;

use lab::{Lab, sum};
use sdrun::{
    BuildOptions, Measurements, Wishes,
    abi::{Device, Error as AbiError, ErrorCode, Flow, Host, LogLevel, NoHost, Precision},
    bench::{self, Baseline, BenchOptions, Case, Event, Kind, PrecisionChoice, Report, Row, Status},
};
use serde_json::json;
use std::{
    fs,
    path::Path,
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// A provider in C that computes correctly, which the mock does not.
static C: LazyLock<(tempfile::TempDir, std::path::PathBuf)> = LazyLock::new(c_plugins::installed);

fn lab() -> Lab {
    Lab::with(json!({}), std::slice::from_ref(&C.1), &[])
}

fn options() -> BenchOptions {
    BenchOptions {
        providers: vec!["c".into()],
        min_runs: 3,
        min_time: Duration::ZERO,
        max_time: Duration::from_secs(1),
        time_limit: Duration::from_secs(2),
        ..BenchOptions::default()
    }
}

/// A baseline that is a shell script. `$1` is a folder with `y.safetensors`, the right outputs.
fn script(folder: &Path, name: &str, text: &str) -> Baseline {
    let command = ["sh", "-c", text, "sh"].iter().map(Into::into).chain([folder.into()]).collect();
    Baseline { name: name.into(), command: Ok(command) }
}

const OPENED: &str = r#"read line; echo '{"opened": {"system": "Peer", "version": "1.2", "precision": "fp32",
    "settings": "1 thread, fast", "build_seconds": 0.5, "load_seconds": 0.25}}' | tr -d '\n'; echo;"#;
/// Answers runs with times of 4 ms, and copies the outputs.
const ANSWERS: &str = r#"while read line; do case "$line" in
    *outputs*) cp "$1/y.safetensors" "$(echo "$line" | cut -d'"' -f4)"; echo '{"saved":true}' ;;
    *) n=$(echo "$line" | tr -dc 0-9); s=0.004; while [ "$n" -gt 1 ]; do s="$s,0.004"; n=$((n-1)); done; echo "{\"seconds\":[$s]}" ;;
    esac; done"#;

/// `y = x + a + b` for the benchmark's inputs, as a baseline writes it.
fn write_outputs(lab: &Lab, folder: &Path) {
    let model = lab.model("m.onnx", &sum());
    let inputs = sdrun::inputs::seeded(&model, &model.bound(&Default::default()).unwrap(), 0).unwrap();
    let x = inputs["x"].to_f64().unwrap();
    let values: Vec<u8> =
        x.iter().zip([4.0, 6.0]).flat_map(|(x, ab)| ((x + ab) as f32).to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2], &values).unwrap();
    safetensors::serialize_to_file([("y", view)], None, &folder.join("y.safetensors")).unwrap();
}

fn measure(lab: &Lab, options: &BenchOptions, host: &dyn Host) -> sdrun::Result<Report> {
    let model = lab.model("m.onnx", &sum());
    let fp32 = PrecisionChoice::Fixed(Precision::Fp32);
    let case = Case { model: &model, shapes: Default::default(), precision: fp32, weights: None };
    bench::run(&lab.registry, &[case], options, host, &mut |_| {})
}

fn row<'r>(report: &'r Report, system: &str) -> &'r Row {
    report.cases[0].rows.iter().find(|row| row.system == system).unwrap()
}

#[test]
fn other_software_runs_in_turns_with_providers() {
    let lab = lab();
    let folder = tempfile::tempdir().unwrap();
    write_outputs(&lab, folder.path());
    let peer = script(folder.path(), "peer", &format!("{OPENED} {ANSWERS}"));
    let away = Baseline { name: "away".into(), command: Err(AbiError::precondition("is not installed")) };
    let report = measure(&lab, &BenchOptions { baselines: vec![peer, away], ..options() }, &NoHost).unwrap();
    let (own, peer) = (row(&report, "c"), row(&report, "peer"));
    assert_eq!((own.kind, peer.kind), (Kind::Provider, Kind::Baseline));
    // Nobody here is the reference, so that nothing is ranked.
    assert_eq!((own.status, peer.status), (Status::Unverified, Status::Unverified));
    let runtime = peer.runtime.as_ref().unwrap();
    assert_eq!((&*runtime.name, &*runtime.version, peer.precision.as_deref()), ("Peer", "1.2", Some("fp32")));
    assert_eq!((peer.settings.join(";"), peer.build_seconds), ("1 thread;fast".into(), Some(0.5)));
    let times = |row: &Row| row.turns.iter().map(|turn| turn.times_ms.len()).sum::<usize>();
    assert!(times(own) >= 3 && times(peer) >= 3);
    assert!(peer.turns.iter().flat_map(|turn| &turn.times_ms).all(|ms| (ms - 4.0).abs() < 1e-9));
    let rounds = |row: &Row| row.turns.iter().map(|turn| turn.round).collect::<Vec<_>>();
    assert_eq!(rounds(own), rounds(peer));
    let away = row(&report, "away");
    assert_eq!((away.status, away.reason.as_deref()), (Status::Absent, Some("away: is not installed")));
}

/// The operating system kills a process when memory runs out. The benchmark then ends the others and starts it once more.
#[test]
fn a_killed_system_starts_again_alone() {
    let lab = lab();
    let folder = tempfile::tempdir().unwrap();
    write_outputs(&lab, folder.path());
    let die_once = r#"if [ ! -e "$1/died" ]; then touch "$1/died"; kill -9 $$; fi;"#;
    let peer = script(folder.path(), "peer", &format!("{die_once} {OPENED} {ANSWERS}"));
    let dies = script(folder.path(), "dies", "kill -9 $$");
    let report = measure(&lab, &BenchOptions { baselines: vec![peer, dies], ..options() }, &NoHost).unwrap();
    let heats = |row: &Row| row.turns.iter().map(|turn| turn.heat).collect::<std::collections::BTreeSet<_>>();
    let (own, peer, dies) = (row(&report, "c"), row(&report, "peer"), row(&report, "dies"));
    assert_eq!((own.status, peer.status), (Status::Unverified, Status::Unverified));
    assert_eq!((heats(own), heats(peer)), ([0].into(), [1].into()));
    assert_eq!(dies.status, Status::Failed);
    assert!(dies.reason.as_ref().unwrap().contains("SIGKILL"), "{:?}", dies.reason);
}

#[test]
fn a_baseline_that_misbehaves_is_a_row() {
    let lab = lab();
    let folder = tempfile::tempdir().unwrap();
    write_outputs(&lab, folder.path());
    let cases = [
        (
            "refuses",
            r#"read line; echo '{"error": "no operator Add"}'; read line"#,
            Status::Unsupported,
            "no operator Add",
        ),
        (
            "crashes",
            "read line; echo 'Segmentation fault' >&2; kill -9 $$",
            Status::Failed,
            "Segmentation fault",
        ),
        ("rubbish", "read line; echo hello; read line", Status::Failed, "it answered with \"hello\""),
        ("silent", "read line", Status::Failed, "its process died"),
        ("hangs", "read line; exec sleep 1000", Status::TimedOut, "longer than the limit"),
        ("endless", "read line; exec cat /dev/zero", Status::Failed, "it answered with"),
        (
            "negative",
            &format!(
                "{OPENED} read line; cp \"$1/y.safetensors\" \"$(echo \"$line\" | cut -d'\"' -f4)\"; \
            echo '{{\"saved\":true}}'; read line; echo '{{\"seconds\":[-1]}}'; read line"
            ),
            Status::Failed,
            "[-1.0]",
        ),
        (
            "no outputs",
            &format!("{OPENED} read line; echo '{{\"saved\":true}}'; read line"),
            Status::Failed,
            "no outputs",
        ),
    ];
    let baselines = cases.iter().map(|(name, text, ..)| script(folder.path(), name, text)).collect();
    let started = Instant::now();
    let report = measure(&lab, &BenchOptions { baselines, ..options() }, &NoHost).unwrap();
    assert!(started.elapsed() < Duration::from_secs(60), "a hang ends at the time limit");
    for (name, _, status, words) in &cases {
        let row = row(&report, name);
        let reason = row.reason.as_deref().unwrap_or_default();
        assert!(row.status == *status && reason.contains(words), "{name}: {:?} {reason}", row.status);
        assert!(!reason.contains('\n') && reason.len() < 1000, "{reason}");
    }
    assert!(row(&report, "c").stats.is_some(), "the others go on");
}

/// Cancels at the n-th question.
struct Impatient(AtomicUsize);

impl Host for Impatient {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Continue
    }
    fn cancelled(&self) -> bool {
        self.0.fetch_sub(1, SeqCst) == 1 || self.0.load(SeqCst) > usize::MAX / 2
    }
}

#[test]
fn a_waiting_baseline_is_cancelled() {
    let lab = lab();
    let folder = tempfile::tempdir().unwrap();
    let hangs = script(folder.path(), "hangs", "read line; exec sleep 1000");
    let options = BenchOptions {
        baselines: vec![hangs],
        time_limit: Duration::from_secs(600),
        providers: vec!["mock".into()],
        ..options()
    };
    let started = Instant::now();
    let error = measure(&lab, &options, &Impatient(AtomicUsize::new(40))).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Cancelled, "{error}");
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Each finished case is reported at once, so a program can keep it even if a later case fails or the user cancels.
#[test]
fn finished_cases_are_told_at_once() {
    let lab = lab();
    let model = lab.model("m.onnx", &sum());
    let fp32 = PrecisionChoice::Fixed(Precision::Fp32);
    let shapes = [Default::default(), [("x".to_string(), vec![7])].into()];
    let cases = shapes.map(|shapes| Case { model: &model, shapes, precision: fp32, weights: None });
    let mut finished = 0;
    let mut hear = |event: Event<'_>| finished += usize::from(matches!(event, Event::Done(_)));
    let error = bench::run(&lab.registry, &cases, &options(), &NoHost, &mut hear).unwrap_err();
    assert_eq!((error.code(), finished), (ErrorCode::InvalidArgument, 1), "{error}");
}

/// A benchmark can go on where an earlier one ended. A case with other inputs or systems is another case.
#[test]
fn cases_of_an_earlier_report_are_not_measured_again() {
    let lab = lab();
    let mut first = measure(&lab, &options(), &NoHost).unwrap();
    first.cases[0].rows[0].warnings.push("measured before".into());
    let again = |options: BenchOptions| -> Vec<String> {
        let report =
            measure(&lab, &BenchOptions { earlier: first.cases.clone(), ..options }, &NoHost).unwrap();
        report.cases[0].rows.iter().flat_map(|row| row.warnings.clone()).collect()
    };
    let measured_before = "measured before".to_string();
    assert!(again(options()).contains(&measured_before));
    assert!(!again(BenchOptions { seed: 1, ..options() }).contains(&measured_before));
    let providers = vec!["mock".into(), "c".into()];
    assert!(!again(BenchOptions { providers, ..options() }).contains(&measured_before));
}

#[test]
fn the_choice_rests_on_what_was_measured() {
    let lab = lab();
    let model = lab.model("m.onnx", &sum());
    let mut report =
        measure(&lab, &BenchOptions { providers: vec!["mock".into(), "c".into()], ..options() }, &NoHost)
            .unwrap();
    let order = || -> Vec<String> {
        let fp32 = |device: Device| BuildOptions::new(device);
        let choice = lab.registry.choose(&model, &Wishes::new(), &fp32, &NoHost);
        choice.map(|candidate| format!("{}: {}", candidate.provider.id(), candidate.why)).collect()
    };
    let paths = lab.registry.paths();
    assert_eq!(Measurements::add(paths, &report).unwrap(), 0, "nothing unverified counts");
    let prior = order();
    assert!(prior[0].starts_with("mock: priority") && prior[1].starts_with("c: priority"), "{prior:?}");
    let set = |report: &mut Report, mock: f64, c: f64| {
        for row in &mut report.cases[0].rows {
            row.status = Status::Ok;
            row.stats.as_mut().unwrap().median_ms = if row.system == "c" { c } else { mock };
        }
    };
    set(&mut report, 2.0, 1.0);
    assert_eq!(Measurements::add(paths, &report).unwrap(), 2);
    assert_eq!(order(), ["c: measured here: 1.000 ms", "mock: measured here: 2.000 ms"]);
    set(&mut report, 0.5, 1.0);
    Measurements::add(paths, &report).unwrap();
    assert_eq!(order(), ["mock: measured here: 0.500 ms", "c: measured here: 1.000 ms"]);
    let text = fs::read_to_string(Measurements::file(paths)).unwrap();
    assert_eq!(text.matches("median_ms").count(), 2, "newer ones replace older ones");

    // Other sizes of the model tell, too; those of these sizes count more.
    set(&mut report, 2.0, 1.0);
    report.cases[0].topology = "of another size".into();
    fs::remove_file(Measurements::file(paths)).unwrap();
    Measurements::add(paths, &report).unwrap();
    assert_eq!(order()[0], "c: measured here at another size: 1.000 ms");

    // A file that is no measurements is not overwritten.
    fs::write(Measurements::file(paths), "my notes").unwrap();
    assert_eq!(Measurements::add(paths, &report).unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(fs::read_to_string(Measurements::file(paths)).unwrap(), "my notes");
}

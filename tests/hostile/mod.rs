//! Valid models of a few hundred bytes that once kept sdrun busy for hours, aborted it or crashed a runtime in its process.

use super::{Machine, PROVIDERS, finish, succeeds};
use sdrun::{
    Tensors,
    abi::{DType, Precision},
    graph::proto::{EXTERNAL, GraphProto, StringStringEntryProto, TensorProto},
    numpy::npz,
    verify::{Tolerance, compare},
};
use sdrun_tests::onnx;
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// The files of a folder beside this one, with this ending.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("hostile").join(folder);
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == ending)).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files
}

/// Constants that would take minutes to hours to fold: convolutions, products, windows of a million elements.
#[test]
fn work_on_constants_is_limited() {
    let machine = Machine::new();
    for file in files("busy", "onnx") {
        let file = file.to_str().unwrap();
        succeeds(&mut machine.sdrun(&["inspect", file]));
        succeeds(&mut machine.sdrun(&["build", file, "-p", "ggml", "-o", "busy.sdengine"]));
    }
}

/// The constants of these models would take hours to compute when they run.
#[test]
fn a_time_limit_ends_what_a_model_asks_for() {
    let machine = Machine::new();
    for file in
        files("busy", "onnx").iter().filter(|file| file.ends_with("conv.onnx") || file.ends_with("lrn.onnx"))
    {
        for provider in PROVIDERS {
            let mut run = machine.sdrun(&["run", file.to_str().unwrap(), "-p", provider, "--seed", "1"]);
            let outcome = finish(run.args(["--no-cache", "--time-limit", "1s"]));
            let told = format!("{file:?} on {provider}: {}", outcome.stderr);
            // On processors without AVX-512, OpenVINO would need 70 TB for the convolution.
            let lacks_memory = provider == "openvino" && outcome.code == Some(7);
            assert!(lacks_memory || matches!(outcome.code, Some(6 | 9)), "{told}");
        }
    }
}

/// A file without content that claims 256 GB of indices, and a range of 10^44 elements.
#[test]
fn constants_without_end_are_refused() {
    let machine = Machine::new();
    let entry =
        |key: &str, value: &str| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
    let indices = TensorProto {
        name: Some("indices".into()),
        data_type: Some(DType::I64 as i32),
        dims: vec![1 << 35],
        data_location: Some(EXTERNAL),
        external_data: vec![entry("location", "indices.bin")],
        ..Default::default()
    };
    let graph = GraphProto {
        node: vec![
            onnx::node("Gather", &["indices", "zero"], "taken", vec![]),
            onnx::node("Cast", &["taken"], "cast", vec![onnx::int("to", DType::F32 as i64)]),
            onnx::node("Add", &["x", "cast"], "y", vec![]),
        ],
        input: vec![onnx::typed("x", DType::F32, &[1])],
        output: vec![onnx::typed("y", DType::F32, &[1])],
        initializer: vec![indices, onnx::stored("zero", DType::I64, &[1], vec![0; 8])],
        ..Default::default()
    };
    let model = machine.file("indices.onnx", onnx::encoded(graph, 17));
    std::fs::File::create(model.with_file_name("indices.bin")).unwrap().set_len(1 << 38).unwrap();
    let said = finish(&mut machine.sdrun(&["inspect", "indices.onnx"]));
    assert_eq!(said.code, Some(4), "{}", said.stderr);
    assert!(said.stderr.contains("\"indices\""), "{}", said.stderr);
    let graph = GraphProto {
        node: vec![
            onnx::node("Range", &["start", "limit", "delta"], "range", vec![]),
            onnx::node("ReduceSum", &["range"], "sum", vec![onnx::int("keepdims", 0)]),
            onnx::node("Add", &["x", "sum"], "y", vec![]),
        ],
        input: vec![onnx::typed("x", DType::F32, &[1])],
        output: vec![onnx::typed("y", DType::F32, &[1])],
        initializer: vec![
            onnx::floats("start", &[], &[0.0]),
            onnx::floats("limit", &[], &[1.0]),
            onnx::floats("delta", &[], &[1e-44]),
        ],
        ..Default::default()
    };
    let file = machine.file("range.onnx", onnx::encoded(graph, 17));
    PROVIDERS.iter().for_each(|provider| fails(&file, provider, &[4]));
}

/// The name of a value.
fn value(number: usize) -> String {
    format!("v{number}")
}

/// Writes `chain.onnx`, a chain of nodes.
fn chain(machine: &Machine, nodes: usize) {
    let of_nodes = |at| onnx::node("Neg", &[&value(at)], &value(at + 1), vec![]);
    let graph = GraphProto {
        node: (0..nodes).map(of_nodes).collect(),
        input: vec![onnx::typed("v0", DType::F32, &[2, 3])],
        output: vec![onnx::typed(&value(nodes), DType::F32, &[2, 3])],
        ..Default::default()
    };
    machine.file("chain.onnx", onnx::encoded(graph, 17));
}

/// So many nodes that a square of their number would take hours: a chain, and nodes whose results all stay.
#[test]
fn graphs_of_many_nodes_are_read() {
    const NODES: usize = 150_000;
    let machine = Machine::new();
    chain(&machine, NODES);
    succeeds(&mut machine.sdrun(&["inspect", "chain.onnx"]));
    let graph = GraphProto {
        node: (1..=NODES / 2).map(|at| onnx::node("Neg", &["v0"], &value(at), vec![])).collect(),
        input: vec![onnx::typed("v0", DType::F32, &[2, 3])],
        output: (1..=NODES / 2).map(|at| onnx::typed(&value(at), DType::F32, &[2, 3])).collect(),
        ..Default::default()
    };
    machine.file("fan.onnx", onnx::encoded(graph, 17));
    succeeds(&mut machine.sdrun(&["inspect", "fan.onnx"]));
    // More than sdrun could read in a few seconds.
    chain(&machine, 2_000_000);
    let said = finish(&mut machine.sdrun(&["inspect", "chain.onnx"]));
    assert_eq!(said.code, Some(6), "{}", said.stderr);
    assert!(said.stderr.contains("more than 192 MB"), "{}", said.stderr);
}

/// Half a second later, a command has ended, whatever it was doing.
#[test]
fn ctrl_c_ends_what_a_command_itself_computes() {
    let machine = Machine::new();
    chain(&machine, 300_000);
    let mut command = machine.sdrun(&["inspect", "chain.onnx"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let at = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(at.elapsed() < Duration::from_secs(3), "{:?}", at.elapsed());
}

/// A time limit also covers what a command does itself: reading a graph of 300,000 nodes, and waiting for another command.
#[test]
fn a_time_limit_ends_what_a_command_itself_does() {
    let machine = Machine::new();
    let expires = |arguments: &[&str], limit: &str, why: &str| {
        let json = ["-p", "ggml", "--seed", "1", "--json", "--time-limit", limit];
        let outcome = finish(machine.sdrun(arguments).args(json));
        assert_eq!(outcome.code, Some(9), "{arguments:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(why), "{arguments:?}: {}", outcome.stderr);
    };
    chain(&machine, 300_000);
    expires(&["run", "chain.onnx"], "50ms", "opening chain.onnx took longer than the limit of 50ms");
    let run = ["run", "model.onnx"];
    succeeds(machine.sdrun(&run).args(["-p", "ggml", "--seed", "1"]));
    let engines = machine.dir.path().join("cache/engines");
    let engine = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        path.extension().is_some_and(|ending| ending == "sdengine").then_some(path)
    };
    let engine = engines.read_dir().unwrap().find_map(engine).unwrap();
    let lock = std::fs::File::create(engine.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    std::fs::remove_file(engine).unwrap();
    expires(
        &run,
        "5s",
        "waiting for another process that builds this engine took longer than the limit of 5s",
    );
}

/// Inputs and outputs of 70 terabytes. A runtime may write to the log about it.
#[test]
fn tensors_without_memory_are_an_error() {
    for file in files("huge", "onnx") {
        PROVIDERS.iter().for_each(|provider| fails(&file, provider, &[6, 7]));
    }
}

/// Padding of billions of elements.
#[test]
fn padding_without_end_is_refused() {
    files("padded", "onnx").iter().for_each(|file| fails(file, "ggml", &[4, 6, 7]));
}

/// Names that move the cursor, turn the direction of writing, and go on with a line of their own.
#[test]
fn names_stay_within_their_line() {
    let machine = Machine::new();
    for file in files("names", "onnx") {
        let file = file.to_str().unwrap();
        let run = ["run", file, "-p", "ggml", "--seed", "1", "--no-cache"];
        let bench = ["bench", file, "-p", "ggml", "--max-time", "1s", "--no-save", "--export", "csv,md"];
        for arguments in [&["inspect", file][..], &run, &bench] {
            let outcome = succeeds(&mut machine.sdrun(arguments));
            let reports =
                [".csv", ".md"].map(|ending| machine.work().join("sdrun-bench".to_owned() + ending));
            let reports = reports.iter().filter_map(|report| std::fs::read_to_string(report).ok());
            for text in [outcome.stdout, outcome.stderr].into_iter().chain(reports) {
                let harm = |c: char| {
                    (c.is_control() && !"\n\r".contains(c)) || ['\u{202e}', '\u{2066}'].contains(&c)
                };
                assert!(!text.contains(harm), "{arguments:?}: {text:?}");
                assert!(!text.lines().any(|line| line.starts_with("error: ")), "{arguments:?}: {text}");
            }
        }
    }
}

/// Runs a model, which must fail with one of these codes and one sentence.
fn fails(file: &Path, provider: &str, codes: &[i32]) {
    let machine = Machine::new();
    let run = ["run", file.to_str().unwrap(), "-p", provider, "--seed", "1", "--no-cache"];
    let outcome = finish(&mut machine.sdrun(&run));
    let said = &outcome.stderr;
    assert!(outcome.code.is_some_and(|code| codes.contains(&code)), "{file:?} on {provider}: {said}");
    assert_eq!(errors(said), 1, "{file:?} on {provider}: {said}");
}

/// How many errors a command tells.
fn errors(said: &str) -> usize {
    said.lines().filter(|line| line.starts_with("error: ")).count()
}

/// Each crashes the runtime in its name. That must not take sdrun down.
#[test]
fn a_crash_of_a_runtime_is_an_error() {
    let machine = Machine::new();
    for model in files("crashing", "onnx") {
        let (file, inputs) = (model.to_str().unwrap(), model.with_extension("npz"));
        for provider in PROVIDERS {
            let run = ["run", file, "-p", provider, "-i", inputs.to_str().unwrap(), "--no-cache"];
            let outcome = finish(&mut machine.sdrun(&run));
            let said = &outcome.stderr;
            assert!(matches!(outcome.code, Some(0 | 6 | 11)), "{file} on {provider}: {said}");
            assert!(outcome.code == Some(0) || said.contains("error: "), "{file} on {provider}: {said}");
        }
    }
}

/// All files above, and those in `more`: on every provider, every command either gives the same numbers as on the others, or reports one
/// error that is not an internal one.
#[test]
#[ignore = "slow: run by `cargo xtask test --all`"]
fn no_file_does_harm() {
    let machine = Machine::new();
    let folders = ["busy", "crashing", "huge", "more", "names", "padded"];
    let all: Vec<PathBuf> = folders.iter().flat_map(|folder| files(folder, "onnx")).collect();
    let mut commands = 0;
    for file in &all {
        // External data without content must be beside the model.
        let model = machine.work().join(file.file_name().unwrap());
        std::fs::copy(file, &model).unwrap();
        std::fs::File::create(machine.work().join("sparse.bin")).unwrap().set_len(1 << 38).unwrap();
        let name = model.file_name().unwrap().to_str().unwrap();
        let inputs = file.with_extension("npz");
        let given = if inputs.exists() { ["-i", inputs.to_str().unwrap()] } else { ["--seed", "1"] };
        let mut attack = |arguments: &[&str]| {
            commands += 1;
            let outcome = finish(&mut machine.sdrun(arguments));
            let said = &outcome.stderr;
            let code = outcome.code.unwrap_or_else(|| panic!("{arguments:?} ends with a signal: {said}"));
            assert!((0..=11).contains(&code) && code != 2, "{arguments:?}: code {code}: {said}");
            assert!(!said.contains("panicked"), "{arguments:?}: {said}");
            assert!(errors(said) == usize::from(code > 1), "{arguments:?}: code {code}: {said}");
            code
        };
        attack(&["inspect", name]);
        let mut first: Option<(&str, Tensors)> = None;
        for provider in PROVIDERS {
            let on = ["-p", provider, "--time-limit", "3s"];
            attack(&[&["build", name, "-o", "e.sdengine"][..], &on].concat());
            attack(&[&["verify", name][..], &on, &given].concat());
            let run = [&["run", name, "--no-cache", "--allow-non-finite", "-o", "out.npz"][..], &on, &given];
            if attack(&run.concat()) != 0 {
                continue;
            }
            let found = npz::read(&machine.work().join("out.npz"), None, |_, _, _| Ok(())).unwrap();
            match &first {
                None => first = Some((provider, found)),
                Some((other, expected)) => {
                    for figures in compare(&found, expected).unwrap() {
                        let same = Tolerance::of(Precision::Fp32).accepts(&figures);
                        assert!(same, "{name}: {provider} and {other} differ: {figures:?}");
                    }
                }
            }
        }
    }
    println!("{commands} commands on {} files", all.len());
}

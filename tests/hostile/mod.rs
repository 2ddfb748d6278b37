//! Valid models of a few hundred bytes that once kept sdrun busy for hours, aborted it or crashed a runtime in its process.

use super::{Machine, PROVIDERS, finish, succeeds};
use std::path::{Path, PathBuf};

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
        succeeds(&mut machine.sdrun(&["inspect", file.to_str().unwrap()]));
    }
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
    files("padded", "onnx").iter().for_each(|file| fails(file, "ggml", &[4, 6]));
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
    let errors = said.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!(errors, 1, "{file:?} on {provider}: {said}");
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
            let code =
                outcome.code.unwrap_or_else(|| panic!("{file} ends sdrun on {provider}: {}", outcome.stderr));
            assert!(
                code == 0 || outcome.stderr.contains("error: "),
                "{file} on {provider}: {}",
                outcome.stderr
            );
        }
    }
}

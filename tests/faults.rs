//! The system fails at each moment in turn: a full disk, a file that cannot be read, too little memory, a clock that goes backwards.
//! Each command must end with one sentence and the right exit code, or with the right result, and must work again afterwards.

#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

#[path = "victims/mod.rs"]
mod victims;

use sdrun_tests::machine::{Outcome, PROVIDERS, compile, finish, succeeds};
use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Command, Stdio},
};
use victims::Victims;

/// A machine with `faults.c`, a library that lets system calls fail.
struct Faults {
    victims: Victims,
    library: PathBuf,
    log: PathBuf,
}

/// A command, its name, and the files it writes.
struct Case {
    name: &'static str,
    command: fn(&Victims) -> Command,
    writes: &'static [&'static str],
}

const ALL: [Case; 10] = [
    Case { name: "run on ggml", command: |v| v.run("ggml", &[]), writes: &["y.npy"] },
    Case { name: "run on onnxruntime", command: |v| v.run("onnxruntime", &[]), writes: &["y.npy"] },
    Case { name: "run on openvino", command: |v| v.run("openvino", &[]), writes: &["y.npy"] },
    Case {
        name: "build",
        command: |v| v.machine.sdrun(&["build", "model.onnx", "-p", "openvino", "-o", "new.sdengine"]),
        writes: &["new.sdengine"],
    },
    Case {
        name: "refit",
        command: |v| {
            let refit = ["refit", "openvino.sdengine", "--weights", "w.safetensors", "-o", "baked.sdengine"];
            v.machine.sdrun(&refit)
        },
        writes: &["baked.sdengine"],
    },
    Case { name: "runtime install", command: Victims::install, writes: &[] },
    Case {
        name: "cache gc",
        command: |v| v.machine.sdrun(&["cache", "gc", "--max-size", "1B"]),
        writes: &[],
    },
    Case {
        name: "inspect",
        command: |v| v.machine.sdrun(&["inspect", "model.onnx", "--json=model.json"]),
        writes: &["model.json"],
    },
    Case {
        name: "generate",
        command: |v| {
            let draw =
                ["generate", "a red circle", "--steps", "1", "-s", "1", "-p", "ggml", "-o", "picture.png"];
            v.machine.sdrun(&draw)
        },
        writes: &["picture.png"],
    },
    Case {
        name: "bench",
        command: |v| {
            let short = ["bench", "model.onnx", "-p", "ggml", "--min-time", "0s", "--max-time", "0s"];
            v.machine.sdrun(&[&short[..], &["--export", "json,html,csv,md"]].concat())
        },
        writes: &["sdrun-bench.json", "sdrun-bench.html", "sdrun-bench.csv", "sdrun-bench.md"],
    },
];

/// A model with weights and activations of megabytes.
const LARGE: [Case; 3] = [
    Case { name: "mobilenet-v2 on ggml", command: |v| mobilenet(v, "ggml"), writes: &[] },
    Case { name: "mobilenet-v2 on onnxruntime", command: |v| mobilenet(v, "onnxruntime"), writes: &[] },
    Case { name: "mobilenet-v2 on openvino", command: |v| mobilenet(v, "openvino"), writes: &[] },
];

fn mobilenet(victims: &Victims, provider: &str) -> Command {
    victims.machine.sdrun(&["run", "mobilenet-v2", "--seed", "1", "-p", provider])
}

impl Faults {
    fn new() -> Self {
        let victims = Victims::new();
        let folder = victims.machine.dir.path();
        let (library, log) = (folder.join("libfaults.so"), folder.join("faults.log"));
        compile(include_str!("faults.c"), &library);
        let engine = ["build", "model.onnx", "-p", "openvino", "-o", "openvino.sdengine"];
        succeeds(&mut victims.machine.sdrun(&engine));
        Faults { victims, library, log }
    }

    /// Runs a command in which a call fails. Also returns which processes made that call.
    fn strike(&self, mut command: Command, kind: &str, at: usize) -> (Outcome, String) {
        fs::write(&self.log, "").unwrap();
        command.env("LD_PRELOAD", &self.library).env("FAULT_LOG", &self.log);
        let outcome = finish(command.env("FAULT_KIND", kind).env("FAULT_AT", at.to_string()));
        let met = fs::read_to_string(&self.log).unwrap();
        (outcome, met.trim().replace('\n', ", "))
    }

    /// Lets the calls of a command fail in turn: all with `SDRUN_FAULTS=all`, else the first ones and a part of the later ones. The
    /// command may end with one of these codes and one sentence, or do its work. Returns how many calls failed.
    fn each(&self, case: &Case, kind: &str, codes: &[i32]) -> usize {
        let all = std::env::var("SDRUN_FAULTS").is_ok_and(|value| value == "all");
        let (mut at, mut count) = (1, 0);
        loop {
            // The command does everything as if for the first time.
            let _ = fs::remove_dir_all(self.victims.cache().join("engines"));
            let _ = fs::remove_dir_all(self.victims.data());
            let before = self.files(case);
            let (outcome, met) = self.strike((case.command)(&self.victims), kind, at);
            if met.is_empty() {
                assert_eq!(outcome.code, Some(0), "{}: {}", case.name, outcome.stderr);
                break;
            }
            count += 1;
            let told = format!("{}, {kind} {at} ({met})", case.name);
            self.check(case, &told, &outcome, codes, &before);
            at += if all { 1 } else { 1 + at / 8 };
        }
        let _ = fs::remove_dir_all(self.victims.data());
        count
    }

    /// What is in the files that a command writes.
    fn files(&self, case: &Case) -> Vec<Option<Vec<u8>>> {
        case.writes.iter().map(|name| fs::read(self.victims.machine.work().join(name)).ok()).collect()
    }

    fn check(&self, case: &Case, told: &str, outcome: &Outcome, codes: &[i32], before: &[Option<Vec<u8>>]) {
        let text = &outcome.stderr;
        let errors = text.lines().filter(|line| line.starts_with("error: ")).count();
        match outcome.code {
            Some(0) => assert_eq!(errors, 0, "{told}: {text}"),
            // A row of its table says what failed.
            Some(1) if case.name == "bench" => assert_eq!(errors, 0, "{told}: {text}"),
            Some(code) => assert!(errors == 1 && codes.contains(&code), "{told}: {code} {text}"),
            None => panic!("{told}: a signal ends it: {text}"),
        }
        assert!(!text.contains("panick"), "{told}: {text}");
        // Each file is the previous one or a whole new one.
        let after = self.files(case);
        self.victims.check_files(told);
        let again = finish(&mut (case.command)(&self.victims));
        assert_eq!(again.code, Some(0), "{told}, then again: {}", again.stderr);
        let right = self.files(case);
        for (((name, before), after), right) in case.writes.iter().zip(before).zip(after).zip(right) {
            if outcome.code == Some(0) {
                assert!(after.is_some(), "{told}: there is no {name}");
            }
            if *name == "y.npy" {
                assert_eq!(
                    right.as_ref(),
                    Some(&self.victims.expected[0]),
                    "{told}, then again: wrong numbers"
                );
            }
            // The measurements in a report differ.
            let same = after == *before || after == right || name.starts_with("sdrun-bench");
            assert!(same, "{told}: {name} is something else");
        }
    }
}

#[test]
fn a_disk_that_fills_up() {
    let faults = Faults::new();
    let met: usize = ALL.iter().map(|case| faults.each(case, "write", &[7])).sum();
    faults.victims.check_nothing_is_left(&ALL.each_ref().map(|case| case.writes).concat());
    println!("{met} calls failed");
    assert!(met > 100, "only {met} calls failed");
}

/// Everything is read-only.
#[test]
fn a_read_only_file_system() {
    let (faults, mut count) = (Faults::new(), 0);
    for case in &ALL {
        let before = faults.files(case);
        let (outcome, met) = faults.strike((case.command)(&faults.victims), "readonly", 1);
        faults.check(case, case.name, &outcome, &[8], &before);
        count += usize::from(!met.is_empty());
    }
    // All but the cleaning of a cache that is clean.
    assert_eq!(count, ALL.len() - 1);
}

/// Somebody removes the folder in which a command works.
#[test]
fn a_folder_that_is_gone() {
    let victims = Victims::new();
    let gone = victims.machine.dir.path().join("gone");
    let arguments: [(&[&str], _); 4] = [
        (&["generate", "a red circle", "--steps", "1", "-p", "ggml", "-o", "picture.png"], Some(3)),
        (&["build", "mobilenet-v2", "-p", "ggml", "-o", "new.sdengine"], Some(3)),
        (&["inspect", "model.onnx"], Some(3)),
        (&["run", "mobilenet-v2", "-p", "openvino", "--seed", "1"], Some(0)),
    ];
    for (arguments, code) in arguments {
        let mut shell = Command::new("sh");
        victims.machine.environment(&mut shell);
        fs::create_dir(&gone).unwrap();
        shell.args(["-c", "rmdir \"$PWD\"; exec \"$@\"", "sh"]).arg(victims.machine.dist.join("sdrun"));
        let outcome = finish(shell.args(arguments).current_dir(&gone));
        assert_eq!(outcome.code, code, "{arguments:?}: {}", outcome.stderr);
        let errors = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, usize::from(code != Some(0)), "{arguments:?}: {}", outcome.stderr);
    }
}

/// All build the same engine at the same time.
#[test]
fn sixteen_processes_and_one_engine() {
    let victims = Victims::new();
    for provider in PROVIDERS {
        let _ = fs::remove_dir_all(victims.cache().join("engines"));
        std::thread::scope(|scope| {
            for number in 0..16 {
                let victims = &victims;
                scope.spawn(move || {
                    let output = format!("y=y{number}.npy");
                    let run = ["run", "model.onnx", "-p", provider, "-i", "x=x.npy", "-i", "r=r.npy"];
                    let run = [&run[..], &["--output", &output]].concat();
                    let outcome = succeeds(&mut victims.machine.sdrun(&run));
                    assert!(!outcome.stderr.contains("WARN"), "{provider}: {}", outcome.stderr);
                    let y = victims.read(&format!("y{number}.npy"));
                    assert!(y == victims.expected[0], "{provider}: wrong numbers");
                });
            }
        });
        let entries = fs::read_dir(victims.cache().join("engines")).unwrap();
        let engines = entries.filter(|entry| {
            entry.as_ref().unwrap().path().extension().is_some_and(|ending| ending == "sdengine")
        });
        assert_eq!(engines.count(), 1, "{provider}");
    }
}

/// Standard output is full.
#[test]
fn a_full_standard_output() {
    let faults = Faults::new();
    for case in &ALL {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = (case.command)(&faults.victims);
        let outcome = command.stdout(full).stderr(Stdio::piped()).output().unwrap();
        let text = String::from_utf8_lossy(&outcome.stderr);
        assert_eq!(outcome.status.code(), Some(7), "{}: {text}", case.name);
        assert!(text.contains("error: cannot write standard output: "), "{}: {text}", case.name);
    }
}

/// Reads fail with an error of the disk. A command can do without some of the files.
#[test]
fn a_disk_that_cannot_be_read() {
    let faults = Faults::new();
    // 3: the provider's description cannot be read, so the provider is not found. 6: OpenVINO's reader does not say why it failed.
    let met: usize = ALL.iter().map(|case| faults.each(case, "read", &[3, 6, 10])).sum();
    println!("{met} reads failed");
    assert!(met > 100, "only {met} reads failed");
}

#[test]
fn too_little_memory() {
    let faults = Faults::new();
    let met: usize = ALL.iter().chain(&LARGE).map(|case| faults.each(case, "memory", &[7])).sum();
    println!("{met} allocations failed");
    assert!(met > 50, "only {met} allocations failed");
}

/// Its first time is before 1970.
#[test]
fn a_clock_that_goes_backwards() {
    let faults = Faults::new();
    for case in &ALL {
        for _ in 0..2 {
            let (outcome, _) = faults.strike((case.command)(&faults.victims), "clock", 1);
            assert_eq!(outcome.code, Some(0), "{}: {}", case.name, outcome.stderr);
            assert!(!outcome.stderr.contains("WARN"), "{}: {}", case.name, outcome.stderr);
        }
        if case.writes.contains(&"y.npy") {
            assert_eq!(faults.files(case), [Some(faults.victims.expected[0].clone())], "{}", case.name);
        }
    }
}

//! Interruptions at random moments: `kill -9` for a command, its worker or both; SIGINT, SIGTERM or SIGHUP for a command; a closed pipe
//! where its output goes. The next command must compute the right numbers, and no half-written or temporary file may be left.
//!
//! `SDRUN_KILLS` sets how many (default: 60) and `SDRUN_KILLS_SEED` chooses the moments.

#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

use rustix::process::{Pid, Signal, kill_process};
use sdrun::abi::Manifest;
use sdrun_tests::{
    machine::{LIMIT, Machine, PROVIDERS, children, finish, succeeds},
    random::Random,
};
use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use zip::{ZipWriter, write::SimpleFileOptions};

/// Files of the runtime that is installed, and their size.
const FILES: usize = 24;
const FILE_BYTES: usize = 1 << 20;

/// What happens to a command.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Blow {
    Kill,
    KillWorker,
    KillBoth,
    Interrupt,
    Terminate,
    HangUp,
    /// Nobody reads its output any more.
    Deafen,
}

const BLOWS: [Blow; 9] = [
    Blow::Kill,
    Blow::KillWorker,
    Blow::KillBoth,
    Blow::KillWorker,
    Blow::KillBoth,
    Blow::Interrupt,
    Blow::Terminate,
    Blow::HangUp,
    Blow::Deafen,
];

/// How long a command may go on after a signal that asks it to stop. Its workers get 0.4 s.
const PATIENCE: Duration = Duration::from_secs(3);

/// A machine, what its model computes, and how long each kind of command takes.
struct Victims {
    machine: Machine,
    /// `y.npy` with the model's own weights and with those of `w.safetensors`.
    expected: [Vec<u8>; 2],
    toy: PathBuf,
}

impl Victims {
    fn new() -> Self {
        let machine = Machine::new();
        let target = machine.manifests()[0].provider.library.target.clone();
        let toy = toy_provider(machine.dir.path(), &target);
        let weights: Vec<f32> = (0..15).map(|i| i as f32 / 8.0 - 0.5).collect();
        machine.file(
            "w.safetensors",
            checkpoint(&[("w", &[4, 3], &weights[..12]), ("b", &[3], &weights[12..])]),
        );
        let mut victims = Victims { machine, expected: [vec![], vec![]], toy };
        for (at, stored) in [&[][..], &["--weights", "w.safetensors"]].iter().enumerate() {
            succeeds(&mut victims.run("ggml", stored));
            victims.expected[at] = victims.read("y.npy");
        }
        assert_ne!(victims.expected[0], victims.expected[1]);
        victims
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.machine.work().join(name)).unwrap()
    }

    fn run(&self, provider: &str, more: &[&str]) -> Command {
        let mut command = self.machine.run_model(provider);
        command.args(more);
        command
    }

    fn cache(&self) -> PathBuf {
        self.machine.dir.path().join("cache")
    }

    /// A random command.
    fn command(&self, random: &mut Random) -> Command {
        let provider = random.pick(&PROVIDERS);
        let isolated = ["--isolate"];
        let more: &[&str] = if random.below(2) == 0 { &isolated } else { &[] };
        let built = format!("{provider}.sdengine");
        match random.below(8) {
            0 | 1 => {
                // Then it builds and stores an engine again.
                let _ = fs::remove_dir_all(self.cache().join("engines"));
                self.run(provider, more)
            }
            2 => self.run(provider, &[more, &["--weights", "w.safetensors"]].concat()),
            3 => self.run(provider, more),
            4 => {
                let output = ["build", "model.onnx", "-p", provider, "-o", &built];
                self.machine.sdrun(&[&output[..], more].concat())
            }
            5 => {
                let refit = ["refit", &built, "--weights", "w.safetensors", "-o", "baked.sdengine"];
                self.machine.sdrun(&[&refit[..], more].concat())
            }
            6 => self.machine.sdrun(&["cache", "gc", "--max-size", "1B"]),
            _ => self.install(),
        }
    }

    fn install(&self) -> Command {
        let mut command = self.machine.sdrun(&["runtime", "install", "toy", "--yes", "--from"]);
        command.arg(self.toy.join("toy-1.0-cp312.whl")).arg("--provider-path").arg(&self.toy);
        command.env("SDRUN_DATA_DIR", self.data());
        command
    }

    fn data(&self) -> PathBuf {
        self.machine.dir.path().join("data")
    }

    /// Starts a command, strikes at a random moment, and waits for the end of all processes. Returns what it did, and whether anything was
    /// alive.
    fn kill(&self, random: &mut Random) -> (String, bool) {
        let mut command = self.command(random);
        let blow = random.pick(&BLOWS);
        // Most commands take a tenth of a second; later blows meet commands that are done. Small delays are as likely as large ones.
        let longest = random.pick(&[2_000, 20_000, 80_000, 400_000]);
        let delay = Duration::from_micros(random.below(longest) as u64);
        let told = format!("{command:?}, {blow:?} after {delay:?}");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let words = std::thread::spawn(move || {
            let mut text = Vec::new();
            err.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap()
        });
        let started = Instant::now();
        let mut workers = Vec::new();
        while started.elapsed() < delay && child.try_wait().unwrap().is_none() {
            workers = children(child.id());
            std::thread::sleep(Duration::from_micros(300));
        }
        let send = |pid: u32, signal: Signal| {
            let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
        };
        let hit = match blow {
            Blow::KillWorker => workers.iter().any(|pid| alive(*pid)),
            _ => child.try_wait().unwrap().is_none(),
        };
        if matches!(blow, Blow::KillWorker | Blow::KillBoth) {
            workers.iter().for_each(|pid| send(*pid, Signal::KILL));
        }
        // Of a command that has ended, the number may belong to another process.
        if hit {
            match blow {
                Blow::Kill | Blow::KillBoth => send(child.id(), Signal::KILL),
                Blow::Interrupt => send(child.id(), Signal::INT),
                Blow::Terminate => send(child.id(), Signal::TERM),
                Blow::HangUp => send(child.id(), Signal::HUP),
                Blow::KillWorker | Blow::Deafen => {}
            }
        }
        let reader = (blow != Blow::Deafen).then_some(out);
        let since = Instant::now();
        let limit = if blow == Blow::KillWorker || blow == Blow::Deafen { LIMIT } else { PATIENCE };
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(since.elapsed() < limit, "{told}: it goes on for {:?}", since.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        };
        drop(reader);
        let text = words.join().unwrap();
        match (status.code(), blow) {
            // It was done, or it was killed, or stopped before it could listen to signals.
            (Some(0), _) => {}
            (None, Blow::Kill | Blow::KillBoth) => {}
            (None, Blow::Interrupt | Blow::Terminate | Blow::HangUp) if delay < Duration::from_millis(40) => {
            }
            (Some(130), Blow::Interrupt | Blow::Terminate | Blow::HangUp) => {}
            (Some(70), Blow::KillWorker | Blow::KillBoth) => {}
            // An engine that does not exist cannot be refitted, and not every provider stores weights.
            (Some(3 | 6), _) if told.contains("refit") => {}
            (code, _) => panic!("{told}: exit code {code:?} ({status}): {text}"),
        }
        assert!(!text.contains("panick"), "{told}: {text}");
        let deadline = Instant::now() + Duration::from_secs(5);
        for worker in workers {
            while alive(worker) {
                assert!(Instant::now() < deadline, "{told}: worker {worker} outlives its command");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        (told, hit)
    }

    /// What is there is right.
    fn check(&self, random: &mut Random, told: &str) {
        let y = self.read("y.npy");
        assert!(self.expected.contains(&y), "{told}: y.npy has {} bytes of something else", y.len());
        let at = random.below(2);
        let provider = random.pick(&PROVIDERS);
        let outcome = finish(&mut self.run(provider, [&[][..], &["--weights", "w.safetensors"]][at]));
        assert_eq!(outcome.code, Some(0), "{told}, then {provider}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("aside"), "{told}: a damaged entry: {}", outcome.stderr);
        assert!(self.read("y.npy") == self.expected[at], "{told}, then {provider}: wrong numbers");
        for engine in
            PROVIDERS.map(|id| format!("{id}.sdengine")).iter().map(String::as_str).chain(["baked.sdengine"])
        {
            if self.machine.work().join(engine).exists() {
                let outcome = finish(&mut self.machine.sdrun(&["inspect", engine]));
                assert_eq!(outcome.code, Some(0), "{told}: {engine}: {}", outcome.stderr);
            }
        }
        let installed = self.data().join("runtimes/toy-1.0");
        if installed.exists() {
            assert_eq!(fs::read_dir(installed.join("toy")).unwrap().count(), FILES, "{told}: half a runtime");
            assert!(installed.join("sdrun-files.json").exists(), "{told}: no hashes");
        }
    }

    /// After one more command of each kind, no temporary file is left.
    fn check_nothing_is_left(&self) {
        for provider in PROVIDERS {
            succeeds(&mut self.run(provider, &["--isolate"]));
        }
        for provider in PROVIDERS {
            let built = format!("{provider}.sdengine");
            succeeds(&mut self.machine.sdrun(&["build", "model.onnx", "-p", provider, "-o", &built]));
        }
        let refit = ["refit", "openvino.sdengine", "--weights", "w.safetensors", "-o", "baked.sdengine"];
        succeeds(&mut self.machine.sdrun(&refit));
        succeeds(&mut self.install());
        succeeds(&mut self.machine.sdrun(&["cache", "gc"]));
        succeeds(&mut self.machine.sdrun(&["cache", "verify"]));
        let names = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
        };
        let shared: Vec<String> = names(Path::new("/dev/shm"))
            .into_iter()
            .filter(|name| name.starts_with("sdrun-worker-") && is_unused(&Path::new("/dev/shm").join(name)))
            .collect();
        assert_eq!(shared, [""; 0], "shared memory is left");
        assert_eq!(names(&self.cache().join("tmp")), [""; 0], "temporary files are left");
        assert_eq!(names(&self.data().join("runtimes")), ["toy-1.0"]);
        let known = ["x.npy", "r.npy", "y.npy", "model.onnx", "w.safetensors", "baked.sdengine"];
        for name in names(&self.machine.work()) {
            let engine = PROVIDERS.iter().any(|id| name == format!("{id}.sdengine"));
            assert!(engine || known.contains(&&*name), "{name} is left");
        }
    }
}

/// Whether nobody holds the lock of a folder. Other tests may use theirs now.
fn is_unused(folder: &Path) -> bool {
    fs::File::open(folder.join("lock")).is_ok_and(|lock| lock.try_lock().is_ok())
}

/// Whether a process runs. One that waits for its parent to notice its end does not.
fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// A safetensors file of f32 tensors.
fn checkpoint(tensors: &[(&str, &[usize], &[f32])]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (*name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// A manifest with a runtime, and the wheel of this runtime.
fn toy_provider(folder: &Path, target: &str) -> PathBuf {
    let dir = folder.join("toy");
    fs::create_dir(&dir).unwrap();
    let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let mut random = Random(7);
    for at in 0..FILES {
        let name = if at == 0 { "toy/libtoy.so.1".into() } else { format!("toy/part-{at}") };
        zip.start_file(name, SimpleFileOptions::default()).unwrap();
        zip.write_all(&(0..FILE_BYTES).map(|_| random.next() as u8).collect::<Vec<_>>()).unwrap();
    }
    let wheel = zip.finish().unwrap().into_inner();
    fs::write(dir.join("toy-1.0-cp312.whl"), &wheel).unwrap();
    fs::write(dir.join("plugin.so"), "not loaded").unwrap();
    let hash = sdrun_tiny::sha256(&wheel);
    let manifest = serde_json::json!({
        "file_format_version": "1.0.0",
        "provider": {
            "id": "toy", "summary": "a runtime to install", "vendor": "tests", "version": "1", "build_id": "1",
            "library": { "path": "plugin.so", "sha256": "", "target": target, "abi_major": sdrun::abi::ABI_MAJOR },
            "runtime": {
                "name": "toy", "version": "1.0", "env": "SDRUN_TOY_DIR", "library_names": ["libtoy.so.*"],
                "pip": {
                    "package": "toy", "keep": ["toy/*"], "library_dir": "toy",
                    "wheels": [{
                        "os": std::env::consts::OS, "arch": std::env::consts::ARCH, "python": "312",
                        "platforms": ["any"], "sha256": hash, "download_bytes": wheel.len(),
                        "installed_bytes": FILES * FILE_BYTES,
                    }],
                },
            },
        },
    });
    fs::write(dir.join(Manifest::file_name("toy")), manifest.to_string()).unwrap();
    dir
}

#[test]
fn nothing_is_lost() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let victims = Victims::new();
    let mut random = Random(number("SDRUN_KILLS_SEED").unwrap_or(1));
    let (count, mut hits) = (number("SDRUN_KILLS").unwrap_or(60), 0);
    for _ in 0..count {
        let (told, hit) = victims.kill(&mut random);
        hits += u64::from(hit);
        victims.check(&mut random, &told);
    }
    victims.check_nothing_is_left();
    println!("{hits} of {count} met something alive");
    assert!(3 * hits > count, "only {hits} of {count} met something alive");
}

//! A user's machine with sdrun on it, for tests of the command line.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a failure here is a failed test")]

use crate::{place::Place, spec::small_model};
use sdrun::abi::Manifest;
use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Those that run on every processor.
pub const PROVIDERS: [&str; 3] = ["ggml", "onnxruntime", "openvino"];
/// How long a command may take.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A user with a separate home folder and the installed runtimes of the test run.
pub struct Machine {
    /// Holds everything.
    pub dir: TempDir,
    /// The programs under test.
    pub dist: PathBuf,
    /// Installed runtimes.
    pub data: PathBuf,
}

/// What a command did.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Machine {
    /// With the small model `model.onnx` and its inputs.
    ///
    /// # Panics
    /// If the programs or the runtimes are missing.
    #[allow(clippy::new_without_default, reason = "it has effects")]
    pub fn new() -> Self {
        let place = |place: Place| place.find().unwrap_or_else(|why| panic!("{why}"));
        let machine =
            Machine { dir: tempfile::tempdir().unwrap(), dist: place(Place::Dist), data: place(Place::Data) };
        fs::create_dir(machine.work()).unwrap();
        machine.file("model.onnx", small_model());
        machine.file("x.npy", npy("<f4", &[2, 4]));
        machine.file("r.npy", npy("<f4", &[2, 3]));
        machine
    }

    /// The working directory.
    pub fn work(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// Writes a file into the working directory.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.work().join(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Names in the working directory.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.work()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Its environment instead of that of the test.
    pub fn environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.dir.path())
            .env("SDRUN_DATA_DIR", &self.data)
            .env("SDRUN_CACHE_DIR", self.dir.path().join("cache"))
            .current_dir(self.work())
            .stdin(Stdio::null())
    }

    /// `sdrun` with these arguments.
    pub fn sdrun(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.dist.join("sdrun"));
        self.environment(command.args(arguments));
        command
    }

    /// `sdrun run` on the small model with its inputs.
    pub fn run_model(&self, provider: &str) -> Command {
        self.sdrun(&[
            "run",
            "model.onnx",
            "-p",
            provider,
            "-i",
            "x=x.npy",
            "-i",
            "r=r.npy",
            "--output",
            "y=y.npy",
        ])
    }

    /// `sdrun` with files limited to `blocks` of 512 bytes, as on a full disk.
    pub fn with_little_disk(&self, blocks: usize, arguments: &[&str]) -> Command {
        let mut command = Command::new("sh");
        // Without the trap, the system kills the process instead of failing the write.
        command.arg("-c").arg(format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"")).arg("sh");
        self.environment(command.arg(self.dist.join("sdrun")).args(arguments));
        command
    }

    /// The manifests of the providers.
    pub fn manifests(&self) -> Vec<Manifest> {
        let file = |id: &&str| self.dist.join("providers").join(id).join(Manifest::file_name(id));
        PROVIDERS.iter().map(|id| sdrun::read_manifest(&file(id)).unwrap()).collect()
    }
}

/// Runs a command to its end. Fails after two minutes.
pub fn finish(command: &mut Command) -> Outcome {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let deadline = Instant::now() + LIMIT;
    std::thread::scope(|scope| {
        let read = |pipe: &mut dyn Read| {
            let mut text = Vec::new();
            pipe.read_to_end(&mut text).unwrap();
            String::from_utf8(text).unwrap()
        };
        let out = scope.spawn(move || read(&mut stdout));
        let err = scope.spawn(move || read(&mut stderr));
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{command:?} hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let code = child.wait().unwrap().code();
        Outcome { code, stdout: out.join().unwrap(), stderr: err.join().unwrap() }
    })
}

/// Runs a command that must fail with `code` and one sentence that, with its hint, contains all `words`.
pub fn refuses(command: &mut Command, code: i32, words: &[&str]) {
    let outcome = finish(command);
    let text = &outcome.stderr;
    assert_eq!(outcome.code, Some(code), "{command:?}: {text}");
    let errors: Vec<&str> = text.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{command:?}: {text}");
    let other = |l: &&str| {
        let l = l.trim_start();
        !["error: ", "hint: ", "WARN "].iter().any(|start| l.starts_with(start))
    };
    assert_eq!(text.lines().find(other), None, "{command:?}: {text}");
    assert!(!text.contains("panick"), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

/// Runs a command that must succeed.
pub fn succeeds(command: &mut Command) -> Outcome {
    let outcome = finish(command);
    assert_eq!(outcome.code, Some(0), "{command:?}: {}", outcome.stderr);
    outcome
}

/// A NumPy file of ones.
pub fn npy(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(|d| format!("{d},")).collect();
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims.join(" "));
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.bytes());
    for _ in 0..shape.iter().product() {
        match descr {
            "<f4" => file.extend(1f32.to_le_bytes()),
            "<i8" => file.extend(1i64.to_le_bytes()),
            other => panic!("{other}"),
        }
    }
    file
}

/// Builds a shared library with the C compiler, which sdrun needs anyway.
///
/// # Panics
/// If it does not compile.
pub fn compile(source: &str, library: &Path) {
    let file = library.with_extension("c");
    fs::write(&file, source).unwrap();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status =
        Command::new(compiler).args(["-shared", "-fPIC", "-o"]).args([library, &file]).status().unwrap();
    assert!(status.success());
}

/// Process ids of the children of a process. None outside Linux.
pub fn children(pid: u32) -> Vec<u32> {
    // Threads have children of their own.
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let mut found: Vec<u32> = texts
        .flat_map(|text| text.split_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<_>>())
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

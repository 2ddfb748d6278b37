//! Commands of a user that write files: models run, engines, a runtime. Tests disturb them, and check what they leave.

use sdrun::abi::Manifest;
use sdrun_tests::{
    machine::{Machine, PROVIDERS, finish, succeeds},
    random::Random,
};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};
use zip::{ZipWriter, write::SimpleFileOptions};

/// Files of the runtime that is installed, and their size.
const FILES: usize = 24;
const FILE_BYTES: usize = 1 << 20;

/// A machine, and what its model computes.
pub(crate) struct Victims {
    pub(crate) machine: Machine,
    /// `y.npy` with the model's own weights and with those of `w.safetensors`.
    pub(crate) expected: [Vec<u8>; 2],
    toy: PathBuf,
}

impl Victims {
    pub(crate) fn new() -> Self {
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

    /// A file of the user.
    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.machine.work().join(name)).unwrap()
    }

    /// Runs the model.
    pub(crate) fn run(&self, provider: &str, more: &[&str]) -> Command {
        let mut command = self.machine.run_model(provider);
        command.args(more);
        command
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.machine.dir.path().join("cache")
    }

    /// Installs a runtime.
    pub(crate) fn install(&self) -> Command {
        let mut command = self.machine.sdrun(&["runtime", "install", "toy", "--yes", "--from"]);
        command.arg(self.toy.join("toy-1.0-cp312.whl")).arg("--provider-path").arg(&self.toy);
        command.env("SDRUN_DATA_DIR", self.data());
        command
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.machine.dir.path().join("data")
    }

    /// Each engine and each runtime is there as a whole, or not at all.
    pub(crate) fn check_files(&self, told: &str) {
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

    /// After one more command of each kind, no temporary file is left. `made` are the files that a test makes beside the usual ones.
    pub(crate) fn check_nothing_is_left(&self, made: &[&str]) {
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
            assert!(engine || known.contains(&&*name) || made.contains(&&*name), "{name} is left");
        }
    }
}

/// Whether nobody holds the lock of a folder. Other tests may use theirs now.
fn is_unused(folder: &Path) -> bool {
    fs::File::open(folder.join("lock")).is_ok_and(|lock| lock.try_lock().is_ok())
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

//! A separate place for every test: home, data and cache folders, and only the providers that the test creates.
#![allow(dead_code, reason = "every test file uses a part of this")]
#![allow(clippy::unwrap_used, reason = "only tests call this")]

use sdrun::{
    abi::DType,
    graph::{Dim, Graph, Initializer, Node, Placement, Value, WeightData, WeightRef},
};
use serde_json::{Value as Json, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Output},
};

pub(crate) struct Sandbox {
    dir: tempfile::TempDir,
}

/// What a command printed and how it ended.
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["home", "providers", "work"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        Sandbox { dir }
    }

    /// A path below the sandbox.
    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file into the working directory and returns its absolute path.
    pub(crate) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path("work").join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_string()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sdrun"));
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path("home"))
            .env("APPDATA", self.path("home"))
            .env("SDRUN_DATA_DIR", self.path("data"))
            .env("SDRUN_CACHE_DIR", self.path("cache"))
            // Replaces all other places, such as the folder beside the executable.
            .env("SDRUN_PROVIDER_FILES", self.path("providers"))
            .env("COLUMNS", "100")
            .current_dir(self.path("work"))
            .stdin(std::process::Stdio::null());
        // Without it, Windows does not find its own libraries.
        command.envs(std::env::var_os("SystemRoot").map(|folder| ("SystemRoot", folder)));
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Outcome {
        outcome(self.command(args).output().unwrap())
    }

    /// Runs with `--json`; stdout must be one JSON document.
    pub(crate) fn json(&self, args: &[&str]) -> (Option<i32>, Json) {
        let outcome = self.run(&[args, &["--json"]].concat());
        let json = serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| {
            panic!("{args:?} printed no JSON ({e}): {:?} {}", outcome.stdout, outcome.stderr)
        });
        (outcome.code, json)
    }

    /// A command whose `python3` is `script`.
    #[cfg(unix)]
    pub(crate) fn with_python(&self, args: &[&str], script: &str) -> Command {
        use std::os::unix::fs::PermissionsExt;
        let python = self.path("home/python3");
        std::fs::write(&python, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&python, PermissionsExt::from_mode(0o755)).unwrap();
        let mut command = self.command(args);
        command.env("PATH", format!("{}:/usr/bin:/bin", self.path("home").display()));
        command
    }

    /// Writes a provider's manifest and a placeholder for its library into the provider folder. `change` may alter the manifest.
    pub(crate) fn provider(&self, id: &str, change: impl FnOnce(&mut Json)) {
        let library = format!("lib{id}.so");
        let mut manifest = json!({
            "file_format_version": "1.0.0",
            "provider": {
                "id": id, "summary": "for tests", "vendor": "sdrun", "version": "0.1.0", "build_id": "b",
                "library": { "path": library, "sha256": "", "target": "", "abi_major": 1 },
            },
        });
        change(&mut manifest["provider"]);
        let folder = self.path("providers");
        std::fs::write(folder.join(&library), b"not a library").unwrap();
        let path = folder.join(format!("sdrun-provider-{id}.json"));
        std::fs::write(path, manifest.to_string()).unwrap();
    }
}

pub(crate) fn outcome(output: Output) -> Outcome {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let outcome =
        Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    outcome
}

impl Outcome {
    /// Asserts the exit code and an error that contains these words, in the form that every error has.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, words: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        assert!(self.stderr.starts_with("error: "), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in: {}", self.stderr);
        }
        self
    }

    /// The same outcome without the output before the error.
    pub(crate) fn after_notes(mut self) -> Self {
        let error = self.stderr.find("error: ").unwrap_or_default();
        self.stderr = self.stderr.split_off(error);
        self
    }

    #[track_caller]
    pub(crate) fn succeeds(&self) -> &Self {
        assert_eq!(self.code, Some(0), "{}{}", self.stdout, self.stderr);
        self
    }
}

/// `y = x * w`, with `x` of shape `[n, 4]`, n open, and a stored weight `w`; the input is called `input`.
pub(crate) fn model(input: &str) -> Vec<u8> {
    let mut graph = Graph {
        name: "test".into(),
        opsets: BTreeMap::from([(String::new(), 17)]),
        ir_version: 8,
        producer: "tests".into(),
        ..Graph::default()
    };
    let value = |name: &str, shape| Value { name: name.into(), dtype: Some(DType::F32), shape: Some(shape) };
    let open = || vec![Dim::Symbol("n".into()), Dim::Known(4)];
    let x = graph.add_value(value(input, open()));
    let w = graph.add_value(value("w", vec![Dim::Known(4)]));
    let y = graph.add_value(value("y", open()));
    graph.nodes.push(Node {
        name: "multiply".into(),
        domain: String::new(),
        op_type: "Mul".into(),
        inputs: vec![Some(x), Some(w)],
        outputs: vec![Some(y)],
        attributes: BTreeMap::new(),
        metadata: BTreeMap::new(),
    });
    (graph.inputs, graph.outputs) = (vec![x], vec![y]);
    let bytes: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let data = WeightData::Inline(bytes.clone().into());
    graph.initializers.insert(w, Initializer::Weight(WeightRef { dtype: DType::F32, shape: vec![4], data }));
    graph.to_onnx(|_, _| Ok(Placement::Inline(bytes.clone().into()))).unwrap()
}

/// A `.npy` file of f32 values.
pub(crate) fn npy(shape: &str, values: &[f32]) -> Vec<u8> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\0".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    bytes
}

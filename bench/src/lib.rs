//! Other systems that run the same models, to measure beside sdrun's providers.
//!
//! Each is a Python program in `baselines/`, which speaks the protocol of `sdrun::bench::Baseline`, and a list of pinned packages that it
//! needs. [`Baseline::install`] makes a private environment for it in the user's data folder.

mod install;

use sdrun::abi::{Error, Result};
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

/// A system to compare with.
#[derive(Clone, Copy, Debug)]
pub struct Baseline {
    /// Its name.
    pub name: &'static str,
    /// What it is, in a few words.
    pub summary: &'static str,
    /// Whether it draws whole pictures. The others run single networks.
    pub draws: bool,
    /// Its adapter, or why there is none.
    adapter: std::result::Result<Adapter, &'static str>,
}

/// The program that runs a system, and the pinned packages that it needs.
#[derive(Clone, Copy, Debug)]
struct Adapter {
    program: &'static str,
    requirements: &'static str,
}

/// What all programs share: names and contents of files.
const SHARED: &[(&str, &str)] = &[
    ("common.py", include_str!("../baselines/common.py")),
    ("onnx_torch.py", include_str!("../baselines/onnx_torch.py")),
    ("torch_model.py", include_str!("../baselines/torch_model.py")),
];

macro_rules! baselines {
    (
        $($name:literal: $draws:literal, $summary:literal;)*
        absent $($absent:literal: $what:literal, $why:literal;)*
    ) => {
        /// All systems.
        pub const ALL: &[Baseline] = &[$(Baseline {
            name: $name,
            summary: $summary,
            draws: $draws,
            adapter: Ok(Adapter {
                program: include_str!(concat!("../baselines/", $name, ".py")),
                requirements: include_str!(concat!("../baselines/", $name, ".txt")),
            }),
        },)* $(Baseline { name: $absent, summary: $what, draws: false, adapter: Err($why) },)*];
    };
}

baselines! {
    "pytorch": false, "PyTorch, eager";
    "torch-compile": false, "PyTorch with torch.compile (Inductor)";
    "onnxruntime": false, "ONNX Runtime's Python package";
    "openvino": false, "OpenVINO's Python package";
    "iree": false, "IREE, compiled for this processor";
    "tvm": false, "Apache TVM (Relax)";
    "executorch": false, "ExecuTorch with XNNPACK";
    "jax-xla": false, "XLA through JAX";
    "ggml-compiler": false, "ggml-compiler";
    "stable-diffusion.cpp": true, "stable-diffusion.cpp (whole pictures)";
    absent
    "tensorrt": "TensorRT (needs an NVIDIA GPU)",
    "it needs an NVIDIA GPU, and sdrun cannot measure it yet; `trtexec --onnx=MODEL` does";
    "migraphx-driver": "MIGraphX's own tool (needs an AMD GPU)",
    "it needs an AMD GPU with ROCm, and sdrun cannot measure it yet; `migraphx-driver perf --onnx MODEL` does";
}

/// The baseline with this name.
pub fn find(name: &str) -> Option<&'static Baseline> {
    ALL.iter().find(|baseline| baseline.name == name)
}

impl Baseline {
    /// Why sdrun cannot measure it; `None` if it can.
    pub fn obstacle(&self) -> Option<&'static str> {
        self.adapter.err()
    }

    /// Its folder in the user's data folder.
    pub fn folder(&self, data: &Path) -> PathBuf {
        data.join("baselines").join(self.name)
    }

    /// Whether it is installed in the version that this sdrun pins.
    pub fn is_installed(&self, data: &Path) -> bool {
        let done = fs::read_to_string(self.folder(data).join(install::DONE));
        self.adapter.is_ok_and(|adapter| done.is_ok_and(|done| done == adapter.requirements))
    }

    /// The packages that it needs, one on each line, pinned.
    pub fn packages(&self) -> impl Iterator<Item = &'static str> {
        self.adapter
            .map_or("", |adapter| adapter.requirements)
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with(['#', '-']))
    }

    /// The command to start it. First writes its program into its folder, where another version of sdrun may have left its own.
    ///
    /// # Errors
    /// `Unsupported` if sdrun cannot measure it; `FailedPrecondition` if it is not installed; the system's error if the program cannot be
    /// written.
    pub fn command(&self, data: &Path) -> Result<Vec<OsString>> {
        let adapter = self.adapter.map_err(Error::unsupported)?;
        let folder = self.folder(data);
        if !self.is_installed(data) {
            let state = if folder.exists() { "is installed in another version" } else { "is not installed" };
            let hint = format!("run `sdrun baseline install {}`", self.name);
            return Err(Error::precondition(state).with_hint(hint));
        }
        let program = folder.join(format!("{}.py", self.name));
        let files = SHARED.iter().map(|(name, text)| (folder.join(name), *text));
        for (file, text) in files.chain([(program.clone(), adapter.program)]) {
            if fs::read_to_string(&file).is_ok_and(|old| old == text) {
                continue;
            }
            fs::write(&file, text).map_err(|e| Error::io("write", &file, &e))?;
        }
        Ok(vec![install::python_of(&folder).into(), program.into()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of unknown versions compare nothing.
    #[test]
    fn packages_are_pinned() {
        for baseline in ALL {
            for package in baseline.packages() {
                assert!(package.contains("=="), "{}: {package}", baseline.name);
            }
        }
    }

    #[test]
    fn commands_need_an_installation() {
        let data = tempfile::tempdir().unwrap();
        let baseline = find("pytorch").unwrap();
        assert_eq!(baseline.command(data.path()).unwrap_err().message, "is not installed");
        let folder = baseline.folder(data.path());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(install::DONE), "torch==0.1\n").unwrap();
        assert!(baseline.command(data.path()).unwrap_err().message.contains("another version"));
        fs::write(folder.join(install::DONE), baseline.adapter.unwrap().requirements).unwrap();
        let command = baseline.command(data.path()).unwrap();
        assert!(command[1].to_string_lossy().ends_with("pytorch.py") && Path::new(&command[1]).is_file());
        assert!(folder.join("common.py").is_file());
    }
}

//! A Python environment in the target folder, for what exists only in Python: the ONNX node tests, JSON schema validation,
//! and OpenVINO's own benchmark. sdrun itself uses Python only to install vendor runtimes, and needs no packages.

use crate::{
    dist::sha256,
    workspace::{Workspace, output, run},
};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Oldest Python that can run the pinned packages.
const OLDEST: (u32, u32) = (3, 11);

/// Names a Python with torch, diffusers and peft. Without it, comparisons with them are skipped.
pub(crate) const TORCH_PYTHON: &str = "SDRUN_TORCH_PYTHON";

/// The packages of `xtask/python/requirements-NAME.txt`.
#[derive(Clone, Copy)]
pub(crate) enum Packages {
    /// The ONNX node tests and a JSON schema validator.
    Test,
    /// OpenVINO with its `benchmark_app`.
    Bench,
    /// Clients of the server, and what drives a browser.
    Serve,
    /// Ray Serve.
    Cluster,
    /// zig, as the compiler and linker for Apple's systems.
    Apple,
}

impl Packages {
    fn name(self) -> &'static str {
        match self {
            Packages::Test => "test",
            Packages::Bench => "bench",
            Packages::Serve => "serve",
            Packages::Cluster => "cluster",
            Packages::Apple => "apple",
        }
    }
}

/// A Python environment.
pub(crate) struct Python {
    bin: PathBuf,
}

impl Python {
    /// The environment `target/python` with `packages`. Creates it and installs the packages if necessary.
    pub(crate) fn with(workspace: &Workspace, packages: Packages) -> Result<Self> {
        let python = Self::bare(workspace)?;
        let name = format!("requirements-{}.txt", packages.name());
        let requirements = workspace.root.join("xtask/python").join(&name);
        let done = workspace.target.join("python").join(format!(".{name}-{}", &sha256(&requirements)?[..16]));
        if !done.exists() {
            println!("   installing the packages of xtask/python/{name} into {}", python.bin.display());
            run(python
                .python()
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
                .args(["--require-hashes", "--only-binary=:all:", "-r"])
                .arg(&requirements))?;
            fs::write(&done, "").with_context(|| format!("cannot write {}", done.display()))?;
        }
        Ok(python)
    }

    /// The environment `target/python` with pip, and whatever is already in it.
    pub(crate) fn bare(workspace: &Workspace) -> Result<Self> {
        let dir = workspace.target.join("python");
        let bin = dir.join(if cfg!(windows) { "Scripts" } else { "bin" });
        let python = Python { bin };
        if has_pip(&python.python()) {
            return Ok(python);
        }
        let system = system_python()?;
        println!("   creating a Python environment in {}", dir.display());
        let make = || output(Command::new(&system).args(["-m", "venv", "--clear"]).arg(&dir));
        if let Err(error) = make() {
            // Debian packages `venv` separately from Python.
            crate::setup::apt_install(
                &["python3-venv"],
                &format!("Python cannot create an environment ({error:#})"),
            )?;
            make()?;
        }
        Ok(python)
    }

    /// A command that runs the environment's interpreter.
    pub(crate) fn python(&self) -> Command {
        Command::new(self.bin.join("python"))
    }

    /// A program that a package has installed.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// `PATH` with this environment first.
    pub(crate) fn path(&self) -> Result<OsString> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        Ok(std::env::join_paths(std::iter::once(self.bin.clone()).chain(std::env::split_paths(&path)))?)
    }
}

/// Whether the system's `python3` has pip, which is all that sdrun needs.
pub(crate) fn system_has_pip() -> bool {
    has_pip(&Command::new("python3"))
}

fn has_pip(python: &Command) -> bool {
    output(Command::new(python.get_program()).args(["-m", "pip", "--version"])).is_ok()
}

fn system_python() -> Result<PathBuf> {
    let mut found = Vec::new();
    for name in ["python3", "python"] {
        let script = "import sys; print(sys.version_info[0], sys.version_info[1])";
        let Ok(text) = output(Command::new(name).args(["-c", script])) else { continue };
        let mut numbers = text.split_whitespace().filter_map(|n| n.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version >= OLDEST {
            return Ok(Path::new(name).to_path_buf());
        }
        found.push(format!("{name} is {}.{}", version.0, version.1));
    }
    let found = if found.is_empty() { "there is none".into() } else { found.join(", ") };
    bail!("Python {}.{} or newer is needed, but {found}: install it and run this again", OLDEST.0, OLDEST.1)
}

//! Installs a baseline's packages.

use crate::Baseline;
use sdrun::{
    abi::{Error, ErrorCode, Host, Result},
    runtime::run_tool,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Marks a finished installation: the requirements that were installed.
pub(crate) const DONE: &str = "installed.txt";

/// Where a Python that the pinned packages support may be.
const PYTHONS: [&str; 5] = ["python3", "python3.13", "python3.12", "python3.14", "python"];

/// The interpreter of an environment.
pub(crate) fn python_of(folder: &Path) -> PathBuf {
    if cfg!(windows) { folder.join("env/Scripts/python.exe") } else { folder.join("env/bin/python") }
}

impl Baseline {
    /// Makes a Python environment with the baseline's packages, and replaces an earlier one. Uses `python`, or else searches the path for
    /// Python 3.12 to 3.14, which the pinned packages support. Needs the module `venv` and a package index. If the installation fails or
    /// is cancelled, nothing stays behind.
    ///
    /// # Errors
    /// `Unsupported` if sdrun cannot measure it; `FailedPrecondition` without such a Python, or with the end of the output of `venv` or
    /// `pip`; `Cancelled`; and what the system says about files.
    pub fn install(&self, data: &Path, python: Option<&Path>, host: &dyn Host) -> Result<()> {
        let adapter = self.adapter.map_err(Error::unsupported)?;
        let python = suitable(python)?;
        let folder = self.folder(data);
        self.remove(data)?;
        fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, &e))?;
        let done = fill(&folder, &python, adapter.requirements, host);
        if done.is_err() {
            // The error that led here matters more.
            let _ = fs::remove_dir_all(&folder);
        }
        done
    }

    /// Removes its environment, if there is one.
    ///
    /// # Errors
    /// What the system says about the folder.
    pub fn remove(&self, data: &Path) -> Result<()> {
        let folder = self.folder(data);
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|e| Error::io("remove", &folder, &e))?;
        }
        Ok(())
    }
}

/// Makes the environment in `folder` and installs the pinned packages.
fn fill(folder: &Path, python: &Path, requirements: &str, host: &dyn Host) -> Result<()> {
    let mut environment = Command::new(python);
    environment.args(["-m", "venv"]).arg(folder.join("env"));
    run(environment, "making an environment", host)?;
    let file = folder.join("requirements.txt");
    fs::write(&file, requirements).map_err(|e| Error::io("write", &file, &e))?;
    let mut pip = Command::new(python_of(folder));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    // The lists are complete; without this, some packages would bring gigabytes that a processor does not need.
    pip.args(["--no-deps", "-r"]).arg(&file);
    run(pip, "installing packages", host)?;
    let done = folder.join(DONE);
    fs::write(&done, requirements).map_err(|e| Error::io("write", &done, &e))
}

/// The first Python with `venv` in a version that the pinned packages support.
fn suitable(given: Option<&Path>) -> Result<PathBuf> {
    let suits = |python: &&Path| {
        let test = "import sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))";
        Command::new(python).args(["-c", test]).output().is_ok_and(|output| output.status.success())
    };
    let known = PYTHONS.map(Path::new);
    let candidates = given.as_slice().iter().copied().chain(known.into_iter().filter(|_| given.is_none()));
    candidates.into_iter().find(suits).map(Path::to_path_buf).ok_or_else(|| {
        let which =
            given.map_or("there is no Python".into(), |path| format!("{} is not Python", path.display()));
        Error::precondition(format!("{which} 3.12 to 3.14 with the module venv"))
    })
}

/// Runs a program to its end.
fn run(command: Command, phase: &str, host: &dyn Host) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let ended = run_tool(command, phase, host)
        .map_err(|e| Error::precondition(format!("cannot start {program}: {e}")))?
        .ok_or_else(|| Error::new(ErrorCode::Cancelled, "the installation was cancelled"))?;
    if ended.success {
        return Ok(());
    }
    Err(Error::precondition(format!("{phase} failed: {}", ended.last_words()))
        .with_hint("check the connection to the package index and the free disk space, then try again"))
}

//! The repository, its target folder, and helpers to run other programs.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

/// Where the repository and its target folder are.
pub(crate) struct Workspace {
    /// The repository.
    pub(crate) root: PathBuf,
    /// Cargo's target folder.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Asks cargo for both folders.
    pub(crate) fn find() -> Result<Self> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let root = root.parent().context("xtask has a parent folder")?.to_path_buf();
        let text = output(
            cargo().args(["metadata", "--no-deps", "--format-version=1", "--offline"]).current_dir(&root),
        )?;
        let metadata: Value = serde_json::from_str(&text).context("cargo metadata did not print JSON")?;
        let target =
            metadata["target_directory"].as_str().context("cargo metadata names no target folder")?;
        Ok(Workspace { root, target: target.into() })
    }

    /// Data folder (vendor runtimes) of every sdrun that xtask starts.
    pub(crate) fn data(&self) -> PathBuf {
        self.target.join("data")
    }

    /// Cache folder (built-in models, engines) of every sdrun that xtask starts.
    pub(crate) fn cache(&self) -> PathBuf {
        self.target.join("cache")
    }

    /// A cargo command in the repository.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = cargo();
        command.current_dir(&self.root);
        command
    }
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // `cargo run` sets environment variables for xtask's own package, which are wrong for programs started here.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

/// Prints a heading.
pub(crate) fn step(what: &str) {
    println!("\n== {what}");
}

/// Prints a command and runs it. Its output goes to the terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    println!("   {}", display(command));
    let status = command.stdin(Stdio::null()).status().with_context(|| cannot_start(command))?;
    if !status.success() {
        bail!("`{}` failed ({status})", display(command));
    }
    Ok(())
}

/// Runs a command and returns its output. If it fails, the error contains its error output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", display(command), output.status, words.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` did not write UTF-8", display(command)))
}

fn cannot_start(command: &Command) -> String {
    format!("cannot start `{}`", command.get_program().display())
}

/// A command as a user would type it.
pub(crate) fn display(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

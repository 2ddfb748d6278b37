//! `cargo xtask kit [RUNTIME…]`: sdrun and vendor runtimes for a machine without a network and without tools, in parts that fit where
//! large files do not.
//!
//! ```text
//! target/kit/run.sh              checks the parts, unpacks them, runs `sdrun selftest`
//! target/kit/SHA256SUMS
//! target/kit/kit.part-01 …       a tar archive, compressed, in pieces
//! ```

use crate::{
    dist::{Dist, sha256},
    setup,
    workspace::{Workspace, run, step},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    process::Command,
};

/// The most bytes of a part.
const PART: u64 = 60_000_000;

const RUN: &str = include_str!("kit.sh");

/// Packs `dist` and the runtimes with these names, installed before, into `target/kit`. Returns that folder.
pub(crate) fn pack(workspace: &Workspace, dist: &Dist, runtimes: &[&str]) -> Result<PathBuf> {
    step("Packing the kit");
    let folder = workspace.target.join("kit");
    let stage = folder.join("sdrun-kit");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot delete {}", folder.display()))?;
    }
    fs::create_dir_all(stage.join("data/runtimes"))
        .with_context(|| format!("cannot create {}", stage.display()))?;
    let mut copy = Command::new("cp");
    copy.arg("-a").args(dist.programs()).arg(dist.dir.join("providers")).arg(&stage);
    run(&mut copy)?;
    for name in runtimes {
        let root = setup::installed(workspace, dist, name)?;
        run(Command::new("cp").arg("-a").arg(root).arg(stage.join("data/runtimes")))?;
    }
    let archive = folder.join("kit.tar.gz");
    run(Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(&folder).arg("sdrun-kit"))?;
    fs::remove_dir_all(&stage)?;
    let parts = split(&archive, &folder)?;
    fs::remove_file(&archive)?;
    fs::write(folder.join("run.sh"), RUN)?;
    let mut sums = String::new();
    for file in parts.iter().map(String::as_str).chain(["run.sh"]) {
        sums += &format!("{}  {file}\n", sha256(&folder.join(file))?);
    }
    fs::write(folder.join("SHA256SUMS"), sums)?;
    for file in &parts {
        println!("   {:>8.1} MB  {file}", fs::metadata(folder.join(file))?.len() as f64 / 1e6);
    }
    println!("   in {}: copy all files into one folder there and run `sh run.sh`", folder.display());
    Ok(folder)
}

/// Cuts a file into parts of at most [`PART`] bytes. Returns their names.
fn split(archive: &Path, folder: &Path) -> Result<Vec<String>> {
    let mut whole = File::open(archive)?;
    let mut left = whole.metadata()?.len();
    let mut names = Vec::new();
    while left > 0 {
        let name = format!("kit.part-{:02}", names.len() + 1);
        let copied = io::copy(&mut whole.by_ref().take(PART), &mut File::create(folder.join(&name))?)?;
        ensure!(copied > 0, "{} ended early", archive.display());
        left -= copied;
        names.push(name);
    }
    Ok(names)
}

/// What `run.sh` may use: the tools of a POSIX system, and one program for checksums.
const TOOLS: [&str; 12] =
    ["sh", "cat", "cp", "cut", "dirname", "gzip", "mkdir", "mv", "rm", "sha256sum", "tar", "uname"];

/// Runs a kit as its user would: copied into a bare folder, with only [`TOOLS`] in the search path, and without a network where the
/// system lets us take it away.
pub(crate) fn try_out(kit: &Path, scratch: &Path, arguments: &[&str]) -> Result<()> {
    step("Running the kit in a bare folder");
    if scratch.exists() {
        fs::remove_dir_all(scratch)?;
    }
    let (tools, place, home) = (scratch.join("tools"), scratch.join("place"), scratch.join("home"));
    for folder in [&tools, &place, &home] {
        fs::create_dir_all(folder)?;
    }
    #[cfg(unix)]
    for tool in TOOLS {
        let found =
            ["/usr/bin", "/bin"].iter().map(|dir| Path::new(dir).join(tool)).find(|file| file.exists());
        let found = found.with_context(|| format!("there is no {tool}"))?;
        std::os::unix::fs::symlink(found, tools.join(tool))?;
    }
    for entry in fs::read_dir(kit)? {
        let file = entry?.path();
        fs::copy(&file, place.join(file.file_name().context("a file has a name")?))?;
    }
    let unshare = || {
        let mut command = Command::new("/usr/bin/unshare");
        command.args(["--net", "--map-root-user"]);
        command
    };
    let mut command = if unshare().arg("true").status().is_ok_and(|status| status.success()) {
        let mut command = unshare();
        command.arg("sh");
        command
    } else {
        println!("   with a network: this system does not let us take it away");
        Command::new("sh")
    };
    command.arg(place.join("run.sh")).args(arguments).current_dir(&home);
    command.env_clear().env("PATH", &tools).env("HOME", &home);
    run(&mut command)
}

//! MIGraphX for tests, from Debian's packages. AMD publishes no archive of it. Debian sid's build runs on any x86-64 Linux if it
//! is started with its own C library.
//!
//! Keeps only the reference interpreter (`ref`): 93 MB of libraries from 29 MB of packages, without ROCm.

use crate::workspace::{Workspace, output, run, step};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The provider's environment variable, and the one that adds the interpreter to its devices.
pub(crate) const VARIABLES: [&str; 2] = ["SDRUN_MIGRAPHX_DIR", "SDRUN_MIGRAPHX_REF"];

const PACKAGES: [&str; 8] = [
    "migraphx-tools",
    "libmigraphx-c3",
    "libprotobuf32t64",
    "libsqlite3-0",
    "libstdc++6",
    "libgcc-s1",
    "zlib1g",
    "libc6",
];

/// Folders with libraries in the packages.
const FOLDERS: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/migraphx/lib"];

/// Libraries for the GPU (375 MB), and the Python module.
const LEFT_OUT: [&str; 3] = ["*libmigraphx_device*", "*libmigraphx_gpu*", "*libmigraphx_py*"];

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The folder of MIGraphX's libraries in the target folder. Creates it if it is missing. Prints the reason and returns `None` if
/// it cannot be created here.
pub(crate) fn migraphx(workspace: &Workspace) -> Result<Option<PathBuf>> {
    step("MIGraphX for tests");
    if let Some(dir) = std::env::var_os(VARIABLES[0]) {
        println!("   ${} is {}", VARIABLES[0], dir.display());
        return Ok(Some(dir.into()));
    }
    let dir = workspace.data().join("runtimes").join("migraphx-debian");
    if dir.is_dir() {
        println!("   found {}", dir.display());
        return Ok(Some(dir));
    }
    if let Err(why) = possible() {
        println!("   skipped, with every test that needs it: {why}");
        return Ok(None);
    }
    println!("   downloading 29 MB of packages from Debian sid into {}", dir.display());
    let stage = workspace.target.join(format!("migraphx.{}", std::process::id()));
    let made = assemble(&stage);
    if made.is_ok() {
        let parent = dir.parent().context("the folder has a parent")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        fs::rename(stage.join("lib"), &dir)
            .with_context(|| format!("cannot move {} into place", stage.display()))?;
    }
    fs::remove_dir_all(&stage).with_context(|| format!("cannot delete {}", stage.display()))?;
    made.map(|()| Some(dir)).context("cannot assemble MIGraphX out of Debian's packages")
}

fn possible() -> Result<()> {
    if (std::env::consts::OS, std::env::consts::ARCH) != ("linux", "x86_64") {
        bail!("Debian builds MIGraphX for x86-64 Linux only");
    }
    for program in ["apt-get", "dpkg-deb", "tar"] {
        if output(Command::new(program).arg("--version")).is_err() {
            bail!("there is no `{program}`: downloading the packages needs Debian's own tools");
        }
    }
    if !Path::new(KEYRING).is_file() {
        crate::setup::apt_install(&["debian-archive-keyring"], "Debian's keys are missing")?;
    }
    Ok(())
}

/// Fetches and unpacks the packages. Afterwards the libraries are in `stage/lib`.
fn assemble(stage: &Path) -> Result<()> {
    let make = |name: &str| -> Result<PathBuf> {
        let dir = stage.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(dir)
    };
    let (lists, packages, root, lib) =
        (make("lists/partial")?, make("packages")?, make("root")?, make("lib")?);
    let write = |name: &str, text: String| -> Result<PathBuf> {
        let file = stage.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    };
    // A separate configuration, so apt neither reads nor changes the system's package lists.
    let source = format!(
        "Types: deb\nURIs: http://deb.debian.org/debian\nSuites: sid\nComponents: main\nArchitectures: amd64\n\
         Signed-By: {KEYRING}\n"
    );
    let source = write("sid.sources", source)?;
    let status = write("status", String::new())?;
    let configuration = format!(
        "APT::Architecture \"amd64\";\nAPT::Architectures {{ \"amd64\"; }};\nAPT::Sandbox::User \"\";\n\
         Acquire::Languages \"none\";\nDir::Etc::sourcelist \"{}\";\nDir::Etc::sourceparts \"-\";\n\
         Dir::State::lists \"{}\";\nDir::State::status \"{}\";\nDir::Cache \"{}\";\n",
        source.display(),
        lists.parent().unwrap_or(&lists).display(),
        status.display(),
        stage.display()
    );
    let configuration = write("apt.conf", configuration)?;
    let apt = |arguments: &[&str]| {
        run(Command::new("apt-get")
            .env("APT_CONFIG", &configuration)
            .current_dir(&packages)
            .arg("--quiet=2")
            .args(arguments))
    };
    apt(&["update"])?;
    apt(&[&["download"], &PACKAGES[..]].concat())?;
    let mut unpacked = 0;
    for entry in fs::read_dir(&packages)? {
        unpack(&entry?.path(), &root)?;
        unpacked += 1;
    }
    ensure!(unpacked == PACKAGES.len(), "apt downloaded {unpacked} packages instead of {}", PACKAGES.len());
    for folder in FOLDERS {
        for entry in fs::read_dir(root.join(folder)).with_context(|| format!("the packages lack {folder}"))? {
            let path = entry?.path();
            let name = path.file_name().context("a file has a name")?;
            if name.to_string_lossy().contains(".so") && (path.is_symlink() || path.is_file()) {
                let to = lib.join(name);
                fs::rename(&path, &to).with_context(|| format!("cannot move {}", path.display()))?;
            }
        }
    }
    for name in ["libmigraphx_c.so.3", "ld-linux-x86-64.so.2"] {
        ensure!(lib.join(name).is_file(), "the packages lack {name}");
    }
    Ok(())
}

/// Unpacks a package through a pipe, because most of the largest one is never written.
fn unpack(package: &Path, root: &Path) -> Result<()> {
    let mut archive = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start `dpkg-deb`")?;
    let pipe = archive.stdout.take().context("dpkg-deb has an output")?;
    let status = Command::new("tar")
        .args(["--extract", "--no-same-owner", "--directory"])
        .arg(root)
        .args(LEFT_OUT.map(|pattern| format!("--exclude={pattern}")))
        .stdin(pipe)
        .status()
        .context("cannot start `tar`")?;
    let read = archive.wait()?;
    ensure!(status.success() && read.success(), "cannot unpack {}", package.display());
    Ok(())
}

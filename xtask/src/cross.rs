//! Compilers for other systems on Linux, and what runs their programs there: MinGW-w64 and Wine for Windows, GCC and QEMU for ARM, zig for
//! Apple's systems, whose programs run nowhere else.

use crate::{
    dist::host_triple,
    python::{Packages, Python},
    setup::apt_install,
    workspace::{Workspace, output, run, step},
};
use anyhow::{Context, Result, bail, ensure};
use std::{env, ffi::OsString, fs, path::Path, process::Command};

/// Windows on x86-64.
pub(crate) const WINDOWS: &str = "x86_64-pc-windows-gnu";
/// Linux on ARM.
pub(crate) const ARM: &str = "aarch64-unknown-linux-gnu";
/// macOS on Apple silicon and on Intel.
pub(crate) const APPLE: [&str; 2] = ["aarch64-apple-darwin", "x86_64-apple-darwin"];

/// Whether this machine needs no cross-compiler or emulator for a target.
fn is_native(triple: &str) -> Result<bool> {
    Ok(!cfg!(target_os = "linux") || triple == host_triple()?)
}

/// `cargo COMMAND --target TRIPLE`. Installs missing compilers, and keeps variables that you have set.
pub(crate) fn cargo(workspace: &Workspace, triple: &str, mut command: &str) -> Result<Command> {
    let mut cargo = workspace.cargo();
    if !is_native(triple)? {
        step(&format!("Compilers for {triple}"));
        standard_library(triple)?;
        if APPLE.contains(&triple) {
            // zig brings Apple's C library; xtask/apple declares the rest.
            cargo.env("PATH", Python::with(workspace, Packages::Apple)?.path()?);
            cargo.env("SDKROOT", workspace.root.join("xtask/apple"));
            command = "zigbuild";
        } else {
            let [gcc, gxx] = compilers(triple)?;
            let key = triple.replace('-', "_");
            let linker = format!("CARGO_TARGET_{}_LINKER", key.to_uppercase());
            let variables = [(format!("CC_{key}"), &gcc), (format!("CXX_{key}"), &gxx), (linker, &gcc)];
            cargo.envs(variables.into_iter().filter(|(name, _)| env::var_os(name).is_none()));
        }
    }
    cargo.args([command, "--target", triple]);
    Ok(cargo)
}

/// GCC for C and for C++.
fn compilers(triple: &str) -> Result<[String; 2]> {
    let (prefix, suffix, package) = match triple {
        WINDOWS => ("x86_64-w64-mingw32", "-posix", "g++-mingw-w64-x86-64-posix"),
        ARM => ("aarch64-linux-gnu", "", "g++-aarch64-linux-gnu"),
        _ => {
            bail!("there are compilers for {WINDOWS}, {ARM}, {} and {}, not for {triple}", APPLE[0], APPLE[1])
        }
    };
    let found = ["gcc", "g++"].map(|name| format!("{prefix}-{name}{suffix}"));
    if output(Command::new(&found[1]).arg("--version")).is_err() {
        apt_install(&[package], &format!("{} is missing", found[1]))?;
    }
    Ok(found)
}

fn standard_library(triple: &str) -> Result<()> {
    let folder = output(Command::new("rustc").args(["--print", "target-libdir", "--target", triple]))?;
    if Path::new(folder.trim()).is_dir() {
        return Ok(());
    }
    run(Command::new("rustup").args(["target", "add", triple]))
}

/// The variables with which cargo runs programs of a target here.
pub(crate) fn runner(workspace: &Workspace, triple: &str) -> Result<Vec<(String, OsString)>> {
    let name = format!("CARGO_TARGET_{}_RUNNER", triple.replace('-', "_").to_uppercase());
    match triple {
        _ if is_native(triple)? => Ok(Vec::new()),
        WINDOWS => {
            let mut environment = wine(workspace)?;
            environment.push((name, "wine".into()));
            Ok(environment)
        }
        ARM => {
            if output(Command::new("qemu-aarch64").arg("--version")).is_err() {
                apt_install(&["qemu-user"], "qemu-aarch64 is missing")?;
            }
            Ok(vec![(name, "qemu-aarch64 -L /usr/aarch64-linux-gnu".into())])
        }
        _ => bail!("programs for {triple} do not run here"),
    }
}

/// Wine with a C: drive in the target folder.
fn wine(workspace: &Workspace) -> Result<Vec<(String, OsString)>> {
    if output(Command::new("wine").arg("--version")).is_err() {
        apt_install(&["wine", "wine64"], "Wine is missing")?;
    }
    let folder = workspace.target.join("tools/wine");
    let environment = vec![
        ("WINEPREFIX".to_string(), folder.clone().into_os_string()),
        // No messages, and no windows that ask to install more.
        ("WINEDEBUG".to_string(), "-all".into()),
        ("WINEDLLOVERRIDES".to_string(), "mscoree,mshtml=".into()),
        // Wine 8 sometimes cannot start a program while it starts another ("Internal error", 1359).
        ("RUST_TEST_THREADS".to_string(), "1".into()),
    ];
    let system = folder.join("drive_c/windows/system32");
    let random = system.join("bcryptprimitives.dll");
    if !random.exists() {
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        // `output` hides its warning about missing 32-bit support.
        output(Command::new("wine").args(["wineboot", "--init"]).envs(environment.clone()))?;
        ensure!(system.is_dir(), "Wine made no C: drive in {}", folder.display());
    }
    if !random.exists() {
        let source = workspace.root.join("xtask/wine/bcryptprimitives.c");
        let [gcc, _] = compilers(WINDOWS)?;
        run(Command::new(gcc).args(["-shared", "-O1", "-o"]).arg(&random).arg(source).arg("-ladvapi32"))?;
    }
    Ok(environment)
}

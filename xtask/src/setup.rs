//! Installs what is missing and says so first. Everything goes into the target folder except system packages. Those are
//! installed only for root on Debian and its derivatives; other users are told what to install.

use crate::{
    dist::Dist,
    python::{Packages, Python, system_has_pip},
    workspace::{Workspace, output, run, step},
};
use anyhow::{Context, Result, bail};
use sdrun_abi::RuntimeSpec;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The C and C++ compilers, which build the ggml provider.
pub(crate) fn compilers() -> Result<()> {
    let works = |variable: &str, default: &str| {
        let program = std::env::var_os(variable).unwrap_or_else(|| default.into());
        output(Command::new(program).arg("--version")).is_ok()
    };
    if works("CC", "cc") && works("CXX", "c++") {
        return Ok(());
    }
    apt_install(
        &["gcc", "g++", "libc6-dev"],
        "the C or the C++ compiler is missing (`cc`, `c++`, or $CC, $CXX)",
    )
}

/// A subcommand of cargo: the one that is installed, or else one that this builds and puts into the target folder.
pub(crate) fn cargo_tool(workspace: &Workspace, name: &str, version: &str) -> Result<PathBuf> {
    let own = workspace.target.join("tools/bin").join(name);
    let works =
        |program: &Path| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if let Some(found) = [Path::new(name), &own].into_iter().find(|program| works(program)) {
        return Ok(found.to_path_buf());
    }
    println!("   {name} is missing; installing it into {}", own.display());
    let mut cargo = workspace.cargo();
    cargo.args(["install", "--locked", "--quiet", "--debug", "--root"]);
    cargo.arg(workspace.target.join("tools")).arg(format!("{name}@{version}"));
    // It runs once, and debug information takes a third of the build time.
    run(cargo.env("CARGO_PROFILE_DEV_DEBUG", "0")).with_context(|| format!("cannot install {name}"))?;
    Ok(own)
}

/// Valgrind, which checks how the C library treats memory.
pub(crate) fn valgrind() -> Result<()> {
    match output(Command::new("valgrind").arg("--version")) {
        Ok(_) => Ok(()),
        Err(_) => apt_install(&["valgrind", "libc6-dbg"], "valgrind is missing"),
    }
}

/// The vendor runtimes of all plugins in `dist`, through `sdrun runtime install`.
pub(crate) fn runtimes(workspace: &Workspace, dist: &Dist) -> Result<()> {
    step("Vendor runtimes");
    specs(dist).try_for_each(|spec| install(workspace, dist, spec, &workspace.data()))
}

/// Installs a runtime or an extension into a data folder, unless it is there.
fn install(workspace: &Workspace, dist: &Dist, spec: &RuntimeSpec, data: &Path) -> Result<()> {
    let dir = runtime_root(data, spec);
    if dir.is_dir() {
        println!("   found {} {}", spec.name, spec.version);
        return Ok(());
    }
    println!("   {} {} is missing; installing it into {}", spec.name, spec.version, dir.display());
    let mut sdrun = dist.sdrun(workspace);
    if !system_has_pip() {
        sdrun.env("PATH", Python::bare(workspace)?.path()?);
    }
    run(sdrun.args(["runtime", "install", &spec.name, "--yes"]).env("SDRUN_DATA_DIR", data))
}

/// For every vendor runtime: the environment variable that names its folder, and the folder.
pub(crate) fn runtime_dirs<'a>(workspace: &Workspace, dist: &'a Dist) -> Vec<(&'a str, PathBuf)> {
    specs(dist)
        .filter_map(|spec| {
            let libraries = &spec.pip.as_ref()?.library_dir;
            Some((spec.env.as_str(), runtime_root(&workspace.data(), spec).join(libraries)))
        })
        .collect()
}

/// Runtimes that pip can install.
fn specs(dist: &Dist) -> impl Iterator<Item = &RuntimeSpec> {
    dist.manifests.iter().filter_map(|m| m.provider.runtime.as_ref()).filter(|spec| spec.pip.is_some())
}

/// Names of the runtimes that pip can install.
pub(crate) fn names(dist: &Dist) -> Vec<&str> {
    specs(dist).map(|spec| spec.name.as_str()).collect()
}

/// The folder of an installed runtime.
pub(crate) fn installed(workspace: &Workspace, dist: &Dist, name: &str) -> Result<PathBuf> {
    let known = || format!("there is no runtime `{name}`; there are {}", names(dist).join(", "));
    let root =
        runtime_root(&workspace.data(), specs(dist).find(|spec| spec.name == name).with_context(known)?);
    if !root.is_dir() {
        bail!("{name} is not installed in {}", root.display());
    }
    Ok(root)
}

fn runtime_root(data: &Path, spec: &RuntimeSpec) -> PathBuf {
    data.join("runtimes").join(format!("{}-{}", spec.name, spec.version))
}

/// The ONNX backend node tests as files, written once per version of the package `onnx`.
pub(crate) fn node_tests(workspace: &Workspace) -> Result<PathBuf> {
    step("ONNX node tests");
    let python = Python::with(workspace, Packages::Test)?;
    let version = output(python.python().args(["-c", "import onnx; print(onnx.__version__)"]))?;
    let dir = workspace.target.join(format!("onnx-node-tests-{}", version.trim()));
    if dir.is_dir() {
        println!("   found {}", dir.display());
        return Ok(dir);
    }
    println!("   writing {}", dir.display());
    let stage = workspace.target.join(format!("onnx-node-tests.{}", std::process::id()));
    let script = workspace.root.join("xtask/python/node_tests.py");
    // Generating the tests divides by zero on purpose; hide numpy's warnings.
    run(python.python().args(["-W", "ignore"]).arg(script).arg(&stage))?;
    fs::rename(&stage, &dir).with_context(|| format!("cannot move {} into place", stage.display()))?;
    Ok(dir)
}

/// Environment variables for ggml's Vulkan backend, and for a driver that needs no graphics card (Mesa's software driver).
pub(crate) fn vulkan(workspace: &Workspace, dist: &Dist) -> Result<Vec<(&'static str, PathBuf)>> {
    step("Vulkan backend of ggml, on Mesa's software driver");
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("the package with ggml's Vulkan backend is for x86-64 Linux");
    }
    let driver = Path::new("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json");
    if !driver.exists() {
        apt_install(&["mesa-vulkan-drivers", "libvulkan1"], "there is no software driver for Vulkan")?;
    }
    Ok(vec![
        ("SDRUN_GGML_BACKENDS", extension(workspace, dist, "ggml-vulkan")?),
        ("VK_ICD_FILENAMES", driver.to_path_buf()),
        // ggml ignores drivers that compute on the CPU unless they are named.
        ("GGML_VK_VISIBLE_DEVICES", "0".into()),
        // Otherwise operands of f32 products are rounded to f16.
        ("GGML_VK_DISABLE_F16", "1".into()),
    ])
}

/// Environment variables for ONNX Runtime's extension for WebGPU, and for a driver that needs no graphics card: SwiftShader, which
/// Chromium brings. WebGPU refuses Mesa's.
pub(crate) fn webgpu(workspace: &Workspace, dist: &Dist) -> Result<Vec<(&'static str, PathBuf)>> {
    step("ONNX Runtime's extension for WebGPU, on SwiftShader");
    if !cfg!(target_os = "linux") {
        bail!("SwiftShader comes from a package of Debian's");
    }
    let driver = Path::new("/usr/lib/chromium/vk_swiftshader_icd.json");
    if !driver.exists() {
        apt_install(&["chromium", "libvulkan1"], "there is no software driver for WebGPU")?;
    }
    Ok(vec![
        ("SDRUN_ONNXRUNTIME_WEBGPU_DIR", extension(workspace, dist, "onnxruntime-webgpu")?),
        ("VK_ICD_FILENAMES", driver.to_path_buf()),
        ("VK_DRIVER_FILES", driver.to_path_buf()),
        ("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1".into()),
    ])
}

/// The environment variable for ONNX Runtime's extension for OpenVINO, which needs no device but one of Intel's CPUs.
pub(crate) fn openvino(workspace: &Workspace, dist: &Dist) -> Result<Vec<(&'static str, PathBuf)>> {
    step("ONNX Runtime's extension for OpenVINO");
    if !cfg!(target_arch = "x86_64") {
        bail!("the package is for x86-64");
    }
    // 1.8.1 looks at the vendor, although OpenVINO itself runs on AMD's processors.
    if fs::read_to_string("/proc/cpuinfo").is_ok_and(|processors| !processors.contains("GenuineIntel")) {
        bail!("the extension lists no device on this processor, only on Intel's");
    }
    Ok(vec![("SDRUN_ONNXRUNTIME_OPENVINO_DIR", extension(workspace, dist, "onnxruntime-openvino")?)])
}

/// The folder of an extension's libraries. It is installed into a data folder of its own, because other tests expect the devices of a
/// machine without it.
fn extension(workspace: &Workspace, dist: &Dist, name: &str) -> Result<PathBuf> {
    let data = workspace.target.join("extensions");
    let mut all = dist.manifests.iter().flat_map(|m| &m.provider.extensions);
    let spec = all.find(|spec| spec.name == name).with_context(|| format!("no provider has {name}"))?;
    install(workspace, dist, spec, &data)?;
    let libraries = &spec.pip.as_ref().with_context(|| format!("{name} has no package"))?.library_dir;
    Ok(runtime_root(&data, spec).join(libraries))
}

/// Installs system packages with apt-get if the user is root; else says what to install. `why` is the reason.
pub(crate) fn apt_install(packages: &[&str], why: &str) -> Result<()> {
    let names = packages.join(" ");
    let root = output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    if !root || !Path::new("/usr/bin/apt-get").exists() {
        bail!("{why}: install it (Debian and Ubuntu: `sudo apt-get install {names}`) and run this again");
    }
    println!("   {why}: installing {names} with apt-get");
    run(Command::new("apt-get").args(["update", "--quiet", "--quiet"]))?;
    run(Command::new("apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["install", "--quiet", "--quiet", "--yes", "--no-install-recommends"])
        .args(packages))
}

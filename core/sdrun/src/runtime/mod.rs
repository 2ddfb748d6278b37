//! Finds, lists, installs and removes vendor runtimes. Everything vendor-specific comes from the plugins' manifests.

mod install;
mod seal;
mod tool;
mod wheel;

pub use install::{install, install_from};
pub(crate) use seal::sha256;
pub use tool::{Ended, run_tool};

use crate::{Error, Paths, Result, trust};
use sdrun_abi::{Error as AbiError, ErrorCode, PipPackage, RuntimeSpec, Wheel};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A place that may hold a runtime, and whether it does.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// The folder.
    pub dir: PathBuf,
    /// Why this folder is searched.
    pub origin: String,
    /// The library that identifies the runtime, if found.
    pub library: Option<PathBuf>,
}

/// All places to look for `spec`'s runtime, in order: its environment variable (which replaces the rest), the user's
/// data folder, then the system's library folders.
pub fn candidates(spec: &RuntimeSpec, paths: &Paths) -> Vec<Candidate> {
    if let Some(given) = given(spec) {
        return vec![given];
    }
    let system = system_dirs().into_iter().map(|dir| look(spec, dir, "system"));
    installed(spec, paths).into_iter().chain(system.filter(|candidate| candidate.library.is_some())).collect()
}

/// The folder that the runtime's environment variable names.
fn given(spec: &RuntimeSpec) -> Option<Candidate> {
    Some(look(spec, PathBuf::from(trust::environment(&spec.env)?), &spec.env))
}

/// The folder of the runtime's libraries in the user's data folder, if it can be installed there.
fn installed(spec: &RuntimeSpec, paths: &Paths) -> Option<Candidate> {
    let pip = spec.pip.as_ref()?;
    Some(look(spec, install_dir(spec, paths).join(&pip.library_dir), "installed by sdrun"))
}

fn look(spec: &RuntimeSpec, dir: PathBuf, origin: &str) -> Candidate {
    Candidate { library: find_library(&dir, &spec.library_names), dir, origin: origin.to_string() }
}

/// The folder to load the runtime from: the first candidate that has the library.
pub fn find(spec: &RuntimeSpec, paths: &Paths) -> Option<Candidate> {
    candidates(spec, paths).into_iter().find(|c| c.library.is_some())
}

/// The folder to load an extension from, if there is one. The system's folders are not searched: an extension has to suit the
/// runtime.
///
/// # Errors
/// `NotFound` if its environment variable names a folder without it.
pub fn find_extension(spec: &RuntimeSpec, paths: &Paths) -> Result<Option<Candidate>> {
    match given(spec) {
        Some(Candidate { dir, library: None, .. }) => {
            let names = spec.library_names.join(", ");
            let message = format!("{} names {}, where there is no {names}", spec.env, dir.display());
            Err(AbiError::not_found(message).with_file(dir).into())
        }
        Some(candidate) => Ok(Some(candidate)),
        None => Ok(installed(spec, paths).filter(|candidate| candidate.library.is_some())),
    }
}

/// Checks a runtime before its code is loaded. Only root and the user may be able to change the folder and its libraries, and the files
/// of a runtime that sdrun installed must be unchanged. In the system's folders, which only root can fill, checks the runtime's own
/// library alone.
///
/// # Errors
/// `PermissionDenied`, `DataLoss`.
pub(crate) fn check(found: &Candidate, spec: &RuntimeSpec, paths: &Paths) -> Result<()> {
    let files = match system_dirs().contains(&found.dir) {
        true => found.library.iter().cloned().collect(),
        false => libraries(&found.dir)?,
    };
    for file in &files {
        trust::check_owner(file).map_err(|why| {
            let message = format!("will not load {} from {}: {why}", spec.name, found.dir.display());
            AbiError::new(ErrorCode::PermissionDenied, message).with_file(file)
        })?;
    }
    let dir = install_dir(spec, paths);
    if found.dir.starts_with(&dir) { seal::check(&dir) } else { Ok(()) }
}

/// The shared libraries of a folder, with and without versions in their names.
fn libraries(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e: std::io::Error| Error::io("list", dir, &e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.contains(std::env::consts::DLL_SUFFIX) && path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}

fn system_dirs() -> Vec<PathBuf> {
    let dirs: &[&str] = if cfg!(target_os = "linux") {
        &[
            "/usr/local/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/opt/rocm/lib",
        ]
    } else if cfg!(target_os = "macos") {
        &["/opt/homebrew/lib", "/usr/local/lib"]
    } else {
        &[]
    };
    dirs.iter().map(PathBuf::from).collect()
}

/// The newest file (by name) in `dir` that matches one of `patterns`.
fn find_library(dir: &Path, patterns: &[String]) -> Option<PathBuf> {
    let patterns: Vec<glob::Pattern> = patterns.iter().filter_map(|p| glob::Pattern::new(p).ok()).collect();
    let mut names: Vec<PathBuf> = std::fs::read_dir(dir)
        .ok()?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            patterns.iter().any(|pattern| pattern.matches(name)) && p.is_file()
        })
        .collect();
    names.sort();
    names.pop()
}

/// Folder of an installed runtime.
pub fn install_dir(spec: &RuntimeSpec, paths: &Paths) -> PathBuf {
    paths.runtimes().join(format!("{}-{}", spec.name, spec.version))
}

/// What an installation downloads, and the space it takes.
#[derive(Clone, Debug, Serialize)]
pub struct InstallPlan {
    /// The package of the runtime, then those whose libraries it links.
    pub packages: Vec<Package>,
    /// Target folder.
    pub dir: PathBuf,
    /// Whether it is already installed.
    pub installed: bool,
}

/// A package to install.
#[derive(Clone, Debug, Serialize)]
pub struct Package {
    /// Package and version, in pip's notation.
    pub requirement: String,
    /// The wheel for this machine.
    pub wheel: Wheel,
    #[serde(skip)]
    pip: PipPackage,
}

impl Package {
    /// `Unimplemented` if the package has no wheel for this machine.
    fn of(spec: &RuntimeSpec, pip: &PipPackage) -> Result<Self> {
        let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
        let (package, version) = (&pip.package, pip.version.as_ref().unwrap_or(&spec.version));
        let wheel = pip.wheels.iter().find(|w| w.os == os && w.arch == arch).cloned().ok_or_else(|| {
            AbiError::unsupported(format!("the package {package} {version} has no build for {os} {arch}"))
                .with_hint(spec.without_a_package())
        })?;
        Ok(Package { requirement: format!("{package}=={version}"), wheel, pip: pip.clone() })
    }
}

/// Plans the installation of `spec`'s runtime on this machine. `Unimplemented` if there is no package for it.
pub fn plan(spec: &RuntimeSpec, paths: &Paths) -> Result<InstallPlan> {
    let pip = spec.pip.as_ref().ok_or_else(|| {
        AbiError::unsupported(format!("{} cannot be installed by sdrun", spec.name))
            .with_hint(spec.without_a_package())
    })?;
    let packages =
        [pip].into_iter().chain(&pip.needs).map(|pip| Package::of(spec, pip)).collect::<Result<_>>()?;
    let dir = install_dir(spec, paths);
    let library = find_library(&dir.join(&pip.library_dir), &spec.library_names);
    Ok(InstallPlan { packages, installed: library.is_some() && seal::is_sealed(&dir), dir })
}

impl InstallPlan {
    /// The same, with the parts that only graphics cards need.
    ///
    /// # Errors
    /// `Unimplemented` if the package for this machine has none.
    pub fn with_gpu(mut self) -> Result<Self> {
        let main = &mut self.packages[0];
        if main.wheel.gpu_bytes == 0 {
            let message = format!("{} has no parts for graphics cards here", main.requirement);
            return Err(AbiError::unsupported(message).with_hint("install it without them").into());
        }
        let there = |pattern: &String| {
            let file = Path::new(pattern).file_name().map(|name| name.to_string_lossy().into_owned());
            find_library(&self.dir.join(&main.pip.library_dir), &[file.unwrap_or_default()]).is_some()
        };
        self.installed = self.installed && main.pip.gpu.iter().any(there);
        main.pip.keep.append(&mut main.pip.gpu);
        main.wheel.installed_bytes += main.wheel.gpu_bytes;
        Ok(self)
    }

    /// All packages and versions, in pip's notation.
    pub fn requirements(&self) -> String {
        let all: Vec<&str> = self.packages.iter().map(|package| &*package.requirement).collect();
        all.join(", ")
    }

    /// Bytes to download.
    pub fn download_bytes(&self) -> u64 {
        self.packages.iter().map(|package| package.wheel.download_bytes).sum()
    }

    /// Bytes on disk after installation.
    pub fn installed_bytes(&self) -> u64 {
        self.packages.iter().map(|package| package.wheel.installed_bytes).sum()
    }

    /// `ResourceExhausted` if the disk has no room for both the package and its unpacked files, which exist side by side
    /// for a moment.
    pub fn check_room(&self) -> Result<()> {
        let needed = self.download_bytes() + self.installed_bytes();
        let there = self.dir.ancestors().find(|d| d.exists()).unwrap_or(&self.dir);
        let free = fs4::available_space(there).map_err(|e| Error::io("find the free space of", there, &e))?;
        if free >= needed {
            return Ok(());
        }
        let message = format!(
            "{} needs about {needed} bytes in {}, where {free} are free",
            self.requirements(),
            there.display()
        );
        Err(AbiError::new(ErrorCode::ResourceExhausted, message)
            .with_file(there)
            .with_hint("free some space, or choose another folder with SDRUN_DATA_DIR")
            .into())
    }
}

/// Deletes an installed runtime. Returns whether there was one.
pub fn remove(spec: &RuntimeSpec, paths: &Paths) -> Result<bool> {
    let dir = install_dir(spec, paths);
    match std::fs::remove_dir_all(&dir) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("delete", &dir, &e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn paths(root: &Path) -> Paths {
        Paths { data: root.join("data"), cache: root.join("cache") }
    }
    fn spec(env: &str) -> RuntimeSpec {
        RuntimeSpec {
            name: "thing".into(),
            version: "1.2".into(),
            env: env.into(),
            library_names: vec!["libthing.so.*".into()],
            pip: Some(PipPackage {
                gpu: vec!["thing/libs/libthing_gpu.so".into()],
                package: "thing".into(),
                version: None,
                keep: vec!["thing/libs/libthing.so.*".into()],
                library_dir: "thing/libs".into(),
                wheels: vec![],
                needs: vec![],
            }),
            by_hand: None,
        }
    }

    #[test]
    fn finds_the_installed_runtime_and_the_newest_library() {
        let root = tempfile::tempdir().unwrap();
        let (paths, spec) = (paths(root.path()), spec("SDRUN_TEST_UNSET_VARIABLE"));
        assert!(find(&spec, &paths).is_none());
        let libs = install_dir(&spec, &paths).join("thing/libs");
        std::fs::create_dir_all(&libs).unwrap();
        for name in ["libthing.so.1", "libthing.so.2", "libother.so.3"] {
            std::fs::write(libs.join(name), b"").unwrap();
        }
        assert_eq!(find(&spec, &paths).unwrap().library.unwrap(), libs.join("libthing.so.2"));
        assert!(remove(&spec, &paths).unwrap());
        assert!(!remove(&spec, &paths).unwrap());
    }

    #[test]
    fn extensions_are_used_where_they_were_installed_or_where_the_user_says() {
        let root = tempfile::tempdir().unwrap();
        let (paths, spec) = (paths(root.path()), spec("SDRUN_TEST_UNSET_VARIABLE"));
        assert!(find_extension(&spec, &paths).unwrap().is_none());
        let libs = install_dir(&spec, &paths).join("thing/libs");
        std::fs::create_dir_all(&libs).unwrap();
        std::fs::write(libs.join("libthing.so.1"), b"").unwrap();
        assert_eq!(find_extension(&spec, &paths).unwrap().unwrap().dir, libs);
        // `PATH` names no folder, and certainly none with the library.
        let elsewhere = RuntimeSpec { env: "PATH".into(), ..spec };
        let error = find_extension(&elsewhere, &paths).unwrap_err();
        assert_eq!(error.code(), ErrorCode::NotFound);
        assert!(error.to_string().starts_with("PATH names "), "{error}");
    }

    #[test]
    fn parts_for_graphics_cards_are_installed_on_request() {
        let root = tempfile::tempdir().unwrap();
        let (paths, mut spec) = (paths(root.path()), spec("SDRUN_THING_DIR"));
        let wheel = Wheel {
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            python: "312".into(),
            platforms: vec!["any".into()],
            sha256: String::new(),
            download_bytes: 1,
            installed_bytes: 2,
            gpu_bytes: 40,
        };
        let plan_of = |spec: &mut RuntimeSpec, gpu_bytes| {
            spec.pip.as_mut().unwrap().wheels = vec![Wheel { gpu_bytes, ..wheel.clone() }];
            plan(spec, &paths).unwrap()
        };
        let error = plan_of(&mut spec, 0).with_gpu().unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unimplemented);
        let without = plan_of(&mut spec, 40);
        assert!(!without.packages[0].pip.keep.iter().any(|pattern| pattern.contains("gpu")));
        let with = without.with_gpu().unwrap();
        assert!(with.packages[0].pip.keep.contains(&"thing/libs/libthing_gpu.so".into()));
        assert_eq!(with.installed_bytes(), 42);

        // What is there without them is not what was asked for.
        let libs = with.dir.join("thing/libs");
        std::fs::create_dir_all(&libs).unwrap();
        std::fs::write(libs.join("libthing.so.1"), b"").unwrap();
        seal::seal(&with.dir).unwrap();
        assert!(plan_of(&mut spec, 40).installed && !plan_of(&mut spec, 40).with_gpu().unwrap().installed);
        std::fs::write(libs.join("libthing_gpu.so"), b"").unwrap();
        assert!(plan_of(&mut spec, 40).with_gpu().unwrap().installed);
    }

    #[test]
    fn without_a_package_the_hint_says_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let error = plan(&spec("SDRUN_THING_DIR"), &paths(root.path())).unwrap_err();
        assert!(error.hint().unwrap().to_string().contains("SDRUN_THING_DIR"), "{error}");
        let words =
            RuntimeSpec { pip: None, by_hand: Some("ask its vendor".into()), ..spec("SDRUN_THING_DIR") };
        let error = plan(&words, &paths(root.path())).unwrap_err();
        let hint = error.hint().unwrap().to_string();
        assert!(hint.contains("ask its vendor") && hint.contains("SDRUN_THING_DIR"), "{hint}");
    }
}

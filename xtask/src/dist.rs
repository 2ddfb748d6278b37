//! Builds sdrun and its plugins, and lays them out as installed:
//!
//! ```text
//! sdrun, sdrun-worker
//! sdrun.cdx.json, THIRD-PARTY.txt        what it contains of others, and their licences
//! providers/ID/sdrun-provider-ID.json    the manifest, from providers/ID/manifest.json
//! providers/ID/libsdrun_provider_ID.so   and every file its build script left in OUT_DIR/lib
//! ```

use crate::{
    cross, parts,
    workspace::{Workspace, display, output, step},
};
use anyhow::{Context, Result, bail, ensure};
use sdrun_abi::{ABI_MAJOR, ABI_MINOR, Manifest};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    env::{self, consts::EXE_SUFFIX},
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Limit in bytes for sdrun, its worker and all plugins together, without vendor runtimes: 34 MB with the plugins for CPUs, 4 MB for
/// each of the two plugins for GPUs, and 10 MB for the weights of the demo model. `sdrun generate` takes 9 MB of it, most of them
/// tokenizers and picture formats, `sdrun serve` 3 MB, `sdrun selftest` 1.3 MB with its stored outputs, and the licences and the bill of
/// materials 0.6 MB. It applies only to this machine's system. For MinGW, rustc does not put functions into separate sections, so a plugin
/// contains everything that it could call.
const SIZE_LIMIT: u64 = 59_000_000;

/// The programs of a release.
const PROGRAMS: [&str; 2] = ["sdrun", "sdrun-worker"];

/// A folder with sdrun as installed.
pub(crate) struct Dist {
    /// The folder.
    pub(crate) dir: PathBuf,
    /// Its plugins.
    pub(crate) manifests: Vec<Manifest>,
    /// Shared libraries that cargo built, by the names of their targets.
    libraries: BTreeMap<String, PathBuf>,
}

impl Dist {
    /// One of its programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}{EXE_SUFFIX}"))
    }

    /// A shared library that cargo built, as it is in the target folder.
    pub(crate) fn library(&self, name: &str) -> Result<&Path> {
        let file = self.libraries.get(name).with_context(|| format!("cargo built no library `{name}`"))?;
        Ok(file)
    }

    /// The programs that users get.
    pub(crate) fn programs(&self) -> [PathBuf; 2] {
        PROGRAMS.map(|name| self.program(name))
    }

    /// A command that runs its `sdrun`, with data and cache in the target folder.
    pub(crate) fn sdrun(&self, workspace: &Workspace) -> Command {
        let mut command = Command::new(self.program("sdrun"));
        command.env("SDRUN_DATA_DIR", workspace.data()).env("SDRUN_CACHE_DIR", workspace.cache());
        command
    }
}

/// The release build, in `target/dist`. Fails if it is too large.
pub(crate) fn for_use(workspace: &Workspace) -> Result<Dist> {
    let dist = release(workspace, workspace.cargo().arg("build"), &host_triple()?, "dist")?;
    let total = report_sizes(&dist.dir)?;
    ensure!(
        total < SIZE_LIMIT,
        "{} is {total} bytes in total; the limit is {SIZE_LIMIT}",
        dist.dir.display()
    );
    Ok(dist)
}

/// The release build for another target, in `target/dist-TARGET`.
pub(crate) fn for_target(workspace: &Workspace, target: &str) -> Result<Dist> {
    let mut cargo = cross::cargo(workspace, target, "build")?;
    let dist = release(workspace, &mut cargo, target, &format!("dist-{target}"))?;
    report_sizes(&dist.dir)?;
    Ok(dist)
}

/// The same with a library for another language, which is not part of `target/dist`.
pub(crate) fn with_binding(workspace: &Workspace, package: &str) -> Result<Dist> {
    let mut cargo = workspace.cargo();
    release(workspace, cargo.arg("build").arg(format!("--package={package}")), &host_triple()?, "dist")
}

fn release(workspace: &Workspace, cargo: &mut Command, target: &str, name: &str) -> Result<Dist> {
    step("Building sdrun and its plugins");
    cargo.args(["--release", "--package=sdrun-cli", "--package=sdrun"]);
    leave_out_folders(workspace, cargo)?;
    for id in provider_ids(workspace)? {
        cargo.arg(format!("--package=sdrun-provider-{id}"));
    }
    lay_out(workspace, &built(cargo)?, target, name, &PROGRAMS)
}

/// Makes the compilers shorten the source paths that end up in panic messages and C++ assertions, so that a release is the same from any
/// folder and does not contain the builder's paths.
fn leave_out_folders(workspace: &Workspace, cargo: &mut Command) -> Result<()> {
    let home = match env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => env::home_dir().context("there is no home folder")?.join(".cargo"),
    };
    let mut shorter = vec![(workspace.root.clone(), "sdrun")];
    // The name of a registry's folder depends on its address.
    for registry in fs::read_dir(home.join("registry/src")).into_iter().flatten() {
        shorter.push((registry?.path(), "crates"));
    }
    let flags = |option: &'static str| {
        shorter.iter().map(move |(from, to)| format!("{option}={}={to}", from.display()))
    };
    let words = |name| env::var(name).unwrap_or_default().split_whitespace().map(str::to_string).collect();
    let given: Vec<String> = match env::var("CARGO_ENCODED_RUSTFLAGS") {
        Ok(flags) => flags.split('\u{1f}').map(str::to_string).collect(),
        Err(_) => words("RUSTFLAGS"),
    };
    // An empty variable has one empty flag.
    let given = given.into_iter().filter(|flag| !flag.is_empty());
    let rust: Vec<String> = given.chain(flags("--remap-path-prefix")).collect();
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rust.join("\u{1f}"));
    for name in ["CFLAGS", "CXXFLAGS"] {
        let mut all: Vec<String> = words(name);
        // Build scripts split them at spaces.
        all.extend(flags("-ffile-prefix-map").filter(|flag| !flag.contains(char::is_whitespace)));
        cargo.env(name, all.join(" "));
    }
    Ok(())
}

/// The build that the tests use, in `target/dist-test`. It takes the artifacts of `cargo test`, so nothing is compiled twice.
pub(crate) fn for_tests(workspace: &Workspace) -> Result<Dist> {
    step("Building everything, tests included");
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--workspace", "--all-targets"]);
    let programs = ["sdrun", "sdrun-worker", "sdrun-conformance"];
    lay_out(workspace, &built(&mut cargo)?, &host_triple()?, "dist-test", &programs)
}

/// Ids of the providers in this repository: the folders with a manifest.
fn provider_ids(workspace: &Workspace) -> Result<Vec<String>> {
    let folder = workspace.root.join("providers");
    let mut ids = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.join("manifest.json").is_file()
            && let Some(name) = path.file_name().and_then(|n| n.to_str())
        {
            ids.push(name.to_string());
        }
    }
    ids.sort();
    ensure!(!ids.is_empty(), "no folder in {} has a manifest.json", folder.display());
    Ok(ids)
}

/// The artifacts of a run of cargo.
#[derive(Default)]
struct Built {
    /// Programs by name.
    programs: BTreeMap<String, PathBuf>,
    /// Shared libraries by the name of their target, with `_`.
    libraries: BTreeMap<String, (PathBuf, String)>,
    /// Build scripts by package id: their folder and the environment they set.
    scripts: BTreeMap<String, (PathBuf, BTreeMap<String, String>)>,
}

/// Runs cargo and collects the artifacts that it reports.
fn built(cargo: &mut Command) -> Result<Built> {
    println!("   {}", display(cargo));
    let mut child = cargo
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let messages = child.stdout.take().context("cargo has an output")?;
    let mut built = Built::default();
    for line in BufReader::new(messages).lines() {
        let line = line?;
        // Programs that cargo starts may write to the same output. A message is always a JSON object.
        if line.starts_with('{') {
            built.add(
                &serde_json::from_str(&line).with_context(|| format!("not a message of cargo: {line}"))?,
            );
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "`{}` failed ({status})", display(cargo));
    Ok(built)
}

impl Built {
    fn add(&mut self, message: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let package = text(&message["package_id"]);
        match message["reason"].as_str() {
            Some("compiler-artifact") => {
                let target = &message["target"];
                let test = message["profile"]["test"] == true;
                if let (Some(program), false) = (message["executable"].as_str(), test) {
                    self.programs.insert(text(&target["name"]), program.into());
                }
                let shared = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
                if target["kind"].as_array().is_some_and(|kinds| kinds.contains(&json!("cdylib")))
                    && let Some(file) = shared.map(PathBuf::from).find(|file| {
                        let extension = file.extension().and_then(|e| e.to_str());
                        extension.is_some_and(|e| ["so", "dylib", "dll"].contains(&e))
                    })
                {
                    self.libraries.insert(text(&target["name"]).replace('-', "_"), (file, package));
                }
            }
            Some("build-script-executed") => {
                let pairs = message["env"].as_array().into_iter().flatten();
                let environment = pairs.map(|pair| (text(&pair[0]), text(&pair[1]))).collect();
                self.scripts.insert(package, (text(&message["out_dir"]).into(), environment));
            }
            _ => {}
        }
    }
}

/// Copies the artifacts into `target/NAME`, which it replaces as a whole.
fn lay_out(
    workspace: &Workspace,
    built: &Built,
    target: &str,
    name: &str,
    programs: &[&str],
) -> Result<Dist> {
    let dir = workspace.target.join(name);
    let stage = workspace.target.join(format!("{name}.new"));
    let old = workspace.target.join(format!("{name}.old"));
    for leftover in [&stage, &old] {
        remove(leftover)?;
    }
    make_dir(&stage)?;
    make_dir(&stage.join("providers"))?;
    for program in programs {
        let file =
            built.programs.get(*program).with_context(|| format!("cargo built no program `{program}`"))?;
        copy(file, &stage.join(file.file_name().context("a program has a name")?), 0o755)?;
    }
    let mut manifests = Vec::new();
    for id in provider_ids(workspace)? {
        manifests.push(lay_out_provider(workspace, built, &id, target, &stage.join("providers").join(&id))?);
    }
    parts::describe(workspace, target, &stage)?;
    if dir.exists() {
        fs::rename(&dir, &old).with_context(|| format!("cannot move {} away", dir.display()))?;
    }
    fs::rename(&stage, &dir).with_context(|| format!("cannot move {} into place", stage.display()))?;
    remove(&old)?;
    println!("   laid out in {}", dir.display());
    let libraries = built.libraries.iter().map(|(name, (file, _))| (name.clone(), file.clone())).collect();
    Ok(Dist { dir, manifests, libraries })
}

fn lay_out_provider(
    workspace: &Workspace,
    built: &Built,
    id: &str,
    target: &str,
    to: &Path,
) -> Result<Manifest> {
    let key = format!("sdrun_provider_{}", id.replace('-', "_"));
    let (library, package) =
        built.libraries.get(&key).with_context(|| format!("cargo built no shared library `{key}`"))?;
    let (out_dir, environment) =
        built.scripts.get(package).with_context(|| format!("provider {id} has no build script"))?;
    let build_id = environment
        .get("SDRUN_BUILD_ID")
        .with_context(|| format!("the build script of provider {id} does not set SDRUN_BUILD_ID"))?;
    make_dir(to)?;
    let file_name = library.file_name().context("a library has a name")?;
    copy(library, &to.join(file_name), 0o755)?;
    let extra = out_dir.join("lib");
    let mut companions = BTreeMap::new();
    if extra.is_dir() {
        for entry in fs::read_dir(&extra)? {
            let path = entry?.path();
            let name = path.file_name().context("a file has a name")?;
            copy(&path, &to.join(name), 0o755)?;
            companions.insert(
                name.to_str().context("a library's name is UTF-8")?.to_string(),
                sha256(&to.join(name))?,
            );
        }
    }
    let source = workspace.root.join("providers").join(id).join("manifest.json");
    let text = fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let mut manifest: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", source.display()))?;
    let provider = &mut manifest["provider"];
    ensure!(provider["id"] == id, "{} does not describe the provider `{id}`", source.display());
    provider["version"] = env!("CARGO_PKG_VERSION").into();
    provider["build_id"] = build_id.as_str().into();
    provider["library"] = json!({
        "path": file_name.to_str().context("a library's name is UTF-8")?,
        "sha256": sha256(library)?,
        "companions": companions,
        "target": target,
        "abi_major": ABI_MAJOR,
        "abi_min_minor": ABI_MINOR,
    });
    let text = serde_json::to_string_pretty(&manifest)? + "\n";
    let parsed = match Manifest::parse(&text) {
        Ok(parsed) => parsed,
        Err(why) => bail!("{} {why}", source.display()),
    };
    let file = to.join(Manifest::file_name(id));
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    set_mode(&file, 0o644)?;
    Ok(parsed)
}

/// This machine's target.
pub(crate) fn host_triple() -> Result<String> {
    let version =
        output(Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_string())
}

/// SHA-256 of a file, lower-case hex.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect())
}

/// Prints the contents of a dist folder and returns its size in bytes.
fn report_sizes(dir: &Path) -> Result<u64> {
    let mut total = 0;
    for (name, bytes) in sizes(dir)? {
        println!("   {:>10.2} MB  {name}", bytes as f64 / 1e6);
        total += bytes;
    }
    println!("   {:>10.2} MB  in total", total as f64 / 1e6);
    Ok(total)
}

/// The programs and plugin folders in a dist folder, with their sizes in bytes.
pub(crate) fn sizes(dir: &Path) -> Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    for place in [dir.to_path_buf(), dir.join("providers")] {
        for entry in fs::read_dir(&place)? {
            let path = entry?.path();
            if path != dir.join("providers") {
                let name = path.strip_prefix(dir)?.display().to_string();
                found.push((name, size_of(&path)?));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn size_of(path: &Path) -> Result<u64> {
    let files = if path.is_dir() { files_below(path)? } else { vec![path.into()] };
    files.iter().map(|file| Ok(fs::metadata(file)?.len())).sum()
}

/// All files below a folder, sorted.
pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    set_mode(to, mode)
}

fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    set_mode(dir, 0o755)
}

/// Sets permissions independently of the umask, because sdrun refuses plugins that other users can write.
fn set_mode(path: &Path, mode: u32) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .with_context(|| format!("cannot set the permissions of {}", path.display()))?;
    }
    #[cfg(not(unix))]
    let _ = (path, mode);
    Ok(())
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot delete {}", dir.display()))
        }
        _ => Ok(()),
    }
}

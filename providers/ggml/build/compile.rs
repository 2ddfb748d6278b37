//! Compiles and links ggml's libraries. Objects are reused in later runs of the build script as long as their sources and command lines
//! stay the same.

use crate::{source::Source, variants};
use sha2::{Digest, Sha256};
use std::{
    collections::hash_map::DefaultHasher,
    env,
    error::Error,
    fs,
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Tensors, graphs, allocation, backends. Nothing here uses training (`ggml-opt`), GGUF files, or the registry of backends
/// (`ggml-backend-reg`), because the crate chooses and loads its backend itself. `ggml.cpp` would replace the process's terminate
/// handler.
const BASE: &[&str] = &[
    "ggml.c",
    "ggml-alloc.c",
    "ggml-quants.c",
    "ggml-backend.cpp",
    "ggml-backend-meta.cpp",
    "ggml-threading.cpp",
];
/// The CPU backend without its architecture-specific files.
const CPU: &[&str] = &[
    "ggml-cpu.c",
    "quants.c",
    "ops.cpp",
    "ggml-cpu.cpp",
    "repack.cpp",
    "hbm.cpp",
    "traits.cpp",
    "amx/amx.cpp",
    "amx/mmq.cpp",
    "tiled/tiled.cpp",
    "tiled/tiled-kernel.cpp",
    "binary-ops.cpp",
    "unary-ops.cpp",
    "vec.cpp",
    "llamafile/sgemm.cpp",
];

/// A source file to compile.
struct Job {
    source: PathBuf,
    /// A header of ours to include before it.
    header: Option<PathBuf>,
    object: PathBuf,
    command: Command,
}

/// A library to link.
struct Library {
    name: String,
    objects: Vec<PathBuf>,
    links_base: bool,
}

/// Builds all libraries and returns their folder.
pub(crate) fn compile(source: &Source, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let (arch, os) = (env::var("CARGO_CFG_TARGET_ARCH")?, env::var("CARGO_CFG_TARGET_OS")?);
    let build = Build { source, out, arch, os, c: compiler(false)?, cpp: compiler(true)? };
    fs::create_dir_all(build.include())?;
    let version_header = build.include().join("ggml-version.h");
    let text = format!(
        "#pragma once\n#define GGML_VERSION \"{}\"\n#define GGML_COMMIT \"unknown\"\n",
        source.version
    );
    if fs::read_to_string(&version_header).ok().as_ref() != Some(&text) {
        fs::write(version_header, text)?;
    }

    let msvc = build.cpp.is_like_msvc();
    let mut jobs = Vec::new();
    let base = BASE.iter().map(|file| build.job("base", file, &[], &mut jobs)).collect::<Result<_, _>>()?;
    let mut libraries = vec![Library { name: "ggml-base".into(), objects: base, links_base: false }];
    let (selection, arch_folder) = variants::of(&build.arch, &build.os);
    for variant in selection {
        let Some(flags) = (if msvc { variant.msvc } else { Some(variant.gnu) }) else { continue };
        let mut files: Vec<String> = CPU.iter().map(|file| format!("ggml-cpu/{file}")).collect();
        if let Some(folder) = arch_folder {
            files.push(format!("ggml-cpu/arch/{folder}/quants.c"));
            files.push(format!("ggml-cpu/arch/{folder}/repack.cpp"));
        }
        let objects = files
            .iter()
            .map(|file| build.job(variant.name, file, flags, &mut jobs))
            .collect::<Result<_, _>>()?;
        libraries.push(Library { name: format!("ggml-cpu-{}", variant.name), objects, links_base: true });
    }
    let stale: Vec<Job> = jobs.into_iter().filter(|job| !is_current(job)).collect();
    run_all(stale)?;
    fs::create_dir_all(build.libraries())?;
    for library in &libraries {
        build.link(library)?;
    }
    let files: Vec<PathBuf> = libraries.iter().map(|library| build.file(&library.name)).collect();
    for entry in fs::read_dir(build.libraries())? {
        let path = entry?.path();
        if !files.contains(&path) {
            // Remove files of earlier builds, because everything in this folder is installed.
            fs::remove_file(path)?;
        }
    }
    Ok(build.libraries())
}

fn compiler(cpp: bool) -> Result<cc::Tool, Box<dyn Error>> {
    let mut build = cc::Build::new();
    build.cpp(cpp).std(if cpp { "c++17" } else { "c11" }).opt_level(3).debug(false).pic(true).warnings(false);
    build.try_get_compiler().map_err(|error| {
        let (language, variable) = if cpp { ("C++", "CXX") } else { ("C", "CC") };
        format!("no {language} compiler: {error}; install one (for example gcc or clang) or set {variable}")
            .into()
    })
}

struct Build<'a> {
    source: &'a Source,
    out: &'a Path,
    arch: String,
    os: String,
    c: cc::Tool,
    cpp: cc::Tool,
}

impl Build<'_> {
    fn include(&self) -> PathBuf {
        self.out.join("include")
    }
    fn libraries(&self) -> PathBuf {
        self.out.join("lib")
    }

    /// Plans the compilation of `file` (relative to ggml's `src`) into the objects of `part`.
    fn job(
        &self,
        part: &str,
        file: &str,
        flags: &[&str],
        jobs: &mut Vec<Job>,
    ) -> Result<PathBuf, Box<dyn Error>> {
        let tool = if file.ends_with(".c") { &self.c } else { &self.cpp };
        let folder = self.source.root.join("src");
        let source = folder.join(file);
        if !source.is_file() {
            return Err(format!("ggml {} has no file {}", self.source.version, source.display()).into());
        }
        let objects = self.out.join("objects").join(part);
        fs::create_dir_all(&objects)?;
        let object = objects.join(file.replace(['/', '.'], "_")).with_extension("o");
        let mut command = tool.to_command();
        for define in self.defines() {
            command.arg(format!("-D{define}"));
        }
        for path in
            [self.source.root.join("include"), folder.clone(), folder.join("ggml-cpu"), self.include()]
        {
            command.arg(format!("-I{}", path.display()));
        }
        command.args(flags);
        if self.os == "windows" && tool.is_like_gnu() {
            // GCC assumes that the stack is aligned on Windows as on Linux (GCC bug 54412). Use unaligned moves for vectors.
            command.arg("-Wa,-muse-unaligned-vector-move");
        }
        let mut header = None;
        let prepared = !tool.is_like_msvc() && (self.arch == "x86_64" || self.os == "windows");
        if file == "ggml-cpu/ggml-cpu.c" && prepared {
            let threads = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("build").join("threads.h");
            command.arg("-include").arg(&threads);
            header = Some(threads);
        }
        if tool.is_like_msvc() {
            command.arg("/c").arg(&source).arg(format!("/Fo{}", object.display()));
        } else {
            // Failed assertions of ggml print the path of the source file.
            command.arg(format!("-ffile-prefix-map={}=ggml", self.source.root.display()));
            command.arg("-c").arg(&source).arg("-o").arg(&object);
        }
        jobs.push(Job { source, header, object: object.clone(), command });
        Ok(object)
    }

    fn defines(&self) -> Vec<&'static str> {
        let mut defines = vec![
            "NDEBUG",
            "GGML_SHARED",
            "GGML_BUILD",
            "GGML_BACKEND_SHARED",
            "GGML_BACKEND_BUILD",
            "GGML_BACKEND_DL",
            "GGML_USE_LLAMAFILE",
            "GGML_SCHED_MAX_COPIES=4",
        ];
        defines.extend(match self.os.as_str() {
            "linux" | "android" => &["_GNU_SOURCE", "_XOPEN_SOURCE=600"][..],
            "macos" => &["_DARWIN_C_SOURCE", "_XOPEN_SOURCE=600"],
            "windows" => &["_CRT_SECURE_NO_WARNINGS"],
            _ => &["_XOPEN_SOURCE=600"],
        });
        defines
    }

    /// The file of a library. On Windows, other libraries are bound to this name; see [`link`](Self::link).
    fn file(&self, name: &str) -> PathBuf {
        self.libraries().join(match self.os.as_str() {
            "windows" => format!("sdrun-{name}.dll"),
            "macos" => format!("lib{name}.dylib"),
            _ => format!("lib{name}.so"),
        })
    }
    /// The file that the linker reads to link against a library. On Windows it is an import library beside it.
    fn linked(&self, name: &str) -> PathBuf {
        match self.os.as_str() {
            "windows" => self.out.join("objects").join(format!("{name}.lib")),
            _ => self.file(name),
        }
    }

    /// Links a library, unless the same command linked it before and it is newer than all its objects.
    fn link(&self, library: &Library) -> Result<(), Box<dyn Error>> {
        let file = self.file(&library.name);
        let mut command = self.cpp.to_command();
        if self.cpp.is_like_msvc() {
            command.arg("/LD").args(&library.objects).arg(format!("/Fe:{}", file.display())).arg("/link");
            command.arg(format!("/IMPLIB:{}", self.linked(&library.name).display()));
            command.args(library.links_base.then(|| self.linked("ggml-base")));
            // ggml-cpu reads the processor's name from the registry.
            command.arg("advapi32.lib");
        } else {
            // Other libraries are bound to this name. It differs from that of any other ggml, so that a host can use one in
            // the same process.
            let bound = |name: &str| format!("sdrun-{name}-{}", self.source.version);
            command.args(&library.objects).arg("-o").arg(&file);
            match self.os.as_str() {
                "macos" => {
                    command.args(["-dynamiclib", "-Wl,-dead_strip", "-install_name"]);
                    command.arg(format!("@loader_path/lib{}.dylib", library.name));
                }
                "windows" => {
                    // Link the compiler's own libraries statically, and do not export them.
                    command.args(["-shared", "-s", "-static", "-Wl,--exclude-libs,ALL"]);
                    command.arg(format!("-Wl,--out-implib,{}", self.linked(&library.name).display()));
                }
                _ => {
                    command.args([
                        "-shared",
                        "-s",
                        "-Wl,-Bsymbolic",
                        "-Wl,--no-undefined",
                        "-Wl,-z,noexecstack",
                    ]);
                    command.arg(format!("-Wl,-soname,{}", bound(&library.name)));
                }
            }
            command.args(library.links_base.then(|| self.linked("ggml-base")));
            if self.os != "windows" {
                command.args(["-lm", "-lpthread"]);
            }
        }
        let (stamp, text) =
            (self.out.join("objects").join(format!("{}.stamp", library.name)), hash(&command));
        let modified = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
        let linked = modified(&file);
        let newest = linked.is_some() && library.objects.iter().all(|object| modified(object) < linked);
        if newest && fs::read_to_string(&stamp).is_ok_and(|known| known == text) {
            return Ok(());
        }
        finish(command, &format!("link {}", file.display()))?;
        Ok(fs::write(stamp, text)?)
    }
}

/// Identifies a command.
fn hash(command: &Command) -> String {
    let hash = Sha256::digest(format!("{command:?}"));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The file beside an object that records its inputs.
fn stamp(job: &Job) -> PathBuf {
    job.object.with_extension("stamp")
}

fn fingerprint(job: &Job) -> String {
    let mut time = DefaultHasher::new();
    for file in [Some(&job.source), job.header.as_ref()].into_iter().flatten() {
        fs::metadata(file).and_then(|meta| meta.modified()).ok().hash(&mut time);
    }
    format!("{} {:016x}", hash(&job.command), time.finish())
}

fn is_current(job: &Job) -> bool {
    job.object.is_file() && fs::read_to_string(stamp(job)).is_ok_and(|text| text == fingerprint(job))
}

/// Runs the jobs, the longest first, with as many at once as cargo allows.
fn run_all(mut jobs: Vec<Job>) -> Result<(), Box<dyn Error>> {
    let size = |job: &Job| fs::metadata(&job.source).map_or(0, |meta| meta.len());
    jobs.sort_by_key(|job| std::cmp::Reverse(size(job)));
    let workers = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).clamp(1, 64);
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let jobs: Vec<Mutex<Option<Job>>> = jobs.into_iter().map(|job| Mutex::new(Some(job))).collect();
    thread::scope(|scope| {
        for _ in 0..workers.min(jobs.len()) {
            scope.spawn(|| {
                while let Some(slot) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let Some(job) = slot.lock().ok().and_then(|mut slot| slot.take()) else { return };
                    let (stamp, text) = (stamp(&job), fingerprint(&job));
                    let what = format!("compile {}", job.source.display());
                    let result = finish(job.command, &what).and_then(|()| Ok(fs::write(stamp, text)?));
                    if let Err(error) = result {
                        next.store(jobs.len(), Ordering::Relaxed);
                        if let Ok(mut failure) = failure.lock() {
                            failure.get_or_insert(error.to_string());
                        }
                    }
                }
            });
        }
    });
    match failure.into_inner() {
        Ok(None) => Ok(()),
        Ok(Some(error)) => Err(error.into()),
        Err(_) => Err("a compile worker panicked".into()),
    }
}

/// Runs a compiler and prints its output only if it fails.
fn finish(mut command: Command, what: &str) -> Result<(), Box<dyn Error>> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        command.output().map_err(|error| format!("cannot {what}: {program} does not start: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    eprintln!(
        "{command:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let words = String::from_utf8_lossy(&output.stderr);
    let first = words.lines().find(|line| line.contains("error")).unwrap_or("see its output above");
    Err(format!("cannot {what}: {program} ended with {}: {first}", output.status).into())
}

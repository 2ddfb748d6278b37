//! Finding and loading ggml's libraries.

use super::{api::*, threads, variant};
use libloading::Library;
use once_cell::sync::OnceCell;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// Where the build script put the libraries. Only unit tests know it: a plugin that remembers the folder it was built in
/// would load libraries from there on a user's machine.
#[cfg(test)]
pub(crate) const LIBRARY_DIR: &str = env!("SDRUN_GGML_LIB_DIR");

/// ggml, loaded once per process and never unloaded.
pub(crate) struct Ggml {
    pub(super) api: Api,
    pub(super) cpu: Cpu,
    variant: String,
    version: String,
    library: PathBuf,
    gpus: Vec<Gpu>,
    /// Backend libraries that could not be used, with the reasons.
    unusable: Vec<String>,
}

/// A device besides the CPU.
pub(crate) struct Gpu {
    pub(super) device: Ptr,
    /// `vulkan:0`: the backend, and the number of the device there.
    pub(crate) id: String,
}

/// A ggml and one of its devices: what a graph is made for.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) ggml: &'static Ggml,
    /// Index into [`Ggml::gpus`]; `None` is the CPU.
    pub(crate) gpu: Option<usize>,
    /// The most bytes of weights in the memory of the device besides the CPU.
    pub(crate) budget: Option<u64>,
}

impl Target {
    /// The device besides the CPU.
    pub(crate) fn gpu(&self) -> Option<&'static Gpu> {
        self.ggml.gpus.get(self.gpu?)
    }
}

/// Backends for devices, by the names that ggml gives their libraries.
const BACKENDS: [&str; 8] = ["cuda", "hip", "vulkan", "metal", "sycl", "opencl", "musa", "cann"];
/// Versions of ggml whose structures and functions are those that are used here, by major and minor number.
const VERSIONS: [&str; 2] = ["0.26.", "0.27."];

/// The CPU device and the functions only its backend has.
pub(super) struct Cpu {
    pub(super) device: Ptr,
    pub(super) set_n_threads: unsafe extern "C" fn(Ptr, c_int),
    pub(super) set_abort_callback: unsafe extern "C" fn(Ptr, Option<AbortCallback>, *mut c_void),
    pub(super) threadpool_new: unsafe extern "C" fn(*mut threads::Params) -> Ptr,
    pub(super) threadpool_free: unsafe extern "C" fn(Ptr),
    pub(super) set_threadpool: unsafe extern "C" fn(Ptr, Ptr),
}

// SAFETY: the pointers name objects that ggml creates once and never changes; its functions for devices may
// be called from any thread.
unsafe impl Send for Ggml {}
// SAFETY: as for `Send`.
unsafe impl Sync for Ggml {}

static LOADED: OnceCell<Ggml> = OnceCell::new();

impl Ggml {
    /// Loads the libraries in `folder`, once per process: later calls return the same ggml, whatever they name.
    ///
    /// # Errors
    /// `NotFound` if the folder does not have them; `FailedPrecondition` if the system cannot load them or they are
    /// of another version. A later call may try again.
    pub(crate) fn load(folder: &Path) -> Result<&'static Ggml> {
        LOADED.get_or_try_init(|| Self::load_from(folder))
    }

    /// Loads the libraries in `folder` without keeping them for later calls.
    pub(crate) fn load_from(folder: &Path) -> Result<Ggml> {
        let base = library_file("ggml-base");
        // The system would look for a relative folder in the working directory.
        if !folder.is_absolute() || !folder.join(&base).is_file() {
            return Err(Error::not_found(format!("{base} is not in {}", folder.display()))
                .with_hint("the ggml libraries belong beside the plugin; reinstall it or build it again"));
        }
        // Absolute, so that the system's loader does not search.
        let folder = dunce::canonicalize(folder).map_err(|e| Error::io("resolve", folder, &e))?;
        let base_file = folder.join(&base);
        let base = open(&base_file)?;
        let wrong = |what: String| {
            Error::precondition(what)
                .with_file(&base_file)
                .with_hint("the plugin and its ggml libraries must come from one build; reinstall both")
        };
        // SAFETY: the version is compared below before any function but `ggml_version` is called.
        let api = unsafe { Api::resolve(base) }
            .map_err(|name| wrong(format!("{} has no function {name}", base_file.display())))?;
        let version = Self::check(&api, &wrong)?;
        if version != env!("SDRUN_GGML_VERSION") {
            return Err(wrong(format!(
                "{} is ggml {version}, the plugin was built for {}",
                base_file.display(),
                env!("SDRUN_GGML_VERSION")
            )));
        }
        let usable = variant::usable().map_err(Error::invalid)?;
        let present =
            usable.iter().map(|name| (*name, folder.join(library_file(&format!("ggml-cpu-{name}")))));
        let (variant, library) = present.into_iter().find(|(_, file)| file.is_file()).ok_or_else(|| {
            Error::not_found(format!(
                "none of the ggml-cpu libraries this processor can run ({}) is in {}",
                usable.join(", "),
                folder.display()
            ))
            .with_hint("reinstall the plugin or build it again")
        })?;
        let cpu = Self::cpu(&api, open(&library)?).map_err(|why| {
            Error::precondition(format!("{} {why}", library.display()))
                .with_file(&library)
                .with_hint("the plugin and its ggml libraries must come from one build; reinstall both")
        })?;
        let mut ggml = Ggml {
            api,
            cpu,
            variant: variant.into(),
            version,
            library: base_file,
            gpus: Vec::new(),
            unusable: Vec::new(),
        };
        ggml.add_gpus(&folder)?;
        Ok(ggml)
    }

    /// Loads a folder that holds a ggml of its own: ggml-base, ggml-cpu and libraries for devices, of one build. File
    /// names may have a suffix, as packages of other programs give them (`libggml-vulkan-4062e2a6.so`).
    ///
    /// # Errors
    /// `InvalidArgument` for a relative folder, `NotFound` where a library is missing, `FailedPrecondition` where one
    /// cannot be loaded or is of an unknown version.
    pub(crate) fn load_bundle(folder: &Path) -> Result<&'static Ggml> {
        if !folder.is_absolute() {
            let message = format!("the folder of ggml backends, {}, is not absolute", folder.display());
            return Err(Error::invalid(message));
        }
        // Backends enumerate their devices into tables of their own that nothing guards (ggml-vulkan 0.27).
        static LOADING: Mutex<()> = Mutex::new(());
        let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        let files = libraries(folder)?;
        let named = |name: &str| -> Vec<&PathBuf> {
            files.iter().filter(|(own, _)| is_named(own, name)).map(|(_, file)| file).collect()
        };
        let missing = |what: &str| {
            Error::not_found(format!("there is no {what} in {}", folder.display())).with_hint(
                "a folder of ggml backends needs ggml-base, ggml-cpu and the backends of one build",
            )
        };
        let base_file = *named("ggml-base").first().ok_or_else(|| missing("ggml-base"))?;
        let wrong = |what: String| Error::precondition(what).with_file(base_file);
        // SAFETY: the version is checked below before any function but `ggml_version` is called.
        let api = unsafe { Api::resolve(open(base_file)?) }
            .map_err(|name| wrong(format!("{} has no function {name}", base_file.display())))?;
        let version = Self::check(&api, &wrong)?;
        let mut best: Option<(c_int, &PathBuf, &'static Library)> = None;
        for file in named("ggml-cpu") {
            let library = open(file)?;
            // SAFETY: ggml gives this function, where it is there, this type: what the variant is worth here, 0 for
            // one that the processor cannot run.
            let score = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"ggml_backend_score\0") }
                .map_or(1, |score| unsafe { score() });
            if score > best.as_ref().map_or(0, |(best, ..)| *best) {
                best = Some((score, file, library));
            }
        }
        let (_, file, library) = best.ok_or_else(|| missing("ggml-cpu that this processor can run"))?;
        let cpu = Self::cpu(&api, library)
            .map_err(|why| Error::precondition(format!("{} {why}", file.display())).with_file(file))?;
        let variant = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (gpus, unusable) = (Vec::new(), Vec::new());
        let mut ggml = Ggml { api, cpu, variant, version, library: base_file.clone(), gpus, unusable };
        ggml.add_gpus(folder)?;
        Ok(Box::leak(Box::new(ggml)))
    }

    /// Checks that a ggml-base is one whose structures are known; returns its version.
    fn check(api: &Api, wrong: &dyn Fn(String) -> Error) -> Result<String> {
        // SAFETY: returns a static string.
        let version = unsafe { text((api.ggml_version)()) };
        if !VERSIONS.iter().any(|known| version.starts_with(known)) {
            return Err(wrong(format!("it is ggml {version}; known are {}x", VERSIONS.join("x and "))));
        }
        if !Self::lays_out_tensors_as_stated(api) {
            return Err(wrong(format!("it is ggml {version} but lays out its tensors in another way")));
        }
        // SAFETY: the callbacks are functions of this library, which is never unloaded.
        unsafe {
            (api.ggml_log_set)(Some(log_line), std::ptr::null_mut());
            (api.ggml_set_abort_callback)(Some(fatal));
        }
        Ok(version)
    }

    /// Makes a tensor and looks where things are in it. What is behind the name is not used here, and how long names can
    /// be is a choice of whoever compiles ggml.
    fn lays_out_tensors_as_stated(api: &Api) -> bool {
        // SAFETY: the context has room for the one tensor, which lives until the end; nothing beyond what ggml states
        // as a tensor's size is read.
        unsafe {
            let mem_size = (api.ggml_tensor_overhead)();
            if mem_size < size_of::<RawTensor>() {
                return false;
            }
            let params = InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true };
            let context = (api.ggml_init)(params);
            if context.is_null() {
                return false;
            }
            let raw = (api.ggml_new_tensor_4d)(context, 0, 2, 3, 5, 7);
            let name = (api.ggml_get_name)(raw).addr().wrapping_sub(raw.addr());
            let fits = name == std::mem::offset_of!(RawTensor, name)
                && (*raw).type_ == 0
                && (*raw).ne == [2, 3, 5, 7]
                && (*raw).nb == [4, 8, 24, 120]
                && (*raw).src.iter().all(|source| source.is_null())
                && (*raw).view_src.is_null()
                && (*raw).data.is_null();
            (api.ggml_free)(context);
            fits
        }
    }

    /// Loads the libraries for devices in a folder. One that cannot be loaded, for example because a driver is missing,
    /// is remembered with the reason.
    fn add_gpus(&mut self, folder: &Path) -> Result<()> {
        for (name, file) in libraries(folder)? {
            let Some(backend) = BACKENDS.iter().find(|backend| is_named(&name, &format!("ggml-{backend}")))
            else {
                continue;
            };
            let registration = match open(&file) {
                Ok(library) => registration(library).map_err(|why| format!("{} {why}", file.display())),
                Err(error) => Err(error.message),
            };
            let registration = match registration {
                Ok(registration) => registration,
                Err(why) => {
                    self.unusable.push(why);
                    continue;
                }
            };
            // SAFETY: a registration of the known API version; indices below the count.
            unsafe {
                let count = (self.api.ggml_backend_reg_dev_count)(registration);
                if count == 0 {
                    self.unusable.push(format!("{} finds no device", file.display()));
                }
                for index in 0..count {
                    let device = (self.api.ggml_backend_reg_dev_get)(registration, index);
                    self.gpus.push(Gpu { device, id: format!("{backend}:{index}") });
                }
            }
        }
        Ok(())
    }

    fn cpu(api: &Api, library: &'static Library) -> Result<Cpu, String> {
        let registration = registration(library)?;
        let function = |name: &CStr| {
            // SAFETY: a registration of the API version checked above and a C string.
            let pointer = unsafe { (api.ggml_backend_reg_get_proc_address)(registration, name.as_ptr()) };
            if pointer.is_null() {
                Err(format!("has no function {}", name.to_string_lossy()))
            } else {
                Ok(pointer)
            }
        };
        // SAFETY: as above; device 0 exists where the count is not 0. The functions have the types that ggml-backend.h and
        // ggml-cpu.h state for these names.
        unsafe {
            if (api.ggml_backend_reg_dev_count)(registration) == 0 {
                return Err("has no device".into());
            }
            Ok(Cpu {
                device: (api.ggml_backend_reg_dev_get)(registration, 0),
                set_n_threads: std::mem::transmute::<Ptr, unsafe extern "C" fn(Ptr, c_int)>(function(
                    c"ggml_backend_set_n_threads",
                )?),
                set_abort_callback: std::mem::transmute::<
                    Ptr,
                    unsafe extern "C" fn(Ptr, Option<AbortCallback>, *mut c_void),
                >(function(c"ggml_backend_set_abort_callback")?),
                threadpool_new: std::mem::transmute::<Ptr, unsafe extern "C" fn(*mut threads::Params) -> Ptr>(
                    function(c"ggml_threadpool_new")?,
                ),
                threadpool_free: std::mem::transmute::<Ptr, unsafe extern "C" fn(Ptr)>(function(
                    c"ggml_threadpool_free",
                )?),
                set_threadpool: std::mem::transmute::<Ptr, unsafe extern "C" fn(Ptr, Ptr)>(function(
                    c"ggml_backend_cpu_set_threadpool",
                )?),
            })
        }
    }

    /// `MAJOR.MINOR.PATCH`.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }
    /// Name of the CPU variant in use, for example `zen4`.
    pub(crate) fn variant(&self) -> &str {
        &self.variant
    }
    /// Devices besides the CPU.
    pub(crate) fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }
    /// Why libraries that are there offer no device.
    pub(crate) fn unusable(&self) -> &[String] {
        &self.unusable
    }
    /// Name of a device and its memory in bytes.
    pub(crate) fn describe(&self, gpu: &Gpu) -> (String, Option<u64>) {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a device of this ggml; the pointers are to locals; the string lives as long as the device.
        unsafe {
            (self.api.ggml_backend_dev_memory)(gpu.device, &mut free, &mut total);
            let name = text((self.api.ggml_backend_dev_description)(gpu.device));
            (name, (total > 0).then_some(total as u64))
        }
    }
    /// The file ggml-base was loaded from.
    pub(crate) fn library(&self) -> &Path {
        &self.library
    }
    /// The processor's name as the system states it.
    pub(crate) fn cpu_name(&self) -> String {
        // SAFETY: the device is valid; the string lives as long as it.
        unsafe { text((self.api.ggml_backend_dev_description)(self.cpu.device)) }
    }
    /// Main memory in bytes, where ggml knows it.
    pub(crate) fn memory(&self) -> Option<u64> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the device is valid, the pointers are to locals.
        unsafe { (self.api.ggml_backend_dev_memory)(self.cpu.device, &mut free, &mut total) };
        (total > 0).then_some(total as u64)
    }
}

/// What a backend's library registers.
fn registration(library: &'static Library) -> Result<Ptr, String> {
    // SAFETY: the signature is the one ggml's macro GGML_BACKEND_DL_IMPL gives this function.
    let init = unsafe { library.get::<unsafe extern "C" fn() -> Ptr>(b"ggml_backend_init\0") }
        .map_err(|_| "has no function ggml_backend_init".to_string())?;
    // SAFETY: takes nothing; the processor has this library's instructions.
    let registration = unsafe { init() };
    if registration.is_null() {
        return Err("offers no backend".into());
    }
    // SAFETY: `struct ggml_backend_reg` begins with `int api_version`.
    let version = unsafe { *registration.cast::<c_int>() };
    if version != BACKEND_API_VERSION {
        return Err(format!("has backend API version {version}, expected {BACKEND_API_VERSION}"));
    }
    Ok(registration)
}

/// The shared libraries of a folder: name without prefix and path, in order.
fn libraries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let cannot = |e: std::io::Error| Error::io("list", folder, &e);
    let mut files = Vec::new();
    for entry in folder.read_dir().map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(name) = name.strip_prefix(std::env::consts::DLL_PREFIX) else { continue };
        if name.contains(std::env::consts::DLL_SUFFIX) && path.is_file() {
            files.push((name.to_string(), path));
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a library of this name is `wanted`, with or without a suffix.
fn is_named(name: &str, wanted: &str) -> bool {
    name.strip_prefix(wanted).is_some_and(|rest| rest.starts_with(['-', '.']))
}

/// Loads a library for good.
pub(super) fn open(file: &Path) -> Result<&'static Library> {
    // SAFETY: ggml's libraries have initialisers that only set up their own tables.
    match unsafe { Library::new(file) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => {
            let cause =
                std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            Err(Error::precondition(format!("cannot load {}: {error}{cause}", file.display()))
                .with_file(file))
        }
    }
}

/// The file of one of our own libraries. Windows tells libraries apart by these names alone, so that they differ there from
/// those of any other ggml in the process.
pub(crate) fn library_file(name: &str) -> String {
    let prefix = if cfg!(windows) { "sdrun-" } else { std::env::consts::DLL_PREFIX };
    format!("{prefix}{name}{}", std::env::consts::DLL_SUFFIX)
}

/// # Safety
/// `string` is null or a C string that lives during the call.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

/// ggml's log lines: warnings and errors go to standard error, where an isolating host picks them up.
unsafe extern "C" fn log_line(level: c_int, line: *const c_char, _: *mut c_void) {
    // GGML_LOG_LEVEL_WARN and above, and continued lines.
    if level >= 3 {
        // SAFETY: ggml passes a C string.
        eprint!("ggml: {}", unsafe { text(line) });
    }
}

/// Called by ggml right before it ends the process because one of its assertions failed. Setting it keeps
/// ggml from forking a debugger.
unsafe extern "C" fn fatal(message: *const c_char) {
    // SAFETY: ggml passes a C string.
    eprintln!("ggml: fatal: {}", unsafe { text(message) });
}

/// Turns ggml's status numbers into errors.
pub(super) fn status_error(status: c_int) -> Error {
    match status {
        STATUS_ALLOC_FAILED => {
            Error::new(ErrorCode::ResourceExhausted, "ggml has no memory for its work buffer")
        }
        other => Error::internal("ggml could not compute the graph").with_native(other.to_string()),
    }
}

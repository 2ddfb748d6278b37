//! Loads ggml's libraries and checks them.

use super::{
    api::*,
    files::{is_named, libraries, library_file, open},
};
use crate::cpu;
use libloading::Library;
use once_cell::sync::OnceCell;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// ggml, loaded once per process and never unloaded.
pub(crate) struct Ggml {
    pub(super) api: Api,
    pub(super) cpu: Cpu,
    variant: String,
    version: String,
    library: PathBuf,
    gpus: Vec<Gpu>,
    /// Why some backend libraries cannot be used.
    unusable: Vec<String>,
}

/// A device besides the CPU.
pub(crate) struct Gpu {
    pub(super) device: Ptr,
    /// The backend and the index of the device there, for example `vulkan:0`.
    pub(crate) id: String,
}

/// A ggml and one of its devices, on which a graph runs.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) ggml: &'static Ggml,
    /// Index into [`Ggml::gpus`]; `None` is the CPU.
    pub(crate) gpu: Option<usize>,
    /// The most bytes of weights in the memory of the GPU.
    pub(crate) budget: Option<u64>,
}

impl Target {
    /// The device, unless it is the CPU.
    pub(crate) fn gpu(&self) -> Option<&'static Gpu> {
        self.ggml.gpus.get(self.gpu?)
    }
}

/// Backends for devices. ggml names their libraries so.
const BACKENDS: [&str; 8] = ["cuda", "hip", "vulkan", "metal", "sycl", "opencl", "musa", "cann"];
/// The versions of ggml (major and minor number) whose structures and functions this crate knows.
const VERSIONS: [&str; 2] = ["0.26.", "0.27."];

/// The CPU device, and the functions that only its backend has.
pub(super) struct Cpu {
    pub(super) device: Ptr,
    pub(super) set_n_threads: unsafe extern "C" fn(Ptr, c_int),
    pub(super) set_abort_callback: unsafe extern "C" fn(Ptr, Option<AbortCallback>, *mut c_void),
    pub(super) threadpool_new: unsafe extern "C" fn(*mut ThreadParams) -> Ptr,
    pub(super) threadpool_free: unsafe extern "C" fn(Ptr),
    pub(super) set_threadpool: unsafe extern "C" fn(Ptr, Ptr),
}

// SAFETY: ggml creates these objects once and never changes them. Its functions for devices may be called from any
// thread.
unsafe impl Send for Ggml {}
// SAFETY: as for `Send`.
unsafe impl Sync for Ggml {}

static LOADED: OnceCell<Ggml> = OnceCell::new();

impl Ggml {
    /// Loads the libraries in `folder`, once per process. Later calls return the same ggml, whatever folder they name.
    ///
    /// # Errors
    /// `NotFound` if the folder lacks them. `FailedPrecondition` if the system cannot load them or their version differs.
    /// After an error, a later call tries again.
    pub(crate) fn load(folder: &Path) -> Result<&'static Ggml> {
        LOADED.get_or_try_init(|| Self::load_from(folder))
    }

    /// Loads the libraries in `folder` without keeping them for later calls.
    pub(crate) fn load_from(folder: &Path) -> Result<Ggml> {
        let base = library_file("ggml-base");
        // A relative folder would be resolved against the working directory.
        if !folder.is_absolute() || !folder.join(&base).is_file() {
            return Err(Error::not_found(format!("{base} is not in {}", folder.display()))
                .with_hint("the ggml libraries belong beside the plugin; reinstall it or build it again"));
        }
        // An absolute path keeps the system's loader from searching.
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
        let usable = cpu::usable().map_err(Error::invalid)?;
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

    /// Loads a folder with a complete ggml: ggml-base, ggml-cpu and backends for devices, all of one build. File names may have a
    /// suffix, as in packages of other programs (`libggml-vulkan-4062e2a6.so`).
    ///
    /// # Errors
    /// `InvalidArgument` if the folder is relative, `NotFound` if a library is missing, `FailedPrecondition` if one cannot be
    /// loaded or its version is unknown.
    pub(crate) fn load_bundle(folder: &Path) -> Result<&'static Ggml> {
        if !folder.is_absolute() {
            let message = format!("the folder of ggml backends, {}, is not absolute", folder.display());
            return Err(Error::invalid(message));
        }
        // Backends list their devices in tables that no lock guards (ggml-vulkan 0.27).
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
            // SAFETY: ggml declares this optional function with this type. It returns how good the variant is for this
            // processor, and 0 if the processor cannot run it.
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

    /// Checks that the structures of a ggml-base are known. Returns its version.
    fn check(api: &Api, wrong: &dyn Fn(String) -> Error) -> Result<String> {
        // SAFETY: returns a static string.
        let version = unsafe { text((api.ggml_version)()) };
        if !VERSIONS.iter().any(|known| version.starts_with(known)) {
            return Err(wrong(format!(
                "it is ggml {version}; this plugin knows {}x",
                VERSIONS.join("x and ")
            )));
        }
        if !Self::lays_out_tensors_as_stated(api) {
            return Err(wrong(format!("it is ggml {version} but its tensors have another layout")));
        }
        // SAFETY: the callbacks are functions of this library, which is never unloaded.
        unsafe {
            (api.ggml_log_set)(Some(log_line), std::ptr::null_mut());
            (api.ggml_set_abort_callback)(Some(fatal));
        }
        Ok(version)
    }

    /// Creates a tensor and checks where its fields are. Nothing behind the name is used here, because whoever compiles ggml
    /// chooses the length of names.
    fn lays_out_tensors_as_stated(api: &Api) -> bool {
        // SAFETY: the context has room for the one tensor, which lives until the end. All reads are within the size that
        // ggml states for a tensor.
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

    /// Loads the backends for devices in a folder. If one cannot be loaded, for example because a driver is missing, the reason is
    /// kept.
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
            // SAFETY: the registration has the known API version, and the indices are below the count.
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
            // SAFETY: the registration has the API version checked above, and the name is a C string.
            let pointer = unsafe { (api.ggml_backend_reg_get_proc_address)(registration, name.as_ptr()) };
            if pointer.is_null() {
                Err(format!("has no function {}", name.to_string_lossy()))
            } else {
                Ok(pointer)
            }
        };
        // SAFETY: as above; device 0 exists if the count is not 0. ggml-backend.h and ggml-cpu.h declare the functions with
        // these types.
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
                threadpool_new: std::mem::transmute::<Ptr, unsafe extern "C" fn(*mut ThreadParams) -> Ptr>(
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
    /// The name of the CPU variant in use, for example `zen4`.
    pub(crate) fn variant(&self) -> &str {
        &self.variant
    }
    /// Devices besides the CPU.
    pub(crate) fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }
    /// Why some backend libraries in the folder offer no device.
    pub(crate) fn unusable(&self) -> &[String] {
        &self.unusable
    }
    /// The name of a device, and its memory in bytes.
    pub(crate) fn describe(&self, gpu: &Gpu) -> (String, Option<u64>) {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: a device of this ggml; the pointers are to locals; the string lives as long as the device.
        unsafe {
            (self.api.ggml_backend_dev_memory)(gpu.device, &mut free, &mut total);
            let name = text((self.api.ggml_backend_dev_description)(gpu.device));
            (name, (total > 0).then_some(total as u64))
        }
    }
    /// The file that ggml-base was loaded from.
    pub(crate) fn library(&self) -> &Path {
        &self.library
    }
    /// The name of the processor.
    pub(crate) fn cpu_name(&self) -> String {
        // SAFETY: the device is valid, and the string lives as long as the device.
        unsafe { text((self.api.ggml_backend_dev_description)(self.cpu.device)) }
    }
    /// Main memory in bytes, if ggml knows it.
    pub(crate) fn memory(&self) -> Option<u64> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the device is valid, the pointers are to locals.
        unsafe { (self.api.ggml_backend_dev_memory)(self.cpu.device, &mut free, &mut total) };
        (total > 0).then_some(total as u64)
    }
}

/// The registration of a backend's library.
fn registration(library: &'static Library) -> Result<Ptr, String> {
    // SAFETY: ggml's macro GGML_BACKEND_DL_IMPL gives this function this signature.
    let init = unsafe { library.get::<unsafe extern "C" fn() -> Ptr>(b"ggml_backend_init\0") }
        .map_err(|_| "has no function ggml_backend_init".to_string())?;
    // SAFETY: the function has no parameters, and the processor has this library's instructions.
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

/// # Safety
/// `string` is null or a C string that lives during the call.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

/// Writes ggml's warnings and errors to standard error, where an isolating host reads them.
unsafe extern "C" fn log_line(level: c_int, line: *const c_char, _: *mut c_void) {
    // GGML_LOG_LEVEL_WARN and above, and continuation lines.
    if level >= 3 {
        // SAFETY: ggml passes a C string.
        eprint!("ggml: {}", unsafe { text(line) });
    }
}

/// ggml calls this right before it ends the process because an assertion failed. Without this callback, ggml would fork a debugger.
unsafe extern "C" fn fatal(message: *const c_char) {
    // SAFETY: ggml passes a C string.
    eprintln!("ggml: fatal: {}", unsafe { text(message) });
}

/// The error for a ggml status.
pub(super) fn status_error(status: c_int) -> Error {
    match status {
        STATUS_ALLOC_FAILED => {
            Error::new(ErrorCode::ResourceExhausted, "ggml has no memory for its work buffer")
        }
        other => Error::internal("ggml could not compute the graph").with_native(other.to_string()),
    }
}

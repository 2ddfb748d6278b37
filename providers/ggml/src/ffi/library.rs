//! Finding and loading ggml's libraries.

use super::{api::*, variant};
use libloading::Library;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::{Path, PathBuf},
    sync::Mutex,
};

/// Where the build script put the libraries; used when they are not beside the plugin.
pub(crate) const LIBRARY_DIR: &str = env!("SDRUN_GGML_LIB_DIR");

/// ggml, loaded once per process and never unloaded.
pub(crate) struct Ggml {
    pub(super) api: Api,
    pub(super) cpu: Cpu,
    variant: &'static str,
    library: PathBuf,
}

/// The CPU device and the functions only its backend has.
pub(super) struct Cpu {
    pub(super) device: Ptr,
    pub(super) set_n_threads: unsafe extern "C" fn(Ptr, c_int),
    pub(super) set_abort_callback: unsafe extern "C" fn(Ptr, Option<AbortCallback>, *mut c_void),
}

// SAFETY: the pointers name objects that ggml creates once and never changes; its functions for devices may
// be called from any thread.
unsafe impl Send for Ggml {}
// SAFETY: as for `Send`.
unsafe impl Sync for Ggml {}

static LOADED: Mutex<Option<&'static Ggml>> = Mutex::new(None);

impl Ggml {
    /// Loads the libraries out of the first of `folders` that has them; gives back the same ggml ever after.
    ///
    /// # Errors
    /// `NotFound` where no folder has them; `FailedPrecondition` where the system cannot load them or they are
    /// of another version.
    pub(crate) fn load(folders: &[&Path]) -> Result<&'static Ggml> {
        let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(ggml) = *loaded {
            return Ok(ggml);
        }
        let ggml: &'static Ggml = Box::leak(Box::new(Self::load_from(folders)?));
        *loaded = Some(ggml);
        Ok(ggml)
    }

    /// As [`load`](Self::load), but always anew.
    pub(crate) fn load_from(folders: &[&Path]) -> Result<Ggml> {
        let base = library_file("ggml-base");
        // A relative folder would be one of the working directory.
        let mut present =
            folders.iter().filter(|folder| folder.is_absolute() && folder.join(&base).is_file());
        let Some(folder) = present.next() else {
            let searched: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
            return Err(Error::not_found(format!("{base} is not in {}", searched.join(" nor in ")))
                .with_hint("the ggml libraries belong beside the plugin; reinstall it or build it again"));
        };
        // Absolute, so that the system's loader does not search.
        let folder = folder.canonicalize().map_err(|e| Error::io("resolve", folder, &e))?;
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
        // SAFETY: returns a static string.
        let version = unsafe { text((api.ggml_version)()) };
        if version != env!("SDRUN_GGML_VERSION") {
            return Err(wrong(format!(
                "{} is ggml {version}, the plugin was built for {}",
                base_file.display(),
                env!("SDRUN_GGML_VERSION")
            )));
        }
        // SAFETY: takes nothing, returns a number.
        let overhead = unsafe { (api.ggml_tensor_overhead)() };
        if overhead != size_of::<RawTensor>() + OBJECT_SIZE {
            return Err(wrong(format!(
                "{} lays out its tensors differently ({overhead} bytes)",
                base_file.display()
            )));
        }
        // SAFETY: the callbacks are functions of this library, which is never unloaded.
        unsafe {
            (api.ggml_log_set)(Some(log_line), std::ptr::null_mut());
            (api.ggml_set_abort_callback)(Some(fatal));
        }

        let usable = variant::usable();
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
        Ok(Ggml { api, cpu, variant, library: base_file })
    }

    fn cpu(api: &Api, library: &'static Library) -> Result<Cpu, String> {
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
        let function = |name: &CStr| {
            // SAFETY: a registration of the API version checked above and a C string.
            let pointer = unsafe { (api.ggml_backend_reg_get_proc_address)(registration, name.as_ptr()) };
            if pointer.is_null() {
                Err(format!("has no function {}", name.to_string_lossy()))
            } else {
                Ok(pointer)
            }
        };
        // SAFETY: as above; device 0 exists where the count is not 0. The two functions have the types that
        // ggml-backend.h states for these names.
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
            })
        }
    }

    /// `MAJOR.MINOR.PATCH`.
    pub(crate) fn version(&self) -> &'static str {
        env!("SDRUN_GGML_VERSION")
    }
    /// Name of the CPU variant in use, for example `zen4`.
    pub(crate) fn variant(&self) -> &'static str {
        self.variant
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

/// Loads a library for good.
fn open(file: &Path) -> Result<&'static Library> {
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

fn library_file(name: &str) -> String {
    format!("{}{name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
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

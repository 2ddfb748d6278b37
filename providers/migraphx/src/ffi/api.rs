//! The functions of `libmigraphx_c` that this crate calls (`migraphx/migraphx.h` of ROCm 7.1).

use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    ffi::{CString, c_char, c_int, c_void},
    path::Path,
    ptr::{self, NonNull},
};

/// An object of the C API.
pub(super) type Object = *mut c_void;

/// Return type of every function; 0 means success.
type Status = c_int;

macro_rules! functions {
    ($( $name:ident $( ($($arg:ty),*) )? since $since:literal; )*) => {
        /// The library's functions, named without the prefix `migraphx_`.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            /// Code of f32 minus 4. Releases before 7.1 number their element types from a different start.
            pub(super) type_offset: c_int,
            $( pub(super) $name: Function<unsafe extern "C" fn($($($arg),*)?) -> Status>, )*
        }

        impl Api {
            /// Looks up every function. A missing one is an error only when it is called.
            fn table(library: &libloading::Library) -> Self {
                Api {
                    type_offset: 0,
                    $( $name: Function {
                        name: concat!("migraphx_", stringify!($name)),
                        since: $since,
                        // SAFETY: the symbol has this signature in every release that exports it.
                        call: unsafe { library.get(concat!("migraphx_", stringify!($name), "\0").as_bytes()) }
                            .ok()
                            .map(|symbol| *symbol),
                    }, )*
                }
            }
        }
    };
}

/// A function that the loaded library may not have.
pub(super) struct Function<F> {
    pub(super) name: &'static str,
    /// The first ROCm release that has it.
    since: &'static str,
    call: Option<F>,
}

impl<F: Copy> Function<F> {
    /// The function. `FailedPrecondition` if the library does not have it.
    pub(super) fn get(&self) -> Result<F> {
        self.call.ok_or_else(|| {
            Error::precondition(format!(
                "this MIGraphX lacks {}, which ROCm {} introduced",
                self.name, self.since
            ))
            .with_hint("install a newer MIGraphX, or set SDRUN_MIGRAPHX_DIR to the folder of one")
        })
    }
}

functions! {
    shape_create_with_strides(*mut Object, c_int, *const usize, usize, *const usize, usize) since "5.0";
    shape_create_scalar(*mut Object, c_int) since "5.0";
    shape_destroy(Object) since "5.0";
    shape_type(*mut c_int, Object) since "5.0";
    shape_lengths(*mut *const usize, *mut usize, Object) since "5.0";
    shape_strides(*mut *const usize, *mut usize, Object) since "5.0";
    shape_bytes(*mut usize, Object) since "5.0";
    shape_dynamic(*mut bool, Object) since "5.5";
    target_create(*mut Object, *const c_char) since "5.0";
    target_destroy(Object) since "5.0";
    onnx_options_create(*mut Object) since "5.0";
    onnx_options_destroy(Object) since "5.0";
    onnx_options_set_input_parameter_shape(Object, *const c_char, *const usize, usize) since "5.0";
    parse_onnx(*mut Object, *const c_char, Object) since "5.0";
    compile_options_create(*mut Object) since "5.0";
    compile_options_destroy(Object) since "5.0";
    compile_options_set_offload_copy(Object, bool) since "5.0";
    compile_options_set_fast_math(Object, bool) since "5.0";
    compile_options_set_exhaustive_tune_flag(Object, bool) since "5.5";
    program_create(*mut Object) since "5.5";
    program_destroy(Object) since "5.0";
    program_compile(Object, Object, Object) since "5.0";
    program_get_parameter_shapes(*mut Object, Object) since "5.0";
    program_get_output_shapes(*mut Object, Object) since "5.0";
    program_parameter_shapes_destroy(Object) since "5.0";
    program_parameter_shapes_size(*mut usize, Object) since "5.0";
    program_parameter_shapes_names(*mut *const c_char, Object) since "5.0";
    program_parameter_shapes_get(*mut Object, Object, *const c_char) since "5.0";
    shapes_destroy(Object) since "5.0";
    shapes_size(*mut usize, Object) since "5.0";
    shapes_get(*mut Object, Object, usize) since "5.0";
    program_parameters_create(*mut Object) since "5.0";
    program_parameters_destroy(Object) since "5.0";
    program_parameters_add(Object, *const c_char, Object) since "5.0";
    argument_create(*mut Object, Object, *mut c_void) since "5.0";
    argument_destroy(Object) since "5.0";
    argument_shape(*mut Object, Object) since "5.0";
    argument_buffer(*mut *mut c_char, Object) since "5.0";
    arguments_destroy(Object) since "5.0";
    arguments_size(*mut usize, Object) since "5.0";
    arguments_get(*mut Object, Object, usize) since "5.0";
    program_run(*mut Object, Object, Object) since "5.0";
    program_run_async(*mut Object, Object, Object, *mut c_void, *const c_char) since "5.4";
    file_options_create(*mut Object) since "5.0";
    file_options_destroy(Object) since "5.0";
    file_options_set_file_format(Object, *const c_char) since "5.0";
    save(Object, *const c_char, Object) since "5.0";
    load(*mut Object, *const c_char, Object) since "5.0";
}

/// Calls a function of the table. An error completes the sentence "MIGraphX cannot …" with `$doing`.
macro_rules! call {
    ($api:expr, $function:ident ( $($argument:expr),* $(,)? ), $doing:expr) => {{
        let function = $api.$function.get()?;
        // SAFETY: the wrappers in this module ensure that every argument is a live handle of the right kind, a valid
        // out pointer, a NUL-terminated string, or a slice with its length.
        let status = unsafe { function($($argument),*) };
        $crate::ffi::api::check(status, $doing)
    }};
}
pub(super) use call;

/// `Ok` for success. The library writes its reason only to stderr, and the host that runs the worker adds it to the
/// error.
pub(super) fn check(status: Status, doing: impl FnOnce() -> String) -> Result<()> {
    let name = match status {
        0 => return Ok(()),
        1 => "bad parameter",
        3 => "unknown target",
        4 => "unknown error",
        _ => "undocumented status",
    };
    Err(Error::new(ErrorCode::Internal, format!("MIGraphX cannot {}", doing()))
        .with_native(format!("migraphx_status {status} ({name})")))
}

/// Owns one object of the C API.
pub(super) struct Owned {
    object: NonNull<c_void>,
    destroy: Option<unsafe extern "C" fn(Object) -> Status>,
}

// SAFETY: the library's objects are not bound to a thread, and a gpu program selects its device itself. Two threads
// never use an object at once, because `Owned` is not `Sync`.
unsafe impl Send for Owned {}

impl Owned {
    /// Takes ownership of the object that `create` stores in its out pointer.
    pub(super) fn new(
        destroy: &Function<unsafe extern "C" fn(Object) -> Status>,
        create: impl FnOnce(*mut Object) -> Result<()>,
    ) -> Result<Self> {
        let mut object = ptr::null_mut();
        create(&mut object)?;
        let object = NonNull::new(object)
            .ok_or_else(|| Error::internal("MIGraphX returned a null handle with success"))?;
        Ok(Owned { object, destroy: destroy.call })
    }

    pub(super) fn object(&self) -> Object {
        self.object.as_ptr()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the object is live and only this value owns it.
            unsafe { destroy(self.object.as_ptr()) };
        }
    }
}

pub(super) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} contains a NUL character")))
}

pub(super) fn c_path(path: &Path) -> Result<CString> {
    let text =
        path.to_str().ok_or_else(|| Error::invalid(format!("the path {} is not UTF-8", path.display())))?;
    c_string(text)
}

impl Api {
    /// Loads `libmigraphx_c` for the rest of the process and detects its numbering of element types.
    pub(crate) fn load(file: &Path) -> Result<Self> {
        let library = sdrun_provider_common::open(file)?;
        let mut api = Self::table(&library);
        // Compiled programs and the function table refer to the library, so it is never unloaded.
        std::mem::forget(library);
        if api.program_create.call.is_none() || api.shape_bytes.call.is_none() {
            return Err(Error::new(
                ErrorCode::DataLoss,
                format!("{} is not MIGraphX's C library: it lacks migraphx_program_create", file.display()),
            )
            .with_file(file)
            .with_hint("point SDRUN_MIGRAPHX_DIR at the folder that holds libmigraphx_c.so.3"));
        }
        // Code 4 is f32 since ROCm 7.1, which inserted fp4x2 without changing the soname. Before that it is f64.
        api.type_offset = match api.bytes_of_scalar(4)? {
            4 => 0,
            8 => -1,
            n => {
                return Err(Error::unsupported(format!(
                    "{} numbers its element types in an unknown way: type 4 has {n} bytes",
                    file.display()
                ))
                .with_file(file));
            }
        };
        Ok(api)
    }

    fn bytes_of_scalar(&self, code: c_int) -> Result<usize> {
        let doing = || "describe a scalar".to_string();
        let shape =
            Owned::new(&self.shape_destroy, |out| call!(self, shape_create_scalar(out, code), doing))?;
        let mut bytes = 0;
        call!(self, shape_bytes(&mut bytes, shape.object()), doing)?;
        Ok(bytes)
    }
}

//! The part of ggml's C interface that is used here. Types are those of `ggml.h` in ggml 0.26 and 0.27. Functions are found by name.

use libloading::Library;
use std::ffi::{c_char, c_int, c_void};

/// `struct ggml_tensor`.
#[repr(C)]
pub(super) struct RawTensor {
    pub(super) type_: c_int,
    pub(super) buffer: *mut c_void,
    /// Elements in each dimension, the innermost first.
    pub(super) ne: [i64; 4],
    /// Stride of each dimension in bytes.
    pub(super) nb: [usize; 4],
    pub(super) op: c_int,
    pub(super) op_params: [i32; 16],
    pub(super) flags: i32,
    pub(super) src: [*mut RawTensor; MAX_SRC],
    pub(super) view_src: *mut RawTensor,
    pub(super) view_offs: usize,
    pub(super) data: *mut c_void,
    pub(super) name: [c_char; 64],
    pub(super) extra: *mut c_void,
    pub(super) padding: [c_char; 8],
}

// As gcc lays out the header of ggml 0.26. Loading also checks the offset of the name.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<RawTensor>() == 336);

/// `GGML_MAX_SRC`.
pub(super) const MAX_SRC: usize = 10;
/// `GGML_BACKEND_API_VERSION` of ggml 0.26.
pub(super) const BACKEND_API_VERSION: c_int = 3;

/// `struct ggml_init_params`.
#[repr(C)]
pub(super) struct InitParams {
    pub(super) mem_size: usize,
    pub(super) mem_buffer: *mut c_void,
    pub(super) no_alloc: bool,
}

/// `GGML_OP_NONE`.
pub(super) const OP_NONE: c_int = 0;
/// `GGML_TENSOR_FLAG_OUTPUT`.
pub(super) const FLAG_OUTPUT: i32 = 2;

/// `ggml_context *`, `ggml_cgraph *`, backends, buffers and other opaque pointers.
pub(super) type Ptr = *mut c_void;
pub(super) type TensorPtr = *mut RawTensor;
pub(super) type CustomOp = unsafe extern "C" fn(TensorPtr, c_int, c_int, *mut c_void);
pub(super) type LogCallback = unsafe extern "C" fn(c_int, *const c_char, *mut c_void);
pub(super) type FatalCallback = unsafe extern "C" fn(*const c_char);
pub(super) type EvalCallback = unsafe extern "C" fn(TensorPtr, bool, *mut c_void) -> bool;
pub(super) type AbortCallback = unsafe extern "C" fn(*mut c_void) -> bool;

/// `GGML_PREC_F32`: sums are f32.
pub(super) const PREC_F32: c_int = 10;
/// `GGML_SCALE_MODE_NEAREST`.
pub(super) const SCALE_MODE_NEAREST: u32 = 0;

/// `GGML_STATUS_SUCCESS`.
pub(super) const STATUS_SUCCESS: c_int = 0;
/// `GGML_STATUS_ABORTED`: the abort callback asked to stop.
pub(super) const STATUS_ABORTED: c_int = 1;
/// `GGML_BACKEND_BUFFER_USAGE_WEIGHTS`.
pub(super) const USAGE_WEIGHTS: c_int = 1;
/// `GGML_STATUS_ALLOC_FAILED`.
pub(super) const STATUS_ALLOC_FAILED: c_int = -2;

/// `GGML_MAX_N_THREADS`.
pub(crate) const MAX_THREADS: usize = 512;

/// `struct ggml_threadpool_params`.
#[repr(C)]
pub(super) struct ThreadParams {
    /// All false: the system places the threads.
    pub(super) cpu_mask: [bool; MAX_THREADS],
    pub(super) n_threads: c_int,
    /// `enum ggml_sched_priority`; 0 is normal.
    pub(super) priority: c_int,
    pub(super) poll: u32,
    pub(super) strict_cpu: bool,
    pub(super) paused: bool,
}

macro_rules! api {
    ($($name:ident: fn($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// Functions of ggml-base.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Api {
            /// Finds every function.
            ///
            /// # Errors
            /// The name of the first missing function.
            ///
            /// # Safety
            /// `library` is a ggml-base whose functions have these signatures. It stays loaded as long as the table is used.
            pub(super) unsafe fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Api {$(
                    $name: {
                        // SAFETY: the signature is right by this function's contract.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| stringify!($name))?
                    },
                )*})
            }
        }
    };
}

api! {
    ggml_version: fn() -> *const c_char;
    ggml_log_set: fn(Option<LogCallback>, *mut c_void);
    ggml_set_abort_callback: fn(Option<FatalCallback>) -> Option<FatalCallback>;
    ggml_tensor_overhead: fn() -> usize;
    ggml_nbytes: fn(TensorPtr) -> usize;
    ggml_get_name: fn(TensorPtr) -> *const c_char;
    ggml_graph_overhead_custom: fn(usize, bool) -> usize;
    ggml_init: fn(InitParams) -> Ptr;
    ggml_free: fn(Ptr);
    ggml_new_tensor_4d: fn(Ptr, c_int, i64, i64, i64, i64) -> TensorPtr;
    ggml_set_input: fn(TensorPtr);
    ggml_set_output: fn(TensorPtr);
    ggml_new_graph_custom: fn(Ptr, usize, bool) -> Ptr;
    ggml_build_forward_expand: fn(Ptr, TensorPtr);
    ggml_graph_n_nodes: fn(Ptr) -> c_int;
    ggml_graph_node: fn(Ptr, c_int) -> TensorPtr;
    ggml_op_desc: fn(TensorPtr) -> *const c_char;

    ggml_add: fn(Ptr, TensorPtr, TensorPtr) -> TensorPtr;
    ggml_sub: fn(Ptr, TensorPtr, TensorPtr) -> TensorPtr;
    ggml_mul: fn(Ptr, TensorPtr, TensorPtr) -> TensorPtr;
    ggml_div: fn(Ptr, TensorPtr, TensorPtr) -> TensorPtr;
    ggml_abs: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_cos: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_elu: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_exp: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_gelu: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_gelu_erf: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_gelu_quick: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_hardswish: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_log: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_neg: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_relu: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_sigmoid: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_silu: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_sin: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_sqr: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_sqrt: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_tanh: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_leaky_relu: fn(Ptr, TensorPtr, f32, bool) -> TensorPtr;
    ggml_clamp: fn(Ptr, TensorPtr, f32, f32) -> TensorPtr;
    ggml_scale_bias: fn(Ptr, TensorPtr, f32, f32) -> TensorPtr;
    ggml_reshape_4d: fn(Ptr, TensorPtr, i64, i64, i64, i64) -> TensorPtr;
    ggml_view_4d: fn(Ptr, TensorPtr, i64, i64, i64, i64, usize, usize, usize, usize) -> TensorPtr;
    ggml_permute: fn(Ptr, TensorPtr, c_int, c_int, c_int, c_int) -> TensorPtr;
    ggml_cont: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_concat: fn(Ptr, TensorPtr, TensorPtr, c_int) -> TensorPtr;
    ggml_cast: fn(Ptr, TensorPtr, c_int) -> TensorPtr;
    ggml_repeat_4d: fn(Ptr, TensorPtr, i64, i64, i64, i64) -> TensorPtr;
    ggml_interpolate: fn(Ptr, TensorPtr, i64, i64, i64, i64, u32) -> TensorPtr;
    ggml_pad_ext: fn(Ptr, TensorPtr, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_int) -> TensorPtr;
    ggml_glu: fn(Ptr, TensorPtr, c_int, bool) -> TensorPtr;
    ggml_norm: fn(Ptr, TensorPtr, f32) -> TensorPtr;
    ggml_rms_norm: fn(Ptr, TensorPtr, f32) -> TensorPtr;
    ggml_group_norm: fn(Ptr, TensorPtr, c_int, f32) -> TensorPtr;
    ggml_conv_2d_direct: fn(Ptr, TensorPtr, TensorPtr, c_int, c_int, c_int, c_int, c_int, c_int) -> TensorPtr;
    ggml_mul_mat: fn(Ptr, TensorPtr, TensorPtr) -> TensorPtr;
    ggml_mul_mat_set_prec: fn(TensorPtr, c_int);
    ggml_flash_attn_ext: fn(Ptr, TensorPtr, TensorPtr, TensorPtr, TensorPtr, f32, f32, f32) -> TensorPtr;
    ggml_flash_attn_ext_set_prec: fn(TensorPtr, c_int);
    ggml_soft_max: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_mean: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_sum_rows: fn(Ptr, TensorPtr) -> TensorPtr;
    ggml_custom_4d: fn(Ptr, c_int, i64, i64, i64, i64, *mut TensorPtr, c_int, CustomOp, c_int, *mut c_void) -> TensorPtr;

    ggml_backend_reg_dev_get: fn(Ptr, usize) -> Ptr;
    ggml_backend_reg_dev_count: fn(Ptr) -> usize;
    ggml_backend_reg_get_proc_address: fn(Ptr, *const c_char) -> Ptr;
    ggml_backend_dev_supports_op: fn(Ptr, TensorPtr) -> bool;
    ggml_backend_sched_new: fn(*mut Ptr, *mut Ptr, c_int, usize, bool, bool) -> Ptr;
    ggml_backend_sched_free: fn(Ptr);
    ggml_backend_sched_set_tensor_backend: fn(Ptr, TensorPtr, Ptr);
    ggml_backend_sched_set_eval_callback: fn(Ptr, Option<EvalCallback>, *mut c_void);
    ggml_backend_sched_alloc_graph: fn(Ptr, Ptr) -> bool;
    ggml_backend_sched_graph_compute: fn(Ptr, Ptr) -> c_int;
    ggml_backend_sched_get_n_splits: fn(Ptr) -> c_int;
    ggml_backend_sched_get_tensor_backend: fn(Ptr, TensorPtr) -> Ptr;
    ggml_backend_sched_get_buffer_size: fn(Ptr, Ptr) -> usize;
    ggml_backend_dev_description: fn(Ptr) -> *const c_char;
    ggml_backend_dev_memory: fn(Ptr, *mut usize, *mut usize);
    ggml_backend_dev_init: fn(Ptr, *const c_char) -> Ptr;
    ggml_backend_free: fn(Ptr);
    ggml_backend_get_default_buffer_type: fn(Ptr) -> Ptr;
    ggml_backend_dev_buffer_type: fn(Ptr) -> Ptr;
    ggml_backend_dev_host_buffer_type: fn(Ptr) -> Ptr;
    ggml_backend_buft_alloc_buffer: fn(Ptr, usize) -> Ptr;
    ggml_backend_buft_get_alignment: fn(Ptr) -> usize;
    ggml_backend_buft_get_alloc_size: fn(Ptr, TensorPtr) -> usize;
    ggml_backend_tensor_alloc: fn(Ptr, TensorPtr, Ptr) -> c_int;
    ggml_backend_alloc_ctx_tensors_from_buft: fn(Ptr, Ptr) -> Ptr;
    ggml_backend_cpu_buffer_from_ptr: fn(Ptr, usize) -> Ptr;
    ggml_backend_buffer_free: fn(Ptr);
    ggml_backend_view_init: fn(TensorPtr) -> c_int;
    ggml_backend_buffer_get_base: fn(Ptr) -> Ptr;
    ggml_backend_buffer_get_size: fn(Ptr) -> usize;
    ggml_backend_buffer_set_usage: fn(Ptr, c_int);
    ggml_backend_tensor_set: fn(TensorPtr, *const c_void, usize, usize);
    ggml_backend_tensor_get: fn(TensorPtr, *mut c_void, usize, usize);
    ggml_backend_tensor_copy: fn(TensorPtr, TensorPtr);
    ggml_backend_graph_compute: fn(Ptr, Ptr) -> c_int;
    ggml_gallocr_new: fn(Ptr) -> Ptr;
    ggml_gallocr_alloc_graph: fn(Ptr, Ptr) -> bool;
    ggml_gallocr_reserve_n_size: fn(Ptr, Ptr, *const c_int, *const c_int, *mut usize);
    ggml_gallocr_get_buffer_size: fn(Ptr, c_int) -> usize;
    ggml_gallocr_free: fn(Ptr);
}

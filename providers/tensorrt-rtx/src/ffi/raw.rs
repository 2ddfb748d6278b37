//! The declarations of shim/shim.h.

use std::ffi::{c_char, c_void};

macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub(super) struct $name(std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>, [u8; 0]);
    )*};
}

opaque! { Logger HostMemory Runtime CudaEngine Refitter RuntimeConfig RuntimeCache Context }

#[repr(C)]
pub(super) struct SdInput {
    pub(super) name: *const c_char,
    pub(super) rank: i32,
    pub(super) min: *const i64,
    pub(super) opt: *const i64,
    pub(super) max: *const i64,
}

#[repr(C)]
pub(super) struct SdWeight {
    pub(super) name: *const c_char,
    pub(super) data: *const c_void,
    pub(super) size: usize,
}

#[repr(C)]
pub(super) struct SdRecord {
    pub(super) name: *const c_char,
    pub(super) kind: i32,
    pub(super) onnx_type: i32,
    pub(super) type_: i32,
    pub(super) count: i64,
    pub(super) source_count: i32,
    pub(super) sources: *const *const c_char,
    pub(super) epsilon: f32,
}

#[repr(C)]
pub(super) struct SdFault {
    pub(super) code: i32,
    pub(super) op: *const c_char,
    pub(super) node: *const c_char,
    pub(super) text: *const c_char,
}

#[repr(C)]
pub(super) struct SdBuild {
    pub(super) create_builder: *mut c_void,
    pub(super) create_parser: *mut c_void,
    pub(super) logger: *mut Logger,
    pub(super) model: *const c_void,
    pub(super) model_size: usize,
    pub(super) capability: i32,
    pub(super) strip: i32,
    pub(super) tf32: i32,
    pub(super) streaming: i32,
    pub(super) weights: *const SdWeight,
    pub(super) weight_count: usize,
    pub(super) inputs: *const SdInput,
    pub(super) input_count: usize,
    pub(super) context: *mut c_void,
    pub(super) record: unsafe extern "C" fn(*mut c_void, *const SdRecord) -> i32,
    pub(super) fault: unsafe extern "C" fn(*mut c_void, *const SdFault),
    pub(super) progress:
        unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char, step: i32, total: i32) -> i32,
    pub(super) subject: [c_char; 256],
    pub(super) stage: i32,
}

/// `SdStage`.
pub(super) mod stage {
    pub(in crate::ffi) const BUILDER: i32 = 1;
    pub(in crate::ffi) const TARGET: i32 = 2;
    pub(in crate::ffi) const LOAD: i32 = 3;
    pub(in crate::ffi) const WEIGHT: i32 = 4;
    pub(in crate::ffi) const PARSE: i32 = 5;
    pub(in crate::ffi) const MARK: i32 = 6;
    pub(in crate::ffi) const PROFILE: i32 = 7;
}

#[repr(C)]
pub(super) struct SdPrototype {
    pub(super) type_: i32,
    pub(super) count: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SdDims {
    pub(super) rank: i32,
    pub(super) d: [i64; 8],
}

#[rustfmt::skip]
unsafe extern "C" {
    pub(super) fn sd_logger_new(write: unsafe extern "C" fn(i32, *const c_char)) -> *mut Logger;
    pub(super) fn sd_build(build: *mut SdBuild) -> *mut HostMemory;
    pub(super) fn sd_memory_data(memory: *const HostMemory) -> *const c_void;
    pub(super) fn sd_memory_size(memory: *const HostMemory) -> usize;
    pub(super) fn sd_memory_free(memory: *mut HostMemory);

    pub(super) fn sd_runtime_new(create: *mut c_void, logger: *mut Logger) -> *mut Runtime;
    pub(super) fn sd_runtime_free(runtime: *mut Runtime);
    pub(super) fn sd_runtime_validity(runtime: *const Runtime, plan: *const c_void, size: usize, diagnostics: *mut u64) -> i32;
    pub(super) fn sd_engine_load(runtime: *mut Runtime, plan: *const c_void, size: usize) -> *mut CudaEngine;
    pub(super) fn sd_engine_free(engine: *mut CudaEngine);
    pub(super) fn sd_engine_io_count(engine: *const CudaEngine) -> i32;
    pub(super) fn sd_engine_io_name(engine: *const CudaEngine, index: i32) -> *const c_char;
    pub(super) fn sd_engine_io_type(engine: *const CudaEngine, name: *const c_char) -> i32;
    pub(super) fn sd_engine_io_on_host(engine: *const CudaEngine, name: *const c_char) -> i32;
    pub(super) fn sd_engine_stat(engine: *const CudaEngine, stat: i32) -> i64;
    pub(super) fn sd_engine_activations(engine: *const CudaEngine) -> i64;
    pub(super) fn sd_engine_streamable(engine: *const CudaEngine) -> i64;
    pub(super) fn sd_engine_set_budget(engine: *mut CudaEngine, bytes: i64) -> i32;
    pub(super) fn sd_engine_bake(engine: *mut CudaEngine) -> *mut HostMemory;

    pub(super) fn sd_refitter_new(create: *mut c_void, engine: *mut CudaEngine, logger: *mut Logger) -> *mut Refitter;
    pub(super) fn sd_refitter_free(refitter: *mut Refitter);
    pub(super) fn sd_refitter_all(refitter: *mut Refitter, size: i32, names: *mut *const c_char) -> i32;
    pub(super) fn sd_refitter_missing(refitter: *mut Refitter, size: i32, names: *mut *const c_char) -> i32;
    pub(super) fn sd_refitter_prototype(refitter: *const Refitter, name: *const c_char) -> SdPrototype;
    pub(super) fn sd_refitter_set(refitter: *mut Refitter, name: *const c_char, type_: i32, values: *const c_void, count: i64) -> i32;
    pub(super) fn sd_refitter_refit(refitter: *mut Refitter, stream: *mut c_void) -> i32;
    pub(super) fn sd_refitter_release(refitter: *mut Refitter) -> i32;

    pub(super) fn sd_config_new(engine: *mut CudaEngine) -> *mut RuntimeConfig;
    pub(super) fn sd_config_free(config: *mut RuntimeConfig);
    pub(super) fn sd_config_cuda_graph(config: *mut RuntimeConfig, strategy: i32) -> i32;
    pub(super) fn sd_cache_new(config: *mut RuntimeConfig) -> *mut RuntimeCache;
    pub(super) fn sd_cache_load(cache: *mut RuntimeCache, bytes: *const c_void, size: usize) -> i32;
    pub(super) fn sd_cache_store(cache: *const RuntimeCache) -> *mut HostMemory;
    pub(super) fn sd_cache_free(cache: *mut RuntimeCache);

    pub(super) fn sd_context_new(engine: *mut CudaEngine, config: *mut RuntimeConfig) -> *mut Context;
    pub(super) fn sd_context_free(context: *mut Context);
    pub(super) fn sd_context_set_shape(context: *mut Context, name: *const c_char, shape: *const SdDims) -> i32;
    pub(super) fn sd_context_shape(context: *const Context, name: *const c_char) -> SdDims;
    pub(super) fn sd_context_set_address(context: *mut Context, name: *const c_char, address: *mut c_void) -> i32;
    pub(super) fn sd_context_enqueue(context: *mut Context, stream: *mut c_void) -> i32;
}

//! One argument struct for each call. Fields marked "in" are set by the host, fields marked "out" by the plugin.

use super::{RawBuffer, RawDeviceTensor, RawHost, RawOutputSink, RawStr, RawTensor, RawWeightSource};
use std::ffi::c_void;

/// Arguments of `init`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InitArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in: JSON `InitConfig`
    pub config: RawStr,
    /// in
    pub host: *const RawHost,
    /// out: JSON `RuntimeInfo`
    pub runtime: RawBuffer,
}

/// Arguments of `devices`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DevicesArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// out: JSON list of `Device`
    pub devices: RawBuffer,
}

/// Arguments of `capabilities`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CapabilitiesArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in: id of a device
    pub device: RawStr,
    /// out: JSON `Capabilities`
    pub capabilities: RawBuffer,
}

/// Arguments of `assess`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AssessArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in: ONNX bytes, as for `build`
    pub model: RawStr,
    /// in: JSON `BuildSpec`
    pub spec: RawStr,
    /// out: JSON `Assessment`
    pub assessment: RawBuffer,
}

/// Arguments of `build`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BuildArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in: ONNX bytes
    pub model: RawStr,
    /// in: JSON `BuildSpec`
    pub spec: RawStr,
    /// in
    pub weights: *const RawWeightSource,
    /// in
    pub host: *const RawHost,
    /// out
    pub engine: *mut c_void,
}

/// Arguments of `engine_load`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineLoadArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in: bytes from `engine_serialize`
    pub payload: RawStr,
    /// in: JSON `BuildSpec`
    pub spec: RawStr,
    /// in
    pub host: *const RawHost,
    /// out
    pub engine: *mut c_void,
}

/// Arguments of `engine_check`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineCheckArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in: `compatibility` of an `EngineInfo`
    pub compatibility: RawStr,
    /// in: id of a device
    pub device: RawStr,
    /// out: JSON `Compatibility`
    pub verdict: RawBuffer,
}

/// Arguments of `engine_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineInfoArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub engine: *mut c_void,
    /// out: JSON `EngineInfo`
    pub info: RawBuffer,
}

/// Arguments of `engine_serialize`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineSerializeArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub engine: *mut c_void,
    /// out
    pub payload: RawBuffer,
}

/// Arguments of `engine_bake`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EngineBakeArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub engine: *mut c_void,
    /// in
    pub weights: *const RawWeightSource,
    /// in
    pub host: *const RawHost,
    /// out: an engine with these weights inside
    pub baked: *mut c_void,
}

/// Arguments of `session_create`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionCreateArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub engine: *mut c_void,
    /// in; may be null for an engine that needs no weights
    pub weights: *const RawWeightSource,
    /// in
    pub host: *const RawHost,
    /// out
    pub session: *mut c_void,
}

/// Arguments of `session_refit`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionRefitArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub session: *mut c_void,
    /// in: names of the changed weights
    pub changed: *const RawStr,
    pub changed_count: usize,
    /// in: every weight of the engine, changed or not
    pub weights: *const RawWeightSource,
    /// in
    pub host: *const RawHost,
    /// out: JSON `RefitReport`
    pub report: RawBuffer,
}

/// Arguments of `session_run`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionRunArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub session: *mut c_void,
    /// in: in the order of `EngineInfo::inputs`
    pub inputs: *const RawTensor,
    pub input_count: usize,
    /// in
    pub sink: *const RawOutputSink,
    /// in
    pub host: *const RawHost,
}

/// Arguments of `RawDeviceTensors::run`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionRunOnDeviceArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub session: *mut c_void,
    /// in: type and shape of each input, and its bytes if it is in main memory
    pub inputs: *const RawTensor,
    /// in: for each input its device tensor, or null if it is in main memory
    pub tensors: *const *mut c_void,
    pub input_count: usize,
    /// in: for each output, 1 if it stays on the device, else 0
    pub keep: *const u8,
    /// out: one entry for each output, filled if the output stays on the device
    pub kept: *mut RawDeviceTensor,
    pub output_count: usize,
    /// in: for the outputs that do not stay on the device
    pub sink: *const RawOutputSink,
    /// in
    pub host: *const RawHost,
}

/// Arguments of `RawDeviceTensors::read`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorReadArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub tensor: *mut c_void,
    /// in: buffer for the tensor's bytes, which the call fills
    pub bytes: *mut u8,
    pub len: usize,
}

/// Arguments of `session_memory`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionMemoryArgs {
    pub struct_size: u32,
    pub reserved: u32,
    /// in
    pub session: *mut c_void,
    /// out: JSON `MemoryReport`
    pub report: RawBuffer,
}

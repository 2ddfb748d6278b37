//! Sizes and offsets of the first version of every struct. If a field moves, the build fails here.

use super::*;
use crate::ffi::prefix::Prefixed;
use std::mem::offset_of;

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the plugin ABI is defined for 64-bit systems");

/// For structs that can grow: the size in version 1.0, and the offset of that version's last field. Later fields come
/// after it, so the size can only increase.
macro_rules! grows {
    ($($t:ident: $first:literal, $last:ident @ $offset:literal;)*) => {$(
        const _: () = assert!(size_of::<$t>() >= $first && offset_of!($t, $last) == $offset, stringify!($t));
        const _: () = assert!(offset_of!($t, struct_size) == 0, stringify!($t));
        // SAFETY: the struct starts with its size (asserted above) and holds only integers, raw pointers and optional
        // functions, for which zero is a valid value.
        unsafe impl Prefixed for $t {
            const FIRST: usize = $first;
        }
    )*};
}

/// For structs that never change: their size and the offset of their last field.
macro_rules! frozen {
    ($($t:ident: $size:literal, $last:ident @ $offset:literal;)*) => {$(
        const _: () = assert!(size_of::<$t>() == $size && offset_of!($t, $last) == $offset, stringify!($t));
    )*};
}

frozen! {
    RawStr: 16, len @ 8;
    RawBuffer: 32, release @ 24;
    RawTensor: 40, len @ 32;
    RawDeviceTensor: 32, dims @ 24;
    RawOutputSpec: 24, dims @ 16;
}

grows! {
    RawError: 88, release @ 80;
    RawHost: 40, cancelled @ 32;
    RawWeight: 88, encoding @ 72;
    RawWeightSource: 40, get_encoded @ 32;
    RawOutputSink: 24, allocate @ 16;
    RawPlugin: 200, get_extension @ 192;
    RawDeviceTensors: 32, destroy @ 24;
    RawAssess: 16, assess @ 8;
    InitArgs: 64, runtime @ 32;
    DevicesArgs: 40, devices @ 8;
    CapabilitiesArgs: 56, capabilities @ 24;
    AssessArgs: 72, assessment @ 40;
    BuildArgs: 64, engine @ 56;
    EngineLoadArgs: 56, engine @ 48;
    EngineCheckArgs: 72, verdict @ 40;
    EngineInfoArgs: 48, info @ 16;
    EngineSerializeArgs: 48, payload @ 16;
    EngineBakeArgs: 40, baked @ 32;
    SessionCreateArgs: 40, session @ 32;
    SessionRefitArgs: 80, report @ 48;
    SessionRunArgs: 48, host @ 40;
    SessionRunOnDeviceArgs: 80, host @ 72;
    TensorReadArgs: 32, len @ 24;
    SessionMemoryArgs: 48, report @ 16;
}

const _: () = assert!(offset_of!(RawPlugin, abi_major) == 4 && offset_of!(RawPlugin, id) == 8);

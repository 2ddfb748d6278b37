//! A plugin for another major version of the ABI that still exports this version's symbol.
#![allow(unsafe_code)]

use sdrun_abi::{
    ABI_MAJOR,
    ffi::raw::{RawPlugin, RawStr},
};

const NONE: RawPlugin = RawPlugin {
    struct_size: size_of::<RawPlugin>() as u32,
    abi_major: ABI_MAJOR + 1,
    abi_minor: 0,
    id: RawStr::new(b"wrong-major"),
    vendor: RawStr::new(b"sdrun tests"),
    version: RawStr::new(b"0"),
    build_id: RawStr::new(b"0"),
    init: None,
    devices: None,
    capabilities: None,
    build: None,
    engine_load: None,
    engine_check: None,
    engine_info: None,
    engine_serialize: None,
    engine_destroy: None,
    engine_bake: None,
    session_create: None,
    session_refit: None,
    session_run: None,
    session_memory: None,
    session_destroy: None,
    get_extension: None,
};

static PLUGIN: RawPlugin = NONE;

/// Returns its table for any version of the host.
// SAFETY: the name belongs to the plugin ABI, which defines this signature.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_plugin_query_v1(_max_minor: u32) -> *const RawPlugin {
    &PLUGIN
}

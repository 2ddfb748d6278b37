//! The exported symbol: the ordinary function table, with two faults that no Rust provider can have.
#![allow(unsafe_code)]

use crate::{
    behaviour::{self, Behaviour, chosen},
    provider::Mock,
};
use sdrun_abi::ffi::{
    callbacks::buffer_to_raw,
    export::{Export, State, table},
    raw::{BuildArgs, EngineInfoArgs, RawError, RawPlugin},
};

struct Exported;

impl Export for Exported {
    fn state() -> &'static State {
        static STATE: State = State::new(|| Box::new(Mock));
        &STATE
    }
}

const HONEST: RawPlugin = table::<Exported>("mock", "sdrun tests", env!("CARGO_PKG_VERSION"), "mock-build");

static PLUGIN: RawPlugin = RawPlugin { engine_info: Some(engine_info), build: Some(build), ..HONEST };

unsafe extern "C" fn engine_info(args: *mut EngineInfoArgs) -> *mut RawError {
    let Some(honest) = HONEST.engine_info else { return std::ptr::null_mut() };
    // SAFETY: the host's arguments, passed on.
    let error = unsafe { honest(args) };
    if *chosen() == Behaviour::GarbageInfo && error.is_null() {
        // SAFETY: on success the struct is valid; the honest answer in it is released before it is replaced.
        unsafe {
            if let Some(release) = (*args).info.release {
                release(&raw mut (*args).info);
            }
            (*args).info = buffer_to_raw(b"{\"inputs\": [oops".to_vec());
        }
    }
    error
}

unsafe extern "C" fn build(args: *mut BuildArgs) -> *mut RawError {
    match (HONEST.build, chosen()) {
        // SAFETY: the host's arguments, passed on.
        (Some(honest), behaviour) if *behaviour != Behaviour::NullEngine => unsafe { honest(args) },
        _ => std::ptr::null_mut(),
    }
}

/// The one symbol of a plugin. `SDRUN_MOCK_QUERY` says what goes wrong in it.
// SAFETY: the name belongs to the plugin ABI, and the signature is the one it prescribes.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_plugin_query_v1(_max_minor: u32) -> *const RawPlugin {
    match std::env::var("SDRUN_MOCK_QUERY").as_deref() {
        Ok("abort") => std::process::abort(),
        Ok("hang") => behaviour::hang(),
        _ => &PLUGIN,
    }
}

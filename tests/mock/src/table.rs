//! The exported symbol: the normal function table, with two faults that a Rust provider cannot have.
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
    // SAFETY: these are the host's own arguments.
    let error = unsafe { honest(args) };
    if *chosen() == Behaviour::GarbageInfo && error.is_null() {
        // SAFETY: on success the struct is valid. Its correct answer is released before it is replaced.
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
        // SAFETY: these are the host's own arguments.
        (Some(honest), behaviour) if *behaviour != Behaviour::NullEngine => unsafe { honest(args) },
        _ => std::ptr::null_mut(),
    }
}

/// The only symbol of a plugin. `SDRUN_MOCK_QUERY` chooses what goes wrong in it.
// SAFETY: the name belongs to the plugin ABI, which defines this signature.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_plugin_query_v1(_max_minor: u32) -> *const RawPlugin {
    match std::env::var("SDRUN_MOCK_QUERY").as_deref() {
        Ok("abort") => std::process::abort(),
        Ok("hang") => behaviour::hang(),
        _ => &PLUGIN,
    }
}

/// Prints through the C library, as vendors' libraries do.
pub(crate) fn print_in_c() {
    // SAFETY: the text ends with a zero, and a null pointer means all streams.
    unsafe {
        libc::puts(c"printed by C".as_ptr());
        libc::fflush(std::ptr::null_mut());
    }
}

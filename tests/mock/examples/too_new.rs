//! A plugin that needs a newer minor version of the ABI than any host supports.
#![allow(unsafe_code)]

use sdrun_abi::ffi::raw::RawPlugin;

/// Returns null, as the ABI requires for a host that is too old.
// SAFETY: the name belongs to the plugin ABI, which defines this signature.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_plugin_query_v1(_max_minor: u32) -> *const RawPlugin {
    std::ptr::null()
}

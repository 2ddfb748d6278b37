//! A plugin whose function table ends before the required functions.
#![allow(unsafe_code)]

use sdrun_abi::{
    ABI_MAJOR, ABI_MINOR,
    ffi::raw::{RawPlugin, RawStr},
};

/// The start of a table and nothing after it.
#[repr(C)]
struct Head {
    struct_size: u32,
    abi_major: u16,
    abi_minor: u16,
    texts: [RawStr; 4],
}

// SAFETY: it is never written, and neither is anything it points to.
unsafe impl Sync for Head {}

static HEAD: Head = Head {
    struct_size: size_of::<Head>() as u32,
    abi_major: ABI_MAJOR,
    abi_minor: ABI_MINOR,
    texts: [RawStr::EMPTY; 4],
};

/// Returns only the start of a table.
// SAFETY: the name belongs to the plugin ABI, which defines this signature.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_plugin_query_v1(_max_minor: u32) -> *const RawPlugin {
    (&raw const HEAD).cast()
}

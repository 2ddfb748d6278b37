//! Calls through the C structs that no host of ours would make.
#![allow(unsafe_code)]

use libloading::Library;
use sdrun_abi::{
    ABI_MAJOR, QUERY_SYMBOL,
    ffi::raw::{DevicesArgs, QueryFn, RawBuffer, RawError, RawPlugin},
};
use std::{path::Path, ptr};

/// The query function of a plugin; its library stays loaded.
pub(super) fn query(library: &Path) -> Result<QueryFn, String> {
    // SAFETY: this process exists to load this library, which the user named.
    let library = unsafe { Library::new(library) }.map_err(|e| format!("cannot load the library: {e}"))?;
    // SAFETY: the symbol's type is fixed by its name.
    let query = unsafe { library.get::<QueryFn>(QUERY_SYMBOL) }.map(|symbol| *symbol);
    std::mem::forget(library);
    query.map_err(|e| format!("it does not export {QUERY_SYMBOL}: {e}"))
}

/// Asks for a table with a newest version; answers its address, version and size, or `None` for null.
pub(super) fn negotiate(query: QueryFn, max_minor: u32) -> Option<(usize, u16, u16, u32)> {
    // SAFETY: a query function may be called with any version, and without a host.
    let table = unsafe { query(max_minor, ptr::null()) };
    // SAFETY: a table that is not null lives as long as the process; its first fields never change.
    unsafe { table.as_ref() }.map(|t| (table.addr(), t.abi_major, t.abi_minor, t.struct_size))
}

/// Calls `devices` with an argument struct that claims to be `size` bytes long, or with null; answers whether
/// that was refused.
pub(super) fn devices_with_size(query: QueryFn, size: Option<u32>) -> Result<bool, String> {
    // SAFETY: as in `negotiate`.
    let table: &RawPlugin = unsafe { query(u32::from(sdrun_abi::ABI_MINOR), ptr::null()).as_ref() }
        .filter(|t| t.abi_major == ABI_MAJOR)
        .ok_or("it offers no table to this host")?;
    let devices = table.devices.ok_or("its table has no `devices`")?;
    let mut args = DevicesArgs {
        struct_size: size.unwrap_or(0),
        reserved: 0,
        ext: ptr::null_mut(),
        devices: RawBuffer::EMPTY,
    };
    // SAFETY: the struct is complete, whatever size it claims; a plugin has to refuse null.
    let error = unsafe { devices(if size.is_some() { &mut args } else { ptr::null_mut() }) };
    Ok(release(error))
}

/// Releases an error; answers whether there was one.
fn release(error: *mut RawError) -> bool {
    // SAFETY: an error that a call returned, released once.
    unsafe {
        match error.as_ref() {
            None => false,
            Some(e) => {
                if let Some(release) = e.release {
                    release(error);
                }
                true
            }
        }
    }
}

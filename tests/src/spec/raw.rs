//! Calls through the C structs that our host would never make.
#![allow(unsafe_code)]

use libloading::Library;
use sdrun_abi::{
    ABI_MAJOR, QUERY_SYMBOL,
    ffi::{
        Plugin, prefix,
        raw::{DevicesArgs, QueryFn, RawBuffer, RawError},
    },
};
use std::{path::Path, ptr};

/// Loads the plugin under test.
pub(super) fn load(library: &Path) -> sdrun_abi::Result<Plugin> {
    // SAFETY: the user asked this process to load this library.
    unsafe { sdrun::load_plugin(library) }
}

/// The query function of a plugin. Its library stays loaded.
pub(super) fn query(library: &Path) -> Result<QueryFn, String> {
    // SAFETY: the user asked this process to load this library.
    let library = unsafe { Library::new(library) }.map_err(|e| format!("cannot load the library: {e}"))?;
    // SAFETY: the symbol's type is fixed by its name.
    let query = unsafe { library.get::<QueryFn>(QUERY_SYMBOL) }.map(|symbol| *symbol);
    std::mem::forget(library);
    query.map_err(|e| format!("it does not export {QUERY_SYMBOL}: {e}"))
}

/// Asks for the table like a host of a minor version. Returns its address, major version and size, or `None` for null.
pub(super) fn negotiate(query: QueryFn, max_minor: u32) -> Option<(usize, u16, u32)> {
    // SAFETY: a query function accepts any version.
    let table = unsafe { query(max_minor) };
    // SAFETY: a table that is not null lives as long as the process and states its size.
    unsafe { prefix::read(table) }.map(|t| (table.addr(), t.abi_major, t.struct_size))
}

/// The function `devices` of a plugin.
fn devices(query: QueryFn) -> Result<unsafe extern "C" fn(*mut DevicesArgs) -> *mut RawError, String> {
    // SAFETY: as in `negotiate`.
    let table = unsafe { prefix::read(query(u32::from(sdrun_abi::ABI_MINOR))) };
    let table = table.filter(|t| t.abi_major == ABI_MAJOR).ok_or("it offers no table to this host")?;
    table.devices.ok_or_else(|| "its table has no `devices`".into())
}

/// Calls `devices` with an argument struct longer than any plugin knows, like a newer host. Returns whether the call succeeded with
/// a list and left the end of the struct unchanged.
pub(super) fn devices_for_newer_host(query: QueryFn) -> Result<bool, String> {
    #[repr(C)]
    struct Newer {
        known: DevicesArgs,
        added: [u64; 8],
    }
    let known =
        DevicesArgs { struct_size: size_of::<Newer>() as u32, reserved: 0, devices: RawBuffer::EMPTY };
    let mut args = Newer { known, added: [u64::MAX; 8] };
    // SAFETY: the struct is as long as it says.
    let error = unsafe { devices(query)?((&raw mut args).cast()) };
    let answered = args.known.devices.len > 0;
    if let Some(release) = args.known.devices.release {
        // SAFETY: the call returned it, and it is released once.
        unsafe { release(&raw mut args.known.devices) };
    }
    Ok(!release(error) && answered && args.added == [u64::MAX; 8])
}

/// Calls `devices` with an argument struct that claims to be `size` bytes long, or with null. Returns whether the plugin
/// refused.
pub(super) fn devices_with_size(query: QueryFn, size: Option<u32>) -> Result<bool, String> {
    let devices = devices(query)?;
    let mut args = DevicesArgs { struct_size: size.unwrap_or(0), reserved: 0, devices: RawBuffer::EMPTY };
    // SAFETY: the struct is complete, whatever size it claims. A plugin must refuse null.
    let error = unsafe { devices(if size.is_some() { &mut args } else { ptr::null_mut() }) };
    Ok(release(error))
}

/// Releases an error. Returns whether there was one.
fn release(error: *mut RawError) -> bool {
    // SAFETY: a call returned the error, and it is released once.
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

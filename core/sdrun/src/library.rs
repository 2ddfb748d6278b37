//! Loading a plugin library.
#![allow(unsafe_code)]

use sdrun_abi::{Error, ErrorCode, Provide, Result, ffi::Plugin, ffi::raw::QueryFn};
use std::path::{Component, Path, PathBuf};

/// Absolute path of the library that a manifest names.
pub(crate) fn path_of(provide: &Provide, manifest: &Path) -> PathBuf {
    let dir = manifest.parent().unwrap_or(Path::new("/"));
    // Components only, so that `./lib.so` becomes `lib.so`.
    let relative: PathBuf =
        provide.library.path.components().filter(|c| matches!(c, Component::Normal(_))).collect();
    dir.join(relative)
}

/// Loads the plugin at `path` (absolute) and calls its query symbol. The library stays loaded for the lifetime of the
/// process: unloading vendor runtimes is a known source of crashes. [`Registry::open`](crate::Registry::open) checks
/// the file first; this function is for tools that test plugins.
///
/// # Safety
/// Loading runs code from the file with the rights of this process. The caller trusts it to be a plugin that follows
/// the rules of `docs/provider-spec.md`.
pub unsafe fn load_plugin(path: &Path) -> Result<Plugin> {
    load(path)
}

/// As [`load_plugin`], for the two callers in this crate that vouch for the file: the registry, which has checked its
/// owner, permissions and hash; and a worker, whose host has checked them.
pub(crate) fn load(path: &Path) -> Result<Plugin> {
    if !path.is_absolute() {
        return Err(Error::invalid(format!("plugin path {} is not absolute", path.display())));
    }
    if !path.is_file() {
        return Err(
            Error::not_found(format!("there is no plugin library at {}", path.display())).with_file(path)
        );
    }
    let refused = |why: String| {
        let message = format!("cannot load plugin {}: {why}", path.display());
        Error::new(ErrorCode::FailedPrecondition, message).with_file(path)
    };
    // SAFETY: the callers vouch for the file.
    let library = unsafe { open(path) }.map_err(|e| {
        // The loader's message names the missing dependency or symbol; libloading keeps it as the source.
        refused(std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string))
    })?;
    // SAFETY: the symbol's type is fixed by its name (`…_v1`).
    let query = *unsafe { library.get::<QueryFn>(sdrun_abi::QUERY_SYMBOL) }.map_err(|_| {
        refused(format!("it has no function {}", sdrun_abi::QUERY_SYMBOL))
            .with_hint("this file is not an sdrun plugin, or one for another ABI version")
    })?;
    std::mem::forget(library);
    // SAFETY: the library is never unloaded.
    unsafe { Plugin::query(query) }.map_err(|e| e.with_file(path))
}

/// Loads a library and resolves all its symbols now: a missing symbol is an error here instead of an abort at its
/// first use.
///
/// # Safety
/// As [`libloading::Library::new`].
#[cfg(unix)]
unsafe fn open(path: &Path) -> std::result::Result<libloading::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: guaranteed by the caller.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Into::into)
}

/// As above; Windows always resolves all symbols.
///
/// # Safety
/// As [`libloading::Library::new`].
#[cfg(not(unix))]
unsafe fn open(path: &Path) -> std::result::Result<libloading::Library, libloading::Error> {
    // SAFETY: guaranteed by the caller.
    unsafe { libloading::Library::new(path) }
}

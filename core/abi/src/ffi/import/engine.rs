//! Engines of a plugin.

use super::{Table, from_json, session::PluginSession};
use crate::{
    Engine, EngineInfo, Error, Host, Result, Session, WeightSource,
    ffi::{callbacks::*, raw::*},
};
use std::{ffi::c_void, ptr};

/// The engine that a call returned.
pub(super) fn engine_of(raw: &'static Table, handle: *mut c_void) -> Result<Box<dyn Engine>> {
    if handle.is_null() {
        return Err(Error::internal("the plugin reports success without an engine"));
    }
    let mut engine = PluginEngine {
        raw,
        handle,
        info: EngineInfo { inputs: vec![], outputs: vec![], weights: vec![], compatibility: String::new() },
    };
    let mut a = args!(EngineInfoArgs { engine: handle, info: RawBuffer::EMPTY });
    // SAFETY: a live engine of this plugin.
    unsafe { error_from_raw(function!(raw, engine_info)(&mut a))? };
    engine.info = from_json("engine information", &mut a.info)?;
    Ok(Box::new(engine))
}

struct PluginEngine {
    raw: &'static Table,
    handle: *mut c_void,
    info: EngineInfo,
}

// SAFETY: the ABI allows calls on an engine from any thread.
unsafe impl Send for PluginEngine {}
// SAFETY: the ABI allows overlapping calls on an engine.
unsafe impl Sync for PluginEngine {}

impl Drop for PluginEngine {
    fn drop(&mut self) {
        if let Some(destroy) = self.raw.engine_destroy {
            // SAFETY: a live engine, destroyed once.
            unsafe { destroy(self.handle) }
        }
    }
}

impl Engine for PluginEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let mut a = args!(EngineSerializeArgs { engine: self.handle, payload: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe {
            error_from_raw(function!(self.raw, engine_serialize)(&mut a))?;
            Ok(buffer_from_raw(&mut a.payload))
        }
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let call = function!(self.raw, engine_bake);
        let handle = with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a =
                    args!(EngineBakeArgs { engine: self.handle, weights, host, baked: ptr::null_mut() });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                Ok(a.baked)
            })
        })?;
        engine_of(self.raw, handle)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let call = function!(self.raw, session_create);
        let handle = with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a =
                    args!(SessionCreateArgs { engine: self.handle, weights, host, session: ptr::null_mut() });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                Ok(a.session)
            })
        })?;
        if handle.is_null() {
            return Err(Error::internal("the plugin reports success without a session"));
        }
        Ok(Box::new(PluginSession::new(self.raw, handle)))
    }
}

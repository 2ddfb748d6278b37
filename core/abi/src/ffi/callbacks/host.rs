//! Hosts across the ABI.

use crate::{
    Flow, Host, LogLevel,
    ffi::{prefix, raw::*},
};
use std::{ffi::c_void, marker::PhantomData, panic::catch_unwind};

/// `&dyn Host` behind a thin pointer.
struct HostRef<'a>(&'a dyn Host);

unsafe extern "C" fn host_log(ctx: *const c_void, level: u32, target: RawStr, message: RawStr) {
    // SAFETY: `ctx` is the `HostRef` lent by `with_host`; strings are valid during the call. A panic of the
    // host's logger must not unwind into foreign code.
    let _ = catch_unwind(|| unsafe {
        (*ctx.cast::<HostRef>()).0.log(LogLevel::from_u32(level), &target.text(), &message.text());
    });
}

unsafe extern "C" fn host_progress(ctx: *const c_void, phase: RawStr, step: u64, total: u64) -> i32 {
    // SAFETY: as in `host_log`. A panic in the host cancels.
    let flow = catch_unwind(|| unsafe { (*ctx.cast::<HostRef>()).0.progress(&phase.text(), step, total) });
    (flow.unwrap_or(Flow::Cancel) == Flow::Cancel) as i32
}

unsafe extern "C" fn host_cancelled(ctx: *const c_void) -> i32 {
    // SAFETY: as in `host_log`. A panic in the host cancels.
    catch_unwind(|| unsafe { (*ctx.cast::<HostRef>()).0.cancelled() }).unwrap_or(true) as i32
}

/// Lends a host to C for the duration of `body`.
pub fn with_host<T>(host: &dyn Host, body: impl FnOnce(&RawHost) -> T) -> T {
    let reference = HostRef(host);
    body(&RawHost {
        struct_size: size_of::<RawHost>() as u32,
        reserved: 0,
        ctx: (&raw const reference).cast(),
        log: Some(host_log),
        progress: Some(host_progress),
        cancelled: Some(host_cancelled),
    })
}

/// A host on the other side of the ABI.
pub struct ForeignHost<'a>(Option<RawHost>, PhantomData<&'a RawHost>);

// SAFETY: the ABI allows calls of a host's functions from any thread.
unsafe impl Sync for ForeignHost<'_> {}

impl ForeignHost<'_> {
    /// # Safety
    /// `raw` is null or valid for the lifetime of the value.
    pub unsafe fn new(raw: *const RawHost) -> Self {
        // SAFETY: guaranteed by the caller.
        ForeignHost(unsafe { prefix::read(raw) }, PhantomData)
    }
}

impl Host for ForeignHost<'_> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        if let Some((raw, log)) = self.0.and_then(|h| Some((h, h.log?))) {
            // SAFETY: the host's own function with the host's own context.
            unsafe {
                log(raw.ctx, level as u32, RawStr::new(target.as_bytes()), RawStr::new(message.as_bytes()))
            }
        }
    }
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        let Some((raw, progress)) = self.0.and_then(|h| Some((h, h.progress?))) else {
            return Flow::Continue;
        };
        // SAFETY: as above.
        let answer = unsafe { progress(raw.ctx, RawStr::new(phase.as_bytes()), step, total) };
        if answer == 0 { Flow::Continue } else { Flow::Cancel }
    }
    fn cancelled(&self) -> bool {
        // SAFETY: as above.
        self.0.and_then(|h| Some((h, h.cancelled?))).is_some_and(|(raw, poll)| unsafe { poll(raw.ctx) != 0 })
    }
}

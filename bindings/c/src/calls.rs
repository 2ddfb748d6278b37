//! Callbacks, and cancelling.

use crate::{
    failure::{Result, text},
    given::{self, Versioned},
};
use sdrun::abi::{Flow, Host, LogLevel};
use std::{
    ffi::{c_char, c_void},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

/// A flag that stops calls. Any thread may set it while others use it.
pub struct Cancel(AtomicBool);

/// A picture in memory: `width * height * 3` bytes, red, green and blue of each pixel, row by row.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Image {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// The bytes.
    pub rgb: *const u8,
}

/// What a call tells while it works. All fields may be zero. Texts and pictures live until the callback returns. A callback must not
/// call this library, except `sdrun_cancel_set`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Calls {
    /// `sizeof(sdrun_calls)`.
    pub struct_size: usize,
    /// Passed to every callback.
    pub user: *mut c_void,
    /// What is done, and how many of how many; 0 of 0 is unknown. Comes from any thread.
    pub progress: Option<unsafe extern "C" fn(user: *mut c_void, what: *const c_char, done: u64, of: u64)>,
    /// A line of the log. Levels: 1 trace, 2 debug, 3 information, 4 warning, 5 error. Comes from any thread.
    pub log: Option<unsafe extern "C" fn(user: *mut c_void, level: u32, message: *const c_char)>,
    /// What the picture looks like so far, as often as costs a hundredth of the time. Comes from the calling thread.
    pub preview: Option<unsafe extern "C" fn(user: *mut c_void, image: *const Image)>,
    /// Stops the call once it is set. The call then fails with `SDRUN_CANCELLED`.
    pub cancel: *const Cancel,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers.
unsafe impl Versioned for Calls {}

// SAFETY: the header demands that the callbacks which providers use work on any thread with `user`.
unsafe impl Sync for Calls {}

/// A new flag that is not set. Free it with `sdrun_cancel_free` when no call uses it any more.
#[unsafe(no_mangle)]
pub extern "C" fn sdrun_cancel_new() -> *mut Cancel {
    Box::into_raw(Box::new(Cancel(AtomicBool::new(false))))
}

/// Sets (1) or clears (0) a flag. Safe in a signal handler.
///
/// # Safety
/// `cancel` is null or comes from `sdrun_cancel_new` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_cancel_set(cancel: *const Cancel, value: i32) {
    // SAFETY: as the function's contract says; null is `None`.
    if let Some(cancel) = unsafe { cancel.as_ref() } {
        cancel.0.store(value != 0, Relaxed);
    }
}

/// Frees a flag. Null is allowed.
///
/// # Safety
/// As `sdrun_cancel_set`; no call uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_cancel_free(cancel: *mut Cancel) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(cancel) };
}

impl Calls {
    /// Reads the callbacks of a call.
    ///
    /// # Safety
    /// As [`given::options`]; the flag is null or comes from `sdrun_cancel_new`.
    pub(crate) unsafe fn read(calls: *const Calls) -> Result<Calls> {
        // SAFETY: as the caller promises.
        unsafe { given::options(calls) }
    }

    pub(crate) fn preview(&self, picture: &image::RgbImage) {
        if let Some(preview) = self.preview {
            let (width, height) = picture.dimensions();
            let image = Image { width, height, rgb: picture.as_raw().as_ptr() };
            // SAFETY: the header says when and how it is called.
            unsafe { preview(self.user, &raw const image) };
        }
    }
}

impl Host for Calls {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        let Some(log) = self.log else { return };
        let level = match level {
            LogLevel::Trace => 1,
            LogLevel::Debug => 2,
            LogLevel::Info => 3,
            LogLevel::Warn => 4,
            LogLevel::Error | LogLevel::PluginMisbehaving | LogLevel::HostMisbehaving => 5,
        };
        let line = if target.is_empty() { message.to_string() } else { format!("{target}: {message}") };
        // SAFETY: the header says when and how it is called.
        unsafe { log(self.user, level, text(line).as_ptr()) };
    }

    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        if let Some(progress) = self.progress {
            // SAFETY: the header says when and how it is called.
            unsafe { progress(self.user, text(phase).as_ptr(), step, total) };
        }
        if self.cancelled() { Flow::Cancel } else { Flow::Continue }
    }

    fn cancelled(&self) -> bool {
        // SAFETY: the flag is null or alive during the call, as the header demands.
        unsafe { self.cancel.as_ref() }.is_some_and(|cancel| cancel.0.load(Relaxed))
    }
}

//! Cancelling a vendor call that cannot be polled.

use sdrun_abi::{Error, ErrorCode, Host, Result};
use std::{
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

/// Interval at which the host is asked whether to stop.
const POLL: Duration = Duration::from_millis(50);

/// Does `work` while another thread polls the host, if one is given. Calls `cancel` once if the host cancels. If `work` fails after
/// that, the error's code is `Cancelled`, whatever ONNX Runtime calls it.
pub(crate) fn cancellable<T>(
    host: Option<&dyn Host>,
    cancel: impl Fn() + Sync,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let Some(host) = host else { return work() };
    let watch = Watch::default();
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch.until_ended(host, &cancel));
        // Also ends the watcher if `work` panics, because the scope waits for it.
        let end = End(&watch);
        let result = work();
        drop(end);
        let cancelled = watcher.join().unwrap_or(false);
        result.map_err(|e| if cancelled { Error { code: ErrorCode::Cancelled, ..e } } else { e })
    })
}

#[derive(Default)]
struct Watch {
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Watch {
    fn until_ended(&self, host: &dyn Host, cancel: &impl Fn()) -> bool {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ended {
            ended = self.changed.wait_timeout(ended, POLL).unwrap_or_else(PoisonError::into_inner).0;
            if !*ended && host.cancelled() {
                cancel();
                return true;
            }
        }
        false
    }
}

struct End<'a>(&'a Watch);

impl Drop for End<'_> {
    fn drop(&mut self) {
        *self.0.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::{Flow, LogLevel, NoHost};
    use std::{
        panic::catch_unwind,
        sync::atomic::{AtomicBool, Ordering::SeqCst},
    };

    struct Impatient;

    impl Host for Impatient {
        fn log(&self, _: LogLevel, _: &str, _: &str) {}
        fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
            Flow::Continue
        }
        fn cancelled(&self) -> bool {
            true
        }
    }

    #[test]
    fn work_is_cancelled_only_on_request() {
        let failing = || Err::<(), _>(Error::invalid("it failed"));
        for host in [None, Some(&NoHost as &dyn Host)] {
            assert_eq!(cancellable(host, || panic!("nobody asked"), || Ok(7)).unwrap(), 7);
            let failed = cancellable(host, || panic!("nobody asked"), failing);
            assert_eq!(failed.unwrap_err().code, ErrorCode::InvalidArgument);
        }
        let asked = AtomicBool::new(false);
        let work = || {
            while !asked.load(SeqCst) {
                thread::yield_now();
            }
            failing()
        };
        let stopped = cancellable(Some(&Impatient), || asked.store(true, SeqCst), work).unwrap_err();
        assert_eq!((stopped.code, &*stopped.message), (ErrorCode::Cancelled, "it failed"));
    }

    #[test]
    fn a_panic_passes_and_nothing_hangs() {
        let work = || -> Result<()> { panic!("work failed") };
        assert!(catch_unwind(|| cancellable(Some(&NoHost), || {}, work)).is_err());
    }
}

//! Cancelling a vendor call that cannot be polled.

use sdrun_abi::Host;
use std::{
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

/// Interval at which the host is asked whether to stop.
const POLL: Duration = Duration::from_millis(50);

/// Runs `work` while another thread polls the host. Calls `cancel` once if the host cancels. Returns the result of
/// `work` and whether `cancel` was called.
pub(crate) fn watched<T>(host: &dyn Host, cancel: impl Fn() + Sync, work: impl FnOnce() -> T) -> (T, bool) {
    let watch = Watch::default();
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch.until_ended(host, &cancel));
        // Also ends the watcher if `work` panics, because the scope waits for it.
        let end = End(&watch);
        let result = work();
        drop(end);
        (result, watcher.join().unwrap_or(false))
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
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

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
        assert_eq!(watched(&NoHost, || panic!("nobody asked"), || 7), (7, false));
        let asked = AtomicBool::new(false);
        let work = || {
            while !asked.load(SeqCst) {
                thread::yield_now();
            }
        };
        assert_eq!(watched(&Impatient, || asked.store(true, SeqCst), work), ((), true));
    }

    #[test]
    fn a_panic_passes_and_nothing_hangs() {
        let result = std::panic::catch_unwind(|| watched(&NoHost, || {}, || panic!("work failed")));
        assert!(result.is_err());
    }
}

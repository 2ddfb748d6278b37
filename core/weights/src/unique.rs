use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A number that nothing else in this process has.
pub(crate) fn id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Relaxed)
}

//! What the threads of a worker share. `tests/schedules.rs` puts types in their place that try many orders of threads.

pub(super) use std::sync::{Mutex, MutexGuard, atomic::AtomicU64, mpsc::Receiver};

//! The locks of the queue. `tests/schedules.rs` puts types in their place that try many orders of threads.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

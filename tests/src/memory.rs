//! The memory of processes, in bytes; 0 if the system does not report it.

use sdrun::memory::resident;

/// [`resident`] memory of this process.
pub fn own() -> u64 {
    of("self")
}

/// [`resident`] memory of a process (`self` or its number).
pub fn of(process: &str) -> u64 {
    resident(process).unwrap_or(0)
}

//! The memory of processes, in bytes; 0 if the system does not report it.

use sdrun::memory::occupied;

/// What this process [occupies](occupied).
pub fn own() -> u64 {
    of("self")
}

/// What a process (`self` or its number) [occupies](occupied).
pub fn of(process: &str) -> u64 {
    occupied(process).unwrap_or(0)
}

//! The memory of processes.

use std::fs;

/// [`of`] this process.
pub fn own() -> u64 {
    of("self")
}

/// Resident memory of a process (`self` or its number) without pages of files, which the system can drop: a mapped checkpoint is one. In
/// bytes; 0 if the system does not report it.
pub fn of(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let bytes = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    ["RssAnon:", "RssShmem:"].into_iter().filter_map(bytes).sum()
}

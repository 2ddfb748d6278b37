//! The memory of this process.

use std::fs;

/// Resident memory without pages of files, which the system can drop: a mapped checkpoint is one. In bytes; 0 if the system does not
/// report it.
pub fn own() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    ["RssAnon:", "RssShmem:"].into_iter().filter_map(bytes).sum()
}

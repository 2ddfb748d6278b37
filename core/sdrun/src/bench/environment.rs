//! The machine that measures.

use serde::{Deserialize, Serialize};
use std::fs;

/// The machine that produced a report. `None` is unknown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Operating system.
    pub os: String,
    /// Its version: the kernel's on Linux.
    pub os_version: Option<String>,
    /// Processor architecture.
    pub arch: String,
    /// Processor name.
    pub cpu: Option<String>,
    /// Instruction sets that change speed or rounding, such as `avx2` and `amx_bf16`.
    pub instruction_sets: Vec<String>,
    /// Logical processors available to this process.
    pub cores: usize,
    /// Physical cores.
    pub physical_cores: Option<usize>,
    /// How the system chooses the processor's frequency, such as `performance`.
    pub governor: Option<String>,
    /// The processor's highest frequency, in MHz.
    pub max_mhz: Option<u64>,
    /// Whether it is a virtual machine.
    pub virtual_machine: Option<bool>,
    /// Physical memory.
    pub memory_bytes: Option<u64>,
}

/// Flags of /proc/cpuinfo to report.
const SETS: &[&str] = &[
    "sse4_2",
    "avx",
    "fma",
    "f16c",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
];

impl Environment {
    /// This machine.
    pub fn here() -> Self {
        let read =
            |file: &str| Some(fs::read_to_string(file).ok()?.trim().to_string()).filter(|t| !t.is_empty());
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        let meminfo = read("/proc/meminfo").unwrap_or_default();
        let flags: Vec<&str> = ["flags", "Features"]
            .iter()
            .find_map(|key| field(&cpuinfo, key))
            .map(|flags| flags.split_whitespace().collect())
            .unwrap_or_default();
        let frequency = "/sys/devices/system/cpu/cpu0/cpufreq";
        Environment {
            os: std::env::consts::OS.to_string(),
            os_version: read("/proc/sys/kernel/osrelease"),
            arch: std::env::consts::ARCH.to_string(),
            cpu: field(&cpuinfo, "model name").map(str::to_string),
            instruction_sets: SETS
                .iter()
                .filter(|set| flags.contains(set))
                .map(|set| set.to_string())
                .collect(),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            physical_cores: physical_cores(&cpuinfo),
            governor: read(&format!("{frequency}/scaling_governor")),
            max_mhz: read(&format!("{frequency}/cpuinfo_max_freq"))
                .and_then(|khz| khz.parse::<u64>().ok())
                .map(|khz| khz / 1000),
            virtual_machine: (!flags.is_empty()).then(|| flags.contains(&"hypervisor")),
            memory_bytes: field(&meminfo, "MemTotal")
                .and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok())
                .map(|kib| kib * 1024),
        }
    }
}

/// The first value of a key in a file of `key : value` lines.
fn field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let line = text.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key))?;
    Some(line.split_once(':')?.1.trim())
}

/// Counts the different pairs of socket and core.
fn physical_cores(cpuinfo: &str) -> Option<usize> {
    let mut cores: Vec<(&str, &str)> = cpuinfo
        .split("\n\n")
        .filter_map(|processor| Some((field(processor, "physical id")?, field(processor, "core id")?)))
        .collect();
    cores.sort_unstable();
    cores.dedup();
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_cores() {
        let processor = |socket: u32, core: u32| {
            format!("processor\t: 0\nphysical id\t: {socket}\ncore id\t\t: {core}\n")
        };
        let text = [(0, 0), (0, 1), (0, 0), (1, 0)].map(|(socket, core)| processor(socket, core)).join("\n");
        assert_eq!(physical_cores(&text), Some(3));
        assert_eq!(physical_cores("model name : x"), None);
        assert_eq!(field("flags\t\t: a b\nflags: c", "flags"), Some("a b"));
    }
}

//! The machine that measures.

use serde::{Deserialize, Serialize};
use std::{fmt, fs, path::Path};
use sysinfo::{CpuRefreshKind, System};

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
    /// Graphics cards that the system lists. Empty also outside Linux.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
}

/// A graphics card, as the system lists it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// PCI ids of vendor and device, such as `10de:2684`.
    pub pci: String,
    /// Name of its kernel driver.
    pub driver: Option<String>,
    /// The driver's version; that of the kernel if the driver has none of its own.
    pub driver_version: Option<String>,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pci)?;
        let version = self.driver_version.iter().map(|version| format!(" {version}"));
        self.driver
            .iter()
            .try_for_each(|driver| write!(f, ", {driver}{}", version.clone().collect::<String>()))
    }
}

/// The graphics cards below `root`, which is `/sys`.
fn gpus(root: &Path, kernel: Option<&str>) -> Vec<Gpu> {
    let read =
        |path: &Path| Some(fs::read_to_string(path).ok()?.trim().to_string()).filter(|t| !t.is_empty());
    let mut folders: Vec<_> = fs::read_dir(root.join("bus/pci/devices"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    let gpu = |folder: &Path| {
        let id = |name: &str| Some(read(&folder.join(name))?.trim_start_matches("0x").to_string());
        // PCI class 03: display controllers.
        id("class").filter(|class| class.starts_with("03"))?;
        let driver = fs::read_link(folder.join("driver")).ok();
        let driver = driver.and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
        let version = driver.as_ref().and_then(|driver| {
            read(&root.join("module").join(driver).join("version")).or(kernel.map(str::to_string))
        });
        Some(Gpu { pci: format!("{}:{}", id("vendor")?, id("device")?), driver, driver_version: version })
    };
    folders.iter().filter_map(|folder| gpu(folder)).collect()
}

/// Name and version of every graphics driver of this machine.
pub(crate) fn graphics_drivers(environment: &Environment) -> String {
    let driver =
        |gpu: &Gpu| Some(format!("{} {}", gpu.driver.as_ref()?, gpu.driver_version.as_deref().unwrap_or("")));
    let mut drivers: Vec<String> = environment.gpus.iter().filter_map(driver).collect();
    drivers.sort();
    drivers.dedup();
    drivers.join(", ")
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
        let mut machine = crate::memory::machine();
        machine.refresh_cpu_list(CpuRefreshKind::nothing());
        let flags: Vec<&str> = ["flags", "Features"]
            .iter()
            .find_map(|key| field(&cpuinfo, key))
            .map(|flags| flags.split_whitespace().collect())
            .unwrap_or_default();
        let os_version = System::kernel_version();
        let frequency = "/sys/devices/system/cpu/cpu0/cpufreq";
        Environment {
            os: std::env::consts::OS.to_string(),
            gpus: gpus(Path::new("/sys"), os_version.as_deref()),
            os_version,
            arch: std::env::consts::ARCH.to_string(),
            cpu: machine.cpus().first().map(|cpu| cpu.brand().trim().to_string()).filter(|t| !t.is_empty()),
            instruction_sets: SETS
                .iter()
                .filter(|set| flags.contains(set))
                .map(|set| set.to_string())
                .collect(),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            physical_cores: System::physical_core_count(),
            governor: read(&format!("{frequency}/scaling_governor")),
            max_mhz: read(&format!("{frequency}/cpuinfo_max_freq"))
                .and_then(|khz| khz.parse::<u64>().ok())
                .map(|khz| khz / 1000),
            virtual_machine: (!flags.is_empty()).then(|| flags.contains(&"hypervisor")),
            memory_bytes: Some(machine.total_memory()).filter(|bytes| *bytes > 0),
        }
    }
}

/// The first value of a key in a file of `key : value` lines.
fn field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let line = text.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key))?;
    Some(line.split_once(':')?.1.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn graphics_cards_and_their_drivers() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{text}\n")).unwrap();
        };
        for (slot, class, vendor, device, driver) in [
            ("0000:00:1f.0", "0x060100", "0x8086", "0x7a84", None),
            ("0000:01:00.0", "0x030000", "0x10de", "0x2684", Some("nvidia")),
            ("0000:03:00.0", "0x038000", "0x1002", "0x744c", Some("amdgpu")),
            ("0000:04:00.0", "0x030200", "0x10de", "0x2330", None),
        ] {
            let folder = format!("bus/pci/devices/{slot}");
            for (name, text) in [("class", class), ("vendor", vendor), ("device", device)] {
                write(&format!("{folder}/{name}"), text);
            }
            if let Some(driver) = driver {
                let link = root.path().join(&folder).join("driver");
                std::os::unix::fs::symlink(format!("../../../bus/pci/drivers/{driver}"), link).unwrap();
            }
        }
        write("module/nvidia/version", "580.65.06");
        let found = gpus(root.path(), Some("6.8.0"));
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["10de:2684, nvidia 580.65.06", "1002:744c, amdgpu 6.8.0", "10de:2330"]);
        let here = Environment { gpus: found, ..Environment::here() };
        assert_eq!(graphics_drivers(&here), "amdgpu 6.8.0, nvidia 580.65.06");
        assert_eq!(gpus(Path::new("/nowhere"), None), []);
    }

    #[test]
    fn fields_have_values() {
        assert_eq!(field("flags\t\t: a b\nflags: c", "flags"), Some("a b"));
        assert_eq!(field("model name : x", "flags"), None);
    }
}

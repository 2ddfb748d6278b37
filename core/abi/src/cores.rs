//! The cores of the processor.

use std::thread::available_parallelism;

/// Threads on which a provider computes if [`BuildSpec::threads`](crate::BuildSpec::threads) is `None`: one for each core that this process
/// may use, within the limit of its container.
///
/// Hardware threads of one core share its arithmetic units, and one of them keeps these busy in a product of matrices. Slow cores count,
/// because our kernels give them less work. If the system does not say which threads share a core, each hardware thread counts as one.
pub fn default_threads() -> usize {
    let threads = available_parallelism().map_or(1, Into::into);
    cores().map_or(threads, |cores| cores.clamp(1, threads))
}

/// The cores on which this process may run.
#[cfg(target_os = "linux")]
fn cores() -> Option<usize> {
    use std::fs::read_to_string;
    let status = read_to_string("/proc/self/status").ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |cpu: usize| {
        read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
    };
    different(allowed, siblings)
}

/// The cores of the whole processor.
#[cfg(not(target_os = "linux"))]
fn cores() -> Option<usize> {
    sysinfo::System::physical_core_count()
}

/// How many different cores the hardware threads in a list such as `0-3,8` belong to. `siblings` names the threads of a thread's core.
#[cfg(any(target_os = "linux", test))]
fn different(list: &str, siblings: impl Fn(usize) -> Option<String>) -> Option<usize> {
    let mut cores = std::collections::BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse().ok()?..=last.parse().ok()? {
            cores.insert(siblings(cpu)?);
        }
    }
    Some(cores.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_threads_of_a_core_count_once() {
        // Six threads of three cores, and two cores with a thread each.
        let siblings = |cpu: usize| match cpu {
            0..6 => Some(format!("{},{}\n", cpu % 3, cpu % 3 + 3)),
            6..8 => Some(format!("{cpu}\n")),
            _ => None,
        };
        for (list, cores) in [
            ("\t0-7\n", Some(5)),
            ("0-2,6", Some(4)),
            ("0,3", Some(1)),
            ("4", Some(1)),
            ("0-8", None),
            ("", None),
            ("0-x", None),
        ] {
            assert_eq!(different(list, siblings), cores, "{list:?}");
        }
    }

    #[test]
    fn there_are_never_more_than_the_system_grants() {
        let granted = available_parallelism().unwrap().get();
        assert!((1..=granted).contains(&default_threads()));
    }
}

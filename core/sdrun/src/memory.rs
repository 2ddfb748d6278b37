//! Estimates the memory that a session needs before anything is built, and compares it with the available memory.

use crate::{BuildOptions, Model, Result};
use sdrun_abi::{
    Assessment, Capabilities, Device, DeviceKind, Error as AbiError, ErrorCode, Hint, MemoryEstimate,
};
use sdrun_graph::{Footprint, footprint};
use sysinfo::System;

/// The main memory in messages.
const MAIN: &str = "main memory";

/// The minimum memory of a session of `model` on the device of `options`, which can do what is `offered`: its weights, and the peak of its
/// live activations. Computed from the graph, its shapes and the precision alone. The runtime's own memory is not included. Fields are `None`
/// if a shape is open.
///
/// On a CPU, everything is in main memory. On other devices, everything is in device memory, except for weights beyond
/// [`BuildOptions::vram_budget`].
///
/// # Errors
/// Fails if the shapes cannot be bound.
pub fn estimate(model: &Model, options: &BuildOptions, offered: &Capabilities) -> Result<MemoryEstimate> {
    let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
    Ok(of_footprint(footprint(&graph, options.precision)?, options, offered))
}

pub(crate) fn of_footprint(
    footprint: Option<Footprint>,
    options: &BuildOptions,
    offered: &Capabilities,
) -> MemoryEstimate {
    footprint.map_or_else(MemoryEstimate::default, |footprint| place(footprint, options, offered))
}

/// Assigns the memory of a graph to main memory or device memory.
fn place(footprint: Footprint, options: &BuildOptions, offered: &Capabilities) -> MemoryEstimate {
    let Footprint { weights, activations, wide_activations } = footprint;
    let activations = if offered.wide_activations { wide_activations } else { activations };
    let mut estimate = MemoryEstimate::default();
    if options.device.kind == DeviceKind::Cpu {
        estimate.host_weights = Some(weights);
        estimate.host_activations = Some(activations);
        return estimate;
    }
    let on_device = options.vram_budget.map_or(weights, |budget| budget.min(weights));
    estimate.device_weights = Some(on_device);
    estimate.device_activations = Some(activations);
    estimate.host_weights = Some(weights - on_device);
    estimate
}

/// Replaces the estimate with the provider's own figures, as far as it gives any.
pub(crate) fn refined(mut estimate: MemoryEstimate, told: &Assessment) -> MemoryEstimate {
    let own = &told.memory;
    estimate.host_weights = own.host_weights.or(estimate.host_weights);
    estimate.host_activations = own.host_activations.or(estimate.host_activations);
    estimate.device_weights = own.device_weights.or(estimate.device_weights);
    estimate.device_activations = own.device_activations.or(estimate.device_activations);
    estimate
}

/// `ResourceExhausted` if a session would not fit into main memory or device memory.
pub(crate) fn check_room(
    estimate: &MemoryEstimate,
    device: &Device,
    offered: &Capabilities,
) -> sdrun_abi::Result<()> {
    let sum = |a: Option<u64>, b: Option<u64>| a.unwrap_or(0).saturating_add(b.unwrap_or(0));
    let host = sum(estimate.host_weights, estimate.host_activations);
    let on_device = sum(estimate.device_weights, estimate.device_activations);
    for (needed, there, place) in [
        (host, available(), MAIN),
        (on_device, device.memory_bytes.filter(|_| device.absent.is_none()), device.name.as_str()),
    ] {
        let fits = check_fits("the model needs at least", needed, place, there);
        fits.map_err(|error| match error.hint.clone() {
            Some(free) if offered.streaming && place != MAIN => {
                error.with_hint(Hint::AnyOf(vec![free, "give the weights a budget of device memory".into()]))
            }
            _ => error,
        })?;
    }
    Ok(())
}

/// `ResourceExhausted` if main memory does not have the bytes that `what` needs ("the inputs need").
pub(crate) fn check_free(what: &str, needed: u64) -> sdrun_abi::Result<()> {
    check_fits(what, needed, MAIN, available())
}

fn check_fits(what: &str, needed: u64, place: &str, there: Option<u64>) -> sdrun_abi::Result<()> {
    match there {
        Some(there) if needed > there => {
            let message = format!("{what} {needed} bytes of memory, and {place} has {there}");
            let hint = Hint::FreeMemory { bytes: Some(needed - there) };
            Err(AbiError::new(ErrorCode::ResourceExhausted, message).with_hint(hint))
        }
        _ => Ok(()),
    }
}

/// Bytes of main memory that this process can still use; `None` if the system does not report it. On macOS this includes memory that
/// other programs use.
pub fn available() -> Option<u64> {
    let free = Some(machine().available_memory()).filter(|free| *free > 0)?;
    Some(cgroup_room().map_or(free, |room| room.min(free)))
}

/// Bytes of memory and swap space of the machine, or what its control group may use; `None` if the system does not report it.
pub(crate) fn total() -> Option<u64> {
    let machine = machine();
    let all = machine.total_memory().saturating_add(machine.total_swap());
    let all = Some(all).filter(|all| *all > 0)?;
    Some(cgroup("memory.max").map_or(all, |limit| limit.min(all)))
}

/// The memory of this machine, as the system reports it.
pub(crate) fn machine() -> System {
    let mut system = System::new();
    system.refresh_memory();
    system
}

/// Peak resident memory of a process in bytes (`VmHWM`, `PeakWorkingSetSize`; includes shared memory). `None` if the system does not
/// report it (macOS) or the process has ended.
pub(crate) fn peak_rss(pid: u32) -> Option<u64> {
    #[cfg(windows)]
    return crate::windows::peak_memory(pid);
    #[cfg(not(windows))]
    {
        bytes_in(&status_of(&pid.to_string())?, "VmHWM:")
    }
}

/// Resident memory of a process (`self` or its number) in bytes, without mapped files such as checkpoints, whose pages the system can drop.
/// `None` if the system does not report it (macOS, Windows).
pub fn resident(process: &str) -> Option<u64> {
    let status = status_of(process)?;
    bytes_in(&status, "RssAnon:")?.checked_add(bytes_in(&status, "RssShmem:")?)
}

/// What Linux tells of a process.
fn status_of(process: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{process}/status")).ok()
}

/// A field of [`status_of`].
fn bytes_in(status: &str, field: &str) -> Option<u64> {
    let kilobytes = status.lines().find_map(|line| line.strip_prefix(field)?.strip_suffix("kB"))?;
    kilobytes.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A number that the control group (version 2) of this process has in a file.
fn cgroup(file: &str) -> Option<u64> {
    std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
}

/// What is left of the memory limit of this process's control group (version 2). Applies in containers.
fn cgroup_room() -> Option<u64> {
    // Cached file pages count as used, but the kernel can drop them.
    let stat = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").ok()?;
    let files =
        stat.lines().find_map(|line| line.strip_prefix("file ")?.trim().parse::<u64>().ok()).unwrap_or(0);
    let used = cgroup("memory.current")?.saturating_sub(files);
    Some(cgroup("memory.max")?.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::Precision;

    const PRINT: Footprint = Footprint { weights: 1000, activations: 100, wide_activations: 200 };

    fn offered() -> Capabilities {
        Capabilities::new(vec![Precision::Fp32], vec![])
    }

    fn options(kind: DeviceKind, memory: Option<u64>) -> BuildOptions {
        let mut device = Device::new("d", "Device", kind, "c");
        device.memory_bytes = memory;
        BuildOptions::new(device)
    }

    #[test]
    fn a_cpu_uses_main_memory_and_others_their_own() {
        let cpu = place(PRINT, &options(DeviceKind::Cpu, None), &offered());
        assert_eq!(
            (cpu.host_weights, cpu.host_activations, cpu.device_weights),
            (Some(1000), Some(100), None)
        );
        let mut gpu = options(DeviceKind::Gpu, None);
        let all = place(PRINT, &gpu, &offered());
        assert_eq!(
            (all.device_weights, all.device_activations, all.host_weights),
            (Some(1000), Some(100), Some(0))
        );
        gpu.vram_budget = Some(300);
        let some = place(PRINT, &gpu, &offered());
        assert_eq!((some.device_weights, some.host_weights), (Some(300), Some(700)));
        let mut wide = offered();
        wide.wide_activations = true;
        assert_eq!(place(PRINT, &gpu, &wide).device_activations, Some(200));
    }

    /// Peaks of ggml's worker in docs/measurements/2026-11-24-ggml.md, in MB, and the allowed error of the estimate. ggml
    /// keeps activations in f32 in every precision, and leaves the token table of a text encoder in its file.
    #[test]
    fn estimates_are_near_measured_peaks() {
        for (name, precision, measured, factor) in [
            ("sd15/unet", Precision::Fp32, 3616.0, 1.15),
            ("sd15/unet", Precision::Bf16, 1891.0, 1.15),
            ("sd15/vae-decoder", Precision::Fp32, 768.0, 1.15),
            ("sd15/vae-decoder", Precision::Bf16, 667.0, 1.2),
            ("sd15/text-encoder", Precision::Fp32, 457.0, 1.15),
        ] {
            let nowhere = crate::Paths { data: "/nowhere".into(), cache: "/nowhere".into() };
            let absent = sdrun_graph::OpenOptions {
                weights: sdrun_graph::WeightsPolicy::MayBeAbsent,
                ..Default::default()
            };
            let model = Model::find(name, &nowhere, &absent, &sdrun_abi::NoHost).unwrap();
            let mut wide = offered();
            wide.wide_activations = true;
            let options = options(DeviceKind::Cpu, None).precision(precision);
            let found = estimate(&model, &options, &wide).unwrap();
            let (weights, activations) = (found.host_weights.unwrap(), found.host_activations.unwrap());
            let ratio = (weights + activations) as f64 / 1e6 / measured;
            assert!(
                (1.0 / factor..factor).contains(&ratio),
                "{name} {precision}: {weights} + {activations} bytes are {ratio:.2} of what was measured"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_is_missing() {
        let can = offered();
        let check = |weights: u64, options: &BuildOptions| {
            let print = Footprint { weights, activations: 0, wide_activations: 0 };
            let estimate = place(print, options, &can);
            check_room(&estimate, &options.device, &can)
        };
        let gpu = options(DeviceKind::Gpu, Some(900));
        assert_eq!(check(900, &gpu), Ok(()));
        let error = check(1000, &gpu).unwrap_err();
        assert_eq!(error.code, ErrorCode::ResourceExhausted);
        assert_eq!(error.hint, Some(Hint::FreeMemory { bytes: Some(100) }));
        assert!(error.message.contains("1000 bytes") && error.message.contains("Device has 900"), "{error}");
        assert_eq!(check(u64::MAX, &options(DeviceKind::Gpu, None)), Ok(()), "unknown is no reason");
        if available().is_some() {
            assert!(check(u64::MAX, &options(DeviceKind::Cpu, None)).is_err());
        }
        let mut told = Assessment::default();
        told.memory.device_weights = Some(5);
        let refined = refined(place(PRINT, &gpu, &can), &told);
        assert_eq!((refined.device_weights, refined.device_activations), (Some(5), Some(100)));
    }
}

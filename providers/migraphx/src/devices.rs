//! Devices of the loaded MIGraphX.

use crate::{ffi::HipDevice, runtime::Runtime};
use sdrun_abi::{CancelSupport, Capabilities, Device, DeviceKind, Error, Precision, Result, WeightUpdate};
use sdrun_provider_common::IO_DTYPES;

/// If set to `1`, also lists the reference interpreter: as `ref`, and as `ref-gpu`, which gets the same rewritten
/// graphs as GPUs. So tests can run those rewrites without a GPU.
const REFERENCE_VARIABLE: &str = "SDRUN_MIGRAPHX_REF";

/// A device, as sdrun, MIGraphX and HIP name it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) device: Device,
    /// `None` for the reference interpreter.
    pub(crate) hip: Option<HipDevice>,
    /// Whether graphs are rewritten for the GPU compiler.
    pub(crate) for_gpu: bool,
}

/// All devices: GPUs in HIP's order, then the reference interpreter if the environment asks for it.
pub(crate) fn all(runtime: &Runtime) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for gpu in runtime.hip.as_ref().map_or(Ok(Vec::new()), |hip| hip.devices())? {
        let mut device = Device::new(format!("gpu-{}", gpu.pci), &gpu.name, DeviceKind::Gpu, &gpu.arch);
        device.index = targets.len();
        device.memory_bytes = Some(gpu.memory);
        targets.push(Target { device, hip: Some(gpu), for_gpu: true });
    }
    if std::env::var_os(REFERENCE_VARIABLE).is_some_and(|value| value == "1") {
        for (id, words, for_gpu) in [("ref", "", false), ("ref-gpu", ", graphs as for a GPU", true)] {
            let name = format!("MIGraphX reference interpreter (one CPU thread, for tests{words})");
            let mut device = Device::new(id, name, DeviceKind::Cpu, id);
            device.index = targets.len();
            targets.push(Target { device, hip: None, for_gpu });
        }
    }
    Ok(targets)
}

/// The device with this id. `NotFound` with a list of the existing ones.
pub(crate) fn find(runtime: &Runtime, id: &str) -> Result<Target> {
    let mut targets = all(runtime)?;
    match targets.iter().position(|target| target.device.id == id) {
        Some(index) => Ok(targets.swap_remove(index)),
        None => {
            let ids: Vec<&str> = targets.iter().map(|t| t.device.id.as_str()).collect();
            let known = if ids.is_empty() { "none".into() } else { ids.join(", ") };
            Err(Error::not_found(format!("MIGraphX finds no device `{id}` here"))
                .with_hint(format!("devices: {known}")))
        }
    }
}

impl Target {
    /// MIGraphX's name for the compilation target.
    pub(crate) fn name(&self) -> &'static str {
        if self.hip.is_some() { "gpu" } else { "ref" }
    }

    /// Makes this the current device of the calling thread. MIGraphX compiles, loads and runs on the current device.
    pub(crate) fn select(&self, runtime: &Runtime) -> Result<()> {
        match (&runtime.hip, &self.hip) {
            (Some(hip), Some(device)) => hip.set_device(device.ordinal),
            _ => Ok(()),
        }
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::new(PRECISIONS.to_vec(), IO_DTYPES.to_vec());
        can.weight_update = WeightUpdate::AsInputs;
        can.cancel = CancelSupport::BetweenPhases;
        can.dynamic_shapes = true;
        can.bake = true;
        can.with_settings(&[("fast_math", "off")])
    }
}

/// The offered precisions: the graph's own types, or half precision, to which this provider converts the graph.
const PRECISIONS: [Precision; 2] = [Precision::Fp32, Precision::Fp16];

/// Refuses a precision that is not offered.
pub(crate) fn check_precision(precision: Precision) -> Result<()> {
    precision.check_offered(&PRECISIONS, "MIGraphX")
}

//! Devices of the loaded OpenVINO.

use crate::runtime::Runtime;
use sdrun_abi::{
    CancelSupport, Capabilities, DType, Device, DeviceKind, Error, Precision, Result, WeightUpdate,
};
use sdrun_provider_common::IO_DTYPES;

/// A device, and OpenVINO's names for it.
pub(crate) struct Target {
    pub(crate) device: Device,
    /// `CPU`, `GPU`, `GPU.1`, `NPU`.
    pub(crate) openvino_name: String,
    /// `OPTIMIZATION_CAPABILITIES`: `FP32`, `BF16`, `EXPORT_IMPORT`, …
    features: Vec<String>,
}

/// All devices: GPUs, then the CPU, then NPUs.
pub(crate) fn all(runtime: &Runtime) -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for name in runtime.core.devices()? {
        if let Some(target) = describe(runtime, name)? {
            targets.push(target);
        }
    }
    targets.sort_by_key(|target| match target.device.kind {
        DeviceKind::Gpu => 0,
        DeviceKind::Cpu => 1,
        _ => 2,
    });
    for (index, target) in targets.iter_mut().enumerate() {
        target.device.index = index;
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
            Err(Error::not_found(format!("OpenVINO finds no device `{id}` here"))
                .with_hint(format!("devices: {}", ids.join(", "))))
        }
    }
}

/// Returns `None` for unknown devices and for combinations of other devices.
fn describe(runtime: &Runtime, openvino_name: String) -> Result<Option<Target>> {
    let core = &runtime.core;
    let optional = |key: &str| core.property(&openvino_name, key).ok().filter(|text| !text.is_empty());
    let (plugin, number) = match openvino_name.split_once('.') {
        Some((plugin, number)) => (plugin, number),
        None => (openvino_name.as_str(), "0"),
    };
    let (kind, id) = match plugin {
        "CPU" => (DeviceKind::Cpu, "cpu".to_string()),
        "GPU" => (DeviceKind::Gpu, hardware_id("gpu", number, optional("DEVICE_UUID"))),
        "NPU" => (DeviceKind::Npu, hardware_id("npu", number, optional("DEVICE_UUID"))),
        _ => return Ok(None),
    };
    let class = match kind {
        DeviceKind::Cpu => runtime.cpu_isa()?.to_string(),
        _ => optional("DEVICE_ARCHITECTURE").unwrap_or_else(|| plugin.to_ascii_lowercase()),
    };
    let memory_bytes = match kind {
        DeviceKind::Gpu => optional("GPU_DEVICE_TOTAL_MEM_SIZE").and_then(|text| text.parse().ok()),
        _ => None,
    };
    let name = optional("FULL_DEVICE_NAME").unwrap_or_else(|| openvino_name.clone());
    let features = core.property(&openvino_name, "OPTIMIZATION_CAPABILITIES")?;
    let features = features.split_whitespace().map(str::to_string).collect();
    let mut device = Device::new(id, name.trim(), kind, class);
    device.memory_bytes = memory_bytes;
    Ok(Some(Target { device, openvino_name, features }))
}

/// The id of a GPU or NPU: its UUID if the driver reports one, because that does not change.
fn hardware_id(kind: &str, number: &str, uuid: Option<String>) -> String {
    match uuid {
        Some(uuid) => format!("{kind}-{uuid}"),
        None => format!("{kind}.{number}"),
    }
}

impl Target {
    pub(crate) fn capabilities(&self) -> Capabilities {
        // It would compute f64 in f32.
        let dtypes = IO_DTYPES.into_iter().filter(|dtype| *dtype != DType::F64);
        let mut can = Capabilities::new(self.precisions(), dtypes.collect());
        can.weight_update = WeightUpdate::Rebuild;
        // Runs stop within 50 ms, but a compilation cannot be stopped.
        can.cancel = CancelSupport::BetweenPhases;
        can.dynamic_shapes = self.device.kind != DeviceKind::Npu;
        can.bake = self.has("EXPORT_IMPORT");
        // A stored engine is the graph, which every session compiles.
        can.session_compiles = true;
        can.with_settings(&[("hint", "latency")])
    }

    /// Refuses a precision that the device would silently replace with another.
    pub(crate) fn check_precision(&self, precision: Precision) -> Result<()> {
        precision.check_offered(&self.precisions(), &format!("OpenVINO on {}", self.device.name))
    }

    pub(crate) fn check_bake(&self) -> Result<()> {
        match self.has("EXPORT_IMPORT") {
            true => Ok(()),
            false => {
                Err(Error::unsupported(format!("OpenVINO cannot export models of {}", self.device.name)))
            }
        }
    }

    fn precisions(&self) -> Vec<Precision> {
        // CPUs with bf16 compute faster in bf16 than in fp16. GPUs and NPUs use fp16.
        let order = [("FP32", Precision::Fp32), ("BF16", Precision::Bf16), ("FP16", Precision::Fp16)];
        // With tiles (AMX), OpenVINO 2026.4.1 crashes in text encoders in bf16, and autoencoders come out wrong.
        let is_broken = |precision| precision == Precision::Bf16 && self.device.class.contains("amx");
        let offered =
            order.into_iter().filter(|(feature, precision)| self.has(feature) && !is_broken(*precision));
        offered.map(|(_, precision)| precision).collect()
    }

    fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|f| f == feature)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(kind: DeviceKind, features: &[&str]) -> Target {
        Target {
            device: Device::new("x", "Thing", kind, ""),
            openvino_name: "X".into(),
            features: features.iter().map(|f| f.to_string()).collect(),
        }
    }

    #[test]
    fn precisions_are_those_of_the_device() {
        let cpu = target(DeviceKind::Cpu, &["BF16", "WINOGRAD", "FP32", "INT8", "EXPORT_IMPORT"]);
        assert_eq!(cpu.precisions(), [Precision::Fp32, Precision::Bf16]);
        let error = cpu.check_precision(Precision::Fp16).unwrap_err();
        assert_eq!(error.code, sdrun_abi::ErrorCode::Unimplemented);
        assert!(error.message.contains("fp16") && error.hint.unwrap().to_string().contains("fp32 or bf16"));
        assert!(cpu.capabilities().bake && cpu.check_bake().is_ok());
        let mut tiles = target(DeviceKind::Cpu, &["BF16", "FP32"]);
        tiles.device.class = "avx512_core_amx".into();
        assert_eq!(tiles.precisions(), [Precision::Fp32]);
        let npu = target(DeviceKind::Npu, &["FP16", "INT8"]);
        assert_eq!(npu.precisions(), [Precision::Fp16]);
        assert!(npu.check_bake().is_err() && !npu.capabilities().dynamic_shapes);
    }

    #[test]
    fn ids_prefer_what_the_driver_keeps() {
        assert_eq!(hardware_id("gpu", "1", None), "gpu.1");
        assert_eq!(hardware_id("gpu", "1", Some("8680a0".into())), "gpu-8680a0");
    }
}

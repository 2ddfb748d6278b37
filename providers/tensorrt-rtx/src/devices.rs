//! Lists the GPUs of this machine, then the targets that engines can be built for without a GPU.

use crate::{ffi::cuda::Gpu, runtime::Runtime, target::Target};
use sdrun_abi::{CancelSupport, Capabilities, DType, Device, DeviceKind, Error, Result, WeightUpdate};

/// A device of the provider.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) target: Target,
    /// `None` for a target without hardware.
    pub(crate) gpu: Option<Gpu>,
}

/// All devices, existing ones first.
pub(crate) fn all(runtime: &'static Runtime) -> Result<Vec<Place>> {
    let (gpus, absent) = match runtime.driver() {
        Ok(driver) => (driver.gpus()?, String::new()),
        Err(error) => (Vec::new(), error.message),
    };
    Ok(list(gpus, &absent))
}

fn list(gpus: Vec<Gpu>, absent: &str) -> Vec<Place> {
    let absent = match (gpus.is_empty(), absent) {
        (false, _) => "this is a build target, not a GPU: to run an engine, name the GPU",
        (true, "") => "needs an NVIDIA GPU: the CUDA driver found none",
        (true, why) => why,
    };
    let mut places: Vec<Place> = Vec::new();
    for gpu in gpus {
        let class = format!("sm{}", gpu.capability);
        let mut device = Device::new(&gpu.pci, &gpu.name, DeviceKind::Gpu, class);
        device.index = places.len();
        device.memory_bytes = Some(gpu.memory);
        places.push(Place { device, target: Target::of_gpu(gpu.capability), gpu: Some(gpu) });
    }
    for target in Target::all() {
        let device = target.device(places.len(), absent.to_string());
        places.push(Place { device, target, gpu: None });
    }
    places
}

/// The device with this id.
pub(crate) fn find(runtime: &'static Runtime, id: &str) -> Result<Place> {
    let places = all(runtime)?;
    let known: Vec<String> = places.iter().map(|place| place.device.id.clone()).collect();
    places.into_iter().find(|place| place.device.id == id).ok_or_else(|| {
        Error::not_found(format!("tensorrt-rtx has no device `{id}` (has: {})", known.join(", ")))
    })
}

impl Place {
    /// The GPU. Fails with the reason if this device cannot run engines.
    pub(crate) fn gpu(&self) -> Result<&Gpu> {
        self.gpu.as_ref().ok_or_else(|| {
            let why = self.device.absent.clone().unwrap_or_default();
            Error::precondition(match why.starts_with("needs") {
                true => why,
                false => format!("{} is not a GPU of this machine: {why}", self.device.id),
            })
            .with_hint("engines can be built here and run on a machine with the GPU")
        })
    }

    /// What the device supports.
    pub(crate) fn capabilities(&self) -> Capabilities {
        use DType::*;
        let mut can =
            Capabilities::new(self.target.precisions(), vec![F32, F16, BF16, I64, I32, I8, U8, Bool]);
        can.weight_update = WeightUpdate::InPlace;
        can.cancel = CancelSupport::Prompt;
        can.dynamic_shapes = true;
        can.device_free_build = true;
        can.bake = true;
        can.streaming = true;
        can.device_tensors = true;
        // The library compiles kernels for the GPU when an engine is loaded and first run.
        can.session_compiles = true;
        can.with_settings(&[("tf32", "off"), ("cuda-graph", "off"), ("streams", "1")])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_come_before_targets() {
        let gpu = |pci: &str, capability| Gpu {
            ordinal: 0,
            pci: pci.into(),
            name: "GPU".into(),
            memory: 1 << 30,
            capability,
        };
        let places = list(vec![gpu("0000:01:00.0", 89), gpu("0000:02:00.0", 90)], "");
        let present: Vec<bool> = places.iter().map(|p| p.device.absent.is_none()).collect();
        assert_eq!(present[..3], [true, true, false]);
        assert_eq!((places[0].target, &*places[0].device.class), (Target::Sm(89), "sm89"));
        assert_eq!((places[1].target, &*places[1].device.class), (Target::Portable, "sm90"));
        assert!(places.iter().enumerate().all(|(i, place)| place.device.index == i));
        assert!(places[2].gpu().unwrap_err().message.contains("portable is not a GPU"));

        let places = list(vec![], "needs an NVIDIA GPU: no CUDA driver found");
        assert_eq!(places[0].device.id, "portable");
        assert_eq!(places[0].gpu().unwrap_err().message, "needs an NVIDIA GPU: no CUDA driver found");
    }
}

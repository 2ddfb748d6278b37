//! The target of a plan: one compute capability, or the library's portable set.

use sdrun_abi::{Device, DeviceKind, Precision, Result};

/// The single compute capabilities TensorRT-RTX 1.7 can build for (`nvinfer1::ComputeCapability`), times ten.
const CAPABILITIES: [u32; 6] = [75, 80, 86, 89, 120, 121];

/// The target of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// 8.0, 8.6, 8.9, 12.0 and, according to NVIDIA's documentation, later ones.
    Portable,
    /// One compute capability, times ten: 89 is 8.9.
    Sm(u32),
}

impl Target {
    /// All targets, the portable one first.
    pub(crate) fn all() -> impl Iterator<Item = Target> {
        std::iter::once(Target::Portable).chain(CAPABILITIES.map(Target::Sm))
    }

    /// The target for a GPU of this compute capability (times ten): the same if the library has it, otherwise the
    /// portable set.
    pub(crate) fn of_gpu(capability: u32) -> Self {
        if CAPABILITIES.contains(&capability) { Target::Sm(capability) } else { Target::Portable }
    }

    /// `portable`, `sm89`, …: the device class, and the id of the device to build for.
    pub(crate) fn name(self) -> String {
        match self {
            Target::Portable => "portable".into(),
            Target::Sm(capability) => format!("sm{capability}"),
        }
    }

    /// The target with this name.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::all().find(|target| target.name() == name)
    }

    /// `nvinfer1::ComputeCapability`; 0 leaves the choice to the library, which selects the portable set.
    pub(crate) fn capability(self) -> i32 {
        match self {
            Target::Portable => 0,
            Target::Sm(capability) => capability as i32,
        }
    }

    /// Whether a plan for this target runs on a GPU of that compute capability (times ten).
    pub(crate) fn runs_on(self, gpu: u32) -> bool {
        match self {
            Target::Portable => gpu >= 80,
            Target::Sm(capability) => capability == gpu,
        }
    }

    /// Precisions that the target supports. For 7.5 the library has neither f32 matrix products nor bf16.
    pub(crate) fn precisions(self) -> Vec<Precision> {
        match self {
            Target::Sm(..80) => vec![Precision::Fp16],
            _ => vec![Precision::Fp32, Precision::Fp16, Precision::Bf16],
        }
    }

    /// The target as a device without hardware.
    pub(crate) fn device(self, index: usize, absent: String) -> Device {
        let name: String = match self {
            Target::Portable => "any NVIDIA GPU from compute capability 8.0 on".into(),
            Target::Sm(capability) => {
                format!("NVIDIA GPU of compute capability {}.{}", capability / 10, capability % 10)
            }
        };
        let mut device = Device::new(self.name(), name, DeviceKind::Gpu, self.name());
        device.index = index;
        device.absent = Some(absent);
        device
    }

    /// Returns an error if the target does not compute in `precision`.
    pub(crate) fn check_precision(self, precision: Precision) -> Result<()> {
        precision.check_offered(&self.precisions(), &format!("TensorRT-RTX for {}", self.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_gpus() {
        for target in Target::all() {
            assert_eq!(Target::parse(&target.name()), Some(target));
        }
        assert_eq!(Target::parse("sm90"), None);
        assert_eq!(Target::of_gpu(89), Target::Sm(89));
        assert_eq!(Target::of_gpu(90), Target::Portable);
        assert!(Target::Portable.runs_on(90) && !Target::Portable.runs_on(75));
        assert!(Target::Sm(89).runs_on(89) && !Target::Sm(86).runs_on(89));
    }

    #[test]
    fn turing_has_half_precision_alone() {
        assert!(Target::Sm(75).check_precision(Precision::Fp16).is_ok());
        let error = Target::Sm(75).check_precision(Precision::Fp32).unwrap_err();
        assert!(
            error.message.contains("for sm75 does not compute in fp32")
                && error.hint.unwrap().to_string().contains("fp16")
        );
        assert!(Target::Portable.check_precision(Precision::Bf16).is_ok());
    }
}

use crate::{
    engine::{CompatibilityRecord, FORMAT, GgmlEngine},
    ffi::{Ggml, LIBRARY_DIR},
};
use sdrun_abi::{
    BuildSpec, CancelSupport, Capabilities, Compatibility, DType, Device, DeviceKind, Engine, Error,
    ErrorCode, Flow, Host, InitConfig, LogLevel, Precision, Provider, Result, RuntimeInfo, WeightSource,
    WeightUpdate,
};
use std::{path::Path, sync::OnceLock};

/// The id of the only device.
const CPU: &str = "cpu";

/// Runs graphs with ggml on the CPU.
#[derive(Default)]
pub struct GgmlProvider {
    ggml: OnceLock<&'static Ggml>,
}

impl GgmlProvider {
    fn ggml(&self) -> Result<&'static Ggml> {
        self.ggml.get().copied().ok_or_else(|| {
            Error::precondition("the ggml provider is not initialised")
                .with_hint("`init` has to succeed first")
        })
    }

    fn check_spec(&self, spec: &BuildSpec) -> Result<&'static Ggml> {
        let ggml = self.ggml()?;
        check_device(&spec.device)?;
        if spec.bake {
            return Err(Error::unsupported("the ggml provider does not bake weights into its engines")
                .with_hint("build without it; loading weights into a ggml engine is only a copy"));
        }
        if let Some(key) = spec.options.keys().next() {
            return Err(Error::invalid(format!(
                "the ggml provider has no option {key:?}; it has none at all"
            )));
        }
        Ok(ggml)
    }
}

fn check_device(device: &str) -> Result<()> {
    match device {
        CPU => Ok(()),
        other => Err(Error::not_found(format!("the ggml provider has no device {other:?}; it has {CPU:?}"))),
    }
}

impl Provider for GgmlProvider {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        if let Some(key) = config.options.keys().next() {
            return Err(Error::invalid(format!(
                "the ggml provider has no option {key:?}; it has none at all"
            )));
        }
        // Beside the plugin where it is installed; where it was built, when it is linked in or under test.
        let ggml = Ggml::load(&[&config.plugin_dir, Path::new(LIBRARY_DIR)])?;
        let _ = self.ggml.set(ggml);
        let message = format!("ggml {} with CPU variant {}", ggml.version(), ggml.variant());
        host.log(LogLevel::Debug, "ggml", &message);
        Ok(RuntimeInfo {
            name: "ggml".into(),
            version: ggml.version().into(),
            library: Some(ggml.library().to_path_buf()),
        })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let ggml = self.ggml()?;
        Ok(vec![Device {
            id: CPU.into(),
            index: 0,
            name: ggml.cpu_name(),
            kind: DeviceKind::Cpu,
            class: format!("{}-{}", std::env::consts::ARCH, ggml.variant()),
            memory_bytes: ggml.memory(),
            absent: None,
        }])
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        let ggml = self.ggml()?;
        check_device(device)?;
        // bf16 products have instructions of their own on few processors; elsewhere f16 is faster.
        let low = match ggml.variant() {
            "zen4" => [Precision::Bf16, Precision::Fp16],
            _ => [Precision::Fp16, Precision::Bf16],
        };
        use DType::*;
        Ok(Capabilities {
            precisions: vec![Precision::Fp32, low[0], low[1]],
            io_dtypes: vec![F32, F16, BF16, F64, U8, I8, U16, I16, U32, I32, U64, I64, Bool],
            weight_update: WeightUpdate::InPlace,
            cancel: CancelSupport::Prompt,
            dynamic_shapes: true,
            device_free_build: true,
            bake: false,
            streaming: false,
        })
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        _: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let ggml = self.check_spec(spec)?;
        if host.progress("translate", 0, 1) == Flow::Cancel {
            return Err(Error::new(ErrorCode::Cancelled, "the build was cancelled before it began"));
        }
        Ok(Box::new(GgmlEngine::new(ggml, model, spec, host)?))
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let ggml = self.check_spec(spec)?;
        Ok(Box::new(GgmlEngine::from_payload(ggml, payload, spec, host)?))
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        check_device(device)?;
        let record: CompatibilityRecord = serde_json::from_str(compatibility)
            .map_err(|e| Error::invalid(format!("not a compatibility string of the ggml provider: {e}")))?;
        // The graph is translated anew whenever an engine is loaded, so that neither ggml's version nor the
        // processor matters.
        Ok(match record.format {
            FORMAT => Compatibility::Optimal,
            other => {
                Compatibility::Unsupported(format!("built in format {other}, this plugin reads {FORMAT}"))
            }
        })
    }
}

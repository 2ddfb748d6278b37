use crate::{
    engine::{self, CompatibilityRecord, FORMAT, GgmlEngine},
    ffi::{Ggml, Gpu, Target},
    topology::Topology,
};
use sdrun_abi::{
    Assessment, BuildSpec, CancelSupport, Capabilities, Compatibility, DType, Device, DeviceKind, Engine,
    Error, ErrorCode, Flow, Hint, Host, InitConfig, LogLevel, Precision, Provider, Result, RuntimeInfo,
    WeightSource, WeightUpdate,
};
use std::{collections::BTreeSet, path::Path, sync::OnceLock};

/// The id of the CPU.
const CPU: &str = "cpu";
/// The option of `init` that names a folder with ggml's libraries for devices. It takes precedence over installed extensions.
const BACKENDS_OPTION: &str = "backends";

/// Runs graphs with ggml.
#[derive(Default)]
pub struct GgmlProvider {
    loaded: OnceLock<Loaded>,
}

struct Loaded {
    /// The ggml that was built with the plugin.
    own: &'static Ggml,
    /// The ggml in each folder of backends.
    bundles: Vec<&'static Ggml>,
}

impl Loaded {
    /// Every device but the CPU.
    fn gpus(&self) -> impl Iterator<Item = (Target, &'static Gpu)> {
        let of = |ggml: &'static Ggml| {
            ggml.gpus()
                .iter()
                .enumerate()
                .map(move |(i, gpu)| (Target { ggml, gpu: Some(i), budget: None }, gpu))
        };
        of(self.own).chain(self.bundles.iter().copied().flat_map(of))
    }
}

impl GgmlProvider {
    fn loaded(&self) -> Result<&Loaded> {
        self.loaded.get().ok_or_else(|| {
            Error::precondition("the ggml provider is not initialised").with_hint("call `init` first")
        })
    }

    fn target(&self, device: &str) -> Result<Target> {
        let loaded = self.loaded()?;
        if device == CPU {
            return Ok(Target { ggml: loaded.own, gpu: None, budget: None });
        }
        if let Some((target, _)) = loaded.gpus().find(|(_, gpu)| gpu.id == device) {
            return Ok(target);
        }
        let known: Vec<&str> = [CPU].into_iter().chain(loaded.gpus().map(|(_, gpu)| &*gpu.id)).collect();
        let known = known.join(", ");
        Err(Error::not_found(format!("the ggml provider has no device {device:?}; it has {known}"))
            .with_hint(Hint::AnyOf(vec![
                Hint::Install { runtime: "ggml-vulkan".into() },
                Hint::Install { runtime: "ggml-cuda".into() },
                "let SDRUN_GGML_BACKENDS name a folder with ggml's libraries for other devices".into(),
            ])))
    }

    fn check_spec(&self, spec: &BuildSpec) -> Result<Target> {
        let target = self.target(&spec.device)?;
        spec.precision.check_offered(&precisions(target), &format!("ggml on {}", spec.device))?;
        if spec.bake {
            return Err(Error::unsupported("the ggml provider does not bake weights into its engines")
                .with_hint("build without it; loading weights into a ggml engine is only a copy"));
        }
        if let Some(key) = spec.options.keys().next() {
            return Err(Error::invalid(format!(
                "the ggml provider has no option {key:?}; it has none at all"
            )));
        }
        Ok(Target { budget: spec.vram_budget, ..target })
    }
}

/// The precisions of a target: fp32, then the others, the best first.
fn precisions(target: Target) -> Vec<Precision> {
    use Precision::*;
    match (target.gpu, target.ggml.variant()) {
        (Some(_), _) => vec![Fp32, Fp16, Q8_0, Q4K],
        // Only few processors have instructions for bf16 products. On the others f16 is faster.
        (None, "zen4") => vec![Fp32, Bf16, Fp16, Q8_0, Q4K],
        (None, _) => vec![Fp32, Fp16, Bf16, Q8_0, Q4K],
    }
}

impl Provider for GgmlProvider {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        if let Some(key) = config.options.keys().find(|key| *key != BACKENDS_OPTION) {
            return Err(Error::invalid(format!(
                "the ggml provider has no option {key:?}; it has {BACKENDS_OPTION:?}"
            )));
        }
        // A host that links this crate gives the folder of ggml's libraries as `plugin_dir`.
        let own = Ggml::load(&config.plugin_dir)?;
        let mut bundles = Vec::new();
        match config.options.get(BACKENDS_OPTION) {
            Some(folder) => bundles.push(Ggml::load_bundle(Path::new(folder))?),
            // The user may name one folder for several extensions. The CPU works without them.
            None => {
                for folder in config.extensions.values().collect::<BTreeSet<_>>() {
                    match Ggml::load_bundle(folder) {
                        Ok(ggml) => bundles.push(ggml),
                        Err(why) => host.log(LogLevel::Warn, "ggml", &why.to_string()),
                    }
                }
            }
        }
        for ggml in [own].into_iter().chain(bundles.iter().copied()) {
            let message = format!("ggml {} with CPU variant {}", ggml.version(), ggml.variant());
            host.log(LogLevel::Debug, "ggml", &message);
            ggml.unusable().iter().for_each(|why| host.log(LogLevel::Warn, "ggml", why));
        }
        let _ = self.loaded.set(Loaded { own, bundles });
        Ok(RuntimeInfo::new("ggml", own.version(), Some(own.library().to_path_buf())))
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let loaded = self.loaded()?;
        let class = format!("{}-{}", std::env::consts::ARCH, loaded.own.variant());
        let mut cpu = Device::new(CPU, loaded.own.cpu_name(), DeviceKind::Cpu, class);
        cpu.memory_bytes = loaded.own.memory();
        let mut devices = vec![cpu];
        for (target, gpu) in loaded.gpus() {
            let (name, memory_bytes) = target.ggml.describe(gpu);
            // Engines are translated when they are loaded, so they suit any device of the backend.
            let class = gpu.id.split(':').next().unwrap_or_default().to_string();
            let mut device = Device::new(&gpu.id, name, DeviceKind::Gpu, class);
            device.index = devices.len();
            device.memory_bytes = memory_bytes;
            devices.push(device);
        }
        Ok(devices)
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        let target = self.target(device)?;
        use DType::*;
        let mut can = Capabilities::new(
            precisions(target),
            vec![F32, F16, BF16, F64, U8, I8, U16, I16, U32, I32, U64, I64, Bool],
        );
        can.weight_update = WeightUpdate::InPlace;
        can.cancel = CancelSupport::Prompt;
        can.dynamic_shapes = true;
        can.device_free_build = true;
        can.streaming = target.gpu.is_some();
        can.device_tensors = true;
        can.wide_activations = true;
        Ok(can)
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        _: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let target = self.check_spec(spec)?;
        if host.progress("translate", 0, 1) == Flow::Cancel {
            return Err(Error::new(ErrorCode::Cancelled, "the build was cancelled before it began"));
        }
        Ok(Box::new(GgmlEngine::new(target, model, spec, host)?))
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let target = self.check_spec(spec)?;
        Ok(Box::new(GgmlEngine::from_payload(target, payload, spec, host)?))
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        self.target(device)?;
        let record: CompatibilityRecord = serde_json::from_str(compatibility)
            .map_err(|e| Error::invalid(format!("not a compatibility string of the ggml provider: {e}")))?;
        // Engines are translated when they are loaded, so neither ggml's version nor the processor matters.
        Ok(match record.format {
            FORMAT => Compatibility::Optimal,
            other => {
                Compatibility::Unsupported(format!("built in format {other}, this plugin reads {FORMAT}"))
            }
        })
    }

    fn assess(&self, model: &[u8], spec: &BuildSpec) -> Result<Assessment> {
        let mut assessment = Assessment::default();
        // What is wrong with a graph is an error of the build, which has more to say.
        if let Ok(Some([weights, activations])) =
            self.check_spec(spec).and_then(|target| Topology::memory(target, engine::read(model)?, spec))
        {
            assessment.memory.host_weights = Some(weights);
            assessment.memory.host_activations = Some(activations);
        }
        Ok(assessment)
    }
}

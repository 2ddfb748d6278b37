use crate::{
    baked::{self, Baked},
    engine::{OrtEngine, Target},
    ep,
    ffi::{self, EpDevice},
    log,
};
use bytes::Bytes;
use ort::environment::Environment;
use sdrun_abi::{
    BuildSpec, CancelSupport, Capabilities, Compatibility, DType, Device, DeviceKind, Engine, Error, Hint,
    Host, InitConfig, LogLevel, Precision, Provider, Result, RuntimeInfo, WeightSource, WeightUpdate,
};
use sdrun_provider_common::{Loaded, extension_spec, locate, refuse_options, runtime_spec};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// The provider. It is stateless, because a process loads only one ONNX Runtime.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnnxRuntime;

struct Runtime {
    environment: Environment,
    version: String,
    library: PathBuf,
    accelerators: Vec<Accelerator>,
    /// Why some execution providers add no device.
    unusable: Vec<String>,
}

/// A device of an execution provider other than the CPU's.
struct Accelerator {
    /// For example `webgpu:0`.
    id: String,
    device: EpDevice,
}

/// Extensions are called after the runtime.
const EXTENSION: &str = "onnxruntime-";
/// The extension with the execution provider for CUDA. Builds with CUDA have the same library beside their own.
const WITH_CUDA: &str = "onnxruntime-cuda";
/// DirectML's execution provider is part of a build of the runtime, which takes the place of the other one.
const WITH_DIRECTML: &str = "onnxruntime-dml";
/// Option of a build: whether the CPU may compute what a device cannot.
const ALLOW_FALLBACK: &str = "allow_fallback";

static RUNTIME: Loaded<Runtime> = Loaded::new("ONNX Runtime");

/// An engine is the graph, which every ONNX Runtime that this plugin accepts can read.
pub(crate) const COMPATIBILITY: &str = "onnx";

const CPU: &str = "cpu";

impl Provider for OnnxRuntime {
    /// Loads the library from the folder that the host found.
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        refuse_options("onnxruntime", &config.options)?;
        let library = library(config)?;
        let runtime = RUNTIME.load(&library, |library| {
            let (version, environment) = ffi::load(library)?;
            let (mut devices, mut unusable) = (ffi::built_in(&environment)?, Vec::new());
            let mut add = |name: &str, file: Result<PathBuf>| match file
                .and_then(|file| ffi::register(&environment, name, &file))
            {
                Ok(found) if found.is_empty() => unusable.push(format!("{name} finds no device")),
                Ok(found) => devices.extend(found),
                Err(why) => unusable.push(why.to_string()),
            };
            if let Some(file) = cuda(library).filter(|_| !config.extensions.contains_key(WITH_CUDA)) {
                add("cuda", Ok(file));
            }
            for (name, folder) in config.extensions.iter().filter(|(name, _)| *name != WITH_DIRECTML) {
                let spec = extension_spec(crate::MANIFEST, name);
                add(name, spec.and_then(|spec| locate(&spec, Some(folder))));
            }
            let accelerators = named(devices);
            let library = library.to_path_buf();
            Ok(Runtime { environment, version, library, accelerators, unusable })
        })?;
        log::deliver(host);
        // The CPU works without them.
        runtime.unusable.iter().for_each(|why| host.log(LogLevel::Warn, "onnxruntime", why));
        Ok(RuntimeInfo::new("onnxruntime", runtime.version.clone(), Some(runtime.library.clone())))
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let mut devices = vec![Device::new(CPU, cpu_name(), DeviceKind::Cpu, std::env::consts::ARCH)];
        for Accelerator { id, device } in &RUNTIME.get()?.accelerators {
            // A stored engine is the graph, which suits any device, or what was compiled for one of those that are named by their kind.
            let class = if ep::bakes(device) { id.clone() } else { ep::short(&device.provider) };
            let through = device.provider.trim_end_matches("ExecutionProvider");
            let kind = device.kind.name().to_uppercase();
            let name = format!("{} {kind} through {through}", device.vendor);
            let mut found = Device::new(id, name.trim(), device.kind, class);
            found.index = devices.len();
            devices.push(found);
        }
        Ok(devices)
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        let device = find_device(device)?;
        let mut can = Capabilities::new(offered(device), DType::ALL.to_vec());
        can.bake = device.is_some_and(ep::bakes);
        can.device_tensors = device.is_some_and(EpDevice::keeps_tensors);
        can.weight_update = WeightUpdate::Rebuild;
        can.cancel = CancelSupport::Prompt;
        can.dynamic_shapes = true;
        // A stored engine is the graph. A session optimises it with its weights.
        can.session_compiles = true;
        Ok(can)
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let engine = OrtEngine::new(Bytes::copy_from_slice(model), check_spec(spec)?)?;
        if spec.bake {
            return engine.bake(weights, host);
        }
        let verdict = engine.try_without_weights(host);
        log::deliver(host);
        verdict?;
        Ok(Box::new(engine))
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let target = check_spec(spec)?;
        if baked::is_baked(payload) {
            return Ok(Box::new(Baked::load(payload, target, host)?));
        }
        Ok(Box::new(OrtEngine::new(Bytes::copy_from_slice(payload), target)?))
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        baked::check(compatibility, find_device(device)?)
    }
}

/// The precisions of a device, or of the CPU, where ONNX Runtime computes in the element types of the graph.
fn offered(device: Option<&EpDevice>) -> Vec<Precision> {
    device.map_or_else(|| vec![Precision::Fp32], ep::precisions)
}

/// The library of ONNX Runtime: of the build with DirectML, if there is one.
fn library(config: &InitConfig) -> Result<PathBuf> {
    match config.extensions.get(WITH_DIRECTML) {
        Some(folder) => locate(&extension_spec(crate::MANIFEST, WITH_DIRECTML)?, Some(folder)),
        None => locate(&runtime_spec(crate::MANIFEST)?, config.runtime_dir.as_deref()),
    }
}

/// The library of the CUDA execution provider, which lies beside that of ONNX Runtime if the user has a build with it.
fn cuda(runtime: &Path) -> Option<PathBuf> {
    let (start, end) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let file = runtime.parent()?.join(format!("{start}{}{end}", ep::CUDA_LIBRARY));
    file.is_file().then_some(file)
}

/// Gives each device its identifier.
fn named(devices: Vec<EpDevice>) -> Vec<Accelerator> {
    let mut counts: HashMap<String, usize> = HashMap::new();
    let name = |device: EpDevice| {
        let count = counts.entry(device.provider.clone()).or_default();
        *count += 1;
        let id = format!("{}:{}", ep::short(&device.provider), ep::place(&device, *count - 1));
        Accelerator { id, device }
    };
    devices.into_iter().map(name).collect()
}

/// The device with this identifier, or `None` for the CPU.
fn find_device(id: &str) -> Result<Option<&'static EpDevice>> {
    let accelerators = &RUNTIME.get()?.accelerators;
    if id == CPU {
        return Ok(None);
    }
    if let Some(found) = accelerators.iter().find(|accelerator| accelerator.id == id) {
        return Ok(Some(&found.device));
    }
    let known: Vec<&str> = [CPU].into_iter().chain(accelerators.iter().map(|a| a.id.as_str())).collect();
    let missing =
        Error::not_found(format!("ONNX Runtime has no device `{id}` here; it has {}", known.join(", ")));
    let class = id.split(':').next().unwrap_or_default();
    let runtime = format!("{EXTENSION}{class}");
    match extension_spec(crate::MANIFEST, &runtime) {
        Ok(_) => Err(missing.with_hint(Hint::Install { runtime })),
        Err(_) => Err(missing),
    }
}

/// Refuses unsupported options; returns where the engine runs.
fn check_spec(spec: &BuildSpec) -> Result<Target> {
    let device = find_device(&spec.device)?;
    let mut options = spec.options.clone();
    let fallback = match options.remove(ALLOW_FALLBACK).as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(Error::invalid(format!(
                "the option {ALLOW_FALLBACK} is `true` or `false`, not {other:?}"
            )));
        }
    };
    refuse_options("onnxruntime", &options)?;
    spec.precision.check_offered(&offered(device), &format!("ONNX Runtime on {}", spec.device))?;
    if spec.threads == Some(0) {
        return Err(Error::invalid("the number of threads must be at least 1"));
    }
    let environment = &RUNTIME.get()?.environment;
    Ok(Target { environment, threads: spec.threads, device, precision: spec.precision, fallback })
}

/// The processor's name if the system provides it in a file, else its architecture.
fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim());
    name.map_or_else(|| format!("{} CPU", std::env::consts::ARCH), str::to_string)
}

use crate::{engine::OrtEngine, ffi, log};
use bytes::Bytes;
use ort::environment::Environment;
use sdrun_abi::{
    BuildSpec, CancelSupport, Capabilities, Compatibility, DType, Device, DeviceKind, Engine, Error, Host,
    InitConfig, Precision, Provider, Result, RuntimeInfo, WeightSource, WeightUpdate,
};
use sdrun_provider_common::{Loaded, locate, refuse_options, runtime_spec};
use std::path::PathBuf;

/// The provider. It is stateless, because a process loads only one ONNX Runtime.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnnxRuntime;

struct Runtime {
    environment: Environment,
    version: String,
    library: PathBuf,
}

static RUNTIME: Loaded<Runtime> = Loaded::new("ONNX Runtime");

/// The environment of the loaded library; `FailedPrecondition` before `init` has succeeded.
fn environment() -> Result<&'static Environment> {
    Ok(&RUNTIME.get()?.environment)
}

/// An engine is the graph, which every ONNX Runtime that this plugin accepts can read.
pub(crate) const COMPATIBILITY: &str = "onnx";

const DEVICE: &str = "cpu";

impl Provider for OnnxRuntime {
    /// Loads the library from the folder that the host found.
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        refuse_options("onnxruntime", &config.options)?;
        let library = locate(&runtime_spec(crate::MANIFEST)?, config.runtime_dir.as_deref())?;
        let runtime = RUNTIME.load(&library, |library| {
            let (version, environment) = ffi::load(library)?;
            Ok(Runtime { environment, version, library: library.to_path_buf() })
        })?;
        log::deliver(host);
        Ok(RuntimeInfo::new("onnxruntime", runtime.version.clone(), Some(runtime.library.clone())))
    }

    fn devices(&self) -> Result<Vec<Device>> {
        environment()?;
        Ok(vec![Device::new(DEVICE, cpu_name(), DeviceKind::Cpu, std::env::consts::ARCH)])
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        environment()?;
        check_device(device)?;
        let mut can = Capabilities::new(vec![Precision::Fp32], DType::ALL.to_vec());
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
        _weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let environment = environment()?;
        let threads = check_spec(spec)?;
        let engine = OrtEngine::new(environment, Bytes::copy_from_slice(model), threads)?;
        let verdict = engine.try_without_weights(host);
        log::deliver(host);
        verdict?;
        Ok(Box::new(engine))
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, _host: &dyn Host) -> Result<Box<dyn Engine>> {
        let threads = check_spec(spec)?;
        Ok(Box::new(OrtEngine::new(environment()?, Bytes::copy_from_slice(payload), threads)?))
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        environment()?;
        check_device(device)?;
        match compatibility {
            COMPATIBILITY => Ok(Compatibility::Optimal),
            other => {
                Err(Error::invalid(format!("the compatibility string {other:?} is not from onnxruntime")))
            }
        }
    }
}

fn check_device(device: &str) -> Result<()> {
    match device {
        DEVICE => Ok(()),
        _ => {
            Err(Error::not_found(format!("this plugin runs ONNX Runtime only on the CPU, not on `{device}`"))
                .with_hint(format!("devices: {DEVICE}")))
        }
    }
}

/// Refuses unsupported options; returns the number of threads.
fn check_spec(spec: &BuildSpec) -> Result<usize> {
    check_device(&spec.device)?;
    refuse_options("onnxruntime", &spec.options)?;
    // ONNX Runtime computes in the element types of the graph.
    spec.precision.check_offered(&[Precision::Fp32], "ONNX Runtime on the CPU")?;
    if spec.bake {
        return Err(Error::unsupported("the onnxruntime provider cannot store weights in an engine"));
    }
    match spec.threads {
        Some(0) => Err(Error::invalid("the number of threads must be at least 1")),
        Some(threads) => Ok(threads),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
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

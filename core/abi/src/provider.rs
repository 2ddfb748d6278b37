use crate::{
    Assessment, BuildSpec, Capabilities, Compatibility, Device, DeviceTensor, EngineInfo, Error, InitConfig,
    Input, MemoryReport, OutputSink, RefitReport, Result, RuntimeInfo, TensorView, VecSink, WeightSource,
};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Drives one vendor's runtime. Provider authors implement this trait, and the host uses it.
///
/// Threads: any thread may call any method. Panics: caught at the ABI and turned into
/// [`ErrorCode::Internal`](crate::ErrorCode::Internal); the plugin then counts as poisoned.
pub trait Provider: Send + Sync {
    /// Loads the vendor's runtime. If it fails, later calls fail with `FailedPrecondition`. Called once per process.
    /// Must return an error quickly if the runtime is absent.
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo>;

    /// Devices that this runtime can use here, best first.
    fn devices(&self) -> Result<Vec<Device>>;

    /// The capabilities of the device with [`Device::id`] `device`.
    fn capabilities(&self, device: &str) -> Result<Capabilities>;

    /// Builds an engine from an ONNX `ModelProto`.
    ///
    /// The host has validated and simplified `model`. Small and integer initializers are inline. Every *weight* is an
    /// initializer with external data whose `location` is its own name. Its values come from `weights`; the provider
    /// pulls them only if the build needs them (`spec.bake`, or a runtime that cannot build without).
    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>>;

    /// Loads an engine from the result of [`Engine::serialize`]. The host calls this only if
    /// [`check`](Provider::check) did not return `Unsupported`.
    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>>;

    /// Checks an engine by its [`EngineInfo::compatibility`] string, without its payload.
    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility>;

    /// What [`build`](Provider::build) and a session of `model` would need, determined without weights and without
    /// compiling: every node that the provider cannot run, and the memory. Values that it cannot determine are
    /// unknown, not an error.
    fn assess(&self, model: &[u8], spec: &BuildSpec) -> Result<Assessment> {
        let _ = (model, spec);
        Ok(Assessment::default())
    }
}

/// A compiled graph for a device class, without its weights unless they were baked in.
pub trait Engine: Send + Sync {
    /// Inputs, outputs and the weights it needs.
    fn info(&self) -> &EngineInfo;

    /// Serializes the engine for [`Provider::load`].
    fn serialize(&self) -> Result<Vec<u8>>;

    /// Returns an engine with these weights inside, equivalent to [`Provider::build`] with `bake`. Only for devices
    /// with [`Capabilities::bake`](crate::Capabilities::bake).
    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let _ = (weights, host);
        Err(Error::unsupported("cannot store weights in an engine"))
    }

    /// Loads the weights and returns a session that is ready to run. Fails if the source cannot deliver a weight. For
    /// an engine that needs no weights, pass [`NoWeights`](crate::NoWeights).
    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>>;
}

/// An engine with weights on a device. Calls on one session never overlap.
pub trait Session: Send {
    /// Replaces the weights named in `changed` (all names are in [`EngineInfo::weights`]). On error, the previous
    /// weights stay usable. `weights` delivers every weight of the engine, changed or not, for runtimes that need all
    /// of them again.
    fn refit(&mut self, changed: &[&str], weights: &dyn WeightSource, host: &dyn Host)
    -> Result<RefitReport>;

    /// Runs one inference. `inputs` are in the order of [`EngineInfo::inputs`], with the types and shapes stated
    /// there (the host has checked them). Calls [`OutputSink::allocate`] exactly once, as soon as the output shapes
    /// are known, and fills every buffer.
    fn run(&mut self, inputs: &[TensorView<'_>], outputs: &mut dyn OutputSink, host: &dyn Host)
    -> Result<()>;

    /// As [`run`](Session::run), but inputs may be on the device, and the outputs that `keep` marks (in the order of
    /// [`EngineInfo::outputs`]) stay there. Returns these tensors, in order. The sink receives the other outputs and
    /// is called even if there are none. Only for devices with
    /// [`Capabilities::device_tensors`](crate::Capabilities::device_tensors).
    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        let _ = (inputs, keep, outputs, host);
        Err(Error::unsupported("cannot keep tensors on its device")
            .with_hint("run it with tensors in main memory"))
    }

    /// Memory that the runtime uses for this session.
    fn memory(&self) -> Result<MemoryReport>;

    /// Runs repeatedly and returns the duration of each counted run, in milliseconds. Providers keep this default. A
    /// session in another process runs the loop there, so the timings exclude the communication.
    fn time(&mut self, inputs: &[TensorView<'_>], plan: &TimingPlan, host: &dyn Host) -> Result<Vec<f64>> {
        let mut sink = VecSink::default();
        for _ in 0..plan.warmup {
            self.run(inputs, &mut sink, host)?;
        }
        let mut times = Vec::new();
        let began = Instant::now();
        loop {
            let started = Instant::now();
            self.run(inputs, &mut sink, host)?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
            let spent = began.elapsed();
            let enough = times.len() >= plan.min_runs && spent >= plan.min_time;
            if enough || (spent >= plan.max_time && times.len() >= TimingPlan::LEAST_RUNS) {
                return Ok(times);
            }
        }
    }
}

/// How many times [`Session::time`] runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimingPlan {
    /// Number of uncounted runs at the start.
    pub warmup: usize,
    /// Minimum number of runs, unless `max_time` ends first.
    pub min_runs: usize,
    /// Continue for at least this long.
    pub min_time: Duration,
    /// Stop after this long, but not before [`LEAST_RUNS`](TimingPlan::LEAST_RUNS) runs.
    pub max_time: Duration,
}

impl TimingPlan {
    /// Minimum number of runs for meaningful statistics.
    pub const LEAST_RUNS: usize = 3;
}

/// Severity of a log record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
#[allow(missing_docs)]
pub enum LogLevel {
    Trace = 0,
    Debug = 1,
    Info = 2,
    Warn = 3,
    Error = 4,
    /// The plugin broke a rule of the ABI; the host logs this.
    PluginMisbehaving = 5,
    /// The host broke a rule of the ABI; the plugin logs this.
    HostMisbehaving = 6,
}

impl LogLevel {
    /// The level with this number; higher numbers are [`LogLevel::HostMisbehaving`].
    pub fn from_u32(level: u32) -> Self {
        use LogLevel::*;
        [Trace, Debug, Info, Warn, Error, PluginMisbehaving]
            .get(level as usize)
            .copied()
            .unwrap_or(HostMisbehaving)
    }
}

/// The response to a progress report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Flow {
    Continue,
    Cancel,
}

/// Callbacks for a provider while it works. Any thread may call them. They must not call back into the provider.
pub trait Host: Sync {
    /// Writes a line to the log. `target` is the provider's id or a part of it.
    fn log(&self, level: LogLevel, target: &str, message: &str);
    /// Reports the progress of a phase: `step` of `total` (0 = unknown). If it returns `Cancel`, the provider should
    /// return [`ErrorCode::Cancelled`](crate::ErrorCode::Cancelled).
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow;
    /// A cheap check for run loops.
    fn cancelled(&self) -> bool;
}

/// A host that ignores logs and progress and never cancels.
pub struct NoHost;

impl Host for NoHost {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Continue
    }
    fn cancelled(&self) -> bool {
        false
    }
}

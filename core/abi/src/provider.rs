use crate::{
    Assessment, BuildSpec, Capabilities, Compatibility, Device, DeviceTensor, EngineInfo, Error, InitConfig,
    Input, MemoryReport, OutputSink, RefitReport, Result, RuntimeInfo, TensorView, VecSink, WeightSource,
};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Drives one vendor's runtime. The same trait is seen by the author of a provider and by the host.
///
/// Threads: every method may be called from any thread. Panics: caught at the border and turned into
/// [`ErrorCode::Internal`](crate::ErrorCode::Internal); the plugin then counts as poisoned.
pub trait Provider: Send + Sync {
    /// Loads the vendor's runtime; later calls fail with `FailedPrecondition` where this failed.
    /// Called once per process; must come back quickly, with an error, when the runtime is absent.
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo>;

    /// Devices this runtime can use here, best first.
    fn devices(&self) -> Result<Vec<Device>>;

    /// What can be done on [`Device::id`] `device`.
    fn capabilities(&self, device: &str) -> Result<Capabilities>;

    /// Makes an engine out of an ONNX `ModelProto`.
    ///
    /// `model` is validated and simplified by the host. Small and integer initializers are inline. Every
    /// *weight* is an initializer with external data whose `location` is its own name; its values come from
    /// `weights` and are pulled only where the build needs them (`spec.bake`, or a runtime that cannot
    /// build without).
    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>>;

    /// Makes an engine out of what [`Engine::serialize`] wrote, on a runtime for which
    /// [`check`](Provider::check) did not say `Unsupported`.
    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>>;

    /// Judges an engine by its [`EngineInfo::compatibility`] string, without its payload.
    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility>;

    /// What [`build`](Provider::build) and a session of `model` would need, found without weights and without compiling:
    /// every node that the provider cannot run, and the memory. What it cannot tell is unknown, not an error.
    fn assess(&self, model: &[u8], spec: &BuildSpec) -> Result<Assessment> {
        let _ = (model, spec);
        Ok(Assessment::default())
    }
}

/// A compiled graph for a device class, without its weights unless they were baked in.
pub trait Engine: Send + Sync {
    /// Inputs, outputs and the weights it needs.
    fn info(&self) -> &EngineInfo;

    /// The bytes that [`Provider::load`] takes.
    fn serialize(&self) -> Result<Vec<u8>>;

    /// An engine with these weights inside: what [`Provider::build`] with `bake` makes, from an engine without. Only
    /// where the device has [`Capabilities::bake`](crate::Capabilities::bake).
    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let _ = (weights, host);
        Err(Error::unsupported("cannot store weights in an engine"))
    }

    /// Gives the engine weights and makes it ready to run. A weight the source cannot deliver is an error. An engine that
    /// needs no weights takes [`NoWeights`](crate::NoWeights).
    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>>;
}

/// An engine with weights on a device. Calls on one session never overlap.
pub trait Session: Send {
    /// Replaces the weights named in `changed` (all names are in [`EngineInfo::weights`]). On an error the
    /// former weights still work. `weights` delivers every weight of the engine, changed or not, for
    /// runtimes that have to be given all of them again.
    fn refit(&mut self, changed: &[&str], weights: &dyn WeightSource, host: &dyn Host)
    -> Result<RefitReport>;

    /// One inference. `inputs` are in the order of [`EngineInfo::inputs`], of the types and shapes stated
    /// there (the host has checked). Calls [`OutputSink::allocate`] exactly once, as soon as the shapes of
    /// the outputs are known, and fills every buffer it got.
    fn run(&mut self, inputs: &[TensorView<'_>], outputs: &mut dyn OutputSink, host: &dyn Host)
    -> Result<()>;

    /// As [`run`](Session::run), with inputs that may lie on the device and outputs that stay there: those that `keep`
    /// marks, in the order of [`EngineInfo::outputs`]. Returns these tensors, in order. The sink receives the others and is
    /// called even if there are none. Only where the device has
    /// [`Capabilities::device_tensors`](crate::Capabilities::device_tensors).
    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        let _ = (inputs, keep, outputs, host);
        Err(Error::unsupported("cannot leave tensors on its device")
            .with_hint("run it with tensors in main memory"))
    }

    /// Memory the runtime uses for this session.
    fn memory(&self) -> Result<MemoryReport>;

    /// Runs again and again and returns how long each counted run took, in milliseconds. Providers keep this
    /// default; a session in another process runs the loop there, without the way to it.
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

/// How often [`Session::time`] runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimingPlan {
    /// Runs before the counted ones.
    pub warmup: usize,
    /// At least this many runs, unless `max_time` ends first.
    pub min_runs: usize,
    /// Go on for at least this long.
    pub min_time: Duration,
    /// Stop after this long, but not before [`LEAST_RUNS`](TimingPlan::LEAST_RUNS) runs.
    pub max_time: Duration,
}

impl TimingPlan {
    /// Fewer runs than this are no statistics.
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
    /// The plugin broke a rule of the ABI; logged by the host about it.
    PluginMisbehaving = 5,
    /// The host broke a rule of the ABI; logged by the plugin about it.
    HostMisbehaving = 6,
}

impl LogLevel {
    /// The level with this number; anything above is [`LogLevel::HostMisbehaving`].
    pub fn from_u32(level: u32) -> Self {
        use LogLevel::*;
        [Trace, Debug, Info, Warn, Error, PluginMisbehaving]
            .get(level as usize)
            .copied()
            .unwrap_or(HostMisbehaving)
    }
}

/// Answer to a progress report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Flow {
    Continue,
    Cancel,
}

/// What a provider can call while it works. Callable from any thread; must not call back into the provider.
pub trait Host: Sync {
    /// A line for the log. `target` is the provider's id or a part of it.
    fn log(&self, level: LogLevel, target: &str, message: &str);
    /// How far a phase has come: `step` of `total` (0 = unknown). `Cancel` asks the provider to return
    /// [`ErrorCode::Cancelled`](crate::ErrorCode::Cancelled).
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow;
    /// Cheap poll for run loops.
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

use crate::{
    AlignedBuffer, BuildSpec, Capabilities, Compatibility, DType, Device, EngineInfo, Error, InitConfig,
    MemoryReport, RefitReport, Result, RuntimeInfo,
};
use serde::{Deserialize, Serialize};
use std::{
    any::Any,
    fmt,
    ops::Deref,
    path::PathBuf,
    time::{Duration, Instant},
};

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

    /// Gives the engine weights and makes it ready to run. A weight the source cannot deliver is an error.
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

    /// As [`run`](Session::run), with inputs that may lie on the device and outputs that stay there: those for which `keep`
    /// (in the order of [`EngineInfo::outputs`]) says so. These are what is answered, in order, and the sink is asked for
    /// buffers for the others, also where there are none. Only where the device has
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

    /// Runs again and again and tells how long each counted run took, in milliseconds. Providers leave this as
    /// it is; a session in another process runs the loop there, so that the way to it is not measured.
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

/// A host that hears nothing and never cancels.
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

/// Named tensors, delivered one at a time, by initializer name.
pub trait WeightSource: Sync {
    /// The weight with this name, in the dtype and shape of the graph's initializer. `NotFound` where there
    /// is none.
    fn get(&self, name: &str) -> Result<Weight<'_>>;

    /// Element type and dimensions of what [`get`](WeightSource::get) delivers. Sources that make or convert
    /// values on demand answer without doing so.
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        self.get(name).map(|weight| (weight.dtype, weight.shape))
    }

    /// A number for what `get` delivers now: sources that answer the same number for the same name deliver the same
    /// bytes, so that a refit can leave that weight out. `None` where the source cannot tell.
    fn version(&self, name: &str) -> Option<u128> {
        let _ = name;
        None
    }
}

/// One tensor out of a [`WeightSource`]: contiguous, little-endian, row-major; valid while it lives.
pub struct Weight<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Where the same bytes lie unchanged in a file: path and offset. Runtimes that map files use it.
    pub file: Option<(PathBuf, u64)>,
    data: Box<dyn Deref<Target = [u8]> + Send + 'a>,
}

impl<'a> Weight<'a> {
    /// A weight over `data` (a borrowed slice, a `Vec`, or a guard). `InvalidArgument` where the length does not fit.
    pub fn new(dtype: DType, shape: Vec<usize>, data: impl Deref<Target = [u8]> + Send + 'a) -> Result<Self> {
        match dtype.bytes_of(&shape) {
            Some(n) if n == data.len() => Ok(Weight { dtype, shape, file: None, data: Box::new(data) }),
            _ => Err(Error::invalid(format!(
                "{} bytes do not make a {dtype} tensor of shape {shape:?}",
                data.len()
            ))),
        }
    }
    /// Adds where the same bytes lie in a file.
    pub fn in_file(mut self, path: PathBuf, offset: u64) -> Self {
        self.file = Some((path, offset));
        self
    }
    /// The bytes.
    pub fn data(&self) -> &[u8] {
        &self.data
    }
}

impl fmt::Debug for Weight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weight({} {:?}, file {:?})", self.dtype, self.shape, self.file)
    }
}

/// A borrowed host tensor: contiguous, little-endian, row-major. The host aligns `data` to 64 bytes.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
    /// The bytes.
    pub data: &'a [u8],
}

/// A tensor in the memory of a device: made by a run, an input of later runs on the same device, of any session of the same
/// provider. Its values never change. It may outlive the session it came from; dropping it frees the memory.
pub trait DeviceTensor: Any + Send + Sync {
    /// Type and shape.
    fn spec(&self) -> &OutputSpec;

    /// Copies the values to `bytes`, which are as many as the type and shape need.
    fn read(&self, bytes: &mut [u8]) -> Result<()>;
}

impl dyn DeviceTensor {
    /// The tensor as the type of whoever made it; `None` where somebody else did.
    pub fn downcast_ref<T: DeviceTensor>(&self) -> Option<&T> {
        let tensor: &dyn Any = self;
        tensor.downcast_ref()
    }
}

impl fmt::Debug for dyn DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceTensor({} {:?})", self.spec().dtype, self.spec().shape)
    }
}

/// An input of [`Session::run_on_device`].
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// In main memory.
    Host(TensorView<'a>),
    /// Where it was made. `InvalidArgument` where that is another provider, process or device.
    Device(&'a dyn DeviceTensor),
}

impl<'a> Input<'a> {
    /// Type and shape.
    pub fn spec(&self) -> (DType, &'a [usize]) {
        match *self {
            Input::Host(view) => (view.dtype, view.shape),
            Input::Device(tensor) => (tensor.spec().dtype, &tensor.spec().shape),
        }
    }
}

/// Type and shape of an output, known to the provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputSpec {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
}

/// Where a run puts its outputs.
pub trait OutputSink {
    /// Buffers for all outputs, in order, aligned to 64 bytes, to be filled before the run returns.
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>>;
}

/// An [`OutputSink`] that keeps outputs in vectors and reuses them from run to run.
#[derive(Debug, Default)]
pub struct VecSink {
    specs: Vec<OutputSpec>,
    buffers: Vec<AlignedBuffer>,
}

impl VecSink {
    /// Type, shape and bytes of output `index` of the last run.
    pub fn get(&self, index: usize) -> Option<TensorView<'_>> {
        let (spec, buffer) = (self.specs.get(index)?, self.buffers.get(index)?);
        Some(TensorView { dtype: spec.dtype, shape: &spec.shape, data: buffer })
    }
    /// Number of outputs of the last run.
    pub fn len(&self) -> usize {
        self.specs.len()
    }
    /// Whether nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }
}

impl OutputSink for VecSink {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        self.buffers.resize_with(outputs.len(), AlignedBuffer::default);
        for (buffer, spec) in self.buffers.iter_mut().zip(outputs) {
            let len = spec
                .dtype
                .bytes_of(&spec.shape)
                .ok_or_else(|| Error::invalid(format!("output shape {:?} is too large", spec.shape)))?;
            buffer.resize(len);
        }
        self.specs = outputs.to_vec();
        Ok(self.buffers.iter_mut().map(|b| &mut **b).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_checks_its_length() {
        assert!(Weight::new(DType::F32, vec![2, 3], vec![0u8; 24]).is_ok());
        let error = Weight::new(DType::F32, vec![2, 3], vec![0u8; 20]).unwrap_err();
        assert!(error.message.contains("20 bytes"), "{error}");
        assert!(Weight::new(DType::F32, vec![usize::MAX, 2], &[][..]).is_err());
    }

    #[test]
    fn sink_buffers_are_aligned_and_reused() {
        let mut sink = VecSink::default();
        let spec = [
            OutputSpec { dtype: DType::F32, shape: vec![3] },
            OutputSpec { dtype: DType::U8, shape: vec![65] },
        ];
        let first: Vec<*const u8> = sink.allocate(&spec).unwrap().iter().map(|b| b.as_ptr()).collect();
        let again: Vec<*const u8> = sink.allocate(&spec).unwrap().iter().map(|b| b.as_ptr()).collect();
        assert_eq!(first, again);
        assert!(first.iter().all(|p| p.addr() % 64 == 0));
        assert_eq!(sink.get(1).unwrap().data.len(), 65);
        assert!(sink.get(2).is_none());
    }
}

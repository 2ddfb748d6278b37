//! A provider in a worker, behind the same traits as one in this process.

use super::{
    WorkerConfig,
    exchange::{self, Exchange},
    link::{Phase, Worker},
    protocol::{Call, Given, Reply},
    sandbox::Confinement,
};
use sdrun_abi::{
    Assessment, BuildSpec, Capabilities, Compatibility, Device, DeviceTensor, Engine, EngineInfo, Error,
    Host, InitConfig, Input, MemoryReport, NoHost, OutputSink, OutputSpec, Provider, RefitReport, Result,
    RuntimeInfo, Session, TensorView, TimingPlan, WeightSource, ffi::PluginIdentity,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

/// A provider in a worker process. Its engines and sessions are there too and keep the process alive. Dropping the
/// last of them kills and reaps it.
///
/// Calls on a worker run one at a time: a call from another thread waits. Only [`devices`](Provider::devices) and
/// [`capabilities`](Provider::capabilities) do not wait if they were answered before. If the worker has died or was killed or
/// closed, every later call fails with `FailedPrecondition`.
pub struct WorkerProvider {
    worker: Arc<Worker>,
    identity: PluginIdentity,
    confinement: Confinement,
    /// Answers for the time of another call. They stay the same as long as the process lives.
    devices: OnceLock<Vec<Device>>,
    capabilities: Mutex<HashMap<String, Capabilities>>,
}

impl WorkerProvider {
    /// Starts a worker and loads the plugin. Fails with `Unavailable` if the worker dies, with `DeadlineExceeded` if
    /// it takes longer than [`Limits::init`](super::Limits::init), or with the plugin's own error.
    pub fn start(config: WorkerConfig) -> Result<Self> {
        let (worker, identity, confinement) = exchange::start(config)?;
        Ok(WorkerProvider {
            worker: Arc::new(worker),
            identity,
            confinement,
            devices: OnceLock::new(),
            capabilities: Mutex::default(),
        })
    }

    /// How the plugin identifies itself.
    pub fn identity(&self) -> &PluginIdentity {
        &self.identity
    }

    /// How far its sandbox holds.
    pub fn confinement(&self) -> Confinement {
        self.confinement
    }

    /// Process id of the worker.
    pub fn pid(&self) -> u32 {
        self.worker.process.pid()
    }

    /// Whether the process has ended. Every call then fails with `FailedPrecondition`.
    pub fn has_ended(&self) -> bool {
        self.worker.process.wait(Duration::ZERO).is_some()
    }

    /// Peak resident memory of the worker in bytes (`VmHWM`; includes shared memory). `None` if the system does not
    /// report it (macOS) or the worker has ended.
    pub fn peak_rss(&self) -> Option<u64> {
        crate::memory::peak_rss(self.pid())
    }

    /// Resets [`peak_rss`](Self::peak_rss) to the current resident memory. Does nothing outside Linux.
    pub fn reset_peak_rss(&self) {
        // proc(5): writing 5 resets VmHWM. Not every kernel supports it; the figure then covers more time.
        let _ = std::fs::write(format!("/proc/{}/clear_refs", self.pid()), "5");
    }

    /// The last 64 KiB that the worker has written to stderr or stdout, in whole lines.
    pub fn stderr_tail(&self) -> String {
        self.worker.process.stderr.text()
    }

    /// Kills the worker at once, as a crash would. The call in progress fails, and so do later ones.
    pub fn kill(&self) {
        self.worker.process.kill();
    }

    /// Asks the worker to destroy its objects and exit; kills it if that takes longer than two seconds. Remaining
    /// engines and sessions then fail with `FailedPrecondition`.
    pub fn close(self) {
        self.worker.close();
    }

    /// Makes a call that needs no weights.
    fn ask<T>(
        &self,
        phase: Phase,
        call: Call,
        host: &dyn Host,
        take: impl FnOnce(Reply) -> Result<T, Reply>,
    ) -> Result<T> {
        let mut exchange = Exchange::begin(&self.worker, phase)?;
        let reply = exchange.perform(call, host, None)?;
        expect(&mut exchange, reply, take)
    }
}

/// Unwraps an answer of the expected kind; stops a worker that gives another one.
fn expect<T>(
    exchange: &mut Exchange<'_>,
    reply: Reply,
    take: impl FnOnce(Reply) -> Result<T, Reply>,
) -> Result<T> {
    take(reply).map_err(|other| exchange.unexpected(&other))
}

impl std::fmt::Debug for WorkerProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WorkerProvider({}, pid {})", self.identity.id, self.pid())
    }
}

impl Provider for WorkerProvider {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        let mut config = config.clone();
        if let Some((files, links)) = &self.worker.own {
            config.temp_dir.clone_from(files);
            config.links_dir = Some(links.clone());
        }
        self.ask(Phase::Init, Call::Init { config }, host, |reply| match reply {
            Reply::Runtime(runtime) => Ok(runtime),
            other => Err(other),
        })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        if let Some(known) = self.devices.get().filter(|_| self.worker.is_busy()) {
            return Ok(known.clone());
        }
        let devices = self.ask(Phase::Query, Call::Devices, &NoHost, |reply| match reply {
            Reply::Devices(devices) => Ok(devices),
            other => Err(other),
        })?;
        let _ = self.devices.set(devices.clone());
        Ok(devices)
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        let known = || self.capabilities.lock().unwrap_or_else(PoisonError::into_inner);
        if self.worker.is_busy()
            && let Some(capabilities) = known().get(device)
        {
            return Ok(capabilities.clone());
        }
        let call = Call::Capabilities { device: device.into() };
        let capabilities = self.ask(Phase::Query, call, &NoHost, |reply| match reply {
            Reply::Capabilities(capabilities) => Ok(capabilities),
            other => Err(other),
        })?;
        known().insert(device.into(), capabilities.clone());
        Ok(capabilities)
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Build)?;
        let model = exchange.attach(model)?;
        let reply = exchange.perform(Call::Build { model, spec: spec.clone() }, host, Some(weights))?;
        engine_of(&self.worker, &mut exchange, reply)
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Load)?;
        let payload = exchange.attach(payload)?;
        let reply = exchange.perform(Call::Load { payload, spec: spec.clone() }, host, None)?;
        engine_of(&self.worker, &mut exchange, reply)
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let call = Call::Check { compatibility: compatibility.into(), device: device.into() };
        self.ask(Phase::Query, call, &NoHost, |reply| match reply {
            Reply::Verdict(verdict) => Ok(verdict),
            other => Err(other),
        })
    }

    fn assess(&self, model: &[u8], spec: &BuildSpec) -> Result<Assessment> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Assess)?;
        let model = exchange.attach(model)?;
        let reply = exchange.perform(Call::Assess { model, spec: spec.clone() }, &NoHost, None)?;
        expect(&mut exchange, reply, |reply| match reply {
            Reply::Assessment(assessment) => Ok(assessment),
            other => Err(other),
        })
    }
}

/// The engine that a call returned.
fn engine_of(worker: &Arc<Worker>, exchange: &mut Exchange<'_>, reply: Reply) -> Result<Box<dyn Engine>> {
    let (id, info) = expect(exchange, reply, |reply| match reply {
        Reply::Engine { engine, info } => Ok((engine, info)),
        other => Err(other),
    })?;
    Ok(Box::new(WorkerEngine { worker: worker.clone(), id, info }))
}

struct WorkerEngine {
    worker: Arc<Worker>,
    id: u64,
    info: EngineInfo,
}

impl Drop for WorkerEngine {
    fn drop(&mut self) {
        self.worker.discard(|dropped| dropped.engines.push(self.id));
    }
}

impl Engine for WorkerEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Serialize)?;
        let reply = exchange.perform(Call::Serialize { engine: self.id }, &NoHost, None)?;
        let len = expect(&mut exchange, reply, |reply| match reply {
            Reply::Payload { len } => Ok(len),
            other => Err(other),
        })?;
        exchange.take_payload(len)
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Build)?;
        let reply = exchange.perform(Call::Bake { engine: self.id }, host, Some(weights))?;
        engine_of(&self.worker, &mut exchange, reply)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Session)?;
        let reply = exchange.perform(Call::Session { engine: self.id }, host, Some(weights))?;
        let id = expect(&mut exchange, reply, |reply| match reply {
            Reply::Session { session } => Ok(session),
            other => Err(other),
        })?;
        Ok(Box::new(WorkerSession { worker: self.worker.clone(), id }))
    }
}

struct WorkerSession {
    worker: Arc<Worker>,
    id: u64,
}

impl Drop for WorkerSession {
    fn drop(&mut self) {
        self.worker.discard(|dropped| dropped.sessions.push(self.id));
    }
}

impl Session for WorkerSession {
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let names = serde_json::to_vec(changed)
            .map_err(|e| Error::internal(format!("cannot write the names of weights: {e}")))?;
        let mut exchange = Exchange::begin(&self.worker, Phase::Refit)?;
        let changed = exchange.attach(&names)?;
        let reply = exchange.perform(Call::Refit { session: self.id, changed }, host, Some(weights))?;
        expect(&mut exchange, reply, |reply| match reply {
            Reply::Refit(report) => Ok(report),
            other => Err(other),
        })
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Run)?;
        let (inputs, region) = exchange.place_inputs(inputs)?;
        let reply = exchange.perform(Call::Run { session: self.id, inputs, region }, host, None)?;
        let placed = expect(&mut exchange, reply, |reply| match reply {
            Reply::Outputs(placed) => Ok(placed),
            other => Err(other),
        })?;
        exchange.hand_out(&placed, outputs)
    }

    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        let mut in_memory = Vec::new();
        let mut tensors = Vec::with_capacity(inputs.len());
        for input in inputs {
            match input {
                Input::Host(view) => {
                    in_memory.push(*view);
                    tensors.push(None);
                }
                Input::Device(tensor) => tensors.push(Some(WorkerTensor::of(*tensor, &self.worker)?.id)),
            }
        }
        let mut exchange = Exchange::begin(&self.worker, Phase::Run)?;
        let (placed, region) = exchange.place_inputs(&in_memory)?;
        let mut placed = placed.into_iter();
        let given =
            |tensor: Option<u64>| tensor.map(Given::Tensor).or_else(|| placed.next().map(Given::Placed));
        let given = tensors.into_iter().filter_map(given).collect();
        let call = Call::RunOnDevice { session: self.id, inputs: given, region, keep: keep.to_vec() };
        let reply = exchange.perform(call, host, None)?;
        let (placed, tensors) = expect(&mut exchange, reply, |reply| match reply {
            Reply::Kept { outputs, tensors } => Ok((outputs, tensors)),
            other => Err(other),
        })?;
        let tensor = |(id, spec)| -> Box<dyn DeviceTensor> {
            Box::new(WorkerTensor { worker: self.worker.clone(), id, spec })
        };
        let tensors = tensors.into_iter().map(tensor).collect();
        exchange.hand_out(&placed, outputs)?;
        Ok(tensors)
    }

    fn time(&mut self, inputs: &[TensorView<'_>], plan: &TimingPlan, host: &dyn Host) -> Result<Vec<f64>> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Run)?;
        let (inputs, region) = exchange.place_inputs(inputs)?;
        let plan = plan.clone();
        let reply = exchange.perform(Call::Time { session: self.id, inputs, region, plan }, host, None)?;
        expect(&mut exchange, reply, |reply| match reply {
            Reply::Times(times) => Ok(times),
            other => Err(other),
        })
    }

    fn memory(&self) -> Result<MemoryReport> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Memory)?;
        let reply = exchange.perform(Call::Memory { session: self.id }, &NoHost, None)?;
        expect(&mut exchange, reply, |reply| match reply {
            Reply::Memory(report) => Ok(report),
            other => Err(other),
        })
    }
}

/// A tensor that stays on a device; the worker knows it by number.
struct WorkerTensor {
    worker: Arc<Worker>,
    id: u64,
    spec: OutputSpec,
}

impl WorkerTensor {
    /// The tensor, if it is in this worker.
    fn of<'t>(tensor: &'t dyn DeviceTensor, worker: &Arc<Worker>) -> Result<&'t Self> {
        tensor.downcast_ref::<Self>().filter(|tensor| Arc::ptr_eq(&tensor.worker, worker)).ok_or_else(|| {
            Error::invalid("a tensor on a device cannot be an input in another process")
                .with_hint("open the provider once for all sessions, or copy the tensor to main memory")
        })
    }
}

impl Drop for WorkerTensor {
    fn drop(&mut self) {
        self.worker.discard(|dropped| dropped.tensors.push(self.id));
    }
}

impl DeviceTensor for WorkerTensor {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let mut exchange = Exchange::begin(&self.worker, Phase::Run)?;
        let reply = exchange.perform(Call::ReadTensor { tensor: self.id }, &NoHost, None)?;
        let placed = expect(&mut exchange, reply, |reply| match reply {
            Reply::Outputs(placed) => Ok(placed),
            other => Err(other),
        })?;
        exchange.hand_out(&placed, &mut One(bytes))
    }
}

/// A sink for a single output.
struct One<'b>(&'b mut [u8]);

impl OutputSink for One<'_> {
    fn allocate(&mut self, _: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        Ok(vec![self.0])
    }
}

//! Sessions: an engine with weights on a GPU, and the buffers of a run.

use crate::{
    ffi::{
        cuda::{Context, DeviceMemory, PinnedMemory, Stream},
        engine::{Engine, Execution},
        log,
    },
    kernels::Kernels,
    payload::Description,
    refit,
};
use sdrun_abi::{
    DType, DeviceTensor, Error, ErrorCode, Host, Input, LogLevel, MemoryReport, NoHost, OutputSink,
    OutputSpec, RefitReport, Result, Session, TensorSpec, TensorView, WeightSource,
};
use sdrun_provider_common::baked_in;
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Longer runs are polled for cancellation; shorter ones end soon enough without it.
const WATCHED_FROM: Duration = Duration::from_millis(100);

/// An engine with weights.
pub(crate) struct TrtSession {
    // Fields are in the order in which they must be dropped.
    execution: Execution,
    inputs: Vec<Slot>,
    outputs: Vec<Slot>,
    stream: Stream,
    engine: Arc<Engine>,
    context: Arc<Context>,
    description: Arc<Description>,
    kernels: Kernels,
    /// Runs so far.
    runs: u64,
    /// Input shapes run so far. A new shape may have compiled new kernels.
    seen: BTreeSet<Vec<Vec<usize>>>,
    /// Brings tensors of this session to the host.
    reader: Arc<Mutex<Option<Reader>>>,
    last_run: Option<Duration>,
    /// Why the session can no longer run.
    broken: Option<Error>,
    /// Bytes of GPU memory the session took at creation.
    device_bytes: u64,
}

/// Host and GPU memory of an input or output. It grows to the largest tensor seen.
struct Slot {
    name: String,
    dtype: DType,
    on_host: bool,
    pinned: PinnedMemory,
    /// Shared with the tensors made from an output.
    device: Arc<DeviceMemory>,
    /// Memory of earlier outputs that tensors may still hold.
    lent: Vec<Arc<DeviceMemory>>,
    /// Bytes of an input that both sides hold now.
    uploaded: Option<usize>,
}

impl Slot {
    fn new(context: &Arc<Context>, spec: &TensorSpec, on_host: bool) -> Result<Self> {
        let shape: Option<Vec<usize>> = spec.shape.iter().copied().collect();
        let bytes = shape.and_then(|shape| spec.dtype.bytes_of(&shape)).unwrap_or(0);
        Ok(Slot {
            name: spec.name.clone(),
            dtype: spec.dtype,
            on_host,
            pinned: context.pinned_memory(bytes)?,
            device: Arc::new(context.device_memory(if on_host { 0 } else { bytes })?),
            lent: Vec::new(),
            uploaded: None,
        })
    }

    /// Copies an input to where the engine reads it. Unchanged bytes are not copied again: the steps of a denoiser pass
    /// the same text and the same control image many times.
    fn upload(&mut self, data: &[u8], context: &Arc<Context>, stream: &Stream) -> Result<()> {
        if self.uploaded == Some(data.len()) && self.pinned[..data.len()] == *data {
            return Ok(());
        }
        self.uploaded = None;
        self.reserve(context, data.len())?;
        self.pinned[..data.len()].copy_from_slice(data);
        if !self.on_host {
            stream.upload(&self.pinned, &self.device, data.len())?;
        }
        self.uploaded = Some(data.len());
        Ok(())
    }

    /// Makes room for `bytes` in memory that no tensor holds.
    fn reserve(&mut self, context: &Arc<Context>, bytes: usize) -> Result<()> {
        if self.pinned.len() < bytes {
            self.pinned = context.pinned_memory(bytes)?;
        }
        if self.on_host {
            return Ok(());
        }
        let is_lent = |memory: &Arc<DeviceMemory>| Arc::strong_count(memory) > 1;
        if is_lent(&self.device) {
            // A loop that replaces its tensor after each run needs only two.
            let free = self.lent.iter().position(|memory| !is_lent(memory) && memory.bytes >= bytes);
            let other = match free {
                Some(free) => self.lent.swap_remove(free),
                None => Arc::new(context.device_memory(bytes)?),
            };
            self.lent.retain(is_lent);
            self.lent.push(std::mem::replace(&mut self.device, other));
        }
        if self.device.bytes < bytes {
            self.device = Arc::new(context.device_memory(bytes)?);
        }
        Ok(())
    }

    /// Lets the engine read an input in place if it is on this GPU, or copies it there.
    fn give(
        &mut self,
        input: &Input<'_>,
        context: &Arc<Context>,
        stream: &Stream,
        execution: &mut Execution,
        host: &dyn Host,
    ) -> Result<()> {
        match input {
            Input::Host(view) => self.upload(view.data, context, stream)?,
            Input::Device(tensor) => {
                let tensor = TrtTensor::of(*tensor, context)?;
                if !self.on_host {
                    return execution.set_device(&self.name, &tensor.memory, host);
                }
                let mut bytes = vec![0; tensor.bytes];
                tensor.read(&mut bytes)?;
                self.upload(&bytes, context, stream)?;
            }
        }
        self.bind(execution, host)
    }

    /// Returns the output of the last run as a tensor.
    fn lend(&self, spec: OutputSpec, reader: Arc<Mutex<Option<Reader>>>) -> Result<TrtTensor> {
        let bytes = spec.dtype.bytes_of(&spec.shape).unwrap_or(usize::MAX);
        match bytes <= self.device.bytes {
            true => Ok(TrtTensor { memory: self.device.clone(), spec, bytes, reader }),
            false => Err(Error::internal("an output is larger than its memory")),
        }
    }

    fn bind(&self, execution: &mut Execution, host: &dyn Host) -> Result<()> {
        match self.on_host {
            true => execution.set_host(&self.name, &self.pinned, host),
            false => execution.set_device(&self.name, &self.device, host),
        }
    }
}

/// An output that stays on the GPU. While it lives, its session writes to other memory.
struct TrtTensor {
    memory: Arc<DeviceMemory>,
    spec: OutputSpec,
    bytes: usize,
    reader: Arc<Mutex<Option<Reader>>>,
}

/// A stream and pinned memory for reads, which grows to the largest tensor read.
struct Reader {
    stream: Stream,
    pinned: PinnedMemory,
}

impl TrtTensor {
    /// Returns the tensor in place if it lies on this GPU.
    fn of<'t>(tensor: &'t dyn DeviceTensor, context: &Context) -> Result<&'t Self> {
        let here = |tensor: &&Self| tensor.memory.context().is_of_same_gpu(context);
        tensor.downcast_ref::<Self>().filter(here).ok_or_else(|| {
            Error::invalid("a tensor on another GPU cannot be an input")
                .with_hint("make both sessions on one GPU, or copy the tensor to main memory")
        })
    }
}

impl DeviceTensor for TrtTensor {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let context = self.memory.context();
        context.enter()?;
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = reader.take_if(|reader| reader.pinned.len() >= bytes.len());
        let Reader { stream, pinned } = reader.insert(match fits {
            Some(reader) => reader,
            None => Reader { stream: context.stream()?, pinned: context.pinned_memory(bytes.len())? },
        });
        stream.download(&self.memory, pinned, bytes.len())?;
        stream.wait()?;
        bytes.copy_from_slice(&pinned[..bytes.len()]);
        Ok(())
    }
}

/// Selects the outputs that stay on the GPU, or the others.
fn those<T>(outputs: impl IntoIterator<Item = T>, keep: &[bool], stay: bool) -> impl Iterator<Item = T> {
    outputs.into_iter().zip(keep).filter(move |(_, keep)| **keep == stay).map(|(output, _)| output)
}

impl TrtSession {
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        engine: Engine,
        context: Arc<Context>,
        stream: Stream,
        description: Arc<Description>,
        mut kernels: Kernels,
        cuda_graph: bool,
        free_before: u64,
        host: &dyn Host,
    ) -> Result<Self> {
        let engine = Arc::new(engine);
        let io = engine.io()?;
        let slots = |specs: &[TensorSpec]| -> Result<Vec<Slot>> {
            let mut slots = Vec::new();
            for spec in specs {
                let found = io.iter().find(|io| io.name == spec.name).ok_or_else(|| {
                    Error::internal(format!("TensorRT-RTX's engine has no input or output `{}`", spec.name))
                })?;
                if found.dtype != Some(spec.dtype) {
                    return Err(Error::internal(format!(
                        "TensorRT-RTX's engine has {:?} for `{}`, the model {}",
                        found.dtype, spec.name, spec.dtype
                    )));
                }
                slots.push(Slot::new(&context, spec, found.on_host)?);
            }
            Ok(slots)
        };
        let (inputs, outputs) = (slots(&description.info.inputs)?, slots(&description.info.outputs)?);
        let stored = kernels.load();
        let (execution, used) = Execution::new(&engine, cuda_graph, stored.as_deref(), host)?;
        if stored.is_some() && !used {
            host.log(LogLevel::Info, "tensorrt-rtx", "the kept kernels no longer fit and are compiled again");
        }
        let device_bytes = free_before.saturating_sub(context.free_memory()?);
        Ok(TrtSession {
            execution,
            inputs,
            outputs,
            stream,
            engine,
            context,
            description,
            kernels,
            runs: 0,
            seen: BTreeSet::new(),
            reader: Arc::default(),
            last_run: None,
            broken: None,
            device_bytes,
        })
    }

    /// Shapes of the outputs for the input shapes set before.
    fn output_specs(&self) -> Result<Vec<OutputSpec>> {
        let spec = |slot: &Slot| {
            let name = &slot.name;
            let shape = self.execution.shape(&slot.name).ok_or_else(|| {
                Error::internal(format!("TensorRT-RTX does not report the shape of output `{name}`"))
            })?;
            let shape: Option<Vec<usize>> = shape.iter().map(|d| usize::try_from(*d).ok()).collect();
            let shape = shape.ok_or_else(|| {
                Error::unsupported(format!(
                    "the shape of output `{name}` depends on values, which this provider cannot run"
                ))
            })?;
            Ok(OutputSpec { dtype: slot.dtype, shape })
        };
        self.outputs.iter().map(spec).collect()
    }

    fn execute(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        let started = Instant::now();
        self.context.enter()?;
        for (slot, input) in self.inputs.iter_mut().zip(inputs) {
            self.execution.set_shape(&slot.name, input.spec().1, host)?;
            slot.give(input, &self.context, &self.stream, &mut self.execution, host)?;
        }
        let specs = self.output_specs()?;
        if let Some(slot) = those(&self.outputs, keep, true).find(|slot| slot.on_host) {
            let name = &slot.name;
            return Err(Error::unsupported(format!(
                "TensorRT-RTX computes `{name}` on the CPU, so it cannot stay on the GPU"
            )));
        }
        let brought: Vec<_> = those(&specs, keep, false).cloned().collect();
        let buffers = outputs.allocate(&brought)?;
        for (slot, spec) in self.outputs.iter_mut().zip(&specs) {
            slot.reserve(&self.context, spec.dtype.bytes_of(&spec.shape).unwrap_or(usize::MAX))?;
            slot.bind(&mut self.execution, host)?;
        }
        self.execution.enqueue(&self.stream, host)?;
        for (slot, buffer) in those(&mut self.outputs, keep, false).zip(&buffers) {
            if !slot.on_host {
                self.stream.download(&slot.device, &mut slot.pinned, buffer.len())?;
            }
        }
        self.wait(host)?;
        for (slot, buffer) in those(&mut self.outputs, keep, false).zip(buffers) {
            buffer.copy_from_slice(&slot.pinned[..buffer.len()]);
        }
        let tensors = those(self.outputs.iter().zip(specs), keep, true)
            .map(|(slot, spec)| Ok(Box::new(slot.lend(spec, self.reader.clone())?) as Box<dyn DeviceTensor>))
            .collect::<Result<Vec<_>>>()?;
        self.last_run = Some(started.elapsed());
        self.keep_kernels(inputs, host);
        log::deliver(host);
        Ok(tensors)
    }

    fn wait(&self, host: &dyn Host) -> Result<()> {
        if self.last_run.is_some_and(|took| took <= WATCHED_FROM) {
            return self.stream.wait();
        }
        loop {
            if self.stream.is_done()? {
                return Ok(());
            }
            if host.cancelled() {
                // A run on the GPU cannot be stopped; its memory must stay valid until it ends.
                self.stream.wait()?;
                return Err(Error::new(ErrorCode::Cancelled, "the run was cancelled"));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Stores newly compiled kernels for the next process. The library may compile better ones in later runs, so this checks
    /// again at growing intervals, and at the end.
    fn keep_kernels(&mut self, inputs: &[Input<'_>], host: &dyn Host) {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.spec().1.to_vec()).collect();
        self.runs += 1;
        if (self.seen.insert(shapes) || self.runs.is_power_of_two())
            && let Some(kernels) = self.execution.kernels()
        {
            self.kernels.store(&kernels, host);
        }
    }
}

impl Drop for TrtSession {
    fn drop(&mut self) {
        let _ = self.context.enter();
        if self.runs > 0
            && let Some(kernels) = self.execution.kernels()
        {
            self.kernels.store(&kernels, &NoHost);
        }
    }
}

impl Session for TrtSession {
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        if self.description.table.is_empty() {
            return Err(baked_in());
        }
        self.context.enter()?;
        // After a refit that failed half-way, sets all weights again.
        let changed = if self.broken.is_some() { None } else { Some(changed) };
        match refit::apply(
            &self.engine,
            &self.stream,
            &self.description,
            changed,
            weights,
            refit::CHUNK,
            host,
        ) {
            Ok(report) => {
                self.broken = None;
                Ok(report)
            }
            Err(failure) => {
                if failure.half_done {
                    let why = format!("the weights are incomplete since a change failed: {}", failure.error);
                    self.broken =
                        Some(Error::precondition(why).with_hint("give the session all its weights again"));
                }
                Err(failure.error)
            }
        }
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        let inputs: Vec<_> = inputs.iter().map(|view| Input::Host(*view)).collect();
        self.run_on_device(&inputs, &vec![false; self.outputs.len()], outputs, host).map(drop)
    }

    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        self.description.checks.inputs_anywhere(inputs)?;
        self.execute(inputs, keep, outputs, host).inspect_err(|_| {
            // The queued work uses memory that the next run may replace, and how much of it ran is unknown.
            let _ = self.stream.wait();
            self.inputs.iter_mut().for_each(|slot| slot.uploaded = None);
        })
    }

    fn memory(&self) -> Result<MemoryReport> {
        Ok(MemoryReport::new(
            self.engine.weight_bytes(),
            self.engine.activation_bytes(),
            Some(self.device_bytes),
        ))
    }
}

//! A session: the weights of an engine, and its graph with memory for each set of shapes that was run.

use crate::{
    ffi::{Executor, Kept, Program, Spread, Store, Target, Tensor},
    flow::{Runner, Unit},
    storage::{from_storage, into_storage, is_f32, storage_type},
    topology::{Topology, explain},
    translate::Translation,
    weights::Bank,
};
use sdrun_abi::{
    DType, DeviceTensor, Error, Host, Input, LogLevel, MemoryReport, OutputSink, OutputSpec, RefitReport,
    Result, Session, TensorView, WeightSource, WeightUpdate,
};
use sdrun_graph::Tensor as HostTensor;
use std::sync::Arc;

/// The most sets of shapes for which a session keeps its graph.
const MAX_PLANS: usize = 4;

pub(crate) struct GgmlSession {
    topology: Arc<Topology>,
    bank: Bank,
    /// The graphs, the latest first.
    plans: Vec<Plan>,
    /// A graph with control flow, instead of plans.
    flow: Option<Unit>,
    executor: Executor,
    threads: usize,
}

/// The graph for one shape of each input.
pub(crate) struct Plan {
    shapes: Vec<Vec<usize>>,
    program: Program,
    inputs: Vec<(Tensor, DType)>,
    outputs: Vec<(Tensor, DType)>,
    output_specs: Vec<OutputSpec>,
}

impl GgmlSession {
    /// Allocates memory for the weights and loads them.
    pub(crate) fn new(topology: Arc<Topology>, source: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        let threads = topology.threads();
        let executor = Executor::new(topology.target(), threads)?;
        let (bank, translation, flow) = if topology.decides() {
            let prepared = topology.representative_flow()?;
            (prepared.bank, None, Some(prepared.unit))
        } else {
            let (bank, translation) = topology.representative()?;
            (bank, Some(translation), None)
        };
        let mut session = GgmlSession { topology, bank, plans: Vec::new(), flow, executor, threads };
        session.bank.load(source, host, threads)?;
        let mapped = session.bank.store().mapped_bytes();
        if mapped > 0 {
            host.log(LogLevel::Debug, "ggml", &format!("{mapped} bytes of weights stay in their files"));
        }
        if let Some((shapes, translation)) = session.topology.fixed_shapes().zip(translation) {
            session.add_plan(shapes, translation)?;
            let GgmlSession { plans, executor, bank, .. } = &mut session;
            if let Some(spread) =
                plans.first_mut().map(|plan| executor.place(&mut plan.program, bank.store())).transpose()?
            {
                spread.iter().for_each(|spread| report(spread, host));
            }
        }
        Ok(session)
    }

    fn add_plan(&mut self, shapes: Vec<Vec<usize>>, translation: Translation) -> Result<()> {
        let threads = self.topology.threads_for(&translation.builder);
        self.plans.truncate(MAX_PLANS - 1);
        self.plans.insert(0, Plan::new(shapes, translation, threads)?);
        Ok(())
    }

    /// Moves the plan for inputs of these shapes to the front, creating it if needed.
    fn plan(&mut self, inputs: &[Input<'_>], host: &dyn Host) -> Result<()> {
        let fits = |plan: &Plan| {
            plan.shapes.len() == inputs.len() && plan.shapes.iter().zip(inputs).all(|(a, b)| a == b.spec().1)
        };
        match self.plans.iter().position(fits) {
            Some(at) => self.plans[..=at].rotate_right(1),
            None => {
                let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.spec().1.to_vec()).collect();
                let translation = self.topology.translation(&shapes, &mut self.bank)?;
                self.bank.derive()?;
                host.log(LogLevel::Debug, "ggml", &format!("a graph for inputs of shapes {shapes:?}"));
                self.add_plan(shapes, translation)?;
            }
        }
        Ok(())
    }
}

impl GgmlSession {
    /// Runs a graph with control flow.
    fn run_flow(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        sink: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        if keep.contains(&true) {
            return Err(Error::unsupported("outputs of a graph with control flow cannot stay on the device")
                .with_hint("copy the outputs to main memory"));
        }
        let to_host = |input: &Input<'_>| {
            let (dtype, shape) = input.spec();
            let bytes = match input {
                Input::Host(view) => view.data.to_vec(),
                Input::Device(given) => {
                    let mut bytes = vec![0; dtype.bytes_of(shape).unwrap_or_default()];
                    given.read(&mut bytes)?;
                    bytes
                }
            };
            HostTensor::new(dtype, shape.to_vec(), bytes).map_err(explain)
        };
        let inputs = inputs.iter().map(to_host).collect::<Result<Vec<_>>>()?;
        let GgmlSession { topology, bank, flow, executor, .. } = self;
        let Some(unit) = flow else { return Err(Error::internal("a graph without decisions")) };
        let outputs = unit.run(inputs, &mut Runner { topology, bank, executor, host })?;
        let specs: Vec<OutputSpec> = outputs
            .iter()
            .map(|output| OutputSpec { dtype: output.dtype(), shape: output.shape().to_vec() })
            .collect();
        let buffers = sink.allocate(&specs)?;
        if buffers.len() != outputs.len() {
            let (found, wanted) = (buffers.len(), outputs.len());
            return Err(Error::internal(format!("{found} output buffers for {wanted} outputs")));
        }
        for (buffer, output) in buffers.into_iter().zip(&outputs) {
            if buffer.len() != output.data().len() {
                let (found, wanted) = (buffer.len(), output.data().len());
                return Err(Error::internal(format!("{found} bytes for an output of {wanted}")));
            }
            buffer.copy_from_slice(output.data());
        }
        Ok(Vec::new())
    }
}

impl Plan {
    /// Allocates and fills the constants of a translation.
    pub(crate) fn new(shapes: Vec<Vec<usize>>, translation: Translation, threads: usize) -> Result<Self> {
        let Translation { builder, inputs, outputs, constants, output_specs, .. } = translation;
        let tensors: Vec<Tensor> = outputs.iter().map(|(tensor, _)| *tensor).collect();
        let mut program = Program::new(builder, &tensors, threads)?;
        for constant in &constants {
            let (dtype, bytes) = (constant.value.dtype(), constant.value.data());
            program.write(constant.tensor, &constant.form.arrange(constant.type_, dtype, bytes)?)?;
        }
        Ok(Plan { shapes, program, inputs, outputs, output_specs })
    }
    /// The types and shapes of the outputs.
    pub(crate) fn output_specs(&self) -> &[OutputSpec] {
        &self.output_specs
    }
    /// The bytes of the constants.
    pub(crate) fn constant_bytes(&self) -> u64 {
        self.program.constant_bytes()
    }
    /// Runs the graph once, with inputs and outputs in main memory.
    pub(crate) fn run_on_host(
        &mut self,
        given: &[&HostTensor],
        executor: &mut Executor,
        store: &Store,
        host: &dyn Host,
    ) -> Result<Vec<HostTensor>> {
        let Plan { program, inputs, outputs, output_specs, .. } = self;
        executor.place(program, store)?;
        for (given, (tensor, dtype)) in given.iter().zip(inputs.iter()) {
            program.write(*tensor, &into_storage(*dtype, given.data()).map_err(Error::invalid)?)?;
        }
        executor.compute(program, store, &|| host.cancelled())?;
        let read = |((tensor, dtype), spec): (&(Tensor, DType), &OutputSpec)| {
            let mut buffer = vec![0; dtype.bytes_of(&spec.shape).unwrap_or_default()];
            bring(*dtype, program.size(*tensor), &mut buffer, |bytes| program.read(*tensor, bytes))?;
            HostTensor::new(*dtype, spec.shape.clone(), buffer).map_err(explain)
        };
        outputs.iter().zip(output_specs.iter()).map(read).collect()
    }
}

impl Session for GgmlSession {
    /// Refits in place, after checking all of `changed`.
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let bytes = self.bank.replace(changed, weights, host, self.threads)?;
        Ok(RefitReport::new(WeightUpdate::InPlace, changed.len(), bytes))
    }

    fn run(&mut self, inputs: &[TensorView<'_>], sink: &mut dyn OutputSink, host: &dyn Host) -> Result<()> {
        let inputs: Vec<_> = inputs.iter().map(|view| Input::Host(*view)).collect();
        let keep = vec![false; self.topology.info().outputs.len()];
        self.run_on_device(&inputs, &keep, sink, host).map(drop)
    }

    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        sink: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        self.topology.check_inputs(inputs)?;
        self.bank.whole()?;
        if self.flow.is_some() {
            return self.run_flow(inputs, keep, sink, host);
        }
        self.plan(inputs, host)?;
        let GgmlSession { plans, executor, bank, topology, .. } = self;
        let Some(Plan { program, inputs: tensors, outputs, output_specs, .. }) = plans.first_mut() else {
            return Err(Error::internal("no graph for the inputs"));
        };
        if let Some(spread) = executor.place(program, bank.store())? {
            report(&spread, host);
        }
        for (input, (tensor, dtype)) in inputs.iter().zip(tensors.iter()) {
            match input {
                Input::Host(view) => {
                    program.write(*tensor, &into_storage(*dtype, view.data).map_err(Error::invalid)?)?
                }
                Input::Device(given) => {
                    GgmlTensor::of(*given, topology.target())?.kept.give(program, *tensor)?
                }
            }
        }
        let all = || outputs.iter().zip(output_specs.iter()).zip(keep);
        let brought = || all().filter(|(_, keep)| !**keep).map(|(output, _)| output);
        let specs: Vec<_> = brought().map(|(_, spec)| spec.clone()).collect();
        let buffers = sink.allocate(&specs)?;
        if buffers.len() != specs.len() {
            let (found, wanted) = (buffers.len(), specs.len());
            return Err(Error::internal(format!("{found} output buffers for {wanted} outputs")));
        }
        executor.compute(program, bank.store(), &|| host.cancelled())?;
        if let Some(table) = program.profile() {
            host.log(LogLevel::Info, "ggml", &table);
        }
        for (buffer, ((tensor, dtype), _)) in buffers.into_iter().zip(brought()) {
            bring(*dtype, program.size(*tensor), buffer, |bytes| program.read(*tensor, bytes))?;
        }
        let kept = all().filter(|(_, keep)| **keep).map(|(((tensor, _), spec), _)| {
            Ok(Box::new(GgmlTensor::copy_of(program, *tensor, spec)?) as Box<dyn DeviceTensor>)
        });
        kept.collect()
    }

    fn memory(&self) -> Result<MemoryReport> {
        let constants: u64 = self.plans.iter().map(|plan| plan.program.constant_bytes()).sum();
        let programs = self.plans.iter().map(|plan| &plan.program);
        let (activations, on_device) = self.executor.activation_bytes(programs);
        let constants = constants + self.flow.as_ref().map_or(0, Unit::constant_bytes);
        let weights = self.bank.store().bytes() + constants;
        let device = match self.topology.target().gpu {
            Some(_) => self.bank.store().device_bytes() + on_device,
            None => weights + activations,
        };
        Ok(MemoryReport::new(Some(weights), Some(activations), Some(device)))
    }
}

/// An output that stays on the device, in the type in which ggml stores it.
struct GgmlTensor {
    kept: Kept,
    spec: OutputSpec,
}

impl GgmlTensor {
    fn copy_of(program: &Program, tensor: Tensor, spec: &OutputSpec) -> Result<Self> {
        let mut kept = GgmlTensor { kept: Kept::copy_of(program, tensor)?, spec: spec.clone() };
        let dtype = spec.dtype;
        if is_f32(dtype) && dtype != DType::F32 {
            // ggml stores it as f32. Round it as if it had been copied to the host.
            let mut bytes = vec![0; dtype.bytes_of(&spec.shape).unwrap_or_default()];
            kept.read(&mut bytes)?;
            kept.kept.write(&into_storage(dtype, &bytes).map_err(Error::internal)?)?;
        }
        Ok(kept)
    }

    /// The tensor, if it is on this device.
    fn of(tensor: &dyn DeviceTensor, target: Target) -> Result<&Self> {
        tensor.downcast_ref::<Self>().filter(|tensor| tensor.kept.is_on(&target)).ok_or_else(|| {
            Error::invalid("a tensor on another device cannot be an input")
                .with_hint("make both sessions on one device, or copy the tensor to main memory")
        })
    }
}

impl DeviceTensor for GgmlTensor {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        bring(self.spec.dtype, self.kept.bytes(), bytes, |stored| self.kept.read(stored))
    }
}

/// Lets `read` fetch a tensor of `stored` bytes, and converts it to values of `dtype` in `buffer`.
fn bring(
    dtype: DType,
    stored: usize,
    buffer: &mut [u8],
    read: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    let Some(type_) = storage_type(dtype) else {
        return Err(Error::internal(format!("an output is {dtype}")));
    };
    if type_.size() == dtype.size() {
        return read(buffer);
    }
    let mut bytes = vec![0; stored];
    read(&mut bytes)?;
    let bytes = from_storage(dtype, type_, &bytes).map_err(Error::internal)?;
    if bytes.len() != buffer.len() {
        let (found, wanted) = (buffer.len(), bytes.len());
        return Err(Error::internal(format!("{found} bytes for an output of {wanted}")));
    }
    buffer.copy_from_slice(&bytes);
    Ok(())
}

/// Logs which parts of a graph run on the device and which on the CPU.
fn report(spread: &Spread, host: &dyn Host) {
    let Spread { splits, on_device, on_cpu, copies: (copies, bytes) } = spread;
    let list: Vec<String> = on_cpu.iter().map(|(name, count)| format!("{name} x{count}")).collect();
    let rest = if list.is_empty() { "nothing".into() } else { list.join(", ") };
    let message = format!(
        "{on_device} operations run on the device in {splits} pieces of the graph, between which {copies} tensors \
         ({bytes} bytes) are copied in every run; on the CPU: {rest}"
    );
    host.log(LogLevel::Info, "ggml", &message);
}

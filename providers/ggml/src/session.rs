//! A session: an engine's weights, and its graph with memory for each shape that was run.

use crate::{
    ffi::{Executor, Program, Spread, Tensor},
    storage::{from_storage, into_storage, storage_type},
    topology::Topology,
    translate::Translation,
    weights::Bank,
};
use sdrun_abi::{
    DType, Error, Host, LogLevel, MemoryReport, OutputSink, OutputSpec, RefitReport, Result, Session,
    TensorView, WeightSource, WeightUpdate,
};
use std::sync::Arc;

/// Shapes a session keeps its graph for, the latest first.
const MAX_PLANS: usize = 4;

pub(crate) struct GgmlSession {
    topology: Arc<Topology>,
    bank: Bank,
    /// The latest first.
    plans: Vec<Plan>,
    executor: Executor,
    threads: usize,
}

/// The graph for one shape of each input.
struct Plan {
    shapes: Vec<Vec<usize>>,
    program: Program,
    inputs: Vec<(Tensor, DType)>,
    outputs: Vec<(Tensor, DType)>,
    output_specs: Vec<OutputSpec>,
}

impl GgmlSession {
    /// Allocates memory and fills it with the weights.
    pub(crate) fn new(topology: Arc<Topology>, source: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        let (bank, translation) = topology.representative()?;
        let (executor, threads) = (Executor::new(topology.target())?, topology.threads());
        let mut session = GgmlSession { topology, bank, plans: Vec::new(), executor, threads };
        session.bank.load(source, host, threads)?;
        if let Some(shapes) = session.topology.fixed_shapes() {
            session.add_plan(shapes, translation)?;
            let GgmlSession { plans, executor, .. } = &mut session;
            if let Some(spread) =
                plans.first_mut().map(|plan| executor.place(&mut plan.program)).transpose()?
            {
                spread.iter().for_each(|spread| report(spread, host));
            }
        }
        Ok(session)
    }

    fn add_plan(&mut self, shapes: Vec<Vec<usize>>, translation: Translation) -> Result<()> {
        let Translation { builder, inputs, outputs, constants, output_specs, .. } = translation;
        let tensors: Vec<Tensor> = outputs.iter().map(|(tensor, _)| *tensor).collect();
        let threads = self.topology.threads_for(&builder);
        let mut program = builder.finish(&tensors, threads)?;
        for constant in &constants {
            let (dtype, bytes) = (constant.value.dtype(), constant.value.data());
            program.write(constant.tensor, &constant.form.arrange(constant.type_, dtype, bytes)?)?;
        }
        self.plans.truncate(MAX_PLANS - 1);
        self.plans.insert(0, Plan { shapes, program, inputs, outputs, output_specs });
        Ok(())
    }

    /// Puts the plan for inputs of these shapes first; makes it where there is none.
    fn plan(&mut self, inputs: &[TensorView<'_>], host: &dyn Host) -> Result<()> {
        let fits = |plan: &Plan| {
            plan.shapes.len() == inputs.len() && plan.shapes.iter().zip(inputs).all(|(a, b)| a == b.shape)
        };
        match self.plans.iter().position(fits) {
            Some(at) => self.plans[..=at].rotate_right(1),
            None => {
                let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.shape.to_vec()).collect();
                let translation = self.topology.translation(&shapes, &mut self.bank)?;
                self.bank.derive()?;
                host.log(LogLevel::Debug, "ggml", &format!("a graph for inputs of shapes {shapes:?}"));
                self.add_plan(shapes, translation)?;
            }
        }
        Ok(())
    }
}

impl Session for GgmlSession {
    /// In place, after all of `changed` were looked at.
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let bytes = self.bank.replace(changed, weights, host, self.threads)?;
        Ok(RefitReport { method: WeightUpdate::InPlace, tensors: changed.len(), bytes })
    }

    fn run(&mut self, inputs: &[TensorView<'_>], sink: &mut dyn OutputSink, host: &dyn Host) -> Result<()> {
        self.topology.check_inputs(inputs)?;
        self.bank.whole()?;
        self.plan(inputs, host)?;
        let GgmlSession { plans, executor, bank, .. } = self;
        let Some(Plan { program, inputs: tensors, outputs, output_specs, .. }) = plans.first_mut() else {
            return Err(Error::internal("no graph for the inputs"));
        };
        if let Some(spread) = executor.place(program)? {
            report(&spread, host);
        }
        for (view, (tensor, dtype)) in inputs.iter().zip(tensors.iter()) {
            program.write(*tensor, &into_storage(*dtype, view.data).map_err(Error::invalid)?)?;
        }
        let mut buffers = sink.allocate(output_specs)?;
        if buffers.len() != outputs.len() {
            let (found, wanted) = (buffers.len(), outputs.len());
            return Err(Error::internal(format!("{found} output buffers for {wanted} outputs")));
        }
        executor.compute(program, bank.store(), &|| host.cancelled())?;
        if let Some(table) = program.profile() {
            host.log(LogLevel::Info, "ggml", &table);
        }
        for (buffer, (tensor, dtype)) in buffers.iter_mut().zip(outputs.iter()) {
            let Some(type_) = storage_type(*dtype) else {
                return Err(Error::internal(format!("an output is {dtype}")));
            };
            if type_.size() == dtype.size() {
                program.read(*tensor, buffer)?;
                continue;
            }
            let mut stored = vec![0; program.size(*tensor)];
            program.read(*tensor, &mut stored)?;
            let bytes = from_storage(*dtype, type_, &stored).map_err(Error::internal)?;
            if bytes.len() != buffer.len() {
                let (found, wanted) = (buffer.len(), bytes.len());
                return Err(Error::internal(format!("{found} bytes for an output of {wanted}")));
            }
            buffer.copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn memory(&self) -> Result<MemoryReport> {
        let constants: u64 = self.plans.iter().map(|plan| plan.program.constant_bytes()).sum();
        let programs = self.plans.iter().map(|plan| &plan.program);
        let (activations, on_device) = self.executor.activation_bytes(programs);
        let weights = self.bank.store().bytes() + constants;
        let device = match self.topology.target().gpu {
            Some(_) => self.bank.store().device_bytes() + on_device,
            None => weights + activations,
        };
        Ok(MemoryReport { weights: Some(weights), activations: Some(activations), device: Some(device) })
    }
}

/// Says what of a graph runs where.
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

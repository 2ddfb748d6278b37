//! The data that the sessions of an engine share: its graph, which may have open dimensions, and how it is translated.

use crate::{
    ffi::{Builder, MAX_THREADS, Program, Target, Tensor},
    flow::{self, Planner, Spec, Unit},
    optimize::optimize,
    storage::storage_type,
    translate::{Translation, translate},
    weights::Bank,
};
use sdrun_abi::{
    BuildSpec, DType, EngineInfo, Error, Input, Precision, Result, TensorSpec, WeightSpec, default_threads,
};
use sdrun_graph::{
    Dim, Graph, GraphError, OpenDims, ValueId,
    passes::{Prepare, fold_batch_norms, prepare_weights},
    simplify,
};
use sdrun_provider_common::Preparation;
use std::{collections::BTreeMap, sync::Arc};

/// Sizes to try for open dimensions, outermost and others, in a translation that determines the form of the weights.
const ASSUMED: [(usize, usize); 4] = [(1, 64), (2, 16), (1, 8), (1, 1)];

/// The scratch memory that the kernels of a thread keep for large networks, in bytes. Measured: 31 MB for the UNet of SD 1.5, most of it for
/// Winograd's algorithm, and 18 MB for Flux. Small networks need no more than for their activations.
const SCRATCH: u64 = 30 << 20;

pub(crate) struct Topology {
    target: Target,
    graph: Graph,
    /// Computes tensors from weights when a session receives the weights, instead of in every run.
    preparation: Arc<Preparation>,
    precision: Precision,
    /// The number of threads. `None` means all cores, if the graph benefits from them.
    threads: Option<usize>,
    info: EngineInfo,
    /// The shapes of the inputs, if none is open.
    fixed: Option<Vec<Vec<usize>>>,
}

impl Topology {
    /// Translates the graph once, so that no session can fail on it. The shapes of `graph` must be inferred as far as possible. Also
    /// returns the operators that the reference implementation evaluates, with their number of nodes.
    pub(crate) fn new(
        target: Target,
        graph: Graph,
        spec: &BuildSpec,
    ) -> Result<(Self, BTreeMap<String, usize>)> {
        let Translated { topology, host_operators, .. } = Translated::new(target, graph, spec)?;
        Ok((topology, host_operators))
    }

    /// Bytes of main memory that the weights of a graph take, and its activations with the scratch memory of kernels. `None` on a GPU, and
    /// if shapes are open or the graph has control flow.
    pub(crate) fn memory(target: Target, graph: Graph, spec: &BuildSpec) -> Result<Option<[u64; 2]>> {
        if target.gpu.is_some() {
            return Ok(None);
        }
        let Translated { topology, graph, .. } = Translated::new(target, graph, spec)?;
        let (Some((bank, translation)), Some(_)) = (graph, &topology.fixed) else {
            return Ok(None);
        };
        let Translation { builder, outputs, .. } = translation;
        let threads = topology.threads_for(&builder);
        let outputs: Vec<Tensor> = outputs.iter().map(|(tensor, _)| *tensor).collect();
        let [weights, activations] = Program::new(builder, &outputs, threads)?.measure(bank.into_store())?;
        Ok(Some([weights, activations + threads as u64 * activations.min(SCRATCH)]))
    }
}

/// A topology with the translation that has proved that no session can fail on it.
struct Translated {
    topology: Topology,
    /// Unless the graph has control flow.
    graph: Option<(Bank, Translation)>,
    host_operators: BTreeMap<String, usize>,
}

impl Translated {
    fn new(target: Target, mut graph: Graph, spec: &BuildSpec) -> Result<Self> {
        if let Some(threads) = spec.threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            return Err(Error::invalid(format!("{threads} threads: ggml runs with 1 to {MAX_THREADS}")));
        }
        let weights = graph
            .weights()
            .map(|(name, w)| WeightSpec { name: name.into(), dtype: w.dtype, shape: w.shape.clone() })
            .collect();
        fold_batch_norms(&mut graph);
        let preparation = Arc::new(Preparation::in_f32(prepare_weights(&mut graph, Prepare::Arithmetic)));
        optimize(&mut graph, target.gpu().is_some()).map_err(explain)?;
        let (inputs, outputs) = (Vec::new(), Vec::new());
        let info = EngineInfo {
            inputs,
            outputs,
            weights,
            compatibility: crate::engine::compatibility(target.ggml)?,
        };
        let fixed = graph.inputs.iter().map(|id| graph.value(*id).known_shape()).collect();
        let mut topology = Topology {
            target,
            graph,
            preparation,
            precision: spec.precision,
            threads: spec.threads,
            info,
            fixed,
        };
        let open = |id: &&ValueId| topology.graph.value(**id).shape.is_none();
        if let Some(id) = topology.graph.inputs.iter().find(open) {
            let name = &topology.graph.value(*id).name;
            return Err(Error::invalid(format!("the rank of input {name:?} is not known")));
        }
        // Translate first: an error about an operator is clearer than one about unknown outputs.
        let (ranks, found, host_operators): (Vec<Option<usize>>, _, _) = if topology.decides() {
            let Prepared { outputs, host_operators, .. } = topology.representative_flow()?;
            (outputs.iter().map(|spec| Some(spec.as_ref()?.1.len())).collect(), None, host_operators)
        } else {
            let (bank, mut translation) = topology.representative()?;
            let ranks = translation.output_specs.iter().map(|spec| Some(spec.shape.len())).collect();
            let host_operators = std::mem::take(&mut translation.host_operators);
            (ranks, Some((bank, translation)), host_operators)
        };
        let Topology { graph, info, .. } = &mut topology;
        info.inputs = graph.inputs.iter().map(|id| tensor_spec(graph, *id, None)).collect::<Result<_>>()?;
        info.outputs = graph
            .outputs
            .iter()
            .zip(ranks)
            .map(|(id, rank)| tensor_spec(graph, *id, rank))
            .collect::<Result<_>>()?;
        Ok(Translated { topology, graph: found, host_operators })
    }
}

impl Topology {
    pub(crate) fn info(&self) -> &EngineInfo {
        &self.info
    }
    /// The device for which it is translated.
    pub(crate) fn target(&self) -> Target {
        self.target
    }
    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }
    /// The shapes of the inputs, if none is open.
    pub(crate) fn fixed_shapes(&self) -> Option<Vec<Vec<usize>>> {
        self.fixed.clone()
    }
    /// The number of threads for work that benefits from them.
    pub(crate) fn threads(&self) -> usize {
        self.threads.unwrap_or_else(all_threads)
    }
    /// The number of threads that run a graph.
    pub(crate) fn threads_for(&self, builder: &Builder) -> usize {
        self.threads.unwrap_or_else(|| if builder.is_worth_threads() { all_threads() } else { 1 })
    }

    /// The translated graph and the weights it reads, without memory. Open dimensions get assumed sizes.
    pub(crate) fn representative(&self) -> Result<(Bank, Translation)> {
        let attempt = |shapes: Option<&[Vec<usize>]>| {
            let mut bank = self.bank();
            let translation = match shapes {
                Some(shapes) => self.translation(shapes, &mut bank)?,
                None => translate(&self.graph, self.precision, self.target, &mut bank)?,
            };
            Ok((bank, translation))
        };
        if self.fixed.is_some() {
            return attempt(None);
        }
        let mut first = None;
        for assumed in ASSUMED {
            match attempt(Some(&self.assume(assumed))) {
                Ok(done) => return Ok(done),
                Err(error) => first.get_or_insert(error),
            };
        }
        Err(first.unwrap_or_else(|| Error::internal("no sizes are assumed")))
    }

    fn bank(&self) -> Bank {
        Bank::new(self.target, &self.info.weights, self.preparation.clone())
    }

    /// Whether the graph has control flow.
    pub(crate) fn decides(&self) -> bool {
        flow::decides(&self.graph)
    }

    /// As [`representative`](Self::representative), for a graph with control flow. If dimensions are open and no sizes fit, its weights
    /// stay in plain form.
    pub(crate) fn representative_flow(&self) -> Result<Prepared> {
        let dtypes = self.graph.inputs.iter().map(|id| self.graph.value(*id).dtype.unwrap_or(DType::F32));
        let dtypes: Vec<DType> = dtypes.collect();
        let attempt = |shapes: Option<Vec<Vec<usize>>>| {
            let mut bank = self.bank();
            let (mut unit, mut host_operators) = (Unit::new(self.graph.clone()), BTreeMap::new());
            let specs: Option<Vec<Spec>> = shapes.map(|shapes| dtypes.iter().copied().zip(shapes).collect());
            let mut planner =
                Planner { topology: self, bank: &mut bank, host_operators: &mut host_operators };
            let outputs = unit.prepare(specs.as_deref(), &mut planner)?;
            Ok(Prepared { bank, unit, outputs, host_operators })
        };
        if let Some(shapes) = self.fixed_shapes() {
            return attempt(Some(shapes));
        }
        let assumed = ASSUMED.into_iter().find_map(|assumed| attempt(Some(self.assume(assumed))).ok());
        assumed.map_or_else(|| attempt(None), Ok)
    }

    /// Translates the graph for inputs of these shapes, with its weights in `bank`.
    pub(crate) fn translation(&self, shapes: &[Vec<usize>], bank: &mut Bank) -> Result<Translation> {
        let names = self.graph.inputs.iter().map(|id| self.graph.value(*id).name.clone());
        let shapes: BTreeMap<String, Vec<usize>> = names.zip(shapes.iter().cloned()).collect();
        let mut graph = self.graph.clone();
        simplify(&mut graph, &shapes, OpenDims::Refuse)
            .and_then(|_| optimize(&mut graph, self.target.gpu().is_some()))
            .map_err(explain)
            .and_then(|_| translate(&graph, self.precision, self.target, bank))
            .map_err(|e| Error { message: format!("with inputs of shapes {shapes:?}: {}", e.message), ..e })
    }

    /// Shapes of the inputs, with these sizes for open dimensions.
    fn assume(&self, (outermost, others): (usize, usize)) -> Vec<Vec<usize>> {
        let mut symbols: BTreeMap<&str, usize> = BTreeMap::new();
        let shape = |id: &ValueId| {
            let dims = self.graph.value(*id).shape.iter().flatten();
            let size = |(i, dim): (usize, &'_ Dim)| (if i == 0 { outermost } else { others }, dim.clone());
            dims.enumerate().map(size).collect::<Vec<_>>()
        };
        let dims: Vec<Vec<(usize, Dim)>> = self.graph.inputs.iter().map(shape).collect();
        dims.iter()
            .map(|dims| {
                dims.iter()
                    .map(|(size, dim)| match dim {
                        Dim::Known(n) => *n,
                        Dim::Symbol(name) => *symbols.entry(name).or_insert(*size),
                        Dim::Unknown => *size,
                    })
                    .collect()
            })
            .collect()
    }

    /// Checks the number, types and shapes of the inputs, as the host does too.
    pub(crate) fn check_inputs(&self, inputs: &[Input<'_>]) -> Result<()> {
        let specs = &self.info.inputs;
        if inputs.len() != specs.len() {
            return Err(Error::invalid(format!("{} inputs given, {} expected", inputs.len(), specs.len())));
        }
        for (input, spec) in inputs.iter().zip(specs) {
            let (dtype, shape) = input.spec();
            if dtype != spec.dtype {
                return Err(Error::invalid(format!("an input is {dtype}, expected {}", spec.dtype)));
            }
            let fits = shape.len() == spec.shape.len()
                && shape.iter().zip(&spec.shape).all(|(d, open)| open.is_none_or(|fixed| fixed == *d));
            if !fits {
                let name = &spec.name;
                return Err(Error::invalid(format!(
                    "input {name:?} is {shape:?}, expected {:?}",
                    spec.shape
                )));
            }
        }
        Ok(())
    }
}

/// A graph with control flow, translated but without weights.
pub(crate) struct Prepared {
    pub(crate) bank: Bank,
    pub(crate) unit: Unit,
    /// The types and shapes of the outputs, as far as they are known.
    pub(crate) outputs: Vec<Option<Spec>>,
    /// The operators that the reference implementation evaluates, with their number of nodes.
    pub(crate) host_operators: BTreeMap<String, usize>,
}

/// The threads of work that benefits from them, if the request names no number.
fn all_threads() -> usize {
    default_threads().min(MAX_THREADS)
}

/// Converts an error of the graph.
pub(crate) fn explain(error: GraphError) -> Error {
    match error {
        GraphError::Unsupported { .. } | GraphError::UnsupportedModel { .. } => {
            Error::unsupported(error.to_string())
        }
        _ => Error::invalid(error.to_string()),
    }
}

/// The specification of an input or output. `rank` is used if the value's own rank is unknown.
fn tensor_spec(graph: &Graph, id: ValueId, rank: Option<usize>) -> Result<TensorSpec> {
    let value = graph.value(id);
    let dtype = value.dtype.filter(|dtype| storage_type(*dtype).is_some());
    let shape = match (&value.shape, rank) {
        (Some(shape), _) => Some(shape.iter().map(Dim::known).collect()),
        (None, rank) => rank.map(|rank| vec![None; rank]),
    };
    match (dtype, shape) {
        (Some(dtype), Some(shape)) => Ok(TensorSpec { name: value.name.clone(), dtype, shape }),
        _ => Err(Error::invalid(format!("the type or rank of {:?} is not known", value.name))),
    }
}

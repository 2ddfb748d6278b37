//! Engines: compiled programs.

use crate::{
    compile::{compile, count_axes_from_first, for_each_shape},
    devices::Target,
    faults::{compare_exactly, fault},
    ffi::{CompileOptions, Layout, Program},
    payload::{self, Parts, Requirements, StoredProgram},
    runtime::Runtime,
    session::MgxSession,
    upsample::spell_out_upsampling,
};
use bytes::Bytes;
use sdrun_abi::{Engine, EngineInfo, Error, Host, OpenShapes, Result, Session, WeightSource};
use sdrun_graph::{
    Graph,
    passes::{
        Prepare, absorb_scales, defer_biases, expand_biases, merge_projections, prepare_weights,
        weights_as_inputs,
    },
};
use sdrun_provider_common::{
    Preparation,
    checks::{self, Checks},
    describe, phase, read_graph,
    refused::refuse,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// State shared by an engine and its sessions.
pub(crate) struct Compiled {
    pub(crate) runtime: &'static Runtime,
    pub(crate) target: Target,
    pub(crate) options: CompileOptions,
    pub(crate) info: EngineInfo,
    /// What to check in each run.
    pub(crate) checks: Checks,
    /// The graph as the host passed it; empty if the weights are baked in.
    model: Bytes,
    /// One program for each set of input shapes.
    pub(crate) buckets: Vec<Bucket>,
    /// Bytes of device memory that the programs take, if known.
    pub(crate) resident: Option<u64>,
}

/// A program for one set of input shapes.
pub(crate) struct Bucket {
    /// Shapes of the inputs, in the order of [`EngineInfo::inputs`].
    pub(crate) inputs: Vec<Vec<usize>>,
    pub(crate) preparation: Preparation,
    /// The parameters that a run needs, by name.
    pub(crate) parameters: BTreeMap<String, Layout>,
    /// A program has a single scratch buffer, so only one run at a time may use it.
    program: Mutex<Program>,
}

impl Bucket {
    pub(crate) fn program(&self) -> MutexGuard<'_, Program> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Provider::build`](sdrun_abi::Provider::build). `baked` provides the weights that become part of the
/// programs.
pub(crate) fn build(
    runtime: &'static Runtime,
    target: Target,
    model: Bytes,
    options: CompileOptions,
    open: &OpenShapes,
    baked: Option<&dyn WeightSource>,
    host: &dyn Host,
) -> Result<Box<dyn Engine>> {
    let graph = read_graph(&model)?;
    refuse(&graph, "MIGraphX", fault)?;
    let requirements = Requirements::of(runtime, &target, options)?;
    let mut info = describe(&graph, requirements.text()?)?;
    let checks = checks::of_inputs(&graph)?;
    let graphs = for_each_shape(graph, open)?;
    let steps = graphs.len() as u64;
    let make = |(step, mut graph): (u64, Graph), target: &Target| {
        let (inputs, mut preparation) = (shapes_of_inputs(&graph), Preparation::default());
        if baked.is_none() {
            preparation = take_weights_out(&mut graph, target);
        }
        count_axes_from_first(&mut graph);
        compare_exactly(&mut graph);
        spell_out_upsampling(&mut graph);
        let program = compile(runtime, target, &graph, options, baked, (step, steps), host)?;
        Ok((inputs, preparation, program))
    };
    let mut model = model;
    if baked.is_some() {
        info.weights.clear();
        model = Bytes::new();
    }
    let before = Before { runtime, target, options, info, checks, model };
    before.finish((0..).zip(graphs), make)
}

fn shapes_of_inputs(graph: &Graph) -> Vec<Vec<usize>> {
    graph.inputs.iter().map(|id| graph.value(*id).known_shape().unwrap_or_default()).collect()
}

/// Turns all weights, or the tensors precomputed from them, into inputs. Deterministic for a graph and kind of
/// device, because loading an engine repeats it.
fn take_weights_out(graph: &mut Graph, target: &Target) -> Preparation {
    if target.for_gpu {
        absorb_scales(graph);
    }
    merge_projections(graph);
    if target.for_gpu {
        defer_biases(graph);
        expand_biases(graph);
    }
    let what = if target.for_gpu { Prepare::Everything } else { Prepare::NotGrowing };
    let preparation = prepare_weights(graph, what);
    weights_as_inputs(graph);
    Preparation::new(preparation)
}

/// See [`Provider::load`](sdrun_abi::Provider::load).
pub(crate) fn load(
    runtime: &'static Runtime,
    target: Target,
    payload: &[u8],
    options: CompileOptions,
    host: &dyn Host,
) -> Result<Box<dyn Engine>> {
    let Parts { info, checks, model, programs } = payload::read(payload)?;
    Requirements::read(&info.compatibility)?.demand(runtime, &target, options)?;
    let model = Bytes::from(model.into_owned());
    let graphs = match model.is_empty() {
        true => Vec::new(),
        false => {
            let sets: Vec<_> = programs.iter().map(|program| &program.inputs[..]).collect();
            for_each_shape(read_graph(&model)?, &open_shapes(&info, &sets))?
        }
    };
    let graphs = graphs.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
    let steps = programs.len() as u64;
    let make = |(step, (stored, graph)): (u64, (StoredProgram<'_>, Option<Graph>)), target: &Target| {
        phase(host, "load", step, steps)?;
        let preparation = graph.map(|mut graph| take_weights_out(&mut graph, target)).unwrap_or_default();
        let file = runtime.temporary_file()?;
        std::fs::write(file.path(), stored.bytes).map_err(|e| Error::io("write", file.path(), &e))?;
        target.select(runtime)?;
        Ok((stored.inputs, preparation, Program::load(&runtime.api, file.path())?))
    };
    let before = Before { runtime, target, options, info, checks, model };
    before.finish((0..).zip(programs.into_iter().zip(graphs)), make)
}

/// Collects the shapes of the inputs with open dimensions from the complete sets, in the form that a build takes.
fn open_shapes(info: &EngineInfo, sets: &[&[Vec<usize>]]) -> OpenShapes {
    let open = info.inputs.iter().enumerate().filter(|(_, input)| input.is_open());
    let list = |at: usize| sets.iter().filter_map(|set| set.get(at).cloned()).collect();
    open.map(|(at, input)| (input.name.clone(), list(at))).collect()
}

/// An engine whose programs do not exist yet.
struct Before {
    runtime: &'static Runtime,
    target: Target,
    options: CompileOptions,
    info: EngineInfo,
    checks: Checks,
    model: Bytes,
}

impl Before {
    fn finish<T>(
        self,
        parts: impl Iterator<Item = T>,
        make: impl Fn(T, &Target) -> Result<(Vec<Vec<usize>>, Preparation, Program)>,
    ) -> Result<Box<dyn Engine>> {
        let Before { runtime, target, options, info, checks, model } = self;
        let in_use = || match (&runtime.hip, &target.hip) {
            (Some(hip), Some(_)) => target.select(runtime).and_then(|()| hip.memory_in_use()).ok(),
            _ => None,
        };
        let before = in_use();
        let bucket = |part| {
            let (inputs, preparation, program) = make(part, &target)?;
            let outputs = program.outputs(&runtime.api)?.len();
            if outputs != info.outputs.len() || inputs.len() != info.inputs.len() {
                return Err(Error::internal(format!(
                    "a program has {} inputs and {outputs} outputs, but the engine has {} and {}",
                    inputs.len(),
                    info.inputs.len(),
                    info.outputs.len()
                )));
            }
            let parameters = program.parameters(&runtime.api)?.into_iter().collect();
            Ok(Bucket { inputs, preparation, parameters, program: Mutex::new(program) })
        };
        let buckets = parts.map(bucket).collect::<Result<Vec<_>>>()?;
        let resident = before.zip(in_use()).map(|(before, after)| after.saturating_sub(before));
        let compiled = Compiled { runtime, target, options, info, checks, model, buckets, resident };
        Ok(Box::new(MgxEngine(Arc::new(compiled))))
    }
}

struct MgxEngine(Arc<Compiled>);

impl Engine for MgxEngine {
    fn info(&self) -> &EngineInfo {
        &self.0.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let Compiled { runtime, target, info, checks, model, buckets, .. } = &*self.0;
        let stored = |bucket: &Bucket| {
            let file = runtime.temporary_file()?;
            target.select(runtime)?;
            bucket.program().save(&runtime.api, file.path())?;
            std::fs::read(file.path()).map_err(|e| Error::io("read", file.path(), &e))
        };
        let bytes = buckets.iter().map(stored).collect::<Result<Vec<_>>>()?;
        let programs = buckets.iter().zip(&bytes);
        let programs = programs.map(|(bucket, bytes)| StoredProgram { inputs: bucket.inputs.clone(), bytes });
        payload::write(&Parts {
            info: info.clone(),
            checks: checks.clone(),
            model: (&**model).into(),
            programs: programs.collect(),
        })
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let Compiled { runtime, target, options, info, model, buckets, .. } = &*self.0;
        if info.weights.is_empty() {
            return Err(Error::precondition("the engine has no weights to bake in"));
        }
        let sets: Vec<_> = buckets.iter().map(|bucket| &bucket.inputs[..]).collect();
        let open = open_shapes(info, &sets);
        build(runtime, target.clone(), model.clone(), *options, &open, Some(weights), host)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        Ok(Box::new(MgxSession::new(self.0.clone(), weights, host)?))
    }
}

//! Engines: compiled programs.

use crate::{
    compile::{check_shapes, compile, count_axes_from_first},
    devices::Target,
    ffi::{CompileOptions, Layout, Program},
    payload::{self, Parts, Requirements},
    preparation::Preparation,
    runtime::Runtime,
    session::MgxSession,
    upsample::spell_out_upsampling,
};
use bytes::Bytes;
use sdrun_abi::{Engine, EngineInfo, Error, Host, Result, Session, WeightSource};
use sdrun_graph::{
    Graph,
    passes::{
        absorb_scales, defer_biases, expand_biases, merge_projections, prepare_weights, weights_as_inputs,
    },
};
use sdrun_provider_common::{describe, phase, read_graph};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an engine and its sessions share.
pub(crate) struct Compiled {
    pub(crate) runtime: &'static Runtime,
    pub(crate) target: Target,
    pub(crate) options: CompileOptions,
    pub(crate) info: EngineInfo,
    /// The graph as the host handed it over; empty where weights are baked in.
    model: Bytes,
    pub(crate) preparation: Preparation,
    /// What a run has to be given.
    pub(crate) parameters: Vec<(String, Layout)>,
    /// Bytes of device memory the program took, where that can be told.
    pub(crate) resident: Option<u64>,
    /// It has one scratch memory: one run at a time.
    program: Mutex<Program>,
}

impl Compiled {
    pub(crate) fn program(&self) -> MutexGuard<'_, Program> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Provider::build`](sdrun_abi::Provider::build). `baked` are the weights that become part of the program.
pub(crate) fn build(
    runtime: &'static Runtime,
    target: Target,
    model: Bytes,
    options: CompileOptions,
    baked: Option<&dyn WeightSource>,
    host: &dyn Host,
) -> Result<Box<dyn Engine>> {
    let mut graph = read_graph(&model)?;
    check_shapes(&graph)?;
    let requirements = Requirements::of(runtime, &target, options)?;
    let mut info = describe(&graph, requirements.text()?)?;
    let (model, preparation) = match baked {
        Some(_) => {
            info.weights.clear();
            (Bytes::new(), Preparation::default())
        }
        None => (model, take_weights_out(&mut graph, &target)),
    };
    count_axes_from_first(&mut graph);
    spell_out_upsampling(&mut graph);
    let parts = Before { runtime, target, options, info, model, preparation };
    parts.finish(|target| compile(runtime, target, &graph, options, baked, host))
}

/// Makes inputs of all weights, or of what is computed out of them. The same for the same graph and kind of device: an engine
/// that is loaded does it again.
fn take_weights_out(graph: &mut Graph, target: &Target) -> Preparation {
    if target.for_gpu {
        absorb_scales(graph);
    }
    merge_projections(graph);
    if target.for_gpu {
        defer_biases(graph);
        expand_biases(graph);
    }
    let preparation = prepare_weights(graph, target.for_gpu);
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
    let Parts { info, model, program } = payload::read(payload)?;
    Requirements::read(&info.compatibility)?.demand(runtime, &target, options)?;
    let model = Bytes::from(model.into_owned());
    let preparation = match model.is_empty() {
        true => Preparation::default(),
        false => take_weights_out(&mut read_graph(&model)?, &target),
    };
    phase(host, "load", 0, 1)?;
    let parts = Before { runtime, target, options, info, model, preparation };
    parts.finish(|target| {
        let file = runtime.temporary_file()?;
        std::fs::write(file.path(), program).map_err(|e| Error::io("write", file.path(), &e))?;
        target.select(runtime)?;
        Program::load(&runtime.api, file.path())
    })
}

/// An engine before its program is there.
struct Before {
    runtime: &'static Runtime,
    target: Target,
    options: CompileOptions,
    info: EngineInfo,
    model: Bytes,
    preparation: Preparation,
}

impl Before {
    fn finish(self, make: impl FnOnce(&Target) -> Result<Program>) -> Result<Box<dyn Engine>> {
        let Before { runtime, target, options, info, model, preparation } = self;
        let in_use = || match (&runtime.hip, &target.hip) {
            (Some(hip), Some(_)) => target.select(runtime).and_then(|()| hip.memory_in_use()).ok(),
            _ => None,
        };
        let before = in_use();
        let program = make(&target)?;
        let resident = before.zip(in_use()).map(|(before, after)| after.saturating_sub(before));
        let parameters = program.parameters(&runtime.api)?;
        let outputs = program.outputs(&runtime.api)?.len();
        if outputs != info.outputs.len() {
            return Err(Error::internal(format!(
                "the program has {} outputs where the engine has {}",
                outputs,
                info.outputs.len()
            )));
        }
        let program = Mutex::new(program);
        let compiled =
            Compiled { runtime, target, options, info, model, preparation, parameters, resident, program };
        Ok(Box::new(MgxEngine(Arc::new(compiled))))
    }
}

struct MgxEngine(Arc<Compiled>);

impl Engine for MgxEngine {
    fn info(&self) -> &EngineInfo {
        &self.0.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        let (runtime, info) = (self.0.runtime, &self.0.info);
        let file = runtime.temporary_file()?;
        self.0.target.select(runtime)?;
        self.0.program().save(&runtime.api, file.path())?;
        let program = std::fs::read(file.path()).map_err(|e| Error::io("read", file.path(), &e))?;
        payload::write(&Parts { info: info.clone(), model: (&*self.0.model).into(), program: &program })
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let Compiled { runtime, target, options, info, model, .. } = &*self.0;
        if info.weights.is_empty() {
            return Err(Error::precondition("the engine has no weights that could be baked in"));
        }
        build(runtime, target.clone(), model.clone(), *options, Some(weights), host)
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        Ok(Box::new(MgxSession::new(self.0.clone(), weights, host)?))
    }
}

//! Engines: compiled programs.

use crate::{
    compile::{check_shapes, compile},
    devices::Target,
    ffi::{CompileOptions, Layout, Program},
    payload::{self, Parts, Requirements},
    preparation::Preparation,
    runtime::Runtime,
    session::MgxSession,
};
use bytes::Bytes;
use sdrun_abi::{Engine, EngineInfo, Error, Host, Result, Session, WeightSource};
use sdrun_graph::passes::{merge_projections, prepare_weights, weights_as_inputs};
use sdrun_provider_common::{describe, phase, read_graph};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an engine and its sessions share.
pub(crate) struct Compiled {
    pub(crate) runtime: &'static Runtime,
    pub(crate) target: Target,
    pub(crate) options: CompileOptions,
    pub(crate) info: EngineInfo,
    pub(crate) preparation: Preparation,
    /// What a run has to be given.
    pub(crate) parameters: Vec<(String, Layout)>,
    pub(crate) outputs: Vec<Layout>,
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
    model: &Bytes,
    options: CompileOptions,
    baked: Option<&dyn WeightSource>,
    host: &dyn Host,
) -> Result<Box<dyn Engine>> {
    let mut graph = read_graph(model)?;
    check_shapes(&graph)?;
    let requirements = Requirements::of(runtime, &target, options)?;
    let mut info = describe(&graph, requirements.text()?)?;
    let preparation = match baked {
        Some(_) => {
            info.weights.clear();
            Preparation::new(Default::default())
        }
        None => {
            merge_projections(&mut graph);
            let preparation = prepare_weights(&mut graph);
            weights_as_inputs(&mut graph);
            Preparation::new(preparation)
        }
    };
    finish(runtime, target, options, info, preparation, |target| {
        compile(runtime, target, &graph, options, baked, host)
    })
}

/// See [`Provider::load`](sdrun_abi::Provider::load).
pub(crate) fn load(
    runtime: &'static Runtime,
    target: Target,
    payload: &[u8],
    options: CompileOptions,
    host: &dyn Host,
) -> Result<Box<dyn Engine>> {
    let Parts { info, preparation, program } = payload::read(payload)?;
    Requirements::read(&info.compatibility)?.demand(runtime, &target, options)?;
    let preparation = match preparation {
        [] => Preparation::new(Default::default()),
        onnx => Preparation::read(onnx)?,
    };
    phase(host, "load", 0, 1)?;
    finish(runtime, target, options, info, preparation, |target| {
        let file = runtime.temporary_file()?;
        std::fs::write(file.path(), program).map_err(|e| Error::io("write", file.path(), &e))?;
        target.select(runtime)?;
        Program::load(&runtime.api, file.path())
    })
}

fn finish(
    runtime: &'static Runtime,
    target: Target,
    options: CompileOptions,
    info: EngineInfo,
    preparation: Preparation,
    make: impl FnOnce(&Target) -> Result<Program>,
) -> Result<Box<dyn Engine>> {
    let in_use = || match (&runtime.hip, &target.hip) {
        (Some(hip), Some(_)) => target.select(runtime).and_then(|()| hip.memory_in_use()).ok(),
        _ => None,
    };
    let before = in_use();
    let program = make(&target)?;
    let resident = before.zip(in_use()).map(|(before, after)| after.saturating_sub(before));
    let compiled = Compiled {
        parameters: program.parameters(&runtime.api)?,
        outputs: program.outputs(&runtime.api)?,
        program: Mutex::new(program),
        runtime,
        target,
        options,
        info,
        preparation,
        resident,
    };
    if compiled.outputs.len() != compiled.info.outputs.len() {
        return Err(Error::internal(format!(
            "the program has {} outputs where the engine has {}",
            compiled.outputs.len(),
            compiled.info.outputs.len()
        )));
    }
    Ok(Box::new(MgxEngine(Arc::new(compiled))))
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
        let preparation = if info.weights.is_empty() { Vec::new() } else { self.0.preparation.to_onnx()? };
        payload::write(&Parts { info: info.clone(), preparation: &preparation, program: &program })
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        Ok(Box::new(MgxSession::new(self.0.clone(), weights, host)?))
    }
}

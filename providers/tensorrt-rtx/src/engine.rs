//! Engines: a description and a plan. Only sessions need a GPU.

use crate::{
    compile,
    devices::Place,
    ffi::{self, HostMemory, cuda::Context},
    options::Options,
    payload::{self, Description, Requirements},
    refit,
    runtime::Runtime,
    session::TrtSession,
    target::Target,
};
use sdrun_abi::{
    BuildSpec, Compatibility, Engine, EngineInfo, Error, ErrorCode, Hint, Host, Result, Session, WeightSource,
};
use sdrun_provider_common::{demand, phase};
use std::{ops::Deref, sync::Arc};

/// A plan, as built or loaded.
pub(crate) enum Plan {
    Built(HostMemory),
    Loaded(Vec<u8>),
}

impl Deref for Plan {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Plan::Built(memory) => memory,
            Plan::Loaded(bytes) => bytes,
        }
    }
}

/// An engine, either stripped or with its weights inside.
pub(crate) struct TrtEngine {
    runtime: &'static Runtime,
    place: Place,
    options: Options,
    description: Arc<Description>,
    plan: Plan,
}

/// See [`Provider::check`](sdrun_abi::Provider::check).
pub(crate) fn check(compatibility: &str, runtime: &Runtime, place: &Place) -> Result<Compatibility> {
    let (requirements, target) = Requirements::parse(compatibility)?;
    let version = &runtime.library.version;
    if requirements.tensorrt_rtx != *version {
        return Ok(Compatibility::Unsupported(format!(
            "it was built with TensorRT-RTX {}, found {version}",
            requirements.tensorrt_rtx
        )));
    }
    let fits = match &place.gpu {
        Some(gpu) => target.runs_on(gpu.capability),
        None => target == place.target,
    };
    Ok(match (fits, &place.gpu) {
        (true, Some(gpu))
            if target == Target::Portable && Target::of_gpu(gpu.capability) != Target::Portable =>
        {
            Compatibility::PreferRecompile(format!(
                "it was built for any GPU; one built for sm{} is smaller",
                gpu.capability
            ))
        }
        (true, _) => Compatibility::Optimal,
        (false, _) => Compatibility::Unsupported(format!(
            "it was built for {}, this device is {}",
            target.name(),
            place.device.class
        )),
    })
}

impl TrtEngine {
    pub(crate) fn build(
        runtime: &'static Runtime,
        model: &[u8],
        spec: &BuildSpec,
        place: Place,
        options: Options,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Self> {
        let (description, plan) = compile::compile(runtime, model, spec, &place, &options, weights, host)?;
        Ok(TrtEngine { runtime, place, options, description: Arc::new(description), plan: Plan::Built(plan) })
    }

    pub(crate) fn load(
        runtime: &'static Runtime,
        payload: &[u8],
        place: Place,
        options: Options,
    ) -> Result<Self> {
        let (description, plan) = payload::read(payload)?;
        demand(check(&description.info.compatibility, runtime, &place)?)?;
        // The library's header takes 64 bytes.
        if plan.len() < 64 {
            return Err(Error::new(
                ErrorCode::DataLoss,
                format!("the engine is damaged: its plan has only {} bytes", plan.len()),
            ));
        }
        let plan = Plan::Loaded(plan.to_vec());
        Ok(TrtEngine { runtime, place, options, description: Arc::new(description), plan })
    }

    fn is_stripped(&self) -> bool {
        !self.description.table.is_empty()
    }

    /// Loads the engine on its GPU. Also returns the bytes of GPU memory that were free before.
    fn on_gpu(&self, host: &dyn Host) -> Result<(ffi::engine::Engine, Arc<Context>, u64)> {
        let gpu = self.place.gpu()?;
        phase(host, "load", 0, 1)?;
        let context = Context::of(self.runtime.driver()?, gpu)?;
        let free = context.free_memory()?;
        let mut engine = ffi::engine::Engine::load(&self.runtime.library, &context, &self.plan, host)?;
        if let Some(budget) = self.options.vram_budget {
            if engine.streamable_bytes() == 0 {
                return Err(Error::precondition("the engine was built without weight streaming")
                    .with_hint(Hint::Bake.with_note("and with a budget of device memory")));
            }
            engine.set_budget(budget, host)?;
        }
        phase(host, "load", 1, 1)?;
        Ok((engine, context, free))
    }
}

impl Engine for TrtEngine {
    fn info(&self) -> &EngineInfo {
        &self.description.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        payload::write(&self.description, &self.plan)
    }

    fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let (mut engine, context, _) = self.on_gpu(host)?;
        let stream = context.stream()?;
        refit::apply(&engine, &stream, &self.description, None, weights, refit::CHUNK, host)
            .map_err(|f| f.error)?;
        let plan = engine.bake(host)?;
        let requirements = Requirements {
            tensorrt_rtx: self.runtime.library.version.clone(),
            target: Requirements::parse(&self.description.info.compatibility)?.0.target,
            refit: false,
        };
        let info = EngineInfo {
            weights: Vec::new(),
            compatibility: requirements.text()?,
            ..self.description.info.clone()
        };
        let checks = self.description.checks.clone();
        let description = Description { info, table: Vec::new(), checks, plan_bytes: plan.len() as u64 };
        Ok(Box::new(TrtEngine {
            runtime: self.runtime,
            place: self.place.clone(),
            options: self.options.clone(),
            description: Arc::new(description),
            plan: Plan::Built(plan),
        }))
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let (engine, context, free) = self.on_gpu(host)?;
        let stream = context.stream()?;
        if self.is_stripped() {
            refit::apply(&engine, &stream, &self.description, None, weights, refit::CHUNK, host)
                .map_err(|f| f.error)?;
        }
        let capability = self.place.gpu()?.capability;
        let version = &self.runtime.library.version;
        let kernels =
            crate::kernels::Kernels::of(self.runtime.cache_dir.as_deref(), version, &self.plan, capability);
        let session = TrtSession::new(
            engine,
            context,
            stream,
            self.description.clone(),
            kernels,
            self.options.cuda_graph,
            free,
            host,
        )?;
        Ok(Box::new(session))
    }
}

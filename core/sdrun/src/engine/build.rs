//! Builds an engine or takes it from the cache.

use super::{
    BuildOptions, CachePolicy, Engine,
    check::{check_info, check_options, fingerprint, weight_specs},
    key::Key,
};
use crate::{Cache, EngineManifest, Error, Model, Provider, Result, memory};
use sdrun_abi::{
    Assessment, Capabilities, Device, EngineInfo, Error as AbiError, ErrorCode, Hint, Host, MemoryEstimate,
    WeightSource,
};
use sdrun_graph::{Graph, footprint};
use sdrun_weights::{Cast, check_complete};
use std::time::Instant;

impl Provider {
    /// Builds an engine for `model`, or takes it from the cache. With [`BuildOptions::bake`], the engine contains the
    /// model's own weights.
    pub fn build(&self, model: &Model, options: &BuildOptions, host: &dyn Host) -> Result<Engine> {
        self.build_with(model, &model.weights(), options, host)
    }

    /// What building `model` and creating a session would need, determined without weights and without compiling: the
    /// nodes that the provider cannot run, and the memory. Fields that the provider cannot determine are `None`.
    pub fn assess(&self, model: &Model, options: &BuildOptions) -> Result<Assessment> {
        let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
        self.assess_bound(&graph.to_onnx_stripped()?, model, options)
    }

    /// The memory that a session of `model` needs at least: the provider's own figures, and an [estimate](memory::estimate) where it has
    /// none. `offered` are this provider's [`capabilities`](Provider::capabilities) for the device in `options`.
    ///
    /// # Errors
    /// As [`assess`](Provider::assess).
    pub fn memory(
        &self,
        model: &Model,
        options: &BuildOptions,
        offered: &Capabilities,
    ) -> Result<MemoryEstimate> {
        let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
        let estimate = memory::of_footprint(footprint(&graph, options.precision)?, options, offered);
        let told = self.assess_bound(&graph.to_onnx_stripped()?, model, options)?;
        Ok(memory::refined(estimate, &told))
    }

    /// As [`assess`](Provider::assess), for a model that is already bound and serialized without weights.
    pub(crate) fn assess_bound(
        &self,
        onnx: &[u8],
        model: &Model,
        options: &BuildOptions,
    ) -> Result<Assessment> {
        self.driver().assess(onnx, &options.spec(model)).map_err(Error::of(self.id()))
    }

    /// As [`build`](Provider::build), with the given weights to bake in.
    pub fn build_with(
        &self,
        model: &Model,
        weights: &dyn WeightSource,
        options: &BuildOptions,
        host: &dyn Host,
    ) -> Result<Engine> {
        let started = Instant::now();
        check_options(self.id(), &self.capabilities(&options.device)?, options)?;
        let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
        let specs = weight_specs(&graph);
        let cast = Cast::new(weights, &specs);
        if options.bake {
            check_complete(&specs, &cast)?;
        }
        let baked = if options.bake { Some(fingerprint(&specs, &cast)?) } else { None };
        let wanted = self.wanted(model, &graph, options, baked)?;

        let cache = Cache::at(self.paths().engines());
        let cached = |host| -> Result<Option<Engine>> {
            let engine = self.cached(&cache, &wanted, &options.device, &graph, host)?;
            Ok(engine.map(|engine| Engine { seconds: started.elapsed().as_secs_f64(), ..engine }))
        };
        let reads = matches!(options.cache, CachePolicy::Use | CachePolicy::Only);
        if reads && let Some(engine) = cached(host)? {
            return Ok(engine);
        }
        if options.cache == CachePolicy::Only {
            return Err(AbiError::not_found(format!(
                "{} has no cached engine for {} here",
                self.id(),
                model.name()
            ))
            .with_hint(Hint::AnyOf(vec![Hint::Build, "allow building".into()]))
            .into());
        }
        let writes = options.cache != CachePolicy::Off;
        // Held while building, so that another process that needs this engine waits and then finds it.
        let _lock = if writes { cache.lock(&wanted.key, host)? } else { None };
        // Another process may have built it since the first lookup.
        if reads && let Some(engine) = cached(host)? {
            return Ok(engine);
        }

        if host.cancelled() {
            return Err(AbiError::new(ErrorCode::Cancelled, "cancelled").into());
        }
        let bytes = graph.to_onnx_stripped()?;
        let inner = self.driver().build(&bytes, &wanted.spec, &cast, host).map_err(Error::of(self.id()))?;
        check_info(self.id(), inner.info(), &graph)?;
        let manifest = EngineManifest { info: inner.info().clone(), ..wanted };
        if writes {
            match inner.serialize() {
                Ok(payload) => drop(cache.put(&manifest, &payload)),
                // The process died, and the engine with it.
                Err(e) if self.has_ended() => return Err(Error::of(self.id())(e)),
                Err(e) => tracing::warn!("the engine was built but not cached: {e}"),
            }
        }
        Ok(Engine {
            inner,
            provider: self.clone(),
            device: options.device.clone(),
            manifest,
            cached: false,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Whether the cache has an engine for this request, so that [`build`](Provider::build) loads it. False for baked engines, whose
    /// weights would have to be read first.
    pub fn has_engine(&self, model: &Model, options: &BuildOptions) -> Result<bool> {
        let reads = matches!(options.cache, CachePolicy::Use | CachePolicy::Only);
        if options.bake || !reads {
            return Ok(false);
        }
        let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
        let wanted = self.wanted(model, &graph, options, None)?;
        Ok(Cache::at(self.paths().engines()).has(&wanted.key))
    }

    /// The manifest of the wanted engine, without the fields that only the provider can fill.
    fn wanted(
        &self,
        model: &Model,
        graph: &Graph,
        options: &BuildOptions,
        baked: Option<String>,
    ) -> Result<EngineManifest> {
        let spec = options.spec(model);
        let topology = graph.topology_hash();
        let (class, init) = (&options.device.class, self.init_options());
        let key = Key::new(self.manifest(), self.runtime(), init, class, &topology, &spec, baked.as_deref());
        Ok(EngineManifest {
            key: key.hash()?,
            provider: self.id().to_string(),
            build_id: self.manifest().build_id.clone(),
            runtime: (self.runtime().name.clone(), self.runtime().version.clone()),
            device_class: class.clone(),
            model: model.name().to_string(),
            info: EngineInfo {
                inputs: Vec::new(),
                outputs: Vec::new(),
                weights: Vec::new(),
                compatibility: String::new(),
            },
            binding: model.binding()?,
            topology,
            spec,
            baked,
        })
    }

    /// The engine from the cache, with this request's name, device and binding, because the entry has those of the process
    /// that built it. `None` if there is no usable entry.
    fn cached(
        &self,
        cache: &Cache,
        wanted: &EngineManifest,
        device: &Device,
        graph: &Graph,
        host: &dyn Host,
    ) -> Result<Option<Engine>> {
        let Some(file) = cache.get(wanted) else { return Ok(None) };
        let loaded = self.load_with(&file, device, &wanted.spec, host).and_then(|engine| {
            check_info(self.id(), engine.info(), graph)?;
            Ok(engine)
        });
        match loaded {
            Ok(mut engine) => {
                engine.manifest = EngineManifest { info: engine.info().clone(), ..wanted.clone() };
                Ok(Some(engine))
            }
            Err(e) if e.code() == ErrorCode::Cancelled => Err(e),
            // The process died, so it cannot build the engine either.
            Err(e) if self.has_ended() => Err(e),
            Err(e) => {
                tracing::warn!("rebuilding, because the cached engine cannot be used: {e}");
                Ok(None)
            }
        }
    }
}

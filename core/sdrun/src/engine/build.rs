//! Building an engine, or taking it from the cache.

use super::{
    BuildOptions, CachePolicy, Engine,
    check::{check_info, fingerprint, weight_specs},
};
use crate::{Cache, EngineManifest, Error, Model, Provider, Result};
use sdrun_abi::{Assessment, BuildSpec, Device, Error as AbiError, Host, WeightSource};
use sdrun_weights::{Cast, check_complete};
use sha2::{Digest, Sha256};
use std::time::Instant;

impl Provider {
    /// Builds an engine for `model`, or takes it from the cache. With [`BuildOptions::bake`] the model's own weights go
    /// into it.
    pub fn build(&self, model: &Model, options: &BuildOptions, host: &dyn Host) -> Result<Engine> {
        self.build_with(model, &model.weights(), options, host)
    }

    /// What building `model` and making a session would need, found without weights and without compiling: the nodes that
    /// the provider cannot run, and the memory. Fields that the provider cannot tell are `None`.
    pub fn assess(&self, model: &Model, options: &BuildOptions) -> Result<Assessment> {
        let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
        let bytes = graph.to_onnx_stripped()?;
        self.driver().assess(&bytes, &options.spec()).map_err(Error::of(self.id()))
    }

    /// As [`build`](Provider::build), with the weights to bake in.
    pub fn build_with(
        &self,
        model: &Model,
        weights: &dyn WeightSource,
        options: &BuildOptions,
        host: &dyn Host,
    ) -> Result<Engine> {
        let started = Instant::now();
        let offered = self.capabilities(&options.device)?;
        if !offered.precisions.contains(&options.precision) {
            let has: Vec<&str> = offered.precisions.iter().map(|p| p.name()).collect();
            return Err(Error::of(self.id())(
                AbiError::unsupported(format!(
                    "cannot compute in {} on {} (offers: {})",
                    options.precision,
                    options.device.name,
                    has.join(", ")
                ))
                .with_hint(format!("use `--precision {}`", has.first().unwrap_or(&"fp32"))),
            ));
        }
        if options.bake && !offered.bake {
            return Err(Error::of(self.id())(
                AbiError::unsupported("cannot store weights in an engine").with_hint("leave out `--bake`"),
            ));
        }
        if !options.open_shapes.is_empty() && !offered.dynamic_shapes {
            return Err(Error::of(self.id())(
                AbiError::unsupported("makes engines for one shape of each input")
                    .with_hint("give one shape for each input, for example `--shape sample=1,4,64,64`"),
            ));
        }
        if options.vram_budget.is_some() && !offered.streaming {
            return Err(Error::of(self.id())(
                AbiError::unsupported(format!(
                    "cannot leave weights out of the memory of {}",
                    options.device.name
                ))
                .with_hint("leave out `--vram-budget`"),
            ));
        }
        let graph = model.bound_for(&options.shapes, &options.open_shapes)?;
        let spec = options.spec();
        let specs = weight_specs(&graph);
        let cast = Cast::new(weights, &specs);
        if options.bake {
            check_complete(&specs, &cast)?;
        }
        let baked = if options.bake { Some(fingerprint(&specs, &cast)?) } else { None };
        let topology = graph.topology_hash();
        let key = self.cache_key(&topology, &options.device, &spec, baked.as_deref());
        let cache = Cache::at(self.paths().engines());
        // Held while building, so that a second process waits and then finds the engine.
        let _lock = (options.cache != CachePolicy::Off).then(|| cache.lock(&key));
        if matches!(options.cache, CachePolicy::Use | CachePolicy::Only)
            && let Some(file) = cache.get(&key)
        {
            match self.load_file(&file, &spec, host) {
                Ok(mut engine) => {
                    engine.seconds = started.elapsed().as_secs_f64();
                    return Ok(engine);
                }
                Err(e) => tracing::warn!("building again, since the cached engine cannot be used: {e}"),
            }
        }
        if options.cache == CachePolicy::Only {
            return Err(AbiError::not_found(format!(
                "{} has no cached engine for {} here",
                self.id(),
                model.name()
            ))
            .with_hint("build it first with `sdrun build`, or allow building")
            .into());
        }
        let bytes = graph.to_onnx_stripped()?;
        let inner = self.driver().build(&bytes, &spec, &cast, host).map_err(Error::of(self.id()))?;
        check_info(self, inner.info(), &graph)?;
        let manifest = EngineManifest {
            provider: self.id().to_string(),
            build_id: self.manifest().build_id.clone(),
            runtime: (self.runtime().name.clone(), self.runtime().version.clone()),
            device_class: options.device.class.clone(),
            topology,
            model: model.name().to_string(),
            spec,
            info: inner.info().clone(),
            binding: model.binding()?,
            baked,
        };
        let engine = Engine {
            inner,
            provider: self.clone(),
            manifest,
            cached: false,
            seconds: started.elapsed().as_secs_f64(),
        };
        if options.cache != CachePolicy::Off {
            match engine.inner.serialize() {
                Ok(payload) => drop(cache.put(&key, &engine.manifest, &payload)),
                Err(e) => tracing::warn!("the engine was built but not cached: {e}"),
            }
        }
        Ok(engine)
    }

    /// SHA-256 over everything the engine depends on (design: topology, baked constants and weights, provider
    /// build, runtime version, device class, options; threads are chosen when loading).
    fn cache_key(&self, topology: &str, device: &Device, spec: &BuildSpec, baked: Option<&str>) -> String {
        let mut hash = Sha256::new();
        let runtime = self.runtime();
        let mut options: Vec<String> = spec.options.iter().map(|(k, v)| format!("{k}={v}")).collect();
        options.extend(spec.vram_budget.map(|bytes| format!("vram-budget={bytes}")));
        options.extend(spec.open_shapes.iter().map(|(input, shapes)| format!("{input}={shapes:?}")));
        let parts = [
            self.id(),
            &self.manifest().build_id,
            &runtime.name,
            &runtime.version,
            &device.class,
            topology,
            spec.precision.name(),
            baked.unwrap_or_default(),
        ];
        for part in parts.into_iter().chain(options.iter().map(String::as_str)) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

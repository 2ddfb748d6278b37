//! Building, storing and loading engines; sessions over them.

use crate::{
    Cache, EngineFile, EngineManifest, Error, Model, Provider, Result, Shapes, Tensors,
    tensor::{DeviceTensor, DeviceTensors, HostTensor, Outputs},
};
use sdrun_abi::{
    BuildSpec, Compatibility, DType, Device, Engine as DriverEngine, EngineInfo, Error as AbiError, Host,
    Input, MemoryReport, OpenShapes, Precision, RefitReport, Session as DriverSession, TensorView,
    TimingPlan, WeightSource, WeightSpec, WeightUpdate,
};
use sdrun_graph::Graph;
use sdrun_weights::{Cast, check_complete};
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    time::Instant,
};

/// Whether engines come from and go to the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePolicy {
    /// Take a cached engine, store a new one.
    #[default]
    Use,
    /// Build even if there is a cached engine, and replace it.
    Rebuild,
    /// Neither read nor write.
    Off,
    /// A cached engine or an error: no hidden build.
    Only,
}

/// How to build an engine.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// The device; see [`Provider::device`].
    pub device: Device,
    /// Arithmetic; an error where the device does not offer it.
    pub precision: Precision,
    /// Threads for CPU devices; `None` is all cores.
    pub threads: Option<usize>,
    /// Input shapes; every open dimension of the model has to be given here or in `open_shapes`.
    pub shapes: Shapes,
    /// Inputs whose dimensions stay open, where the provider can, with the shapes the engine is to serve; see
    /// [`BuildSpec::open_shapes`](sdrun_abi::BuildSpec::open_shapes). An empty list asks for any shape, which not every
    /// provider has.
    pub open_shapes: OpenShapes,
    /// Store the weights in the engine: faster to load, cannot be refitted.
    pub bake: bool,
    /// The most bytes of device memory for weights, where the device can do with fewer than there are.
    pub vram_budget: Option<u64>,
    /// Use of the cache.
    pub cache: CachePolicy,
    /// Provider options.
    pub options: BTreeMap<String, String>,
}

impl BuildOptions {
    /// Defaults for a device: fp32, all cores, no weights in the engine, cache in use.
    pub fn new(device: Device) -> Self {
        BuildOptions {
            device,
            precision: Precision::Fp32,
            threads: None,
            shapes: Shapes::new(),
            open_shapes: OpenShapes::new(),
            bake: false,
            vram_budget: None,
            cache: CachePolicy::Use,
            options: BTreeMap::new(),
        }
    }
    /// Sets the shape of an input.
    pub fn shape(mut self, input: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        self.shapes.insert(input.into(), shape.into());
        self
    }
    /// Sets the precision.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }
}

/// A compiled graph on a provider, with or without weights inside.
pub struct Engine {
    inner: Box<dyn DriverEngine>,
    provider: Provider,
    manifest: EngineManifest,
    cached: bool,
    seconds: f64,
}

impl Provider {
    /// Builds an engine for `model`, or takes it from the cache. With [`BuildOptions::bake`] the model's own weights go
    /// into it.
    pub fn build(&self, model: &Model, options: &BuildOptions, host: &dyn Host) -> Result<Engine> {
        self.build_with(model, &model.weights(), options, host)
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
        let spec = BuildSpec {
            device: options.device.id.clone(),
            precision: options.precision,
            threads: options.threads,
            bake: options.bake,
            open_shapes: options.open_shapes.clone(),
            vram_budget: options.vram_budget,
            options: options.options.clone(),
        };
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

    /// Loads an engine file. One that was made by another provider, or for a runtime or device that does not
    /// fit, is refused with the reason.
    pub fn load(
        &self,
        path: impl AsRef<Path>,
        device: &Device,
        threads: Option<usize>,
        host: &dyn Host,
    ) -> Result<Engine> {
        let started = Instant::now();
        let file = EngineFile::open(path.as_ref())?;
        let mut spec = file.manifest.spec.clone();
        spec.device = device.id.clone();
        spec.threads = threads;
        let mut engine = self.load_file(&file, &spec, host)?;
        engine.seconds = started.elapsed().as_secs_f64();
        Ok(engine)
    }

    fn load_file(&self, file: &EngineFile, spec: &BuildSpec, host: &dyn Host) -> Result<Engine> {
        let manifest = &file.manifest;
        let refuse = |why: String| {
            Error::of(self.id())(
                AbiError::precondition(format!("cannot load this engine: {why}"))
                    .with_hint("build it again on this machine"),
            )
        };
        if manifest.provider != self.id() {
            return Err(refuse(format!("it was made by the provider `{}`", manifest.provider)));
        }
        if manifest.build_id != self.manifest().build_id {
            return Err(refuse(format!(
                "it was made by another build of the provider ({}, this is {})",
                manifest.build_id,
                self.manifest().build_id
            )));
        }
        let verdict =
            self.driver().check(&manifest.info.compatibility, &spec.device).map_err(Error::of(self.id()))?;
        match verdict {
            Compatibility::Optimal => {}
            Compatibility::PreferRecompile(why) => {
                tracing::warn!("{}: a new build would be better: {why}", self.id())
            }
            Compatibility::Unsupported(why) => return Err(refuse(why)),
        }
        let inner = self.driver().load(file.payload(), spec, host).map_err(Error::of(self.id()))?;
        if inner.info() != &manifest.info {
            return Err(refuse("its manifest and its payload describe different engines".into()));
        }
        Ok(Engine { inner, provider: self.clone(), manifest: manifest.clone(), cached: true, seconds: 0.0 })
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

/// The weights of a graph as specifications.
pub(crate) fn weight_specs(graph: &Graph) -> Vec<WeightSpec> {
    graph
        .weights()
        .map(|(name, w)| WeightSpec { name: name.to_string(), dtype: w.dtype, shape: w.shape.clone() })
        .collect()
}

/// Whether `weights` has all weights of a graph in their shapes; types are converted. Reads no values.
///
/// Errors: those of [`check_complete`](sdrun_weights::check_complete).
pub fn check_weights(graph: &Graph, weights: &dyn WeightSource) -> Result<()> {
    let specs = weight_specs(graph);
    Ok(check_complete(&specs, &Cast::new(weights, &specs))?)
}

/// XXH3-128 over names and bytes of all weights, for engines that hold them.
fn fingerprint(specs: &[WeightSpec], weights: &dyn WeightSource) -> Result<String> {
    let mut names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    names.sort_unstable();
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for name in names {
        hash.update(name.as_bytes());
        hash.update(&[0]);
        hash.update(weights.get(name)?.data());
    }
    Ok(format!("{:032x}", hash.digest128()))
}

/// A provider's engine has to have the inputs, outputs and weights of the graph it was given.
fn check_info(provider: &Provider, info: &EngineInfo, graph: &Graph) -> Result<()> {
    let names = |ids: &[sdrun_graph::ValueId]| -> Vec<String> {
        ids.iter().map(|id| graph.value(*id).name.clone()).collect()
    };
    let told =
        |specs: &[sdrun_abi::TensorSpec]| -> Vec<String> { specs.iter().map(|s| s.name.clone()).collect() };
    if told(&info.inputs) != names(&graph.inputs) || told(&info.outputs) != names(&graph.outputs) {
        return Err(Error::of(provider.id())(AbiError::internal(
            "the engine's inputs and outputs are not those of the graph: the plugin breaks the ABI",
        )));
    }
    Ok(())
}

impl Engine {
    /// What it is.
    pub fn manifest(&self) -> &EngineManifest {
        &self.manifest
    }
    /// Inputs, outputs and the weights it needs.
    pub fn info(&self) -> &EngineInfo {
        self.inner.info()
    }
    /// The provider it runs on.
    pub fn provider(&self) -> &Provider {
        &self.provider
    }
    /// Whether it came out of a file instead of a build.
    pub fn was_loaded(&self) -> bool {
        self.cached
    }
    /// Seconds that building or loading took.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Writes it to a file, atomically. Returns the bytes of its payload.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<u64> {
        let payload = self.inner.serialize().map_err(Error::of(self.provider.id()))?;
        EngineFile::write(path.as_ref(), &self.manifest, &payload)?;
        Ok(payload.len() as u64)
    }

    /// An engine with these weights inside: loads faster, takes no others. Only where the provider can
    /// ([`Capabilities::bake`](sdrun_abi::Capabilities::bake)).
    pub fn bake(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Engine> {
        let started = Instant::now();
        let specs = &self.inner.info().weights;
        if specs.is_empty() {
            return Err(has_its_weights());
        }
        let cast = Cast::new(weights, specs);
        check_complete(specs, &cast)?;
        let baked = Some(fingerprint(specs, &cast)?);
        let inner = self.inner.bake(&cast, host).map_err(Error::of(self.provider.id()))?;
        let mut manifest = EngineManifest { info: inner.info().clone(), baked, ..self.manifest.clone() };
        manifest.spec.bake = true;
        Ok(Engine {
            inner,
            provider: self.provider.clone(),
            manifest,
            cached: false,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Gives it weights. Every weight of [`EngineInfo::weights`] must be there in its shape (types are
    /// converted); what is missing is listed, and no session is made.
    pub fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Session> {
        let started = Instant::now();
        let specs = &self.inner.info().weights;
        let cast = Cast::new(weights, specs);
        check_complete(specs, &cast)?;
        let inner = self.inner.session(&cast, host).map_err(Error::of(self.provider.id()))?;
        Ok(Session {
            inner,
            versions: versions(specs, weights),
            provider: self.provider.clone(),
            info: self.inner.info().clone(),
            outputs: Outputs::default(),
            seconds: started.elapsed().as_secs_f64(),
        })
    }
}

fn has_its_weights() -> Error {
    AbiError::precondition("this engine has its weights baked in and takes no others")
        .with_hint("build it without `--bake`")
        .into()
}

/// What the weights of a session are, where their source tells.
fn versions(specs: &[WeightSpec], weights: &dyn WeightSource) -> HashMap<String, u128> {
    specs.iter().filter_map(|spec| Some((spec.name.clone(), weights.version(&spec.name)?))).collect()
}

/// An engine with weights, ready to run.
pub struct Session {
    inner: Box<dyn DriverSession>,
    /// [`WeightSource::version`] of the weights it has.
    versions: HashMap<String, u128>,
    provider: Provider,
    info: EngineInfo,
    outputs: Outputs,
    seconds: f64,
}

impl Session {
    /// Inputs, outputs, weights.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }
    /// Seconds that making the session took.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// One inference. `inputs` must name every input once, in its type and shape.
    pub fn run(&mut self, inputs: &Tensors, host: &dyn Host) -> Result<Tensors> {
        self.run_in_place(inputs, host)?;
        let tensors = std::mem::take(&mut self.outputs.tensors);
        Ok(self.info.outputs.iter().map(|s| s.name.clone()).zip(tensors).collect())
    }

    /// One inference whose outputs stay in the session, in the order of [`EngineInfo::outputs`], until the next
    /// run: the form for loops, since no memory is allocated.
    pub fn run_in_place(&mut self, inputs: &Tensors, host: &dyn Host) -> Result<&[HostTensor]> {
        let views = views(&self.info, inputs)?;
        self.inner.run(&views, &mut self.outputs, host).map_err(Error::of(self.provider.id()))?;
        if self.outputs.tensors.len() != self.info.outputs.len() {
            return Err(Error::of(self.provider.id())(AbiError::internal(format!(
                "gave {} outputs; the graph has {}",
                self.outputs.tensors.len(),
                self.info.outputs.len()
            ))));
        }
        Ok(&self.outputs.tensors)
    }

    /// One inference with some inputs in main memory and others on the device, after which the outputs named in `keep` stay
    /// there: what one model gives another, as a ControlNet its residuals to the denoiser, is then never copied. The other
    /// outputs come back as from [`run`](Session::run). Every input is named once, in one of the two.
    ///
    /// Errors: `Unimplemented` where the device does not have
    /// [`Capabilities::device_tensors`](sdrun_abi::Capabilities::device_tensors); `InvalidArgument` for a tensor that
    /// lies elsewhere.
    pub fn run_on_device(
        &mut self,
        inputs: &Tensors,
        on_device: &DeviceTensors,
        keep: &[&str],
        host: &dyn Host,
    ) -> Result<(Tensors, DeviceTensors)> {
        let names = || inputs.keys().chain(on_device.keys()).map(String::as_str);
        let mut given = Vec::with_capacity(self.info.inputs.len());
        for spec in &self.info.inputs {
            let input = match (inputs.get(&spec.name), on_device.get(&spec.name)) {
                (Some(tensor), None) => Input::Host(tensor.view()),
                (None, Some(tensor)) => Input::Device(tensor.inner.as_ref()),
                _ => return Err(wrong_names(&self.info, names()).into()),
            };
            check_input(spec, input.spec())?;
            given.push(input);
        }
        if names().count() != given.len() {
            return Err(wrong_names(&self.info, names()).into());
        }
        let outputs = || self.info.outputs.iter().map(|output| output.name.as_str());
        if let Some(unknown) = keep.iter().find(|name| !outputs().any(|output| output == **name)) {
            return Err(AbiError::invalid(format!(
                "there is no output {unknown:?} to keep; the engine has [{}]",
                outputs().collect::<Vec<_>>().join(", ")
            ))
            .into());
        }
        let stays: Vec<bool> = outputs().map(|name| keep.contains(&name)).collect();
        let mut sink = Outputs::default();
        let kept = self
            .inner
            .run_on_device(&given, &stays, &mut sink, host)
            .map_err(Error::of(self.provider.id()))?;
        let wanted = stays.iter().filter(|stays| **stays).count();
        if kept.len() != wanted || sink.tensors.len() != stays.len() - wanted {
            return Err(Error::of(self.provider.id())(AbiError::internal(format!(
                "gave {} outputs and kept {}; the graph has {}, of which {wanted} were to stay",
                sink.tensors.len(),
                kept.len(),
                stays.len()
            ))));
        }
        let (mut tensors, mut kept) = (sink.tensors.into_iter(), kept.into_iter());
        let (mut brought, mut left) = (Tensors::new(), DeviceTensors::new());
        for (output, stays) in self.info.outputs.iter().zip(stays) {
            let name = output.name.clone();
            match stays {
                true => left.extend(kept.next().map(|tensor| {
                    (name, DeviceTensor { inner: tensor.into(), provider: self.provider.clone() })
                })),
                false => brought.extend(tensors.next().map(|tensor| (name, tensor))),
            }
        }
        Ok((brought, left))
    }

    /// Runs again and again and tells how long each counted run took, in milliseconds: measured beside the
    /// provider, in its worker where it has one.
    pub fn time(&mut self, inputs: &Tensors, plan: &TimingPlan, host: &dyn Host) -> Result<Vec<f64>> {
        let views = views(&self.info, inputs)?;
        self.inner.time(&views, plan, host).map_err(Error::of(self.provider.id()))
    }

    /// Gives it other weights: a checkpoint, adapters, both ([`WeightStack`](sdrun_weights::WeightStack)), or any other
    /// source that has them all. Only those are handed to the provider that differ from what it has, as far as both
    /// sources tell by [`WeightSource::version`]. On an error the former weights still work.
    pub fn refit(&mut self, weights: &dyn WeightSource, host: &dyn Host) -> Result<RefitReport> {
        let specs = &self.info.weights;
        if specs.is_empty() {
            return Err(has_its_weights());
        }
        let cast = Cast::new(weights, specs);
        check_complete(specs, &cast)?;
        let versions = versions(specs, weights);
        let same = |name: &str| versions.get(name).is_some_and(|new| self.versions.get(name) == Some(new));
        let changed: Vec<&str> = specs.iter().map(|w| w.name.as_str()).filter(|name| !same(name)).collect();
        if changed.is_empty() {
            return Ok(RefitReport { method: WeightUpdate::InPlace, tensors: 0, bytes: 0 });
        }
        let report = self.inner.refit(&changed, &cast, host).map_err(Error::of(self.provider.id()))?;
        self.versions = versions;
        Ok(report)
    }

    /// Memory the runtime uses for this session.
    pub fn memory(&self) -> Result<MemoryReport> {
        self.inner.memory().map_err(Error::of(self.provider.id()))
    }
}

/// The inputs in the engine's order; an error where one is missing, unknown, or of another type or shape.
fn views<'t>(info: &EngineInfo, inputs: &'t Tensors) -> Result<Vec<TensorView<'t>>> {
    let names = || inputs.keys().map(String::as_str);
    let mut views = Vec::with_capacity(info.inputs.len());
    for spec in &info.inputs {
        let tensor = inputs.get(&spec.name).ok_or_else(|| wrong_names(info, names()))?;
        check_input(spec, (tensor.dtype(), tensor.shape()))?;
        views.push(tensor.view());
    }
    if inputs.len() != views.len() {
        return Err(wrong_names(info, names()).into());
    }
    Ok(views)
}

fn wrong_names<'n>(info: &EngineInfo, given: impl Iterator<Item = &'n str>) -> AbiError {
    let want: Vec<&str> = info.inputs.iter().map(|s| s.name.as_str()).collect();
    let got: Vec<&str> = given.collect();
    AbiError::invalid(format!(
        "the inputs given are [{}]; the engine takes [{}]",
        got.join(", "),
        want.join(", ")
    ))
}

fn check_input(spec: &sdrun_abi::TensorSpec, (dtype, shape): (DType, &[usize])) -> Result<()> {
    let fits = spec.shape.len() == shape.len()
        && spec.shape.iter().zip(shape).all(|(want, got)| want.is_none_or(|w| w == *got));
    if spec.dtype == dtype && fits {
        return Ok(());
    }
    let dims: Vec<String> = spec.shape.iter().map(|d| d.map_or("?".into(), |d| d.to_string())).collect();
    Err(AbiError::invalid(format!(
        "input {:?} is {dtype} {shape:?}; the engine takes {} [{}]",
        spec.name,
        spec.dtype,
        dims.join(", ")
    ))
    .with_hint("convert the tensor, or build the engine for this shape")
    .into())
}

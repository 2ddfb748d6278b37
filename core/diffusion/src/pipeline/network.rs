//! A network on an engine, ready to run.

use super::{
    Error, Event, LoadedNetwork, Origin, Part, Result,
    kept::{Kept, Loaded, NetworkKey, Opened, stamp},
};
use sdrun::{
    BuildOptions, HostTensor, Model, Provider, Registry, Shapes, Tensors, WeightFiles, Weights, Wishes,
    abi::{self, Capabilities, DType, Device, DeviceKind, ErrorCode, Host, OpenShapes, Precision},
    graph::Graph,
    memory,
    weights::WeightStack,
};
use std::{cell::Cell, sync::Arc, time::Instant};

/// How networks become engines.
pub struct Engines<'a> {
    /// The provider and device to use; `None` chooses the best for each network, by `wishes`.
    pub only: Option<(Provider, Device)>,
    /// Preferred providers, the device, and where providers run.
    pub wishes: Wishes,
    /// How to build for a device. The pipeline adds the shapes.
    pub options: &'a dyn Fn(Device) -> BuildOptions,
    /// What stays in memory between requests. `None` drops a network as soon as the request no longer needs it.
    pub kept: Option<Kept>,
}

impl<'a> Engines<'a> {
    /// Chooses the best provider for each network, and keeps networks and encoded prompts for further requests.
    pub fn new(options: &'a dyn Fn(Device) -> BuildOptions) -> Self {
        Engines { only: None, wishes: Wishes::new(), options, kept: Some(Kept::default()) }
    }
}

/// Shapes of a network's inputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct InputShapes {
    /// Inputs of one shape.
    pub(super) fixed: Shapes,
    /// Inputs that one session gets in several shapes.
    pub(super) open: OpenShapes,
}

impl InputShapes {
    /// Build options with these shapes.
    pub(super) fn options(&self, options: BuildOptions) -> BuildOptions {
        let mut options = options.shapes(self.fixed.clone());
        options.open_shapes = self.open.clone();
        options
    }
}

impl From<Shapes> for InputShapes {
    fn from(fixed: Shapes) -> Self {
        Self { fixed, ..Self::default() }
    }
}

/// What a network runs: the graph of a part, or one of those into which it is divided.
#[derive(Clone)]
pub(super) struct Piece<'a> {
    part: &'a Part,
    divided: Option<Arc<(String, Model)>>,
}

impl<'a> From<&'a Part> for Piece<'a> {
    fn from(part: &'a Part) -> Self {
        Piece { part, divided: None }
    }
}

impl<'a> Piece<'a> {
    /// A piece of `part` with this graph. `name` tells it from the part itself.
    pub(super) fn of(part: &'a Part, name: Option<&str>, graph: Graph) -> Self {
        let name = name.map_or(part.name.clone(), |name| format!("{} ({name})", part.name));
        Piece { part, divided: Some(Arc::new((name, part.model.with_graph(graph)))) }
    }

    /// Its name for people.
    pub(super) fn name(&self) -> &str {
        self.divided.as_ref().map_or(&self.part.name, |divided| &divided.0)
    }

    pub(super) fn model(&self) -> &Model {
        self.divided.as_ref().map_or(&self.part.model, |divided| &divided.1)
    }

    fn key(&self, shapes: InputShapes) -> NetworkKey {
        let Part { model, .. } = self.part;
        let piece = self.divided.as_ref().map(|divided| divided.0.clone());
        NetworkKey { model: (model.name().into(), stamp(model.path())), piece, shapes }
    }
}

/// Opens networks, and tells what happens.
pub(super) struct Opener<'a> {
    pub(super) registry: &'a Registry,
    pub(super) engines: &'a Engines<'a>,
    pub(super) host: &'a dyn Host,
    pub(super) tell: &'a dyn Fn(Event<'_>),
    /// Sides of the autoencoder's tiles in pixels, if the user wants tiles.
    pub(super) tile: Option<usize>,
    /// Seconds that networks have run since this was last taken.
    pub(super) running: Cell<f64>,
}

/// A loaded network.
pub(super) struct Network<'a> {
    open: &'a Opener<'a>,
    piece: Piece<'a>,
    weights: WeightFiles,
    key: NetworkKey,
    /// `None` while it is dropped or loaded again, and after a failed run.
    loaded: Option<Loaded>,
    /// Names of the outputs, in the session's order.
    outputs: Vec<String>,
}

impl<'a> Opener<'a> {
    /// Reports an event.
    pub(super) fn tell(&self, event: Event<'_>) {
        (self.tell)(event);
    }

    /// Fails if the user has cancelled.
    pub(super) fn check(&self) -> Result<()> {
        if self.host.cancelled() {
            return Err(abi::Error::new(ErrorCode::Cancelled, "cancelled by the user").into());
        }
        Ok(())
    }

    /// Builds or loads an engine for a part, or a piece of one, with inputs of `shapes`, and gives it its weights.
    pub(super) fn network(
        &'a self,
        piece: impl Into<Piece<'a>>,
        shapes: impl Into<InputShapes>,
    ) -> Result<Network<'a>> {
        let piece = piece.into();
        let weights = piece.part.weights.clone();
        self.network_with(piece, weights, shapes.into())
    }

    /// The same with other weights.
    pub(super) fn network_with(
        &'a self,
        piece: impl Into<Piece<'a>>,
        weights: WeightFiles,
        shapes: InputShapes,
    ) -> Result<Network<'a>> {
        self.check()?;
        let piece = piece.into();
        let key = piece.key(shapes);
        let kept = self.engines.kept.as_ref();
        let again = kept.and_then(|kept| self.again(kept, &key, &piece, &weights));
        let loaded = match again {
            Some(loaded) => loaded,
            None => self.session(&piece, &weights, &key.shapes, None)?,
        };
        let outputs = loaded.session.info().outputs.iter().map(|output| output.name.clone()).collect();
        Ok(Network { open: self, piece, weights, key, loaded: Some(loaded), outputs })
    }

    /// A kept network with these weights. `None` if none can get them; loading a new one then says why.
    fn again(&self, kept: &Kept, key: &NetworkKey, piece: &Piece<'_>, files: &WeightFiles) -> Option<Loaded> {
        let started = Instant::now();
        let mut loaded = kept.take(key, files)?;
        let refitted = !loaded.weights.is(files);
        if refitted {
            self.tell(Event::Loading { part: piece.name() });
            let Ok(stack) = self.stack(piece, files, Some(&loaded.weights)) else {
                kept.put(key.clone(), loaded);
                return None;
            };
            loaded.session.refit(&stack, self.host).ok()?;
            loaded.weights = Opened::new(files.clone(), stack);
        }
        let origin = if refitted { Origin::Refitted } else { Origin::Kept };
        self.tell_loaded(piece, &loaded, origin, started.elapsed().as_secs_f64());
        Some(loaded)
    }

    fn tell_loaded(&self, piece: &Piece<'_>, loaded: &Loaded, origin: Origin, seconds: f64) {
        let network = LoadedNetwork {
            part: piece.name().into(),
            provider: loaded.provider.id().into(),
            device: loaded.device.clone(),
            precision: loaded.precision,
            origin,
            seconds,
        };
        self.tell(Event::Loaded(&network));
    }

    /// The weights of the whole part. Those of a session that has the same base share it, so that a refit changes only what differs.
    fn stack(
        &self,
        piece: &Piece<'_>,
        files: &WeightFiles,
        open: Option<&Opened>,
    ) -> sdrun::Result<WeightStack> {
        let weights = match open.filter(|open| open.has_base(files)) {
            Some(open) => {
                let base = Weights { stack: open.stack.pristine(), model: None, base: String::new() };
                files.change(base, self.host)?
            }
            None => files.of_model(&piece.part.model, self.registry.paths(), self.host)?,
        };
        Ok(weights.stack)
    }

    /// A new session in `precision`, or the user's.
    fn session(
        &self,
        piece: &Piece<'_>,
        files: &WeightFiles,
        shapes: &InputShapes,
        precision: Option<Precision>,
    ) -> Result<Loaded> {
        let name = Error::of(piece.name());
        self.tell(Event::Loading { part: piece.name() });
        let stack = self.stack(piece, files, None).map_err(&name)?;
        let options = |device| {
            let options = shapes.options((self.engines.options)(device));
            precision.map_or(options.clone(), |precision| options.precision(precision))
        };
        self.make_room(piece.model(), &options);
        let attempt = |provider: &Provider, options: &BuildOptions| {
            let load = || -> sdrun::Result<_> {
                let engine = provider.build_with(piece.model(), &stack, options, self.host)?;
                let session = engine.session(&stack, self.host)?;
                Ok((engine, session, options.precision))
            };
            loop {
                match load() {
                    // Networks that nobody uses leave before another provider is tried.
                    Err(error) if error.code() == ErrorCode::ResourceExhausted && self.drop_kept() => {}
                    done => break done,
                }
            }
        };
        let (engine, session, precision) = match &self.engines.only {
            Some((provider, device)) => attempt(provider, &options(device.clone())),
            None => self
                .registry
                .choose(piece.model(), &self.engines.wishes, &options, self.host)
                .try_each(|candidate| attempt(&candidate.provider, &candidate.options)),
        }
        .map_err(&name)?;
        let origin = if engine.was_loaded() { Origin::Cached } else { Origin::Built };
        let seconds = engine.seconds() + session.seconds();
        let loaded = Loaded {
            session,
            weights: Opened::new(files.clone(), stack),
            precision,
            provider: engine.provider().clone(),
            device: engine.device().name.clone(),
        };
        self.tell_loaded(piece, &loaded, origin, seconds);
        Ok(loaded)
    }

    /// Drops kept networks until the main memory that `model` needs is free. On other devices the failed allocation tells.
    fn make_room(&self, model: &Model, options: &dyn Fn(Device) -> BuildOptions) {
        if self.engines.kept.as_ref().is_none_or(Kept::is_empty) {
            return;
        }
        let main_memory = Device::new("cpu", "CPU", DeviceKind::Cpu, "");
        // Which provider will run it is not known yet. This is the most that any needs.
        let mut offered = Capabilities::new(Vec::new(), Vec::new());
        offered.wide_activations = true;
        let Ok(estimate) = memory::estimate(model, &options(main_memory), &offered) else { return };
        let needed = [estimate.host_weights, estimate.host_activations].into_iter().flatten().sum::<u64>();
        while memory::available().is_some_and(|free| free < needed) && self.drop_kept() {}
    }

    fn drop_kept(&self) -> bool {
        self.engines.kept.as_ref().is_some_and(Kept::drop_oldest)
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        if let (Some(kept), Some(loaded)) = (&self.open.engines.kept, self.loaded.take()) {
            kept.put(self.key.clone(), loaded);
        }
    }
}

impl Network<'_> {
    /// The shape of input `name`, which has only one.
    pub(super) fn shape(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.spec(name)?.shape.iter().map(|dim| dim.unwrap_or(1)).collect())
    }

    fn spec(&self, name: &str) -> Result<&abi::TensorSpec> {
        let inputs = self.loaded.as_ref().map_or(&[][..], |loaded| &loaded.session.info().inputs);
        inputs.iter().find(|input| input.name == name).ok_or_else(|| {
            let names: Vec<&str> = inputs.iter().map(|input| &*input.name).collect();
            let message = format!("its graph has no input `{name}`, only {}", names.join(", "));
            Error::of(self.piece.name())(abi::Error::invalid(message).into())
        })
    }

    /// A tensor for input `name`, which has only one shape, converted to its type.
    pub(super) fn input(&self, name: &str, values: &[f32]) -> Result<HostTensor> {
        self.input_of(name, self.shape(name)?, values)
    }

    /// A tensor of this shape for input `name`, converted to its type.
    pub(super) fn input_of(&self, name: &str, shape: Vec<usize>, values: &[f32]) -> Result<HostTensor> {
        tensor(self.spec(name)?.dtype, shape, values).map_err(Error::of(self.piece.name()))
    }

    /// Whether it has an input `name`.
    pub(super) fn takes(&self, name: &str) -> bool {
        self.spec(name).is_ok()
    }

    /// Runs the network and returns the named outputs as f32.
    ///
    /// Values that are not finite would make a black picture. In a precision below fp32 they may come from an overflow, so the
    /// network is loaded again in fp32 and stays so.
    pub(super) fn run(&mut self, inputs: &Tensors, outputs: &[&str]) -> Result<Vec<Vec<f32>>> {
        self.open.check()?;
        let Network { open, piece, weights, key, loaded, outputs: names } = &mut *self;
        let piece = piece.clone();
        let name = Error::of(piece.name());
        let Some(Loaded { session, precision, .. }) = loaded else {
            return Err(name(abi::Error::internal("it is not loaded").into()));
        };
        let started = Instant::now();
        let ran = session.run_in_place(inputs, open.host);
        open.running.set(open.running.get() + started.elapsed().as_secs_f64());
        let error = match ran {
            Ok(tensors) => {
                let find = |wanted: &&str| {
                    let found = names.iter().zip(tensors).find(|(name, _)| name == wanted);
                    let values = found.and_then(|(_, tensor)| f32s(tensor));
                    values.ok_or_else(|| {
                        let names = names.join(", ");
                        let message = format!("its graph has no float output `{wanted}`, only {names}");
                        name(abi::Error::invalid(message).into())
                    })
                };
                return outputs.iter().map(find).collect();
            }
            Err(error) => error,
        };
        if error.code() != ErrorCode::OutOfRange || *precision == Precision::Fp32 {
            if error.code() != ErrorCode::Cancelled {
                // A later request must not get it.
                *loaded = None;
            }
            return Err(name(error));
        }
        open.tell(Event::Widened { part: piece.name(), from: *precision });
        // The memory of the narrow one may be needed.
        *loaded = None;
        *loaded = Some(open.session(&piece, weights, &key.shapes, Some(Precision::Fp32))?);
        self.run(inputs, outputs)
    }

    /// Runs the network with these inputs and returns its first output.
    pub(super) fn run_one(&mut self, inputs: &[(&str, &[f32])]) -> Result<Vec<f32>> {
        let inputs: Tensors = inputs
            .iter()
            .map(|(name, values)| Ok((name.to_string(), self.input(name, values)?)))
            .collect::<Result<_>>()?;
        let first = self.outputs.first().cloned().unwrap_or_default();
        Ok(self.run(&inputs, &[&first])?.remove(0))
    }

    /// Names of the outputs.
    pub(super) fn outputs(&self) -> &[String] {
        &self.outputs
    }

    /// Names and shapes of the outputs, if the engine knows them.
    pub(super) fn output_shapes(&self) -> Option<Vec<(String, Vec<usize>)>> {
        let shape = |output: &abi::TensorSpec| {
            let shape: Option<Vec<usize>> = output.shape.iter().copied().collect();
            Some((output.name.clone(), shape?))
        };
        self.loaded.as_ref()?.session.info().outputs.iter().map(shape).collect()
    }
}

/// A tensor of these values, converted to its type.
pub(super) fn tensor(dtype: DType, shape: Vec<usize>, values: &[f32]) -> sdrun::Result<HostTensor> {
    match dtype {
        DType::F32 => HostTensor::from_f32(shape, values),
        // Graphs whose timestep is an integer get the nearest.
        DType::I64 => {
            HostTensor::from_i64(shape, &values.iter().map(|v| v.round() as i64).collect::<Vec<_>>())
        }
        dtype => HostTensor::from_f64(dtype, shape, values.iter().map(|v| f64::from(*v))),
    }
}

/// A tensor's values, if they are floats.
fn f32s(tensor: &HostTensor) -> Option<Vec<f32>> {
    match tensor.dtype() {
        DType::F32 => {
            let words = tensor.bytes().as_chunks::<4>().0;
            Some(words.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
        }
        _ => Some(tensor.values()?.map(|value| value as f32).collect()),
    }
}

//! A network on an engine, ready to run.

use super::{Error, Event, Part, Result};
use sdrun::{
    BuildOptions, HostTensor, Provider, Registry, Session, Shapes, Tensors, Wishes,
    abi::{self, DType, Device, Host},
};

/// How networks become engines.
pub struct Engines<'a> {
    /// The provider and device to use; `None` chooses the best for each network, by `wishes`.
    pub only: Option<(Provider, Device)>,
    /// Preferred providers, the device, and where providers run.
    pub wishes: Wishes,
    /// How to build for a device. The pipeline adds the shapes.
    pub options: &'a dyn Fn(Device) -> BuildOptions,
}

/// Opens networks.
pub(super) struct Opener<'a> {
    pub(super) registry: &'a Registry,
    pub(super) engines: &'a Engines<'a>,
    pub(super) host: &'a dyn Host,
}

/// A loaded network.
pub(super) struct Network {
    part: String,
    session: Session,
    /// Names of the outputs, in the session's order.
    outputs: Vec<String>,
}

impl Opener<'_> {
    /// Builds or loads an engine for `part` with inputs of `shapes`, and gives it its weights.
    pub(super) fn network(
        &self,
        part: &Part,
        shapes: Shapes,
        event: &mut dyn FnMut(Event<'_>),
    ) -> Result<Network> {
        let name = Error::of(&part.name);
        let weights = part.weights.of_model(&part.model, self.registry.paths(), self.host).map_err(&name)?;
        let options = |device| (self.engines.options)(device).shapes(shapes.clone());
        let attempt = |provider: &Provider, options: &BuildOptions| {
            let engine = provider.build_with(&part.model, &weights.stack, options, self.host)?;
            let session = engine.session(&weights.stack, self.host)?;
            Ok((engine, session))
        };
        let (engine, session) = match &self.engines.only {
            Some((provider, device)) => attempt(provider, &options(device.clone())),
            None => self
                .registry
                .choose(&part.model, &self.engines.wishes, &options, self.host)
                .try_each(|candidate| attempt(&candidate.provider, &candidate.options)),
        }
        .map_err(&name)?;
        event(Event::Loaded {
            part: &part.name,
            provider: engine.provider().id(),
            device: &engine.device().name,
            built: !engine.was_loaded(),
            seconds: engine.seconds() + session.seconds(),
        });
        let outputs = session.info().outputs.iter().map(|output| output.name.clone()).collect();
        Ok(Network { part: part.name.clone(), session, outputs })
    }
}

impl Network {
    /// A tensor for input `name`, converted to its type.
    pub(super) fn input(&self, name: &str, values: &[f32]) -> Result<HostTensor> {
        let inputs = &self.session.info().inputs;
        let spec = inputs.iter().find(|input| input.name == name).ok_or_else(|| {
            let names: Vec<&str> = inputs.iter().map(|input| &*input.name).collect();
            let message = format!("its graph has no input `{name}`, only {}", names.join(", "));
            Error::of(&self.part)(abi::Error::invalid(message).into())
        })?;
        let shape: Vec<usize> = spec.shape.iter().map(|dim| dim.unwrap_or(1)).collect();
        let tensor = match spec.dtype {
            DType::F32 => HostTensor::from_f32(shape, values),
            // Graphs whose timestep is an integer get the nearest.
            DType::I64 => {
                HostTensor::from_i64(shape, &values.iter().map(|v| v.round() as i64).collect::<Vec<_>>())
            }
            dtype => {
                let values: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
                HostTensor::from_f64(dtype, shape, &values)
            }
        };
        tensor.map_err(Error::of(&self.part))
    }

    /// Runs the network and returns the named outputs as f32.
    pub(super) fn run(
        &mut self,
        inputs: &Tensors,
        outputs: &[&str],
        host: &dyn Host,
    ) -> Result<Vec<Vec<f32>>> {
        let Network { part, session, outputs: names } = self;
        let tensors = session.run_in_place(inputs, host).map_err(Error::of(part))?;
        let find = |wanted: &&str| {
            let found = names.iter().zip(tensors).find(|(name, _)| name == wanted);
            let values = found.and_then(|(_, tensor)| f32s(tensor));
            values.ok_or_else(|| {
                let message = format!("its graph has no float output `{wanted}`, only {}", names.join(", "));
                Error::of(part)(abi::Error::invalid(message).into())
            })
        };
        outputs.iter().map(find).collect()
    }

    /// Runs the network with these inputs and returns its first output.
    pub(super) fn run_one(&mut self, inputs: &[(&str, &[f32])], host: &dyn Host) -> Result<Vec<f32>> {
        let inputs: Tensors = inputs
            .iter()
            .map(|(name, values)| Ok((name.to_string(), self.input(name, values)?)))
            .collect::<Result<_>>()?;
        let first = self.outputs.first().cloned().unwrap_or_default();
        Ok(self.run(&inputs, &[&first], host)?.remove(0))
    }

    /// Names of the outputs.
    pub(super) fn outputs(&self) -> &[String] {
        &self.outputs
    }
}

/// A tensor's values, if they are floats.
fn f32s(tensor: &HostTensor) -> Option<Vec<f32>> {
    match tensor.dtype() {
        DType::F32 => {
            let words = tensor.bytes().as_chunks::<4>().0;
            Some(words.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
        }
        _ => Some(tensor.to_f64()?.into_iter().map(|value| value as f32).collect()),
    }
}

//! What a request will load and how much memory that needs, known before the work starts.

use super::{
    Engines, Parts, Resolved, Result, Upscale,
    autoencoder::whole_or_tile,
    control,
    denoiser::layouts,
    divided::{EarlyPiece, Pieces, pieces},
    encoder::{self, Conditions, hidden_output, layer_of, pooled_output},
    network::{InputShapes, Piece},
    parts::TextEncoder,
    reference,
    words::{Ids, divided},
};
use crate::{
    family::Encoder,
    text::{chunks, encode::States},
};
use sdrun::{
    BuildOptions, Provider, Registry, Shapes,
    abi::{Device, Host, MemoryEstimate, Precision},
    graph::Graph,
    memory,
};
use serde::Serialize;

/// What a request will load, in order.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// The family's name for people.
    pub family: &'static str,
    /// Parts of the work. Their networks leave the memory before the next part begins.
    pub phases: Vec<Phase>,
    /// Resident memory of this process when the plan was made, in bytes: graphs, vocabularies, runtimes, networks that it keeps. `None` if
    /// the system does not report it.
    pub own: Option<u64>,
}

/// A part of the work.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Phase {
    /// What happens.
    pub what: &'static str,
    /// The networks that are in memory together.
    pub networks: Vec<Planned>,
}

/// A network of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Planned {
    /// The network's name, as in a diffusers folder.
    pub part: String,
    /// The provider that will run it.
    pub provider: String,
    /// The name of its device.
    pub device: String,
    /// The precision of its engine.
    pub precision: Precision,
    /// Why this provider and device.
    pub why: String,
    /// Whether there is an engine for it. Otherwise one is built.
    pub has_engine: bool,
    /// Whether loading compiles, even with an engine.
    pub session_compiles: bool,
    /// The memory that it needs at least. The runtime's own memory is not included.
    pub memory: MemoryEstimate,
    /// Tiles, if it works on tiles.
    pub tiles: Option<[usize; 2]>,
}

impl Phase {
    /// Bytes of main memory and of device memory that it needs at least.
    pub fn memory(&self) -> [u64; 2] {
        let sum = |of: fn(&MemoryEstimate) -> [Option<u64>; 2]| {
            let parts = self.networks.iter().flat_map(|network| of(&network.memory));
            parts.flatten().fold(0, u64::saturating_add)
        };
        [sum(|m| [m.host_weights, m.host_activations]), sum(|m| [m.device_weights, m.device_activations])]
    }
}

impl Plan {
    /// The most that a part of the work needs beside [`own`](Self::own): bytes of main memory and of device memory.
    pub fn peak(&self) -> [u64; 2] {
        let most = |at: usize| self.phases.iter().map(|phase| phase.memory()[at]).max().unwrap_or(0);
        [most(0), most(1)]
    }
}

/// Plans a request. Loads providers, but no weights.
///
/// # Errors
/// As [`generate`](super::generate) before its first picture, as far as they can be known without weights.
pub fn plan(
    registry: &Registry,
    parts: &Parts,
    request: &Resolved,
    engines: &Engines<'_>,
    host: &dyn Host,
) -> Result<Plan> {
    let planner = Planner { registry, engines, host, request };
    let mut phases = Vec::new();
    let conditions = planner.prompts(parts, request, &mut phases)?;
    let refiner = parts.refiner.as_deref().map(|refiner| (refiner, request.of_refiner(refiner)));
    let refined = match &refiner {
        Some((refiner, request)) => Some(planner.prompts(refiner, request, &mut phases)?),
        None => None,
    };
    let mut size = [request.width, request.height];
    let sees = parts.family.beside.has_picture();
    if request.start.is_some() || sees {
        phases.push(planner.autoencoder("encode the picture", parts, size, true)?);
    }
    for picture in &request.references {
        let size = reference::size(picture).map(|side| side as usize);
        phases.push(planner.autoencoder("encode a reference", parts, size, true)?);
    }
    phases.extend(planner.steps("draw", parts, request, &conditions, 0, size)?);
    if let Some(hires) = &request.hires {
        let by_picture = hires.upscale != Upscale::Latent;
        if by_picture {
            phases.push(planner.autoencoder("decode", parts, size, false)?);
        }
        if hires.upscale == Upscale::Model {
            phases.extend(planner.upscaler(parts, size)?);
        }
        size = [hires.width, hires.height];
        if by_picture || sees {
            phases.push(planner.autoencoder("encode the larger picture", parts, size, true)?);
        }
        phases.extend(planner.steps("draw over it", parts, request, &conditions, 1, size)?);
    }
    if let (Some((refiner, request)), Some(conditions)) = (&refiner, &refined) {
        let pass = usize::from(request.hires.is_some());
        phases.extend(planner.steps("refine", refiner, request, conditions, pass, size)?);
    }
    phases.push(planner.autoencoder("decode", parts, size, false)?);
    if request.upscale_repeats > 0 {
        let only = request
            .start
            .as_ref()
            .filter(|start| start.inpaint.as_ref().is_some_and(|i| i.only_masked.is_some()));
        let sides = only.map(|start| [start.picture.width() as usize, start.picture.height() as usize]);
        phases.extend(planner.upscaler(parts, sides.unwrap_or(size))?);
    }
    Ok(Plan { family: parts.family.title, phases, own: memory::resident("self") })
}

struct Planner<'a> {
    registry: &'a Registry,
    engines: &'a Engines<'a>,
    host: &'a dyn Host,
    request: &'a Resolved,
}

impl Planner<'_> {
    /// The text encoders, and conditions of the right shapes.
    fn prompts(&self, parts: &Parts, request: &Resolved, phases: &mut Vec<Phase>) -> Result<Conditions> {
        let (steps, texts) = encoder::steps(request, &request.passes());
        let mut encoded = Vec::new();
        for (encoder, found) in parts.family.encoders.iter().zip(&parts.encoders) {
            let Some(TextEncoder { part, tokenizer }) = found else {
                encoded.push(None);
                continue;
            };
            let ids = divided(&texts, tokenizer, encoder, parts, request)?.ids;
            let shapes = encoder::shapes(part, &ids);
            phases.push(Phase {
                what: "encode the prompts",
                networks: vec![self.network(part, shapes.clone().into())?],
            });
            let graph = part.model.bound_for(&shapes, &Default::default())?;
            let empty = |places: usize| states(&graph, encoder, request, places);
            let (states, sequences) = match ids {
                Ids::Chunks(all) => {
                    (all.iter().map(|one| empty(one.chunks.len() * chunks::LENGTH)).collect(), Vec::new())
                }
                Ids::Sequences(all) => (all.iter().map(|one| empty(one.ids.len())).collect(), all),
            };
            encoded.push(Some(encoder::Encoded { states, sequences }));
        }
        encoder::join(parts, request, steps, &texts, &encoded)
    }

    /// What runs once before the steps, then the denoiser with its ControlNets.
    fn steps(
        &self,
        what: &'static str,
        parts: &Parts,
        request: &Resolved,
        conditions: &Conditions,
        pass: usize,
        [width, height]: [usize; 2],
    ) -> Result<Vec<Phase>> {
        let shape = parts.family.latent.shape(width, height);
        let steps = conditions.steps.get(pass).map_or(&[][..], Vec::as_slice);
        let (alone, layout) = layouts(parts, request, conditions, steps, shape)?;
        let (mut phases, mut networks, mut residuals) = (Vec::new(), Vec::new(), Shapes::new());
        let denoiser = (&parts.denoiser, layout);
        for (part, layout) in parts.controls.iter().map(|part| (part, alone)).chain([denoiser]) {
            let (roles, shapes) = layout.inputs(part, &conditions.all, &residuals)?;
            let Pieces { early, main, shapes, outputs } = pieces(part, &roles, shapes)?;
            let mut between = 0;
            if let Some(early) = early {
                // What it computes stays in main memory while the rest runs.
                let prompts = conditions.all.len().div_ceil(layout.batch);
                let runs = if early.by_step { prompts * steps.len() } else { prompts };
                between = (early.bytes() * runs.min(early.most())) as u64;
                let EarlyPiece { piece, shapes, .. } = early;
                let networks = vec![self.network(piece, shapes)?];
                phases.push(Phase { what: "prepare the steps", networks });
            }
            let shapes_of = |(name, shape): (String, _)| Some((control::residual(&name), shape?));
            residuals.extend(outputs.into_iter().filter_map(shapes_of));
            let mut network = self.network(main, shapes)?;
            if between > 0 {
                let host = &mut network.memory.host_activations;
                *host = Some(host.unwrap_or(0).saturating_add(between));
            }
            networks.push(network);
        }
        phases.push(Phase { what, networks });
        Ok(phases)
    }

    /// One half of the autoencoder.
    fn autoencoder(
        &self,
        what: &'static str,
        parts: &Parts,
        [width, height]: [usize; 2],
        encodes: bool,
    ) -> Result<Phase> {
        let latent = &parts.family.latent;
        let [channels, rows, columns] = latent.shape(width, height);
        let (part, input, channels, scale) = match encodes {
            true => (parts.encoder()?, "sample", 3, latent.factor),
            false => (&parts.vae_decoder, "latent_sample", channels, 1),
        };
        let load = |[rows, columns]: [usize; 2]| {
            let shape = vec![1, channels, rows * scale, columns * scale];
            self.network(part, Shapes::from([(input.into(), shape)]).into())
        };
        let (mut network, tile) = whole_or_tile([rows, columns], self.request.tile, latent.factor, load)?;
        network.tiles = (tile != [rows, columns]).then_some(tile.map(|side| side * latent.factor));
        Ok(Phase { what, networks: vec![network] })
    }

    /// The upscaler, for the first time that it enlarges a picture.
    fn upscaler(&self, parts: &Parts, size: [usize; 2]) -> Result<Option<Phase>> {
        let Some(upscaler) = &parts.upscaler else { return Ok(None) };
        let [height, width] = upscaler.tile(size)?;
        let shapes = Shapes::from([("image".into(), vec![1, 3, height, width])]);
        let mut network = self.network(&upscaler.part, shapes.into())?;
        network.tiles = ([width, height] != size).then_some([height, width]);
        Ok(Some(Phase { what: "enlarge", networks: vec![network] }))
    }

    fn network<'p>(&self, piece: impl Into<Piece<'p>>, shapes: InputShapes) -> Result<Planned> {
        let piece = piece.into();
        let model = piece.model();
        let options = |device: Device| shapes.options((self.engines.options)(device));
        let planned = |provider: &Provider, options: &BuildOptions, why: String, session_compiles, memory| {
            Ok(Planned {
                part: piece.name().into(),
                provider: provider.id().into(),
                device: options.device.name.clone(),
                precision: options.precision,
                why,
                has_engine: provider.has_engine(model, options)?,
                session_compiles,
                memory,
                tiles: None,
            })
        };
        let found = match &self.engines.only {
            Some((provider, device)) => {
                let options = options(device.clone());
                provider.capabilities(device).and_then(|offered| {
                    let memory = provider.memory(model, &options, &offered)?;
                    planned(provider, &options, "as you asked".into(), offered.session_compiles, memory)
                })
            }
            None => {
                self.registry.choose(model, &self.engines.wishes, &options, self.host).try_each(|found| {
                    let (why, compiles) = (found.why.to_string(), found.session_compiles);
                    planned(&found.provider, &found.options, why, compiles, found.memory.clone())
                })
            }
        };
        found.map_err(super::Error::of(piece.name()))
    }
}

/// States of the right size without values.
fn states(graph: &Graph, encoder: &Encoder, request: &Resolved, places: usize) -> States {
    let names: Vec<String> = graph.outputs.iter().map(|id| graph.value(*id).name.clone()).collect();
    let width = |name: Option<String>| {
        let value =
            graph.outputs.iter().map(|id| graph.value(*id)).find(|value| Some(&value.name) == name.as_ref());
        value.and_then(|value| value.known_shape()).and_then(|shape| shape.last().copied()).unwrap_or(0)
    };
    let hidden = width(hidden_output(&names, layer_of(encoder, request), encoder.states));
    let pooled = width(pooled_output(&names, encoder).map(str::to_string));
    States { hidden: vec![0.0; places * hidden], places, pooled: vec![0.0; pooled] }
}

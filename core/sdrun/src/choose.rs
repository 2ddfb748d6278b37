//! Ranks the providers and devices that can run a model on this machine, and says why each other one cannot.

use crate::{
    BuildOptions, Engine, Error, Isolation, Model, Provider, Registry, Result, Shapes, engine::check_options,
    measurements::Measurements, memory, worker::WorkerProvider,
};
use sdrun_abi::{
    Capabilities, Device, DeviceKind, Error as AbiError, ErrorCode, Hint, Host, LogLevel, MemoryEstimate,
    OpenShapes, Precision, Provide, WeightSource,
};
use sdrun_graph::{Footprint, Graph};
use serde::Serialize;
use std::{
    cell::OnceCell,
    cmp::Reverse,
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// What a user wants, in addition to the build options.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Wishes {
    /// Ids of preferred providers, best first. They precede those of [`Discovery::order`](crate::Discovery::order).
    pub order: Vec<String>,
    /// Only devices with this id, index, or part of the name.
    pub device: Option<String>,
    /// Also accept devices that are not in this machine, to build engines for them.
    pub absent_devices: bool,
    /// Where providers run.
    pub isolation: Isolation,
    /// What earlier choices have loaded.
    loaded: Loaded,
}

impl Wishes {
    /// No preferences.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same wishes with other instances of the providers. Clones share theirs: a provider in a worker is started once for all models
    /// of a pipeline, and does one thing at a time.
    pub fn with_own_providers(self) -> Self {
        Wishes { loaded: Loaded::default(), ..self }
    }
}

/// Loaded providers, by id.
#[derive(Clone, Debug, Default)]
struct Loaded(Arc<Mutex<BTreeMap<String, Provider>>>);

impl Loaded {
    /// The provider, loaded now if it is not, or if its worker has ended.
    fn get(&self, id: &str, load: impl FnOnce() -> Result<Provider>) -> Result<Provider> {
        let mut loaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = |provider: &Provider| provider.worker().is_some_and(WorkerProvider::has_ended);
        match loaded.get(id).filter(|provider| !ended(provider)) {
            Some(provider) => Ok(provider.clone()),
            None => {
                let provider = load()?;
                loaded.insert(id.to_string(), provider.clone());
                Ok(provider)
            }
        }
    }
}

/// Why a candidate has its rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Why {
    /// The user prefers its provider.
    Preferred {
        /// How many providers the user prefers over it.
        place: usize,
    },
    /// This model was measured on this device.
    Measured {
        /// Median run time in milliseconds.
        median_ms: f64,
        /// Whether it was measured with the same sizes, or with those of pictures of another size.
        same_sizes: bool,
    },
    /// Its provider's manifest gives it this priority on devices of this kind.
    Priority {
        /// The priority; higher is better.
        priority: i32,
        /// The kind of the device.
        device: DeviceKind,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Preferred { place: 0 } => f.write_str("preferred to all others"),
            Why::Preferred { place } => write!(f, "preferred, behind {place}"),
            Why::Measured { median_ms, same_sizes: true } => write!(f, "measured here: {median_ms:.3} ms"),
            Why::Measured { median_ms, .. } => write!(f, "measured here at another size: {median_ms:.3} ms"),
            Why::Priority { priority, device } => write!(f, "priority {priority} on a {}", device.name()),
        }
    }
}

/// A provider and a device that can run the model, as far as is known without building.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// The provider, loaded.
    pub provider: Provider,
    /// How to build for the device.
    pub options: BuildOptions,
    /// Why it has its rank.
    pub why: Why,
    /// Minimum memory of a session.
    pub memory: MemoryEstimate,
    /// Whether creating a session compiles. If so, a stored engine saves less time than it seems.
    pub session_compiles: bool,
    rank: Rank,
}

/// A provider, or one of its devices, that is not a candidate, or that was one and failed.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Rejected {
    /// Provider id.
    pub provider: String,
    /// Id of the device; `None` if the reason applies to all of them.
    pub device: Option<String>,
    /// The reason, with a hint if the user can do something about it.
    pub error: AbiError,
}

/// Larger is better: the user's order first, then measurements, then priorities. Ids break ties.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    place: Reverse<usize>,
    /// Median in nanoseconds.
    measured: Option<Reverse<u64>>,
    priority: i32,
    id: Reverse<String>,
    index: Reverse<usize>,
}

/// The candidates for a model, best first; made by [`Registry::choose`].
///
/// Providers are loaded only when needed. One that cannot beat the best candidate found so far is loaded only after that
/// candidate has been taken. `collect` loads all of them and returns the whole ranking.
pub struct Choice<'a> {
    registry: &'a Registry,
    model: &'a Model,
    wishes: Wishes,
    options: &'a dyn Fn(Device) -> BuildOptions,
    host: &'a dyn Host,
    measurements: Measurements,
    /// Topology of the model with open dimensions, once it is needed.
    model_topology: OnceCell<String>,
    /// Providers not yet loaded, with their best possible rank; the best is last.
    closed: Vec<(Rank, &'a Provide)>,
    open: Vec<Candidate>,
    rejected: Vec<Rejected>,
    bound: Option<Bound>,
}

/// The model bound to shapes.
struct Bound {
    shapes: (Shapes, OpenShapes),
    graph: Graph,
    topology: String,
    onnx: Vec<u8>,
    footprints: Vec<(Precision, Option<Footprint>)>,
}

impl Bound {
    /// The model bound to the shapes of `options`; reuses `known` if it has the same shapes.
    fn to<'b>(known: &'b mut Option<Bound>, model: &Model, options: &BuildOptions) -> Result<&'b mut Bound> {
        let shapes = (options.shapes.clone(), options.open_shapes.clone());
        let bound = match known.take() {
            Some(bound) if bound.shapes == shapes => bound,
            _ => {
                let graph = model.bound_for(&shapes.0, &shapes.1)?;
                let (topology, onnx) = (graph.topology_hash(), graph.to_onnx_stripped()?);
                Bound { shapes, graph, topology, onnx, footprints: Vec::new() }
            }
        };
        Ok(known.insert(bound))
    }

    fn memory(&mut self, options: &BuildOptions, offered: &Capabilities) -> Result<MemoryEstimate> {
        let known = self.footprints.iter().find(|(precision, _)| *precision == options.precision);
        let footprint = match known {
            Some((_, footprint)) => *footprint,
            None => {
                let new = sdrun_graph::footprint(&self.graph, options.precision)?;
                self.footprints.push((options.precision, new));
                new
            }
        };
        Ok(memory::of_footprint(footprint, options, offered))
    }
}

impl Registry {
    /// Ranks the candidates for running `model` here, best first, with the reason for each rank. `options` returns the build
    /// options for a device, with precision and shapes. `host` receives the log of providers while they load.
    ///
    /// A candidate's provider loads, has a device that matches the wishes, and supports the options. As far as it can tell
    /// without building, it also runs every node and has enough memory. The order is: the user's wishes, then measurements
    /// on this machine, then the manifests' priorities for the kind of device.
    pub fn choose<'a>(
        &'a self,
        model: &'a Model,
        wishes: &Wishes,
        options: &'a dyn Fn(Device) -> BuildOptions,
        host: &'a dyn Host,
    ) -> Choice<'a> {
        let mut wishes = wishes.clone();
        wishes.order.extend(self.order().iter().cloned());
        let measurements = Measurements::read(self.paths());
        let mut closed: Vec<(Rank, &Provide)> = self
            .usable()
            .into_iter()
            .map(|provide| {
                let measured = measurements.know(&provide.id).then_some(Reverse(0));
                let best = Rank {
                    place: place(&wishes, &provide.id),
                    measured,
                    priority: provide.highest_priority(),
                    id: Reverse(provide.id.clone()),
                    index: Reverse(0),
                };
                (best, provide)
            })
            .collect();
        closed.sort_by(|(a, _), (b, _)| a.cmp(b));
        Choice {
            registry: self,
            model,
            wishes,
            options,
            host,
            model_topology: OnceCell::new(),
            measurements,
            closed,
            open: Vec::new(),
            rejected: Vec::new(),
            bound: None,
        }
    }
}

fn place(wishes: &Wishes, id: &str) -> Reverse<usize> {
    Reverse(wishes.order.iter().position(|known| known == id).unwrap_or(usize::MAX))
}

impl Iterator for Choice<'_> {
    type Item = Candidate;

    fn next(&mut self) -> Option<Candidate> {
        loop {
            let best = (0..self.open.len()).max_by(|a, b| self.open[*a].rank.cmp(&self.open[*b].rank));
            let worth_loading = |closed: &(Rank, _)| best.is_none_or(|best| closed.0 > self.open[best].rank);
            if self.closed.last().is_some_and(worth_loading) {
                let (_, provide) = self.closed.pop()?;
                self.load(provide);
                continue;
            }
            return best.map(|best| self.open.swap_remove(best));
        }
    }
}

impl Choice<'_> {
    /// The rejected providers and devices so far, including candidates that failed.
    pub fn rejected(&self) -> &[Rejected] {
        &self.rejected
    }

    /// Calls `attempt` with one candidate after the other until one succeeds. If a candidate's provider or device turns out
    /// to be absent or not to support the model, it is logged as a warning and added to [`rejected`](Choice::rejected).
    ///
    /// # Errors
    /// The first error of another kind. If no candidate is left, an error that says why each one was not used.
    pub fn try_each<T>(&mut self, mut attempt: impl FnMut(&Candidate) -> Result<T>) -> Result<T> {
        while let Some(candidate) = self.next() {
            match attempt(&candidate) {
                Ok(done) => return Ok(done),
                Err(Error::Provider { provider, error }) if means_unusable(error.code) => {
                    let device = &candidate.options.device;
                    let text = format!("{provider} on {} is not used: {error}", device.name);
                    self.host.log(LogLevel::Warn, "sdrun", &text);
                    self.rejected.push(Rejected { provider, device: Some(device.id.clone()), error });
                }
                Err(error) => return Err(error),
            }
        }
        Err(self.exhausted())
    }

    /// Builds an engine on the best candidate that can do it, or takes it from the cache. If the options ask for baking,
    /// `weights` are stored in the engine; `None` takes the model's own. See [`try_each`](Choice::try_each) for errors.
    pub fn build(&mut self, weights: Option<&dyn WeightSource>) -> Result<Engine> {
        let (model, host) = (self.model, self.host);
        self.try_each(|candidate| match weights {
            Some(weights) => candidate.provider.build_with(model, weights, &candidate.options, host),
            None => candidate.provider.build(model, &candidate.options, host),
        })
    }

    /// Loads a provider and sorts its devices into candidates and rejected ones.
    fn load(&mut self, provide: &Provide) {
        let reject = |device: Option<&Device>, error: Error| Rejected {
            provider: provide.id.clone(),
            device: device.map(|device| device.id.clone()),
            error: plain(error),
        };
        let open = || self.registry.open_with(&provide.id, &self.wishes.isolation, self.host);
        let devices = self
            .wishes
            .loaded
            .get(&provide.id, open)
            .and_then(|provider| Ok((self.devices_of(&provider)?, provider)));
        let (devices, provider) = match devices {
            Ok(found) => found,
            Err(error) => return self.rejected.push(reject(None, error)),
        };
        for device in devices {
            match self.candidate(&provider, device.clone()) {
                Ok(candidate) => self.open.push(candidate),
                Err(error) => self.rejected.push(reject(Some(&device), error)),
            }
        }
    }

    /// The devices of a provider that match the wishes.
    fn devices_of(&self, provider: &Provider) -> Result<Vec<Device>> {
        if let Some(which) = &self.wishes.device {
            return Ok(vec![match self.wishes.absent_devices {
                true => provider.device(Some(which))?,
                false => provider.present_device(Some(which))?,
            }]);
        }
        // If there is no present device, the error says why.
        let first = provider.present_device(None);
        let mut devices = provider.devices()?;
        devices.retain(|device| device.absent.is_none());
        if devices.is_empty() { first.map(|device| vec![device]) } else { Ok(devices) }
    }

    fn candidate(&mut self, provider: &Provider, device: Device) -> Result<Candidate> {
        let options = (self.options)(device);
        let offered = provider.capabilities(&options.device)?;
        check_options(provider.id(), &offered, &options)?;
        let bound = Bound::to(&mut self.bound, self.model, &options)?;
        let told = provider.assess_bound(&bound.onnx, self.model, &options)?;
        if let Some([first, rest @ ..]) = told.unsupported.as_deref() {
            let more =
                if rest.is_empty() { String::new() } else { format!(", and {} more nodes", rest.len()) };
            let error = AbiError::unsupported(format!(
                "cannot run {} `{}`: {}{more}",
                first.op, first.name, first.reason
            ));
            return Err(Error::of(provider.id())(error.with_hint(Hint::UseProvider(None))));
        }
        let memory = memory::refined(bound.memory(&options, &offered)?, &told);
        memory::check_room(&memory, &options.device, &offered).map_err(Error::of(provider.id()))?;
        let measured = self.measurements.median(
            &bound.topology,
            || self.model_topology.get_or_init(|| self.model.graph().topology_hash()).clone(),
            provider,
            &options.device,
            options.precision,
        );
        let rank = Rank {
            place: place(&self.wishes, provider.id()),
            measured: measured.map(|median| Reverse((median.ms * 1e6) as u64)),
            priority: provider.manifest().priority_on(options.device.kind),
            id: Reverse(provider.id().to_string()),
            index: Reverse(options.device.index),
        };
        let why = match (rank.place, measured) {
            (Reverse(place), _) if place != usize::MAX => Why::Preferred { place },
            (_, Some(median)) => Why::Measured { median_ms: median.ms, same_sizes: median.same_sizes },
            _ => Why::Priority { priority: rank.priority, device: options.device.kind },
        };
        let session_compiles = told.session_compiles.unwrap_or(offered.session_compiles);
        Ok(Candidate { provider: provider.clone(), options, why, memory, session_compiles, rank })
    }

    /// The error when no candidate is left.
    fn exhausted(&self) -> Error {
        let reason = |rejected: &Rejected| match &rejected.device {
            Some(device) => format!("{} on {device}: {}", rejected.provider, rejected.error),
            None => format!("{}: {}", rejected.provider, rejected.error),
        };
        let reasons: Vec<String> = self.rejected.iter().map(reason).collect();
        let list = if reasons.is_empty() { "none is installed".into() } else { reasons.join("; ") };
        let has = |code: ErrorCode| self.rejected.iter().any(|rejected| rejected.error.code == code);
        // Reasons that the user can act on precede a runtime that is just not installed.
        let code = [ErrorCode::ResourceExhausted, ErrorCode::Unimplemented, ErrorCode::InvalidArgument]
            .into_iter()
            .find(|code| has(*code))
            .unwrap_or(ErrorCode::FailedPrecondition);
        let hint = match code {
            ErrorCode::FailedPrecondition => Some(Hint::CheckInstallation),
            code => self.rejected.iter().find(|r| r.error.code == code).and_then(|r| r.error.hint.clone()),
        };
        let error = AbiError::new(code, format!("no provider works here for {} ({list})", self.model.name()));
        match hint {
            Some(hint) => error.with_hint(hint).into(),
            None => error.into(),
        }
    }
}

/// Whether an error of a provider means that another one should be tried.
fn means_unusable(code: ErrorCode) -> bool {
    use ErrorCode::*;
    matches!(code, Unimplemented | FailedPrecondition | NotFound | Unavailable)
}

/// The provider's error without its id, for lists that already show the id.
fn plain(error: Error) -> AbiError {
    match error {
        Error::Provider { error, .. } | Error::Core(error) => error,
        graph => {
            let plain = AbiError::new(graph.code(), graph.to_string());
            match graph.hint() {
                Some(hint) => plain.with_hint(hint),
                None => plain,
            }
        }
    }
}

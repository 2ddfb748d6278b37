//! A device under test: its provider in a worker, the time and the memory that are left.

use crate::{Check, Event, Options, State, Subject, checks, listener::Listener, networks, pictures};
use sdrun::{
    BuildOptions, CachePolicy, Isolation, Model, OwnedFolder, Paths, Provider, Registry, Result,
    abi::{Capabilities, Device, Error, ErrorCode, Host, Precision},
    graph::{OpenOptions, WeightsPolicy},
    memory,
    weights::{SyntheticWeights, builtin},
    worker::Limits,
};
use std::time::{Duration, Instant};

/// How long a call may go on after it was cancelled.
pub(crate) const CANCEL_LIMIT: Duration = Duration::from_secs(10);

/// Why a check did not pass.
#[derive(Debug)]
pub(crate) enum Problem {
    /// What it needs is not offered.
    NotOffered(String),
    /// There is no time or no memory for it.
    NotRun(String),
    /// The result is wrong.
    Wrong(String),
    /// An error, which is a failure unless it says that something is not supported or does not fit.
    Error(sdrun::Error),
}

impl From<sdrun::Error> for Problem {
    fn from(error: sdrun::Error) -> Self {
        Problem::Error(error)
    }
}

/// A built-in model whose weights are generated as they are read, without a file.
pub(crate) struct Synthetic {
    pub(crate) model: Model,
    pub(crate) weights: SyntheticWeights,
}

impl Synthetic {
    pub(crate) fn open(name: &str, paths: &Paths, host: &dyn Host) -> Result<Self> {
        let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..OpenOptions::default() };
        let model = Model::find(name, paths, &options, host)?;
        let unknown = || Error::internal(format!("there is no built-in model {name}"));
        let weights = builtin::find(name).ok_or_else(unknown)?.weights()?;
        Ok(Synthetic { model, weights })
    }

    /// Weights of the same kind with other values.
    pub(crate) fn other_weights(&self) -> SyntheticWeights {
        let tag = format!("{}/B", self.weights.tag());
        self.weights.clone().with_tag(tag)
    }

    /// The bytes of the weights in the graph's own types.
    pub(crate) fn bytes(&self) -> u64 {
        let weights = self.model.graph().weights();
        weights.filter_map(|(_, weight)| weight.dtype.bytes_of(&weight.shape)).map(|bytes| bytes as u64).sum()
    }
}

/// A device under test.
pub(crate) struct Rig<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) id: &'a str,
    pub(crate) device: Device,
    pub(crate) capabilities: Capabilities,
    pub(crate) listener: Listener<'a>,
    isolation: Isolation,
    threads: Option<usize>,
    until: Instant,
    provider: Option<Provider>,
}

impl<'a> Rig<'a> {
    pub(crate) fn new(
        registry: &'a Registry,
        id: &'a str,
        device: Device,
        options: &Options,
        until: Instant,
        host: &'a dyn Host,
    ) -> Self {
        let limits = Limits { cancel: Some(CANCEL_LIMIT), ..Limits::all(options.time_limit) };
        Rig {
            registry,
            id,
            device,
            capabilities: Capabilities::new(Vec::new(), Vec::new()),
            listener: Listener::new(host),
            isolation: Isolation::worker(limits),
            threads: options.threads,
            until,
            provider: None,
        }
    }

    /// Runs all checks. The only error is that the user cancelled.
    pub(crate) fn subject(&mut self, listen: &mut dyn FnMut(Event<'_>)) -> Result<Subject> {
        let mut subject = Subject {
            provider: self.id.into(),
            build_id: String::new(),
            runtime: Default::default(),
            device: self.device.clone(),
            capabilities: self.capabilities.clone(),
            checks: Vec::new(),
            networks: Vec::new(),
            pictures: Vec::new(),
            log: Vec::new(),
        };
        let opened = self.check("start", listen, |rig| {
            let provider = rig.provider()?;
            rig.capabilities = provider.capabilities(&rig.device)?;
            let runtime = provider.runtime();
            Ok(format!("{} {} on {}", runtime.name, runtime.version, rig.device.class))
        })?;
        let works = opened.state == State::Passed;
        subject.checks.push(opened);
        if !works {
            subject.log = self.listener.take();
            return Ok(subject);
        }
        subject.capabilities = self.capabilities.clone();
        if let Ok(provider) = self.provider() {
            subject.build_id = provider.manifest().build_id.clone();
            subject.runtime = (provider.runtime().name.clone(), provider.runtime().version.clone());
        }
        for (name, check) in checks::ALL {
            subject.checks.push(self.check(name, listen, check)?);
        }
        for precision in self.picture_precisions() {
            let mut drawn = Vec::new();
            let name = format!("pictures in {precision}");
            subject
                .checks
                .push(self.check(&name, listen, |rig| pictures::check(rig, precision, &mut drawn))?);
            subject.pictures.extend(drawn);
        }
        for case in &networks::CASES {
            for precision in self.capabilities.precisions.clone() {
                listen(Event::Started(&format!("{} in {precision}", case.model)));
                let rows = networks::check(self, case, precision)?;
                rows.iter().for_each(|row| listen(Event::Network(row)));
                subject.networks.extend(rows);
            }
        }
        subject.log = self.listener.take();
        Ok(subject)
    }

    /// fp32, and the best precision below it.
    fn picture_precisions(&self) -> Vec<Precision> {
        let offered = &self.capabilities.precisions;
        let low = offered.iter().find(|precision| **precision != Precision::Fp32);
        offered.iter().filter(|precision| **precision == Precision::Fp32).chain(low).copied().collect()
    }

    fn check(
        &mut self,
        name: &str,
        listen: &mut dyn FnMut(Event<'_>),
        check: impl FnOnce(&mut Self) -> Result<String, Problem>,
    ) -> Result<Check> {
        listen(Event::Started(name));
        let started = Instant::now();
        let found = self.time_left().and_then(|()| check(self));
        let (state, detail) = match found {
            Ok(detail) => (State::Passed, detail),
            Err(problem) => self.judged(problem)?,
        };
        let check = Check { name: name.into(), state, detail, seconds: started.elapsed().as_secs_f64() };
        listen(Event::Ended(&check));
        Ok(check)
    }

    /// What a problem means. Cancelling by the user is an error.
    pub(crate) fn judged(&mut self, problem: Problem) -> Result<(State, String)> {
        self.listener.set_cancel(false);
        let error = match problem {
            Problem::NotOffered(why) => return Ok((State::NotOffered, why)),
            Problem::NotRun(why) => return Ok((State::NotRun, why)),
            Problem::Wrong(why) => return Ok((State::Failed, why)),
            Problem::Error(error) => error,
        };
        if self.listener.stopped() {
            return Err(Error::new(ErrorCode::Cancelled, "cancelled").into());
        }
        if let Some(worker) = self.provider.as_ref().and_then(Provider::worker)
            && worker.has_ended()
        {
            worker.stderr_tail().lines().for_each(|line| self.listener.keep(format!("stderr: {line}")));
        }
        let state = match error.code() {
            ErrorCode::Unimplemented => State::NotOffered,
            ErrorCode::ResourceExhausted => State::NotRun,
            _ => State::Failed,
        };
        Ok((state, error.to_string()))
    }

    pub(crate) fn host(&self) -> &Listener<'a> {
        &self.listener
    }

    /// The provider; a new one if its process has ended.
    pub(crate) fn provider(&mut self) -> Result<Provider> {
        if let Some(provider) = self.provider.as_ref().filter(|provider| !provider.has_ended()) {
            return Ok(provider.clone());
        }
        self.restart()
    }

    /// The provider in a new process.
    pub(crate) fn restart(&mut self) -> Result<Provider> {
        self.provider = None;
        let provider = self.registry.open_with(self.id, &self.isolation, &self.listener)?;
        self.provider = Some(provider.clone());
        Ok(provider)
    }

    /// Whether the provider's process has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.provider.as_ref().is_none_or(Provider::has_ended)
    }

    /// A folder for files of a check.
    pub(crate) fn folder(&self) -> Result<OwnedFolder> {
        self.registry.paths().temporary()
    }

    /// How to build without the cache.
    pub(crate) fn options(&self, precision: Precision) -> BuildOptions {
        BuildOptions::new(self.device.clone())
            .precision(precision)
            .threads(self.threads)
            .cache(CachePolicy::Off)
    }

    /// The first precision of the provider: fp32 where it is offered.
    pub(crate) fn precision(&self) -> Result<Precision, Problem> {
        let offered = &self.capabilities.precisions;
        let precise = offered.iter().find(|precision| **precision == Precision::Fp32).or(offered.first());
        precise.copied().ok_or_else(|| Problem::NotOffered("no precision is offered".into()))
    }

    pub(crate) fn synthetic(&self, name: &str) -> Result<Synthetic> {
        Synthetic::open(name, self.registry.paths(), &self.listener)
    }

    pub(crate) fn time_left(&self) -> Result<(), Problem> {
        match Instant::now() < self.until {
            true => Ok(()),
            false => Err(Problem::NotRun("the time was used up".into())),
        }
    }

    /// Whether a session fits, with weights that are generated on the way.
    pub(crate) fn has_room(&self, network: &Synthetic, options: &BuildOptions) -> Result<(), Problem> {
        let estimate = memory::estimate(&network.model, options, &self.capabilities)?;
        let sum = |parts: [Option<u64>; 2]| parts.into_iter().flatten().sum::<u64>();
        // Providers may hold the weights twice while they load them.
        let host =
            sum([estimate.host_weights, estimate.host_activations]) + sum([estimate.host_weights, None]);
        let device = sum([estimate.device_weights, estimate.device_activations]);
        for (needed, there, place) in [
            (host, memory::available(), "main memory"),
            (device, self.device.memory_bytes, self.device.name.as_str()),
        ] {
            if let Some(there) = there.filter(|there| *there < needed) {
                let message =
                    format!("needs {} MB, and {place} has {} MB", needed / 1_000_000, there / 1_000_000);
                return Err(Problem::NotRun(message));
            }
        }
        Ok(())
    }
}

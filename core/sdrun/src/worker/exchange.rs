//! One call: the message, the worker's requests meanwhile, the regions it uses, its time limit, and the errors for a
//! worker that does not return.

use super::{
    WorkerConfig,
    link::{DEATH, Link, Phase, Worker},
    process::Event,
    protocol::{Bytes, Call, FromWorker, Hello, PROTOCOL, Placed, RegionRef, Reply, ToWorker, WEIGHT_FILES},
    sandbox::Confinement,
    shm::Region,
};
use crate::error::KILLED;
use sdrun_abi::{
    Error, ErrorCode, Flow, Host, NoHost, OutputSink, OutputSpec, Result, TensorView, WeightSource,
    ffi::PluginIdentity,
};
use std::{
    io,
    path::PathBuf,
    sync::{
        MutexGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::RecvTimeoutError,
    },
    time::{Duration, Instant},
};

/// How often a waiting call checks for cancellation.
const POLL: Duration = Duration::from_millis(20);
/// How long to wait for stderr output that was written before a reported failure.
const WORDS: Duration = Duration::from_secs(1);

/// Microseconds that this process has waited for workers.
static WAITED: AtomicU64 = AtomicU64::new(0);

/// How long this process has waited for workers so far, all its threads together. What it did itself in a call, such as handing out
/// weights, does not count.
pub fn waited() -> Duration {
    Duration::from_micros(WAITED.load(Relaxed))
}

/// One call. While it exists, no other call runs on this worker.
pub(super) struct Exchange<'w> {
    worker: &'w Worker,
    link: MutexGuard<'w, Link>,
    phase: Phase,
    /// Number of stderr lines before this call.
    heard: u64,
    attached: Vec<Region>,
    /// Regions that carry weights during this call.
    slots: Vec<Slot>,
    /// Whether the worker still owes an answer.
    open: bool,
}

struct Slot {
    region: Region,
    busy: bool,
}

/// Time limit of a call. The host's own time in callbacks does not count.
struct Clock {
    limit: Option<Duration>,
    deadline: Option<Instant>,
    /// When to kill a worker that was asked to cancel.
    cancel: Option<Option<Instant>>,
}

impl Clock {
    fn pause<T>(&mut self, body: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let value = body();
        let spent = start.elapsed();
        for end in
            [self.deadline.as_mut(), self.cancel.as_mut().and_then(Option::as_mut)].into_iter().flatten()
        {
            *end += spent;
        }
        value
    }
    fn until_next(&self) -> Duration {
        let now = Instant::now();
        [self.deadline, self.cancel.flatten()]
            .into_iter()
            .flatten()
            .map(|end| end.saturating_duration_since(now))
            .fold(POLL, Duration::min)
    }
}

/// Starts a worker and waits until it has loaded the plugin.
pub(super) fn start(config: WorkerConfig) -> Result<(Worker, PluginIdentity, Confinement)> {
    let (mut worker, mark) = Worker::spawn(config)?;
    let mut exchange = Exchange::begin(&worker, Phase::Start)?;
    let (hello, plugin) = exchange.greet(mark)?;
    exchange.link.weight_files = hello.features.iter().any(|f| f == WEIGHT_FILES);
    drop(exchange);
    if let Ok(identity) = &plugin {
        worker.provider = identity.id.clone();
    }
    Ok((worker, plugin?, hello.confinement.unwrap_or(Confinement::None)))
}

impl<'w> Exchange<'w> {
    /// Begins a call; waits for the one under way in another thread.
    pub(super) fn begin(worker: &'w Worker, phase: Phase) -> Result<Self> {
        let link = worker.link()?;
        let heard = worker.process.stderr.seen();
        Ok(Exchange { worker, link, phase, heard, attached: Vec::new(), slots: Vec::new(), open: false })
    }

    /// Copies bytes into their own region, which is released after the call.
    pub(super) fn attach(&mut self, bytes: &[u8]) -> Result<RegionRef> {
        let mut region = self.link.folders.region(bytes.len())?;
        region.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let reference = region.reference(0, bytes.len());
        self.attached.push(region);
        Ok(reference)
    }

    /// Copies the inputs of a run into the input region.
    pub(super) fn place_inputs(&mut self, inputs: &[TensorView<'_>]) -> Result<(Vec<Placed>, RegionRef)> {
        let (placed, len) = Placed::lay_out(inputs.iter().map(|t| (t.dtype, t.shape)))
            .ok_or_else(|| Error::invalid("the inputs are too large"))?;
        let link = &mut *self.link;
        let region = match &mut link.input {
            Some(region) if region.capacity() >= len => region,
            small => {
                *small = None;
                small.insert(link.folders.region(len)?)
            }
        };
        for (i, (input, place)) in inputs.iter().zip(&placed).enumerate() {
            let to = &mut region.bytes_mut()[place.range(len)?];
            if to.len() != input.data.len() {
                return Err(Error::invalid(format!(
                    "input {i} has {} bytes; a {} tensor of shape {:?} has {}",
                    input.data.len(),
                    input.dtype,
                    input.shape,
                    to.len()
                )));
            }
            to.copy_from_slice(input.data);
        }
        Ok((placed, region.reference(0, len)))
    }

    /// Copies the outputs of a run into `sink`.
    pub(super) fn hand_out(&mut self, placed: &[Placed], sink: &mut dyn OutputSink) -> Result<()> {
        let all = self.link.output.as_ref().map(Region::bytes).unwrap_or_default();
        let ranges = placed.iter().map(|p| p.range(all.len())).collect::<Result<Vec<_>>>();
        let ranges = ranges.map_err(|e| self.broken(&e.message))?;
        let specs: Vec<OutputSpec> = placed.iter().map(Placed::spec).collect();
        let buffers = sink.allocate(&specs)?;
        if buffers.len() != ranges.len() || buffers.iter().zip(&ranges).any(|(b, r)| b.len() != r.len()) {
            return Err(Error::internal("the output sink returned buffers of other sizes than requested"));
        }
        let all = self.link.output.as_ref().map(Region::bytes).unwrap_or_default();
        for (buffer, range) in buffers.into_iter().zip(ranges) {
            buffer.copy_from_slice(&all[range]);
        }
        Ok(())
    }

    /// Takes the serialized engine out of its region, and releases the region.
    pub(super) fn take_payload(&mut self, len: usize) -> Result<Vec<u8>> {
        let region = self.link.output.take();
        let bytes = region.as_ref().and_then(|r| r.bytes().get(..len)).map(<[u8]>::to_vec);
        bytes.ok_or_else(|| self.broken(&format!("a payload of {len} bytes does not lie in its region")))
    }

    /// Exchanges the first messages. The worker's plugin may have failed to load.
    fn greet(&mut self, mark: String) -> Result<(Hello, Result<PluginIdentity>)> {
        self.open = true;
        let mut clock = self.clock();
        let sandbox = self.link.sandbox.clone().map(Box::new);
        self.tell(&ToWorker::Hello(Hello { sandbox, ..Hello::new(mark) }))?;
        let (hello, plugin) = match self.hear(&mut clock, &NoHost)? {
            FromWorker::Hello { hello, plugin } => (hello, plugin),
            _ => return Err(self.broken("it did not greet")),
        };
        if hello.protocol != PROTOCOL {
            let theirs = hello.protocol;
            let error = self.broken(&format!("it speaks version {theirs}, this program {PROTOCOL}"));
            return Err(error.with_hint("install the sdrun-worker that belongs to this sdrun"));
        }
        self.open = false;
        let plugin = plugin.map_err(|e| self.with_last_words(e));
        Ok((hello, plugin))
    }

    /// Sends a call and serves the worker's requests until it answers.
    pub(super) fn perform(
        &mut self,
        call: Call,
        host: &dyn Host,
        weights: Option<&dyn WeightSource>,
    ) -> Result<Reply> {
        self.link.calls += 1;
        let mut clock = self.clock();
        let number = self.link.calls;
        if let Err(e) = self.tell(&ToWorker::Call { number, call }) {
            // The worker may not know a new input region yet.
            self.link.input = None;
            return Err(e);
        }
        self.open = true;
        loop {
            let question = match self.hear(&mut clock, host)? {
                FromWorker::Done(reply) => {
                    self.open = false;
                    return Ok(reply);
                }
                FromWorker::Failed(error) => {
                    self.open = false;
                    return Err(self.with_last_words(error));
                }
                question => question,
            };
            let answer = clock.pause(|| self.answer(question, host, weights))?;
            if let Some(ToWorker::Flow { cancel: true }) = &answer
                && clock.cancel.is_none()
            {
                clock.cancel = Some(self.grace());
            }
            if let Some(answer) = answer {
                self.tell(&answer)?;
            }
        }
    }

    fn clock(&self) -> Clock {
        let limit = self.phase.limit(&self.worker.limits);
        let deadline = limit.and_then(|l| Instant::now().checked_add(l));
        Clock { limit, deadline, cancel: None }
    }

    fn grace(&self) -> Option<Instant> {
        self.worker.limits.cancel.and_then(|grace| Instant::now().checked_add(grace))
    }

    /// Receives the worker's next message; forwards a cancellation, and kills the worker when its time is up.
    fn hear(&mut self, clock: &mut Clock, host: &dyn Host) -> Result<FromWorker> {
        loop {
            if clock.cancel.is_none() && clock.pause(|| host.cancelled()) {
                clock.cancel = Some(self.grace());
                let number = self.link.calls;
                self.tell(&ToWorker::Cancel { number })?;
            }
            let passed = |end: Option<Instant>| end.is_some_and(|end| end <= Instant::now());
            if passed(clock.deadline) {
                let limit = clock.limit.unwrap_or_default();
                return Err(self.too_slow(limit));
            }
            if passed(clock.cancel.flatten()) {
                return Err(self.too_stubborn());
            }
            let since = Instant::now();
            let event = self.link.events.recv_timeout(clock.until_next());
            WAITED.fetch_add(since.elapsed().as_micros() as u64, Relaxed);
            match event {
                Ok(Event::Message(message)) => return Ok(message),
                Ok(Event::Ended(broken)) => return Err(self.died(broken)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.died(None)),
                Err(RecvTimeoutError::Timeout) => self.worker.process.notice_end(),
            }
        }
    }

    fn tell(&mut self, message: &ToWorker) -> Result<()> {
        match self.link.send(message) {
            Ok(()) => Ok(()),
            // Nothing was sent, and the worker waits for the next message.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Err(Error::invalid(e.to_string())),
            // The pipe is closed. The queue may still hold the worker's last messages, followed by its end.
            Err(_) => loop {
                match self.link.events.recv_timeout(DEATH) {
                    Ok(Event::Message(_)) => {}
                    Ok(Event::Ended(broken)) => return Err(self.died(broken)),
                    Err(_) => return Err(self.died(None)),
                }
            },
        }
    }

    fn answer(
        &mut self,
        question: FromWorker,
        host: &dyn Host,
        weights: Option<&dyn WeightSource>,
    ) -> Result<Option<ToWorker>> {
        Ok(match question {
            FromWorker::Log { level, target, message } => {
                host.log(level, &target, &message);
                None
            }
            FromWorker::Progress { phase, step, total } => {
                Some(ToWorker::Flow { cancel: host.progress(&phase, step, total) == Flow::Cancel })
            }
            FromWorker::NeedWeight { name, released } => {
                self.free(released)?;
                let weight = source(weights).and_then(|source| source.get(&name)).and_then(|weight| {
                    let bytes = self.place_weight(weight.file.as_ref(), weight.data())?;
                    Ok(ToWorker::Weight { dtype: weight.dtype, shape: weight.shape.clone(), bytes })
                });
                Some(weight.unwrap_or_else(ToWorker::Refused))
            }
            FromWorker::NeedEncoded { name, encodings, released } => {
                self.free(released)?;
                let encodings: Vec<&str> = encodings.iter().map(String::as_str).collect();
                let weight = weights.map_or(Ok(None), |source| source.encoded(&name, &encodings));
                let answer = weight.and_then(|weight| {
                    let Some(weight) = weight else { return Ok(ToWorker::NotEncoded) };
                    let (encoding, shape, len) =
                        (weight.encoding.clone(), weight.shape.clone(), weight.data().len());
                    let bytes = self.place_weight(weight.file.as_ref(), weight.data())?;
                    Ok(ToWorker::Encoded { encoding, shape, len, bytes })
                });
                Some(answer.unwrap_or_else(ToWorker::Refused))
            }
            FromWorker::NeedCheck { name } => {
                let checked = source(weights).and_then(|source| source.check(&name));
                Some(checked.map_or_else(ToWorker::Refused, |()| ToWorker::Checked))
            }
            FromWorker::NeedRegion { len } => {
                self.link.output = None;
                Some(match self.link.folders.region(len) {
                    Ok(region) => ToWorker::Region(self.link.output.insert(region).reference(0, len)),
                    Err(e) => ToWorker::Refused(e),
                })
            }
            FromWorker::Hello { .. } | FromWorker::Done(_) | FromWorker::Failed(_) => {
                return Err(self.broken("it sent an unexpected message"));
            }
        })
    }

    /// Frees slots whose weights the worker no longer uses.
    fn free(&mut self, released: Vec<usize>) -> Result<()> {
        for slot in released {
            match self.slots.get_mut(slot) {
                Some(slot) => slot.busy = false,
                None => return Err(self.broken("it released a region it never had")),
            }
        }
        Ok(())
    }

    /// Refers to the file that holds a weight, or copies it into a free region.
    fn place_weight(&mut self, file: Option<&(PathBuf, u64)>, data: &[u8]) -> Result<Bytes> {
        if let Some((path, offset)) = file
            && self.link.can_read(path)
            && let Ok(path) = std::path::absolute(path)
            && path.to_str().is_some()
        {
            return Ok(Bytes::File { path, offset: *offset });
        }
        let idle = |slot: &(usize, &Slot)| !slot.1.busy;
        let fitting = |slot: &(usize, &Slot)| slot.1.region.capacity() >= data.len();
        let size = |slot: &(usize, &Slot)| slot.1.region.capacity();
        let slots = || self.slots.iter().enumerate().filter(idle);
        let index = match slots().filter(fitting).min_by_key(size).or_else(|| slots().max_by_key(size)) {
            Some((index, slot)) if slot.region.capacity() >= data.len() => index,
            Some((index, _)) => {
                self.slots[index].region = self.link.folders.region(data.len())?;
                index
            }
            None => {
                self.slots.push(Slot { region: self.link.folders.region(data.len())?, busy: false });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[index];
        slot.region.bytes_mut()[..data.len()].copy_from_slice(data);
        slot.busy = true;
        Ok(Bytes::Region(slot.region.reference(index, data.len())))
    }

    // ---- ends of a worker ----

    /// The error for an answer of the wrong kind.
    pub(super) fn unexpected(&mut self, reply: &Reply) -> Error {
        let text = format!("{reply:?}");
        let kind: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
        self.broken(&format!("it answered with {kind}"))
    }

    fn end(&mut self, why: String) {
        self.open = false;
        self.link.gone.get_or_insert(why);
        self.process_end();
    }

    fn process_end(&self) {
        self.worker.process.kill();
        self.worker.process.wait(DEATH);
        self.worker.process.stderr.wait_for_end(WORDS);
    }

    fn broken(&mut self, why: &str) -> Error {
        self.end("broke the protocol and was stopped".into());
        let Worker { provider, .. } = self.worker;
        let doing = self.phase.words();
        Error::internal(format!("the worker of provider {provider} broke the protocol while {doing}: {why}"))
    }

    fn died(&mut self, broken: Option<String>) -> Error {
        let (provider, doing) = (&self.worker.provider, self.phase.words());
        if self.worker.closing.load(Relaxed) {
            self.end("was closed".into());
            return Error::precondition(format!(
                "the worker of provider {provider} was closed while {doing}"
            ));
        }
        if let Some(why) = broken {
            let error = self.broken(&why);
            return if self.phase == Phase::Start {
                error.with_hint("is this really the sdrun-worker that belongs to this sdrun?")
            } else {
                error
            };
        }
        let ending = self.worker.process.wait(DEATH);
        let how = ending.map_or("its pipe is closed".into(), |e| e.to_string());
        self.end(format!("died ({how}) while {doing}"));
        let words = self.words().map_or(String::new(), |w| format!("; its last words: {w}"));
        let message = format!("the worker of provider {provider} died ({how}) while {doing}{words}");
        let error = Error::new(ErrorCode::Unavailable, message);
        if ending.is_some_and(|ending| ending.is_sigkill()) {
            let hint = "something killed it: usually the system, when memory runs out";
            return error.with_native(KILLED).with_hint(hint);
        }
        error.with_hint(
            "the vendor's runtime crashed; try another provider or device. The debug log has all that it wrote",
        )
    }

    fn too_slow(&mut self, limit: Duration) -> Error {
        let doing = self.phase.words();
        self.end(format!("was killed because {doing} took longer than {limit:?}"));
        let words = self.words().map_or(String::new(), |w| format!("; its last words: {w}"));
        let provider = &self.worker.provider;
        let message = format!(
            "the worker of provider {provider} was killed: {doing} took longer than the limit of {limit:?}{words}"
        );
        Error::new(ErrorCode::DeadlineExceeded, message)
            .with_hint("allow it more time if the machine is slow")
    }

    fn too_stubborn(&mut self) -> Error {
        let doing = self.phase.words();
        self.end(format!("was killed because it did not stop {doing} when asked to"));
        let provider = &self.worker.provider;
        let message =
            format!("{doing} was cancelled; the worker of provider {provider} did not stop and was killed");
        Error::new(ErrorCode::Cancelled, message)
    }

    fn words(&self) -> Option<String> {
        self.worker.process.stderr.last_words(self.heard)
    }

    /// Adds stderr output: some runtimes explain a failure only there.
    fn with_last_words(&mut self, mut error: Error) -> Error {
        self.link.failures += 1;
        self.worker.process.stderr.wait_for_mark(self.link.failures, WORDS);
        if let Some(words) = self.words() {
            let said = format!("the worker wrote: {words}");
            error.hint = Some(match error.hint {
                Some(hint) => hint.with_note(said),
                None => said.into(),
            });
        }
        error
    }
}

fn source(weights: Option<&dyn WeightSource>) -> Result<&dyn WeightSource> {
    weights.ok_or_else(|| Error::precondition("this call has no weight source"))
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        if self.open {
            // A host callback panicked, so the worker's next message would not belong to any call.
            self.end("was stopped in the middle of a call".into());
        }
        self.worker.destroy_dropped(&mut self.link);
    }
}

//! The worker's side: loads one plugin and serves calls until the host has no more.

use super::{
    callbacks::{HostOf, Sink, Weights},
    pipe::{Pipe, vanish},
    protocol::{Call, Dropped, FromWorker, Given, Hello, Placed, RegionRef, Reply, ToWorker, receive},
    sandbox,
    shm::Region,
};
use crate::library;
#[cfg(windows)]
use crate::windows::own_pipes;
use sdrun_abi::{
    DeviceTensor, Engine, Error, Input, OutputSink, Provider, Result, Session, TimingPlan, ffi::Plugin,
};
use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader},
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::{Sender, channel},
    thread,
};

/// The body of `sdrun-worker PLUGIN`: talks to the host that started it over stdin and stdout, and ends with it.
pub fn worker_main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(plugin), None) = (arguments.next(), arguments.next()) else {
        eprintln!("sdrun-worker runs a provider for sdrun, which starts it; it does nothing by hand");
        return ExitCode::from(2);
    };
    match own_pipes().and_then(|(input, output)| serve(input, output, plugin.into())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("sdrun-worker: cannot communicate with its host: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Takes over stdin and stdout: output of the vendor's code goes to stderr, and its reads return nothing.
#[cfg(unix)]
fn own_pipes() -> io::Result<(File, File)> {
    use rustix::{io::fcntl_dupfd_cloexec, stdio};
    let input = fcntl_dupfd_cloexec(io::stdin(), 3)?;
    let output = fcntl_dupfd_cloexec(io::stdout(), 3)?;
    stdio::dup2_stdin(File::open("/dev/null")?)?;
    stdio::dup2_stdout(io::stderr())?;
    Ok((input.into(), output.into()))
}

fn serve(input: File, output: File, plugin: PathBuf) -> io::Result<()> {
    let mut input = BufReader::new(input);
    let Some(ToWorker::Hello(host)) = receive(&mut input, &mut Vec::new())? else {
        return Err(io::Error::other("it did not greet"));
    };
    let (answers_in, answers) = channel();
    let (jobs_in, jobs) = channel();
    let pipe = Pipe::new(output, answers, host.mark);
    // Before any code of the plugin or its runtime runs, and while there is a single thread.
    let confined = host.sandbox.as_deref().map(sandbox::enter).transpose();
    let mut hello = Hello::new(String::new());
    hello.confinement = confined.as_ref().ok().copied().flatten();
    let loaded = confined.and_then(|_| library::load(&plugin));
    let identity = loaded.as_ref().map(Plugin::identity).map_err(Clone::clone);
    if identity.is_err() {
        pipe.mark();
    }
    pipe.send(&FromWorker::Hello { hello, plugin: identity });
    let Ok(plugin) = loaded else { return Ok(()) };
    thread::scope(|scope| {
        thread::Builder::new()
            .name("sdrun-worker-in".into())
            .spawn_scoped(scope, || listen(input, &pipe, &jobs_in, &answers_in))?;
        let mut objects = Objects::new(&pipe, plugin);
        // One thread makes all calls: OpenMP runtimes keep a thread pool per calling thread.
        for job in jobs {
            match job {
                Job::Call { number, call } => objects.carry_out(number, call),
                Job::Drop(dropped) => {
                    dropped.tensors.iter().for_each(|id| drop(objects.tensors.remove(id)));
                    dropped.sessions.iter().for_each(|id| drop(objects.sessions.remove(id)));
                    dropped.engines.iter().for_each(|id| drop(objects.engines.remove(id)));
                }
                Job::Shutdown => {
                    objects.tensors.clear();
                    objects.sessions.clear();
                    objects.engines.clear();
                    // The reader thread still waits for the host.
                    std::process::exit(0);
                }
            }
        }
        Ok(())
    })
}

enum Job {
    Call { number: u64, call: Call },
    Drop(Dropped),
    Shutdown,
}

/// Dispatches messages from the host, so that a cancellation arrives while a call runs.
fn listen(mut input: BufReader<File>, pipe: &Pipe, jobs: &Sender<Job>, answers: &Sender<ToWorker>) {
    let mut buffer = Vec::new();
    loop {
        let delivered = match receive(&mut input, &mut buffer) {
            Ok(Some(ToWorker::Call { number, call })) => jobs.send(Job::Call { number, call }).is_ok(),
            Ok(Some(ToWorker::Drop(dropped))) => jobs.send(Job::Drop(dropped)).is_ok(),
            Ok(Some(ToWorker::Shutdown)) => jobs.send(Job::Shutdown).is_ok(),
            Ok(Some(ToWorker::Cancel { number })) => {
                pipe.cancel(number);
                true
            }
            Ok(Some(answer)) => answers.send(answer).is_ok(),
            Ok(None) => vanish(),
            Err(e) => {
                eprintln!("sdrun-worker: invalid message from its host: {e}");
                vanish()
            }
        };
        if !delivered {
            return;
        }
    }
}

/// The plugin and what it has made.
struct Objects<'p> {
    pipe: &'p Pipe,
    plugin: Plugin,
    engines: HashMap<u64, Box<dyn Engine>>,
    sessions: HashMap<u64, Box<dyn Session>>,
    tensors: HashMap<u64, Box<dyn DeviceTensor>>,
    made: u64,
    /// Kept between runs.
    input: Option<Region>,
    output: Option<Region>,
}

fn unknown(what: &str) -> Error {
    Error::internal(format!("the worker has no such {what}"))
}

fn attached(region: &RegionRef) -> Result<Region> {
    let file = region.file.as_deref().ok_or_else(|| Error::internal("a shared region has no file"))?;
    Region::attach(file, region.len)
}

impl<'p> Objects<'p> {
    fn new(pipe: &'p Pipe, plugin: Plugin) -> Self {
        let (engines, sessions, tensors) = (HashMap::new(), HashMap::new(), HashMap::new());
        Objects { pipe, plugin, engines, sessions, tensors, made: 0, input: None, output: None }
    }

    fn carry_out(&mut self, number: u64, call: Call) {
        self.pipe.begin(number);
        let message = match self.answer(call) {
            Ok(reply) => FromWorker::Done(reply),
            Err(error) => {
                self.pipe.mark();
                FromWorker::Failed(error)
            }
        };
        self.pipe.send(&message);
    }

    fn answer(&mut self, call: Call) -> Result<Reply> {
        let host = HostOf(self.pipe);
        let weights = Weights::new(self.pipe);
        match call {
            Call::Init { config } => self.plugin.init(&config, &host).map(Reply::Runtime),
            Call::Devices => self.plugin.devices().map(Reply::Devices),
            Call::Capabilities { device } => self.plugin.capabilities(&device).map(Reply::Capabilities),
            Call::Check { compatibility, device } => {
                self.plugin.check(&compatibility, &device).map(Reply::Verdict)
            }
            Call::Build { model, spec } => {
                let region = attached(&model)?;
                let engine = self.plugin.build(&region.bytes()[..model.len], &spec, &weights, &host)?;
                Ok(self.keep(engine))
            }
            Call::Load { payload, spec } => {
                let region = attached(&payload)?;
                let engine = self.plugin.load(&region.bytes()[..payload.len], &spec, &host)?;
                Ok(self.keep(engine))
            }
            Call::Assess { model, spec } => {
                let region = attached(&model)?;
                self.plugin.assess(&region.bytes()[..model.len], &spec).map(Reply::Assessment)
            }
            Call::Serialize { engine } => {
                let payload = self.engines.get(&engine).ok_or_else(|| unknown("engine"))?.serialize()?;
                // It replaces the output region on the host's side too, and is not kept.
                self.output = None;
                let mut region = Sink::region(self.pipe, payload.len())?;
                region.bytes_mut()[..payload.len()].copy_from_slice(&payload);
                Ok(Reply::Payload { len: payload.len() })
            }
            Call::Bake { engine } => {
                let engine = self.engines.get(&engine).ok_or_else(|| unknown("engine"))?;
                let baked = engine.bake(&weights, &host)?;
                Ok(self.keep(baked))
            }
            Call::Session { engine } => {
                let engine = self.engines.get(&engine).ok_or_else(|| unknown("engine"))?;
                let session = engine.session(&weights, &host)?;
                self.made += 1;
                self.sessions.insert(self.made, session);
                Ok(Reply::Session { session: self.made })
            }
            Call::Refit { session, changed } => {
                let region = attached(&changed)?;
                let names: Vec<String> = serde_json::from_slice(&region.bytes()[..changed.len])
                    .map_err(|e| Error::internal(format!("the list of changed weights is not valid: {e}")))?;
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let session = self.sessions.get_mut(&session).ok_or_else(|| unknown("session"))?;
                session.refit(&names, &weights, &host).map(Reply::Refit)
            }
            Call::Run { session, inputs, region } => self.run(session, &inputs, &region, None, &host),
            Call::Time { session, inputs, region, plan } => {
                self.run(session, &inputs, &region, Some(&plan), &host)
            }
            Call::RunOnDevice { session, inputs, region, keep } => {
                self.run_on_device(session, &inputs, &region, &keep, &host)
            }
            Call::ReadTensor { tensor } => {
                let tensor = self.tensors.get(&tensor).ok_or_else(|| unknown("tensor"))?;
                let mut sink = Sink::new(self.pipe, &mut self.output);
                for buffer in sink.allocate(std::slice::from_ref(tensor.spec()))? {
                    tensor.read(buffer)?;
                }
                Ok(Reply::Outputs(sink.placed()))
            }
            Call::Memory { session } => {
                self.sessions.get(&session).ok_or_else(|| unknown("session"))?.memory().map(Reply::Memory)
            }
        }
    }

    fn keep(&mut self, engine: Box<dyn Engine>) -> Reply {
        self.made += 1;
        let info = engine.info().clone();
        self.engines.insert(self.made, engine);
        Reply::Engine { engine: self.made, info }
    }

    fn run(
        &mut self,
        session: u64,
        inputs: &[Placed],
        region: &RegionRef,
        timed: Option<&TimingPlan>,
        host: &HostOf<'_>,
    ) -> Result<Reply> {
        self.attach_input(region)?;
        let bytes = self.input.as_ref().map(Region::bytes).unwrap_or_default();
        let tensors = inputs.iter().map(|placed| placed.view(bytes)).collect::<Result<Vec<_>>>()?;
        let session = self.sessions.get_mut(&session).ok_or_else(|| unknown("session"))?;
        if let Some(plan) = timed {
            return session.time(&tensors, plan, host).map(Reply::Times);
        }
        let mut sink = Sink::new(self.pipe, &mut self.output);
        session.run(&tensors, &mut sink, host)?;
        Ok(Reply::Outputs(sink.placed()))
    }
    fn run_on_device(
        &mut self,
        session: u64,
        inputs: &[Given],
        region: &RegionRef,
        keep: &[bool],
        host: &HostOf<'_>,
    ) -> Result<Reply> {
        self.attach_input(region)?;
        let bytes = self.input.as_ref().map(Region::bytes).unwrap_or_default();
        let mut given = Vec::with_capacity(inputs.len());
        for input in inputs {
            given.push(match input {
                Given::Placed(placed) => Input::Host(placed.view(bytes)?),
                Given::Tensor(id) => Input::Device(&**self.tensors.get(id).ok_or_else(|| unknown("tensor"))?),
            });
        }
        let session = self.sessions.get_mut(&session).ok_or_else(|| unknown("session"))?;
        let mut sink = Sink::new(self.pipe, &mut self.output);
        let kept = session.run_on_device(&given, keep, &mut sink, host)?;
        let outputs = sink.placed();
        let mut tensors = Vec::with_capacity(kept.len());
        for tensor in kept {
            self.made += 1;
            tensors.push((self.made, tensor.spec().clone()));
            self.tensors.insert(self.made, tensor);
        }
        Ok(Reply::Kept { outputs, tensors })
    }

    /// Maps the input region if it is new.
    fn attach_input(&mut self, region: &RegionRef) -> Result<()> {
        if region.file.is_some() {
            self.input = None;
            self.input = Some(attached(region)?);
        }
        Ok(())
    }
}

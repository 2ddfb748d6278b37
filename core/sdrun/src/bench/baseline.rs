//! Another system, measured beside the providers: a program that answers requests.
//!
//! It reads one JSON object a line and answers each with one:
//!
//! | request | answer |
//! |---|---|
//! | `{"open": {"model", "name", "precision", "threads", "inputs", "picture"}}` | `{"opened": {"system", "version", "precision", "settings", "build_seconds", "load_seconds"}}` |
//! | `{"run": 3}` | `{"seconds": [0.1, 0.1, 0.1]}` |
//! | `{"outputs": "FILE"}`: write them as safetensors | `{"saved": true}` |
//!
//! or with `{"error": "why"}`. At the end of its input it exits.

use super::{BenchOptions, Event, PrecisionChoice, Row, contender::Contender};
use crate::{Error, HostTensor, Result, Tensors, error::KILLED, memory::peak_rss, worker::was_killed};
use safetensors::{SafeTensors, tensor::TensorView};
use sdrun_abi::{DType, Error as AbiError, ErrorCode, Host, Precision, RuntimeInfo, default_threads};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// A system to compare with.
#[derive(Clone, Debug)]
pub struct Baseline {
    /// Its name in reports.
    pub name: String,
    /// The program that runs it, with its arguments; or why it cannot run here.
    pub command: sdrun_abi::Result<Vec<OsString>>,
}

/// What a baseline does.
#[derive(Clone, Debug)]
pub struct Task<'a> {
    /// The file of the model, with its weights.
    pub model: &'a Path,
    /// The model's name, if it is built in.
    pub name: Option<&'a str>,
    /// The precision.
    pub precision: PrecisionChoice,
    /// What it computes.
    pub what: What<'a>,
    /// A folder for outputs.
    pub folder: &'a Path,
}

/// What a baseline computes.
#[derive(Clone, Debug)]
pub enum What<'a> {
    /// The outputs of a network, from the inputs in this safetensors file.
    Network(&'a Path),
    /// A picture with these settings, which `bench/baselines/README.md` lists.
    Picture(Value),
}

/// The process of a baseline.
struct Running {
    name: String,
    child: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    /// The last lines that it wrote to its standard error.
    last_words: Arc<Mutex<VecDeque<String>>>,
    limit: Duration,
    outputs: PathBuf,
}

#[derive(Deserialize)]
struct Opened {
    system: String,
    version: String,
    /// `fp32`, `bf16`, `fp16` or `int8`.
    precision: String,
    #[serde(default)]
    settings: String,
    build_seconds: Option<f64>,
    load_seconds: Option<f64>,
}

/// How often to check whether the user has cancelled.
const PATIENCE: Duration = Duration::from_millis(50);
/// The longest answer. Times of ten thousand runs take 200 kB.
const LONGEST_ANSWER: u64 = 4 << 20;
/// How many lines of its standard error an error may quote.
const LAST_WORDS: usize = 3;

impl Contender for Running {
    fn outputs(&mut self, host: &dyn Host) -> Result<Tensors> {
        let file = self.outputs.clone();
        let _: bool = self.ask(&json!({ "outputs": file }), "saved", host)?;
        let bytes = fs::read(&file)
            .map_err(|e| named(&self.name, AbiError::internal(format!("it wrote no outputs ({e})"))))?;
        // The next one may be large, too.
        let _ = fs::remove_file(&file);
        tensors(&bytes).map_err(|why| named(&self.name, AbiError::internal(format!("its outputs: {why}"))))
    }

    fn times(&mut self, warmup: usize, count: usize, host: &dyn Host) -> Result<Vec<f64>> {
        if warmup > 0 {
            let _: Vec<f64> = self.ask(&json!({ "run": warmup }), "seconds", host)?;
        }
        let times: Vec<f64> = self.ask(&json!({ "run": count }), "seconds", host)?;
        let plausible = times.iter().all(|seconds| seconds.is_finite() && *seconds > 0.0);
        if times.len() != count || !plausible {
            let message = format!("{count} runs were requested, and it returned {times:?}");
            return Err(named(&self.name, AbiError::internal(message)));
        }
        Ok(times.into_iter().map(|seconds| seconds * 1e3).collect())
    }

    fn process(&self) -> Option<u32> {
        Some(self.child.id())
    }

    fn report(&mut self, row: &mut Row) -> Result<()> {
        row.memory.run_bytes = peak_rss(self.child.id());
        Ok(())
    }
}

impl Baseline {
    /// Starts its process and lets it load the model. `row` gets what it tells.
    ///
    /// # Errors
    /// Why it cannot run here; errors of the process and what it says; `DeadlineExceeded`; `Cancelled` if `host` cancels.
    pub fn open(
        &self,
        row: &mut Row,
        task: &Task<'_>,
        options: &BenchOptions,
        host: &dyn Host,
        listen: &mut dyn FnMut(Event<'_>),
    ) -> Result<Box<dyn Contender>> {
        let name = &self.name;
        let command = self.command()?;
        let precision = match task.precision {
            PrecisionChoice::Fixed(Precision::Fp32) => "fp32",
            PrecisionChoice::BestLow => "low",
            PrecisionChoice::Fixed(other) => {
                let message = format!("baselines run in fp32 or in their best low precision, not in {other}");
                return Err(named(name, AbiError::unsupported(message)));
            }
        };
        listen(Event::Phase("init"));
        let started = Instant::now();
        let mut running = Running::start(name, command, options.time_limit, task.folder)?;
        row.init_seconds = Some(started.elapsed().as_secs_f64());
        listen(Event::Phase("build"));
        let (inputs, picture) = match &task.what {
            What::Network(inputs) => (Some(inputs), None),
            What::Picture(settings) => (None, Some(settings)),
        };
        let request = json!({ "open": {
            "model": task.model,
            "name": task.name,
            "precision": precision,
            "threads": options.threads.unwrap_or_else(default_threads),
            "inputs": inputs,
            "picture": picture,
        } });
        let opened: Opened = running.ask(&request, "opened", host)?;
        row.runtime = Some(RuntimeInfo::new(opened.system, opened.version, None));
        row.precision = Some(opened.precision);
        row.settings =
            opened.settings.split(", ").filter(|part| !part.is_empty()).map(str::to_string).collect();
        row.build_seconds = opened.build_seconds;
        row.load_seconds = opened.load_seconds;
        row.memory.load_bytes = peak_rss(running.child.id());
        Ok(Box::new(running))
    }

    /// How to start it, or why it cannot run here.
    pub(super) fn command(&self) -> Result<&[OsString]> {
        self.command.as_deref().map_err(|error| named(&self.name, error.clone()))
    }
}

impl Running {
    fn start(name: &str, command: &[OsString], limit: Duration, folder: &Path) -> Result<Self> {
        let [program, arguments @ ..] = command else {
            return Err(named(name, AbiError::invalid("its command is empty")));
        };
        let mut process = Command::new(program);
        process
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut process, 0);
        let mut child = process.spawn().map_err(|e| {
            named(name, AbiError::precondition(format!("cannot start {}: {e}", program.to_string_lossy())))
        })?;
        let requests = child.stdin.take();
        let (sender, answers) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            thread::spawn(move || {
                let mut reader = BufReader::new(out);
                let mut line = Vec::new();
                loop {
                    line.clear();
                    match reader.by_ref().take(LONGEST_ANSWER).read_until(b'\n', &mut line) {
                        Ok(0) | Err(_) => return,
                        Ok(_) if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() => return,
                        Ok(_) => {}
                    }
                }
            });
        }
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(err) = child.stderr.take() {
            let (last_words, name) = (last_words.clone(), name.to_string());
            thread::spawn(move || {
                let mut reader = BufReader::new(err);
                let mut line = Vec::new();
                while reader.by_ref().take(LONGEST_ANSWER).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                    let text = String::from_utf8_lossy(&line).trim_end().to_string();
                    tracing::debug!("{name}: {text}");
                    if !text.trim().is_empty() {
                        let mut words = last_words.lock().unwrap_or_else(PoisonError::into_inner);
                        words.push_back(text);
                        if words.len() > LAST_WORDS {
                            words.pop_front();
                        }
                    }
                    line.clear();
                }
            });
        }
        let outputs = folder.join(format!("{name}.outputs.safetensors"));
        Ok(Running { name: name.into(), child, requests, answers, last_words, limit, outputs })
    }

    /// Sends a request and returns the answer's `key`.
    fn ask<T: serde::de::DeserializeOwned>(
        &mut self,
        request: &Value,
        key: &str,
        host: &dyn Host,
    ) -> Result<T> {
        let sent = self.requests.as_mut().map(|pipe| writeln!(pipe, "{request}").and_then(|()| pipe.flush()));
        if !matches!(sent, Some(Ok(()))) {
            return Err(self.died());
        }
        let end = Instant::now().checked_add(self.limit);
        let line = loop {
            if host.cancelled() {
                self.kill();
                return Err(AbiError::new(ErrorCode::Cancelled, "the benchmark was cancelled").into());
            }
            if end.is_some_and(|end| end <= Instant::now()) {
                self.kill();
                let message = format!("it took longer than the limit of {:?} and was killed", self.limit);
                return Err(named(&self.name, AbiError::new(ErrorCode::DeadlineExceeded, message)));
            }
            match self.answers.recv_timeout(PATIENCE) {
                Ok(line) => break line,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
            }
        };
        let rubbish = |line: &str| {
            let start: String = line.trim().chars().take(120).collect();
            named(&self.name, AbiError::internal(format!("it answered with {start:?}")))
        };
        let Ok(mut answer) = serde_json::from_str::<Value>(&line) else { return Err(rubbish(&line)) };
        if let Some(why) = answer.get("error").and_then(Value::as_str) {
            let why: String = why.chars().map(|c| if c.is_control() { ' ' } else { c }).take(600).collect();
            return Err(named(&self.name, AbiError::unsupported(why)));
        }
        let wanted = answer.get_mut(key).map(Value::take).unwrap_or_default();
        serde_json::from_value(wanted).map_err(|_| rubbish(&line))
    }

    /// The error of a process that has closed its pipes.
    fn died(&mut self) -> Error {
        // Its last words may still be on their way.
        thread::sleep(PATIENCE);
        self.kill();
        let status = self.child.wait();
        let killed = status.as_ref().is_ok_and(|status| was_killed(*status));
        let how = status.map_or_else(|e| e.to_string(), |status| status.to_string());
        let words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        let words: Vec<&str> = words.iter().map(|line| line.trim()).collect();
        let quote = if words.is_empty() { String::new() } else { format!(": {}", words.join(" / ")) };
        let error = AbiError::new(ErrorCode::Unavailable, format!("its process died ({how}){quote}"));
        named(&self.name, if killed { error.with_native(KILLED) } else { error })
    }

    /// Kills it and what it has started.
    fn kill(&mut self) {
        #[cfg(unix)]
        {
            use rustix::process::{Pid, Signal, kill_process_group};
            // While it is not waited for, the number of its group cannot be reused.
            if matches!(self.child.try_wait(), Ok(None))
                && let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
            {
                let _ = kill_process_group(group, Signal::KILL);
            }
        }
        let _ = self.child.kill();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The end of its input tells it to exit.
        self.requests = None;
        let end = Instant::now() + Duration::from_secs(2);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
        self.kill();
        let _ = self.child.wait();
    }
}

fn named(name: &str, error: AbiError) -> Error {
    Error::of(name)(error)
}

/// Writes tensors to a file for a baseline.
pub(super) fn save(file: &Path, tensors: &Tensors) -> Result<()> {
    let mut views = Vec::new();
    for (name, tensor) in tensors {
        let dtype = match tensor.dtype() {
            DType::F32 => safetensors::Dtype::F32,
            DType::F16 => safetensors::Dtype::F16,
            DType::BF16 => safetensors::Dtype::BF16,
            DType::F64 => safetensors::Dtype::F64,
            DType::I64 => safetensors::Dtype::I64,
            DType::I32 => safetensors::Dtype::I32,
            DType::I8 => safetensors::Dtype::I8,
            DType::U8 => safetensors::Dtype::U8,
            DType::Bool => safetensors::Dtype::BOOL,
            other => {
                let message = format!("baselines do not take inputs of type {other} ({name:?})");
                return Err(AbiError::unsupported(message).into());
            }
        };
        let view = TensorView::new(dtype, tensor.shape().to_vec(), tensor.bytes());
        views.push((name, view.map_err(|e| AbiError::internal(e.to_string()))?));
    }
    safetensors::serialize_to_file(views, None, file)
        .map_err(|e| Error::io("write", file, &std::io::Error::other(e)))
}

fn tensors(bytes: &[u8]) -> std::result::Result<Tensors, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let mut tensors = Tensors::new();
    for (name, view) in file.tensors() {
        if view.dtype() != safetensors::Dtype::F32 {
            return Err(format!("{name:?} is {:?} instead of F32", view.dtype()));
        }
        let tensor = HostTensor::from_bytes(DType::F32, view.shape().to_vec(), view.data());
        tensors.insert(name, tensor.map_err(|e| e.to_string())?);
    }
    Ok(tensors)
}

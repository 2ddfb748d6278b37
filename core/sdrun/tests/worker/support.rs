//! Shared by the worker tests: the mock plugin, weights, hosts and a small model.
#![allow(dead_code, reason = "each test target uses a part")]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use sdrun::worker::{Limits, WorkerConfig, WorkerProvider};
use sdrun_abi::{
    BuildSpec, DType, DeviceTensor, EncodedWeight, Engine, Error, Flow, Host, InitConfig, Input, LogLevel,
    OutputSink, Precision, Provider, Result, Session, TensorView, VecSink, Weight, WeightSource, ffi::Plugin,
};
use std::{
    collections::{BTreeMap, HashMap},
    env::consts::{DLL_PREFIX, DLL_SUFFIX},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        LazyLock, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

pub(crate) const WORKER: &str = env!("CARGO_BIN_EXE_sdrun-worker");

/// The mock crate's libraries by target name, built on first use: cargo tells a dependent the path of a binary, but
/// not of a cdylib. Where cargo does not run, as in Wine, `SDRUN_TEST_LIBRARIES` names the folder with the libraries.
pub(crate) fn library(target: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("SDRUN_TEST_LIBRARIES").map(here) {
        let name = format!("{DLL_PREFIX}{target}{DLL_SUFFIX}");
        let places = [folder.join(&name), folder.join("examples").join(&name)];
        return places.into_iter().find(|file| file.is_file()).expect("the libraries are built");
    }
    static BUILT: OnceLock<HashMap<String, PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let target_dir = folder().parent().unwrap();
        let output = Command::new(env!("CARGO"))
            // The whole workspace, as the tests are built: a part of it has other features of its dependencies, and all of them would
            // be built once more.
            .args(["build", "--workspace", "--all-targets", "--message-format=json", "--target-dir"])
            .arg(target_dir)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let messages = output.stdout.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        messages
            .map(|line| serde_json::from_slice::<serde_json::Value>(line).unwrap())
            .filter(|message| message["reason"] == "compiler-artifact" && message["profile"]["test"] == false)
            .filter(|message| message["manifest_path"].as_str().unwrap().contains("mock"))
            .map(|message| {
                let file = message["filenames"][0].as_str().unwrap();
                (message["target"]["name"].as_str().unwrap().to_string(), PathBuf::from(file))
            })
            .collect()
    });
    built[target].clone()
}

pub(crate) fn mock() -> PathBuf {
    library("sdrun_mock_plugin")
}

/// Cargo's folder for test output.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| here(env!("CARGO_TARGET_TMPDIR")));
    &FOLDER
}

/// Makes a path from compile time absolute. In Wine, a path of Linux lacks the drive.
fn here(path: impl AsRef<Path>) -> PathBuf {
    std::path::absolute(path).unwrap()
}

/// Maximum time that a test waits for an expected event. These tests are about hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn patient() -> Limits {
    Limits {
        init: Some(PATIENCE),
        build: Some(PATIENCE),
        session: Some(PATIENCE),
        run: Some(PATIENCE),
        cancel: Some(PATIENCE),
    }
}

pub(crate) fn config(limits: Limits) -> WorkerConfig {
    WorkerConfig {
        worker: here(WORKER),
        loader: Vec::new(),
        // A backtrace would hide a panic's message in the last words.
        env: vec![("RUST_BACKTRACE".into(), "0".into())],
        plugin: mock(),
        limits,
        scratch: folder().into(),
        sandbox: None,
    }
}

pub(crate) fn init_config(behaviour: &str) -> InitConfig {
    InitConfig {
        plugin_dir: folder().into(),
        temp_dir: folder().into(),
        options: BTreeMap::from([("behaviour".into(), behaviour.into())]),
        ..InitConfig::default()
    }
}

/// A worker that has not been initialised.
pub(crate) fn started(limits: Limits) -> WorkerProvider {
    WorkerProvider::start(config(limits)).unwrap()
}

pub(crate) fn worker_with(behaviour: &str, limits: Limits) -> WorkerProvider {
    let worker = started(limits);
    worker.init(&init_config(behaviour), &Quiet).unwrap();
    worker
}

pub(crate) fn worker(behaviour: &str) -> WorkerProvider {
    worker_with(behaviour, patient())
}

/// The mock in this process. Each call copies the file, because a library loads once and the mock has a single
/// behaviour per load.
pub(crate) fn uninitialised_plugin() -> Plugin {
    static COPIES: AtomicUsize = AtomicUsize::new(0);
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join(format!("mock-{}.so", COPIES.fetch_add(1, SeqCst)));
    std::fs::copy(mock(), &copy).unwrap();
    load(&copy).unwrap()
}

/// Loads a plugin into this process.
#[allow(unsafe_code)]
pub(crate) fn load(path: &Path) -> Result<Plugin> {
    // SAFETY: a plugin that the tests have built.
    unsafe { sdrun::load_plugin(path) }
}

pub(crate) fn plugin(behaviour: &str) -> Plugin {
    let plugin = uninitialised_plugin();
    plugin.init(&init_config(behaviour), &Quiet).unwrap();
    plugin
}

pub(crate) struct Quiet;

impl Host for Quiet {
    fn log(&self, _: LogLevel, _: &str, _: &str) {}
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        Flow::Continue
    }
    fn cancelled(&self) -> bool {
        false
    }
}

/// Records progress and logs, and cancels when told to.
#[derive(Default)]
pub(crate) struct Listener {
    pub(crate) log: Mutex<Vec<(LogLevel, String, String)>>,
    pub(crate) progress: Mutex<Vec<(String, u64, u64)>>,
    pub(crate) stop_at: Option<u64>,
    pub(crate) stop: AtomicBool,
}

impl Host for Listener {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        self.log.lock().unwrap().push((level, target.into(), message.into()));
    }
    fn progress(&self, phase: &str, step: u64, total: u64) -> Flow {
        self.progress.lock().unwrap().push((phase.into(), step, total));
        if self.stop_at == Some(step) { Flow::Cancel } else { Flow::Continue }
    }
    fn cancelled(&self) -> bool {
        self.stop.load(SeqCst)
    }
}

/// Named `f32` weights in memory or in a file; counts requests.
#[derive(Default)]
pub(crate) struct Weights {
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    /// Path, and the offset of each weight.
    pub(crate) file: Option<(PathBuf, HashMap<String, u64>)>,
    pub(crate) asked: Mutex<Vec<String>>,
}

impl Weights {
    /// All elements of the model's weights are `value`.
    pub(crate) fn filled(model: &Model, value: f32) -> Self {
        let tensors = model.weights.iter().map(|(name, shape)| {
            let elements = shape.iter().product();
            (name.clone(), (shape.clone(), vec![value; elements]))
        });
        Weights { tensors: tensors.collect(), ..Weights::default() }
    }

    /// A different value in each element.
    pub(crate) fn ramp(model: &Model, step: f32) -> Self {
        let mut weights = Self::filled(model, 0.0);
        let mut next = 0.0;
        for (_, values) in weights.tensors.values_mut() {
            for value in values {
                next += step;
                *value = next % 3.0;
            }
        }
        weights
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }

    /// Sum of all elements, as the mock computes it.
    pub(crate) fn sum(&self, model: &Model) -> f32 {
        model
            .weights
            .iter()
            .map(|(name, _)| self.tensors[name].1.iter().map(|v| f64::from(*v)).sum::<f64>())
            .sum::<f64>() as f32
    }
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// [`Weights`] that also offers weights of two or more dimensions as blocks of `mock_f64`. The blocks hold twice the
/// values, so a result shows which form was used. They are in `file` from the given offset, if set.
pub(crate) struct Blocks {
    pub(crate) plain: Weights,
    pub(crate) file: Option<(PathBuf, u64)>,
}

impl Blocks {
    pub(crate) fn blocks(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| (2.0 * f64::from(*v)).to_le_bytes()).collect()
    }
}

impl WeightSource for Blocks {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.plain.get(name)
    }
    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        assert_eq!(encodings, ["mock_f32", "mock_f64"]);
        let (shape, values) = &self.plain.tensors[name];
        let weight = EncodedWeight::new("mock_f64", shape.clone(), Self::blocks(values));
        Ok((shape.len() > 1).then(|| match &self.file {
            Some((path, offset)) => weight.in_file(path.clone(), *offset),
            None => weight,
        }))
    }
}

impl WeightSource for Weights {
    fn check(&self, name: &str) -> Result<()> {
        self.asked.lock().unwrap().push(format!("check {name}"));
        self.tensors.get(name).map(drop).ok_or_else(|| Error::not_found(format!("there is no weight {name}")))
    }
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.asked.lock().unwrap().push(name.into());
        let (shape, values) = self.tensors.get(name).ok_or_else(|| {
            Error::not_found(format!("there is no weight {name}")).with_hint("look elsewhere")
        })?;
        let weight = Weight::new(DType::F32, shape.clone(), bytes(values))?;
        Ok(match &self.file {
            Some((path, offsets)) => weight.in_file(path.clone(), offsets[name]),
            None => weight,
        })
    }
}

/// What the mock builds from: inputs, outputs and weights, all `f32`.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) input: Vec<usize>,
    pub(crate) outputs: Vec<Vec<usize>>,
    pub(crate) weights: Vec<(String, Vec<usize>)>,
}

impl Model {
    pub(crate) fn small() -> Self {
        let weights = vec![("w/ä".into(), vec![2, 3]), ("b".into(), vec![]), ("e".into(), vec![0, 4])];
        Model { input: vec![1, 5], outputs: vec![vec![1, 5], vec![7]], weights }
    }

    pub(crate) fn json(&self) -> Vec<u8> {
        let tensor = |name: &str, shape: &[usize]| serde_json::json!({"name": name, "shape": shape});
        let outputs: Vec<_> =
            self.outputs.iter().enumerate().map(|(k, s)| tensor(&format!("y{k}"), s)).collect();
        let weights: Vec<_> = self.weights.iter().map(|(n, s)| tensor(n, s)).collect();
        let inputs = [tensor("x", &self.input)];
        serde_json::to_vec(&serde_json::json!({"inputs": inputs, "outputs": outputs, "weights": weights}))
            .unwrap()
    }

    pub(crate) fn view<'a>(&'a self, data: &'a [u8]) -> TensorView<'a> {
        TensorView { dtype: DType::F32, shape: &self.input, data }
    }

    /// Outputs by the formula in the mock's documentation.
    pub(crate) fn expected(&self, x: &[f32], scale: f32, weight_sum: f32) -> Vec<Vec<f32>> {
        let output = |(k, shape): (usize, &Vec<usize>)| {
            (0..shape.iter().product()).map(|i| scale * x[i % x.len()] + (weight_sum + k as f32)).collect()
        };
        self.outputs.iter().enumerate().map(output).collect()
    }
}

pub(crate) fn spec() -> BuildSpec {
    let options = BTreeMap::from([("scale".into(), "2".into())]);
    BuildSpec { options, ..BuildSpec::new("mock0", Precision::Fp32) }
}

pub(crate) fn run_with(
    session: &mut dyn Session,
    model: &Model,
    x: &[f32],
    host: &dyn Host,
) -> Result<Vec<Vec<f32>>> {
    let mut sink = VecSink::default();
    session.run(&[model.view(&bytes(x))], &mut sink, host)?;
    Ok((0..sink.len()).map(|k| floats(sink.get(k).unwrap().data)).collect())
}

/// The outputs that stay on the device.
pub(crate) type Kept = Vec<Box<dyn DeviceTensor>>;

/// Runs with the outputs that `keep` marks left on the device; returns the other outputs and those.
pub(crate) fn run_keeping(
    session: &mut dyn Session,
    input: Input<'_>,
    keep: &[bool],
) -> Result<(Vec<Vec<f32>>, Kept)> {
    let mut sink = VecSink::default();
    let kept = session.run_on_device(&[input], keep, &mut sink, &Quiet)?;
    Ok(((0..sink.len()).map(|k| floats(sink.get(k).unwrap().data)).collect(), kept))
}

pub(crate) fn read(tensor: &dyn DeviceTensor) -> Result<Vec<u8>> {
    let spec = tensor.spec();
    let mut bytes = vec![0xff; spec.dtype.bytes_of(&spec.shape).unwrap()];
    tensor.read(&mut bytes).map(|()| bytes)
}

pub(crate) fn run(session: &mut dyn Session, model: &Model, x: &[f32]) -> Result<Vec<Vec<f32>>> {
    run_with(session, model, x, &Quiet)
}

/// A sink that only records requests.
#[derive(Default)]
pub(crate) struct Asked(pub(crate) Vec<Vec<usize>>, Vec<Vec<u8>>);

impl OutputSink for Asked {
    fn allocate(&mut self, outputs: &[sdrun_abi::OutputSpec]) -> Result<Vec<&mut [u8]>> {
        self.0 = outputs.iter().map(|o| o.shape.clone()).collect();
        self.1 = outputs.iter().map(|o| vec![0; o.dtype.bytes_of(&o.shape).unwrap()]).collect();
        Ok(self.1.iter_mut().map(Vec::as_mut_slice).collect())
    }
}

/// Makes every call, in order, and returns the first that fails.
pub(crate) fn all_calls(provider: &dyn Provider, behaviour: &str) -> Result<(), (&'static str, Error)> {
    let model = Model::small();
    let weights = Weights::ramp(&model, 0.25);
    let at = |call: &'static str| move |error: Error| (call, error);
    provider.init(&init_config(behaviour), &Quiet).map_err(at("init"))?;
    provider.devices().map_err(at("devices"))?;
    provider.capabilities("mock0").map_err(at("capabilities"))?;
    provider.check("mock-1", "mock0").map_err(at("check"))?;
    provider.assess(&model.json(), &spec()).map_err(at("assess"))?;
    let engine = provider.build(&model.json(), &spec(), &weights, &Quiet).map_err(at("build"))?;
    let payload = engine.serialize().map_err(at("serialize"))?;
    let engine: Box<dyn Engine> = provider.load(&payload, &spec(), &Quiet).map_err(at("load"))?;
    let mut session = engine.session(&weights, &Quiet).map_err(at("session"))?;
    session.refit(&["b"], &weights, &Quiet).map_err(at("refit"))?;
    let x = [1.0, 2.0, 3.0, 4.0, 5.0];
    let outputs = run(session.as_mut(), &model, &x).map_err(at("run"))?;
    assert_eq!(outputs, model.expected(&x, 2.0, weights.sum(&model)));
    let (_, kept) = run_keeping(session.as_mut(), Input::Host(model.view(&bytes(&x))), &[true, false])
        .map_err(at("run on the device"))?;
    assert_eq!(floats(&read(kept[0].as_ref()).map_err(at("read"))?), outputs[0]);
    session.memory().map_err(at("memory"))?;
    Ok(())
}

/// How the end of a process that aborted is described.
pub(crate) const ABORTED: &str =
    if cfg!(windows) { "exception 0xC0000409, fail-fast" } else { "signal 6, SIGABRT" };

fn status(pid: u32) -> Option<sysinfo::ProcessStatus> {
    let pid = sysinfo::Pid::from_u32(pid);
    let mut system = sysinfo::System::new();
    system.refresh_processes(sysinfo::ProcessesToUpdate::Some(&[pid]), true);
    Some(system.process(pid)?.status())
}

/// Whether there is such a process. It may be a zombie.
pub(crate) fn exists(pid: u32) -> bool {
    status(pid).is_some()
}

/// Whether a process exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    status(pid).is_some_and(|status| status != sysinfo::ProcessStatus::Zombie)
}

/// Kills a process from outside.
pub(crate) fn kill(pid: u32) {
    let pid = pid.to_string();
    let arguments = if cfg!(windows) { vec!["/F", "/PID", &pid] } else { vec!["-9", &pid] };
    let killed = Command::new(if cfg!(windows) { "taskkill" } else { "kill" }).args(arguments).status();
    assert!(killed.unwrap().success());
}

/// Waits for something that must happen soon, but at an unknown time.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

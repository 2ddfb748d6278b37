use crate::{
    behaviour::{self, Behaviour, chosen, driver, enter},
    model::{Description, Tensor, compatibility},
};
use sdrun_abi::{
    Assessment, BuildSpec, CancelSupport, Capabilities, Compatibility, DType, Device, DeviceKind,
    DeviceTensor, Engine, EngineInfo, Error, ErrorCode, Flow, Host, InitConfig, Input, LogLevel,
    MemoryReport, OutputSink, OutputSpec, Precision, Provider, RefitReport, Result, RuntimeInfo, Session,
    TensorView, UnsupportedNode, WeightSource, WeightUpdate,
};
use std::{collections::BTreeMap, sync::Arc, thread, time::Duration};

const DEVICE: &str = "mock0";
/// `slow_progress` stops after this many steps of a millisecond.
const STEPS: u64 = 60_000;

pub(crate) struct Mock;

fn known(device: &str) -> Result<()> {
    if device == DEVICE {
        return Ok(());
    }
    Err(Error::not_found(format!("the mock provider has no device `{device}`")).with_hint("it has mock0"))
}

fn cancelled() -> Error {
    Error::new(ErrorCode::Cancelled, "cancelled")
}

impl Provider for Mock {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        for (key, value) in &config.options {
            match key.as_str() {
                "behaviour" => behaviour::choose(value.parse()?),
                "driver" => behaviour::choose_driver(value.into()),
                #[cfg(unix)]
                "escape" => {
                    let done = crate::escape::attempts(value.as_ref(), config);
                    return Ok(RuntimeInfo::new("mock", done, None));
                }
                _ => return Err(Error::invalid(format!("the mock provider has no option `{key}`"))),
            }
        }
        enter("init")?;
        host.log(LogLevel::Info, "mock", "ready");
        Ok(RuntimeInfo::new("mock", "1.0.0", None))
    }

    fn devices(&self) -> Result<Vec<Device>> {
        enter("devices")?;
        Ok(vec![Device::new(DEVICE, "Mock device", DeviceKind::Cpu, "mock")])
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        enter("capabilities")?;
        known(device)?;
        let mut can = Capabilities::new(vec![Precision::Fp32], vec![DType::F32]);
        can.weight_update = WeightUpdate::InPlace;
        can.cancel = CancelSupport::Prompt;
        can.device_free_build = true;
        can.bake = true;
        can.device_tensors = true;
        Ok(can)
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        enter("build")?;
        known(&spec.device)?;
        spec.precision.check_offered(&[Precision::Fp32], "the mock provider")?;
        let mut description = Description::of_model(model, spec)?;
        if spec.bake {
            let sums = pull(&description.weights, weights)?;
            description.baked = Some(total(&description, &sums));
        }
        match chosen() {
            Behaviour::SlowProgress => {
                for step in 0..STEPS {
                    if host.progress("compile", step, STEPS) == Flow::Cancel {
                        return Err(cancelled());
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
            Behaviour::IgnoresCancel => {
                for step in 0..100 {
                    host.progress("compile", step, 100);
                    host.log(LogLevel::Debug, "mock", "going on");
                    host.cancelled();
                    pull(&description.weights, weights)?;
                }
            }
            Behaviour::HugeLog => {
                host.log(LogLevel::Warn, "mock", &"x".repeat(1 << 20));
                for line in 0..10_000 {
                    host.log(LogLevel::Debug, "mock", &format!("line {line} {}", "y".repeat(200)));
                    eprintln!("line {line} {}", "z".repeat(200));
                }
            }
            _ => {
                host.progress("compile", 1, 1);
            }
        }
        Ok(Box::new(MockEngine::new(description)))
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, _: &dyn Host) -> Result<Box<dyn Engine>> {
        enter("load")?;
        known(&spec.device)?;
        Ok(Box::new(MockEngine::new(Description::of_payload(payload)?)))
    }

    fn check(&self, built: &str, device: &str) -> Result<Compatibility> {
        enter("check")?;
        known(device)?;
        Ok(match built {
            built if built == compatibility(&driver()) => Compatibility::Optimal,
            "mock-0" => Compatibility::PreferRecompile("it was built by an older mock".into()),
            other => Compatibility::Unsupported(format!("it was built for `{other}`")),
        })
    }

    /// Counts f32 elements. Reports an input without elements as a node that it cannot run.
    fn assess(&self, model: &[u8], spec: &BuildSpec) -> Result<Assessment> {
        enter("assess")?;
        known(&spec.device)?;
        let description = Description::of_model(model, spec)?;
        let bytes = |tensors: &[Tensor]| -> u64 {
            tensors.iter().map(|t| 4 * t.shape.iter().product::<usize>() as u64).sum()
        };
        let empty = description.inputs.iter().filter(|t| t.shape.contains(&0));
        let mut assessment = Assessment::unsupported(
            empty
                .map(|t| UnsupportedNode {
                    name: t.name.clone(),
                    op: "Input".into(),
                    reason: "it has no elements".into(),
                })
                .collect(),
        );
        assessment.memory.host_weights = Some(bytes(&description.weights));
        assessment.memory.host_activations = Some(bytes(&description.outputs));
        assessment.session_compiles = Some(false);
        Ok(assessment)
    }
}

struct MockEngine {
    description: Arc<Description>,
    info: EngineInfo,
}

impl MockEngine {
    fn new(description: Description) -> Self {
        let info = description.info();
        MockEngine { description: Arc::new(description), info }
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        // A drop cannot return an error, but faults in it still happen.
        let _ = enter("drop");
    }
}

impl Engine for MockEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        enter("serialize")?;
        self.description.to_payload()
    }

    fn bake(&self, weights: &dyn WeightSource, _: &dyn Host) -> Result<Box<dyn Engine>> {
        enter("bake")?;
        let mut description = (*self.description).clone();
        let sums = pull(&description.weights, weights)?;
        description.baked = Some(total(&description, &sums));
        Ok(Box::new(MockEngine::new(description)))
    }

    fn session(&self, weights: &dyn WeightSource, _: &dyn Host) -> Result<Box<dyn Session>> {
        enter("session")?;
        let sums = match (self.description.baked, chosen()) {
            (Some(_), _) | (None, Behaviour::LyingRefit) => BTreeMap::new(),
            (None, _) => pull(&self.description.weights, weights)?,
        };
        Ok(Box::new(MockSession { description: self.description.clone(), sums }))
    }
}

/// The sum of each weight.
type Sums = BTreeMap<String, f64>;

fn total(description: &Description, sums: &Sums) -> f32 {
    description.weights.iter().filter_map(|w| sums.get(&w.name)).sum::<f64>() as f32
}

fn pull(tensors: &[Tensor], weights: &dyn WeightSource) -> Result<Sums> {
    let get = |tensor: &Tensor| {
        let weight = weights.get(&tensor.name)?;
        if weight.dtype != DType::F32 || weight.shape != tensor.shape {
            let (dtype, shape) = (weight.dtype, &weight.shape);
            return Err(Error::invalid(format!("weight `{}` came as {dtype} {shape:?}", tensor.name)));
        }
        Ok(weight)
    };
    let sum = |bytes: &[u8]| floats(bytes).map(f64::from).sum::<f64>();
    let doubles = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).sum::<f64>();
    let named = |tensor: &Tensor| Ok((tensor.name.clone(), sum(get(tensor)?.data())));
    match chosen() {
        Behaviour::HoldWeights => {
            let held = tensors.iter().map(get).collect::<Result<Vec<_>>>()?;
            Ok(tensors.iter().zip(&held).map(|(t, w)| (t.name.clone(), sum(w.data()))).collect())
        }
        Behaviour::EncodedWeights => {
            let one = |tensor: &Tensor| match weights.encoded(&tensor.name, &["mock_f32", "mock_f64"])? {
                Some(blocks) if blocks.shape == tensor.shape && blocks.encoding == "mock_f64" => {
                    Ok((tensor.name.clone(), doubles(blocks.data())))
                }
                Some(blocks) => Err(Error::invalid(format!("weight `{}` came as {blocks:?}", tensor.name))),
                None => named(tensor),
            };
            tensors.iter().map(one).collect()
        }
        Behaviour::ParallelWeights => thread::scope(|scope| {
            let parts: Vec<_> = tensors
                .chunks(tensors.len().div_ceil(4).max(1))
                .map(|part| scope.spawn(move || part.iter().map(named).collect::<Result<Vec<_>>>()))
                .collect();
            let mut sums = Sums::new();
            for part in parts {
                sums.extend(part.join().map_err(|_| Error::internal("a thread panicked"))??);
            }
            Ok(sums)
        }),
        _ => tensors.iter().map(named).collect(),
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))
}

struct MockSession {
    description: Arc<Description>,
    sums: Sums,
}

impl Drop for MockSession {
    fn drop(&mut self) {
        // As for engines.
        let _ = enter("drop");
    }
}

/// A tensor on the mock's device, which is main memory.
struct MockTensor {
    spec: OutputSpec,
    bytes: Vec<u8>,
}

impl DeviceTensor for MockTensor {
    fn spec(&self) -> &OutputSpec {
        &self.spec
    }

    fn read(&self, bytes: &mut [u8]) -> Result<()> {
        enter("read")?;
        bytes.copy_from_slice(&self.bytes);
        Ok(())
    }
}

impl Drop for MockTensor {
    fn drop(&mut self) {
        // As for engines.
        let _ = enter("drop");
    }
}

impl Session for MockSession {
    fn refit(&mut self, changed: &[&str], weights: &dyn WeightSource, _: &dyn Host) -> Result<RefitReport> {
        enter("refit")?;
        let all = &self.description.weights;
        let tensors = changed
            .iter()
            .map(|name| all.iter().find(|w| w.name == *name).cloned())
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Error::not_found(format!("one of {changed:?} is not a weight of this engine")))?;
        let bytes = tensors.iter().map(|t| 4 * t.shape.iter().product::<usize>() as u64).sum();
        if *chosen() != Behaviour::LyingRefit {
            tensors.iter().try_for_each(|tensor| weights.check(&tensor.name))?;
            let fresh = pull(&tensors, weights)?;
            self.sums.extend(fresh);
        }
        Ok(RefitReport::new(WeightUpdate::InPlace, tensors.len(), bytes))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        let inputs: Vec<_> = inputs.iter().map(|view| Input::Host(*view)).collect();
        let keep = vec![false; self.description.outputs.len()];
        self.run_on_device(&inputs, &keep, outputs, host).map(drop)
    }

    fn run_on_device(
        &mut self,
        inputs: &[Input<'_>],
        keep: &[bool],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<Vec<Box<dyn DeviceTensor>>> {
        enter("run")?;
        match chosen() {
            Behaviour::SlowProgress => {
                for _ in 0..STEPS {
                    if host.cancelled() {
                        return Err(cancelled());
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
            Behaviour::NoOutput => return Ok(Vec::new()),
            Behaviour::AsksTwice => {
                outputs.allocate(&self.specs())?;
            }
            _ => {}
        }
        let input = match inputs.first() {
            Some(Input::Host(view)) => view.data,
            Some(Input::Device(tensor)) => {
                let tensor = tensor.downcast_ref::<MockTensor>();
                &tensor.ok_or_else(|| Error::internal("the host passed on a foreign tensor"))?.bytes
            }
            None => return Err(Error::invalid("the run has no input")),
        };
        let weights = self.description.baked.unwrap_or_else(|| total(&self.description, &self.sums));
        let scale = self.description.scale;
        let compute = |k: usize, y: &mut [u8]| {
            let x = input.as_chunks::<4>().0.iter().cycle().map(|b| f32::from_le_bytes(*b));
            for (y, x) in y.as_chunks_mut::<4>().0.iter_mut().zip(x) {
                *y = (scale * x + (weights + k as f32)).to_le_bytes();
            }
        };
        let (mut given, mut kept) = (Vec::new(), Vec::new());
        for (k, (spec, keep)) in self.specs().into_iter().zip(keep).enumerate() {
            match keep {
                true => {
                    let mut bytes = vec![0; spec.dtype.bytes_of(&spec.shape).unwrap_or_default()];
                    compute(k, &mut bytes);
                    kept.push(Box::new(MockTensor { spec, bytes }) as Box<dyn DeviceTensor>);
                }
                false => given.push((k, spec)),
            }
        }
        let specs: Vec<OutputSpec> = given.iter().map(|(_, spec)| spec.clone()).collect();
        for ((k, _), buffer) in given.into_iter().zip(outputs.allocate(&specs)?) {
            compute(k, buffer);
        }
        Ok(kept)
    }

    fn memory(&self) -> Result<MemoryReport> {
        enter("memory")?;
        let elements = |t: &Tensor| t.shape.iter().product::<usize>() as u64;
        let weights = self.description.weights.iter().map(elements).sum::<u64>() * 4;
        Ok(MemoryReport::new(Some(weights), None, None))
    }
}

impl MockSession {
    fn specs(&self) -> Vec<OutputSpec> {
        let shape = |t: &Tensor| match (chosen(), t.shape.split_last()) {
            (Behaviour::WrongOutputShape, Some((last, rest))) => [rest, &[last + 1]].concat(),
            (Behaviour::HugeOutput, _) => vec![1 << 58],
            _ => t.shape.clone(),
        };
        self.description.outputs.iter().map(|t| OutputSpec { dtype: DType::F32, shape: shape(t) }).collect()
    }
}

//! The small pipelines of `sdrun-tiny`, by component, with PyTorch's results.

use crate::lab::device_of;
use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Model, Provider, Session, Shapes, Tensors,
    abi::{DType, NoHost, Precision, WeightSource},
    verify::{self, Comparison, Tolerance},
    weights::{Adapter, Binding, Checkpoint, SafetensorsWeights, WeightStack, synthetic},
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// A component of a pipeline.
pub struct Part {
    /// `sd/unet`.
    pub name: String,
    /// `sd`.
    pub pipeline: String,
    /// `unet`.
    pub component: String,
    /// The pipeline's folder.
    pub folder: PathBuf,
    /// The export with weights A.
    pub model: Model,
    /// PyTorch's inputs.
    pub inputs: Tensors,
    /// PyTorch's outputs in fp32, by checkpoint (`A`, `B`). `NAME.everyK` holds every K-th element of output `NAME`.
    pub outputs: BTreeMap<String, Tensors>,
}

/// A tensor of a safetensors file.
pub fn tensor(file: &SafetensorsWeights, key: &str) -> HostTensor {
    let weight = file.get(key).unwrap_or_else(|e| panic!("{key}: {e}"));
    HostTensor::from_bytes(weight.dtype, weight.shape.clone(), weight.data())
        .unwrap_or_else(|e| panic!("{key}: {e}"))
}

/// All components that have an oracle.
pub fn parts() -> Vec<Part> {
    let pattern = sdrun_tiny::folder().join("*/onnx/*/model.onnx").display().to_string();
    let found = glob::glob(&pattern).unwrap_or_else(|e| panic!("{pattern}: {e}"));
    let parts: Vec<Part> =
        found.flatten().filter(|path| oracle_of(path).1.is_file()).map(|path| Part::open(&path)).collect();
    assert_eq!(parts.len(), 21, "components in {pattern}");
    parts
}

/// The component of this name, such as `sd/unet`.
pub fn part(name: &str) -> Part {
    Part::open(&sdrun_tiny::folder().join(name.replace('/', "/onnx/")).join("model.onnx"))
}

/// The name of a model's component, and the file of its oracle.
fn oracle_of(path: &Path) -> (String, PathBuf) {
    let mut above = path.ancestors().skip(1);
    let component = above.next().map(last).unwrap_or_default();
    let folder = above.nth(1).unwrap_or(path);
    let oracle = folder.join(format!("oracle/{component}.safetensors"));
    (component, oracle)
}

fn last(path: &Path) -> String {
    path.file_name().unwrap_or_default().display().to_string()
}

impl Part {
    fn open(path: &Path) -> Part {
        let (component, oracle) = oracle_of(path);
        let folder = path.ancestors().nth(3).unwrap_or(path).to_path_buf();
        let pipeline = last(&folder);
        let oracle = SafetensorsWeights::open(&[&oracle]).unwrap_or_else(|e| panic!("{e}"));
        let model = Model::open(path).unwrap_or_else(|e| panic!("{e}"));
        let (mut inputs, mut outputs) = (Tensors::new(), BTreeMap::<String, Tensors>::new());
        for key in oracle.names() {
            let value = tensor(&oracle, key);
            if let Some(name) = key.strip_prefix("in.") {
                match name.strip_suffix(".first16") {
                    Some(name) => inputs.insert(name.into(), picture(&pipeline, &component, name, &value)),
                    None => inputs.insert(name.into(), value),
                };
            } else if let Some((which, name)) = key.strip_prefix("out.").and_then(|rest| rest.split_once('.'))
                && value.dtype() == DType::F32
            {
                outputs.entry(which.into()).or_default().insert(name.into(), value);
            }
        }
        Part { name: format!("{pipeline}/{component}"), pipeline, component, folder, model, inputs, outputs }
    }

    /// The shapes of the inputs.
    pub fn shapes(&self) -> Shapes {
        self.inputs.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect()
    }

    /// A session on `provider` with weights A.
    pub fn session(&self, provider: &Provider, options: &[(&str, &str)]) -> sdrun::Result<Session> {
        let mut build = BuildOptions::new(device_of(provider)?);
        build.cache = CachePolicy::Off;
        build.options = options.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        build.shapes = self.shapes();
        provider.build(&self.model, &build, &NoHost)?.session(&self.own(), &NoHost)
    }

    /// Weights A from the model file.
    pub fn own(&self) -> WeightStack {
        WeightStack::of_model(self.binding(), self.model.weights())
    }

    /// The binding table of the model. All text encoders of these pipelines have the same width, so the graph does not show which one
    /// it is.
    pub fn binding(&self) -> Binding {
        let mut binding = self.model.binding().unwrap_or_else(|e| panic!("{}: {e}", self.name));
        if binding.component.is_none() {
            binding.component = self.component.parse().ok();
        }
        binding
    }

    /// The weights of a checkpoint in this pipeline's folder.
    pub fn of(&self, checkpoint: &str) -> WeightStack {
        let checkpoint = Checkpoint::open(self.folder.join(checkpoint)).unwrap_or_else(|e| panic!("{e}"));
        WeightStack::of_checkpoint(self.binding(), &checkpoint)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// An adapter in this pipeline's folder.
    pub fn adapter(&self, name: &str) -> Adapter {
        let file = self.folder.join(format!("lora/{name}.safetensors"));
        Adapter::open(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
    }

    /// The outputs for [`inputs`](Part::inputs).
    pub fn run(&self, session: &mut Session) -> Tensors {
        session.run(&self.inputs, &NoHost).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }
}

/// A large input, of which the oracle holds the first 16 elements: a seeded picture in [-1, 1], or in [0, 1] for a ControlNet.
fn picture(pipeline: &str, component: &str, name: &str, first: &HostTensor) -> HostTensor {
    const SHAPE: [usize; 4] = [2, 3, 128, 96];
    let (name, positive) = match name {
        "controlnet_cond" => ("cond", true),
        _ => ("img", false),
    };
    let values = synthetic::inputs(&format!("tiny-{pipeline}-{component}"), name, &SHAPE);
    let values = values.unwrap_or_else(|e| panic!("{e}")).into_iter().map(|v| v.clamp(-1.0, 1.0));
    let values: Vec<u8> =
        values.map(|v| if positive { v.abs() } else { v }).flat_map(f32::to_le_bytes).collect();
    assert!(values.starts_with(first.bytes()), "{pipeline}/{component}: another picture");
    HostTensor::from_bytes(DType::F32, SHAPE.to_vec(), &values).unwrap_or_else(|e| panic!("{e}"))
}

/// Describes outputs that are missing or differ from `expected` by more than fp32 rounding. Ignores outputs that are not in
/// `expected`.
pub fn faults(got: &Tensors, expected: &Tensors) -> Vec<String> {
    let mut same = Tensors::new();
    for name in expected.keys() {
        let (output, step) = match name.rsplit_once(".every") {
            Some((output, step)) => (output, step.parse().unwrap_or_else(|e| panic!("{name}: {e}"))),
            None => (name.as_str(), 1),
        };
        let Some(tensor) = got.get(output) else { return vec![format!("there is no output {output}")] };
        same.insert(name.clone(), sampled(tensor, step));
    }
    let wrong = |c: &Comparison| !Tolerance::of(Precision::Fp32).accepts(c);
    match verify::compare(&same, expected) {
        Ok(compared) => compared.into_iter().filter(wrong).map(|c| format!("{c:?}")).collect(),
        Err(why) => vec![why.to_string()],
    }
}

/// Every `step`-th element, or a copy of the whole tensor for 1.
fn sampled(tensor: &HostTensor, step: usize) -> HostTensor {
    let elements: Vec<u8> =
        tensor.bytes().chunks(tensor.dtype().size()).step_by(step).flatten().copied().collect();
    let shape = match step {
        1 => tensor.shape().to_vec(),
        _ => vec![elements.len() / tensor.dtype().size()],
    };
    HostTensor::from_bytes(tensor.dtype(), shape, &elements).unwrap_or_else(|e| panic!("{e}"))
}

//! What crosses the border as JSON, and the tensor element types.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

/// Element type of a tensor. Numbers are those of ONNX's `TensorProto.DataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
#[allow(missing_docs)]
pub enum DType {
    F32 = 1,
    U8 = 2,
    I8 = 3,
    U16 = 4,
    I16 = 5,
    I32 = 6,
    I64 = 7,
    Bool = 9,
    F16 = 10,
    F64 = 11,
    U32 = 12,
    U64 = 13,
    BF16 = 16,
    F8E4M3 = 17,
    F8E5M2 = 19,
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [DType; 15] = {
        use DType::*;
        [F32, U8, I8, U16, I16, I32, I64, Bool, F16, F64, U32, U64, BF16, F8E4M3, F8E5M2]
    };
    /// The type with this ONNX number.
    pub fn from_onnx(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as i32 == code)
    }
    /// Bytes of one element.
    pub fn size(self) -> usize {
        use DType::*;
        match self {
            U8 | I8 | Bool | F8E4M3 | F8E5M2 => 1,
            U16 | I16 | F16 | BF16 => 2,
            F32 | I32 | U32 => 4,
            F64 | I64 | U64 => 8,
        }
    }
    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        use DType::*;
        matches!(self, F32 | F16 | F64 | BF16 | F8E4M3 | F8E5M2)
    }
    /// Lower-case name: `f32`, `i64`, `bool`, …
    pub fn name(self) -> &'static str {
        use DType::*;
        match self {
            F32 => "f32",
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            I32 => "i32",
            I64 => "i64",
            Bool => "bool",
            F16 => "f16",
            F64 => "f64",
            U32 => "u32",
            U64 => "u64",
            BF16 => "bf16",
            F8E4M3 => "f8e4m3",
            F8E5M2 => "f8e5m2",
        }
    }
    /// Bytes of a contiguous tensor of this type, or `None` on overflow.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        shape.iter().try_fold(self.size(), |n, d| n.checked_mul(*d))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Arithmetic an engine computes in, and what it keeps its weights in; always stated, never a library's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Precision {
    Fp32,
    Fp16,
    Bf16,
    /// Large matrices and filters in ggml's 8-bit blocks; the provider says in what they are multiplied.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// The same in its 4-bit blocks.
    #[serde(rename = "q4_k")]
    Q4K,
}

impl Precision {
    /// All there are.
    pub const ALL: [Precision; 5] =
        [Precision::Fp32, Precision::Fp16, Precision::Bf16, Precision::Q8_0, Precision::Q4K];

    /// The element type of floating-point tensors; `None` where weights are quantized.
    pub fn float_type(self) -> Option<DType> {
        match self {
            Precision::Fp32 => Some(DType::F32),
            Precision::Fp16 => Some(DType::F16),
            Precision::Bf16 => Some(DType::BF16),
            Precision::Q8_0 | Precision::Q4K => None,
        }
    }

    /// `Unimplemented` where it is none of those that `who` offers.
    pub fn check_offered(self, offered: &[Precision], who: &str) -> Result<(), Error> {
        if offered.contains(&self) {
            return Ok(());
        }
        let names: Vec<&str> = offered.iter().map(|precision| precision.name()).collect();
        Err(Error::unsupported(format!("{who} does not compute in {self}"))
            .with_hint(format!("use {}", names.join(" or "))))
    }

    /// As it is spelled on command lines and in files.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp32 => "fp32",
            Precision::Fp16 => "fp16",
            Precision::Bf16 => "bf16",
            Precision::Q8_0 => "q8_0",
            Precision::Q4K => "q4_k",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Precision {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "fp32" | "f32" => Ok(Precision::Fp32),
            "fp16" | "f16" => Ok(Precision::Fp16),
            "bf16" => Ok(Precision::Bf16),
            "q8_0" => Ok(Precision::Q8_0),
            "q4_k" | "q4_K" => Ok(Precision::Q4K),
            _ => Err(format!(
                "unknown precision `{s}`: use {}",
                Precision::ALL.map(Precision::name).join(", ")
            )),
        }
    }
}

/// What a plugin is told when it is initialised.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InitConfig {
    /// Folder of the plugin's manifest; files shipped with the plugin lie beside or below it.
    pub plugin_dir: PathBuf,
    /// Folder that holds the vendor's runtime library, where the host found one.
    pub runtime_dir: Option<PathBuf>,
    /// Folder for temporary files (the staging of models for vendor parsers). Exists, mode 0700.
    pub temp_dir: PathBuf,
    /// Folder for what the provider can make again (compiled kernels), its own. Exists, mode 0700.
    #[serde(default)]
    pub cache_dir: Option<PathBuf>,
    /// Provider options given by the user.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
}

/// The vendor's runtime as it was found by `init`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuntimeInfo {
    /// Name, for example `openvino`.
    pub name: String,
    /// Version as the library itself reports it.
    pub version: String,
    /// The library file that was loaded; `None` for one linked in.
    pub library: Option<PathBuf>,
}

/// Class of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DeviceKind {
    Cpu,
    Gpu,
    Npu,
}

/// One piece of hardware a provider can use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Stable across restarts: PCI address, UUID, or `cpu`.
    pub id: String,
    /// Position in the provider's list.
    pub index: usize,
    /// Marketing name.
    pub name: String,
    /// Class.
    pub kind: DeviceKind,
    /// Engines are exchangeable between devices of one class (instruction set, GPU architecture).
    pub class: String,
    /// Memory in bytes, where known.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Why engines for it can be built here but not run: the hardware is not in this machine. `None` where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
}

/// How weights get into an engine, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightUpdate {
    /// Overwritten in the live session.
    InPlace,
    /// Given whenever the engine is loaded.
    OnLoad,
    /// Passed as inputs of every run.
    AsInputs,
    /// The vendor compiler runs again.
    Rebuild,
}

/// How soon a build or a run can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelSupport {
    /// Only by killing the process (run it isolated).
    None,
    /// Between the phases that are reported as progress.
    BetweenPhases,
    /// Within about a second.
    Prompt,
}

/// What a provider can do on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Precisions an engine can be built in; the first low one is the device's best.
    pub precisions: Vec<Precision>,
    /// Element types accepted for inputs and outputs.
    pub io_dtypes: Vec<DType>,
    /// How weights are changed.
    pub weight_update: WeightUpdate,
    /// How soon a call stops.
    pub cancel: CancelSupport,
    /// Whether an engine can be built with dimensions left open.
    pub dynamic_shapes: bool,
    /// Whether an engine can be built without the device present.
    pub device_free_build: bool,
    /// Whether weights can be baked into the engine file.
    pub bake: bool,
    /// Whether weights can be streamed to a device smaller than the model.
    #[serde(default)]
    pub streaming: bool,
    /// Whether outputs can stay on the device and be inputs there ([`Session::run_on_device`](crate::Session::run_on_device)).
    #[serde(default)]
    pub device_tensors: bool,
}

/// Lists of shapes by the name of an input.
pub type OpenShapes = BTreeMap<String, Vec<Vec<usize>>>;

/// The shapes that belong together: the first of each list, then the second and so on; a list of one is in all sets, an
/// empty one in none. One set, without shapes, where nothing is listed.
pub fn shape_sets(open: &OpenShapes) -> Vec<BTreeMap<String, Vec<usize>>> {
    let sets = open.values().map(Vec::len).max().unwrap_or(0).max(1);
    let of_set = |at: usize| {
        let shape = |list: &Vec<Vec<usize>>| list.get(at).or(list.first()).cloned();
        open.iter().filter_map(|(input, list)| Some((input.clone(), shape(list)?))).collect()
    };
    (0..sets).map(of_set).collect()
}

/// How an engine is to be built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BuildSpec {
    /// [`Device::id`].
    pub device: String,
    /// Arithmetic.
    pub precision: Precision,
    /// Threads for CPU devices; `None` leaves it to the provider's documented default (all cores).
    #[serde(default)]
    pub threads: Option<usize>,
    /// Store the weights in the engine (faster load, no refit).
    #[serde(default)]
    pub bake: bool,
    /// Shapes that inputs with open dimensions are to take, which the host has checked: the first of one input together with
    /// the first of the others and so on; an input that lists one shape has that in all. A compiler for ranges takes each
    /// dimension from its least to its greatest, the shape in the middle of the list as the usual one; a compiler for fixed
    /// sizes serves these alone; whoever serves any shape has no use for them.
    #[serde(default)]
    pub open_shapes: OpenShapes,
    /// The most bytes of device memory for weights; the rest stays with the host and is copied when it is needed. Only given
    /// where [`Capabilities::streaming`] is declared.
    #[serde(default)]
    pub vram_budget: Option<u64>,
    /// Provider options given by the user; unknown keys are an error of the provider.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
}

impl BuildSpec {
    /// For fixed shapes, without weights, and with nothing else chosen.
    pub fn new(device: impl Into<String>, precision: Precision) -> Self {
        BuildSpec {
            device: device.into(),
            precision,
            threads: None,
            bake: false,
            open_shapes: OpenShapes::new(),
            vram_budget: None,
            options: BTreeMap::new(),
        }
    }
}

/// An input or output of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name in the graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions; `None` where open.
    pub shape: Vec<Option<usize>>,
}

impl TensorSpec {
    /// Whether a dimension is open.
    pub fn is_open(&self) -> bool {
        self.shape.iter().any(Option::is_none)
    }
}

/// A weight an engine needs before it can run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightSpec {
    /// Initializer name in the graph.
    pub name: String,
    /// Element type in the graph; a source must deliver this type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
}

/// What an engine is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// Inputs, in the order `Session::run` takes them.
    pub inputs: Vec<TensorSpec>,
    /// Outputs, in the order `Session::run` gives them.
    pub outputs: Vec<TensorSpec>,
    /// Weights a session must be given. Empty when they are baked in.
    pub weights: Vec<WeightSpec>,
    /// Opaque: what the runtime needs to be for this engine to load. Compared by [`Provider::check`](crate::Provider::check).
    pub compatibility: String,
}

/// Whether an engine built elsewhere or earlier can be used here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "snake_case")]
pub enum Compatibility {
    /// As good as a new one.
    Optimal,
    /// Works, but a new build would be better; the sentence says why.
    PreferRecompile(String),
    /// Does not work; the sentence says why.
    Unsupported(String),
}

/// How a change of weights was carried out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RefitReport {
    /// The way that was used.
    pub method: WeightUpdate,
    /// Number of tensors handed to the runtime.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Memory of a session in bytes. `None` is "unknown", never zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Weights as the runtime holds them.
    pub weights: Option<u64>,
    /// Activations and scratch.
    pub activations: Option<u64>,
    /// Device memory in use by the session.
    pub device: Option<u64>,
}

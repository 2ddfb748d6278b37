//! Types that cross the ABI as JSON. Readers skip fields that they do not recognize.

use crate::{DType, Precision, WeightUpdate};
use serde::{Deserialize, Deserializer, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

/// What a plugin receives when it is initialized.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InitConfig {
    /// Folder of the plugin's manifest. Files shipped with the plugin are in or below it.
    pub plugin_dir: PathBuf,
    /// Folder with the vendor's runtime library, if the host found one.
    pub runtime_dir: Option<PathBuf>,
    /// Folders of the libraries of installed extensions ([`Provide::extensions`](crate::Provide::extensions)), by name.
    #[serde(default)]
    pub extensions: BTreeMap<String, PathBuf>,
    /// Folder for temporary files (the staging of models for vendor parsers). Exists, mode 0700.
    pub temp_dir: PathBuf,
    /// A folder for hard links to files with weights, on the same file system as `temp_dir`. A provider in a sandbox can make links only
    /// here. It can move files into this folder but not write to files in it. `None` outside a sandbox: links may be in `temp_dir`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links_dir: Option<PathBuf>,
    /// The provider's own folder for files that it can recreate (compiled kernels). Exists, mode 0700.
    #[serde(default)]
    pub cache_dir: Option<PathBuf>,
    /// Provider options given by the user.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
}

/// The vendor's runtime that `init` loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RuntimeInfo {
    /// Name, for example `openvino`.
    pub name: String,
    /// Version as the library itself reports it.
    pub version: String,
    /// The library file that was loaded; `None` if it is linked in.
    #[serde(default)]
    pub library: Option<PathBuf>,
}

impl RuntimeInfo {
    /// A runtime of this name and version, loaded from `library`.
    pub fn new(name: impl Into<String>, version: impl Into<String>, library: Option<PathBuf>) -> Self {
        RuntimeInfo { name: name.into(), version: version.into(), library }
    }
}

/// Lists of shapes, by input name.
pub type OpenShapes = BTreeMap<String, Vec<Vec<usize>>>;

/// The sets of shapes that belong together: the first shape of each list, then the second, and so on. A list of one
/// shape is in all sets; an empty list is in none. If nothing is listed, returns one set without shapes.
pub fn shape_sets(open: &OpenShapes) -> Vec<BTreeMap<String, Vec<usize>>> {
    let sets = open.values().map(Vec::len).max().unwrap_or(0).max(1);
    let of_set = |at: usize| {
        let shape = |list: &Vec<Vec<usize>>| list.get(at).or(list.first()).cloned();
        open.iter().filter_map(|(input, list)| Some((input.clone(), shape(list)?))).collect()
    };
    (0..sets).map(of_set).collect()
}

/// How to build an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BuildSpec {
    /// [`Device::id`](crate::Device::id).
    pub device: String,
    /// Arithmetic.
    pub precision: Precision,
    /// Threads for CPU devices; `None` means [`default_threads`](crate::default_threads), if the provider documents no other
    /// default.
    #[serde(default)]
    pub threads: Option<usize>,
    /// Store the weights in the engine (faster load, no refit).
    #[serde(default)]
    pub bake: bool,
    /// Shapes that inputs with open dimensions will have; the host has checked them. The first shape of one input
    /// belongs to the first of the others, and so on; an input with one shape has it in all sets. A compiler for
    /// ranges takes each dimension from its minimum to its maximum, with the middle shape of the list as the typical
    /// one. A compiler for fixed sizes supports only these shapes. A provider that supports any shape ignores them.
    #[serde(default)]
    pub open_shapes: OpenShapes,
    /// Maximum bytes of device memory for weights. The other weights stay in host memory and are copied when needed.
    /// Only set if [`Capabilities::streaming`](crate::Capabilities::streaming) is declared.
    #[serde(default)]
    pub vram_budget: Option<u64>,
    /// Provider options given by the user. The provider reports unknown keys as an error.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
}

impl BuildSpec {
    /// A spec for fixed shapes, without weights, and with defaults for everything else.
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
    /// Dimensions; `None` if open.
    pub shape: Vec<Option<usize>>,
}

impl TensorSpec {
    /// Whether a dimension is open.
    pub fn is_open(&self) -> bool {
        self.shape.iter().any(Option::is_none)
    }
}

/// Whether `shape` matches a stated shape, in which `None` allows any size.
pub fn shape_fits(stated: &[Option<usize>], shape: &[usize]) -> bool {
    stated.len() == shape.len()
        && stated.iter().zip(shape).all(|(known, size)| known.is_none_or(|n| n == *size))
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

/// The inputs, outputs and weights of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// Inputs, in the order that `Session::run` expects.
    pub inputs: Vec<TensorSpec>,
    /// Outputs, in the order that `Session::run` returns them.
    pub outputs: Vec<TensorSpec>,
    /// Weights that a session needs. Empty if they are baked in.
    pub weights: Vec<WeightSpec>,
    /// Opaque description of the runtime that the engine needs. Checked by
    /// [`Provider::check`](crate::Provider::check).
    pub compatibility: String,
}

/// Whether an engine that was built elsewhere or earlier can be used here. An unrecognized verdict is read as
/// `Unsupported`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "snake_case")]
pub enum Compatibility {
    /// As good as a new one.
    Optimal,
    /// Works, but a rebuild would be better; the sentence says why.
    PreferRecompile(String),
    /// Does not work; the sentence says why.
    Unsupported(String),
}

impl<'de> Deserialize<'de> for Compatibility {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Words {
            verdict: String,
            #[serde(default)]
            reason: String,
        }
        let Words { verdict, reason } = Words::deserialize(deserializer)?;
        Ok(match verdict.as_str() {
            "optimal" => Compatibility::Optimal,
            "prefer_recompile" => Compatibility::PreferRecompile(reason),
            "unsupported" => Compatibility::Unsupported(reason),
            other => Compatibility::Unsupported(format!("the provider reports `{other}`: {reason}")),
        })
    }
}

/// How weights were replaced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RefitReport {
    /// The method used.
    pub method: WeightUpdate,
    /// Number of tensors handed to the runtime.
    pub tensors: usize,
    /// Total size of these tensors in bytes.
    pub bytes: u64,
}

impl RefitReport {
    /// `tensors` tensors with a total of `bytes` bytes were replaced by `method`.
    pub fn new(method: WeightUpdate, tensors: usize, bytes: u64) -> Self {
        RefitReport { method, tensors, bytes }
    }
}

/// Memory of a session in bytes. `None` is "unknown", never zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Weights, in the runtime's own format.
    pub weights: Option<u64>,
    /// Activations and scratch.
    pub activations: Option<u64>,
    /// Device memory in use by the session.
    pub device: Option<u64>,
}

impl MemoryReport {
    /// Weights, activations and device memory.
    pub fn new(weights: Option<u64>, activations: Option<u64>, device: Option<u64>) -> Self {
        MemoryReport { weights, activations, device }
    }
}

/// What a graph needs on a device, determined before building ([`Provider::assess`](crate::Provider::assess)).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Assessment {
    /// Every node that the provider cannot run; empty if it can run the graph. `None` is "unknown".
    pub unsupported: Option<Vec<UnsupportedNode>>,
    /// Memory that a session will use.
    pub memory: MemoryEstimate,
    /// Whether creating a session compiles, for this graph and spec. If `None`,
    /// [`Capabilities::session_compiles`](crate::Capabilities::session_compiles) applies.
    pub session_compiles: Option<bool>,
}

/// A node that a provider cannot run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsupportedNode {
    /// Name of the node in the graph; empty if it has none.
    #[serde(default)]
    pub name: String,
    /// Its operator, prefixed with the domain unless that is ai.onnx: `com.microsoft.FusedMatMul`.
    pub op: String,
    /// One sentence: why.
    pub reason: String,
}

/// Bytes of memory that a session will use. `None` is "unknown", never zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// Weights in main memory.
    pub host_weights: Option<u64>,
    /// Activations and scratch in main memory.
    pub host_activations: Option<u64>,
    /// Weights in device memory.
    pub device_weights: Option<u64>,
    /// Activations and scratch in device memory.
    pub device_activations: Option<u64>,
}

impl Assessment {
    /// An assessment with the nodes that the provider cannot run.
    pub fn unsupported(nodes: Vec<UnsupportedNode>) -> Self {
        Assessment { unsupported: Some(nodes), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_of_newer_plugins_are_read() {
        for verdict in [
            Compatibility::Optimal,
            Compatibility::PreferRecompile("older".into()),
            Compatibility::Unsupported("other".into()),
        ] {
            let json = serde_json::to_string(&verdict).unwrap();
            assert_eq!(serde_json::from_str::<Compatibility>(&json).unwrap(), verdict);
        }
        let unknown: Compatibility =
            serde_json::from_str(r#"{"verdict":"needs_update","reason":"of the driver"}"#).unwrap();
        assert_eq!(
            unknown,
            Compatibility::Unsupported("the provider reports `needs_update`: of the driver".into())
        );
    }

    #[test]
    fn reports_may_omit_figures() {
        let report: MemoryReport = serde_json::from_str(r#"{"weights":7,"colour":"red"}"#).unwrap();
        assert_eq!(report, MemoryReport::new(Some(7), None, None));
        let assessment: Assessment =
            serde_json::from_str(r#"{"memory":{"device_weights":9},"mood":1}"#).unwrap();
        assert_eq!((assessment.unsupported, assessment.memory.device_weights), (None, Some(9)));
    }
}

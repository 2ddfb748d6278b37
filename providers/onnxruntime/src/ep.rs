//! What differs between execution providers: the names of their devices, the precisions they compute in, and their settings.

use crate::ffi::EpDevice;
use sdrun_abi::{DType, DeviceKind, Precision, Result};
use sdrun_graph::{Dim, Graph, Node, Value};
use sdrun_provider_common::refused::{misplaced_corners, refuse};
use std::path::{Path, PathBuf};

/// The CPU, which ONNX Runtime always has.
pub(crate) const CPU: &str = "CPUExecutionProvider";
pub(crate) const COREML: &str = "CoreMLExecutionProvider";
const CUDA: &str = "CUDAExecutionProvider";
const DIRECTML: &str = "DmlExecutionProvider";
const MLX: &str = "MLXExecutionProvider";
const OPENVINO: &str = "OpenVINOExecutionProvider";
const QNN: &str = "QNNExecutionProvider";
const TENSORRT_RTX: &str = "NvTensorRTRTXExecutionProvider";
const WEBGPU: &str = "WebGpuExecutionProvider";

/// The first part of the identifiers of an execution provider's devices.
pub(crate) fn short(provider: &str) -> String {
    match provider {
        DIRECTML => "dml".into(),
        TENSORRT_RTX => "tensorrt-rtx".into(),
        other => other.trim_end_matches("ExecutionProvider").to_lowercase(),
    }
}

/// The second part. `index` is the position among the devices of the same execution provider.
pub(crate) fn place(device: &EpDevice, index: usize) -> String {
    match device.provider.as_str() {
        // It calls them CPU, GPU, GPU.1 and NPU.
        OPENVINO => device.own_name.to_lowercase(),
        // A Snapdragon has one of each kind.
        QNN => device.kind.name().to_lowercase(),
        _ => index.to_string(),
    }
}

/// Libraries in the folder of an execution provider that it or they look up by name alone, by the starts of their names. They have to be
/// in the process before it; each one comes after those that it needs.
const COMPANIONS: [(&str, &[&str]); 2] = [
    (
        "onnxruntime_providers_nv_tensorrt_rtx",
        &["libcudart.so.", "libtensorrt_rtx.so.", "libtensorrt_onnxparser_rtx.so."],
    ),
    (
        CUDA_LIBRARY,
        &[
            "libcudart.so.",
            "libcublasLt.so.",
            "libcublas.so.",
            "libcurand.so.",
            "libnvrtc.so.",
            // It finds its other parts beside it; on Windows it does not.
            "libcudnn.so.",
            "cudart64_",
            "cublasLt64_",
            "cublas64_",
            "curand64_",
            "nvrtc64_",
            "cudnn_graph64_",
            "cudnn_ops64_",
            "cudnn_cnn64_",
            "cudnn_adv64_",
            "cudnn_ext64_",
            "cudnn_heuristic64_",
            "cudnn_engines_precompiled64_",
            "cudnn_engines_runtime_compiled64_",
            "cudnn_engines_tensor_ir64_",
            "cudnn64_",
        ],
    ),
];

/// The library of the execution provider for CUDA, without what a system adds to names of libraries.
pub(crate) const CUDA_LIBRARY: &str = "onnxruntime_providers_cuda";

/// Whether only ONNX Runtime itself can load the library of an execution provider: it needs ONNX Runtime's functions as soon as it is
/// loaded.
pub(crate) fn is_bridged(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.to_string_lossy().contains(CUDA_LIBRARY))
}

/// Libraries that have to be loaded before that of an execution provider.
pub(crate) fn companions(file: &Path) -> Vec<PathBuf> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let own = name(file);
    let of_it = COMPANIONS.iter().find(|(provider, _)| own.contains(provider));
    let (Some((_, starts)), Some(folder)) = (of_it, file.parent()) else { return Vec::new() };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let files: Vec<PathBuf> = entries.collect();
    let named = |start: &&str| files.iter().find(|file| name(file).starts_with(start)).cloned();
    starts.iter().filter_map(named).collect()
}

/// Whether OpenVINO computes for the device.
pub(crate) fn is_openvino(device: &EpDevice) -> bool {
    device.provider == OPENVINO
}

/// Rewrites what ONNX Runtime 1.31 or an execution provider would compute wrongly. `None` is the CPU.
///
/// # Errors
/// `Unimplemented` for nodes that no rewrite helps.
pub(crate) fn avoid_faults(device: Option<&EpDevice>, graph: &mut Graph) -> Result<()> {
    refuse(graph, "ONNX Runtime", fault)?;
    // It crashes on some nodes whose last input is an empty name.
    for node in &mut graph.nodes {
        while node.inputs.last() == Some(&None) {
            node.inputs.pop();
        }
    }
    match device {
        Some(device) if is_openvino(device) => sdrun_provider_common::openvino::avoid_faults(graph),
        _ => Ok(()),
    }
}

/// Why ONNX Runtime computes a node differently from ONNX.
fn fault(graph: &Graph, node: &Node) -> Option<&'static str> {
    match node.op_type.as_str() {
        "Attention"
            if node.output(3).is_some()
                && node.int_or("qk_matmul_output_mode", 0) == 2
                && (node.int_or("is_causal", 0) != 0 || masks(graph, node)) =>
        {
            Some("masked scores in its fourth output are not minus infinity")
        }
        "MaxUnpool" if node.input(2).is_some() => {
            Some("it ignores the stated output shape when it reads the indices")
        }
        "Resize" if node.ints("axes").is_some_and(|axes| axes.iter().any(|axis| *axis < 0)) => {
            Some("it gets negative axes wrong")
        }
        _ => misplaced_corners(graph, node),
    }
}

/// Whether the mask of an Attention says what to hide, instead of what to add.
fn masks(graph: &Graph, node: &Node) -> bool {
    node.input(3).is_some_and(|mask| graph.value(mask).dtype == Some(DType::Bool))
}

/// Whether the execution provider can store what it has compiled, with the weights.
pub(crate) fn bakes(device: &EpDevice) -> bool {
    [OPENVINO, QNN, TENSORRT_RTX].contains(&device.provider.as_str())
}

/// The precisions that a device offers. The documentation of each execution provider says which element types it computes in.
pub(crate) fn precisions(device: &EpDevice) -> Vec<Precision> {
    use Precision::{Bf16, Fp16, Fp32};
    match (device.provider.as_str(), device.kind) {
        (OPENVINO, DeviceKind::Cpu) if device.abilities.split(' ').any(|word| word == "BF16") => {
            vec![Fp32, Bf16]
        }
        (OPENVINO, DeviceKind::Gpu) => vec![Fp32, Fp16],
        // They have no units for f32.
        (OPENVINO | QNN, DeviceKind::Npu) => vec![Fp16],
        (QNN, DeviceKind::Gpu) | (WEBGPU | MLX | COREML | DIRECTML, _) => vec![Fp32, Fp16],
        (TENSORRT_RTX | CUDA, _) => vec![Fp32, Fp16, Bf16],
        _ => vec![Fp32],
    }
}

/// The element type of the graph that a session gets.
pub(crate) fn graph_type(device: &EpDevice, precision: Precision) -> DType {
    match (device.provider.as_str(), device.kind, precision) {
        // They convert a graph of f32 themselves.
        (OPENVINO, ..) | (QNN, DeviceKind::Npu, _) => DType::F32,
        (.., Precision::Fp16) => DType::F16,
        (.., Precision::Bf16) => DType::BF16,
        _ => DType::F32,
    }
}

/// Settings of the execution provider for a session of `graph`.
pub(crate) fn settings(
    device: &EpDevice,
    graph: &Graph,
    precision: Precision,
    threads: Option<usize>,
) -> Vec<(&'static str, String)> {
    match device.provider.as_str() {
        OPENVINO => vec![("load_config", openvino(device, precision, threads))],
        // By default, products of f32 are computed in TF32.
        CUDA => vec![("use_tf32", "0".into())],
        // The older format computes in f16, and knows fewer operators.
        COREML => vec![("ModelFormat", "MLProgram".into())],
        // microsoft/onnxruntime#29651: 0.4.0 computes convolutions of 6, 9, 15 and 18 channels wrongly, by as much as the largest value,
        // unless it keeps ONNX's layout. Other numbers up to 32 are right, and so is a window of one pixel. Inpainting models begin with 9.
        WEBGPU if graph.nodes.iter().any(|node| has_channels_by_threes(graph, node)) => {
            vec![("preferredLayout", "NCHW".into())]
        }
        _ => Vec::new(),
    }
}

/// OpenVINO's own properties, which its execution provider takes as JSON. Without the first, it computes in bf16 or f16 where the
/// device can.
fn openvino(device: &EpDevice, precision: Precision, threads: Option<usize>) -> String {
    let hint = match precision {
        Precision::Bf16 => "bf16",
        Precision::Fp16 => "f16",
        _ => "f32",
    };
    let name = device.own_name.as_str();
    let mut properties =
        serde_json::json!({ "INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY" });
    if device.kind == DeviceKind::Cpu {
        // On processors with products of bytes, OpenVINO rounds the inputs of matrices with int8 weights to bytes by default.
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0".into();
        if let Some(threads) = threads {
            properties["INFERENCE_NUM_THREADS"] = threads.to_string().into();
        }
    }
    serde_json::json!({ name: properties }).to_string()
}

/// Whether a node is a convolution whose channels come in threes, but not in fours. An unknown number might.
fn has_channels_by_threes(graph: &Graph, node: &Node) -> bool {
    let by_threes = |value: &Value| {
        let channels = value.shape.as_ref().and_then(|shape| shape.get(1)).and_then(Dim::known);
        channels.is_none_or(|channels| channels > 3 && channels % 3 == 0 && channels % 4 != 0)
    };
    node.op_type == "Conv" && node.input(0).is_some_and(|id| by_threes(graph.value(id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_cuda_needs_come_first_and_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("libonnxruntime_providers_cuda.so");
        let names =
            ["libcudnn_ops.so.9", "libcudnn.so.9", "libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13"];
        for file in names.map(|name| folder.path().join(name)).iter().chain([&own]) {
            std::fs::write(file, "").unwrap();
        }
        let found = companions(&own);
        let found: Vec<_> = found.iter().filter_map(|file| file.file_name()?.to_str()).collect();
        assert_eq!(found, ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcudnn.so.9"]);
        assert!(is_bridged(&own));
        let other = folder.path().join("libonnxruntime_providers_webgpu.so");
        assert!(companions(&other).is_empty() && !is_bridged(&other));
    }
}

//! Faults of execution providers, and the options that avoid them.

use sdrun_graph::{Dim, Graph, Node};
use std::ffi::CStr;

/// The execution provider of `onnxruntime-webgpu`.
const WEBGPU: &str = "WebGpuExecutionProvider";

/// Options for a session of `graph` on an execution provider.
pub(crate) fn options(graph: &Graph, provider: &str) -> &'static [(&'static CStr, &'static CStr)] {
    // microsoft/onnxruntime#29651: 0.4.0 reads the input of some convolutions wrongly, by 100 % of the largest value, unless it keeps ONNX's layout. Measured for 6, 9,
    // 15 and 18 channels: right with 3, 4, 5, 7, 8, 10, 12, 13, 16 and 32, and with a window of one pixel. Inpainting models begin with 9.
    let affected =
        |node: &Node| node.op_type == "Conv" && node.input(0).is_some_and(|id| by_threes(graph.value(id)));
    if provider == WEBGPU && graph.nodes.iter().any(affected) {
        return &[(c"preferredLayout", c"NCHW")];
    }
    &[]
}

/// Whether the channels come in threes, but not in fours. An unknown number might.
fn by_threes(value: &sdrun_graph::Value) -> bool {
    let channels = value.shape.as_ref().and_then(|shape| shape.get(1)).and_then(Dim::known);
    channels.is_none_or(|channels| channels > 3 && channels % 3 == 0 && channels % 4 != 0)
}

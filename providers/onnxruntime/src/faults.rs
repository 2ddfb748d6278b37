//! Faults of execution providers, and the options that avoid them.

use sdrun_graph::{Dim, Graph, Node, Value};
use std::ffi::CStr;

/// The execution provider of `onnxruntime-webgpu`.
const WEBGPU: &str = "WebGpuExecutionProvider";

/// Options for a session of `graph` on an execution provider.
pub(crate) fn options(graph: &Graph, provider: &str) -> &'static [(&'static CStr, &'static CStr)] {
    // microsoft/onnxruntime#29651: 0.4.0 computes convolutions of 6, 9, 15 and 18 channels wrongly, by as much as the largest value, unless
    // it keeps ONNX's layout. Other numbers up to 32 are right, and so is a window of one pixel. Inpainting models begin with 9.
    let affected =
        |node: &Node| node.op_type == "Conv" && node.input(0).is_some_and(|id| by_threes(graph.value(id)));
    if provider == WEBGPU && graph.nodes.iter().any(affected) {
        return &[(c"preferredLayout", c"NCHW")];
    }
    &[]
}

/// Whether the channels come in threes, but not in fours. An unknown number might.
fn by_threes(value: &Value) -> bool {
    let channels = value.shape.as_ref().and_then(|shape| shape.get(1)).and_then(Dim::known);
    channels.is_none_or(|channels| channels > 3 && channels % 3 == 0 && channels % 4 != 0)
}

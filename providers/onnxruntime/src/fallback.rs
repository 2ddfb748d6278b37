//! What a device leaves to the CPU.
//!
//! ONNX Runtime gives a node to the CPU if the device's execution provider lacks it. It also keeps nodes there on purpose that compute
//! shapes. Those cost nothing; the others make a device slower than the CPU alone, by the copies between the two.

use crate::ffi::Assigned;
use sdrun_abi::{Error, Host, LogLevel, Result};
use sdrun_graph::{Dim, Graph, Value};
use std::collections::{BTreeMap, HashMap};

/// Operators that compute much, whatever the size of their output.
const HEAVY: [&str; 14] = [
    "Attention",
    "Conv",
    "ConvInteger",
    "ConvTranspose",
    "DeformConv",
    "Einsum",
    "FusedConv",
    "FusedMatMul",
    "Gemm",
    "GRU",
    "LSTM",
    "MatMul",
    "MultiHeadAttention",
    "RNN",
];
/// Others matter from this number of output elements on: 4 MB in fp32, whose copy takes about as long as starting a kernel ten times.
const LARGE: usize = 1 << 20;

/// Logs which nodes run on the CPU although a device was chosen.
///
/// # Errors
/// `Unimplemented` if they include more than shapes and small tensors and the user did not allow that.
pub(crate) fn check(
    graph: &Graph,
    nodes: &[Assigned],
    provider: &str,
    allowed: bool,
    host: &dyn Host,
) -> Result<()> {
    let sizes: HashMap<&str, usize> = graph
        .nodes
        .iter()
        .map(|node| {
            let sizes = node.outputs.iter().flatten().map(|id| elements(graph.value(*id)));
            (node.name.as_str(), sizes.max().unwrap_or(0))
        })
        .collect();
    let costly = |node: &Assigned| {
        HEAVY.contains(&&*node.op_type) || sizes.get(&*node.name).is_some_and(|size| *size >= LARGE)
    };
    let (mut costs, mut others) = (BTreeMap::new(), BTreeMap::new());
    for node in nodes.iter().filter(|node| node.provider != provider) {
        let counts: &mut BTreeMap<&str, usize> = if costly(node) { &mut costs } else { &mut others };
        *counts.entry(&node.op_type).or_default() += 1;
    }
    let of = nodes.len();
    if !others.is_empty() {
        let message = format!("of {of} nodes, the CPU computes shapes and small tensors: {}", list(&others));
        host.log(LogLevel::Info, "onnxruntime", &message);
    }
    if costs.is_empty() {
        return Ok(());
    }
    let message = format!("{provider} cannot compute some of the {of} nodes: {}", list(&costs));
    if allowed {
        host.log(LogLevel::Warn, "onnxruntime", &format!("{message}. The CPU computes them"));
        return Ok(());
    }
    Err(Error::unsupported(message)
        .with_hint("the option allow_fallback=true lets the CPU compute them; or choose another device"))
}

/// Elements of a value. An open dimension, which is mostly the batch, counts as 1.
fn elements(value: &Value) -> usize {
    let dims = value.shape.as_deref().unwrap_or_default();
    dims.iter().map(|dim| Dim::known(dim).unwrap_or(1)).fold(1, usize::saturating_mul)
}

/// `Conv (3), MatMul`.
fn list(counts: &BTreeMap<&str, usize>) -> String {
    let one =
        |(op, count): (&&str, &usize)| if *count == 1 { op.to_string() } else { format!("{op} ({count})") };
    counts.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::{ErrorCode, NoHost};

    fn on(provider: &str, op_type: &str) -> Assigned {
        Assigned { provider: provider.into(), name: String::new(), op_type: op_type.into() }
    }

    #[test]
    fn products_on_the_cpu_are_an_error_unless_allowed_and_shapes_are_not() {
        let graph = Graph::default();
        let shapes = [on("Device", "Conv"), on("CPU", "Gather"), on("CPU", "Concat")];
        assert!(check(&graph, &shapes, "Device", false, &NoHost).is_ok());
        let costly = [on("CPU", "Conv"), on("CPU", "MatMul"), on("CPU", "Conv"), on("Device", "Gemm")];
        let error = check(&graph, &costly, "Device", false, &NoHost).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.message.ends_with("some of the 4 nodes: Conv (2), MatMul"), "{error}");
        assert!(check(&graph, &costly, "Device", true, &NoHost).is_ok());
    }
}

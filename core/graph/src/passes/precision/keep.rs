//! The keep-list: which nodes stay in f32 when a graph computes in half precision, as a table.

use super::matching::View;
use crate::Graph;
use sdrun_abi::DType;

/// One reason to keep nodes in f32.
struct Keep {
    nodes: Pattern,
    /// Applies to f16 only: the danger is its range (65504), which bf16 does not share.
    only_f16: bool,
    /// Source of the fact.
    #[allow(dead_code, reason = "documentation that belongs to the entry")]
    source: &'static str,
}

/// Which nodes an entry selects.
pub(super) enum Pattern {
    /// These operators.
    Operators(&'static [&'static str]),
    /// Norms decomposed by an exporter: reductions, and the elementwise operators between them.
    Statistics,
    /// Everything that leads to a sine or cosine.
    Angles,
    /// Products of two activations that lead to a softmax, and the nodes between.
    Scores,
    /// Products of two activations that lead to a quotient of two activations, and the nodes between: linear attention, which divides
    /// by the sum of its shares afterwards.
    Quotients,
    /// Sums of two activations that lead to a norm, the factors of their summands, and operators that only move such
    /// sums.
    Residuals,
    /// Products without bias that lead from an activation function into a residual stream with RMS normalisation.
    FeedForwardOutputs,
    /// Nodes with a weight whose name contains one of these.
    Weights(&'static [&'static str]),
}

/// The keep-list. Elementwise operators and operators that move elements stay in f32 too if they lie between kept
/// nodes.
const KEEP: &[Keep] = &[
    Keep {
        nodes: Pattern::Operators(&[
            "CumSum",
            "Exp",
            "GroupNormalization",
            "InstanceNormalization",
            "LayerNormalization",
            "Log",
            "LogSoftmax",
            "LpNormalization",
            "MeanVarianceNormalization",
            "Pow",
            "RMSNormalization",
            "Range",
            "Reciprocal",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSumExp",
            "ReduceMean",
            "ReduceProd",
            "ReduceSum",
            "ReduceSumSquare",
            "SimplifiedLayerNormalization",
            "Softmax",
            "Sqrt",
        ]),
        only_f16: false,
        source: "PyTorch's autocast list for float32: pow, exp, log, sum, prod, norms, softmax",
    },
    Keep {
        nodes: Pattern::Statistics,
        only_f16: false,
        source: "the same list, for norms written as several nodes",
    },
    Keep {
        nodes: Pattern::Angles,
        only_f16: false,
        source: "diffusers get_timestep_embedding and get_1d_rotary_pos_embed compute in float32",
    },
    Keep {
        nodes: Pattern::Operators(&["Attention"]),
        only_f16: false,
        source: "ONNX defines its scores in the type of its inputs",
    },
    Keep {
        nodes: Pattern::Scores,
        only_f16: false,
        source: "Stable Diffusion 2.1's UNet: `upcast_attention: true`; fused attention accumulates scores in float32",
    },
    Keep {
        nodes: Pattern::Quotients,
        only_f16: false,
        source: "diffusers SanaLinearAttnProcessor2_0 and SanaMultiscaleAttnProcessor2_0 compute in float32",
    },
    Keep {
        nodes: Pattern::Residuals,
        only_f16: true,
        source: "T5: float32 from the first `wo` on; Flux, Chroma: diffusers clips float16 streams to ±65504 after each block",
    },
    Keep {
        nodes: Pattern::FeedForwardOutputs,
        only_f16: true,
        source: "transformers T5PreTrainedModel: `_keep_in_fp32_modules = [\"wo\"]`",
    },
    Keep {
        nodes: Pattern::Weights(&[
            "decoder.up_blocks.",
            "decoder.conv_norm_out.",
            "decoder.conv_out.",
            "decoder.up.",
            "decoder.norm_out.",
        ]),
        only_f16: true,
        source: "SDXL's VAE: `force_upcast: true`; diffusers upcast_vae leaves conv_in and mid_block in float16 only",
    },
    Keep {
        nodes: Pattern::Weights(&["encoder.down_blocks.", "encoder.down."]),
        only_f16: true,
        source: "SDXL's VAE: diffusers encodes in float32 where `force_upcast` is set",
    },
];

/// Which nodes compute in f32 when the others compute in `to`; indexed by node.
pub(super) fn kept(graph: &Graph, to: DType) -> Vec<bool> {
    let view = View::new(graph);
    let mut kept = vec![false; graph.nodes.len()];
    for keep in KEEP.iter().filter(|keep| !keep.only_f16 || to == DType::F16) {
        for (kept, matches) in kept.iter_mut().zip(view.matches(&keep.nodes)) {
            *kept |= matches;
        }
    }
    view.fill(&mut kept);
    kept
}

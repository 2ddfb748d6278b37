//! Names of weights: the layout of the original implementations (LDM, OpenCLIP, SAI, BFL) against that of diffusers and
//! transformers.
//!
//! One table of [`KeyPair`]s for each component, made from the structure of the network at hand (blocks, layers,
//! which levels have attention), so that pruned, widened and distilled variants are covered as well. It serves both
//! ways: checkpoints are read by the original key, adapters are resolved from the graph's own modules.

/// How a tensor of the original layout is made of tensors of the diffusers layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// The same tensor.
    Same,
    /// A linear weight `[o, i]` as a 1x1 convolution `[o, i, 1, 1]`.
    Conv1x1,
    /// The transpose of a matrix.
    Transposed,
    /// Concatenated along the first dimension (q, k, v, or q, k, v, mlp).
    Rows,
    /// The two halves along the first dimension exchanged (scale and shift).
    SwappedHalves,
}

/// A tensor of the original layout and what it is in the diffusers layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPair {
    /// Key in the original layout, without the prefix of its component (`input_blocks.1.0.in_layers.2.weight`).
    pub original: String,
    /// Names in the diffusers state dict, in order; one except for [`Fusion::Rows`].
    pub diffusers: Vec<String>,
    /// How the former comes from the latter.
    pub fusion: Fusion,
}

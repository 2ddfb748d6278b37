use std::path::PathBuf;

/// Why a graph cannot be read, interpreted or written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GraphError {
    /// The file cannot be opened or read.
    #[error(transparent)]
    Io(#[from] sdrun_abi::Error),
    /// The file is not ONNX, is truncated, or violates the format.
    #[error("{} is not a valid ONNX model: {reason}", .file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A valid file that uses an unsupported feature: a version, an element type, sparse tensors.
    #[error("{} cannot be used: {reason}", .file.display())]
    UnsupportedModel {
        /// The file.
        file: PathBuf,
        /// Which feature, and what to do about it.
        reason: String,
    },
    /// External data in a file that does not exist.
    #[error("external data of tensor {tensor:?}: {reason}")]
    MissingData {
        /// The tensor.
        tensor: String,
        /// Which file is missing.
        reason: String,
    },
    /// External data that is refused or damaged.
    #[error("external data of tensor {tensor:?}: {reason}")]
    ExternalData {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// The graph contradicts itself or an operator's definition.
    #[error("{0}")]
    Invalid(String),
    /// An unsupported operator, attribute or type.
    #[error("operator {op}: {why}")]
    Unsupported {
        /// Operator name with domain and opset.
        op: String,
        /// Why it is unsupported.
        why: String,
    },
}

//! sdrun compiles ONNX graphs with the best vendor compiler at hand, keeps the engines free of weights, and
//! runs them with any weights.

mod library;

pub use library::load_plugin;
pub use sdrun_abi as abi;

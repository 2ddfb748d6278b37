//! sdrun compiles ONNX graphs with the best available vendor compiler. Its engines contain no weights and run with any
//! weights that fit.
//!
//! A host discovers providers, builds an engine on the best one for the model (or takes it from the cache), gives it
//! weights and runs it:
//!
//! ```no_run
//! use sdrun::{BuildOptions, HostTensor, Model, Registry, Tensors, TracingHost, Wishes};
//!
//! fn main() -> Result<(), sdrun::Error> {
//!     let registry = Registry::discover()?;
//!     let model = Model::open("vae_decoder.onnx")?;
//!     let options = |device| BuildOptions::new(device).shape("latent_sample", [1, 4, 64, 64]);
//!     let engine = registry.choose(&model, &Wishes::new(), &options, &TracingHost).build(None)?;
//!     println!("{} on {}", engine.provider().id(), engine.device().name);
//!
//!     let mut session = engine.session(&model.weights(), &TracingHost)?;
//!
//!     let latent = HostTensor::from_f32(vec![1, 4, 64, 64], &[0.0; 4 * 64 * 64])?;
//!     let outputs = session.run(&Tensors::from([("latent_sample".into(), latent)]), &TracingHost)?;
//!     println!("{outputs:?}");
//!     Ok(())
//! }
//! ```

pub mod bench;
mod cache;
mod choose;
mod engine;
mod engine_file;
mod error;
pub mod inputs;
mod library;
mod measurements;
pub mod memory;
mod model;
pub mod numpy;
mod observer;
pub mod onnx_file;
mod owned_folder;
mod paths;
mod probe;
mod provider;
mod registry;
pub mod runtime;
mod suggest;
mod tensor;
pub mod trust;
pub mod verify;
mod weight_files;
#[cfg(windows)]
mod windows;
pub mod worker;

pub use cache::{Cache, CacheContent, CacheEntry, GcLimits};
pub use choose::{Candidate, Choice, Rejected, Why, Wishes};
pub use engine::{
    BuildOptions, CachePolicy, Engine, LoadOptions, Session, check_input, check_inputs, check_weights,
    find_input,
};
pub use engine_file::{EngineFile, EngineManifest};
pub use error::{Error, Result};
pub use library::load_plugin;
pub use measurements::{Measurement, Measurements, Median};
pub use model::{Model, Shapes};
pub use observer::{Observer, TracingHost};
pub use owned_folder::OwnedFolder;
pub use paths::{Paths, private_dir};
pub use probe::Probe;
pub use provider::{Isolation, Provider};
pub use registry::{Confine, Discovery, Entry, Registry, RuntimeStatus, read_manifest};
pub use sdrun_abi as abi;
pub use sdrun_files as files;
pub use sdrun_graph as graph;
pub use sdrun_weights as weights;
pub use suggest::did_you_mean;
pub use tensor::{DeviceTensor, DeviceTensors, HostTensor, Tensors};
pub use weight_files::{AdapterFile, EmbeddingFile, WeightFiles, WeightReport, Weights};

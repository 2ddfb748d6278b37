//! sdrun compiles ONNX graphs with the best vendor compiler at hand, keeps the engines free of weights, and
//! runs them with any weights.
//!
//! A host discovers providers, opens one, chooses a device, builds an engine or takes it from the cache, loads
//! weights and runs it:
//!
//! ```no_run
//! use sdrun::{BuildOptions, HostTensor, Isolation, Model, Registry, Tensors, TracingHost};
//!
//! fn main() -> Result<(), sdrun::Error> {
//!     let registry = Registry::discover()?;
//!     let provider = registry.open_best(&Isolation::default())?;
//!     let device = provider.device(None)?;
//!     println!("{} on {}", provider.id(), device.name);
//!
//!     let model = Model::open("vae_decoder.onnx")?;
//!     let options = BuildOptions::new(device).shape("latent_sample", [1, 4, 64, 64]);
//!     let engine = provider.build(&model, &options, &TracingHost)?;
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
mod engine;
mod engine_file;
mod error;
pub mod inputs;
mod library;
mod model;
mod observer;
mod paths;
mod provider;
mod registry;
pub mod runtime;
mod suggest;
mod tensor;
pub mod trust;
pub mod verify;
pub mod worker;

pub use cache::{Cache, CacheContent, CacheEntry, GcLimits};
pub use engine::{BuildOptions, CachePolicy, Engine, Session, check_weights};
pub use engine_file::{EngineFile, EngineManifest};
pub use error::{Error, Result};
pub use library::load_plugin;
pub use model::{Model, Shapes};
pub use observer::{Observer, TracingHost};
pub use paths::Paths;
pub use provider::{Isolation, Provider};
pub use registry::{Discovery, Entry, Registry, RuntimeStatus};
pub use sdrun_abi as abi;
pub use sdrun_files as files;
pub use sdrun_graph as graph;
pub use sdrun_weights as weights;
pub use tensor::{DeviceTensor, DeviceTensors, HostTensor, Tensors};

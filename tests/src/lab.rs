//! The environment for tests of models: the providers as built, and a cache.

use crate::place::Place;
use sdrun::{
    BuildOptions, CachePolicy, Discovery, Isolation, Model, Paths, Provider, Registry, Tensors, abi::Device,
    abi::NoHost, graph::OpenOptions, worker::Limits,
};
use std::{path::PathBuf, sync::LazyLock, time::Duration};

/// The providers that must run every model: those that need only a CPU, or those in `SDRUN_TEST_PROVIDERS` (ids separated by
/// commas) on a machine with other hardware.
pub static ALL: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let named = std::env::var("SDRUN_TEST_PROVIDERS").unwrap_or_else(|_| "ggml,onnxruntime,openvino".into());
    named.leak().split(',').collect()
});

/// Registry and folders.
pub struct Lab {
    /// The providers.
    pub registry: Registry,
    /// Data and cache.
    pub paths: Paths,
}

impl Default for Lab {
    fn default() -> Self {
        let place = |place: Place| place.find().unwrap_or_else(|why| panic!("{why}"));
        let data = place(Place::Data);
        let cache =
            std::env::var_os("SDRUN_CACHE_DIR").map_or_else(|| data.with_file_name("cache"), PathBuf::from);
        let paths = Paths { data, cache };
        let providers = place(Place::Dist).join("providers");
        let discovery =
            Discovery { provider_paths: vec![providers], paths: Some(paths.clone()), ..Discovery::default() };
        let registry = Registry::discover_with(&discovery).unwrap_or_else(|why| panic!("{why}"));
        Lab { registry, paths }
    }
}

impl Lab {
    /// A built-in model.
    pub fn model(&self, name: &str) -> Model {
        Model::find(name, &self.paths, &OpenOptions::default(), &NoHost)
            .unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// The reference provider.
    pub fn reference(&self) -> &str {
        self.registry.reference().map_or_else(|| panic!("no provider is the reference"), |p| p.id.as_str())
    }

    /// Opens a provider in a worker.
    pub fn open(&self, id: &str) -> sdrun::Result<Provider> {
        self.open_for(id, 15)
    }

    /// Opens a provider in a worker that may take this many minutes for each call.
    pub fn open_for(&self, id: &str, minutes: u64) -> sdrun::Result<Provider> {
        self.registry.open(id, &Isolation::worker(Limits::all(Duration::from_secs(60 * minutes))))
    }
}

/// The device for tests: the one that `SDRUN_TEST_DEVICE` names for the providers under test, else a provider's first.
pub fn device_of(provider: &Provider) -> sdrun::Result<Device> {
    let named = std::env::var("SDRUN_TEST_DEVICE").ok().filter(|_| ALL.contains(&provider.id()));
    provider.device(named.as_deref())
}

/// Builds a model on the device for tests, without the cache, and runs it. Outputs may be NaN or infinite.
pub fn compute(provider: &Provider, model: &Model, inputs: &Tensors) -> sdrun::Result<Tensors> {
    let mut options = BuildOptions::new(device_of(provider)?);
    options.cache = CachePolicy::Off;
    options.shapes = inputs.iter().map(|(name, t)| (name.clone(), t.shape().to_vec())).collect();
    let engine = provider.build(model, &options, &NoHost)?;
    let mut session = engine.session(&model.weights(), &NoHost)?.allow_non_finite();
    session.run(inputs, &NoHost)
}

/// A folder that an environment variable names.
pub fn folder(variable: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set")))
}

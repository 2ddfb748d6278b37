//! How to build an engine.

use crate::{Model, Shapes};
use sdrun_abi::{BuildSpec, Device, OpenShapes, Precision};
use std::collections::BTreeMap;

/// How building uses the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePolicy {
    /// Take a cached engine, or build and store a new one.
    #[default]
    Use,
    /// Build even if there is a cached engine, and replace it.
    Rebuild,
    /// Neither read nor write.
    Off,
    /// Use a cached engine or fail: no hidden build. If the device has
    /// [`Capabilities::session_compiles`](sdrun_abi::Capabilities::session_compiles), creating a session still
    /// compiles.
    Only,
}

/// How to build an engine: made by [`new`](BuildOptions::new) for a device, then changed field by field.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BuildOptions {
    /// The device; see [`Provider::device`](crate::Provider::device).
    pub device: Device,
    /// Arithmetic; the build fails if the device does not offer it.
    pub precision: Precision,
    /// Threads for CPU devices; `None` means all cores.
    pub threads: Option<usize>,
    /// Input shapes. Every open dimension of the model must be given here or in `open_shapes`, except for built-in models
    /// ([`Model::shapes`](crate::Model::shapes)).
    pub shapes: Shapes,
    /// Inputs whose dimensions stay open, if the provider supports that, with the shapes the engine will serve; see
    /// [`BuildSpec::open_shapes`](sdrun_abi::BuildSpec::open_shapes). An empty list requests any shape, which not
    /// every provider supports.
    pub open_shapes: OpenShapes,
    /// Store the weights in the engine: it loads faster but cannot be refitted.
    pub bake: bool,
    /// Maximum bytes of device memory for weights, if the device can work with fewer than all.
    pub vram_budget: Option<u64>,
    /// Use of the cache.
    pub cache: CachePolicy,
    /// Provider options.
    pub options: BTreeMap<String, String>,
}

impl BuildOptions {
    /// Defaults for a device: fp32, all cores, no weights in the engine, with the cache.
    pub fn new(device: Device) -> Self {
        BuildOptions {
            device,
            precision: Precision::Fp32,
            threads: None,
            shapes: Shapes::new(),
            open_shapes: OpenShapes::new(),
            bake: false,
            vram_budget: None,
            cache: CachePolicy::Use,
            options: BTreeMap::new(),
        }
    }
    /// Sets the shape of an input.
    pub fn shape(mut self, input: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        self.shapes.insert(input.into(), shape.into());
        self
    }
    /// Sets the shapes of inputs.
    pub fn shapes(mut self, shapes: Shapes) -> Self {
        self.shapes = shapes;
        self
    }
    /// Sets the number of threads for CPU devices; `None` is all cores.
    pub fn threads(mut self, threads: Option<usize>) -> Self {
        self.threads = threads;
        self
    }
    /// Sets the use of the cache.
    pub fn cache(mut self, cache: CachePolicy) -> Self {
        self.cache = cache;
        self
    }
    /// The specification that a provider receives for `model`. The model's own shapes complete the lists.
    pub(crate) fn spec(&self, model: &Model) -> BuildSpec {
        let mut spec = BuildSpec::new(&self.device.id, self.precision);
        spec.threads = self.threads;
        spec.bake = self.bake;
        spec.open_shapes = model.shape_lists(&self.shapes, &self.open_shapes).1;
        spec.vram_budget = self.vram_budget;
        spec.options = self.options.clone();
        spec
    }
    /// Sets the precision.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }
}

//! The cache key of an engine.

use sdrun_abi::{BuildSpec, OpenShapes, Precision, Provide, RuntimeInfo};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Everything that an engine depends on. Threads and the device within its class are chosen at load time.
#[derive(Serialize)]
pub(super) struct Key<'a> {
    provider: &'a str,
    build_id: &'a str,
    runtime: (&'a str, &'a str),
    /// Options of the provider's `init`.
    init_options: &'a BTreeMap<String, String>,
    device_class: &'a str,
    topology: &'a str,
    precision: Precision,
    open_shapes: &'a OpenShapes,
    vram_budget: Option<u64>,
    options: &'a BTreeMap<String, String>,
    /// Fingerprint of the baked weights.
    baked: Option<&'a str>,
}

impl<'a> Key<'a> {
    pub(super) fn new(
        provide: &'a Provide,
        runtime: &'a RuntimeInfo,
        init_options: &'a BTreeMap<String, String>,
        device_class: &'a str,
        topology: &'a str,
        spec: &'a BuildSpec,
        baked: Option<&'a str>,
    ) -> Self {
        Key {
            provider: &provide.id,
            build_id: &provide.build_id,
            runtime: (&runtime.name, &runtime.version),
            init_options,
            device_class,
            topology,
            precision: spec.precision,
            open_shapes: &spec.open_shapes,
            vram_budget: spec.vram_budget,
            options: &spec.options,
            baked,
        }
    }

    /// SHA-256 over the key as JSON. Different keys always have different JSON.
    pub(super) fn hash(&self) -> crate::Result<String> {
        let json = serde_json::to_vec(self)
            .map_err(|e| sdrun_abi::Error::internal(format!("cannot write the cache key: {e}")))?;
        Ok(Sha256::digest(json).iter().map(|b| format!("{b:02x}")).collect())
    }
}

#[cfg(test)]
mod tests;

//! The key of an engine in the cache.

use sdrun_abi::{BuildSpec, OpenShapes, Precision, Provide, RuntimeInfo};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Everything an engine depends on. Threads are chosen when it is loaded, and a device within its class.
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
    /// Fingerprint of the weights inside.
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

    /// SHA-256 over the key as JSON, in which no two different keys look alike.
    pub(super) fn hash(&self) -> crate::Result<String> {
        let json = serde_json::to_vec(self)
            .map_err(|e| sdrun_abi::Error::internal(format!("cannot write the cache key: {e}")))?;
        Ok(Sha256::digest(json).iter().map(|b| format!("{b:02x}")).collect())
    }
}

#[cfg(test)]
mod tests;

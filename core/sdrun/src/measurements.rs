//! Measurements on this machine, for [`Registry::choose`](crate::Registry::choose).

use crate::{Paths, Provider};
use sdrun_abi::{Device, Precision};
use sdrun_files::{Links, read_small};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Maximum size of the file: room for about ten thousand measurements.
const MAX_BYTES: u64 = 8 << 20;
/// Version of the file format that this code reads.
const VERSION: u64 = 1;

/// How fast a graph runs on a device of this machine. It includes everything that affects the speed, so that measurements
/// of an older provider or runtime do not count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// [`Graph::topology_hash`](sdrun_graph::Graph::topology_hash) of the bound, simplified graph.
    pub topology: String,
    /// Provider id.
    pub provider: String,
    /// [`build_id`](sdrun_abi::Provide::build_id) of the provider.
    pub build_id: String,
    /// Name and version of the runtime.
    pub runtime: (String, String),
    /// [`Device::id`].
    pub device: String,
    /// Arithmetic.
    pub precision: Precision,
    /// Median of the run times, in milliseconds.
    pub median_ms: f64,
}

/// The measurements of this machine: the file `measurements.json` in the data folder,
/// `{"format_version": 1, "measurements": [...]}`.
#[derive(Clone, Debug, Default)]
pub struct Measurements(Vec<Measurement>);

impl Measurements {
    /// The file.
    pub fn file(paths: &Paths) -> PathBuf {
        paths.data.join("measurements.json")
    }

    /// Reads the file. If it does not exist, there are no measurements. If it cannot be read, that is logged and it counts as
    /// empty. Entries that this version does not understand are skipped.
    pub fn read(paths: &Paths) -> Self {
        let file = Self::file(paths);
        if !file.exists() {
            return Self::default();
        }
        Self::parse(&file).unwrap_or_else(|why| {
            tracing::warn!("{} is not used: {why}", file.display());
            Self::default()
        })
    }

    fn parse(file: &Path) -> Result<Self, String> {
        let bytes = read_small(file, Links::Follow, MAX_BYTES).map_err(|e| e.message)?;
        let document: Value = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
        let version = document.get("format_version").and_then(Value::as_u64);
        if version != Some(VERSION) {
            return Err(format!("it is not of format version {VERSION}"));
        }
        let entries = document.get("measurements").and_then(Value::as_array).cloned().unwrap_or_default();
        let usable = |m: &Measurement| m.median_ms.is_finite() && m.median_ms > 0.0;
        let known = entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok());
        Ok(Measurements(known.filter(usable).collect()))
    }

    /// Whether anything was measured on a provider.
    pub(crate) fn know(&self, provider: &str) -> bool {
        self.0.iter().any(|m| m.provider == provider)
    }

    /// The median run time of a graph, in milliseconds, if it was measured with this provider and runtime.
    pub fn median_ms(
        &self,
        topology: &str,
        provider: &Provider,
        device: &Device,
        precision: Precision,
    ) -> Option<f64> {
        let runtime = provider.runtime();
        let same = |m: &&Measurement| {
            m.topology == topology
                && m.provider == provider.id()
                && m.build_id == provider.manifest().build_id
                && (&m.runtime.0, &m.runtime.1) == (&runtime.name, &runtime.version)
                && m.device == device.id
                && m.precision == precision
        };
        // The last entry is the latest.
        self.0.iter().rfind(same).map(|m| m.median_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Measurements {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { data: dir.path().into(), cache: dir.path().into() };
        std::fs::write(Measurements::file(&paths), text).unwrap();
        Measurements::read(&paths)
    }

    #[test]
    fn what_is_not_understood_is_left_out() {
        let entry = |precision: &str, ms: &str| {
            format!(
                r#"{{"topology":"t","provider":"p","build_id":"b","runtime":["r","1"],"device":"cpu","precision":"{precision}",
                "median_ms":{ms},"unix_time":7}}"#
            )
        };
        let list = [entry("fp32", "2.5"), entry("fp3", "1"), entry("bf16", "-1"), "7".into()].join(",");
        let found = read(&format!(r#"{{"format_version":1,"measurements":[{list}],"more":true}}"#));
        assert_eq!(found.0.len(), 1);
        assert_eq!((found.0[0].precision, found.0[0].median_ms), (Precision::Fp32, 2.5));
        assert!(found.know("p") && !found.know("q"));
        for text in ["", "{", "[]", r#"{"format_version":2,"measurements":[]}"#] {
            assert!(read(text).0.is_empty(), "{text}");
        }
    }
}

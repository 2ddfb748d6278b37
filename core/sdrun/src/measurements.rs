//! Measurements on this machine, for [`Registry::choose`](crate::Registry::choose).

use crate::{
    Paths, Provider, Result,
    bench::{CaseReport, Environment, Report, Row, Status, graphics_drivers},
};
use sdrun_abi::{Device, DeviceKind, Error as AbiError, Precision};
use sdrun_files::{Existing, Links, open_lock, read_small};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Maximum size of the file: room for about ten thousand measurements.
const MAX_BYTES: u64 = 8 << 20;
/// The most measurements to keep; the oldest leave.
const MOST: usize = 4000;
/// Version of the file format that this code reads.
const VERSION: u64 = 1;

/// How fast a graph runs on a device of this machine. It includes everything that affects the speed, so that measurements
/// of an older provider or runtime do not count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// [`Graph::topology_hash`](sdrun_graph::Graph::topology_hash) of the bound, simplified graph.
    pub topology: String,
    /// The same of the graph with its dimensions open: a model has one, whatever the size of its pictures.
    #[serde(default)]
    pub model_topology: String,
    /// Provider id.
    pub provider: String,
    /// [`build_id`](sdrun_abi::Provide::build_id) of the provider.
    pub build_id: String,
    /// Name and version of the runtime.
    pub runtime: (String, String),
    /// [`Device::id`].
    pub device: String,
    /// Names and versions of this machine's graphics drivers; empty for a processor.
    #[serde(default)]
    pub driver: String,
    /// Arithmetic.
    pub precision: Precision,
    /// Median of the run times, in milliseconds.
    pub median_ms: f64,
    /// When it was measured, in seconds since 1970.
    #[serde(default)]
    pub unix_time: u64,
}

/// The measurements of this machine: the file `measurements.json` in the data folder,
/// `{"format_version": 1, "measurements": [...]}`.
#[derive(Clone, Debug, Default)]
pub struct Measurements {
    known: Vec<Measurement>,
    /// The graphics drivers of this machine now.
    drivers: String,
}

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
            tracing::warn!("measurements are not used: {why}");
            Self::default()
        })
    }

    /// Adds the correct rows of a report, in place of older measurements of the same. Returns how many there are.
    ///
    /// # Errors
    /// A file that cannot be read as measurements or written.
    pub fn add(paths: &Paths, report: &Report) -> Result<usize> {
        let new: Vec<Measurement> = report
            .cases
            .iter()
            .flat_map(|case| case.rows.iter().filter_map(|row| Measurement::of(report, case, row)))
            .collect();
        if new.is_empty() {
            return Ok(0);
        }
        crate::paths::private_dir(&paths.data)?;
        let file = Self::file(paths);
        // Another process may add its own at the same time.
        let lock = open_lock(&file.with_extension("lock"))?;
        lock.lock().map_err(|e| AbiError::io("lock", &file, &e))?;
        let mut entries = if file.exists() { Self::entries(&file)? } else { Vec::new() };
        entries.retain(|entry| {
            let known: Option<Measurement> = serde_json::from_value(entry.clone()).ok();
            known.is_none_or(|known| !new.iter().any(|new| new.is_of_the_same(&known)))
        });
        for measurement in &new {
            entries.push(serde_json::to_value(measurement).map_err(|e| AbiError::internal(e.to_string()))?);
        }
        let first = entries.len().saturating_sub(MOST);
        let document = json!({ "format_version": VERSION, "measurements": entries[first..] });
        sdrun_files::write(&file, Existing::Ours, |out| writeln!(out, "{document}"))?;
        Ok(new.len())
    }

    fn entries(file: &Path) -> std::result::Result<Vec<Value>, AbiError> {
        let wrong = |why: String| {
            AbiError::invalid(format!("{} has no measurements: {why}", file.display()))
                .with_file(file)
                .with_hint("delete the file; it is made again")
        };
        let bytes = read_small(file, Links::Follow, MAX_BYTES)?;
        let document: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        let version = document.get("format_version").and_then(Value::as_u64);
        if version != Some(VERSION) {
            return Err(wrong(format!("it is not of format version {VERSION}")));
        }
        Ok(document.get("measurements").and_then(Value::as_array).cloned().unwrap_or_default())
    }

    fn parse(file: &Path) -> std::result::Result<Self, AbiError> {
        let entries = Self::entries(file)?;
        let usable = |m: &Measurement| m.median_ms.is_finite() && m.median_ms > 0.0;
        let known = entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok());
        Ok(Measurements {
            known: known.filter(usable).collect(),
            drivers: graphics_drivers(&Environment::here()),
        })
    }

    /// Whether anything was measured on a provider.
    pub(crate) fn know(&self, provider: &str) -> bool {
        self.known.iter().any(|m| m.provider == provider)
    }

    /// The median run time of a graph on a device, if it was measured with this provider and runtime.
    ///
    /// `topology` is that of the graph with the sizes to run, `model_topology` returns that with open dimensions. If no provider was
    /// measured with these sizes, the times are those of the sizes that were measured last.
    pub fn median(
        &self,
        topology: &str,
        model_topology: impl FnOnce() -> String,
        provider: &Provider,
        device: &Device,
        precision: Precision,
    ) -> Option<Median> {
        let same_sizes = self.known.iter().any(|m| m.topology == topology && m.precision == precision);
        let measured = if same_sizes {
            topology
        } else {
            let model = model_topology();
            let of_model = |m: &&Measurement| m.model_topology == model && m.precision == precision;
            &self.known.iter().rfind(of_model)?.topology
        };
        let runtime = provider.runtime();
        let driver = driver(device, &self.drivers);
        let same = |m: &&Measurement| {
            m.topology == measured
                && m.provider == provider.id()
                && m.build_id == provider.manifest().build_id
                && (&m.runtime.0, &m.runtime.1) == (&runtime.name, &runtime.version)
                && m.device == device.id
                && m.driver == driver
                && m.precision == precision
        };
        // The last entry is the latest.
        self.known.iter().rfind(same).map(|m| Median { ms: m.median_ms, same_sizes })
    }
}

/// The drivers that affect a device.
fn driver<'d>(device: &Device, drivers: &'d str) -> &'d str {
    if device.kind == DeviceKind::Cpu { "" } else { drivers }
}

/// A median run time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Median {
    /// Milliseconds.
    pub ms: f64,
    /// Whether it is of the same sizes.
    pub same_sizes: bool,
}

impl Measurement {
    /// What a row of a report tells about a provider; `None` if it gave no correct results in time, or ran a whole picture.
    fn of(report: &Report, case: &CaseReport, row: &Row) -> Option<Self> {
        let (runtime, device) = (row.runtime.as_ref()?, row.device.as_ref()?);
        Some(Measurement {
            topology: Some(&case.topology).filter(|topology| !topology.is_empty())?.clone(),
            model_topology: case.model_topology.clone(),
            provider: row.system.clone(),
            // Only providers have one.
            build_id: row.build_id.clone()?,
            runtime: (runtime.name.clone(), runtime.version.clone()),
            device: device.id.clone(),
            driver: driver(device, &graphics_drivers(&report.environment)).into(),
            precision: row.precision.as_deref()?.parse().ok()?,
            median_ms: row.stats.as_ref().filter(|_| row.status == Status::Ok)?.median_ms,
            unix_time: report.unix_time,
        })
    }

    /// Whether it replaces an older measurement.
    fn is_of_the_same(&self, other: &Measurement) -> bool {
        self.topology == other.topology
            && self.provider == other.provider
            && self.device == other.device
            && self.precision == other.precision
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
        assert_eq!(found.known.len(), 1);
        assert_eq!((found.known[0].precision, found.known[0].median_ms), (Precision::Fp32, 2.5));
        assert!(found.know("p") && !found.know("q"));
        for text in ["", "{", "[]", r#"{"format_version":2,"measurements":[]}"#] {
            assert!(read(text).known.is_empty(), "{text}");
        }
    }
}

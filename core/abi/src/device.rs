use crate::{DType, Precision};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::collections::BTreeMap;

/// Class of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum DeviceKind {
    Cpu,
    Gpu,
    Npu,
    /// A class that this version does not recognize.
    #[serde(other)]
    Other,
}

impl DeviceKind {
    /// As manifests and JSON spell it.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::Npu => "npu",
            DeviceKind::Other => "other",
        }
    }
}

/// One piece of hardware a provider can use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Device {
    /// Stable across restarts: PCI address, UUID, or `cpu`.
    pub id: String,
    /// Position in the provider's list.
    #[serde(default)]
    pub index: usize,
    /// Marketing name.
    pub name: String,
    /// Class.
    pub kind: DeviceKind,
    /// Device class (instruction set, GPU architecture): devices of the same class can exchange engines.
    pub class: String,
    /// Memory in bytes, if known.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Why engines can be built here for this device but not run: the hardware is not in this machine. `None` if it
    /// is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
}

impl Device {
    /// A device in this machine: first in the list, memory unknown.
    pub fn new(
        id: impl Into<String>,
        name: impl Into<String>,
        kind: DeviceKind,
        class: impl Into<String>,
    ) -> Self {
        let (id, name, class) = (id.into(), name.into(), class.into());
        Device { id, index: 0, name, kind, class, memory_bytes: None, absent: None }
    }
}

/// How new weights reach an engine, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightUpdate {
    /// Overwritten in the live session.
    InPlace,
    /// Supplied each time the engine is loaded.
    OnLoad,
    /// Passed as inputs in every run.
    AsInputs,
    /// The vendor compiler runs again. Unrecognized methods are also read as this.
    #[serde(other)]
    Rebuild,
}

/// How soon a build or run can be cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelSupport {
    /// Between the phases that the provider reports as progress.
    BetweenPhases,
    /// Within about a second.
    Prompt,
    /// Only by killing the process (run it isolated). Unrecognized words are also read as this.
    #[serde(other)]
    None,
}

/// What a provider can do on a device. In JSON, a missing field has its value from [`Capabilities::new`], and
/// unrecognized precisions and element types are dropped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// Precisions that an engine can be built in. The first low precision is the best one for the device.
    #[serde(default, deserialize_with = "known")]
    pub precisions: Vec<Precision>,
    /// Element types accepted for inputs and outputs.
    #[serde(default, deserialize_with = "known")]
    pub io_dtypes: Vec<DType>,
    /// How weights are replaced.
    #[serde(default = "rebuild")]
    pub weight_update: WeightUpdate,
    /// How soon a call stops.
    #[serde(default = "no_cancel")]
    pub cancel: CancelSupport,
    /// Whether an engine can be built with dimensions left open.
    #[serde(default)]
    pub dynamic_shapes: bool,
    /// Whether an engine can be built without the device present.
    #[serde(default)]
    pub device_free_build: bool,
    /// Whether weights can be baked into the engine file.
    #[serde(default)]
    pub bake: bool,
    /// Whether weights can be streamed to a device smaller than the model.
    #[serde(default)]
    pub streaming: bool,
    /// Whether outputs can stay on the device and serve as inputs there ([`Session::run_on_device`](crate::Session::run_on_device)).
    #[serde(default)]
    pub device_tensors: bool,
    /// Whether creating a session from an engine without weights runs the vendor's compiler. That is slow, so a
    /// stored engine saves less time than it seems.
    #[serde(default)]
    pub session_compiles: bool,
    /// Whether values between operators take 32 bits in every precision, for estimates of memory.
    #[serde(default)]
    pub wide_activations: bool,
    /// What else changes the times or the rounding of runs, by name, such as `tf32` = `off`. An option of a build with the same name
    /// replaces it. For reports.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
}

impl Capabilities {
    /// Can only build in `precisions`: a refit is a rebuild, and calls cannot be cancelled.
    pub fn new(precisions: Vec<Precision>, io_dtypes: Vec<DType>) -> Self {
        Capabilities {
            precisions,
            io_dtypes,
            weight_update: WeightUpdate::Rebuild,
            cancel: CancelSupport::None,
            dynamic_shapes: false,
            device_free_build: false,
            bake: false,
            streaming: false,
            device_tensors: false,
            session_compiles: false,
            wide_activations: false,
            settings: BTreeMap::new(),
        }
    }

    /// Adds to [`settings`](Capabilities::settings).
    #[must_use]
    pub fn with_settings(mut self, settings: &[(&str, &str)]) -> Self {
        self.settings.extend(settings.iter().map(|(name, value)| (name.to_string(), value.to_string())));
        self
    }
}

fn rebuild() -> WeightUpdate {
    WeightUpdate::Rebuild
}

fn no_cancel() -> CancelSupport {
    CancelSupport::None
}

/// Keeps the list entries that this version recognizes.
pub(crate) fn known<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let entries = Vec::<Value>::deserialize(deserializer)?;
    Ok(entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_of_newer_plugins_are_dropped() {
        let read: Capabilities = serde_json::from_str(
            r#"{"precisions":["fp3","fp16",{"mixed":["fp16","fp3"]}],"io_dtypes":["f32","f128"],
                "weight_update":"by_magic","cancel":"at_once","bake":true,"telepathy":{"range":3}}"#,
        )
        .unwrap();
        let mut expected = Capabilities::new(vec![Precision::Fp16], vec![DType::F32]);
        expected.bake = true;
        assert_eq!(read, expected);
        let device: Device =
            serde_json::from_str(r#"{"id":"q","name":"Q","kind":"quantum","class":"q1","qubits":7}"#)
                .unwrap();
        assert_eq!(device, Device::new("q", "Q", DeviceKind::Other, "q1"));
    }

    #[test]
    fn absent_capabilities_default_to_the_minimum() {
        let read: Capabilities = serde_json::from_str("{}").unwrap();
        assert_eq!(read, Capabilities::new(vec![], vec![]));
    }
}

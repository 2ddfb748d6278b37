//! Serializes an engine: a description as JSON, and the plan.

use crate::{table::Entry, target::Target};
use sdrun_abi::{EngineInfo, Error, Result, Weight, WeightSource, WeightSpec};
use sdrun_provider_common::{checks::Checks, payload};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Marks a payload, which holds a [`Description`] and a plan.
const MARK: &[u8; 8] = b"SDRTRTX1";

/// The description of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) info: EngineInfo,
    /// Empty for an engine with its weights inside.
    pub(crate) table: Vec<Entry>,
    /// What to check in each run.
    #[serde(default)]
    pub(crate) checks: Checks,
    /// Length of the plan.
    pub(crate) plan_bytes: u64,
}

/// Requirements of an engine on the runtime and the GPU, the text of [`EngineInfo::compatibility`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Requirements {
    /// Exact version of the library that wrote the plan.
    pub(crate) tensorrt_rtx: String,
    /// [`Target::name`]
    pub(crate) target: String,
    /// Whether the plan can be refitted.
    pub(crate) refit: bool,
}

impl Requirements {
    pub(crate) fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))
    }

    pub(crate) fn parse(text: &str) -> Result<(Self, Target)> {
        let found: Requirements = serde_json::from_str(text).map_err(|e| {
            Error::invalid(format!("the compatibility string {text:?} is not one of tensorrt-rtx: {e}"))
        })?;
        let target = Target::parse(&found.target).ok_or_else(|| {
            Error::invalid(format!(
                "the engine is built for {:?}, which this version does not know",
                found.target
            ))
        })?;
        Ok((found, target))
    }
}

/// Writes description and plan into one buffer.
pub(crate) fn write(description: &Description, plan: &[u8]) -> Result<Vec<u8>> {
    let mut payload = payload::begin(MARK, description, plan.len())?;
    payload.extend_from_slice(plan);
    Ok(payload)
}

/// Reads description and plan from a payload. Returns `DataLoss` for anything that [`write`] does not write.
pub(crate) fn read(payload: &[u8]) -> Result<(Description, &[u8])> {
    let (description, plan): (Description, _) = payload::split(MARK, payload)?;
    if description.plan_bytes != plan.len() as u64 {
        return Err(payload::damaged(&format!(
            "its plan has {} bytes where it should have {}",
            plan.len(),
            description.plan_bytes
        )));
    }
    Ok((description, plan))
}

/// For the fuzzer: reads a payload or a description alone, and computes each weight of its table from zeros. What is read must be
/// the same when it is written and read again.
#[doc(hidden)]
pub fn read_anything(bytes: &[u8]) {
    let read = read(bytes).map(|(description, _)| description);
    let alone = |_| serde_json::from_slice(bytes).map_err(|_| ());
    let Ok(mut description): Result<Description, ()> = read.or_else(alone) else { return };
    let _ = Requirements::parse(&description.info.compatibility);
    let specs = description.info.weights.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    for entry in &description.table {
        if let Ok(values) = entry.values(&specs, &Zeros(&specs)) {
            assert_eq!(values.bytes().len(), entry.bytes(), "a weight has another size than its table says");
        }
    }
    description.plan_bytes = 4;
    let again = write(&description, b"plan");
    let same = again.is_ok_and(|again| self::read(&again).is_ok_and(|(again, _)| again == description));
    assert!(same, "the description changes when it is written and read");
}

/// Weights of zeros, as long as they are small.
struct Zeros<'a>(&'a BTreeMap<&'a str, &'a WeightSpec>);

impl WeightSource for Zeros<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let spec = self.0.get(name).ok_or_else(|| Error::not_found("there is no such weight"))?;
        match spec.dtype.bytes_of(&spec.shape) {
            Some(bytes @ 0..1_000_000) => Weight::new(spec.dtype, spec.shape.clone(), vec![0; bytes]),
            _ => Err(Error::invalid("the weight is too large")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::ErrorCode;

    #[test]
    fn a_damaged_payload_is_an_error() {
        let info = EngineInfo { inputs: vec![], outputs: vec![], weights: vec![], compatibility: "c".into() };
        let description = Description { info, table: vec![], checks: Checks::default(), plan_bytes: 4 };
        let good = write(&description, b"plan").unwrap();
        assert_eq!(read(&good).unwrap(), (description, &b"plan"[..]));
        for end in 0..good.len() {
            assert_eq!(read(&good[..end]).unwrap_err().code, ErrorCode::DataLoss, "{end}");
        }
        assert!(read(&[&good[..], b"x"].concat()).unwrap_err().message.contains("5 bytes"));
    }

    #[test]
    fn requirements_are_read_back() {
        let wanted = Requirements { tensorrt_rtx: "1.7.1.116".into(), target: "sm89".into(), refit: true };
        assert_eq!(Requirements::parse(&wanted.text().unwrap()).unwrap(), (wanted.clone(), Target::Sm(89)));
        let unknown = Requirements { target: "sm13".into(), ..wanted };
        assert!(Requirements::parse(&unknown.text().unwrap()).unwrap_err().message.contains("sm13"));
        assert!(Requirements::parse("{}").is_err());
    }
}

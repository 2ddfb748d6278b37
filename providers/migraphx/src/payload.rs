//! Programs in engine files: the requirements of an engine, and its payload.
//!
//! ```text
//! "SDRMIGX1", u64 XXH3 of everything that follows
//! u32 bytes of the header, header as JSON
//! the graph as the host passed it (ONNX, gzip; empty if weights are baked in)
//! the programs, one for each set of input shapes, as MIGraphX stores them
//! ```
//! Numbers are little-endian. MIGraphX's own format has no checksum. Given a damaged program, MIGraphX may report an
//! error, crash, or compute wrong results.

use crate::{devices::Target, ffi::CompileOptions, options, runtime::Runtime};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use sdrun_abi::{Compatibility, EngineInfo, Error, ErrorCode, Result};
use sdrun_provider_common::checks::Checks;
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    io::{Read, Write},
};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"SDRMIGX1";

/// An engine's requirements on the runtime, stored as the text of [`EngineInfo::compatibility`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Requirements {
    /// MIGraphX's version. MIGraphX itself only warns about another one.
    migraphx: String,
    /// HIP's version, for engines built for a GPU.
    hip: Option<i32>,
    /// `ref`, or the GPU's architecture with its features.
    arch: String,
    /// The enabled compile options.
    options: String,
}

impl Requirements {
    /// The requirements of an engine built here.
    pub(crate) fn of(runtime: &Runtime, target: &Target, options: CompileOptions) -> Result<Self> {
        let hip = match (&runtime.hip, &target.hip) {
            (Some(hip), Some(_)) => Some(hip.version()?),
            _ => None,
        };
        Ok(Requirements {
            migraphx: runtime.version.clone(),
            hip,
            arch: target.device.class.clone(),
            options: options::text(options),
        })
    }

    pub(crate) fn read(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|e| {
            Error::invalid(format!("the compatibility string {text:?} is not from migraphx: {e}"))
        })
    }

    pub(crate) fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))
    }

    /// Whether an engine with these requirements works here.
    pub(crate) fn judge(&self, runtime: &Runtime, target: &Target) -> Result<Compatibility> {
        let here = Requirements { options: self.options.clone(), ..Self::of(runtime, target, NONE)? };
        Ok(self.against(&here))
    }

    /// Whether an engine with these requirements works on a system described by `here`.
    fn against(&self, here: &Requirements) -> Compatibility {
        let version = |hip: Option<i32>| hip.map_or("none".to_string(), |version| version.to_string());
        let pairs = [
            ("for", self.arch.clone(), here.arch.clone(), "this device is"),
            ("with MIGraphX", self.migraphx.clone(), here.migraphx.clone(), "found"),
            ("with HIP", version(self.hip), version(here.hip), "found"),
            (
                "with the options",
                format!("[{}]", self.options),
                format!("[{}]", here.options),
                "the build asks for",
            ),
        ];
        match pairs.into_iter().find(|(_, built, found, _)| built != found) {
            None => Compatibility::Optimal,
            Some((how, built, found, words)) => {
                Compatibility::Unsupported(format!("built {how} {built}, {words} {found}"))
            }
        }
    }

    /// Fails if an engine with these requirements does not work here.
    pub(crate) fn demand(&self, runtime: &Runtime, target: &Target, options: CompileOptions) -> Result<()> {
        sdrun_provider_common::demand(self.against(&Self::of(runtime, target, options)?))
    }
}

const NONE: CompileOptions = CompileOptions { fast_math: false, exhaustive_tune: false, offload_copy: false };

/// The header, which precedes the graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    info: EngineInfo,
    #[serde(default)]
    checks: Checks,
    model_bytes: u64,
    /// Input shapes and byte length of each program.
    programs: Vec<(Vec<Vec<usize>>, u64)>,
}

/// The parts of a payload.
pub(crate) struct Parts<'p> {
    pub(crate) info: EngineInfo,
    /// What to check in each run.
    pub(crate) checks: Checks,
    /// The graph as the host passed it; empty if weights are baked in.
    pub(crate) model: Cow<'p, [u8]>,
    /// The programs; at least one.
    pub(crate) programs: Vec<StoredProgram<'p>>,
}

/// A stored program.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredProgram<'p> {
    /// Shapes of the inputs it was compiled for, in the order of [`EngineInfo::inputs`].
    pub(crate) inputs: Vec<Vec<usize>>,
    /// The program in MIGraphX's format.
    pub(crate) bytes: &'p [u8],
}

/// Assembles a payload.
pub(crate) fn write(parts: &Parts<'_>) -> Result<Vec<u8>> {
    let model = compressed(&parts.model)?;
    let programs = parts.programs.iter().map(|program| (program.inputs.clone(), program.bytes.len() as u64));
    let header = Header {
        info: parts.info.clone(),
        checks: parts.checks.clone(),
        model_bytes: model.len() as u64,
        programs: programs.collect(),
    };
    let header =
        serde_json::to_vec(&header).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))?;
    let program_bytes: usize = parts.programs.iter().map(|program| program.bytes.len()).sum();
    let mut payload = Vec::with_capacity(20 + header.len() + model.len() + program_bytes);
    payload.extend_from_slice(MAGIC);
    payload.extend_from_slice(&[0; 8]);
    payload.extend_from_slice(&(header.len() as u32).to_le_bytes());
    payload.extend_from_slice(&header);
    payload.extend_from_slice(&model);
    for program in &parts.programs {
        payload.extend_from_slice(program.bytes);
    }
    let checksum = xxh3_64(&payload[16..]);
    payload[8..16].copy_from_slice(&checksum.to_le_bytes());
    Ok(payload)
}

/// Splits a payload into its parts. `DataLoss` if [`write`] did not write it.
pub(crate) fn read(payload: &[u8]) -> Result<Parts<'_>> {
    let damaged = |why: &str| {
        Error::new(ErrorCode::DataLoss, format!("the engine is damaged: {why}")).with_hint("build it again")
    };
    let rest = payload.strip_prefix(MAGIC).ok_or_else(|| damaged("it is not a MIGraphX engine"))?;
    let (checksum, rest) = rest.split_first_chunk().ok_or_else(|| damaged("it ends in its header"))?;
    if xxh3_64(rest) != u64::from_le_bytes(*checksum) {
        return Err(damaged("its checksum does not match"));
    }
    let (length, rest) = rest.split_first_chunk().ok_or_else(|| damaged("it ends in its header"))?;
    let (header, rest) = rest
        .split_at_checked(u32::from_le_bytes(*length) as usize)
        .ok_or_else(|| damaged("its header is longer than the engine"))?;
    let header: Header =
        serde_json::from_slice(header).map_err(|e| damaged(&format!("its header is wrong: {e}")))?;
    let parts = || {
        let mut rest = rest;
        let mut part = |bytes: u64| {
            let (part, behind) = rest.split_at_checked(usize::try_from(bytes).ok()?)?;
            rest = behind;
            Some(part)
        };
        let model = part(header.model_bytes)?;
        let program = |(inputs, bytes)| Some(StoredProgram { inputs, bytes: part(bytes)? });
        let programs: Vec<_> = header.programs.into_iter().map(program).collect::<Option<_>>()?;
        let whole = programs.iter().all(|program| !program.bytes.is_empty()) && !programs.is_empty();
        (whole && rest.is_empty()).then_some((model, programs))
    };
    let (model, programs) =
        parts().ok_or_else(|| damaged("its parts do not have the lengths in its header"))?;
    Ok(Parts { info: header.info, checks: header.checks, model: expanded(model)?.into(), programs })
}

/// Limit for the expanded size of a graph without weights, in bytes.
const MODEL_LIMIT: u64 = 256 << 20;

fn compressed(model: &[u8]) -> Result<Vec<u8>> {
    if model.is_empty() {
        return Ok(Vec::new());
    }
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    let done = gzip.write_all(model).and_then(|()| gzip.finish());
    done.map_err(|e| Error::internal(format!("cannot compress the graph: {e}")))
}

fn expanded(model: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if !model.is_empty() {
        GzDecoder::new(model).take(MODEL_LIMIT).read_to_end(&mut bytes).map_err(|e| {
            Error::new(
                ErrorCode::DataLoss,
                format!("the engine is damaged: its graph cannot be expanded: {e}"),
            )
        })?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requirements() -> Requirements {
        Requirements {
            migraphx: "2.14.0".into(),
            hip: Some(60443484),
            arch: "gfx1100".into(),
            options: "fast_math".into(),
        }
    }

    #[test]
    fn what_an_engine_asks_for_is_compared() {
        let built = requirements();
        assert_eq!(Requirements::read(&built.text().unwrap()).unwrap(), built);
        assert_eq!(built.against(&requirements()), Compatibility::Optimal);
        for (here, words) in [
            (
                Requirements { migraphx: "2.15.0".into(), ..requirements() },
                "built with MIGraphX 2.14.0, found 2.15.0",
            ),
            (Requirements { hip: Some(7), ..requirements() }, "built with HIP 60443484, found 7"),
            (Requirements { hip: None, ..requirements() }, "built with HIP 60443484, found none"),
            (
                Requirements { arch: "gfx1030".into(), ..requirements() },
                "built for gfx1100, this device is gfx1030",
            ),
            (
                Requirements { options: String::new(), ..requirements() },
                "built with the options [fast_math], the build asks for []",
            ),
        ] {
            assert_eq!(built.against(&here), Compatibility::Unsupported(words.into()));
        }
        assert!(Requirements::read("{}").is_err() && Requirements::read("gfx1100").is_err());
    }

    #[test]
    fn a_damaged_payload_is_an_error() {
        let info = EngineInfo { inputs: vec![], outputs: vec![], weights: vec![], compatibility: "c".into() };
        let program = |size: usize, bytes| StoredProgram { inputs: vec![vec![1, size], vec![]], bytes };
        let programs = vec![program(64, b"mxr"), program(96, b"mxr of another size")];
        let with = |programs: &[StoredProgram<'static>]| {
            let model = b"onnx".as_slice().into();
            write(&Parts {
                info: info.clone(),
                checks: Checks::default(),
                model,
                programs: programs.to_vec(),
            })
            .unwrap()
        };
        let good = with(&programs);
        let parts = read(&good).unwrap();
        assert_eq!((&parts.info, &*parts.model, parts.programs), (&info, &b"onnx"[..], programs));
        for end in 0..good.len() {
            assert_eq!(read(&good[..end]).err().unwrap().code, ErrorCode::DataLoss, "{end}");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(read(&bad).err().unwrap().code, ErrorCode::DataLoss, "{at}");
        }
        for empty in [with(&[]), with(&[program(64, b"")])] {
            assert_eq!(read(&empty).err().unwrap().code, ErrorCode::DataLoss);
        }
    }
}

//! The `.sdengine` container: a header, a JSON manifest and a page-aligned payload, each with a checksum.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic `SDRUNENG` |
//! | 8 | 4 | format version, little-endian (1) |
//! | 12 | 4 | zero |
//! | 16 | 8 | length of the manifest |
//! | 24 | 8 | offset of the payload, a multiple of 4096 |
//! | 32 | 8 | length of the payload; the file ends with it |
//! | 40 | 16 | XXH3-128 of the manifest |
//! | 56 | 16 | XXH3-128 of the payload |
//! | 72 | … | the manifest, then zeros up to the payload |
//!
//! The checksums detect damage; they do not prove who made the file. An engine is code for the vendor's runtime: load
//! only engines you trust (docs/security.md).

use crate::Result;
use sdrun_abi::{BuildSpec, EngineInfo, Error as AbiError, ErrorCode};
use sdrun_files::{Existing, Links, Map};
use sdrun_weights::Binding;
use serde::{Deserialize, Serialize};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

const MAGIC: &[u8; 8] = b"SDRUNENG";
const VERSION: u32 = 1;
const HEADER: usize = 72;
const PAGE: u64 = 4096;
/// Maximum size of a manifest. A UNet's weight table takes about 100 kB.
const MAX_MANIFEST: u64 = 64 << 20;

/// The manifest of an engine file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineManifest {
    /// Its cache key: a hash over everything that the engine depends on. Empty for an engine that was baked from
    /// another one.
    #[serde(default)]
    pub key: String,
    /// Provider that built it.
    pub provider: String,
    /// [`build_id`](sdrun_abi::Provide::build_id) of that provider.
    pub build_id: String,
    /// Name and version of the vendor runtime.
    pub runtime: (String, String),
    /// [`Device::class`](sdrun_abi::Device::class) it was built for.
    pub device_class: String,
    /// [`Graph::topology_hash`](sdrun_graph::Graph::topology_hash) of the bound, simplified graph.
    pub topology: String,
    /// Name of the model that it was built from, for lists.
    pub model: String,
    /// How it was built.
    pub spec: BuildSpec,
    /// Inputs, outputs, weights, compatibility string.
    pub info: EngineInfo,
    /// Maps its weights to tensors of a checkpoint.
    #[serde(default)]
    pub binding: Binding,
    /// XXH3-128 over the baked weights; `None` for a stripped engine.
    pub baked: Option<String>,
}

impl EngineManifest {
    /// The first difference from the wanted engine that affects the results, if any.
    pub(crate) fn differs(&self, wanted: &EngineManifest) -> Option<&'static str> {
        let spec = |m: &EngineManifest| BuildSpec { device: String::new(), threads: None, ..m.spec.clone() };
        let pairs = [
            ("key", self.key == wanted.key),
            ("provider", (&self.provider, &self.build_id) == (&wanted.provider, &wanted.build_id)),
            ("runtime", self.runtime == wanted.runtime),
            ("device class", self.device_class == wanted.device_class),
            ("graph", self.topology == wanted.topology),
            ("options", spec(self) == spec(wanted)),
            ("weights", self.baked == wanted.baked),
        ];
        pairs.into_iter().find(|(_, same)| !same).map(|(what, _)| what)
    }
}

/// An engine file: manifest and mapped payload, both checked.
pub struct EngineFile {
    /// The manifest.
    pub manifest: EngineManifest,
    map: Map,
    payload: std::ops::Range<usize>,
}

impl EngineFile {
    /// Maps and checks a file. Fails with `DataLoss` unless it is a complete, undamaged engine file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, Links::Follow)
    }

    pub(crate) fn open_with(path: &Path, links: Links) -> Result<Self> {
        let file = Self::open_head(path, links)?;
        check_payload(&file.map, file.payload()).map_err(damaged(path))?;
        Ok(file)
    }

    /// Maps a file and checks its header and manifest, but does not read its payload.
    fn open_head(path: &Path, links: Links) -> Result<Self> {
        let map = Map::open(path, links)?;
        let (manifest, payload) = parse(&map).map_err(damaged(path))?;
        Ok(EngineFile { manifest, map, payload })
    }

    /// Reads the manifest of a file without reading the payload, so it does not notice damage to the payload.
    pub fn read_manifest(path: &Path) -> Result<EngineManifest> {
        Ok(Self::open_head(path, Links::Follow)?.manifest)
    }

    /// The payload, as the provider wrote it.
    pub fn payload(&self) -> &[u8] {
        &self.map[self.payload.clone()]
    }

    /// Writes an engine file to a path that the user named, completely or not at all.
    pub fn write(path: &Path, manifest: &EngineManifest, payload: &[u8]) -> Result<()> {
        Self::write_over(path, Existing::OfUser, manifest, payload)
    }

    pub(crate) fn write_over(
        path: &Path,
        existing: Existing,
        manifest: &EngineManifest,
        payload: &[u8],
    ) -> Result<()> {
        let json = serde_json::to_vec(manifest)
            .map_err(|e| AbiError::internal(format!("cannot write JSON: {e}")))?;
        let offset = (HEADER as u64 + json.len() as u64).next_multiple_of(PAGE);
        let mut head = Vec::with_capacity(offset as usize);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&[0; 4]);
        for number in [json.len() as u64, offset, payload.len() as u64] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        head.extend_from_slice(&xxh3_128(&json).to_le_bytes());
        head.extend_from_slice(&xxh3_128(payload).to_le_bytes());
        head.extend_from_slice(&json);
        head.resize(offset as usize, 0);
        sdrun_files::write(path, existing, |out| {
            out.write_all(&head)?;
            out.write_all(payload)
        })?;
        Ok(())
    }
}

fn damaged(path: &Path) -> impl Fn(String) -> AbiError {
    move |why| {
        AbiError::new(ErrorCode::DataLoss, format!("{} {why}", path.display()))
            .with_file(path)
            .with_hint(sdrun_abi::Hint::Rebuild)
    }
}

/// The manifest and the range of the payload. Everything is checked except the payload's checksum.
fn parse(bytes: &[u8]) -> Result<(EngineManifest, std::ops::Range<usize>), String> {
    let take = |at: usize, n: usize| {
        bytes.get(at..at + n).ok_or("is truncated: its header is incomplete".to_string())
    };
    let number = |at: usize| -> Result<u64, String> {
        Ok(take(at, 8)?.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
    };
    if take(0, 8).ok() != Some(MAGIC) {
        return Err("is not an sdrun engine file".into());
    }
    let version = number(8)? as u32;
    if version != VERSION {
        return Err(format!("has format version {version}; this sdrun reads version {VERSION}"));
    }
    if take(12, 4)? != [0; 4] {
        return Err("is damaged: its reserved bytes are not zero".into());
    }
    let (manifest_len, offset, payload_len) = (number(16)?, number(24)?, number(32)?);
    let size = bytes.len() as u64;
    if manifest_len > MAX_MANIFEST || manifest_len > size - HEADER.min(bytes.len()) as u64 {
        return Err(format!("is damaged: a manifest of {manifest_len} bytes does not fit"));
    }
    if offset != (HEADER as u64 + manifest_len).next_multiple_of(PAGE) {
        return Err("is damaged: its payload is not where it should be".into());
    }
    match offset.checked_add(payload_len) {
        Some(end) if end == size => {}
        Some(end) if end > size => return Err(format!("is truncated: {size} bytes of {end}")),
        _ => return Err("is damaged: there are bytes after its payload".into()),
    }
    let json = take(HEADER, manifest_len as usize)?;
    let payload = offset as usize..size as usize;
    if xxh3_128(json).to_le_bytes() != *take(40, 16)? {
        return Err("is damaged: the checksum of its manifest is wrong".into());
    }
    if bytes[HEADER + json.len()..payload.start].iter().any(|b| *b != 0) {
        return Err("is damaged: there are bytes between its manifest and its payload".into());
    }
    let manifest =
        serde_json::from_slice(json).map_err(|e| format!("has a manifest this sdrun cannot read: {e}"))?;
    Ok((manifest, payload))
}

fn check_payload(file: &[u8], payload: &[u8]) -> Result<(), String> {
    match file.get(56..HEADER) == Some(&xxh3_128(payload).to_le_bytes()) {
        true => Ok(()),
        false => Err("is damaged: the checksum of its payload is wrong".into()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use sdrun_abi::Precision;

    pub(crate) fn manifest() -> EngineManifest {
        EngineManifest {
            key: "k".into(),
            provider: "mock".into(),
            build_id: "b".into(),
            runtime: ("r".into(), "1".into()),
            device_class: "cpu".into(),
            topology: "t".into(),
            model: "m".into(),
            spec: BuildSpec::new("cpu", Precision::Fp32),
            info: EngineInfo { inputs: vec![], outputs: vec![], weights: vec![], compatibility: "c".into() },
            binding: Binding::default(),
            baked: None,
        }
    }

    #[test]
    fn round_trip() {
        let dir = tempfile::tempdir().unwrap();
        for payload in [&b""[..], b"payload", &[7; 10_000]] {
            let path = dir.path().join("e.sdengine");
            EngineFile::write(&path, &manifest(), payload).unwrap();
            let file = EngineFile::open(&path).unwrap();
            assert_eq!((file.payload(), &file.manifest), (payload, &manifest()));
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn every_changed_byte_and_every_truncation_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e.sdengine");
        EngineFile::write(&path, &manifest(), b"payload").unwrap();
        let good = std::fs::read(&path).unwrap();
        let refused = |bytes: &[u8]| match parse(bytes) {
            Ok((_, payload)) => check_payload(bytes, &bytes[payload]).is_err(),
            Err(_) => true,
        };
        assert!(!refused(&good));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x41;
            assert!(refused(&bad), "byte {at}");
        }
        for len in 0..good.len() {
            assert!(parse(&good[..len]).is_err(), "length {len}");
        }
        assert!(parse(&[&good[..], b"x"].concat()).unwrap_err().contains("bytes after"));
    }

    #[test]
    fn huge_lengths_do_not_allocate() {
        let mut bad = vec![0u8; HEADER];
        bad[..8].copy_from_slice(MAGIC);
        bad[8] = 1;
        bad[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(parse(&bad).is_err());
        bad[16..24].copy_from_slice(&0u64.to_le_bytes());
        bad[24..32].copy_from_slice(&PAGE.to_le_bytes());
        bad[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(parse(&bad).is_err());
    }
}

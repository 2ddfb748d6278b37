//! Files with weights, engines and pictures.

use sdrun::{
    EngineFile,
    abi::{DType, Error, WeightSource},
    numpy::{npy, npz},
    weights::{
        Adapter, Checkpoint, Component, SafetensorsWeights,
        adapter::{Target, check},
        embedding::Embedding,
    },
};
use sdrun_diffusion::{file, metadata::read_record};
use std::{fs, path::Path};

#[path = "../../core/weights/tests/adapter/keys.rs"]
mod keys;

use keys::{NETWORK, SLOTS};

/// The most pixels of a picture, so that one input takes little time.
const PIXELS: u64 = 1 << 20;

/// Without room, a target would read nothing and find nothing.
pub(crate) const ROOM: &str = "the temporary folder has room";

/// Calls `read` with the path of a file that has these bytes. Some readers look at the ending.
fn with_file(name: &str, bytes: &[u8], read: impl FnOnce(&Path)) {
    let dir = tempfile::tempdir().expect(ROOM);
    let path = dir.path().join(name);
    fs::write(&path, bytes).expect(ROOM);
    read(&path);
}

pub(crate) fn safetensors(bytes: &[u8]) {
    with_file("m.safetensors", bytes, |path| {
        let Ok(weights) = SafetensorsWeights::open(&[path]) else { return };
        for name in weights.names() {
            let _ = weights.get(name);
        }
    });
    with_file("m.safetensors", bytes, checkpoint);
}

/// A folder with an index and one shard.
pub(crate) fn sharded_index(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect(ROOM);
    let shard = tensors(&[("a.weight".into(), vec![2, 2])]);
    fs::write(dir.path().join("model-00001-of-00002.safetensors"), shard).expect(ROOM);
    fs::write(dir.path().join("model.safetensors.index.json"), bytes).expect(ROOM);
    checkpoint(&dir.path().join("model-00001-of-00002.safetensors"));
    checkpoint(dir.path());
}

pub(crate) fn gguf(bytes: &[u8]) {
    with_file("m.gguf", bytes, checkpoint);
}

/// Opens a checkpoint and reads all weights.
fn checkpoint(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path) else { return };
    let _ = (checkpoint.summary(), checkpoint.metadata());
    for component in checkpoint.components() {
        let Ok(weights) = checkpoint.component(component) else { continue };
        for name in weights.names() {
            let _ = weights.get(name);
        }
    }
}

pub(crate) fn adapter(bytes: &[u8]) {
    with_file("a.safetensors", bytes, use_adapter);
}

/// Opens an adapter, and finds its place in a small network.
fn use_adapter(path: &Path) {
    let Ok(adapter) = Adapter::open(path) else { return };
    let shapes = NETWORK.map(|(name, shape)| (name.to_string(), shape.to_vec()));
    let target = Target::new(Component::Denoiser, shapes, &[]);
    let resolution = adapter.resolve(&target);
    let _ = (adapter.family_guess(), adapter.kinds(), check(&adapter, &[(&target, &resolution)], false));
}

const PREFIXES: [&str; 8] = [
    "lora_unet_",
    "lora_te_",
    "unet.",
    "lycoris_",
    "transformer.",
    "base_model.model.",
    "diffusion_model.",
    "",
];
const MODULES: [&str; 6] = ["m", "n", "c", "one", "x", "m_m"];
/// Adapters of known keys in any combination and any small shapes. Each tensor takes five bytes: three choose its key, two its shape.
pub(crate) fn adapter_keys(bytes: &[u8]) {
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    for piece in bytes.chunks_exact(5).take(24) {
        let [prefix, module, slot, ranks, sizes] = [0, 1, 2, 3, 4].map(|i| usize::from(piece[i]));
        let of = |table: &[&'static str], at: usize| table[at % table.len()];
        let key = format!("{}{}.{}", of(&PREFIXES, prefix), of(&MODULES, module), of(&SLOTS, slot));
        let sizes =
            [sizes & 3, (sizes >> 2) & 3, (sizes >> 4) & 3, sizes >> 6].map(|size| [1, 2, 5, 6][size]);
        if found.iter().all(|(known, _)| *known != key) {
            found.push((key, sizes[..ranks % 5].to_vec()));
        }
    }
    with_file("a.safetensors", &tensors(&found), use_adapter);
}

/// A safetensors file with f32 tensors of ones.
fn tensors(list: &[(String, Vec<usize>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in list {
        let start = data.len();
        (0..shape.iter().product()).for_each(|_| data.extend(1f32.to_le_bytes()));
        let entry =
            serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

pub(crate) fn embedding(bytes: &[u8]) {
    with_file("word.safetensors", bytes, |path| {
        if let Ok(embedding) = Embedding::open(path) {
            let _ = (embedding.tokens(), embedding.for_encoder(Component::TextEncoder, 768));
        }
    });
}

pub(crate) fn npy(bytes: &[u8]) {
    with_file("x.npy", bytes, |path| {
        if let Ok(tensor) = npy::read(path, small) {
            let mut written = Vec::new();
            assert!(npy::write_to(&mut written, &tensor).is_ok(), "an array that was read can be written");
            with_file("y.npy", &written, |path| {
                let again = npy::read(path, small).map(|again| again.bytes() == tensor.bytes());
                assert!(again.is_ok_and(|same| same), "the array changes when it is written and read");
            });
        }
    });
}

pub(crate) fn npz(bytes: &[u8]) {
    with_file("x.npz", bytes, |path| {
        let _ = npz::read(path, None, |_, dtype, shape| small(dtype, shape));
        let _ = npz::read(path, Some("x"), |_, dtype, shape| small(dtype, shape));
    });
}

/// The check of a caller that knows what it needs.
fn small(dtype: DType, shape: &[usize]) -> Result<(), Error> {
    match dtype.bytes_of(shape) {
        Some(0..=1_000_000) => Ok(()),
        _ => Err(Error::invalid("it is too large")),
    }
}

pub(crate) fn engine(bytes: &[u8]) {
    with_file("m.sdengine", bytes, |path| {
        let _ = EngineFile::read_manifest(path);
        if let Ok(engine) = EngineFile::open(path) {
            let _ = engine.payload().len();
        }
    });
}

/// A picture, its metadata, and the picture written again as PNG.
pub(crate) fn picture(bytes: &[u8]) {
    let Ok(picture) = file::decode(bytes, PIXELS) else { return };
    let _ = read_record(&picture.texts);
    let rgb = picture.image().to_rgb8();
    let Ok(written) = file::encode(file::Format::Png, &rgb, file::JPEG_QUALITY, &[]) else { return };
    let again = file::decode(&written, PIXELS).map(|again| again.image().to_rgb8());
    assert!(again.is_ok_and(|again| again == rgb), "the picture changes when it is written and read");
}

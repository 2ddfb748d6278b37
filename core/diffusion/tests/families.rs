//! Every family is recognised by its denoiser.

#![cfg(unix)] // Files of real sizes need a file system with holes.
#![allow(clippy::unwrap_used)]

use sdrun::{Paths, abi::NoHost, weights::builtin};
use sdrun_diffusion::{
    family::{FAMILIES, Family},
    pipeline::{Error, Files, Parts},
};
use serde_json::{Map, json};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::Path,
};

/// Writes a safetensors file in f16 with the names and shapes of a built-in network, under diffusers' names, and markers of four
/// numbers. The values are a hole.
fn checkpoint_of(model: &str, markers: &[&str], path: &Path) {
    checkpoint_with(model, markers, None, path);
}

/// The same with a tensor of bytes at the end.
fn checkpoint_with(model: &str, markers: &[&str], bytes: Option<(&str, &[u8])>, path: &Path) {
    let map = builtin::find(model).unwrap().weight_map().unwrap();
    let marker = vec![4];
    let mut shapes: BTreeMap<&str, &Vec<usize>> =
        map.tensors.iter().map(|tensor| (tensor.source.as_str(), &tensor.source_shape)).collect();
    shapes.extend(markers.iter().map(|name| (*name, &marker)));
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in shapes {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.into(), json!({ "dtype": "F16", "shape": shape, "data_offsets": [start, end] }));
    }
    let more = bytes.map_or(0, |(name, bytes)| {
        let place =
            json!({ "dtype": "U8", "shape": [bytes.len()], "data_offsets": [end, end + bytes.len()] });
        header.insert(name.into(), place);
        bytes.len()
    });
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len((8 + header.len() + end + more) as u64).unwrap();
    if let Some((_, bytes)) = bytes {
        file.seek(SeekFrom::End(-(bytes.len() as i64))).unwrap();
        file.write_all(bytes).unwrap();
    }
}

/// A SentencePiece model of three pieces (`sentencepiece_model.proto`).
fn sentence_piece() -> Vec<u8> {
    let piece = |text: &str, score: f32, kind: u8| {
        let inner =
            [&[0x0a, text.len() as u8], text.as_bytes(), &[0x15], &score.to_le_bytes(), &[0x18, kind]]
                .concat();
        [&[0x0a, inner.len() as u8], &inner[..]].concat()
    };
    [piece("<unk>", 0.0, 2), piece("</s>", 0.0, 3), piece("▁a", -1.0, 1)].concat()
}

/// A T5 whose file holds its vocabulary needs no other file. Without it, the error says what to give.
#[test]
fn a_vocabulary_is_read_from_the_file_of_weights() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::for_user(Some(folder.path()), Some(folder.path())).unwrap();
    let family = Family::find("chroma").unwrap();
    let [denoiser, t5] = ["denoiser", "t5"].map(|name| folder.path().join(format!("{name}.safetensors")));
    checkpoint_of(family.denoiser.model, &[], &denoiser);
    let files = Files { denoiser: Some(denoiser), t5: Some(t5.clone()), ..Files::default() };
    let error = || Parts::open(&files, &paths, &NoHost).err().unwrap();
    checkpoint_of("t5-xxl", &[], &t5);
    assert!(error().to_string().contains("needs its vocabulary"), "{}", error());
    checkpoint_with("t5-xxl", &[], Some(("spiece_model", &sentence_piece())), &t5);
    assert!(matches!(error(), Error::Missing { component, .. } if component == "vae"), "{}", error());
    checkpoint_with("t5-xxl", &[], Some(("spiece_model", b"no model")), &t5);
    assert!(error().to_string().contains("SentencePiece"), "{}", error());
}

/// Sana from files of its networks, and from a folder. Its language model needs its vocabulary beside it.
#[test]
fn sana_is_made_of_files_or_a_folder() {
    let place = tempfile::tempdir().unwrap();
    let paths = Paths::for_user(Some(place.path()), Some(place.path())).unwrap();
    let gemma = include_bytes!("../testdata/text/gemma.json");
    let file = |folder: &str, name: &str, model: &str| {
        let folder = place.path().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join(name);
        checkpoint_of(model, &[], &file);
        Some(file)
    };
    let mut files = Files { denoiser: file("a", "sana.safetensors", "sana/1600m"), ..Files::default() };
    let error = |files: &Files| Parts::open(files, &paths, &NoHost).err().unwrap();
    files.llm = file("b", "gemma.safetensors", "gemma2-2b");
    assert!(error(&files).to_string().contains("Gemma needs its vocabulary"), "{}", error(&files));
    std::fs::write(place.path().join("b/tokenizer.json"), gemma).unwrap();
    assert!(matches!(error(&files), Error::Missing { component, .. } if component == "vae"));
    files.autoencoder = file("c", "vae.safetensors", "sana/vae-decoder");
    let parts = Parts::open(&files, &paths, &NoHost).unwrap();
    assert_eq!((parts.family.id, parts.prediction), ("sana", None));

    file("whole/transformer", "diffusion_pytorch_model.safetensors", "sana/1600m");
    file("whole/text_encoder", "model.safetensors", "gemma2-2b");
    file("whole/vae", "diffusion_pytorch_model.safetensors", "sana/vae-decoder");
    let write = |name: &str, content: &[u8]| {
        let file = place.path().join("whole").join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, content).unwrap();
    };
    write("tokenizer/tokenizer.json", gemma);
    let scheduler = r#"{"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction"}"#;
    write("scheduler/scheduler_config.json", scheduler.as_bytes());
    let files = Files { model: Some(place.path().join("whole")), ..Files::default() };
    let parts = Parts::open(&files, &paths, &NoHost).unwrap();
    assert_eq!((parts.family.id, parts.prediction), ("sana", None));
    assert_eq!(parts.encoders[0].as_ref().unwrap().tokenizer.before(), [2]);
}

/// A denoiser alone lacks its text encoder, and the error names the family.
#[test]
fn denoisers_tell_their_family() {
    let folder = tempfile::tempdir().unwrap();
    let paths = Paths::for_user(Some(folder.path()), Some(folder.path())).unwrap();
    for family in &FAMILIES {
        // Playground has the network of SDXL.
        let markers: &[&str] = if family.id == "playground" { &["edm_mean", "edm_std"] } else { &[] };
        let file = folder.path().join("denoiser.safetensors");
        checkpoint_of(family.denoiser.model, markers, &file);
        let files = Files { denoiser: Some(file), ..Files::default() };
        match Parts::open(&files, &paths, &NoHost).err() {
            Some(Error::Missing { component, family: found, .. }) => {
                assert_eq!(found.id, family.id);
                assert_eq!(component, family.encoders[0].component, "{}", family.id);
            }
            other => panic!("{}: {other:?}", family.id),
        }
    }
}

/// Each family can be found by its id, and its networks are built in.
#[test]
fn families_have_their_networks() {
    for family in &FAMILIES {
        assert_eq!(Family::find(family.id), Some(family));
        let encoders = family.encoders.iter().map(|encoder| encoder.model);
        let autoencoder = [family.autoencoder.decoder, family.autoencoder.encoder];
        let controlled = family.controlled.iter().flat_map(|nets| [nets.network, nets.denoiser]);
        for model in encoders.chain(autoencoder).chain(controlled).chain([family.denoiser.model]) {
            assert!(builtin::find(model).is_some(), "{}: {model}", family.id);
        }
    }
}

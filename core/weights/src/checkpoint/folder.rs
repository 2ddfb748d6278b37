//! Folders as diffusers and transformers save them, and checkpoints in several files.

use crate::Component;
use sdrun_abi::{Error, ErrorCode, Result};
use sdrun_files::{Links, read_small};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Far above what an index or a configuration has.
const MAX_JSON: u64 = 64 << 20;
/// Names of weight files: diffusers' and transformers'.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];
/// Folders in which diffusers' training scripts save averaged (EMA) weights.
const AVERAGED: [&str; 2] = ["unet_ema", "transformer_ema"];

/// What lies in a folder.
pub(super) struct Folder {
    /// Weight files of a denoiser averaged in training.
    pub(super) averaged: Option<Vec<PathBuf>>,
    /// Weight files of each component, with the component where the folder tells it.
    pub(super) weights: Vec<(Vec<PathBuf>, Option<Component>)>,
    /// `scheduler/scheduler_config.json`.
    pub(super) scheduler: BTreeMap<String, serde_json::Value>,
}

impl Folder {
    /// Looks for a pipeline, or for the weights of one component. `NotFound` where there is neither.
    pub(super) fn find(path: &Path) -> Result<Folder> {
        let mut weights = Vec::new();
        for (name, component) in Component::FOLDERS {
            let folder = path.join(name);
            if folder.is_dir()
                && let Some(files) = weight_files(&folder)?
            {
                weights.push((files, Some(component)));
            }
        }
        let mut averaged = None;
        for folder in AVERAGED.map(|name| path.join(name)) {
            if averaged.is_none() && folder.is_dir() {
                averaged = weight_files(&folder)?;
            }
        }
        if weights.is_empty()
            && averaged.is_none()
            && let Some(files) = weight_files(path)?
        {
            // Its name is that of a pipeline's folder where it was taken out of one.
            let name = path.file_name().and_then(|name| name.to_str());
            weights.push((files, name.and_then(Component::of_folder)));
        }
        if weights.is_empty() && averaged.is_none() {
            let message = format!("{} has no weights in safetensors files", path.display());
            return Err(Error::not_found(message)
                .with_file(path)
                .with_hint("give a folder with model_index.json, or the folder of one component"));
        }
        let config = path.join("scheduler/scheduler_config.json");
        let scheduler = if config.is_file() { read_json(&config)? } else { BTreeMap::new() };
        Ok(Folder { averaged, weights, scheduler })
    }
}

/// The weight files of one component: full precision before variants such as `fp16`, an index of shards before a
/// single file. `Unimplemented` where there are only pickles.
fn weight_files(folder: &Path) -> Result<Option<Vec<PathBuf>>> {
    let failed = |error| Error::io("read", folder, &error);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort_unstable();
    let has = |name: &String| names.contains(name);
    for stem in STEMS {
        let plain = [format!("{stem}.safetensors.index.json"), format!("{stem}.safetensors")];
        if let Some(name) = plain.iter().find(|name| has(name)) {
            return shards(&folder.join(name)).map(Some);
        }
        // `model.fp16.safetensors`, `model.safetensors.index.fp16.json`; older: `model.fp16.safetensors.index.json`.
        let index =
            |name: &&String| name.starts_with(&format!("{stem}.")) && name.contains(".safetensors.index.");
        let single = |name: &&String| {
            let variant = name.strip_prefix(stem).and_then(|rest| rest.strip_suffix(".safetensors"));
            variant.is_some_and(|variant| variant.starts_with('.') && !variant.contains("-of-"))
        };
        if let Some(name) = names.iter().find(index).or_else(|| names.iter().find(single)) {
            return shards(&folder.join(name)).map(Some);
        }
    }
    let loose: Vec<&String> = names.iter().filter(|name| name.ends_with(".safetensors")).collect();
    if let [name] = loose[..] {
        return Ok(Some(vec![folder.join(name)]));
    }
    let pickled = names.iter().find(|name| {
        STEMS.iter().chain(&["pytorch_model"]).any(|s| name.starts_with(s)) && name.ends_with(".bin")
    });
    if let Some(name) = pickled {
        let path = folder.join(name);
        return Err(Error::unsupported(format!("{} is a pickled PyTorch checkpoint", path.display()))
            .with_file(&path)
            .with_hint(
                "pickled checkpoints can run any code when they are read: get the safetensors version",
            ));
    }
    Ok(None)
}

/// The files of a checkpoint of which `path` is the index, one shard, or the whole.
pub(super) fn shards(path: &Path) -> Result<Vec<PathBuf>> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name.contains(".safetensors.index.") && name.ends_with(".json") {
        return indexed(path);
    }
    let Some((front, total, back)) = shard_of(&name) else { return Ok(vec![path.to_owned()]) };
    Ok((1..=total)
        .map(|number| path.with_file_name(format!("{front}-{number:05}-of-{total:05}{back}")))
        .collect())
}

/// `model-00001-of-00003.safetensors` as (`model`, 3, `.safetensors`).
fn shard_of(name: &str) -> Option<(&str, u32, &str)> {
    /// More files than any checkpoint has.
    const MAX_SHARDS: u32 = 1000;
    let (before, after) = name.split_once("-of-")?;
    let (front, number) = before.rsplit_once('-')?;
    let (total, back) = after.split_at_checked(5)?;
    let [number, total] = [number, total].map(|digits| {
        let plain = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        if plain { digits.parse::<u32>().ok() } else { None }
    });
    let total = total.filter(|total| *total <= MAX_SHARDS)?;
    ((1..=total).contains(&number?) && back.starts_with('.')).then_some((front, total, back))
}

/// An index as transformers writes it: tensor name to file name.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn indexed(path: &Path) -> Result<Vec<PathBuf>> {
    let index: Index = read_json(path)?;
    let mut names: Vec<String> = index.weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    // Only files of the same folder: an index must not reach for others.
    if let Some(name) = names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        let message = format!("{} names {name:?}, which is no plain file name", path.display());
        return Err(Error::new(ErrorCode::DataLoss, message).with_file(path));
    }
    Ok(names.iter().map(|name| path.with_file_name(name)).collect())
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = read_small(path, Links::Follow, MAX_JSON)?;
    serde_json::from_slice(&text).map_err(|error| {
        Error::new(ErrorCode::DataLoss, format!("{} is not valid: {error}", path.display())).with_file(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_told_by_their_names() {
        assert_eq!(shard_of("model-00002-of-00003.safetensors"), Some(("model", 3, ".safetensors")));
        assert_eq!(shard_of("a-of-b-00001-of-00001.fp16.safetensors"), None);
        for name in [
            "model.safetensors",
            "model-00004-of-00003.safetensors",
            "model-00000-of-00003.safetensors",
            "model-1-of-3.safetensors",
            "model-00001-of-99999.safetensors",
            "model-00001-of-0000",
            "model-+0001-of-00002.safetensors",
            "-of-",
        ] {
            assert_eq!(shard_of(name), None, "{name}");
        }
        let paths = shards(Path::new("x/m-00002-of-00002.safetensors")).unwrap();
        let expected = ["x/m-00001-of-00002.safetensors", "x/m-00002-of-00002.safetensors"];
        assert_eq!(paths, expected.map(PathBuf::from));
    }
}

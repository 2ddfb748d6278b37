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

/// Far above the size of any index or configuration.
const MAX_JSON: u64 = 64 << 20;
/// Names of weight files: diffusers' and transformers'.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];
/// Folders in which diffusers' training scripts save averaged (EMA) weights.
const AVERAGED: [&str; 2] = ["unet_ema", "transformer_ema"];

/// What a folder holds.
pub(super) struct Folder {
    /// The weights of each component.
    pub(super) weights: Vec<ComponentFiles>,
    /// Averaged (EMA) weights of the denoiser in files of their own.
    pub(super) averaged: Option<Vec<PathBuf>>,
    /// `scheduler/scheduler_config.json`.
    pub(super) scheduler: BTreeMap<String, serde_json::Value>,
}

/// The weight files of one component.
pub(super) struct ComponentFiles {
    pub(super) files: Vec<PathBuf>,
    /// The component, where the folder's name tells it.
    pub(super) component: Option<Component>,
    /// Whether the weights are averaged ones: files of the trained weights (`non_ema`) lie beside them.
    pub(super) averaged: bool,
}

impl Folder {
    /// Finds the weights of a pipeline, or of one component. `NotFound` where there are none; `InvalidArgument` where files
    /// of several versions lie in one folder and their names do not tell which to take.
    pub(super) fn find(path: &Path) -> Result<Folder> {
        let mut found = Folder { weights: Vec::new(), averaged: None, scheduler: BTreeMap::new() };
        for (name, component) in Component::FOLDERS {
            found.add(&path.join(name), Some(component))?;
        }
        for folder in AVERAGED.map(|name| path.join(name)) {
            if folder.is_dir()
                && let Some(versions) = Versions::find(&folder)?
            {
                found.averaged = Some(shards(&versions.main)?);
                break;
            }
        }
        if found.weights.is_empty() && found.averaged.is_none() {
            // Its name is that of a pipeline's folder where it was taken out of one.
            let name = path.file_name().and_then(|name| name.to_str());
            found.add(path, name.and_then(Component::of_folder))?;
        }
        if found.weights.is_empty() && found.averaged.is_none() {
            let message = format!("{} has no weights in safetensors files", path.display());
            return Err(Error::not_found(message)
                .with_file(path)
                .with_hint("give a folder with model_index.json, or the folder of one component"));
        }
        let config = path.join("scheduler/scheduler_config.json");
        if config.is_file() {
            found.scheduler = read_json(&config)?;
        }
        Ok(found)
    }

    /// Adds the weights of one component's folder, if there are any.
    fn add(&mut self, folder: &Path, component: Option<Component>) -> Result<()> {
        let versions = if folder.is_dir() { Versions::find(folder)? } else { None };
        let Some(Versions { main, averaged, is_averaged }) = versions else { return Ok(()) };
        self.weights.push(ComponentFiles { files: shards(&main)?, component, averaged: is_averaged });
        let denoiser = component.is_none_or(|component| component == Component::Denoiser);
        if let Some(averaged) = averaged.filter(|_| denoiser) {
            self.averaged = Some(shards(&averaged)?);
        }
        Ok(())
    }
}

/// The versions of one component's weights that lie in its folder: files or indices of shards.
struct Versions {
    /// What is taken: as diffusers does, the file without a variant in its name where there is one.
    main: PathBuf,
    /// The averaged weights, where a variant says so.
    averaged: Option<PathBuf>,
    /// Whether `main` is averaged itself.
    is_averaged: bool,
}

/// Variants that are the same weights in another precision, in the order of preference.
const PRECISIONS: [&str; 4] = ["", "fp32", "fp16", "bf16"];

impl Versions {
    /// `Unimplemented` where there are only pickles; `InvalidArgument` where the variants are ambiguous.
    fn find(folder: &Path) -> Result<Option<Versions>> {
        let failed = |error| Error::io("read", folder, &error);
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        names.sort_unstable();
        for stem in STEMS {
            // Variants to file names; an index comes before a single file.
            let mut variants: BTreeMap<&str, &String> = BTreeMap::new();
            for (name, variant) in names.iter().filter_map(|name| Some((name, variant(name, stem)?))) {
                let known = variants.entry(variant).or_insert(name);
                if name.ends_with(".json") {
                    *known = name;
                }
            }
            if !variants.is_empty() {
                return Self::choose(folder, &variants).map(Some);
            }
        }
        let loose: Vec<&String> = names.iter().filter(|name| name.ends_with(".safetensors")).collect();
        if let [name] = loose[..] {
            return Ok(Some(Versions { main: folder.join(name), averaged: None, is_averaged: false }));
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

    fn choose(folder: &Path, variants: &BTreeMap<&str, &String>) -> Result<Versions> {
        // `non_ema`, `ema` and others, by what is left of the variant: `fp16` of `fp16.non_ema`.
        let [mut trained, mut averaged, mut others] = [(); 3].map(|()| BTreeMap::<String, &String>::new());
        for (variant, name) in variants {
            let (ema, rest): (Vec<&str>, Vec<&str>) =
                variant.split('.').partition(|word| matches!(*word, "ema" | "non_ema"));
            let group = match ema[..] {
                [] => &mut others,
                ["ema"] => &mut averaged,
                _ => &mut trained,
            };
            group.insert(rest.join("."), name);
        }
        let pick = |group: &BTreeMap<String, &String>| {
            let same = PRECISIONS.iter().find_map(|precision| group.get(*precision));
            let only = group.values().next().filter(|_| group.len() == 1);
            same.or(only).map(|name| folder.join(name)).ok_or_else(|| {
                let names: Vec<&str> = group.values().map(|name| name.as_str()).collect();
                let message = format!(
                    "{} holds several versions of its weights, and their names do not tell which to take: {}",
                    folder.display(),
                    names.join(", ")
                );
                Error::invalid(message).with_file(folder).with_hint("give one of these files")
            })
        };
        let separate = if averaged.is_empty() { None } else { Some(pick(&averaged)?) };
        Ok(match (others.is_empty(), trained.is_empty()) {
            // diffusers calls the averaged weights by the plain name where it names the trained ones.
            (false, named) => Versions {
                main: pick(&others)?,
                is_averaged: !named && separate.is_none(),
                averaged: separate,
            },
            (true, false) => Versions { main: pick(&trained)?, averaged: separate, is_averaged: false },
            (true, true) => Versions { main: pick(&averaged)?, averaged: None, is_averaged: true },
        })
    }
}

/// The variant in the name of a weight file or index, empty where it has none: `fp16` in `model.fp16.safetensors`,
/// `model.safetensors.index.fp16.json` and, older, `model.fp16.safetensors.index.json`. `None` for other files and for
/// shards.
fn variant<'n>(name: &'n str, stem: &str) -> Option<&'n str> {
    let rest = name.strip_prefix(stem)?;
    let (before, after) = rest.split_once(".safetensors")?;
    let inside = match after {
        "" | ".index.json" => before,
        _ if before.is_empty() => after.strip_prefix(".index")?.strip_suffix(".json")?,
        _ => return None,
    };
    let plain = inside.is_empty() || inside.starts_with('.');
    (plain && !inside.contains("-of-")).then(|| inside.trim_start_matches('.'))
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
    fn variants_are_told_by_their_names() {
        for (name, expected) in [
            ("model.safetensors", Some("")),
            ("model.safetensors.index.json", Some("")),
            ("model.fp16.safetensors", Some("fp16")),
            ("model.fp16.safetensors.index.json", Some("fp16")),
            ("model.safetensors.index.fp16.json", Some("fp16")),
            ("model.fp16.non_ema.safetensors", Some("fp16.non_ema")),
            ("model-00001-of-00002.safetensors", None),
            ("model.fp16-00001-of-00002.safetensors", None),
            ("model_ema.safetensors", None),
            ("model.safetensors.bak", None),
            ("other.safetensors", None),
        ] {
            assert_eq!(variant(name, "model"), expected, "{name}");
        }
    }

    #[test]
    fn versions_are_chosen_by_variant() {
        const FULL: &str = "diffusion_pytorch_model.safetensors";
        let file = |variant: &str| format!("diffusion_pytorch_model.{variant}.safetensors");
        for (variants, main, averaged, is_averaged) in [
            (&[""][..], "", None, false),
            (&["", "fp16"], "", None, false),
            (&["bf16", "fp16"], "fp16", None, false),
            (&["pruned"], "pruned", None, false),
            // As in SD 1.5's repository: what diffusers loads are the averaged weights.
            (&["", "fp16", "non_ema"], "", None, true),
            (&["fp16", "non_ema"], "fp16", None, true),
            (&["non_ema"], "non_ema", None, false),
            (&["", "ema"], "", Some("ema"), false),
            (&["non_ema", "ema"], "non_ema", Some("ema"), false),
            (&["ema"], "ema", None, true),
            (&["fp16.non_ema", "non_ema", "fp16.ema"], "non_ema", Some("fp16.ema"), false),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let name = |variant: &str| if variant.is_empty() { FULL.to_string() } else { file(variant) };
            for variant in variants {
                fs::write(folder.path().join(name(variant)), "").unwrap();
            }
            let found = Versions::find(folder.path()).unwrap().unwrap();
            let expected = (folder.path().join(name(main)), averaged.map(|v| folder.path().join(name(v))));
            assert_eq!((found.main, found.averaged), expected, "{variants:?}");
            assert_eq!(found.is_averaged, is_averaged, "{variants:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        for variant in ["pruned", "v2", "fp8"] {
            fs::write(folder.path().join(file(variant)), "").unwrap();
        }
        let error = Versions::find(folder.path()).err().unwrap();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("pruned") && error.message.contains("v2"), "{error}");
    }

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

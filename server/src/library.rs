//! The files that requests may name: those in the server's folders, and the demo model's.

use crate::fault::Fault;
use sdrun::{
    Paths, did_you_mean,
    weights::{Checkpoint, Component, keys::Network},
};
use sdrun_diffusion::{demo, pipeline::Files};
use serde::Serialize;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};
use utoipa::ToSchema;

/// Where files are. A folder that does not exist has none.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// Checkpoints, diffusers folders and folders of ONNX models.
    pub models: Option<PathBuf>,
    /// Adapters.
    pub loras: Option<PathBuf>,
    /// Embeddings (textual inversion).
    pub embeddings: Option<PathBuf>,
    /// Autoencoders.
    pub vaes: Option<PathBuf>,
    /// Text encoders.
    pub text_encoders: Option<PathBuf>,
    /// ControlNets.
    pub control_nets: Option<PathBuf>,
    /// ESRGAN and Real-ESRGAN.
    pub upscalers: Option<PathBuf>,
    /// Wildcards: text files with a line for each choice.
    pub wildcards: Option<PathBuf>,
}

/// A file or a folder that requests may name.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct Entry {
    /// Its place in the folder, without the ending: `styles/ink`.
    pub(crate) name: String,
    /// Its place in the folder: `styles/ink.safetensors`.
    pub(crate) title: String,
    #[serde(skip)]
    pub(crate) path: PathBuf,
}

/// What the folders hold.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub(crate) struct Listing {
    pub(crate) models: Vec<Entry>,
    pub(crate) loras: Vec<Entry>,
    pub(crate) embeddings: Vec<Entry>,
    pub(crate) vaes: Vec<Entry>,
    pub(crate) text_encoders: Vec<Entry>,
    pub(crate) control_nets: Vec<Entry>,
    pub(crate) upscalers: Vec<Entry>,
}

/// The files that requests may name.
pub(crate) struct Library {
    pub(crate) folders: Folders,
    pub(crate) paths: Paths,
    listing: RwLock<Arc<Listing>>,
}

/// Endings of files of weights.
const ENDINGS: [&str; 7] = ["safetensors", "sft", "gguf", "ckpt", "pt", "pth", "bin"];
/// How deep folders may lie in each other.
const MOST_DEPTH: usize = 8;

impl Library {
    /// Reads the folders.
    ///
    /// # Errors
    /// Errors of writing the demo model's files, and of reading a folder that exists.
    pub(crate) fn open(folders: Folders, paths: Paths) -> sdrun::Result<Self> {
        let library = Library { folders, paths, listing: RwLock::default() };
        library.refresh()?;
        Ok(library)
    }

    /// Reads the folders again.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn refresh(&self) -> sdrun::Result<Arc<Listing>> {
        let Folders { models, loras, embeddings, vaes, text_encoders, control_nets, upscalers, .. } =
            &self.folders;
        let mut found = Listing {
            models: entries(models.as_deref(), true)?,
            loras: entries(loras.as_deref(), false)?,
            embeddings: entries(embeddings.as_deref(), false)?,
            vaes: entries(vaes.as_deref(), false)?,
            text_encoders: entries(text_encoders.as_deref(), false)?,
            control_nets: entries(control_nets.as_deref(), true)?,
            upscalers: entries(upscalers.as_deref(), false)?,
        };
        let demo = |name: &str| -> sdrun::Result<Option<Entry>> {
            let path = demo::find(name, &self.paths)?;
            Ok(path.map(|path| Entry { name: name.into(), title: name.into(), path }))
        };
        found.models.extend(demo(demo::NAME)?);
        found.control_nets.extend(demo("demo/canny")?);
        for (list, name) in [(&mut found.loras, "demo/outline"), (&mut found.embeddings, "demo/gem")] {
            if let Some(entry) = demo(name)? {
                let short = entry.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                list.push(Entry { name: short.clone(), title: short, ..entry });
            }
        }
        let found = Arc::new(found);
        *self.listing.write().unwrap_or_else(PoisonError::into_inner) = found.clone();
        Ok(found)
    }

    /// What the folders held when they were read last.
    pub(crate) fn listing(&self) -> Arc<Listing> {
        self.listing.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The model that requests without a name get: the first in the folder, or else the demo model.
    pub(crate) fn default_model(&self) -> String {
        self.listing().models.first().map_or(demo::NAME.into(), |entry| entry.title.clone())
    }

    /// A model by a name of [`find`].
    pub(crate) fn model(&self, name: &str) -> Result<Entry, Fault> {
        find(&self.listing().models, "model", name)
    }

    /// A ControlNet by a name of [`find`].
    pub(crate) fn control_net(&self, name: &str) -> Result<Entry, Fault> {
        find(&self.listing().control_nets, "ControlNet", name)
    }

    /// An adapter by a name of [`find`].
    pub(crate) fn lora(&self, name: &str) -> Result<Entry, Fault> {
        find(&self.listing().loras, "LoRA", name)
    }

    /// An upscaler by a name of [`find`], or A1111's name of one.
    pub(crate) fn upscaler(&self, name: &str) -> Result<Entry, Fault> {
        let name = match name {
            "R-ESRGAN 4x+" => "RealESRGAN_x4plus",
            "R-ESRGAN 4x+ Anime6B" => "RealESRGAN_x4plus_anime_6B",
            "R-ESRGAN 2x+" => "RealESRGAN_x2plus",
            name => name,
        };
        find(&self.listing().upscalers, "upscaler", name)
    }

    /// The files of a model with other parts: autoencoders and text encoders, recognised by their content.
    pub(crate) fn files(&self, model: &str, vae: Option<&str>, others: &[String]) -> Result<Files, Fault> {
        let mut files = Files { model: Some(self.model(model)?.path), ..Files::default() };
        if let Some(vae) = vae {
            files.autoencoder = Some(find(&self.listing().vaes, "autoencoder", vae)?.path);
        }
        for name in others {
            let listing = self.listing();
            let found = find(&listing.text_encoders, "text encoder", name);
            // Front ends name autoencoders and text encoders in one list.
            let entry = found.or_else(|fault| find(&listing.vaes, "autoencoder", name).map_err(|_| fault))?;
            let place = match component(&entry.path)? {
                Some((_, Network::Gemma2)) => &mut files.llm,
                Some((Component::Vae, _)) => &mut files.autoencoder,
                Some((Component::TextEncoder2, _)) => &mut files.clip_g,
                Some((Component::TextEncoder3, _)) => &mut files.t5,
                Some((Component::TextEncoder, _)) => &mut files.clip_l,
                _ => {
                    let message = format!("{} holds no autoencoder and no text encoder", entry.title);
                    return Err(Fault::invalid(message));
                }
            };
            *place = Some(entry.path);
        }
        Ok(files)
    }
}

/// The network in a file of one network, and its kind.
fn component(file: &Path) -> Result<Option<(Component, Network)>, Fault> {
    let checkpoint = Checkpoint::open(file).map_err(sdrun::Error::from)?;
    Ok(checkpoint.summary().components.first().map(|part| (part.component, part.network)))
}

/// Finds an entry by its title or name in any case, alone or followed by ` [hash]`, by the end of its name behind the folders if that
/// is unique, or by its path.
///
/// # Errors
/// 404 with the nearest name.
pub(crate) fn find(entries: &[Entry], what: &str, name: &str) -> Result<Entry, Fault> {
    let plain = match name.rsplit_once(" [") {
        Some((start, hash)) if hash.ends_with(']') => start,
        _ => name,
    };
    let wanted = plain.replace('\\', "/").to_lowercase();
    let is = |entry: &&Entry| [&entry.title, &entry.name].iter().any(|text| text.to_lowercase() == wanted);
    let last = |text: &str| text.rsplit('/').next().unwrap_or_default().to_lowercase();
    let ends = |entry: &&Entry| [last(&entry.title), last(&entry.name)].contains(&wanted);
    let at = |entry: &&Entry| entry.path == Path::new(plain);
    let exact = entries.iter().find(is).or_else(|| entries.iter().find(at));
    let alone = || {
        let mut found = entries.iter().filter(ends);
        found.next().filter(|_| found.next().is_none())
    };
    exact.or_else(alone).cloned().ok_or_else(|| {
        let near = did_you_mean(plain, entries.iter().map(|entry| entry.name.as_str()));
        Fault::not_found(format!("there is no {what} {plain:?}{near}"))
    })
}

/// The files of weights below a folder, sorted; with `whole`, folders of a model too.
fn entries(folder: Option<&Path>, whole: bool) -> sdrun::Result<Vec<Entry>> {
    let mut found = Vec::new();
    if let Some(folder) = folder.filter(|folder| folder.exists()) {
        collect(folder, "", whole, 0, &mut found)?;
    }
    found.sort_by_key(|entry| entry.name.to_lowercase());
    Ok(found)
}

fn collect(
    folder: &Path,
    prefix: &str,
    whole: bool,
    depth: usize,
    found: &mut Vec<Entry>,
) -> sdrun::Result<()> {
    let failed = |error: std::io::Error| sdrun::abi::Error::io("read", folder, &error);
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let title = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
        if path.is_dir() {
            if whole && is_model(&path) {
                found.push(Entry { name: title.clone(), title, path });
            } else if depth < MOST_DEPTH {
                collect(&path, &format!("{title}/"), whole, depth + 1, found)?;
            }
            continue;
        }
        let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
        if ending.is_some_and(|ending| ENDINGS.contains(&&*ending)) {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            found.push(Entry { name: format!("{prefix}{stem}"), title, path });
        }
    }
    Ok(())
}

/// Whether a folder is a model.
fn is_model(folder: &Path) -> bool {
    let files = ["model_index.json", "config.json", "unet/model.onnx", "transformer/model.onnx"];
    files.iter().any(|file| folder.join(file).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_any_usual_name_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let models = dir.path().join("models");
        for file in
            ["a/Dream.safetensors", "b/dream.gguf", "One.ckpt", "whole/model_index.json", "whole/unet/x.bin"]
        {
            let path = models.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::write(dir.path().join("secret.safetensors"), "").unwrap();
        let found = entries(Some(&models), true).unwrap();
        let names: Vec<&str> = found.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["a/Dream", "b/dream", "One", "whole"]);
        let title =
            |name: &str| find(&found, "model", name).map(|entry| entry.title).map_err(|fault| fault.message);
        for name in ["One", "one.ckpt", "ONE [0123456789]", models.join("One.ckpt").to_str().unwrap()] {
            assert_eq!(title(name), Ok("One.ckpt".into()), "{name}");
        }
        assert_eq!(title("a\\dream.safetensors"), Ok("a/Dream.safetensors".into()));
        assert_eq!(title("dream.gguf"), Ok("b/dream.gguf".into()));
        for name in ["dream", "../secret", "../secret.safetensors", "", "/etc/passwd", "whole/unet/x", "a"] {
            assert!(title(name).is_err(), "{name}");
        }
        let secret = dir.path().join("secret.safetensors");
        assert!(title(secret.to_str().unwrap()).unwrap_err().starts_with("there is no model"));
        assert!(title("wholl").unwrap_err().contains("did you mean"));
        assert_eq!(entries(Some(&dir.path().join("none")), true).unwrap(), []);
    }
}

//! The demo model: a small text-to-image model of coloured shapes that is part of the program, so that the first picture needs no
//! download. It has the form of Stable Diffusion 1; `tools/train` made it.

use crate::pipeline::Parts;
use sdrun::{
    Paths, Result,
    files::{Existing, write},
    private_dir,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Name of the model. [`FILES`] has the names of its adapters.
pub const NAME: &str = "demo";

/// The names that [`find`] knows, with their files in [`folder`] and a description.
pub const FILES: [(&str, &str, &str); 4] = [
    (NAME, "demo", "the model: shapes, colours, sizes, places, counts and relations, 64 x 64"),
    ("demo/outline", "outline.safetensors", "LoRA: only outlines"),
    ("demo/gem", "gem.safetensors", "embedding: the word `gem` means a large purple star on black"),
    ("demo/canny", "canny", "ControlNet: follows edges"),
];

macro_rules! contents {
    ($($name:literal,)*) => {
        [$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/demo-model/", $name)))),*]
    };
}

const CONTENTS: &[(&str, &[u8])] = &contents![
    "demo/model_index.json",
    "demo/scheduler/scheduler_config.json",
    "demo/text_encoder/config.json",
    "demo/text_encoder/model.safetensors",
    "demo/tokenizer/tokenizer.json",
    "demo/unet/config.json",
    "demo/unet/diffusion_pytorch_model.safetensors",
    "demo/vae/config.json",
    "demo/vae/diffusion_pytorch_model.safetensors",
    "outline.safetensors",
    "gem.safetensors",
    "canny/config.json",
    "canny/diffusion_pytorch_model.safetensors",
];

/// The path of the demo model or of one of its adapters; `None` for other names.
///
/// # Errors
/// Those of [`folder`].
pub fn find(name: &str, paths: &Paths) -> Result<Option<PathBuf>> {
    match FILES.iter().find(|(known, ..)| *known == name) {
        Some((_, file, _)) => Ok(Some(folder(paths)?.join(file))),
        None => Ok(None),
    }
}

/// The folder of the demo model and its adapters, in the cache. Writes what is missing or differs (10 MB).
///
/// # Errors
/// Errors of writing them.
pub fn folder(paths: &Paths) -> Result<PathBuf> {
    let folder = paths.cache.join("demo");
    for (name, content) in CONTENTS {
        let file = folder.join(name);
        if fs::read(&file).is_ok_and(|found| found == *content) {
            continue;
        }
        private_dir(file.parent().unwrap_or(&folder))?;
        write(&file, Existing::Ours, |out| out.write_all(content))?;
    }
    Ok(folder)
}

/// Whether a path is the demo model's.
pub fn is_model(path: &Path, paths: &Paths) -> bool {
    path == paths.cache.join("demo").join(NAME)
}

/// The words of a text that the demo model has not learnt. Its vocabulary has one token for each word that it knows; others become
/// letters.
pub fn unknown_words<'a>(text: &'a str, model: &Parts) -> Vec<&'a str> {
    let Some(Some(encoder)) = model.encoders.first() else { return Vec::new() };
    let is_learnt = |word: &str| model.words.iter().any(|known| known.name == word);
    let tokens = |word: &str| encoder.tokenizer.ids(word).map_or(0, |ids| ids.len());
    let words = text.split(|c: char| !c.is_alphabetic());
    words.filter(|word| tokens(word) > 1 && !is_learnt(word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_once_and_repaired() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::for_user(Some(dir.path()), Some(dir.path())).unwrap();
        assert_eq!(find("demo/unet", &paths).unwrap(), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "other names write nothing");
        for (name, ..) in FILES {
            let path = find(name, &paths).unwrap().unwrap();
            assert!(path.exists(), "{}", path.display());
        }
        let model = find(NAME, &paths).unwrap().unwrap();
        assert!(is_model(&model, &paths));
        let file = model.join("vae/config.json");
        let written = || fs::metadata(&file).unwrap().modified().unwrap();
        let first = written();
        folder(&paths).unwrap();
        assert_eq!(written(), first, "what is whole stays");
        fs::write(&file, "{}").unwrap();
        folder(&paths).unwrap();
        assert!(fs::read(&file).unwrap().len() > 2);
    }
}

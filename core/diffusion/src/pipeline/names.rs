//! Adapters and embeddings that prompts name.

use super::{Error, Result, Word};
use crate::prompt::{self, Tag};
use sdrun::abi;
use std::path::{Path, PathBuf};

/// An adapter that a prompt names, with its strengths in the denoiser and the text encoders.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// The file.
    pub file: PathBuf,
    /// Strength in the denoiser.
    pub strength: f32,
    /// Strength in the text encoders.
    pub text_encoder_strength: f32,
}

/// Takes tags such as `<lora:name:0.8>` out of a prompt, and finds their files in `folders`: the name is the file's without its
/// ending, in any case. Folders below them count too, and the first of several files with a name.
///
/// # Errors
/// `NotFound` for a tag whose file is not there, or without a folder. `Unimplemented` for tags of another kind.
pub fn tagged(prompt: &str, folders: &[PathBuf]) -> Result<(String, Vec<Named>)> {
    let (text, tags) = prompt::tags(prompt);
    let mut files = Vec::new();
    for folder in folders.iter().filter(|_| !tags.is_empty()) {
        files.extend(files_in(folder)?);
    }
    let find = |Tag { kind, name, weight, text_weight }: &Tag| -> Result<Named> {
        if !["lora", "lyco"].contains(&&**kind) {
            let message =
                format!("the prompt has <{kind}:{name}>, and sdrun knows only <lora:NAME:STRENGTH>");
            return Err(abi::Error::unsupported(message).into());
        }
        let found = files.iter().find(|file| stem(file).eq_ignore_ascii_case(name));
        let file = found.cloned().ok_or_else(|| {
            let place = if folders.is_empty() {
                "cannot be found: name the folder of adapters".into()
            } else {
                let near = files.iter().map(|file| stem(file)).collect::<Vec<_>>();
                let near = sdrun::did_you_mean(name, near.iter().map(String::as_str));
                let names = folders.iter().map(|folder| folder.display().to_string());
                format!("is not in {}{near}", names.collect::<Vec<_>>().join(" or "))
            };
            Error::from(abi::Error::new(
                abi::ErrorCode::NotFound,
                format!("the adapter {name:?} of the prompt {place}"),
            ))
        })?;
        Ok(Named { file, strength: *weight as f32, text_encoder_strength: *text_weight as f32 })
    };
    let found = tags.iter().map(find).collect::<Result<_>>()?;
    Ok((text, found))
}

/// The embeddings in `folder` whose names one of the prompts contains, in any case.
///
/// # Errors
/// Errors of reading the folder and the files.
pub fn words(prompts: &[&str], folder: &Path) -> Result<Vec<Word>> {
    let prompts: Vec<String> = prompts.iter().map(|prompt| prompt.to_lowercase()).collect();
    let is_named = |file: &&PathBuf| {
        let name = stem(file).to_lowercase();
        !name.is_empty() && prompts.iter().any(|prompt| prompt.contains(&name))
    };
    files_in(folder)?.iter().filter(is_named).map(|file| Word::open(file)).collect()
}

/// A file's name without its ending.
pub(super) fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// How deep folders may lie in each other.
const MOST_DEPTH: usize = 8;

/// The safetensors files below a folder, sorted.
fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![(folder.to_path_buf(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        let failed = |error: std::io::Error| abi::Error::io("read", &folder, &error);
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.is_dir() && depth < MOST_DEPTH {
                folders.push((path, depth + 1));
            } else if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("safetensors")) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::{Named, tagged, words};
    use std::fs;

    #[test]
    fn adapters_are_found_by_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("styles")).unwrap();
        let file = dir.path().join("styles/Ink Wash.safetensors");
        fs::write(&file, "").unwrap();
        let folders = [dir.path().to_path_buf()];
        let (text, found) = tagged("a cat <lora:ink wash:0.5:0.8>, sitting", &folders).unwrap();
        assert_eq!(text, "a cat , sitting");
        assert_eq!(found, [Named { file, strength: 0.8, text_encoder_strength: 0.5 }]);
        let missing = tagged("<lora:ink wosh:1>", &folders).unwrap_err().to_string();
        assert!(missing.contains("ink wosh") && missing.contains("Ink Wash"), "{missing}");
        assert!(tagged("<lora:x:1>", &[]).unwrap_err().to_string().contains("name the folder"));
        assert!(tagged("<hypernet:x:1>", &[]).unwrap_err().to_string().contains("hypernet"));
        assert_eq!(tagged("no tags", &[]).unwrap().1, []);
        assert!(words(&["a cat"], &dir.path().join("none")).is_err());
    }
}

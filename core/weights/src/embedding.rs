//! Textual inversion: words that a text encoder learned as vectors (Gal et al., 2022).
//!
//! | keys | from |
//! |---|---|
//! | `emb_params` | AUTOMATIC1111 and kohya, one encoder |
//! | `clip_l` and `clip_g`, `t5xxl` | kohya and diffusers, several encoders |
//! | `<word>` | diffusers |
//! | a single tensor of any name | others |
//!
//! Each tensor is `[width]` or `[vectors, width]`. If the key does not name the encoder, the width does. Pickled
//! files (`.pt`, with `string_to_param`) are refused like all pickles.

use crate::{Component, SafetensorsWeights, adapter};
use sdrun_abi::{Error, Result, WeightSource};
use std::path::Path;

/// A learned word, by text encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// The word: the key if it is a word in angle brackets, else the file's name without its extension.
    pub name: String,
    /// Its vectors for each text encoder, equally many for all.
    pub encoders: Vec<Vectors>,
}

/// The vectors of a word in one text encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Vectors {
    /// The encoder, if key or width tell it. T5's do not: it is the second encoder in Flux and the third in SD 3.
    pub encoder: Option<Component>,
    /// Length of a vector: 768 (CLIP-L), 1024 (OpenCLIP-H of SD 2), 1280 (CLIP-G), 4096 (T5-XXL).
    pub width: usize,
    /// `[vectors, width]`, row-major.
    pub values: Vec<f32>,
}

impl Vectors {
    /// The number of vectors.
    pub fn len(&self) -> usize {
        self.values.len() / self.width
    }

    /// Whether there are none; [`Embedding::open`] refuses that.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

impl Embedding {
    /// Opens a safetensors file.
    ///
    /// Errors: those of [`SafetensorsWeights::open`]; `InvalidArgument` if the file is not an embedding; `DataLoss`
    /// if a value is not finite; `Unimplemented` for types other than f32, f16, bf16 and f64.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let source = SafetensorsWeights::open(&[path])?;
        Self::read(&source, path).map_err(|error| error.with_file(path))
    }

    fn read(source: &SafetensorsWeights, path: &Path) -> Result<Self> {
        let keys = source.names();
        let mut name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let known = |key: &&str| label(key).is_some();
        let tensors: Vec<&str> = match keys.iter().copied().filter(known).collect::<Vec<_>>() {
            // The other tensors of such a file are the trainer's state.
            labelled if !labelled.is_empty() => labelled,
            _ if keys.len() == 1 => keys,
            _ => {
                let error = Error::invalid(format!(
                    "{} is no embedding: it has {} tensors, and none is called emb_params, clip_l or clip_g",
                    path.display(),
                    keys.len()
                ));
                return Err(error.with_hint("checkpoints and adapters are given in their own way"));
            }
        };
        if let [word] = &*tensors
            && word.starts_with('<')
            && word.ends_with('>')
        {
            name = (*word).to_owned();
        }
        adapter::check_finite(source)?;
        let encoders = tensors.into_iter().map(|key| vectors(source, key)).collect::<Result<Vec<_>>>()?;
        let counts: Vec<usize> = encoders.iter().map(Vectors::len).collect();
        if counts.iter().any(|count| *count != counts[0]) {
            let path = path.display();
            return Err(Error::invalid(format!("{path} has different numbers of vectors, {counts:?}")));
        }
        Ok(Embedding { name, encoders })
    }

    /// The words that stand for its vectors in a prompt: `word`, `word_1`, `word_2`, and so on. Each takes one token of
    /// the encoder's window.
    pub fn tokens(&self) -> Vec<String> {
        let count = self.encoders.first().map_or(0, Vectors::len);
        (0..count).map(|i| if i == 0 { self.name.clone() } else { format!("{}_{i}", self.name) }).collect()
    }

    /// The vectors for an encoder whose vectors have this width; `None` if there are none for that encoder.
    /// `InvalidArgument` if it has some of another width.
    pub fn for_encoder(&self, encoder: Component, width: usize) -> Result<Option<&Vectors>> {
        let is_its = |vectors: &&Vectors| vectors.encoder.is_none_or(|of| of == encoder);
        if let Some(found) = self.encoders.iter().filter(is_its).find(|vectors| vectors.width == width) {
            return Ok(Some(found));
        }
        match self.encoders.iter().find(|vectors| vectors.encoder == Some(encoder)) {
            None => Ok(None),
            Some(other) => {
                let (name, had) = (&self.name, other.width);
                let message =
                    format!("embedding {name:?} has vectors of {had} values, but {encoder} has {width}");
                Err(Error::invalid(message).with_hint("it was made for another model"))
            }
        }
    }
}

/// The encoder that a key names: `Some(None)` where only the width tells it.
fn label(key: &str) -> Option<Option<Component>> {
    match key {
        "clip_l" => Some(Some(Component::TextEncoder)),
        "clip_g" => Some(Some(Component::TextEncoder2)),
        "emb_params" | "t5xxl" | "t5" | "string_to_param.*" => Some(None),
        _ => None,
    }
}

fn vectors(source: &SafetensorsWeights, key: &str) -> Result<Vectors> {
    let (_, shape) = source.describe(key)?;
    let width = match *shape {
        [width] | [_, width] if !shape.contains(&0) => width,
        _ => {
            let message = format!("{key:?} has shape {shape:?}, which is not [width] or [vectors, width]");
            return Err(Error::invalid(message).with_hint("it is no embedding"));
        }
    };
    let by_width = match width {
        768 | 1024 => Some(Component::TextEncoder),
        1280 => Some(Component::TextEncoder2),
        _ => None,
    };
    let encoder = label(key).flatten().or(by_width);
    Ok(Vectors { encoder, width, values: adapter::values(source, key)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use sdrun_abi::ErrorCode;

    /// Tensors of f16, counting up.
    fn open(name: &str, tensors: &[(&str, &[usize])]) -> Result<Embedding> {
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        for (key, shape) in tensors {
            let start = data.len();
            let count = shape.iter().product::<usize>();
            data.extend((0..count).flat_map(|i| f16::from_f32((i % 100) as f32).to_le_bytes()));
            entries.push(format!(
                r#""{key}":{{"dtype":"F16","shape":{shape:?},"data_offsets":[{start},{}]}}"#,
                data.len()
            ));
        }
        let header = format!("{{{}}}", entries.join(","));
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Embedding::open(path)
    }

    #[test]
    fn every_form_is_read() {
        use Component::{TextEncoder, TextEncoder2};
        type Form<'a> = (&'a [(&'a str, &'a [usize])], &'a str, &'a [(Option<Component>, usize, usize)]);
        let forms: &[Form] = &[
            (&[("emb_params", &[3, 768])], "cat", &[(Some(TextEncoder), 768, 3)]),
            (&[("emb_params", &[1, 1024])], "cat", &[(Some(TextEncoder), 1024, 1)]),
            (&[("emb_params", &[2, 1280]), ("step", &[1])], "cat", &[(Some(TextEncoder2), 1280, 2)]),
            (&[("<fluffy>", &[768])], "<fluffy>", &[(Some(TextEncoder), 768, 1)]),
            (&[("anything", &[2, 32])], "cat", &[(None, 32, 2)]),
            (
                &[("clip_l", &[2, 768]), ("clip_g", &[2, 1280])],
                "cat",
                &[(Some(TextEncoder2), 1280, 2), (Some(TextEncoder), 768, 2)],
            ),
            (
                &[("clip_l", &[2, 768]), ("t5", &[2, 4096])],
                "cat",
                &[(Some(TextEncoder), 768, 2), (None, 4096, 2)],
            ),
        ];
        for (tensors, name, expected) in forms {
            let embedding = open("cat.safetensors", tensors).unwrap();
            let found: Vec<_> = embedding.encoders.iter().map(|v| (v.encoder, v.width, v.len())).collect();
            assert_eq!((&*embedding.name, &*found), (*name, *expected), "{tensors:?}");
            assert!(embedding.encoders.iter().all(|v| !v.is_empty() && v.values[..3] == [0.0, 1.0, 2.0]));
        }
        let three = open("cat.safetensors", &[("emb_params", &[3, 768])]).unwrap();
        assert_eq!(three.tokens(), ["cat", "cat_1", "cat_2"]);
    }

    #[test]
    fn an_encoder_gets_its_own() {
        use Component::*;
        let both = open("cat.safetensors", &[("clip_l", &[1, 768]), ("clip_g", &[1, 1280])]).unwrap();
        assert_eq!(both.for_encoder(TextEncoder, 768).unwrap().unwrap().width, 768);
        assert_eq!(both.for_encoder(TextEncoder2, 1280).unwrap().unwrap().width, 1280);
        let error = both.for_encoder(TextEncoder, 1024).unwrap_err();
        assert!(error.message.contains("has vectors of 768 values, but text_encoder has 1024"), "{error}");
        let small = open("cat.safetensors", &[("emb_params", &[1, 32])]).unwrap();
        assert!(small.for_encoder(TextEncoder2, 32).unwrap().is_some());
        let one = open("cat.safetensors", &[("emb_params", &[1, 768])]).unwrap();
        assert_eq!(one.for_encoder(TextEncoder2, 1280).unwrap(), None);
        let t5 = open("cat.safetensors", &[("t5xxl", &[1, 4096])]).unwrap();
        assert!(t5.for_encoder(TextEncoder3, 4096).unwrap().is_some());
        assert_eq!(t5.for_encoder(TextEncoder, 768).unwrap(), None);
    }

    #[test]
    fn what_is_no_embedding_is_refused() {
        for (tensors, words) in [
            (&[("a", &[1, 768][..]), ("b", &[1, 768])][..], "is no embedding: it has 2 tensors"),
            (&[], "is no embedding: it has 0 tensors"),
            (&[("emb_params", &[1, 2, 768])], "not [width] or [vectors, width]"),
            (&[("emb_params", &[0, 768])], "not [width] or [vectors, width]"),
            (&[("emb_params", &[])], "not [width] or [vectors, width]"),
            (&[("clip_l", &[2, 768]), ("clip_g", &[1, 1280])], "different numbers of vectors"),
        ] {
            let error = open("cat.safetensors", tensors).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert!(error.message.contains(words), "{error}");
        }
        let error = open("cat.pt", &[("emb_params", &[1, 768])]).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unimplemented);
        assert!(error.hint.unwrap().to_string().contains("safetensors"));
    }
}

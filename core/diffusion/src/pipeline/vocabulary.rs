//! Where tokenizers come from.

use super::Result;
use crate::{
    family::{Encoder, Vocabulary},
    text::tokenizer::{Piece, Tokenizer, TokenizerError, Unigram},
};
use sdrun::{
    abi::{Error as AbiError, ErrorCode},
    files::{Links, read_small},
    weights::{Checkpoint, checkpoint::Vocabulary as Inside},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The largest tokenizer file to read, in bytes. T5's `tokenizer.json` has 2.4 MB.
const MOST: u64 = 64 << 20;

/// Finds tokenizers, and makes each only once.
#[derive(Default)]
pub(super) struct Tokenizers {
    clip: Option<Arc<Tokenizer>>,
}

impl Tokenizers {
    /// The tokenizer of `encoder`. A file in a model's folder counts more than the vocabulary of CLIP, which is built in. T5's comes
    /// from `given`, or from the files of weights in `places`, or from a file near them. Gemma's are not read from weights.
    pub(super) fn of(
        &mut self,
        encoder: &Encoder,
        folder: Option<&Path>,
        given: Option<&Path>,
        places: &[PathBuf],
    ) -> Result<Arc<Tokenizer>> {
        let own = folder.and_then(|folder| in_folder(&folder.join(tokenizer_folder(encoder.component))));
        match encoder.vocabulary {
            Vocabulary::Clip | Vocabulary::OpenClip => match own {
                Some(file) => read(&file),
                None => self.clip(),
            },
            Vocabulary::Gemma => {
                let near = || places.iter().find_map(|place| in_folder(place.parent()?));
                let file = given.map(Path::to_path_buf).or(own).or_else(near);
                read(&file.ok_or_else(|| {
                    AbiError::new(
                        ErrorCode::NotFound,
                        "Gemma needs its vocabulary, and there is none near its weights: give the file tokenizer.json of \
                         Gemma 2 (google/gemma-2-2b-it on Hugging Face), or put it beside the weights",
                    )
                })?)
            }
            Vocabulary::T5 => {
                if let Some(file) = given.map(Path::to_path_buf).or(own) {
                    return read(&file);
                }
                for place in places {
                    if let Some(found) = inside(place)? {
                        return Ok(Arc::new(found));
                    }
                }
                match places.iter().find_map(|place| in_folder(place.parent()?)) {
                    Some(file) => read(&file),
                    None => Err(AbiError::new(
                        ErrorCode::NotFound,
                        "T5 needs its vocabulary, and there is none in its weights or near them: give the file \
                         spiece.model or tokenizer.json of T5 v1.1 (google/t5-v1_1-xxl on Hugging Face), or put it \
                         beside the weights",
                    )
                    .into()),
                }
            }
        }
    }

    fn clip(&mut self) -> Result<Arc<Tokenizer>> {
        match &self.clip {
            Some(clip) => Ok(clip.clone()),
            None => Ok(self.clip.insert(Arc::new(Tokenizer::clip()?)).clone()),
        }
    }
}

/// The folder beside `text_encoder_2` in which diffusers keeps its tokenizer.
fn tokenizer_folder(component: &str) -> String {
    component.replace("text_encoder", "tokenizer")
}

/// The tokenizer file of a folder.
fn in_folder(folder: &Path) -> Option<PathBuf> {
    ["tokenizer.json", "spiece.model"].iter().map(|name| folder.join(name)).find(|file| file.is_file())
}

/// The vocabulary that a file of weights holds.
fn inside(file: &Path) -> Result<Option<Tokenizer>> {
    let made = match Checkpoint::open(file)?.vocabulary()? {
        None => return Ok(None),
        Some(Inside::SentencePiece(content)) => Tokenizer::sentence_piece(&content),
        Some(Inside::Json(content)) => Tokenizer::json(&content),
        Some(Inside::Pieces { texts, scores, kinds, charsmap, space_prefix, collapse_spaces }) => {
            Piece::list(texts, &scores, &kinds).and_then(|pieces| {
                Tokenizer::unigram(Unigram { pieces, charsmap, space_prefix, collapse_spaces })
            })
        }
    };
    let error = |error: TokenizerError| AbiError::invalid(error.to_string()).with_file(file);
    Ok(Some(made.map_err(error)?))
}

fn read(file: &Path) -> Result<Arc<Tokenizer>> {
    let content = read_small(file, Links::Follow, MOST)?;
    let made = match file.extension().is_some_and(|ending| ending == "json") {
        true => Tokenizer::json(&content),
        false => Tokenizer::sentence_piece(&content),
    };
    made.map(Arc::new).map_err(|error| AbiError::invalid(error.to_string()).with_file(file).into())
}

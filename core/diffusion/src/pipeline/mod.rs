//! From a prompt to pictures: runs the networks of a model family on engines.
//!
//! [`Parts`] says where graphs and weights come from, [`Request`] what to draw. [`generate`] encodes the prompts, denoises and
//! decodes. A network is loaded when it is needed, and dropped as soon as it no longer is, or [`Kept`] for later requests. Each picture
//! has its own stream of noise, so neither the number of pictures nor the provider changes it.

mod artist;
mod autoencoder;
mod beside;
mod checkpoint;
mod control;
mod denoiser;
mod divided;
mod draw;
mod encoder;
mod fed;
mod hires;
mod inputs;
mod kept;
pub mod named;
mod names;
mod network;
mod parts;
mod plan;
mod progress;
mod prompts;
mod recipe;
mod reference;
mod request;
mod seen;
mod source;
mod start;
mod upscale;
mod vocabulary;
mod wanted;
mod warnings;
mod wildcards;
mod words;

pub use artist::{Artist, Finished, Lane, Told};
pub use control::Control;
pub use draw::generate;
pub use hires::{Hires, Upscale};
pub use kept::Kept;
pub use names::{Named, tagged, words};
pub use network::Engines;
pub use parts::{Files, Part, Parts, TextEncoder};
pub use plan::{Phase, Plan, Planned, plan};
pub use progress::Progress;
pub use prompts::{Group, groups};
pub use recipe::{Opened, Recipe, Recording};
pub use request::{Request, Resolved};
pub use start::{Content, Inpaint, Start};
pub use upscale::{Upscaler, upscale};
pub use wanted::{HintPicture, Second, Size, Wanted};
pub use warnings::warnings;
pub use wildcards::{Wildcards, prompts_of};
pub use words::{Syntax, Word};

use crate::{
    family::Family,
    latent::SizeError,
    metadata,
    noise::Variation,
    picture::{PictureError, TileError},
    prompt::Endless,
    reuse::ReuseError,
    text::{chunks::ChunkError, condition::ConditionError, encode::EncodeError, tokenizer::TokenizerError},
};
use image::RgbImage;
use sdrun::abi::{self, Precision};
use serde::Serialize;
use std::path::PathBuf;

/// Why no picture was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A network cannot be opened, built or run.
    #[error("{part}: {error}")]
    Network {
        /// The network's name, as in a diffusers folder.
        part: String,
        /// Why.
        error: Box<sdrun::Error>,
    },
    /// No file holds a network that the model needs.
    #[error("{} needs {component}, and {}", family.title, match file {
        Some(file) => format!("{} does not hold it", file.display()),
        None => "no file was given for it".into(),
    })]
    Missing {
        /// The network's name, as in a diffusers folder.
        component: String,
        /// The family.
        family: &'static Family,
        /// The checkpoint, if there is one.
        file: Option<PathBuf>,
    },
    /// The request and the model do not fit.
    #[error(transparent)]
    Core(#[from] sdrun::Error),
    /// The model cannot have this size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The prompt cannot be divided into tokens.
    #[error(transparent)]
    Prompt(#[from] ChunkError),
    /// A prompt's choices have no end.
    #[error(transparent)]
    Choices(#[from] Endless),
    /// The tokenizer cannot be made.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A picture or a mask does not fit.
    #[error(transparent)]
    Picture(#[from] PictureError),
    /// A network returned something else for a tile than expected.
    #[error(transparent)]
    Tile(#[from] TileError),
    /// The settings for skipping the network make no sense.
    #[error(transparent)]
    Reuse(#[from] ReuseError),
    /// The text encoders' states do not fit the model.
    #[error(transparent)]
    Condition(#[from] ConditionError),
}

/// Result of the pipeline.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Errors of the network `part`.
    fn of(part: &str) -> impl Fn(sdrun::Error) -> Self + '_ {
        move |error| Error::Network { part: part.into(), error: Box::new(error) }
    }

    fn invalid(message: impl Into<String>) -> Self {
        abi::Error::invalid(message).into()
    }

    /// The library's error, if it is one.
    pub fn core(&self) -> Option<&sdrun::Error> {
        match self {
            Error::Network { error, .. } => Some(error),
            Error::Core(error) => Some(error),
            _ => None,
        }
    }

    /// What kind of failure it is.
    pub fn code(&self) -> abi::ErrorCode {
        match self {
            Error::Missing { .. } => abi::ErrorCode::NotFound,
            _ => self.core().map_or(abi::ErrorCode::InvalidArgument, sdrun::Error::code),
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<abi::Hint> {
        self.core().and_then(sdrun::Error::hint)
    }
}

impl From<abi::Error> for Error {
    fn from(error: abi::Error) -> Self {
        Error::Core(error.into())
    }
}

impl From<EncodeError<Error>> for Error {
    fn from(error: EncodeError<Error>) -> Self {
        match error {
            EncodeError::Engine(error) => error,
            shape => Error::invalid(shape.to_string()),
        }
    }
}

/// Where a loaded network came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Its engine was built now.
    Built,
    /// Its engine was in the cache.
    Cached,
    /// An earlier request left it ([`Kept`]), and it got other weights.
    Refitted,
    /// An earlier request left it with the same weights.
    Kept,
}

/// A network that was loaded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadedNetwork {
    /// Its name in a diffusers folder.
    pub part: String,
    /// Id of the provider that runs it.
    pub provider: String,
    /// Name of the device.
    pub device: String,
    /// Precision of the engine.
    pub precision: Precision,
    /// Where it came from.
    pub origin: Origin,
    /// How long it took.
    pub seconds: f64,
}

impl LoadedNetwork {
    /// What a picture's metadata say about it.
    pub fn record(&self) -> metadata::Network {
        metadata::Network {
            part: self.part.clone(),
            provider: self.provider.clone(),
            device: self.device.clone(),
            precision: self.precision.to_string(),
        }
    }
}

/// A picture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Picture {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// `[height, width, 3]`: red, green, blue.
    pub bytes: Vec<u8>,
    /// Its seed.
    pub seed: u64,
    /// Its share of another seed's noise.
    pub variation: Option<Variation>,
}

impl Picture {
    /// The picture as a type of the crate `image`, which can save it.
    pub fn into_rgb(self) -> RgbImage {
        RgbImage::from_raw(self.width as u32, self.height as u32, self.bytes).unwrap_or_default()
    }
}

/// Progress, for progress bars, previews and tests.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Prompts are divided into tokens.
    Prompt {
        /// The text encoder's name, as in a diffusers folder.
        part: &'a str,
        /// Tokens of the longest text.
        tokens: usize,
        /// Tokens that the model will not see.
        lost: usize,
    },
    /// A network is about to be built or loaded.
    Loading {
        /// The network's name, as in a diffusers folder.
        part: &'a str,
    },
    /// A network is loaded.
    Loaded(&'a LoadedNetwork),
    /// A network returned values that are not finite, and runs again in fp32.
    Widened {
        /// The network's name, as in a diffusers folder.
        part: &'a str,
        /// The precision it ran in.
        from: Precision,
    },
    /// A network works on tiles instead of the whole picture.
    Tiled {
        /// The network's name, as in a diffusers folder.
        part: &'a str,
        /// How many tiles.
        tiles: usize,
        /// Whether the user requested tiles. Otherwise the whole picture does not fit into memory.
        asked: bool,
    },
    /// A step is done.
    Step {
        /// Number of the picture, from 0.
        picture: usize,
        /// Number of the pass, from 0.
        pass: usize,
        /// Number of the step, from 0.
        step: usize,
        /// Steps of the pass.
        steps: usize,
        /// Channels, height and width of the latents.
        shape: [usize; 3],
        /// The latents.
        latents: &'a [f32],
        /// The sampler's last estimate of the final latents.
        clean: &'a [f32],
        /// Seconds of this step in which networks ran. The rest is the pipeline's own.
        running: f64,
    },
    /// The steps of a picture are done, and its latents become pixels.
    Decoding {
        /// Number of the picture, from 0.
        picture: usize,
    },
    /// A tile is enlarged.
    Tile {
        /// Number of the picture, from 0.
        picture: usize,
        /// Number of the tile, from 0.
        tile: usize,
        /// Tiles of the picture, over all repeats.
        tiles: usize,
    },
    /// A picture is done.
    Picture(Picture),
}

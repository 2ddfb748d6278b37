//! From a prompt to pictures: runs the networks of a model family on engines.
//!
//! [`Parts`] says where graphs and weights come from, [`Request`] what to draw. [`generate`] encodes the prompts, denoises and
//! decodes. A network is loaded when it is needed and dropped as soon as it no longer is. Each picture has its own stream of noise,
//! so neither the number of pictures nor the provider changes it.

mod denoiser;
mod encoder;
mod network;
mod parts;
mod request;

pub use network::Engines;
pub use parts::{Part, Parts};
pub use request::{Request, Resolved};

use crate::{
    latent::{self, Rounding, SizeError},
    noise::{BrownianTree, TorchCpu},
    prediction::noised,
    program::Program,
    sampler::{Noise, Path},
    text::{chunks::ChunkError, condition::ConditionError, encode::EncodeError, tokenizer::TokenizerError},
};
use denoiser::Guided;
use network::Network;
use sdrun::{Registry, Shapes, abi};

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
    /// The request and the model do not fit.
    #[error(transparent)]
    Core(#[from] sdrun::Error),
    /// The model cannot have this size.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The prompt cannot be divided into tokens.
    #[error(transparent)]
    Prompt(#[from] ChunkError),
    /// The tokenizer cannot be made.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
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
        self.core().map_or(abi::ErrorCode::InvalidArgument, sdrun::Error::code)
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

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// `[height, width, 3]`: red, green, blue.
    pub bytes: Vec<u8>,
    /// Its seed.
    pub seed: u64,
}

/// Progress, for progress bars, previews and tests.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A network is loaded.
    Loaded {
        /// The network's name, as in a diffusers folder.
        part: &'a str,
        /// The provider that runs it.
        provider: &'a str,
        /// The name of its device.
        device: &'a str,
        /// Whether the engine was built now rather than taken from the cache.
        built: bool,
        /// How long it took.
        seconds: f64,
    },
    /// A step is done.
    Step {
        /// Number of the picture, from 0.
        picture: usize,
        /// Number of the step, from 0.
        step: usize,
        /// Steps of a picture.
        steps: usize,
        /// The latents, `[channels, height, width]`.
        latents: &'a [f32],
    },
    /// A picture is done.
    Picture(Picture),
}

/// Draws the pictures of a request. `event` receives progress, and each picture as soon as it is done. `host` receives logs and can
/// cancel.
///
/// # Errors
/// The first error. `event` has received the pictures that were done before it.
pub fn generate(
    registry: &Registry,
    parts: &Parts,
    request: &Resolved,
    engines: &Engines,
    host: &dyn abi::Host,
    event: &mut dyn FnMut(Event<'_>),
) -> Result<()> {
    let family = parts.family;
    let shape = family.latent.shape(request.width, request.height)?;
    let open = network::Opener { registry, engines, host };
    let conditions = encoder::conditions(&open, parts, request, event)?;

    let tokens = shape[1] * shape[2] / (family.pack * family.pack);
    let levels = family.noise.levels(tokens);
    let sigmas = request.sigmas(&levels, tokens);
    let steps = sigmas.len().saturating_sub(1);
    let path = Path { sigmas: &sigmas, levels: &levels };
    let first = sigmas.first().copied().unwrap_or_default();
    let len = shape.iter().product();

    let network = denoiser::open(&open, &parts.denoiser, &conditions, shape, event)?;
    let mut denoiser = Some(Guided::new(network, &conditions, request, &levels, &sigmas, host));
    let mut decoder = None;
    for picture in 0..request.count {
        let Some(mut guided) = denoiser.take() else { break };
        let seed = request.seed.wrapping_add(picture as u64);
        let mut stream = TorchCpu::new(seed);
        let mut noise = vec![0.0; len];
        stream.randn(&mut noise);
        let full = request.starts_full(&levels, first);
        let mut x = noised(levels.space(), first, full, &vec![0.0; len], &noise);
        let mut source = Source::new(request, stream, seed, (levels.min(), levels.max()), len);
        let mut observe = |step: usize, latents: &[f32]| event(Event::Step { picture, step, steps, latents });
        request.sampler.run(&path, &request.options, &mut x, &mut guided, &mut source, &mut observe)?;
        if picture + 1 < request.count {
            denoiser = Some(guided);
        } else {
            // Frees its memory for the decoder.
            drop(guided);
        }
        cancelled(host)?;
        let decoder = match &mut decoder {
            Some(decoder) => decoder,
            none => none.insert(open_decoder(&open, &parts.vae_decoder, shape, event)?),
        };
        family.latent.decoded(&mut x);
        let values = decoder.run_one(&[("latent_sample", &x)], host)?;
        event(Event::Picture(finished(&values, request, seed)?));
    }
    Ok(())
}

/// A picture of the decoder's values.
fn finished(values: &[f32], request: &Resolved, seed: u64) -> Result<Picture> {
    let (width, height) = (request.width, request.height);
    if values.len() != 3 * width * height {
        return Err(Error::invalid(format!(
            "the autoencoder returned {} numbers for a picture of {width} x {height}, which has {}",
            values.len(),
            3 * width * height
        )));
    }
    let rounding = match request.options.program {
        Program::Diffusers => Rounding::Nearest,
        Program::A1111 | Program::ComfyUi => Rounding::Down,
    };
    Ok(Picture { width, height, bytes: latent::to_bytes(values, rounding), seed })
}

fn open_decoder(
    open: &network::Opener<'_>,
    part: &Part,
    [channels, height, width]: [usize; 3],
    event: &mut dyn FnMut(Event<'_>),
) -> Result<Network> {
    open.network(part, Shapes::from([("latent_sample".into(), vec![1, channels, height, width])]), event)
}

/// Fails if the user has cancelled.
fn cancelled(host: &dyn abi::Host) -> Result<()> {
    if host.cancelled() {
        return Err(abi::Error::new(abi::ErrorCode::Cancelled, "cancelled by the user").into());
    }
    Ok(())
}

/// The noise of a sampler's steps.
enum Source {
    /// Continues the stream of the start noise.
    Stream(TorchCpu),
    /// For samplers that A1111 and ComfyUI give Brownian noise.
    Brownian(BrownianTree),
}

impl Source {
    fn new(request: &Resolved, stream: TorchCpu, seed: u64, (min, max): (f64, f64), len: usize) -> Self {
        match request.sampler.is_brownian() {
            true => Source::Brownian(BrownianTree::new(seed, min, max, len)),
            false => Source::Stream(stream),
        }
    }
}

impl Noise for Source {
    fn fill(&mut self, from: f64, to: f64, out: &mut [f32]) {
        match self {
            Source::Stream(stream) => stream.randn(out),
            Source::Brownian(tree) => tree.noise(from, to, out),
        }
    }
}

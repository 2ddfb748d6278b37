//! Between pictures and latents.

use super::{
    Error, Event, Result,
    network::{Network, Opener},
    parts::{Part, Parts},
};
use crate::picture::{Layout, Tiles};
use sdrun::{Shapes, abi::ErrorCode};

/// The distribution of a picture's latents, before the family's scale and shift.
pub(super) struct Encoded {
    /// Means, `[channels, height, width]`.
    mean: Vec<f32>,
    deviation: Vec<f32>,
}

impl Encoded {
    /// Latents with unit-variance noise `sample`, or the means.
    pub(super) fn drawn(&self, sample: Option<&[f32]>) -> Vec<f32> {
        match sample {
            Some(sample) => {
                let pairs = self.mean.iter().zip(&self.deviation).zip(sample);
                pairs.map(|((mean, deviation), noise)| mean + deviation * noise).collect()
            }
            None => self.mean.clone(),
        }
    }
}

/// The autoencoder's encoder, for pictures of one size. The first picture loads it.
pub(super) struct Encoder<'a> {
    open: &'a Opener<'a>,
    parts: &'a Parts,
    /// Latents of a picture, `[channels, height, width]`.
    shape: [usize; 3],
    map: Option<Map<'a>>,
}

impl<'a> Encoder<'a> {
    /// An encoder for pictures of `[width, height]`.
    pub(super) fn new(open: &'a Opener<'a>, parts: &'a Parts, [width, height]: [usize; 2]) -> Self {
        Encoder { open, parts, shape: parts.family.latent.shape(width, height), map: None }
    }

    fn load(&self) -> Result<Map<'a>> {
        let picture = Layout { channels: 3, scale: self.parts.family.latent.factor };
        let [_, rows, columns] = self.shape;
        Map::open(self.open, self.parts.encoder()?, "sample", (picture, 1), [rows, columns])
    }

    /// Encodes a picture `[3, height, width]` with values from -1 to 1.
    pub(super) fn encode(&mut self, picture: &[f32]) -> Result<Encoded> {
        let mut map = self.map.take().map_or_else(|| self.load(), Ok)?;
        let mut mean = map.run(picture)?;
        self.map = Some(map);
        let len: usize = self.shape.iter().product();
        if mean.len() != len && mean.len() != 2 * len {
            let message = format!("the autoencoder returned {} numbers for {len} latents", mean.len());
            return Err(Error::invalid(message));
        }
        // Logarithms of variances, limited as in diffusers. A tiny autoencoder has none.
        let variance = mean.split_off(len);
        let mut deviation: Vec<f32> =
            variance.iter().map(|log| (0.5 * log.clamp(-30.0, 20.0)).exp()).collect();
        deviation.resize(len, 0.0);
        Ok(Encoded { mean, deviation })
    }
}

/// The autoencoder's decoder, for latents of one size.
pub(super) struct Decoder<'a> {
    map: Map<'a>,
    len: usize,
    parts: &'a Parts,
}

impl<'a> Decoder<'a> {
    /// Loads it for latents of a shape.
    pub(super) fn open(open: &'a Opener<'a>, parts: &'a Parts, shape: [usize; 3]) -> Result<Self> {
        let [channels, height, width] = shape;
        let factor = parts.family.latent.factor;
        let latents = Layout { channels, scale: 1 };
        let map = Map::open(open, &parts.vae_decoder, "latent_sample", (latents, factor), [height, width])?;
        Ok(Decoder { map, len: 3 * height * width * factor * factor, parts })
    }

    /// Decodes the denoiser's latents to a picture `[3, height, width]` with values from about -1 to 1.
    pub(super) fn decode(&mut self, latents: &[f32]) -> Result<Vec<f32>> {
        let mut latents = latents.to_vec();
        self.parts.family.latent.decoded(&mut latents);
        let values = self.map.run(&latents)?;
        if values.len() != self.len {
            let message =
                format!("the autoencoder returned {} numbers for a picture of {}", values.len(), self.len);
            return Err(Error::invalid(message));
        }
        Ok(values)
    }
}

/// A network between pictures and latents, on the whole or on tiles.
struct Map<'a> {
    network: Network<'a>,
    input: &'static str,
    from: Layout,
    to: Layout,
    tiles: Tiles,
}

/// Sides of tiles in pixels, unless the user names another size.
const TILE: usize = 512;

/// How much of a tile its neighbours share, at least.
const OVERLAP: f64 = 0.25;

impl<'a> Map<'a> {
    /// Loads it for `size` latents (height, width). `from` is the layout of its input, and `to` the scale of its output.
    fn open(
        open: &'a Opener<'a>,
        part: &'a Part,
        input: &'static str,
        (from, to): (Layout, usize),
        size: [usize; 2],
    ) -> Result<Self> {
        let load = |tile: [usize; 2]| {
            let [height, width] = tile.map(|side| side * from.scale);
            open.network(part, Shapes::from([(input.into(), vec![1, from.channels, height, width])]))
        };
        let factor = from.scale.max(to);
        let (network, tile) = whole_or_tile(size, open.tile, factor, load)?;
        let tiles = Tiles::new(size, tile, OVERLAP)?;
        let count = tiles.starts().len();
        if count > 1 {
            open.tell(Event::Tiled { part: &part.name, tiles: count, asked: open.tile.is_some() });
        }
        let channels = network.output_shapes().and_then(|outputs| outputs.first()?.1.get(1).copied());
        let channels =
            channels.ok_or_else(|| Error::invalid("the autoencoder's output has no fixed shape"))?;
        Ok(Map { network, input, from, to: Layout { channels, scale: to }, tiles })
    }

    fn run(&mut self, values: &[f32]) -> Result<Vec<f32>> {
        let Map { network, input, from, to, tiles } = self;
        tiles.run(values, *from, *to, |tile| network.run_one(&[(*input, &tile)]))
    }
}

/// Loads a network for all of `size` latents, or for a tile of them: one of `asked` pixels, or, if the memory is too small for the
/// whole, one of the usual size. Returns it with the size of a tile in latents.
pub(super) fn whole_or_tile<T>(
    size: [usize; 2],
    asked: Option<usize>,
    factor: usize,
    mut load: impl FnMut([usize; 2]) -> Result<T>,
) -> Result<(T, [usize; 2])> {
    let tile = |pixels: usize| size.map(|side| side.min((pixels / factor).max(1)));
    let first = asked.map_or(size, tile);
    match load(first) {
        Err(error)
            if error.code() == ErrorCode::ResourceExhausted && tile(TILE) != first && asked.is_none() =>
        {
            Ok((load(tile(TILE))?, tile(TILE)))
        }
        loaded => Ok((loaded?, first)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun::abi;

    #[test]
    fn too_little_memory_means_tiles() {
        // Room for 5000 latents.
        let load = |[height, width]: [usize; 2]| match height * width {
            found if found <= 5000 => Ok(found),
            _ => Err(abi::Error::new(ErrorCode::ResourceExhausted, "too large").into()),
        };
        let found = |size, asked| whole_or_tile(size, asked, 8, load).unwrap();
        assert_eq!(found([64, 64], None), (4096, [64, 64]));
        assert_eq!(found([128, 96], None), (4096, [64, 64]));
        assert_eq!(found([16, 512], None), (1024, [16, 64]));
        assert_eq!(found([64, 64], Some(256)), (1024, [32, 32]));
        // What the user asks for is not changed in silence.
        assert!(whole_or_tile([128, 128], Some(1024), 8, load).is_err());
        let broken = |_| Err::<(), _>(Error::invalid("broken"));
        assert!(whole_or_tile([128, 128], None, 8, broken).is_err());
    }
}

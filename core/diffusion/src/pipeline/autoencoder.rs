//! Between pictures and latents.

use super::{
    Error, Result,
    network::{Network, Opener},
    parts::Parts,
};
use sdrun::Shapes;

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

/// The autoencoder's encoder, for pictures of one size.
pub(super) struct Encoder<'a> {
    network: Network<'a>,
    len: usize,
}

impl<'a> Encoder<'a> {
    /// Loads it for pictures of `[height, width]`.
    pub(super) fn open(open: &'a Opener<'a>, parts: &'a Parts, [height, width]: [usize; 2]) -> Result<Self> {
        let Some(part) = &parts.vae_encoder else {
            return Err(Error::Missing { component: "vae_encoder".into(), family: parts.family, file: None });
        };
        let shapes = Shapes::from([("sample".into(), vec![1, 3, height, width])]);
        let len = parts.family.latent.shape(width, height).iter().product();
        Ok(Encoder { network: open.network(part, shapes)?, len })
    }

    /// Encodes a picture `[3, height, width]` with values from -1 to 1.
    pub(super) fn encode(&mut self, picture: &[f32]) -> Result<Encoded> {
        let mut mean = self.network.run_one(&[("sample", picture)])?;
        if mean.len() != self.len && mean.len() != 2 * self.len {
            let message = format!("the autoencoder returned {} numbers for {} latents", mean.len(), self.len);
            return Err(Error::invalid(message));
        }
        // Logarithms of variances, limited as in diffusers. A tiny autoencoder has none.
        let variance = mean.split_off(self.len);
        let mut deviation: Vec<f32> =
            variance.iter().map(|log| (0.5 * log.clamp(-30.0, 20.0)).exp()).collect();
        deviation.resize(self.len, 0.0);
        Ok(Encoded { mean, deviation })
    }
}

/// The autoencoder's decoder, for latents of one size.
pub(super) struct Decoder<'a> {
    network: Network<'a>,
    len: usize,
    parts: &'a Parts,
}

impl<'a> Decoder<'a> {
    /// Loads it for latents of a shape.
    pub(super) fn open(open: &'a Opener<'a>, parts: &'a Parts, shape: [usize; 3]) -> Result<Self> {
        let [channels, height, width] = shape;
        let shapes = Shapes::from([("latent_sample".into(), vec![1, channels, height, width])]);
        let factor = parts.family.latent.factor;
        let network = open.network(&parts.vae_decoder, shapes)?;
        Ok(Decoder { network, len: 3 * height * width * factor * factor, parts })
    }

    /// Decodes the denoiser's latents to a picture `[3, height, width]` with values from about -1 to 1.
    pub(super) fn decode(&mut self, latents: &[f32]) -> Result<Vec<f32>> {
        let mut latents = latents.to_vec();
        self.parts.family.latent.decoded(&mut latents);
        let values = self.network.run_one(&[("latent_sample", &latents)])?;
        if values.len() != self.len {
            let message =
                format!("the autoencoder returned {} numbers for a picture of {}", values.len(), self.len);
            return Err(Error::invalid(message));
        }
        Ok(values)
    }
}

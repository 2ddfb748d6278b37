//! Rough pictures of latents, for previews: each pixel is a linear function of one latent cell, so it costs next to nothing.
//!
//! The numbers were measured by others with linear regression between latents and pictures: those of Stable Diffusion 1, SDXL and
//! Flux by stable-diffusion.cpp (`latent-preview.h`), those of Stable Diffusion 3 by Stability AI (`sd3_impls.py` of their
//! repository sd3.5). Both are under the MIT licence. Those of the demo model are ours.

use crate::{
    family::{FLUX_LATENT, Family, SD_LATENT, SD3_LATENT, SDXL_LATENT},
    latent::Latent,
};
use image::{
    RgbImage,
    imageops::{FilterType, resize},
};
use std::{
    num::NonZeroUsize,
    time::{Duration, Instant},
};

/// What a latent cell's colour is made of.
struct Factors {
    /// The latents of the model that they were measured with.
    latent: Latent,
    /// Red, green and blue for each channel.
    channels: &'static [[f32; 3]],
    bias: [f32; 3],
}

/// A picture of latents `[channels, height, width]` as the denoiser has them, with a pixel for each cell. `None` if the factors of the
/// family's autoencoder are unknown or the shape is another.
pub fn preview(family: &Family, latents: &[f32], [channels, height, width]: [usize; 3]) -> Option<RgbImage> {
    let factors = match family.autoencoder.decoder {
        "demo/vae-decoder" => &DEMO,
        "sd15/vae-decoder" => &SD,
        "sdxl/vae-decoder" => &SDXL,
        "sd3/vae-decoder" => &SD3,
        "flux/vae-decoder" => &FLUX,
        _ => return None,
    };
    let cells = height * width;
    if channels != factors.channels.len() || latents.len() != channels * cells {
        return None;
    }
    let mut latents = latents.to_vec();
    family.latent.decoded(&mut latents);
    factors.latent.encoded(&mut latents);
    let byte = |cell: usize, colour: usize| {
        let parts = factors.channels.iter().zip(latents.iter().skip(cell).step_by(cells));
        let value =
            factors.bias[colour] + parts.map(|(factors, latent)| factors[colour] * latent).sum::<f32>();
        ((value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0) as u8
    };
    let bytes = (0..cells).flat_map(|cell| [0, 1, 2].map(|colour| byte(cell, colour))).collect();
    RgbImage::from_raw(u32::try_from(width).ok()?, u32::try_from(height).ok()?, bytes)
}

/// A [`preview`] of the size of the picture.
pub fn enlarged(family: &Family, latents: &[f32], shape: [usize; 3]) -> Option<RgbImage> {
    let small = preview(family, latents, shape)?;
    let factor = family.latent.factor as u32;
    Some(resize(&small, small.width() * factor, small.height() * factor, FilterType::Nearest))
}

/// When to show a preview.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Steps between previews; `None` is by the time they cost.
    interval: Option<NonZeroUsize>,
    /// What the last one cost.
    cost: Duration,
    /// When it was done.
    last: Option<Instant>,
}

/// The time between previews, in multiples of what one costs.
const PATIENCE: u32 = 100;

impl Pace {
    /// A preview after every `interval` steps; without it, as many as cost one percent of the time.
    pub fn new(interval: Option<NonZeroUsize>) -> Self {
        Pace { interval, cost: Duration::ZERO, last: None }
    }

    /// Whether it is time for a preview after a step, counted from 0.
    pub fn is_due(&self, step: usize, now: Instant) -> bool {
        match (self.interval, self.last) {
            (Some(interval), _) => (step + 1).is_multiple_of(interval.get()),
            (None, Some(last)) => now.saturating_duration_since(last) >= self.cost * PATIENCE,
            (None, None) => true,
        }
    }

    /// A preview was made from `start` to `end`.
    pub fn took(&mut self, start: Instant, end: Instant) {
        (self.cost, self.last) = (end.saturating_duration_since(start), Some(end));
    }
}

/// `preview_factors` in tools/train/vae.py.
const DEMO: Factors = Factors {
    latent: SD_LATENT,
    channels: &[
        [0.2576, 0.0057, -0.0419],
        [0.2558, 0.386, -0.1729],
        [0.0242, 0.0732, 0.4626],
        [-0.1962, -0.1856, -0.4794],
    ],
    bias: [0.4922, 0.397, 0.4012],
};

const SD: Factors = Factors {
    latent: SD_LATENT,
    channels: &[
        [0.337366, 0.216344, 0.257386],
        [0.165636, 0.386828, 0.046994],
        [-0.267803, 0.237036, 0.223517],
        [-0.178022, -0.200862, -0.678514],
    ],
    bias: [-0.017478, -0.055834, -0.105825],
};

const SDXL: Factors = Factors {
    latent: SDXL_LATENT,
    channels: &[
        [0.258303, 0.277640, 0.329699],
        [-0.299701, 0.105446, 0.014194],
        [0.050522, 0.186163, -0.143257],
        [-0.211938, -0.149892, -0.080036],
    ],
    bias: [0.144381, -0.033313, 0.007061],
};

const SD3: Factors = Factors {
    latent: SD3_LATENT,
    channels: &[
        [-0.0645, 0.0177, 0.1052],
        [0.0028, 0.0312, 0.0650],
        [0.1848, 0.0762, 0.0360],
        [0.0944, 0.0360, 0.0889],
        [0.0897, 0.0506, -0.0364],
        [-0.0020, 0.1203, 0.0284],
        [0.0855, 0.0118, 0.0283],
        [-0.0539, 0.0658, 0.1047],
        [-0.0057, 0.0116, 0.0700],
        [-0.0412, 0.0281, -0.0039],
        [0.1106, 0.1171, 0.1220],
        [-0.0248, 0.0682, -0.0481],
        [0.0815, 0.0846, 0.1207],
        [-0.0120, -0.0055, -0.0867],
        [-0.0749, -0.0634, -0.0456],
        [-0.1418, -0.1457, -0.1259],
    ],
    bias: [0.0; 3],
};

const FLUX: Factors = Factors {
    latent: FLUX_LATENT,
    channels: &[
        [-0.041168, 0.019917, 0.097253],
        [0.028096, 0.026730, 0.129576],
        [0.065618, -0.067950, -0.014651],
        [-0.012998, -0.014762, 0.081251],
        [0.078567, 0.059296, -0.024687],
        [-0.015987, -0.003697, 0.005012],
        [0.033605, 0.138999, 0.068517],
        [-0.024450, -0.063567, -0.030101],
        [-0.040194, -0.016710, 0.127185],
        [0.112681, 0.088764, -0.041940],
        [-0.023498, 0.093664, 0.025543],
        [0.082899, 0.048320, 0.007491],
        [0.075712, 0.074139, 0.081965],
        [-0.143501, 0.018263, -0.136138],
        [-0.025767, -0.082035, -0.040023],
        [-0.111849, -0.055589, -0.032361],
    ],
    bias: [0.024600, -0.006937, -0.008089],
};

#[cfg(test)]
mod tests {
    use super::{Pace, preview};
    use crate::family::{FAMILIES, Family};
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    #[test]
    fn previews_cost_one_percent_of_the_time() {
        let mut pace = Pace::new(None);
        let (mut now, start) = (Instant::now(), Instant::now());
        let mut previews = Duration::ZERO;
        for step in 0..10_000 {
            now += Duration::from_millis(50);
            if pace.is_due(step, now) {
                let cost = Duration::from_millis(20);
                pace.took(now, now + cost);
                now += cost;
                previews += cost;
            }
        }
        let share = previews.as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.008..0.011).contains(&share), "{share}");
    }

    #[test]
    fn an_interval_counts_steps() {
        let pace = Pace::new(3.try_into().ok());
        let due = (0..7).filter(|step| pace.is_due(*step, Instant::now())).collect::<Vec<_>>();
        assert_eq!(due, [2, 5]);
    }

    /// Latents with one value in each channel of the second of 1 x 2 cells, zeros in the first.
    fn cells(values: &[f32]) -> Vec<f32> {
        values.iter().flat_map(|value| [0.0, *value]).collect()
    }

    fn pixels(family: &str, values: &[f32]) -> [[u8; 3]; 2] {
        let shape = [values.len(), 1, 2];
        let picture = preview(Family::find(family).unwrap(), &cells(values), shape).unwrap();
        [picture.get_pixel(0, 0).0, picture.get_pixel(1, 0).0]
    }

    #[test]
    fn colours_are_those_of_the_factors() {
        // (1 + bias) / 2 * 255, and (1 + bias + factors · latents) / 2 * 255, computed by hand.
        assert_eq!(pixels("sd15", &[1.0, 0.0, -1.0, 0.5]), [[125, 120, 114], [191, 104, 75]]);
        assert_eq!(pixels("sdxl", &[1.0, 0.0, -1.0, 0.5])[0], [145, 123, 128]);
        let mut one = [0.0; 16];
        one[2] = 2.0;
        assert_eq!(pixels("sd3", &one), [[127, 127, 127], [174, 146, 136]]);
        assert_eq!(pixels("flux-dev", &one), [[130, 126, 126], [147, 109, 122]]);
    }

    #[test]
    fn what_does_not_fit_has_no_preview() {
        let family = Family::find("sd15").unwrap();
        assert!(preview(family, &[0.0; 16], [16, 1, 1]).is_none());
        assert!(preview(family, &[0.0; 7], [4, 1, 2]).is_none());
        assert!(preview(family, &[], [4, 0, 0]).is_some());
    }

    /// Latents of zero are the average of what a model draws: neither black nor white. The demo model's backgrounds are bright.
    #[test]
    fn zero_is_a_middle_tone() {
        for family in &FAMILIES {
            let shape = [family.latent.channels, 1, 1];
            let Some(grey) = preview(family, &vec![0.0; shape[0]], shape) else {
                assert_eq!(family.id, "sana", "its factors are unknown");
                continue;
            };
            assert!(grey.iter().all(|byte| (100..200).contains(byte)), "{}: {grey:?}", family.id);
        }
    }

    /// Models that scale the latents of one autoencoder in different ways have the same previews.
    #[test]
    fn scales_of_latents_do_not_matter() {
        let [sdxl, playground] = ["sdxl", "playground"].map(|id| Family::find(id).unwrap());
        let mut latents: Vec<f32> = (0..4 * 6).map(|i| (i * 7 % 11) as f32 / 4.0 - 1.2).collect();
        let expected = preview(sdxl, &latents, [4, 2, 3]).unwrap();
        sdxl.latent.decoded(&mut latents);
        playground.latent.encoded(&mut latents);
        let found = preview(playground, &latents, [4, 2, 3]).unwrap();
        assert!(
            found.iter().zip(expected.iter()).all(|(a, b)| a.abs_diff(*b) <= 1),
            "{found:?} {expected:?}"
        );
        assert_ne!(preview(sdxl, &latents, [4, 2, 3]).unwrap(), expected);
    }

    proptest! {
        #[test]
        fn any_number_is_accepted(values in prop::collection::vec(prop::num::f32::ANY, 8)) {
            prop_assert_eq!(preview(&FAMILIES[0], &values, [4, 2, 1]).unwrap().len(), 6);
        }
    }
}

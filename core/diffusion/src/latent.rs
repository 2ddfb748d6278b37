//! Latents, which are the compressed pictures that denoisers work on, and the pictures themselves.
//!
//! All tensors are row-major f32: latents `[channels, height / factor, width / factor]`, pictures `[3, height, width]`.

/// The latents of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Channels.
    pub channels: usize,
    /// How many pixels one latent covers in each direction.
    pub factor: usize,
    /// A denoiser's latents are `(z - shift) * scale` of an autoencoder's `z`.
    pub scale: f32,
    /// See `scale`.
    pub shift: f32,
    /// Mean and deviation of each channel, which are taken out first: `(z - mean) / deviation`. Empty if a family has none.
    pub statistics: &'static [(f32, f32)],
}

impl Latent {
    /// Turns the latents of an autoencoder into those of a denoiser.
    pub fn encoded(&self, latents: &mut [f32]) {
        self.each(latents, |z, (mean, deviation)| (z - mean) / deviation);
        latents.iter_mut().for_each(|z| *z = (*z - self.shift) * self.scale);
    }

    /// Turns the latents of a denoiser into those of an autoencoder.
    pub fn decoded(&self, latents: &mut [f32]) {
        latents.iter_mut().for_each(|z| *z = *z / self.scale + self.shift);
        self.each(latents, |z, (mean, deviation)| z * deviation + mean);
    }

    /// Changes each number, given the statistics of its channel.
    fn each(&self, latents: &mut [f32], change: impl Fn(f32, (f32, f32)) -> f32) {
        let channel = (latents.len() / self.channels).max(1);
        for (plane, statistics) in latents.chunks_mut(channel).zip(self.statistics) {
            plane.iter_mut().for_each(|z| *z = change(*z, *statistics));
        }
    }

    /// The shape `[channels, height, width]` of the latents of a picture of this size in pixels.
    pub fn shape(&self, width: usize, height: usize) -> [usize; 3] {
        [self.channels, height / self.factor, width / self.factor]
    }
}

/// Fails unless width and height are positive multiples of `multiple` pixels.
///
/// # Errors
/// The first side that is not.
pub fn check_size(width: usize, height: usize, multiple: usize) -> Result<(), SizeError> {
    for (what, pixels) in [("width", width), ("height", height)] {
        if pixels == 0 || !pixels.is_multiple_of(multiple) {
            let below = (pixels / multiple * multiple).max(multiple);
            return Err(SizeError { what, pixels, multiple, below });
        }
    }
    Ok(())
}

/// A size that a model cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {what} {pixels} is not a positive multiple of {multiple}: take {below} or {}", below + multiple)]
pub struct SizeError {
    what: &'static str,
    pixels: usize,
    multiple: usize,
    below: usize,
}

/// How the values of a picture become bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest (diffusers).
    #[default]
    Nearest,
    /// Down (A1111, ComfyUI).
    Down,
}

/// Turns a picture with values from -1 to 1 into bytes, `[height, width, 3]`. Values outside are clamped.
pub fn to_bytes(picture: &[f32], rounding: Rounding) -> Vec<u8> {
    let pixels = picture.len() / 3;
    let byte = |value: f32| {
        let value = (value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
        match rounding {
            Rounding::Nearest => value.round_ties_even() as u8,
            Rounding::Down => value as u8,
        }
    };
    (0..pixels).flat_map(|i| [0, 1, 2].map(|channel| byte(picture[channel * pixels + i]))).collect()
}

/// Turns bytes `[height, width, 3]` into a picture with values from -1 to 1.
pub fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    planes(bytes).map(|byte| f32::from(byte) / 255.0 * 2.0 - 1.0).collect()
}

/// Bytes `[height, width, 3]` in the order `[3, height, width]`.
pub fn planes(bytes: &[u8]) -> impl Iterator<Item = u8> {
    (0..3).flat_map(|channel| bytes.iter().skip(channel).step_by(3).copied())
}

/// Latents of another size `[height, width]`, by linear interpolation between the centres of cells (PyTorch's `bilinear` without
/// `align_corners`, A1111's "Latent").
pub fn resized(
    latents: &[f32],
    [_, height, width]: [usize; 3],
    [new_height, new_width]: [usize; 2],
) -> Vec<f32> {
    let place = |at: usize, old: usize, new: usize| {
        let place = ((at as f64 + 0.5) * old as f64 / new as f64 - 0.5).max(0.0);
        let low = (place as usize).min(old - 1);
        (low, (low + 1).min(old - 1), (place - low as f64) as f32)
    };
    let rows: Vec<_> = (0..new_height).map(|y| place(y, height, new_height)).collect();
    let columns: Vec<_> = (0..new_width).map(|x| place(x, width, new_width)).collect();
    let mut out = Vec::with_capacity(latents.len() / (height * width) * new_height * new_width);
    for plane in latents.chunks_exact(height * width) {
        for (top, bottom, down) in &rows {
            for (left, right, along) in &columns {
                let row =
                    |y: &usize| plane[y * width + left] * (1.0 - along) + plane[y * width + right] * along;
                out.push(row(top) * (1.0 - down) + row(bottom) * down);
            }
        }
    }
    out
}

/// One channel `[height, width]` at another size, by cubic interpolation between the centres of cells (PyTorch's `bicubic` without
/// `align_corners`). Like PyTorch, it skips cells where it shrinks.
pub fn cubic(plane: &[f32], [height, width]: [usize; 2], [new_height, new_width]: [usize; 2]) -> Vec<f32> {
    /// Keys' cubic kernel with the slope -3/4.
    fn kernel(x: f64) -> f64 {
        const A: f64 = -0.75;
        match x.abs() {
            x if x <= 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            x if x < 2.0 => ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A,
            _ => 0.0,
        }
    }
    // Four cells and their weights for each new one.
    let taps = |old: usize, new: usize| -> Vec<[(usize, f64); 4]> {
        (0..new)
            .map(|at| {
                let place = (at as f64 + 0.5) * old as f64 / new as f64 - 0.5;
                let first = place.floor() - 1.0;
                [0.0, 1.0, 2.0, 3.0].map(|step| {
                    let cell = first + step;
                    (cell.clamp(0.0, old as f64 - 1.0) as usize, kernel(place - cell))
                })
            })
            .collect()
    };
    let (rows, columns) = (taps(height, new_height), taps(width, new_width));
    let at = |row: &[(usize, f64); 4], column: &[(usize, f64); 4]| {
        let along =
            |y: usize| -> f64 { column.iter().map(|(x, w)| w * f64::from(plane[y * width + x])).sum() };
        row.iter().map(|(y, w)| w * along(*y)).sum::<f64>() as f32
    };
    rows.iter().flat_map(|row| columns.iter().map(|column| at(row, column))).collect()
}

/// Groups latents `[c, h, w]` of an even height and width into tokens `[h/2 · w/2, 4c]`, as Flux and Chroma take them: the
/// channels of a token are `c` times the 2 × 2 latents from the top left.
pub fn packed(latents: &[f32], [channels, height, width]: [usize; 3]) -> Vec<f32> {
    let mut out = Vec::with_capacity(latents.len());
    each_packed([channels, height, width], |at| out.push(latents[at]));
    out
}

/// The inverse of [`packed`].
pub fn unpacked(tokens: &[f32], [channels, height, width]: [usize; 3]) -> Vec<f32> {
    let mut out = vec![0.0; tokens.len()];
    let mut from = tokens.iter();
    each_packed([channels, height, width], |at| {
        if let Some(value) = from.next() {
            out[at] = *value;
        }
    });
    out
}

/// Visits the places of latents in the order of the tokens.
fn each_packed([channels, height, width]: [usize; 3], mut visit: impl FnMut(usize)) {
    for (row, col) in (0..height / 2).flat_map(|row| (0..width / 2).map(move |col| (row, col))) {
        for channel in 0..channels {
            for (dy, dx) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                visit((channel * height + 2 * row + dy) * width + 2 * col + dx);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SD: Latent = Latent { channels: 4, factor: 8, scale: 0.18215, shift: 0.0, statistics: &[] };

    #[test]
    fn sizes_are_multiples() {
        assert_eq!(SD.shape(512, 768), [4, 96, 64]);
        assert_eq!(check_size(512, 768, 64), Ok(()));
        let error = check_size(516, 512, 8).unwrap_err().to_string();
        assert_eq!(error, "the width 516 is not a positive multiple of 8: take 512 or 520");
        assert!(check_size(512, 0, 8).unwrap_err().to_string().contains("height 0"));
    }

    #[test]
    fn programs_round_differently() {
        // Two pixels: red 0.2 and -1.5, green 0.998 and 2, blue -1 and 0. 0 is 127.5 of 255.
        let picture = [0.2, -1.5, 0.998, 2.0, -1.0, 0.0];
        assert_eq!(to_bytes(&picture, Rounding::Nearest), [153, 255, 0, 0, 255, 128]);
        assert_eq!(to_bytes(&picture, Rounding::Down), [153, 254, 0, 0, 255, 127]);
    }

    /// Numbers of `torch.nn.functional.interpolate(x, size=(3, 4), mode="bilinear")`.
    #[test]
    fn latents_grow_linearly() {
        let small = [0.0, 1.0, 2.0, 3.0];
        let large = resized(&small, [1, 2, 2], [3, 4]);
        let expected = [0.0, 0.25, 0.75, 1.0, 1.0, 1.25, 1.75, 2.0, 2.0, 2.25, 2.75, 3.0];
        assert!(large.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{large:?}");
        assert_eq!(resized(&small, [1, 2, 2], [2, 2]), small);
    }

    #[test]
    fn tokens_are_squares_of_latents() {
        // Two channels of 2 x 4: the first token has both channels' left squares.
        let latents: Vec<f32> = (0..16).map(|i| i as f32).collect();
        let tokens = packed(&latents, [2, 2, 4]);
        assert_eq!(tokens[..8], [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 12.0, 13.0]);
        assert_eq!(unpacked(&tokens, [2, 2, 4]), latents);
    }

    proptest! {
        #[test]
        fn bytes_survive(bytes in prop::collection::vec(any::<[u8; 3]>(), 0..50)) {
            let bytes: Vec<u8> = bytes.concat();
            prop_assert_eq!(to_bytes(&from_bytes(&bytes), Rounding::Nearest), bytes);
        }

        #[test]
        fn latents_survive(values in prop::collection::vec(-9.0f32..9.0, 1..40), shift in -1.0f32..1.0) {
            let latent = Latent { shift, ..SD };
            let mut there = values.clone();
            latent.encoded(&mut there);
            latent.decoded(&mut there);
            for (a, b) in values.iter().zip(&there) {
                prop_assert!((a - b).abs() < 1e-5);
            }
        }

        #[test]
        fn packing_loses_nothing(c in 1usize..4, h in 1usize..4, w in 1usize..4) {
            let shape = [c, 2 * h, 2 * w];
            let latents: Vec<f32> = (0..c * h * w * 4).map(|i| i as f32).collect();
            prop_assert_eq!(unpacked(&packed(&latents, shape), shape), latents);
        }
    }
}

//! What the sampler sees: estimates of the clean latents, for previews.

use crate::sampler::Denoiser;
use std::cell::RefCell;

/// A denoiser whose last estimate can be looked at.
pub(super) struct Seen<'a, D> {
    pub(super) inner: D,
    pub(super) last: &'a RefCell<Vec<f32>>,
}

impl<D: Denoiser> Denoiser for Seen<'_, D> {
    type Error = D::Error;

    fn denoise(&mut self, x: &[f32], sigma: f64) -> Result<Vec<f32>, D::Error> {
        let clean = self.inner.denoise(x, sigma)?;
        self.last.borrow_mut().clone_from(&clean);
        Ok(clean)
    }

    fn denoise_both(&mut self, x: &[f32], sigma: f64) -> Result<(Vec<f32>, Vec<f32>), D::Error> {
        let (clean, without) = self.inner.denoise_both(x, sigma)?;
        self.last.borrow_mut().clone_from(&clean);
        Ok((clean, without))
    }
}

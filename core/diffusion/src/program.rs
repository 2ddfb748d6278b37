//! Programs whose pictures sdrun reproduces.

/// A program whose rules to follow where programs differ under one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Program {
    /// AUTOMATIC1111's web UI, which runs k-diffusion.
    A1111,
    /// ComfyUI. stable-diffusion.cpp mostly follows it.
    #[default]
    ComfyUi,
    /// Hugging Face diffusers.
    Diffusers,
}

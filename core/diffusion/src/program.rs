//! Programs whose pictures sdrun reproduces.

use serde::{Deserialize, Serialize};

/// A program whose rules to follow where programs differ under one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Program {
    /// AUTOMATIC1111's web UI, which runs k-diffusion.
    A1111,
    /// ComfyUI. stable-diffusion.cpp mostly follows it.
    #[default]
    ComfyUi,
    /// Hugging Face diffusers.
    Diffusers,
}

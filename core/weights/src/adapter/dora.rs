//! The two rules for DoRA (Liu et al., 2024).

use serde::Serialize;
use std::fmt;

/// How the changed weight `W'` follows from the weight `W`, its change `ΔW`, DoRA's magnitudes `m` and the strength `s`.
///
/// `‖·‖` are norms of rows (one magnitude for each output) or of inputs over all outputs (one for each input).
///
/// The rules agree at strength 1 if magnitudes are per input. They differ everywhere else. LyCORIS itself has a third
/// rule, `(W + ΔW) · (1 + s · (m / ‖W + ΔW‖ − 1))`, which equals PEFT's at strength 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DoraRule {
    /// PEFT and diffusers: `m · (W + s·ΔW) / ‖W + s·ΔW‖`. This form jumps at 0: as `s` nears 0 it nears `m · W / ‖W‖`, while
    /// strength 0 leaves every bit unchanged.
    Peft,
    /// ComfyUI: `W + s · (m · (W + ΔW) / (n + ε) − W)`, ε = 2⁻²³. `n` is `‖W‖` for magnitudes per output and `‖W + ΔW‖` for
    /// magnitudes per input (`weight_decompose` in `comfy/weight_adapter/base.py`, ComfyUI 0.3.77). Continuous at 0.
    ComfyUi,
}

impl fmt::Display for DoraRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DoraRule::Peft => "PEFT",
            DoraRule::ComfyUi => "ComfyUI",
        })
    }
}

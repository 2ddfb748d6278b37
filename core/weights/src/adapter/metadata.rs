//! What an adapter's `__metadata__` says. Shapes decide wherever they can; this is for what tensors cannot say.

use super::key::{Path, Place};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Hints for the arithmetic.
#[derive(Clone, Debug, Default)]
pub(super) struct Hints {
    /// LyCORIS' `rs_lora`, for the whole file.
    rank_stabilized: bool,
    /// PEFT's configuration, as diffusers stores it: `unet.lora_alpha`, `transformer.use_rslora`, …
    peft: Map<String, Value>,
}

impl Hints {
    pub(super) fn new(metadata: &BTreeMap<String, String>) -> Self {
        let object = |key: &str| {
            let text = metadata.get(key)?;
            serde_json::from_str::<Map<String, Value>>(text).ok()
        };
        let arguments = object("ss_network_args").unwrap_or_default();
        Hints {
            rank_stabilized: arguments.get("rs_lora").is_some_and(is_true),
            peft: object("lora_adapter_metadata").unwrap_or_default(),
        }
    }

    fn peft(&self, place: Place, field: &str) -> Option<&Value> {
        let prefixes: &[&str] = match place {
            Place::Denoiser => &["unet.", "transformer."],
            Place::TextEncoder(1) => &["text_encoder."],
            Place::TextEncoder(2) => &["text_encoder_2."],
            Place::TextEncoder(_) => &["text_encoder_3."],
            Place::T5 | Place::Unsaid => &[""],
        };
        prefixes.iter().find_map(|prefix| self.peft.get(&format!("{prefix}{field}")))
    }

    /// `alpha` where no tensor says it: PEFT's `alpha_pattern` for this module, or `lora_alpha`.
    pub(super) fn alpha(&self, place: Place, path: &Path) -> Option<f64> {
        let is_this = |pattern: &str| {
            path.as_str().strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let patterns = self.peft(place, "alpha_pattern").and_then(Value::as_object);
        let special = patterns.and_then(|p| p.iter().find(|(pattern, _)| is_this(pattern)));
        special.map(|(_, alpha)| alpha).or_else(|| self.peft(place, "lora_alpha")).and_then(Value::as_f64)
    }

    /// Whether alpha is divided by the root of the rank.
    pub(super) fn is_rank_stabilized(&self, place: Place) -> bool {
        self.rank_stabilized || self.peft(place, "use_rslora").is_some_and(is_true)
    }
}

/// Trainers write Python's `str(True)`, JSON's `true` and strings of either.
fn is_true(value: &Value) -> bool {
    value.as_bool().unwrap_or_else(|| value.as_str().is_some_and(|s| s.eq_ignore_ascii_case("true")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_trainers_say_their_scaling() {
        let hints = |key: &str, text: &str| Hints::new(&BTreeMap::from([(key.into(), text.into())]));
        let path = |path: &str| Path::Dotted(path.into());
        for (text, expected) in [
            (r#"{"algo":"lora","rs_lora":"True"}"#, true),
            (r#"{"rs_lora":true}"#, true),
            (r#"{"rs_lora":"False"}"#, false),
            ("{}", false),
            ("broken", false),
        ] {
            assert_eq!(
                hints("ss_network_args", text).is_rank_stabilized(Place::Denoiser),
                expected,
                "{text}"
            );
        }
        let peft = hints(
            "lora_adapter_metadata",
            r#"{"unet.lora_alpha":8,"unet.use_rslora":true,"unet.alpha_pattern":{"a.to_q":2,"q":3},"text_encoder.lora_alpha":1.5}"#,
        );
        assert!(peft.is_rank_stabilized(Place::Denoiser) && !peft.is_rank_stabilized(Place::TextEncoder(1)));
        assert_eq!(peft.alpha(Place::Denoiser, &path("x.a.to_q")), Some(2.0));
        assert_eq!(peft.alpha(Place::Denoiser, &path("x.b.to_q")), Some(8.0));
        assert_eq!(peft.alpha(Place::TextEncoder(1), &path("x")), Some(1.5));
        assert_eq!(peft.alpha(Place::TextEncoder(2), &path("x")), None);
    }
}

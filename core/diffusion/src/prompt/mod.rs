//! The prompt language: choices, weights, changes during the steps, combined prompts, LoRA tags.
//!
//! A1111 applies these in order: make the choices ([`chosen`], by an extension), remove [`tags`], split into [`parts`] at `AND`,
//! resolve each part for each step ([`schedule()`]), split its text into [`weighted`] pieces. ComfyUI has only weights ([`weighted_comfy`]).

mod comfy;
mod schedule;
mod tags;
mod weights;
mod wildcards;

pub use comfy::weighted_comfy;
pub use schedule::{Pass, schedule};
pub use tags::{Tag, tags};
pub use weights::{Piece, weighted};
pub use wildcards::{Endless, Lines, chosen};

/// One of several prompts joined by `AND`.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The prompt.
    pub text: String,
    /// Its weight; 1 by default.
    pub weight: f64,
}

/// Splits a prompt at `AND`. A part may end with `:` and a weight, as in `a cat :1.2 AND a dog`.
pub fn parts(prompt: &str) -> Vec<Part> {
    split_at_word(prompt, "AND")
        .into_iter()
        .map(|text| {
            let weight =
                text.rsplit_once(':').and_then(|(text, weight)| Some((text, decimal(weight.trim())?)));
            match weight {
                Some((text, weight)) => Part { text: text.trim_end().into(), weight },
                None => Part { text: text.into(), weight: 1.0 },
            }
        })
        .collect()
}

/// Splits at a whole word, like the regular expression `\b`.
fn split_at_word<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut parts, mut start) = (Vec::new(), 0);
    for (at, _) in text.match_indices(word) {
        let before = text[..at].chars().next_back().is_some_and(is_word);
        let after = text[at + word.len()..].chars().next().is_some_and(is_word);
        if !before && !after {
            parts.push(&text[start..at]);
            start = at + word.len();
        }
    }
    parts.push(&text[start..]);
    parts
}

/// A decimal number without an exponent: `1`, `-.5`, `+2.`.
fn decimal(text: &str) -> Option<f64> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let valid = digits.bytes().any(|b| b.is_ascii_digit())
        && digits.bytes().all(|b| b.is_ascii_digit() || b == b'.')
        && digits.bytes().filter(|b| *b == b'.').count() <= 1;
    if valid { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn parts_have_weights() {
        let of = |prompt| parts(prompt).into_iter().map(|part| (part.text, part.weight)).collect::<Vec<_>>();
        let part = |text: &str, weight| (text.to_string(), weight);
        assert_eq!(of("a cat"), [part("a cat", 1.0)]);
        assert_eq!(of("a cat :1.2 AND a dog"), [part("a cat", 1.2), part(" a dog", 1.0)]);
        assert_eq!(of("a :-.5AND b"), [part("a :-.5AND b", 1.0)]);
        assert_eq!(of("SAND and LANDS"), [part("SAND and LANDS", 1.0)]);
        assert_eq!(of("(a:1.3) AND b:2"), [part("(a:1.3) ", 1.0), part(" b", 2.0)]);
    }
}

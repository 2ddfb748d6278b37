//! Word weights in ComfyUI's grammar.

use super::{Piece, decimal};

/// Factor of brackets without a number.
const FACTOR: f64 = 1.1;

/// Deepest nesting. Deeper brackets are text.
const DEPTH: usize = 64;

/// What escaped brackets are while the text is split. ComfyUI uses the same.
const ESCAPES: [(&str, &str, &str); 2] = [("\\)", "\0\u{1}", ")"), ("\\(", "\0\u{2}", "(")];

/// Splits a prompt into pieces of equal weight by ComfyUI's rules (`token_weights` in `comfy/sd1_clip.py`).
///
/// `(a)` multiplies the weight by 1.1; `(a:1.3)` sets it to 1.3, whatever is around. A backslash escapes a bracket. Square
/// brackets and `BREAK` are text, so there is no [`Piece::Break`]. Unmatched brackets are text.
pub fn weighted_comfy(prompt: &str) -> Vec<Piece> {
    let mut text = prompt.to_string();
    for (escaped, mark, _) in ESCAPES {
        text = text.replace(escaped, mark);
    }
    let mut pieces = Vec::new();
    split(&text, 1.0, 0, &mut pieces);
    pieces
}

fn split(text: &str, weight: f64, depth: usize, pieces: &mut Vec<Piece>) {
    for item in items(text) {
        let inside = item.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
        match inside.filter(|_| depth < DEPTH) {
            Some(inside) => {
                let number = inside.rsplit_once(':').filter(|(before, _)| !before.is_empty());
                let number = number.and_then(|(before, number)| Some((before, decimal(number.trim())?)));
                let (inside, weight) = number.unwrap_or((inside, weight * FACTOR));
                split(inside, weight, depth + 1, pieces);
            }
            None => {
                let mut text = item.to_string();
                for (_, mark, bracket) in ESCAPES {
                    text = text.replace(mark, bracket);
                }
                pieces.push(Piece::Text(text, weight));
            }
        }
    }
}

/// Splits a text into brackets, which end where their nesting ends, and what is between them.
fn items(text: &str) -> Vec<&str> {
    let (mut items, mut start, mut level) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => {
                if level == 0 {
                    items.push(&text[start..at]);
                    start = at;
                }
                level += 1;
            }
            ')' => {
                level -= 1;
                if level == 0 {
                    items.push(&text[start..=at]);
                    start = at + 1;
                }
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    items.retain(|item| !item.is_empty());
    items
}

#[cfg(test)]
mod tests {
    use super::{Piece, weighted_comfy};
    use proptest::prelude::*;

    fn texts(prompt: &str) -> Vec<(String, f64)> {
        weighted_comfy(prompt)
            .into_iter()
            .map(|piece| match piece {
                Piece::Text(text, weight) => (text, weight),
                Piece::Break => panic!("ComfyUI has no BREAK"),
            })
            .collect()
    }

    #[test]
    fn a_number_replaces_the_weight_around_it() {
        let expected = [("x ", 1.0), ("a ", 1.1), ("b", 1.3), (" c ", 1.1), ("d", 1.1 * 1.1), (" y", 1.0)];
        assert_eq!(texts("x (a (b:1.3) c (d)) y"), expected.map(|(text, weight)| (text.to_string(), weight)));
    }

    #[test]
    fn what_is_no_weight_is_text() {
        for (prompt, expected) in [
            (r"\(a\) [b] BREAK c", "(a) [b] BREAK c"),
            ("a) (b)", "a) (b)"),
            ("(a", "(a"),
            ("ratio 3:2", "ratio 3:2"),
        ] {
            assert_eq!(texts(prompt), [(expected.to_string(), 1.0)]);
        }
        assert_eq!(texts("(:2)"), [(":2".to_string(), 1.1)]);
        assert_eq!(texts("()"), []);
    }

    proptest! {
        /// Deep or broken nesting neither panics nor overflows the stack.
        #[test]
        fn any_text_is_accepted(text in "[()\\\\:1.a é]{0,40}", deep in 0usize..3000) {
            weighted_comfy(&text);
            weighted_comfy(&format!("{}{text}{}", "(".repeat(deep), ")".repeat(deep)));
        }
    }
}

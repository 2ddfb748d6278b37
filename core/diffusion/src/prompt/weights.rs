//! Word weights in A1111's grammar.

use super::{decimal, split_at_word};

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Text and its weight; 1 is neutral.
    Text(String, f64),
    /// `BREAK`: what follows begins a new chunk of tokens.
    Break,
}

/// Factors of round and square brackets.
const ROUND: f64 = 1.1;
const SQUARE: f64 = 1.0 / 1.1;

/// Splits a prompt into pieces of equal weight. `(a)` multiplies the weight by 1.1, `[a]` divides it by 1.1, and `(a:1.3)`
/// multiplies it by 1.3. A backslash escapes a bracket. An unclosed bracket extends to the end.
pub fn weighted(prompt: &str) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut round, mut square) = (Vec::new(), Vec::new());
    let mut rest = prompt;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '\\' => {
                let escaped = rest[1..].chars().next().filter(|c| "()[]\\".contains(*c));
                pieces.push(Piece::Text(escaped.map(String::from).unwrap_or_default(), 1.0));
                1 + escaped.map_or(0, char::len_utf8)
            }
            '(' => {
                round.push(pieces.len());
                1
            }
            '[' => {
                square.push(pieces.len());
                1
            }
            ':' => match closing_weight(rest) {
                Some((weight, length)) if !round.is_empty() => {
                    multiply(&mut pieces, round.pop(), weight);
                    length
                }
                Some((_, length)) => {
                    text(&mut pieces, &rest[..length]);
                    length
                }
                None => {
                    text(&mut pieces, ":");
                    1
                }
            },
            ')' if !round.is_empty() => {
                multiply(&mut pieces, round.pop(), ROUND);
                1
            }
            ']' if !square.is_empty() => {
                multiply(&mut pieces, square.pop(), SQUARE);
                1
            }
            ')' | ']' => {
                text(&mut pieces, &rest[..1]);
                1
            }
            _ => {
                let end = rest.find(['\\', '(', ')', '[', ']', ':']).unwrap_or(rest.len());
                text(&mut pieces, &rest[..end]);
                end
            }
        };
        rest = &rest[length..];
    }
    for start in round {
        multiply(&mut pieces, Some(start), ROUND);
    }
    for start in square {
        multiply(&mut pieces, Some(start), SQUARE);
    }
    merged(pieces)
}

/// Parses the end of a weighted bracket, `: 1.3 )`. Returns the weight and its length in bytes.
fn closing_weight(rest: &str) -> Option<(f64, usize)> {
    let end = rest.find(')')?;
    Some((decimal(rest[1..end].trim())?, end + 1))
}

/// Adds text with weight 1, split at `BREAK`.
fn text(pieces: &mut Vec<Piece>, text: &str) {
    let parts = split_at_word(text, "BREAK");
    let last = parts.len() - 1;
    for (index, part) in parts.into_iter().enumerate() {
        let part = if index > 0 { part.trim_start() } else { part };
        let part = if index < last { part.trim_end() } else { part };
        if index > 0 {
            pieces.push(Piece::Break);
        }
        pieces.push(Piece::Text(part.into(), 1.0));
    }
}

fn multiply(pieces: &mut [Piece], start: Option<usize>, factor: f64) {
    for piece in &mut pieces[start.unwrap_or(0)..] {
        if let Piece::Text(_, weight) = piece {
            *weight *= factor;
        }
    }
}

/// Joins neighbours of equal weight. Returns at least one piece.
fn merged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(Piece::Text(text, weight)), Piece::Text(more, same)) if *weight == same => {
                text.push_str(&more)
            }
            (_, piece) => out.push(piece),
        }
    }
    if out.is_empty() {
        out.push(Piece::Text(String::new(), 1.0));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Piece, weighted};

    fn texts(prompt: &str) -> Vec<(String, f64)> {
        let text = |piece| match piece {
            Piece::Text(text, weight) => (text, weight),
            Piece::Break => ("BREAK".into(), -1.0),
        };
        weighted(prompt).into_iter().map(text).collect()
    }

    /// Examples from the documentation of A1111's `parse_prompt_attention`.
    #[test]
    fn examples_of_a1111() {
        for (prompt, expected) in [
            ("normal text", vec![("normal text", 1.0)]),
            ("an (important) word", vec![("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
            ("(unbalanced", vec![("unbalanced", 1.1)]),
            (r"\(literal\]", vec![("(literal]", 1.0)]),
            ("(unnecessary)(parens)", vec![("unnecessaryparens", 1.1)]),
            (
                "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
                vec![
                    ("a ", 1.0),
                    ("house", 1.573),
                    (" ", 1.1),
                    ("on", 1.0),
                    (" a ", 1.1),
                    ("hill", 0.55),
                    (", sun, ", 1.1),
                    ("sky", 1.4641),
                    (".", 1.1),
                ],
            ),
        ] {
            let actual = texts(prompt);
            assert_eq!(actual.len(), expected.len(), "{prompt}: {actual:?}");
            for ((text, weight), (expected, factor)) in actual.iter().zip(expected) {
                assert!(text == expected && (weight - factor).abs() < 1e-9, "{prompt}: {actual:?}");
            }
        }
    }

    #[test]
    fn break_ends_a_chunk() {
        let expected = [("a".into(), 1.0), ("BREAK".into(), -1.0), ("b, BREAKING".into(), 1.0)];
        assert_eq!(texts("a BREAK b, BREAKING"), expected);
    }

    #[test]
    fn colons_and_closing_brackets_are_text_where_nothing_is_open() {
        assert_eq!(texts("ratio 3:2) ok]"), [("ratio 3:2) ok]".into(), 1.0)]);
        assert_eq!(texts(""), [(String::new(), 1.0)]);
        assert_eq!(texts("(a: 1.5 )"), [("a".into(), 1.5)]);
        assert_eq!(texts("é(ü:2)"), [("é".into(), 1.0), ("ü".into(), 2.0)]);
    }
}

//! Choices in a prompt: `{a|b}` and `__name__`, as in the extension sd-dynamic-prompts for A1111.

use super::decimal;
use std::collections::HashMap;

/// The choices of a prompt do not come to an end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the choices of the prompt have no end, and the last was {0:?}: a wildcard must not lead back to itself"
)]
pub struct Endless(pub String);

/// Finds the lines of a wildcard by its name.
pub type Lines<'a, E> = dyn Fn(&str) -> Result<Vec<String>, E> + 'a;

/// How deep choices may lie in each other.
const MOST_DEPTH: usize = 32;
/// How many choices a prompt may have.
const MOST_CHOICES: usize = 10_000;
/// Bytes of text that choices may make.
const MOST_BYTES: usize = 1 << 16;

/// Makes the choices of a prompt. The same text, seed and lines give the same choices.
///
/// - `{a|b}` is `a` or `b`. `{2::a|b}` takes `a` twice as often.
/// - `{2$$a|b|c}` is two of them in any order, joined by `, `; `{1-2$$a|b}`, `{-2$$a|b}` and `{1-$$a|b}` leave their number
///   open, and `{2$$ and $$a|b|c}` joins them by ` and `.
/// - `__name__` is one of the lines of a wildcard, and `{2$$__name__}` two. Without `lines` it is text.
///
/// Options and lines may have choices themselves. A `|` within `[…]` belongs to A1111's alternation. A backslash makes `{`, `}` and
/// `|` text, and so does a missing bracket.
///
/// # Errors
/// Errors of `lines`, and [`Endless`].
pub fn chosen<E: From<Endless>>(text: &str, seed: u64, lines: Option<&Lines<'_, E>>) -> Result<String, E> {
    let mut chooser = Chooser { random: Random(seed), lines, choices: 0, out: String::new() };
    chooser.text(text, 0)?;
    Ok(chooser.out)
}

struct Chooser<'a, E> {
    random: Random,
    lines: Option<&'a Lines<'a, E>>,
    choices: usize,
    out: String,
}

impl<E: From<Endless>> Chooser<'_, E> {
    /// Adds a text to the result.
    fn text(&mut self, text: &str, depth: usize) -> Result<(), E> {
        let closing = closings(text);
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            let rest = &text[at..];
            at += if c == '\\' {
                let escaped = rest[1..].chars().next();
                // Other escapes are for the language of weights.
                self.out.extend(Some(c).filter(|_| !escaped.is_some_and(|c| "{}|".contains(c))));
                self.out.extend(escaped);
                1 + escaped.map_or(0, char::len_utf8)
            } else if let Some(end) = closing.get(&at) {
                self.braces(&text[at + 1..*end], depth + 1)?;
                end + 1 - at
            } else if let Some(name) = self.lines.and_then(|_| wildcard(rest)) {
                let line = self.one_of(&self.options_of(name)?);
                self.deeper(&line, name, depth + 1)?;
                name.len() + 4
            } else {
                self.out.push(c);
                c.len_utf8()
            };
        }
        Ok(())
    }

    /// Adds the text of a choice. `what` names it in errors.
    fn deeper(&mut self, text: &str, what: &str, depth: usize) -> Result<(), E> {
        self.choices += 1;
        if depth > MOST_DEPTH || self.choices > MOST_CHOICES {
            return Err(Endless(what.chars().take(100).collect()).into());
        }
        let before = self.out.len();
        self.text(text, depth)?;
        if before.max(MOST_BYTES) < self.out.len() {
            return Err(Endless(what.chars().take(100).collect()).into());
        }
        Ok(())
    }

    /// Adds what is chosen of the content of braces.
    fn braces(&mut self, inside: &str, depth: usize) -> Result<(), E> {
        let Some(several) = Several::parse(inside) else {
            let options: Vec<Choice> = split(inside, "|").into_iter().map(Choice::parse).collect();
            let option = self.one_of(&options);
            return self.deeper(&option, inside, depth);
        };
        let mut options: Vec<Choice> = split(several.options, "|").into_iter().map(Choice::parse).collect();
        if let [Choice { text, .. }] = &options[..]
            && let Some(name) = wildcard(text.trim())
            && name.len() + 4 == text.trim().len()
            && self.lines.is_some()
        {
            options = self.options_of(name)?;
        }
        let most = several.most.unwrap_or(options.len()).min(options.len());
        let least = several.least.min(most);
        let count = least + self.random.below(most - least + 1);
        for number in 0..count {
            if number > 0 {
                self.out.push_str(several.joint);
            }
            let option = options.remove(self.index(&options));
            self.deeper(option.text.trim(), inside, depth)?;
        }
        Ok(())
    }

    fn options_of(&self, name: &str) -> Result<Vec<Choice>, E> {
        let lines = self.lines.map_or(Ok(Vec::new()), |lines| lines(name))?;
        Ok(lines.iter().map(|line| Choice::parse(line)).collect())
    }

    fn one_of(&mut self, options: &[Choice]) -> String {
        let index = self.index(options);
        options.get(index).map(|option| option.text.clone()).unwrap_or_default()
    }

    /// The index of one of the options by their weights.
    fn index(&mut self, options: &[Choice]) -> usize {
        let total: f64 = options.iter().map(|option| option.weight).sum();
        if !(total > 0.0 && total.is_finite()) {
            return self.random.below(options.len());
        }
        let mut left = self.random.unit() * total;
        let found = options.iter().position(|option| {
            left -= option.weight;
            left < 0.0
        });
        found.unwrap_or(options.len().saturating_sub(1))
    }
}

/// An option or a line.
struct Choice {
    text: String,
    weight: f64,
}

impl Choice {
    /// Text, perhaps with a weight before it: `0.5::text`.
    fn parse(text: &str) -> Self {
        let weighted = text.split_once("::").and_then(|(weight, text)| Some((decimal(weight.trim())?, text)));
        let (weight, text) = weighted.filter(|(weight, _)| *weight >= 0.0).unwrap_or((1.0, text));
        Choice { text: text.into(), weight }
    }
}

/// Braces that choose several options: `1-2$$, $$a|b`.
struct Several<'a> {
    least: usize,
    /// `None` is all of them.
    most: Option<usize>,
    joint: &'a str,
    options: &'a str,
}

impl<'a> Several<'a> {
    fn parse(inside: &'a str) -> Option<Self> {
        let (range, rest) = inside.split_once("$$")?;
        let number = |text: &str| text.trim().parse::<usize>().ok();
        let (least, most) = match range.split_once('-') {
            None => (number(range)?, Some(number(range)?)),
            Some(("", most)) => (1, Some(number(most)?)),
            Some((least, most)) if most.trim().is_empty() => (number(least)?, None),
            Some((least, most)) => (number(least)?, Some(number(most)?)),
        };
        let parts = split(rest, "$$");
        let (joint, options) = match &parts[..] {
            [joint, _, ..] => (*joint, &rest[joint.len() + 2..]),
            _ => (", ", rest),
        };
        Some(Several { least, most, joint, options })
    }
}

/// The name of the wildcard at the start of a text.
fn wildcard(text: &str) -> Option<&str> {
    let (name, _) = text.strip_prefix("__")?.split_once("__")?;
    let valid = |c: char| c.is_alphanumeric() || "_-./\\* ".contains(c);
    (!name.trim().is_empty() && name.chars().all(valid)).then_some(name)
}

/// For each brace that is closed, where it is closed.
fn closings(text: &str) -> HashMap<usize, usize> {
    let (mut open, mut closings) = (Vec::new(), HashMap::new());
    for (at, c) in unescaped(text) {
        match c {
            '{' => open.push(at),
            '}' => closings.extend(open.pop().map(|start| (start, at))),
            _ => {}
        }
    }
    closings
}

/// Splits a text at a separator, but not within brackets.
fn split<'a>(text: &'a str, separator: &str) -> Vec<&'a str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0usize);
    for (at, c) in unescaped(text) {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            _ if depth == 0 && at >= start && text[at..].starts_with(separator) => {
                parts.push(&text[start..at]);
                start = at + separator.len();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// The characters that no backslash escapes, and where they are.
fn unescaped(text: &str) -> impl Iterator<Item = (usize, char)> {
    let mut escaped = false;
    text.char_indices().filter(move |(_, c)| {
        let skipped = escaped;
        escaped = !escaped && *c == '\\';
        !skipped && !escaped
    })
}

/// Random numbers (SplitMix64; Steele, Lea and Flood, 2014): neighbouring seeds give independent ones.
struct Random(u64);

impl Random {
    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From 0 to below `count`.
    fn below(&mut self, count: usize) -> usize {
        ((self.unit() * count as f64) as usize).min(count.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests;

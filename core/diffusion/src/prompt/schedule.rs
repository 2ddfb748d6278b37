//! Prompts that change during the steps, in A1111's grammar.

use super::decimal;

/// The pass for which a prompt is resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pass {
    /// The first pass, usually the only one.
    First {
        /// Steps of this pass.
        steps: usize,
    },
    /// The pass over the enlarged picture (hires fix). Whole numbers count from the start of the first pass; fractions run from
    /// 1 to 2.
    Second {
        /// Steps of the first pass.
        before: usize,
        /// Steps of this pass.
        steps: usize,
    },
}

impl Pass {
    /// Its steps.
    pub fn steps(self) -> usize {
        match self {
            Self::First { steps } | Self::Second { steps, .. } => steps,
        }
    }

    /// The last step before a change. A number with a decimal point is a fraction of the steps.
    fn change(self, when: &str, value: f64) -> usize {
        let (whole, fraction) = match self {
            Self::First { .. } => (0.0, 0.0),
            Self::Second { before, .. } => (before as f64, 1.0),
        };
        let step = if when.contains('.') { (value - fraction) * self.steps() as f64 } else { value - whole };
        (step.max(0.0) as usize).min(self.steps())
    }
}

/// Resolves a prompt. Returns its texts, each with the last step (counted from 1) that uses it.
///
/// `[a:b:0.5]` is `a` for the first half of the steps and `b` after. `[a:b:7]` changes after step 7, `[b:7]` starts and
/// `[a::7]` ends there. `[a|b]` alternates every step. Other brackets stay for [`weighted`](super::weighted).
pub fn schedule(prompt: &str, pass: Pass) -> Vec<(usize, String)> {
    let nodes = Parser { rest: prompt, depth: 0 }.nodes(&[]);
    let mut ends = vec![pass.steps()];
    nodes.iter().for_each(|node| node.ends(pass, &mut ends));
    ends.sort_unstable();
    ends.dedup();
    ends.into_iter()
        .map(|end| {
            let mut text = String::new();
            nodes.iter().for_each(|node| node.write(end, pass, &mut text));
            (end, text)
        })
        .collect()
}

enum Node {
    Text(String),
    Change { before: Vec<Node>, after: Vec<Node>, when: String, value: f64 },
    Alternate(Vec<Vec<Node>>),
}

impl Node {
    fn text(text: &str) -> Self {
        Self::Text(text.into())
    }

    /// Adds the last step of each text.
    fn ends(&self, pass: Pass, ends: &mut Vec<usize>) {
        match self {
            Self::Text(_) => {}
            Self::Change { before, after, when, value } => {
                before.iter().chain(after).for_each(|node| node.ends(pass, ends));
                ends.extend(Some(pass.change(when, *value)).filter(|end| *end >= 1));
            }
            Self::Alternate(choices) => {
                choices.iter().flatten().for_each(|node| node.ends(pass, ends));
                ends.extend(1..=pass.steps());
            }
        }
    }

    /// Writes the text of a step.
    fn write(&self, step: usize, pass: Pass, out: &mut String) {
        let chosen = match self {
            Self::Text(text) => return out.push_str(text),
            Self::Change { before, after, when, value } => {
                if step <= pass.change(when, *value) {
                    before
                } else {
                    after
                }
            }
            Self::Alternate(choices) => &choices[(step - 1) % choices.len()],
        };
        chosen.iter().for_each(|node| node.write(step, pass, out));
    }
}

/// Deepest nesting. Deeper brackets are text.
const DEPTH: usize = 64;

/// Parses a prompt in one pass without backtracking, so hostile prompts cost no more than others. An unmatched bracket becomes
/// text, and the parser keeps its content.
struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    /// Nodes up to one of the characters in `stop`, or to the end.
    fn nodes(&mut self, stop: &[char]) -> Vec<Node> {
        let mut nodes = Vec::new();
        while let Some(first) = self.rest.chars().next().filter(|c| !stop.contains(c)) {
            match first {
                '[' if self.depth < DEPTH => nodes.extend(self.inside(Self::square)),
                '(' if self.depth < DEPTH => nodes.extend(self.inside(Self::round)),
                _ => {
                    let escaped = if first == '\\' { self.rest[1..].chars().next() } else { None };
                    let length = first.len_utf8() + escaped.map_or(0, char::len_utf8);
                    nodes.push(Node::Text(self.rest[..length].into()));
                    self.rest = &self.rest[length..];
                }
            }
        }
        nodes
    }

    /// Parses what follows an opening bracket.
    fn inside(&mut self, read: impl Fn(&mut Self) -> Vec<Node>) -> Vec<Node> {
        self.rest = &self.rest[1..];
        self.depth += 1;
        let nodes = read(self);
        self.depth -= 1;
        nodes
    }

    /// Consumes the next character if it is `expected`.
    fn take(&mut self, expected: char) -> bool {
        self.rest.strip_prefix(expected).map(|rest| self.rest = rest).is_some()
    }

    /// `(…)` stays; only its content is resolved.
    fn round(&mut self) -> Vec<Node> {
        let mut nodes = vec![Node::text("(")];
        nodes.extend(self.nodes(&[')', ']']));
        if self.take(')') {
            nodes.push(Node::text(")"));
        }
        nodes
    }

    /// `[…]`: a change, an alternation, or a weight, which stays.
    fn square(&mut self) -> Vec<Node> {
        let mut segments: Vec<(Vec<Node>, &str)> = Vec::new();
        let closed = loop {
            let start = self.rest;
            let nodes = self.nodes(&[':', '|', ']', ')']);
            let raw = &start[..start.len() - self.rest.len()];
            let separator = self.rest.get(..1).filter(|c| ":|".contains(*c));
            segments.push((nodes, separator.unwrap_or_default()));
            match separator {
                Some(separator) => self.rest = &self.rest[separator.len()..],
                None => break self.take(']').then_some(raw.trim()),
            }
        };
        let Some(last) = closed else { return Self::as_text(segments, "[", "") };
        let count = |separator| segments.iter().filter(|(_, s)| *s == separator).count();
        let (colons, bars) = (count(":"), count("|"));
        // The number has to follow a colon.
        let is_change = (1..=2).contains(&colons) && segments[segments.len() - 2].1 == ":";
        if let (true, Some(value)) = (is_change, decimal(last)) {
            let when = last.to_string();
            segments.pop();
            let split = segments.iter().position(|(_, separator)| *separator == ":").unwrap_or(0);
            let mut after = segments.split_off(if colons == 2 { split + 1 } else { 0 });
            for segments in [&mut segments, &mut after] {
                if let Some((_, separator)) = segments.last_mut() {
                    *separator = "";
                }
            }
            let text = |segments| Self::as_text(segments, "", "");
            return vec![Node::Change { before: text(segments), after: text(after), when, value }];
        }
        if colons == 0 && bars > 0 {
            return vec![Node::Alternate(segments.into_iter().map(|(nodes, _)| nodes).collect())];
        }
        Self::as_text(segments, "[", "]")
    }

    /// Turns segments and their separators back into text nodes, between `before` and `after`.
    fn as_text(segments: Vec<(Vec<Node>, &str)>, before: &str, after: &str) -> Vec<Node> {
        let mut out = vec![Node::text(before)];
        for (nodes, separator) in segments {
            out.extend(nodes);
            out.push(Node::text(separator));
        }
        out.push(Node::text(after));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::{Pass, schedule};

    fn check(prompt: &str, pass: Pass, expected: &[(usize, &str)]) {
        let actual = schedule(prompt, pass);
        let expected: Vec<_> = expected.iter().map(|(end, text)| (*end, text.to_string())).collect();
        assert_eq!(actual, expected, "{prompt}");
    }

    /// Examples from the documentation of A1111's `get_learned_conditioning_prompt_schedules`.
    #[test]
    fn examples_of_a1111() {
        let first = Pass::First { steps: 10 };
        for (prompt, expected) in [
            ("test", &[(10, "test")][..]),
            ("a [b:3]", &[(3, "a "), (10, "a b")]),
            ("a [b: 3]", &[(3, "a "), (10, "a b")]),
            ("a [[[b]]:2]", &[(2, "a "), (10, "a [[b]]")]),
            ("[(a:2):3]", &[(3, ""), (10, "(a:2)")]),
            ("a [b : c : 1] d", &[(1, "a b  d"), (10, "a  c  d")]),
            ("a[b:[c:d:2]:1]e", &[(1, "abe"), (2, "ace"), (10, "ade")]),
            ("a [unbalanced", &[(10, "a [unbalanced")]),
            ("a [b:.5] c", &[(5, "a  c"), (10, "a b c")]),
            ("a [{b|d{:.5] c", &[(5, "a  c"), (10, "a {b|d{ c")]),
            ("((a][:b:c [d:3]", &[(3, "((a][:b:c "), (10, "((a][:b:c d")]),
        ] {
            check(prompt, first, expected);
        }
        let alternation: Vec<_> = (1..=10).map(|i| (i, if i % 2 == 1 { "a" } else { "(b:1.1)" })).collect();
        check("[a|(b:1.1)]", first, &alternation);
        let alternation: Vec<_> = (1..=10).map(|i| (i, if i % 4 == 1 { "female" } else { "male" })).collect();
        check("[fe|||]male", first, &alternation);
        let second = Pass::Second { before: 10, steps: 10 };
        check("a [b:.5] c", second, &[(10, "a b c")]);
        check("a [b:1.5] c", second, &[(5, "a  c"), (10, "a b c")]);
    }

    /// Deep nesting uses neither exponential time nor unbounded stack.
    #[test]
    fn deep_and_broken_brackets_are_text() {
        let first = Pass::First { steps: 4 };
        for unit in ["[", "(", "[a:", "[a|", "[(", "](", "\\"] {
            let prompt = unit.repeat(20_000);
            check(&prompt, first, &[(4, &prompt)]);
        }
        let nested = format!("{}a{}", "[".repeat(50), "]".repeat(50));
        check(&nested, first, &[(4, &nested)]);
        check("[a:b:c:2] [a|b:c] é[", first, &[(4, "[a:b:c:2] [a|b:c] é[")]);
    }

    #[test]
    fn ends_and_escapes() {
        let first = Pass::First { steps: 4 };
        check("[a::2]b", first, &[(2, "ab"), (4, "b")]);
        check(r"\[a:2\]", first, &[(4, r"\[a:2\]")]);
        check("[a:b:99]", first, &[(4, "a")]);
        check("[a:b:0]", first, &[(4, "b")]);
        check("", first, &[(4, "")]);
        check("[[a|b]:2]", first, &[(1, ""), (2, ""), (3, "a"), (4, "b")]);
    }
}

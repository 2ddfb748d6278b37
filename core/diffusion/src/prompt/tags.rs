//! Tags such as `<lora:name:0.8>`.

use super::decimal;

/// A tag of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// The kind of file: `lora`, `lyco`, `hypernet`.
    pub kind: String,
    /// The file's name or alias.
    pub name: String,
    /// Weight in the denoiser; `text_weight` by default.
    pub weight: f64,
    /// Weight in the text encoders, which A1111 has first; 1 by default.
    pub text_weight: f64,
}

/// Removes the tags from a prompt. Returns the remaining text and the tags in order. A tag whose weight is not a number stays
/// text.
pub fn tags(prompt: &str) -> (String, Vec<Tag>) {
    let (mut text, mut tags, mut rest) = (String::new(), Vec::new(), prompt);
    while let Some(start) = rest.find('<') {
        text.push_str(&rest[..start]);
        let end = rest[start..].find('>').map(|length| start + length);
        match end.and_then(|end| Some((parse(&rest[start + 1..end])?, end))) {
            Some((tag, end)) => {
                tags.push(tag);
                rest = &rest[end + 1..];
            }
            None => {
                text.push('<');
                rest = &rest[start + 1..];
            }
        }
    }
    text.push_str(rest);
    (text, tags)
}

fn parse(inside: &str) -> Option<Tag> {
    let mut fields = inside.split(':').map(str::trim);
    let kind = fields
        .next()
        .filter(|kind| !kind.is_empty() && kind.chars().all(|c| c.is_alphanumeric() || c == '_'))?;
    let name = fields.next().filter(|name| !name.is_empty())?;
    let text_weight = fields.next().map_or(Some(1.0), decimal)?;
    let weight = fields.next().map_or(Some(text_weight), decimal)?;
    fields.next().is_none().then(|| Tag { kind: kind.into(), name: name.into(), weight, text_weight })
}

#[cfg(test)]
mod tests {
    use super::{Tag, tags};

    #[test]
    fn tags_leave_the_prompt() {
        let lora = |name: &str, weight, text_weight| Tag {
            kind: "lora".into(),
            name: name.into(),
            weight,
            text_weight,
        };
        assert_eq!(tags("a cat"), ("a cat".into(), vec![]));
        assert_eq!(
            tags("a <lora:ink wash:0.8> cat<lora:eyes>, <lora:x:1:.5>"),
            (
                "a  cat, ".into(),
                vec![lora("ink wash", 0.8, 0.8), lora("eyes", 1.0, 1.0), lora("x", 0.5, 1.0)]
            )
        );
    }

    #[test]
    fn what_is_no_tag_stays() {
        for prompt in ["1 < 2 > 0", "<lora:>", "<lora:a:b>", "<lora:a", "<>", "<lora:a:1:2:3>"] {
            assert_eq!(tags(prompt), (prompt.into(), vec![]));
        }
    }
}

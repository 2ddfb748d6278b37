//! A1111's "parameters": the text in a picture's metadata that other programs and civitai read.

/// Prompt, negative prompt and settings of a picture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Infotext {
    /// The prompt.
    pub prompt: String,
    /// The negative prompt, or empty.
    pub negative: String,
    /// Names and values of settings in order, such as `Steps` and `20`.
    pub settings: Vec<(String, String)>,
}

/// Prefix of the negative prompt.
const NEGATIVE: &str = "Negative prompt:";

/// A last line with fewer settings belongs to the prompt.
const LEAST_SETTINGS: usize = 3;

impl Infotext {
    /// The value of a setting.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.settings.iter().find(|(key, _)| key == name).map(|(_, value)| &**value)
    }

    /// Parses the text like A1111's `parse_generation_parameters`. Never fails: text without settings is a prompt.
    pub fn parse(text: &str) -> Self {
        let mut lines: Vec<&str> = text.trim().split('\n').collect();
        let settings = lines.last().map_or(Vec::new(), |line| settings(line));
        let settings = if settings.len() < LEAST_SETTINGS {
            Vec::new()
        } else {
            lines.pop();
            settings
        };
        let (mut prompt, mut negative, mut in_negative) = (Vec::new(), Vec::new(), false);
        for line in lines {
            let line = line.trim();
            let line = match line.strip_prefix(NEGATIVE) {
                Some(rest) => {
                    in_negative = true;
                    rest.trim()
                }
                None => line,
            };
            if in_negative { negative.push(line) } else { prompt.push(line) }
        }
        Self { prompt: prompt.join("\n"), negative: negative.join("\n"), settings }
    }
}

impl std::fmt::Display for Infotext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.prompt)?;
        if !self.negative.is_empty() {
            write!(f, "\n{NEGATIVE} {}", self.negative)?;
        }
        for (index, (name, value)) in self.settings.iter().enumerate() {
            f.write_str(if index == 0 { "\n" } else { ", " })?;
            // A JSON string where the value holds what separates settings, as in A1111, or looks like JSON.
            if value.contains([',', ':', '\n']) || value.starts_with('"') {
                write!(f, "{name}: {}", serde_json::Value::from(value.as_str()))?;
            } else {
                write!(f, "{name}: {value}")?;
            }
        }
        Ok(())
    }
}

/// Parses the `name: value` pairs of a line. A name has at least two characters and starts with a letter or digit. A value ends
/// at a comma, or is a JSON string. It may also be a JSON list or object, which A1111 cannot read but civitai and stable-diffusion.cpp
/// write.
fn settings(line: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut rest = line;
    while let Some(colon) = rest.find(':') {
        let is_name = |c: char| c.is_alphanumeric() || "_ -/".contains(c);
        let before = &rest[..colon];
        let start = before
            .rfind(|c| !is_name(c))
            .map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
        let name = before[start..].trim_start();
        rest = &rest[colon + 1..];
        let valid = name.chars().count() >= 2 && name.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        if !valid {
            continue;
        }
        let value = rest.trim_start();
        let (value, after) = quoted(value).or_else(|| nested(value)).unwrap_or_else(|| {
            let end = value.find(',').unwrap_or(value.len());
            (value[..end].to_string(), &value[end..])
        });
        out.push((name.to_string(), value));
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    out
}

/// Parses a JSON string that ends at a comma or at the end of the text. Returns it and the rest.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut escaped = false;
    let inside = text.strip_prefix('"')?;
    let end = inside.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    })?;
    let after = &inside[end + 1..];
    let value = serde_json::from_str(&text[..end + 2]).ok()?;
    (after.is_empty() || after.starts_with(',')).then_some((value, after))
}

/// Splits off a JSON list or object that ends at a comma or at the end of the text.
fn nested(text: &str) -> Option<(String, &str)> {
    if !text.starts_with(['[', '{']) {
        return None;
    }
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<serde_json::Value>();
    values.next()?.ok()?;
    let (value, after) = text.split_at_checked(values.byte_offset())?;
    (after.is_empty() || after.starts_with(',')).then_some((value.into(), after))
}

#[cfg(test)]
mod tests {
    use super::Infotext;
    use proptest::prelude::*;

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.into(), value.into())
    }

    #[test]
    fn a_text_of_a1111() {
        let text = "a cat, (masterpiece:1.2)\nsecond line\nNegative prompt: ugly: very, bad\nSteps: 20, Sampler: DPM++ 2M, \
                    Schedule type: Karras, CFG scale: 7, Seed: 1, Size: 512x768, Lora hashes: \"a: 0123, b: 4567\", Version: v1.9";
        let parsed = Infotext::parse(text);
        assert_eq!(parsed.prompt, "a cat, (masterpiece:1.2)\nsecond line");
        assert_eq!(parsed.negative, "ugly: very, bad");
        assert_eq!(parsed.get("Sampler"), Some("DPM++ 2M"));
        assert_eq!(parsed.get("Size"), Some("512x768"));
        assert_eq!(parsed.get("Lora hashes"), Some("a: 0123, b: 4567"));
        assert_eq!(parsed.settings.len(), 8);
        assert_eq!(parsed.to_string(), text);
    }

    #[test]
    fn a_text_without_settings_is_a_prompt() {
        for text in ["a cat", "ratio 3:2, size: big", "", "one\ntwo"] {
            assert_eq!(Infotext::parse(text), Infotext { prompt: text.into(), ..Default::default() });
        }
    }

    proptest! {
        /// Parsing returns what was written, whatever the values contain.
        #[test]
        fn texts_survive(prompt in "[a-z ,.()]{0,20}", value in "\\PC{0,20}", other in "[ -~\n]{0,20}") {
            let values = [value, other].map(|v| v.trim().to_string());
            let text = Infotext {
                prompt: prompt.trim().into(),
                negative: "blurry".into(),
                settings: vec![
                    pair("Steps", "20"), ("Model".into(), values[0].clone()), ("Note".into(), values[1].clone()), pair("Seed", "1"),
                ],
            };
            prop_assert_eq!(Infotext::parse(&text.to_string()), text);
        }

        /// Parsing accepts any text.
        #[test]
        fn nothing_panics(text in "\\PC*") {
            Infotext::parse(&text);
        }
    }
}

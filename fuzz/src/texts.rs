//! Texts.

use sdrun::{abi::Manifest, bench::Report, weights::Binding};
use sdrun_diffusion::{
    metadata::{Infotext, read_record},
    prompt::{Endless, Pass, chosen, parts, schedule, tags, weighted, weighted_comfy},
    text::tokenizer::Tokenizer,
};

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

pub(crate) fn manifest(bytes: &[u8]) {
    if let Some(text) = text(bytes) {
        let _ = Manifest::parse(text);
    }
}

pub(crate) fn binding(bytes: &[u8]) {
    if let Ok(binding) = Binding::parse(bytes) {
        let again = binding.to_json().ok().and_then(|json| Binding::parse(json.as_bytes()).ok());
        assert_eq!(again, Some(binding), "the table changes when it is written and read");
    }
}

pub(crate) fn report(bytes: &[u8]) {
    let _ = serde_json::from_slice::<Report>(bytes);
}

/// All grammars, on 1 to 256 steps.
pub(crate) fn prompt(bytes: &[u8]) {
    let Some((steps, rest)) = bytes.split_first() else { return };
    let Some(text) = text(rest) else { return };
    let steps = usize::from(*steps) + 1;
    let chosen = chosen::<Endless>(text, 1, None);
    let chosen = chosen.as_deref().unwrap_or(text);
    let (without, _) = tags(chosen);
    for part in parts(&without) {
        for pass in [Pass::First { steps }, Pass::Second { before: 3, steps }] {
            let texts = schedule(&part.text, pass);
            assert_eq!(texts.last().map(|(end, _)| *end), Some(steps), "a prompt ends with the steps");
            for (_, text) in texts.iter().take(8) {
                weighted(text);
            }
        }
        weighted_comfy(&part.text);
    }
}

/// What generators store in pictures: a key of one line, then the text.
pub(crate) fn metadata(bytes: &[u8]) {
    let Some((key, content)) = text(bytes).and_then(|text| text.split_once('\n')) else { return };
    let _ = read_record(&[(key.to_string(), content.to_string())]);
    let _ = Infotext::parse(content);
}

pub(crate) fn tokenizer(bytes: &[u8]) {
    for read in [Tokenizer::json(bytes), Tokenizer::sentence_piece(bytes)].into_iter().flatten() {
        let _ = read.ids("a cat, 4k (ü)");
    }
}

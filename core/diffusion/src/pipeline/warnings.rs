//! What a user should know about a request before it is drawn.

use super::{Parts, Resolved};
use crate::demo;

/// Sentences about settings that contradict the model.
pub fn warnings(request: &Resolved, parts: &Parts) -> Vec<String> {
    let family = parts.family;
    let mut found = Vec::new();
    if family.id == demo::NAME {
        let unknown = demo::unknown_words(&request.prompt, parts);
        if !unknown.is_empty() {
            found.push(format!("the demo model does not know these words: {}", unknown.join(", ")));
        }
    }
    let scale = request.guidance.scale;
    if family.defaults.scale == 1.0 && scale != 1.0 {
        found.push(format!(
            "{} was trained without a negative prompt: a guidance scale of {scale} takes twice the time and mostly makes pictures worse",
            family.title
        ));
    }
    found
}

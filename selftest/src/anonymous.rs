//! Takes out of a report what names the user or the machine.

use crate::Report;
use regex::{Captures, Regex};
use sdrun::{Paths, Result, abi::Error};
use serde_json::Value;
use std::{env, fs, sync::LazyLock};

/// Absolute paths of at least two parts, after the start of the text or a separator.
static PATH: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r#"(^|[\s"'=(\[`,;:<])((?:[A-Za-z]:)?(?:[\\/][^\\/\s"'`<>|,;:()\[\]]+){2,})"#).ok()
});

/// UUIDs, such as those of graphics cards.
static UUID: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b").ok());

/// Replaces the user's name, the machine's, folders and UUIDs in every text of a report.
pub(crate) fn hide(report: &mut Report, paths: &Paths) -> Result<()> {
    let broken = |e: serde_json::Error| Error::internal(format!("the report is not JSON: {e}"));
    let known = secrets(paths)?;
    let mut value = serde_json::to_value(&*report).map_err(broken)?;
    each_text(&mut value, &|text| clean(text, &known));
    *report = serde_json::from_value(value).map_err(broken)?;
    Ok(())
}

/// What to replace, longest first, and what stands in for it.
fn secrets(paths: &Paths) -> Result<Vec<Secret>> {
    let variable = |name: &str| env::var(name).ok();
    let host = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let users = ["USER", "USERNAME", "LOGNAME", "SUDO_USER"].map(|name| (variable(name), "<user>", true));
    let hosts = [variable("HOSTNAME"), variable("COMPUTERNAME"), host].map(|name| (name, "<host>", true));
    let homes = ["HOME", "USERPROFILE"].map(|name| (variable(name), "<home>", false));
    let folders =
        [&paths.data, &paths.cache].map(|path| (Some(path.display().to_string()), "<sdrun>", false));
    let all = users.into_iter().chain(hosts).chain(homes).chain(folders);
    let mut known: Vec<(String, &str, bool)> = all
        .filter_map(|(text, name, is_word)| Some((text?.trim().to_string(), name, is_word)))
        // `root` is no name, and one of two letters may mean anything.
        .filter(|(text, ..)| {
            text.len() > 2 && !["root", "user", "localhost", "/root"].contains(&text.as_str())
        })
        .collect();
    known.sort_by_key(|(text, ..)| std::cmp::Reverse(text.len()));
    known.into_iter().map(|(text, name, is_word)| Secret::new(&text, name, is_word)).collect()
}

struct Secret {
    pattern: Regex,
    instead: &'static str,
    is_word: bool,
}

impl Secret {
    /// `is_word`: only as a whole word, in capitals or not.
    fn new(text: &str, instead: &'static str, is_word: bool) -> Result<Self> {
        let text = regex::escape(text);
        let pattern = if is_word { format!(r"(?i)\b{text}\b") } else { text };
        let broken = |e: regex::Error| Error::internal(format!("cannot look for names: {e}"));
        Ok(Secret { pattern: Regex::new(&pattern).map_err(broken)?, instead, is_word })
    }
}

fn clean(text: &str, known: &[Secret]) -> String {
    let replace = |text: String, words: bool| {
        let secrets = known.iter().filter(|secret| secret.is_word == words);
        secrets.fold(text, |text, secret| secret.pattern.replace_all(&text, secret.instead).into_owned())
    };
    // Folders first, because their names may contain spaces and the user's name.
    let mut text = replace(text.to_string(), false);
    if let Some(path) = PATH.as_ref() {
        let shortened = |found: &Captures<'_>| {
            let last = found[2].rsplit(['/', '\\']).next().unwrap_or_default();
            format!("{}…/{last}", &found[1])
        };
        text = path.replace_all(&text, shortened).into_owned();
    }
    let text = replace(text, true);
    match UUID.as_ref() {
        Some(uuid) => uuid.replace_all(&text, "<uuid>").into_owned(),
        None => text,
    }
}

/// Fields with words of sdrun's own, or bytes.
const OWN: [&str; 13] = [
    "png",
    "state",
    "precision",
    "precisions",
    "io_dtypes",
    "weight_update",
    "cancel",
    "kind",
    "os",
    "arch",
    "model",
    "provider",
    "name",
];

/// Changes every text but those of [`OWN`].
fn each_text(value: &mut Value, change: &dyn Fn(&str) -> String) {
    match value {
        Value::String(text) => *text = change(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text(item, change)),
        Value::Object(fields) => {
            let others = fields.iter_mut().filter(|(name, _)| !OWN.contains(&name.as_str()));
            others.for_each(|(_, item)| each_text(item, change));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_paths_and_uuids_go() {
        let known = [
            Secret::new("/home/ada lovelace", "<home>", false).unwrap(),
            Secret::new("ada", "<user>", true).unwrap(),
        ];
        for (text, wanted) in [
            ("cannot open /home/ada lovelace/x/lib.so: no", "cannot open <home>/x/lib.so: no"),
            ("lib=/opt/rocm-7/lib/libhip.so.7 failed", "lib=…/libhip.so.7 failed"),
            ("ADA: an adapter", "<user>: an adapter"),
            (r"at C:\Users\ada\AppData\nv.dll:12", r"at …/nv.dll:12"),
            ("GPU-6f2b0c1e-1111-2222-3333-0123456789ab", "GPU-<uuid>"),
            ("1/2 of https://example.org/page, image/png", "1/2 of https://example.org/page, image/png"),
            ("pci:0000:01:00.0", "pci:0000:01:00.0"),
        ] {
            assert_eq!(clean(text, &known), wanted);
        }
    }

    #[test]
    fn the_patterns_are_valid() {
        assert!(PATH.is_some() && UUID.is_some());
    }
}

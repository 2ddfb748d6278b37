//! "Did you mean …?" for names that do not exist.

/// Minimum similarity of two names, from 0 to 1 (Jaro-Winkler). Lower values would suggest unrelated names.
const ALIKE: f64 = 0.85;

/// A question to append to a message about `word`, which is not in `names`; empty if no name is similar.
pub fn did_you_mean<'n>(word: &str, names: impl IntoIterator<Item = &'n str>) -> String {
    let plain = |name: &str| name.to_lowercase().replace('_', "-");
    let alike = |name: &&str| strsim::jaro_winkler(&plain(word), &plain(name));
    let best = names.into_iter().max_by(|a, b| alike(a).total_cmp(&alike(b)));
    match best {
        Some(name) if alike(&name) >= ALIKE => format!("; did you mean `{name}`?"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::did_you_mean;

    #[test]
    fn suggests_only_similar_names() {
        let names = ["zenith-ai", "acme", "sd15/unet", "sd15/unet-fp16", "sd15/text-encoder"];
        let ask = |word| did_you_mean(word, names);
        assert_eq!(ask("zenithai"), "; did you mean `zenith-ai`?");
        assert_eq!(ask("Zenith_AI"), "; did you mean `zenith-ai`?");
        assert_eq!(ask("sd15/unett"), "; did you mean `sd15/unet`?");
        assert_eq!(ask("sd15/text_encoder"), "; did you mean `sd15/text-encoder`?");
        assert_eq!(ask("cuda"), "");
        assert_eq!(did_you_mean("x", []), "");
    }
}

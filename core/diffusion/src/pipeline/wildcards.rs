//! Files of wildcards, and the prompts of pictures.

use super::{Error, Result};
use crate::prompt::{Lines, chosen};
use sdrun::{
    abi,
    files::{Links, read_small},
};
use std::path::{Path, PathBuf};

/// A folder of wildcards: text files with a line for each choice.
#[derive(Clone, Debug)]
pub struct Wildcards {
    folder: PathBuf,
    /// Names, such as `animals/cats`, and files.
    files: Vec<(String, PathBuf)>,
}

/// How deep folders may lie in each other.
const MOST_DEPTH: usize = 8;
/// The largest file, in bytes.
const MOST_BYTES: u64 = 16 << 20;

impl Wildcards {
    /// Finds the text files below a folder. Does not follow links.
    ///
    /// # Errors
    /// Errors of reading the folder.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut files = Vec::new();
        let mut folders = vec![(folder.to_path_buf(), String::new(), 0)];
        while let Some((folder, name, depth)) = folders.pop() {
            let failed = |error: std::io::Error| abi::Error::io("read", &folder, &error);
            for entry in std::fs::read_dir(&folder).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let (path, kind) = (entry.path(), entry.file_type().map_err(failed)?);
                if kind.is_dir() && depth < MOST_DEPTH {
                    let name = format!("{name}{}/", entry.file_name().to_string_lossy());
                    folders.push((path, name, depth + 1));
                } else if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("txt")) {
                    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
                    files.push((format!("{name}{stem}"), path));
                }
            }
        }
        files.sort();
        Ok(Wildcards { folder: folder.into(), files })
    }

    /// The lines of a wildcard, without blank ones and those that start with `#`. A name is that of a file without its ending, in any
    /// case, after the folders below this one; `*` stands for any text, and then several files may match.
    ///
    /// # Errors
    /// `NotFound` if no file has the name, `InvalidArgument` for a file without lines or behind a link, `DataLoss` for one that is too
    /// large or no text.
    pub fn lines(&self, name: &str) -> Result<Vec<String>> {
        let wanted = name.replace('\\', "/");
        let found = self.files.iter().filter(|(known, _)| matches(&wanted, known));
        let (mut lines, mut any) = (Vec::new(), false);
        for (_, file) in found {
            any = true;
            let text = String::from_utf8(read_small(file, Links::Refuse, MOST_BYTES)?).map_err(|_| {
                let message = format!("{} is not a text in UTF-8", file.display());
                abi::Error::new(abi::ErrorCode::DataLoss, message).with_file(file)
            })?;
            let text = text.trim_start_matches('\u{feff}').lines().map(str::trim);
            lines.extend(text.filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from));
        }
        if !any {
            let near = sdrun::did_you_mean(&wanted, self.files.iter().map(|(name, _)| name.as_str()));
            let message =
                format!("the wildcard {name:?} of the prompt is not in {}{near}", self.folder.display());
            return Err(abi::Error::new(abi::ErrorCode::NotFound, message).into());
        }
        if lines.is_empty() {
            return Err(Error::invalid(format!(
                "the wildcard {name:?} of the prompt has no lines to choose from"
            )));
        }
        Ok(lines)
    }
}

/// Whether a name is meant by another, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.to_lowercase(), name.to_lowercase());
    let Some((start, pattern)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut rest) = name.strip_prefix(start) else { return false };
    let mut parts: Vec<&str> = pattern.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(end)
}

/// The prompt and the negative prompt of the picture with this seed: both with their choices made ([`chosen`]). The negative prompt has
/// random numbers of its own, so that it does not change with the prompt.
///
/// # Errors
/// Those of [`Wildcards::lines`], and [`Endless`](crate::prompt::Endless).
pub fn prompts_of(
    prompt: &str,
    negative: &str,
    seed: u64,
    wildcards: Option<&Wildcards>,
) -> Result<(String, String)> {
    let lines = |name: &str| wildcards.map_or(Ok(Vec::new()), |wildcards| wildcards.lines(name));
    let lines: Option<&Lines<'_, Error>> = wildcards.is_some().then_some(&lines);
    Ok((chosen(prompt, seed, lines)?, chosen(negative, !seed, lines)?))
}

#[cfg(test)]
mod tests {
    use super::{Wildcards, matches, prompts_of};
    use sdrun::abi::ErrorCode;
    use std::fs;

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("cards/animals")).unwrap();
        for (name, text) in [
            ("cards/Colour.txt", "\u{feff}# colours\n\nred\r\n  blue  \n#green\n"),
            ("cards/animals/cats.txt", "a __colour__ cat\n"),
            ("cards/animals/dogs.txt", "a dog\n"),
            ("cards/empty.txt", "# nothing\n"),
            ("cards/notes.md", "no wildcard\n"),
            ("secret.txt", "secret\n"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        fs::write(dir.path().join("cards/binary.txt"), [0xff, 0xfe, 0]).unwrap();
        dir
    }

    #[test]
    fn lines_are_found_by_name() {
        let dir = folder();
        let cards = Wildcards::open(&dir.path().join("cards")).unwrap();
        let lines = |name: &str| cards.lines(name).unwrap();
        assert_eq!(lines("colour"), ["red", "blue"]);
        assert_eq!(lines("animals/cats"), ["a __colour__ cat"]);
        assert_eq!(lines("animals\\*"), ["a __colour__ cat", "a dog"]);
        let refused = |name: &str| {
            let error = cards.lines(name).unwrap_err();
            (error.code(), error.to_string())
        };
        let (code, text) = refused("animals/cast");
        assert!(code == ErrorCode::NotFound && text.contains("animals/cats"), "{text}");
        let absolute = dir.path().join("secret").display().to_string();
        for outside in ["../secret", "animals/../../secret", "notes", &absolute, "./colour"] {
            assert_eq!(refused(outside).0, ErrorCode::NotFound, "{outside}");
        }
        assert_eq!(refused("empty").0, ErrorCode::InvalidArgument);
        assert_eq!(refused("binary").0, ErrorCode::DataLoss);
        assert_eq!(Wildcards::open(&dir.path().join("none")).unwrap_err().code(), ErrorCode::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_not_followed() {
        use std::os::unix::fs::symlink;
        let dir = folder();
        symlink(dir.path().join("secret.txt"), dir.path().join("cards/link.txt")).unwrap();
        symlink(dir.path(), dir.path().join("cards/up")).unwrap();
        let cards = Wildcards::open(&dir.path().join("cards")).unwrap();
        let error = cards.lines("link").unwrap_err().to_string();
        assert!(error.contains("is a symbolic link"), "{error}");
        assert_eq!(cards.lines("up/secret").unwrap_err().code(), ErrorCode::NotFound);
    }

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, name, expected) in [
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*b*c", "a1b2c", true),
            ("a**", "a/b/c", true),
            ("a*a", "a", false),
            ("A", "a", true),
            ("a*d", "abc", false),
            ("*b*b*", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn each_seed_has_its_own_prompts() {
        let dir = folder();
        let cards = Wildcards::open(&dir.path().join("cards")).unwrap();
        let of = |prompt: &str, seed| prompts_of(prompt, "{a|b|c|d}", seed, Some(&cards)).unwrap();
        let all: Vec<_> = (0..50).map(|seed| of("__animals/cats__", seed)).collect();
        assert!(all.iter().any(|(prompt, _)| prompt == "a red cat"));
        assert!(all.iter().any(|(prompt, _)| prompt == "a blue cat"));
        assert_eq!(all, (0..50).map(|seed| of("__animals/cats__", seed)).collect::<Vec<_>>());
        // The negative prompt does not depend on the prompt, nor follow its choices.
        assert!((0..50).all(|seed| of("{x|y} {x|y}", seed).1 == all[seed as usize].1));
        assert!((0..50).any(|seed| of("{a|b|c|d}", seed).0 != all[seed as usize].1));
        assert_eq!(prompts_of("__x__ {a}", "", 1, None).unwrap().0, "__x__ a");
        let endless = prompts_of("__x*__", "", 1, Some(&cards)).unwrap_err();
        assert_eq!(endless.code(), ErrorCode::NotFound);
    }
}

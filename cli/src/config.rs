//! The config file: the user's defaults, which the environment and the command line override.

use sdrun::abi::{Error, ErrorCode, Precision, Result};
use sdrun::files::{Links, read_small};
use serde::{Deserialize, Deserializer, de};
use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

/// Names the file; an empty value means no file.
const VARIABLE: &str = "SDRUN_CONFIG";
/// Larger than any hand-written config file.
const MAX_BYTES: u64 = 1 << 20;

/// The contents of the file.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    /// Ids of providers, the preferred one first.
    #[serde(default)]
    pub(crate) providers: Vec<String>,
    pub(crate) device: Option<String>,
    #[serde(default, deserialize_with = "precision")]
    pub(crate) precision: Option<Precision>,
    pub(crate) threads: Option<NonZeroUsize>,
    /// `false` leaves workers all rights of the user.
    pub(crate) sandbox: Option<bool>,
    /// A filter as in `SDRUN_LOG`.
    pub(crate) log: Option<String>,
    #[serde(default)]
    pub(crate) folders: Folders,
    /// The file, if one was read.
    #[serde(skip)]
    pub(crate) path: Option<PathBuf>,
}

/// Folders that replace the default ones.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Folders {
    /// As `SDRUN_DATA_DIR`.
    pub(crate) data: Option<PathBuf>,
    /// As `SDRUN_CACHE_DIR`.
    pub(crate) cache: Option<PathBuf>,
}

/// Parses a precision as the command line does, with the same error message.
fn precision<'d, D: Deserializer<'d>>(deserializer: D) -> std::result::Result<Option<Precision>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(de::Error::custom)
}

impl Config {
    /// Reads the file that `SDRUN_CONFIG` names, else `config.toml` in the user's config folder. A missing file is an error
    /// only if it was named.
    ///
    /// # Errors
    /// `InvalidArgument`, with the line, for unknown keys and wrong values; errors of reading the file.
    pub(crate) fn load() -> Result<Self> {
        if std::env::var_os(VARIABLE).is_some_and(|file| file.is_empty()) {
            return Ok(Config::default());
        }
        match sdrun::trust::environment(VARIABLE) {
            Some(file) => Self::read(Path::new(&file)),
            None => match sdrun::Paths::config_file() {
                Some(file) if file.exists() => Self::read(&file),
                _ => Ok(Config::default()),
            },
        }
    }

    fn read(path: &Path) -> Result<Self> {
        let bytes = read_small(path, Links::Follow, MAX_BYTES)?;
        let text = String::from_utf8(bytes).map_err(|_| {
            Error::invalid(format!("the config file {} is not text", path.display())).with_file(path)
        })?;
        let mut config: Config = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            Error::new(
                ErrorCode::InvalidArgument,
                format!("the config file {}, line {line}: {}", path.display(), error.message()),
            )
            .with_file(path)
        })?;
        for folder in [&config.folders.data, &config.folders.cache].into_iter().flatten() {
            if !folder.is_absolute() {
                let message = format!(
                    "the config file {}: the folder {} is not absolute",
                    path.display(),
                    folder.display()
                );
                return Err(Error::invalid(message).with_file(path));
            }
        }
        config.path = Some(path.to_path_buf());
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Config> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        Config::read(&file)
    }

    #[test]
    fn everything_may_be_set_or_left_out() {
        let folder = if cfg!(windows) { r"C:\sdrun" } else { "/tmp/sdrun" };
        let text = format!(
            "providers = ['acme', 'zenith']\ndevice = 'cpu'\nprecision = 'bf16'\nthreads = 4\nlog = 'info'\n\
             [folders]\ncache = '{folder}'\n"
        );
        let config = read(text.as_bytes()).unwrap();
        assert_eq!(config.providers, ["acme", "zenith"]);
        assert_eq!((config.device.as_deref(), config.precision), (Some("cpu"), Some(Precision::Bf16)));
        assert_eq!((config.threads.map(NonZeroUsize::get), config.log.as_deref()), (Some(4), Some("info")));
        assert_eq!(config.folders, Folders { data: None, cache: Some(folder.into()) });
        let empty = read(b"").unwrap();
        assert_eq!((empty.providers.len(), empty.precision), (0, None));
    }

    #[test]
    fn errors_name_the_line() {
        for (text, expected) in [
            (&b"\nthreds = 4"[..], "line 2: unknown field `threds`"),
            (b"threads = 0", "line 1: "),
            (b"threads = 'four'", "line 1: "),
            (b"precision = 'fp8'", "bf16"),
            (b"providers = 'acme'", "line 1: "),
            (b"[folders]\ncache = 'relative'", "not absolute"),
            (b"device = ", "line 1: "),
            (b"\xff\xfe", "not text"),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
            assert!(error.message.contains(expected) && error.message.contains("config.toml"), "{error}");
            assert!(!error.message.contains('\n'), "one line: {error}");
        }
        assert_eq!(read(&vec![b' '; 2 << 20]).unwrap_err().code, ErrorCode::DataLoss);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Config::read(dir.path()).unwrap_err().code, ErrorCode::InvalidArgument);
        assert_eq!(Config::read(&dir.path().join("absent")).unwrap_err().code, ErrorCode::NotFound);
    }
}

//! Options that let steps skip the network.

use clap::{Args, ValueEnum};
use sdrun::abi::Error;
use sdrun_diffusion::reuse::{Mode, Reuse};

#[derive(Args)]
pub(super) struct ReuseArgs {
    /// Leave the network out in steps where its output hardly changes: faster, and a little different
    #[arg(long, value_name = "MODE", value_enum)]
    cache_mode: Option<CacheMode>,

    /// When to leave it out, as threshold=N,start=N,end=N: the estimated error that is allowed, and the part of the steps [default:
    /// threshold=0.2 for easycache and 1 for ucache, start=0.15, end=0.95]
    #[arg(long, value_name = "SETTINGS")]
    cache_option: Option<String>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum CacheMode {
    /// Compute every step
    None,
    /// EasyCache, for transformers
    Easycache,
    /// UCache, for UNets
    Ucache,
}

impl ReuseArgs {
    /// The settings that the options ask for. Without options, `base` applies: the settings in the picture that `--from` names.
    pub(super) fn wanted(&self, base: Option<Reuse>) -> Result<Option<Reuse>, Error> {
        let reuse = match self.cache_mode {
            None => base,
            Some(CacheMode::None) => None,
            Some(CacheMode::Easycache) => Some(Reuse::new(Mode::EasyCache)),
            Some(CacheMode::Ucache) => Some(Reuse::new(Mode::UCache)),
        };
        match (&self.cache_option, reuse) {
            (None, reuse) => Ok(reuse),
            (Some(_), None) => Err(Error::invalid("--cache-option needs --cache-mode easycache or ucache")),
            (Some(text), Some(reuse)) => changed(reuse, text).map(Some),
        }
    }
}

/// Settings such as `threshold=0.3,start=0.2`.
fn changed(mut reuse: Reuse, text: &str) -> Result<Reuse, Error> {
    for setting in text.split(',') {
        let number = setting.split_once('=').and_then(|(name, value)| Some((name, value.parse().ok()?)));
        match number {
            Some(("threshold", number)) => reuse.threshold = number,
            Some(("start", number)) => reuse.start = number,
            Some(("end", number)) => reuse.end = number,
            _ => {
                return Err(Error::invalid(format!(
                    "--cache-option: `{setting}` is not threshold=N, start=N or end=N"
                )));
            }
        }
    }
    Ok(reuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_change_the_defaults() {
        let args =
            |mode, option: Option<&str>| ReuseArgs { cache_mode: mode, cache_option: option.map(Into::into) };
        let easy = Reuse::new(Mode::EasyCache);
        let changed = args(Some(CacheMode::Easycache), Some("threshold=0.3,end=0.9")).wanted(None).unwrap();
        assert_eq!(changed, Some(Reuse { threshold: 0.3, end: 0.9, ..easy }));
        // A picture's settings stay unless options say otherwise.
        assert_eq!(args(None, None).wanted(Some(easy)).unwrap(), Some(easy));
        assert_eq!(args(Some(CacheMode::None), None).wanted(Some(easy)).unwrap(), None);
        assert!(args(None, Some("threshold=1")).wanted(None).is_err());
        for bad in ["threshold", "threshold=x", "decay=1", ""] {
            assert!(args(Some(CacheMode::Ucache), Some(bad)).wanted(None).is_err(), "{bad}");
        }
    }
}

//! The definition of the command line for clap. Parser, help, man pages and completions all come from it.

use crate::commands;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use sdrun::abi::Error;
use std::path::PathBuf;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

const ABOUT: &str = "Compile ONNX models with the vendor's compiler, keep the engines free of weights, and run them with \
                     any weights";

const EXIT_CODES: &str = "\
Exit codes:
    0  success
    1  a comparison, check or measurement failed (verify, doctor, bench, cache verify)
    2  the command line is wrong
    3  a file, model, provider, device or weight does not exist
    4  an input, shape or model is invalid
    5  a provider or its runtime is missing or unusable
    6  not supported: operator, precision, option, file format
    7  out of disk space or memory
    8  permission denied
    9  a time limit expired
   10  a file is damaged or truncated, or the disk fails
   11  a provider's process crashed
   70  internal error
  130  cancelled (Ctrl-C or SIGTERM)

Environment:
  SDRUN_DATA_DIR           folder of installed runtimes and providers
  SDRUN_CACHE_DIR          folder of cached engines and built-in models
  SDRUN_PROVIDER_FILES     provider manifests or folders of them, instead of the usual places
  SDRUN_ADD_PROVIDER_FILES the same, searched before the usual places
  SDRUN_PROVIDERS_SELECT   patterns of provider ids to use, separated by commas
  SDRUN_PROVIDERS_DISABLE  patterns of provider ids to ignore
  SDRUN_WORKER             the sdrun-worker executable
  SDRUN_CONFIG             the config file, instead of config.toml in the user's config folder; empty: none
  SDRUN_LOG                what to log: a level, or targets with levels (sdrun=debug,acme=info)
  SDRUN_API_KEY            what clients of `sdrun serve` must show
  NO_COLOR                 no colours in log lines";

/// The whole command line.
#[derive(Parser)]
#[command(name = "sdrun", bin_name = "sdrun", version, about = ABOUT, after_long_help = EXIT_CODES, max_term_width = 100)]
#[command(arg_required_else_help = true, subcommand_required = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options every command takes.
#[derive(Args, Clone)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Print the result as JSON, or write it to FILE in addition to the text
    #[arg(long, global = true, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub(crate) json: Option<Option<PathBuf>>,

    /// Log level on stderr [default: SDRUN_LOG, else the config file, else warn]
    #[arg(long, global = true, value_name = "LEVEL", conflicts_with = "verbose")]
    log_level: Option<LogLevel>,

    /// Log more: -v info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    /// Search this file or folder for provider manifests first (repeatable)
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) provider_path: Vec<PathBuf>,

    /// Print no progress bars and no notes on stderr
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
}

impl Global {
    /// What to log: `--quiet`, `--log-level` or `-v`, else `SDRUN_LOG`, else the config file's `configured`, else warnings.
    ///
    /// # Errors
    /// `InvalidArgument` for a filter that is neither a level nor `TARGET=LEVEL`, separated by commas.
    pub(crate) fn log_filter(&self, configured: Option<&str>) -> Result<Targets, Error> {
        let level = match (self.quiet, self.log_level, self.verbose) {
            (true, ..) => Some(LogLevel::Error),
            (_, Some(level), _) => Some(level),
            (_, None, 0) => None,
            (_, None, 1) => Some(LogLevel::Info),
            (_, None, 2) => Some(LogLevel::Debug),
            (_, None, _) => Some(LogLevel::Trace),
        };
        let at = |level: LevelFilter| Targets::new().with_default(level);
        if let Some(level) = level {
            return Ok(at(level.into()));
        }
        let parse = |text: &str, of: &str| {
            // The parser takes any other word for a target. Here, a lone word that is not a level is misspelt.
            let misspelt = |part: &str| !part.contains('=') && part.trim().parse::<LevelFilter>().is_err();
            match text.parse::<Targets>() {
                Ok(filter) if !text.split(',').any(misspelt) => Ok(filter),
                _ => Err(Error::invalid(format!("{of} is {text:?}, which is not a log filter"))
                    .with_hint("a filter is a level such as `debug`, or `sdrun=debug,acme=info`")),
            }
        };
        match (std::env::var("SDRUN_LOG"), configured) {
            (Ok(text), _) if !text.is_empty() => parse(&text, "SDRUN_LOG"),
            (_, Some(text)) => parse(text, "`log` in the config file"),
            _ => Ok(at(LevelFilter::WARN)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }
}

#[derive(Subcommand)]
pub(crate) enum Command {
    Providers(commands::providers::Args),
    Devices(commands::devices::Args),
    Doctor(commands::doctor::Args),
    Runtime(commands::runtime::Args),
    Models(commands::models::Args),
    Inspect(commands::inspect::Args),
    Build(commands::build::Args),
    Generate(Box<commands::generate::Args>),
    Serve(Box<commands::serve::Args>),
    Upscale(commands::upscale::Args),
    Run(commands::run::Args),
    Refit(commands::refit::Args),
    Import(commands::import::Args),
    Verify(commands::verify::Args),
    Bench(Box<commands::bench::Args>),
    Baseline(commands::baseline::Args),
    Tune(commands::bench::TuneArgs),
    Selftest(commands::selftest::Args),
    Cache(commands::cache::Args),
    Completions(commands::completions::Args),
    Man(commands::man::Args),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }
}

//! The command line as clap sees it: one definition gives parser, help, man pages and completions.

use crate::commands;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use tracing::level_filters::LevelFilter;

const ABOUT: &str = "Compile ONNX models with the vendor compiler at hand, keep engines free of weights, and run them \
                     with any weights";

const EXIT_CODES: &str = "\
Exit codes:
    0  done
    1  a comparison, check or measurement says no (verify, doctor, bench, cache verify)
    2  the command line is wrong
    3  a file, model, provider, device or weight does not exist
    4  an input, shape or model is not valid
    5  a provider or its runtime is missing or not usable
    6  not supported: operator, precision, option, file format
    7  out of disk space or memory
    8  permission denied
    9  a time limit ran out
   10  a file is damaged or truncated
   70  internal error, in sdrun or in a vendor's runtime
  130  cancelled (Ctrl-C or SIGTERM)

Environment:
  SDRUN_DATA_DIR           folder of installed runtimes and providers
  SDRUN_CACHE_DIR          folder of cached engines and built-in models
  SDRUN_PROVIDER_FILES     provider manifests or folders of them, instead of the usual places
  SDRUN_ADD_PROVIDER_FILES the same, before the usual places
  SDRUN_PROVIDERS_SELECT   patterns of the provider ids to use, separated by commas
  SDRUN_PROVIDERS_DISABLE  patterns of the provider ids not to use
  SDRUN_WORKER             the sdrun-worker executable
  NO_COLOR                 no colours in log lines";

/// The whole command line.
#[derive(Parser)]
#[command(name = "sdrun", version, about = ABOUT, after_long_help = EXIT_CODES, max_term_width = 100)]
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
    /// Print the result as JSON, or write it to FILE beside the text
    #[arg(long, global = true, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub(crate) json: Option<Option<PathBuf>>,

    /// How much to log on stderr
    #[arg(long, global = true, value_name = "LEVEL", default_value = "warn")]
    pub(crate) log_level: LogLevel,

    /// Look for provider manifests in this file or folder first (repeatable)
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) provider_path: Vec<PathBuf>,

    /// No progress bars and no notes on stderr
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
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
    Inspect(commands::inspect::Args),
    Build(commands::build::Args),
    Run(commands::run::Args),
    Refit(commands::refit::Args),
    Import(commands::import::Args),
    Verify(commands::verify::Args),
    Bench(commands::bench::Args),
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

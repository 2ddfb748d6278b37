//! One file per command: its arguments, its library calls and its output.

pub(crate) mod baseline;
pub(crate) mod bench;
pub(crate) mod build;
pub(crate) mod cache;
pub(crate) mod completions;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod man;
pub(crate) mod models;
pub(crate) mod providers;
pub(crate) mod refit;
pub(crate) mod run;
pub(crate) mod runtime;
pub(crate) mod selftest;
pub(crate) mod serve;
pub(crate) mod upscale;
pub(crate) mod verify;

use crate::{cli::Command, context::Context};
use std::process::ExitCode;

/// Runs a command.
pub(crate) fn run(command: Command, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Command::Providers(args) => providers::run(&args, context),
        Command::Devices(args) => devices::run(&args, context),
        Command::Doctor(args) => doctor::run(&args, context),
        Command::Runtime(args) => runtime::run(&args, context),
        Command::Models(args) => models::run(&args, context),
        Command::Inspect(args) => inspect::run(&args, context),
        Command::Build(args) => build::run(&args, context),
        Command::Generate(args) => generate::run(&args, context),
        Command::Serve(args) => serve::run(&args, context),
        Command::Upscale(args) => upscale::run(&args, context),
        Command::Run(args) => run::run(&args, context),
        Command::Refit(args) => refit::run(&args, context),
        Command::Import(args) => import::run(&args, context),
        Command::Verify(args) => verify::run(&args, context),
        Command::Bench(args) => bench::run(&args, context),
        Command::Baseline(args) => baseline::run(&args, context),
        Command::Tune(args) => bench::tune(&args, context),
        Command::Selftest(args) => selftest::run(&args, context),
        Command::Cache(args) => cache::run(&args, context),
        Command::Completions(args) => completions::run(&args, context),
        Command::Man(args) => man::run(&args, context),
    }
}

//! The sdrun command line: a thin layer over the `sdrun` library. Every command is a file in [`commands`];
//! nothing here does what a program that embeds the library could not.

mod cli;
mod commands;
mod context;
mod exit;
mod files;
mod format;
mod interrupt;
mod job;
mod model;
mod parse;
mod probe;
mod progress;
mod tensors;
mod weights;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::usage(&error),
    };
    let context = context::Context::new(cli.global);
    match commands::run(cli.command, &context) {
        Ok(code) => code,
        Err(error) => exit::report(&error, &context),
    }
}

//! The sdrun command line: a thin layer over the `sdrun` library. Every command is a file in [`commands`]. A program that
//! embeds the library can do all that these do.

mod build;
mod cli;
mod commands;
mod complete;
mod config;
mod context;
mod exit;
mod files;
mod format;
mod interrupt;
mod job;
mod limit;
#[cfg(test)]
mod manual;
mod model;
mod parse;
mod progress;
mod provider;
mod tensors;
mod weights;

use clap::Parser;
use std::{ffi::OsString, path::Path, process::ExitCode};

fn main() -> ExitCode {
    complete::serve();
    // Outputs must not overwrite inputs.
    sdrun::files::remember_inputs();
    let cli = match cli::Cli::try_parse_from(arguments()) {
        Ok(cli) => cli,
        Err(error) => return exit::usage(&error),
    };
    let (context, ready) = context::Context::new(cli.global);
    match ready.map_err(Into::into).and_then(|()| commands::run(cli.command, &context)) {
        Ok(code) => code,
        Err(error) => exit::report(&error, &context),
    }
}

/// The command line. Under the name `sdkit`, under which Easy Diffusion starts its engine, the program serves.
fn arguments() -> Vec<OsString> {
    let mut all: Vec<OsString> = std::env::args_os().collect();
    let name = all.first().and_then(|program| Path::new(program).file_stem());
    if name.is_some_and(|name| name.eq_ignore_ascii_case("sdkit")) {
        all.insert(1, "serve".into());
    }
    all
}

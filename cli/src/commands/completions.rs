//! `sdrun completions`

use crate::{cli::Cli, context::Context};
use clap::CommandFactory;
use clap_complete::Shell;
use std::process::ExitCode;

/// Print completions for a shell
///
/// Example: sdrun completions bash > ~/.local/share/bash-completion/completions/sdrun
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sdrun", &mut script);
    context.print(|out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

//! `sdrun completions`

use crate::{complete, context::Context};
use clap_complete::{Shell, env::Shells};
use sdrun::abi::Error;
use std::process::ExitCode;

/// Print completions for a shell
///
/// The script calls sdrun each time you press Tab, so it completes the models, providers and devices of that moment.
///
/// Example: sdrun completions bash > ~/.local/share/bash-completion/completions/sdrun
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let name = args.shell.to_string();
    let shells = Shells::builtins();
    let shell = shells
        .completer(&name)
        .ok_or_else(|| Error::unsupported(format!("there are no completions for the shell {name}")))?;
    let mut script = Vec::new();
    shell.write_registration(complete::VARIABLE, "sdrun", "sdrun", "sdrun", &mut script)?;
    context.print(|out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

//! `sdrun man`

use crate::{cli::Cli, context::Context, files};
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use sdrun::abi::Error;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Print the manual page, or write the pages of all commands
///
/// Example: sdrun man --dir ~/.local/share/man/man1
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write sdrun.1, sdrun-build.1, … into this folder; creates the folder if necessary
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    match &args.dir {
        None => context.print(|out| page(&command, out))?,
        Some(dir) => {
            std::fs::create_dir_all(dir).map_err(|e| Error::io("make the folder", dir, &e))?;
            write_all(&command, dir)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn write_all(command: &Command, dir: &Path) -> anyhow::Result<()> {
    for sub in command.get_subcommands() {
        write_all(sub, dir)?;
    }
    let name = Man::new(command.clone()).get_filename();
    files::write(&dir.join(name), |out| page(command, out))
}

fn page(command: &Command, mut out: impl Write) -> io::Result<()> {
    Man::new(command.clone()).render(&mut out)
}

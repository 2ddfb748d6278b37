//! `cargo xtask …`: what a contributor does with this repository, each as one command.

mod bench;
mod debian;
mod dist;
mod gpu;
mod header;
mod python;
mod setup;
mod test;
mod workspace;

use anyhow::{Result, bail};
use std::process::ExitCode;
use workspace::Workspace;

const HELP: &str = "\
cargo xtask COMMAND

  demo                       install what is missing, build, run `sdrun bench --all-providers`
  test [--quick]             install what is missing, run every check and test;
                             --quick leaves out the conformance and full-size model tests
  setup                      install what is missing: Python packages, vendor runtimes, test data
  migraphx                   only this: MIGraphX's libraries for tests, out of Debian's packages
  dist [--release|--debug]   build sdrun and its plugins into target/dist (target/dist-test with --debug)
  dist --target TRIPLE       the same for another system, into target/dist-TRIPLE (CONTRIBUTING.md)
  bench [NAME…]              measure: overhead, start, load, open, worker, size, refit, ggml, shapes, tensorrt-rtx,
                             migraphx (default: all); migraphx uses the GPU of a ROCm in SDRUN_MIGRAPHX_DIR
  header                     write include/sdrun_provider.h, the plugin ABI for C, anew
  gpu PROVIDER [DEVICE]      on a machine with the hardware of a provider: what cannot be tested without

Everything goes into the target folder; your home folder is not touched.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        ["demo"] => demo(&Workspace::find()?),
        ["test"] => test::run_all(&Workspace::find()?, test::Extent::Full),
        ["test", "--quick"] => test::run_all(&Workspace::find()?, test::Extent::Quick),
        ["setup"] => {
            let workspace = Workspace::find()?;
            let dist = setup::compilers().and_then(|()| dist::for_use(&workspace))?;
            setup::runtimes(&workspace, &dist)?;
            debian::migraphx(&workspace)?;
            setup::node_tests(&workspace).map(drop)
        }
        ["migraphx"] => debian::migraphx(&Workspace::find()?).map(drop),
        ["dist"] | ["dist", "--release"] => dist::for_use(&Workspace::find()?).map(drop),
        ["dist", "--debug"] => dist::for_tests(&Workspace::find()?).map(drop),
        ["dist", "--target", triple] => dist::for_target(&Workspace::find()?, triple).map(drop),
        ["bench", names @ ..] => bench::run(&Workspace::find()?, names),
        ["header"] => header::write(&Workspace::find()?),
        ["gpu", provider] => gpu::run_all(&Workspace::find()?, provider, None),
        ["gpu", provider, device] => gpu::run_all(&Workspace::find()?, provider, Some(device)),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => bail!("unknown command `{}`\n\n{HELP}", other.join(" ")),
    }
}

/// The first command of the README: from a fresh clone to the table.
fn demo(workspace: &Workspace) -> Result<()> {
    setup::compilers()?;
    let dist = dist::for_use(workspace)?;
    setup::runtimes(workspace, &dist)?;
    workspace::step("Comparing the providers on this machine");
    let mut sdrun = dist.sdrun(workspace);
    sdrun.args(["bench", "--all-providers"]);
    workspace::run(&mut sdrun)
}

//! `cargo xtask …`: one command for each of a contributor's tasks.

mod archive;
mod bench;
mod c_library;
mod cross;
mod debian;
mod dist;
mod fuzz;
mod header;
mod kit;
mod parts;
mod publish;
mod python;
mod setup;
mod test;
mod wheel;
mod wild;
mod workspace;

use anyhow::{Context, Result, bail};
use std::process::ExitCode;
use workspace::Workspace;

const HELP: &str = "\
cargo xtask COMMAND

  demo                       install what is missing, build, draw a picture, and run `sdrun bench --all-providers`
  test [--all]               install what is missing, and run every check and test that is not slow; --all runs the
                             slow ones, too: MIGraphX, valgrind, full-size models, models of others, a kit in a bare folder,
                             Windows in Wine, ARM in QEMU
  test --target TRIPLE       run the tests that work in Wine (x86_64-pc-windows-gnu) or QEMU (aarch64-unknown-linux-gnu)
  setup                      install what is missing: Python packages, vendor runtimes, test data
  migraphx                   install MIGraphX's libraries for tests, from Debian's packages
  dist [--release|--debug]   build sdrun and its plugins into target/dist (target/dist-test with --debug)
  dist --target TRIPLE       build for another system, into target/dist-TRIPLE (see CONTRIBUTING.md)
  archive [TRIPLE]           build like `dist`, and pack what a user downloads into target/archives
  bench [NAME…]              measure: overhead, start, load, open, worker, size, refit, ggml, stable-diffusion.cpp,
                             shapes, generate, tensorrt-rtx, migraphx (default: all); migraphx uses the GPU of a ROCm in
                             SDRUN_MIGRAPHX_DIR
  wheel                      build the Python package `sdrun` into target/wheel
  c-library                  build libsdrun for C and C++ into target/c-library
  semver [REVISION]          compare the public interface of the library's crates with that of a revision (default: the last release)
  header                     regenerate include/sdrun_provider.h (the plugin ABI for C) and include/sdrun.h (for programs)
  fuzz [--minutes N] [NAME…] call the readers of files and messages with made-up inputs, N minutes of processor time (default: 2) for each target
                             (default: all)
  kit [RUNTIME…]             pack sdrun and vendor runtimes (default: all) into target/kit, to run `sdrun selftest` on a machine
                             without a network and without tools

Everything goes into the target folder. Your home folder is not touched.
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
        ["test"] => test::run_all(&Workspace::find()?, test::Extent::Usual),
        ["test", "--all"] => test::run_all(&Workspace::find()?, test::Extent::All),
        ["test", "--target", triple] => test::run_elsewhere(&Workspace::find()?, triple),
        ["setup"] => {
            let workspace = Workspace::find()?;
            let dist = setup::compilers().and_then(|()| dist::for_use(&workspace))?;
            setup::runtimes(&workspace, &dist)?;
            debian::migraphx(&workspace)?;
            setup::node_tests(&workspace).map(drop)
        }
        ["migraphx"] => debian::migraphx(&Workspace::find()?).map(drop),
        ["dist"] | ["dist", "--release"] => dist::for_use(&Workspace::find()?).map(drop),
        ["dist", "--debug"] => {
            let workspace = Workspace::find()?;
            c_library::lay_out(&workspace, &dist::for_tests(&workspace)?).map(drop)
        }
        ["dist", "--target", triple] => dist::for_target(&Workspace::find()?, triple).map(drop),
        ["archive"] => {
            let workspace = Workspace::find()?;
            archive::pack(&workspace, &dist::for_use(&workspace)?.dir, &dist::host_triple()?)
        }
        ["archive", triple] => {
            let workspace = Workspace::find()?;
            archive::pack(&workspace, &dist::for_target(&workspace, triple)?.dir, triple)
        }
        ["bench", names @ ..] => bench::run(&Workspace::find()?, names),
        ["wheel"] => {
            let workspace = Workspace::find()?;
            let dist = setup::compilers().and_then(|()| dist::with_binding(&workspace, "sdrun-python"))?;
            wheel::check_size(&wheel::pack(&workspace, &dist)?)
        }
        ["c-library"] => {
            let workspace = Workspace::find()?;
            let dist = setup::compilers().and_then(|()| dist::with_binding(&workspace, "sdrun-c"))?;
            c_library::lay_out(&workspace, &dist).map(drop)
        }
        ["semver"] => publish::semver(&Workspace::find()?, None),
        ["semver", revision] => publish::semver(&Workspace::find()?, Some(revision)),
        ["header"] => header::write(&Workspace::find()?),
        ["fuzz", "--minutes", minutes, names @ ..] => {
            let minutes = minutes.parse().with_context(|| format!("`{minutes}` is no number of minutes"))?;
            fuzz::fuzz(&Workspace::find()?, names, minutes)
        }
        ["fuzz", names @ ..] => fuzz::fuzz(&Workspace::find()?, names, 2),
        ["kit", names @ ..] => {
            let workspace = Workspace::find()?;
            let dist = setup::compilers().and_then(|()| dist::for_use(&workspace))?;
            setup::runtimes(&workspace, &dist)?;
            let all = setup::names(&dist);
            let kit = kit::pack(&workspace, &dist, if names.is_empty() { &all } else { names })?;
            kit::try_out(&kit, &workspace.target.join("tmp/kit"), &["devices"])
        }
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => bail!("unknown command `{}`\n\n{HELP}", other.join(" ")),
    }
}

/// The first command of the README: from a fresh clone to a picture and the table of providers.
fn demo(workspace: &Workspace) -> Result<()> {
    setup::compilers()?;
    let dist = dist::for_use(workspace)?;
    workspace::step("Drawing a picture with the model that is built in");
    let mut sdrun = dist.sdrun(workspace);
    sdrun.args(["generate", "a red circle left of a blue square", "-o"]).arg(dist.dir.join("picture.png"));
    workspace::run(&mut sdrun)?;
    setup::runtimes(workspace, &dist)?;
    workspace::step("Comparing the providers on this machine");
    let mut sdrun = dist.sdrun(workspace);
    sdrun.args(["bench", "--all-providers"]);
    workspace::run(&mut sdrun)
}

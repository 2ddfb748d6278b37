//! `cargo xtask test`: runs every check and every test in sequence, even after a failure.

use crate::{
    c_library, cross, debian,
    dist::{self, Dist},
    kit, publish,
    python::{Packages, Python},
    setup, wheel, wild,
    workspace::{Workspace, display, output, run, step},
};
use anyhow::{Context, Error, Result, bail};
use sdrun_abi::Manifest;
use std::{
    collections::BTreeSet,
    ffi::OsString,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

/// Version of cargo-deny to install if there is none.
const CARGO_DENY: &str = "0.20.2";

/// How much to run.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Extent {
    /// What takes less than 45 minutes on two cores.
    Usual,
    /// Everything.
    All,
}

/// What only [`Extent::All`] runs.
const SLOW: &str = "MIGraphX (with its libraries from Debian), the C library under valgrind, the Ray cluster, full-size models, models \
     of others, a kit in a bare folder, all tests for Windows in Wine and ARM in QEMU, compiling the packages for crates.io";

/// A small pipeline against PyTorch.
const PIPELINE: [&str; 5] = ["test", "--workspace", "--test=golden", "--", "tiny_sd_agrees"];

/// Environment variables that choose a device of ONNX Runtime for such tests.
fn on_device(id: &'static str) -> [(&'static str, &'static str); 2] {
    [("SDRUN_TEST_PROVIDERS", "onnxruntime"), ("SDRUN_TEST_DEVICE", id)]
}

/// Runs the tests. Fails if anything failed.
pub(crate) fn run_all(workspace: &Workspace, extent: Extent) -> Result<()> {
    let mut tally = Tally::default();
    if let Err(error) = stages(workspace, extent, &mut tally) {
        tally.fail("setup", &error);
    }
    tally.report()
}

/// Runs all stages. Fails if a stage that the others need fails.
fn stages(workspace: &Workspace, extent: Extent, tally: &mut Tally) -> Result<()> {
    tally.check("Formatting", || run(workspace.cargo().args(["fmt", "--all", "--check"])));
    tally.begin("Set-up");
    setup::compilers()?;
    let dist = dist::for_tests(workspace)?;
    c_library::lay_out(workspace, &dist)?;
    setup::runtimes(workspace, &dist)?;
    let node_tests = setup::node_tests(workspace)?;
    let mut environment = environment(workspace, &dist, &node_tests)?;
    let migraphx = match extent {
        Extent::All => debian::migraphx(workspace)?,
        Extent::Usual => None,
    };
    if let Some(dir) = &migraphx {
        let values = [dir.clone().into_os_string(), "1".into()];
        environment.extend(debian::VARIABLES.map(OsString::from).into_iter().zip(values));
    }

    tally.check("Clippy", || {
        run(workspace.cargo().args(["clippy", "--workspace", "--all-targets", "--", "--deny=warnings"]))
    });
    tally.check("Documentation", || {
        let mut cargo = workspace.cargo();
        run(cargo.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "--deny=warnings"))
    });
    tally.check("Dependencies", || dependencies(workspace));
    tally.check("Packages for crates.io", || publish::rehearse(workspace, extent == Extent::All));
    tally.check("Example: a host in twenty lines", || {
        let program = workspace.target.join("debug/examples/embed");
        let mut example = Command::new(program.with_extension(std::env::consts::EXE_EXTENSION));
        run(example.envs(environment.iter().cloned()).env("SDRUN_PROVIDER_FILES", dist.dir.join("providers")))
    });

    tally.check("Example: a host that draws", || {
        let program = workspace.target.join("debug/examples/draw");
        let folder = workspace.target.join("example");
        std::fs::create_dir_all(&folder)?;
        let picture = folder.join("picture.png");
        let _ = std::fs::remove_file(&picture);
        let mut example = Command::new(program.with_extension(std::env::consts::EXE_EXTENSION));
        example.arg("a red circle left of a blue square").current_dir(&folder);
        run(example
            .envs(environment.iter().cloned())
            .env("SDRUN_PROVIDER_FILES", dist.dir.join("providers")))?;
        if !picture.is_file() {
            bail!("it drew no picture");
        }
        Ok(())
    });

    // Always build the whole workspace. Building a part of it selects other features of the dependencies and rebuilds them.
    let tests = |arguments: &[&str]| {
        let mut cargo = workspace.cargo();
        cargo.args(arguments).envs(environment.iter().cloned());
        cargo
    };
    let nodes = |id: &str| {
        let manifest = dist.manifests.iter().find(|manifest| manifest.provider.id == id);
        let mut command = conformance(&dist, manifest.with_context(|| format!("there is no provider {id}"))?);
        command.envs(environment.iter().cloned()).arg("--nodes").arg(&node_tests);
        command.arg("--snapshots").arg(workspace.root.join("tests/conformance"));
        Ok::<_, Error>(command)
    };
    tally.stage("Unit, integration and documentation tests");
    tally.count(&mut tests(&["test", "--workspace", "--no-fail-fast"]))?;
    if migraphx.is_some() {
        tally.stage("MIGraphX");
        tally.count(&mut tests(&["test", "--workspace", "--test=migraphx", "--", "--ignored"]))?;
    }
    tally.begin("Vulkan, set up");
    match setup::vulkan(workspace, &dist) {
        Ok(vulkan) => {
            tally.stage("Devices on Vulkan");
            let only = ["test", "--workspace", "--lib", "devices", "--", "--ignored"];
            tally.count(tests(&only).envs(vulkan.clone()))?;
            tally.stage("Small pipelines on Vulkan");
            let only =
                ["test", "--workspace", "--no-fail-fast", "--test=golden", "--", "agrees_with_pytorch"];
            let device = [("SDRUN_TEST_PROVIDERS", "ggml"), ("SDRUN_TEST_DEVICE", "vulkan:0")];
            tally.count(tests(&only).envs(vulkan).envs(device))?;
        }
        Err(why) => println!("   NOT RUN: {why:#}"),
    }
    tally.begin("WebGPU, set up");
    match setup::webgpu(workspace, &dist) {
        Ok(webgpu) => {
            tally.stage("ONNX Runtime on WebGPU");
            let only = ["test", "--workspace", "--test=webgpu", "--", "--ignored"];
            tally.count(tests(&only).envs(webgpu.clone()))?;
            tally.check("A benchmark on WebGPU", || {
                let to = workspace.target.join("webgpu-bench");
                let mut bench = dist.sdrun(workspace);
                bench.args(["bench", "mobilenet-v2", "--provider=onnxruntime", "--device=webgpu:0"]);
                bench
                    .args(["--min-runs=3", "--max-time=5s", "--no-save", "--export=json", "--export-to"])
                    .arg(&to);
                run(bench.envs(webgpu.clone()))?;
                let report = std::fs::read_to_string(to.with_extension("json"))?;
                if !report.contains("webgpu:0") || !report.contains("\"ok\"") {
                    bail!("the report has no time of webgpu:0");
                }
                Ok(())
            });
            tally.stage("A small pipeline on WebGPU");
            tally.count(tests(&PIPELINE).envs(webgpu.clone()).envs(on_device("webgpu:0")))?;
            tally.stage("ONNX node tests: onnxruntime on webgpu:0");
            let mut nodes = nodes("onnxruntime")?;
            tally.count(nodes.args(["--device", "webgpu:0"]).envs(webgpu))?;
        }
        Err(why) => println!("   NOT RUN: {why:#}"),
    }
    tally.begin("ONNX Runtime on OpenVINO, set up");
    match setup::openvino(workspace, &dist) {
        Ok(openvino) => {
            tally.stage("ONNX Runtime on OpenVINO");
            let only = ["test", "--workspace", "--test=openvino", "--", "--ignored"];
            tally.count(tests(&only).envs(openvino.clone()))?;
            tally.stage("A small pipeline in ONNX Runtime on OpenVINO");
            tally.count(tests(&PIPELINE).envs(openvino.clone()).envs(on_device("openvino:cpu")))?;
            tally.stage("ONNX node tests: onnxruntime on openvino:cpu");
            let mut nodes = nodes("onnxruntime")?;
            tally.count(nodes.args(["--device", "openvino:cpu"]).envs(openvino))?;
        }
        Err(why) => println!("   NOT RUN: {why:#}"),
    }
    let tested = |manifest: &&Manifest| manifest.provider.id != "migraphx" || migraphx.is_some();
    for manifest in dist.manifests.iter().filter(tested) {
        tally.stage(&format!("Provider specification: {}", manifest.provider.id));
        tally.count(conformance(&dist, manifest).envs(environment.iter().cloned()).arg("--spec"))?;
    }
    tally.stage("ONNX node tests: shape inference and evaluation on the host");
    let host = ["test", "--workspace", "--test=node_tests", "--", "--ignored"];
    tally.count(&mut tests(&host))?;
    tally.stage("ONNX node tests with one thing changed");
    let changed = ["test", "--workspace", "--test=mutated_nodes", "--", "--ignored"];
    tally.count(&mut tests(&changed))?;
    for manifest in dist.manifests.iter().filter(tested) {
        tally.stage(&format!("ONNX node tests: {}", manifest.provider.id));
        tally.count(&mut nodes(&manifest.provider.id)?)?;
    }
    tally.stage("ONNX node tests with baked engines: openvino");
    tally.count(nodes("openvino")?.arg("--baked"))?;
    tally.check("Python package", || {
        let wheel = wheel::pack(workspace, &dist)?;
        wheel::try_out(workspace, &wheel, &dist.program("sdrun"))
    });
    match clients(workspace) {
        Ok((name, python)) => {
            tally.stage("Clients of the server, and pages in a browser");
            let only = [
                "test",
                "--workspace",
                "--no-fail-fast",
                "--test=serve",
                "--test=bench_reports",
                "--",
                "--ignored",
                "--nocapture",
            ];
            tally.count(tests(&only).env(name, python))?;
        }
        Err(error) => tally.fail("Clients of the server, and pages in a browser", &error),
    }
    for triple in [cross::WINDOWS, cross::ARM] {
        if !cfg!(target_os = "linux") {
            tally.not_run.insert(format!("tests on {triple}, need Linux with Wine and QEMU"));
        } else if let Err(error) = elsewhere(workspace, triple, extent, tally) {
            tally.fail(&format!("Tests on {triple}"), &error);
        }
    }
    if extent == Extent::Usual {
        tally.not_run.insert(format!("{SLOW}: slow, run by `cargo xtask test --all`"));
        return Ok(());
    }
    match setup::valgrind() {
        Ok(()) => {
            tally.stage("The C library under valgrind");
            tally.count(&mut tests(&["test", "--workspace", "--test=c_library", "--", "--ignored"]))?;
        }
        Err(error) => tally.fail("The C library under valgrind", &error),
    }
    tally.check("A Ray cluster of two workers", || wheel::try_cluster(workspace, &dist.program("sdrun")));
    tally.check("A kit in a bare folder", || {
        let kit = kit::pack(workspace, &dist, &["onnxruntime"])?;
        let scratch = workspace.target.join("tmp/kit");
        kit::try_out(&kit, &scratch, &["selftest", "-p", "onnxruntime", "--time", "90s"])?;
        let report = std::fs::read_to_string(scratch.join("home/sdrun-selftest.html"))?;
        if !report.contains("<h2>onnxruntime on ") || report.contains("✗ failed") {
            bail!("the report lacks the provider or has a failure");
        }
        Ok(())
    });
    match wild::models(workspace) {
        Ok(models) => {
            tally.stage("Models of others");
            let only = ["test", "--workspace", "--test=wild", "--", "--ignored", "--nocapture"];
            tally.count(tests(&only).env(wild::VARIABLE, models))?;
        }
        Err(error) => tally.fail("Models of others", &error),
    }
    tally.stage("Full-size models");
    let only = ["test", "--workspace", "--no-fail-fast", "--test=golden", "--", "--ignored", "full_size"];
    tally.count(&mut tests(&only))?;
    Ok(())
}

/// Runs the tests that need no vendor's runtime for another target, in Wine or QEMU where this machine cannot.
pub(crate) fn run_elsewhere(workspace: &Workspace, triple: &str) -> Result<()> {
    let mut tally = Tally::default();
    if let Err(error) = elsewhere(workspace, triple, Extent::All, &mut tally) {
        tally.fail("setup", &error);
    }
    tally.report()
}

/// Packages to test on other targets: those on which their tests always run, then those on which they only run with `--all`. ggml's C++ takes minutes to compile, so it
/// is left to the latter. What reads graphs and weights does the same on any system, but not on any processor.
const ELSEWHERE: [(&str, &[&str], &[&str]); 10] = [
    ("sdrun-abi", &[cross::WINDOWS, cross::ARM], &[]),
    ("sdrun-files", &[cross::WINDOWS, cross::ARM], &[]),
    ("sdrun-graph", &[cross::ARM], &[cross::WINDOWS]),
    ("sdrun-weights", &[cross::ARM], &[cross::WINDOWS]),
    ("sdrun", &[cross::WINDOWS], &[]),
    ("sdrun-cli", &[cross::WINDOWS], &[]),
    ("sdrun-provider-common", &[], &[cross::WINDOWS, cross::ARM]),
    ("sdrun-provider-ggml", &[], &[cross::WINDOWS, cross::ARM]),
    ("sdrun-diffusion", &[], &[cross::WINDOWS]),
    ("sdrun-server", &[], &[cross::WINDOWS]),
];

/// Runs tests for another target.
fn elsewhere(workspace: &Workspace, triple: &str, extent: Extent, tally: &mut Tally) -> Result<()> {
    tally.begin(&format!("{triple}, set up"));
    let environment = cross::runner(workspace, triple)?;
    // QEMU runs a program, but not the programs that this one starts.
    let starts_programs = triple != cross::ARM || cfg!(target_arch = "aarch64");
    let cargo = |command| {
        let mut cargo = cross::cargo(workspace, triple, command)?;
        if extent == Extent::Usual {
            // Compiling takes most of the time: a third of what it takes with optimisation.
            cargo.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0");
        }
        Ok::<_, Error>(cargo)
    };
    if starts_programs {
        run(cargo("build")?.args(["--package=sdrun-mock-plugin", "--lib", "--examples"]))?;
    }
    let mut tests = cargo("test")?;
    tests.args(["--no-fail-fast", "--lib"]).envs(environment);
    tests.env("SDRUN_TEST_LIBRARIES", workspace.target.join(triple).join("debug"));
    for (package, always, with_all) in ELSEWHERE {
        if always.contains(&triple) || extent == Extent::All && with_all.contains(&triple) {
            tests.arg(format!("--package={package}"));
        }
    }
    if starts_programs {
        tests.arg("--bins");
        let of_programs = ["worker", "engines", "config", "exit", "help", "models", "output", "providers"];
        let slow = (extent == Extent::All).then_some("worker_faults");
        tests.args(of_programs.into_iter().chain(slow).map(|name| format!("--test={name}")));
    }
    tally.stage(&format!("Tests on {triple}"));
    tally.count(&mut tests)
}

/// What the tests of the server's clients need: Python with the clients, and a browser.
fn clients(workspace: &Workspace) -> Result<(&'static str, PathBuf)> {
    step("Clients of the server, set up");
    let python = Python::with(workspace, Packages::Serve)?;
    let (browser, driver) = (Path::new("/usr/bin/chromium"), Path::new("/usr/bin/chromedriver"));
    if !browser.exists() || !driver.exists() {
        setup::apt_install(&["chromium", "chromium-driver"], "there is no browser for the server's page")?;
    }
    Ok(("SDRUN_SERVE_PYTHON", python.program("python")))
}

/// The models in the package `onnx`.
fn light_models(python: &Python) -> Result<PathBuf> {
    let package = output(python.python().args(["-c", "import onnx; print(onnx.__file__)"]))?;
    let package = Path::new(package.trim()).parent().context("the package `onnx` has no folder")?;
    Ok(package.join("backend/test/data/light"))
}

/// Environment variables that tell tests where to find what they need.
pub(crate) fn environment(
    workspace: &Workspace,
    dist: &Dist,
    node_tests: &Path,
) -> Result<Vec<(OsString, OsString)>> {
    let python = Python::with(workspace, Packages::Test)?;
    let mut environment: Vec<(OsString, OsString)> = vec![
        ("SDRUN_DIST".into(), dist.dir.clone().into()),
        ("SDRUN_WORKER".into(), dist.program("sdrun-worker").into()),
        ("SDRUN_DATA_DIR".into(), workspace.data().into()),
        ("SDRUN_CACHE_DIR".into(), workspace.cache().into()),
        ("SDRUN_NODE_TESTS".into(), node_tests.into()),
        ("SDRUN_PYTHON".into(), python.program("python").into()),
        ("SDRUN_LIGHT_MODELS".into(), light_models(&python)?.into()),
    ];
    environment.extend(setup::runtime_dirs(workspace, dist).into_iter().map(|(k, v)| (k.into(), v.into())));
    Ok(environment)
}

fn conformance(dist: &Dist, manifest: &Manifest) -> Command {
    let id = &manifest.provider.id;
    let mut command = Command::new(dist.program("sdrun-conformance"));
    command.arg("--plugin").arg(dist.dir.join("providers").join(id).join(Manifest::file_name(id)));
    command
}

/// Checks licences, sources and banned crates. The advisory database is on GitHub, so `cargo deny check advisories` is left to
/// the user.
fn dependencies(workspace: &Workspace) -> Result<()> {
    let deny = setup::cargo_tool(workspace, "cargo-deny", CARGO_DENY)?;
    run(Command::new(deny).current_dir(&workspace.root).args(["check", "bans", "licenses", "sources"]))
}

/// The results so far.
struct Tally {
    started: Instant,
    passed: usize,
    failed: usize,
    /// Names of failed tests and stages.
    failures: Vec<String>,
    /// The output of failed tests, which the harness repeats after the last test.
    words: Vec<String>,
    /// Whether the harness is repeating that output.
    repeating: bool,
    /// Ignored tests with their reasons.
    not_run: BTreeSet<String>,
    /// Stages and their start times.
    stages: Vec<(String, Instant)>,
}

impl Default for Tally {
    fn default() -> Self {
        Tally {
            started: Instant::now(),
            passed: 0,
            failed: 0,
            failures: Vec::new(),
            words: Vec::new(),
            repeating: false,
            not_run: BTreeSet::new(),
            stages: Vec::new(),
        }
    }
}

impl Tally {
    /// Begins a stage and ends the one before it.
    fn begin(&mut self, name: &str) {
        self.stages.push((name.into(), Instant::now()));
    }

    /// The same, with a heading.
    fn stage(&mut self, name: &str) {
        step(name);
        self.begin(name);
    }

    /// Runs a stage that passes or fails as a whole.
    fn check(&mut self, name: &str, stage: impl FnOnce() -> Result<()>) {
        self.stage(name);
        match stage() {
            Ok(()) => self.passed += 1,
            Err(error) => self.fail(name, &error),
        }
    }

    fn fail(&mut self, name: &str, error: &Error) {
        println!("FAILED: {error:#}");
        self.failed += 1;
        self.failures.push(name.into());
    }

    /// Runs tests, shows their output and adds up their result lines.
    fn count(&mut self, command: &mut Command) -> Result<()> {
        println!("   {}", display(command));
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start `{}`", display(command)))?;
        let output = child.stdout.take().context("the tests have an output")?;
        let before = self.failed;
        for line in BufReader::new(output).split(b'\n') {
            // Test output need not be valid text.
            let line = String::from_utf8_lossy(&line?).into_owned();
            println!("{line}");
            self.read(&line);
        }
        let status = child.wait()?;
        // A runner that died or could not start its tests prints no result line.
        if !status.success() && self.failed == before {
            self.failed += 1;
            self.failures.push(format!("`{}` ({status})", display(command)));
        }
        Ok(())
    }

    fn read(&mut self, line: &str) {
        if let Some((passed, failed)) = result_line(line) {
            self.passed += passed;
            self.failed += failed;
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some((name, why)) = test.split_once(" ... ignored") {
                self.not_run.insert(format!("{name}{why}"));
            } else if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.failures.push(name.into());
            }
        }
        // Rust's harness prints `failures:`, the output of each test, and again `failures:` with the names.
        if line == "failures:" {
            self.repeating = !self.repeating;
        } else if self.repeating && !line.is_empty() {
            self.words.push(line.into());
        }
        if line.starts_with("test result: ") {
            self.repeating = false;
        }
    }

    /// The duration of each stage; the last one ends at `now`.
    fn seconds(&self, now: Instant) -> Vec<String> {
        let ends = self.stages.iter().skip(1).map(|(_, began)| *began).chain([now]);
        let stages = self.stages.iter().zip(ends);
        stages.map(|((name, began), end)| format!("{:>6} s  {name}", (end - *began).as_secs())).collect()
    }

    fn report(&self) -> Result<()> {
        step(&format!("Finished in {} minutes", self.started.elapsed().as_secs().div_ceil(60)));
        for line in self.seconds(Instant::now()) {
            println!("{line}");
        }
        for name in &self.not_run {
            println!("skipped, or run by a later stage: {name}");
        }
        for name in &self.failures {
            println!("failed: {name}");
        }
        for line in &self.words {
            println!("  {line}");
        }
        println!("{} passed, {} failed", self.passed, self.failed);
        if self.failed > 0 {
            bail!("some checks or tests failed");
        }
        Ok(())
    }
}

/// Passed and failed from `test result: ok. 3 passed; 0 failed; …`, the last line of Rust's test harness. The conformance runner
/// writes the same line.
fn result_line(line: &str) -> Option<(usize, usize)> {
    let counts = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let number = |what: &str| -> Option<usize> {
        counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
    };
    Some((number("passed")?, number("failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn adds_up_result_lines() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "test a::d ... ignored, needs a file",
            "failures:",
            "",
            "---- a::c stdout ----",
            "4 is not 5",
            "",
            "failures:",
            "    a::c",
            "",
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: ok. 12 passed; 0 failed; 3 expected failures",
        ] {
            tally.read(line);
        }
        assert_eq!((tally.passed, tally.failed), (13, 1));
        assert_eq!(tally.failures, ["a::c"]);
        assert_eq!(tally.words, ["---- a::c stdout ----", "4 is not 5"]);
        assert!(tally.not_run.contains("a::d, needs a file"));
        assert!(tally.report().is_err());
    }

    #[test]
    fn stages_end_where_the_next_one_begins() {
        let mut tally = Tally::default();
        ["one", "two"].into_iter().for_each(|name| tally.begin(name));
        let began = tally.stages[0].1;
        tally.stages[1].1 = began + Duration::from_secs(70);
        let seconds = tally.seconds(began + Duration::from_secs(100));
        assert_eq!(seconds, ["    70 s  one", "    30 s  two"]);
    }

    #[test]
    fn a_runner_that_dies_counts_as_failed() {
        let mut tally = Tally::default();
        tally.count(Command::new("sh").args(["-c", "exit 3"])).unwrap();
        assert_eq!((tally.passed, tally.failed), (0, 1));
        assert!(tally.failures[0].contains("exit 3"));
    }
}

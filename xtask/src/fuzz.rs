//! `cargo xtask fuzz`: calls the functions of `fuzz/` with made-up inputs under libFuzzer.

use crate::workspace::{Workspace, output, run, step};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// The coverage that libFuzzer reads, as cargo-fuzz builds it, and the checks of a debug build.
const FLAGS: [&str; 8] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
    "-Coverflow-checks",
];
/// The longest that a function may take for an input, in seconds.
const SLOWEST: u32 = 5;
/// The most memory that it may take, in megabytes.
const MOST_MEMORY: u32 = 1024;
/// libFuzzer's exit code after SIGINT.
const INTERRUPTED: i32 = 72;

/// Runs each of these targets (all, if none is named) for so many minutes of processor time, as many at a time as there are processors.
pub(crate) fn fuzz(workspace: &Workspace, names: &[&str], minutes: u32) -> Result<()> {
    let known = targets(workspace)?;
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(*name)) {
        bail!("there is no target `{unknown}`; there are {}", known.join(", "));
    }
    let names = if names.is_empty() { &known } else { names };
    step("Building the targets");
    let triple = output(Command::new("rustc").args(["--print", "host-tuple"]))?;
    let built = workspace.target.join("fuzz");
    let mut cargo = workspace.cargo();
    cargo.args(["build", "--release", "--package=sdrun-fuzz", "--bins", "--features=fuzzer"]);
    // It takes longer than it saves here.
    cargo.env("CARGO_PROFILE_RELEASE_LTO", "off");
    // Only with a target do the flags leave out build scripts and macros.
    cargo.args(["--target", triple.trim(), "--target-dir"]).arg(&built);
    run(cargo.env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\u{1f}")))?;

    step(&format!("Fuzzing, {minutes} minutes of processor time for each target"));
    let program = built.join(triple.trim()).join("release/sdrun-fuzz");
    let left = Mutex::new(names.iter());
    let failed = Mutex::new(Vec::new());
    let next = || left.lock().ok().and_then(|mut left| left.next());
    let work = || {
        while let Some(name) = next() {
            match one(workspace, &program, name, minutes) {
                Ok(line) => println!("   {name:<14} {line}"),
                Err(error) => {
                    println!("   {name:<14} {error:#}");
                    failed.lock().iter_mut().for_each(|failed| failed.push(*name));
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, Into::into) {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    ensure!(failed.is_empty(), "findings in {}", failed.join(", "));
    Ok(())
}

/// Names of the targets.
fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let folder = workspace.root.join("fuzz/seeds");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Runs one target. Returns how often it was called and how much of the code was reached.
fn one(workspace: &Workspace, program: &Path, name: &str, minutes: u32) -> Result<String> {
    let folder = workspace.target.join("fuzz");
    let [corpus, findings] = ["corpus", "findings"].map(|kind| folder.join(kind).join(name));
    for folder in [&corpus, &findings] {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let log = folder.join(name).with_extension("log");
    let mut command = Command::new(program);
    command
        .env("SDRUN_FUZZ_TARGET", name)
        .arg(&corpus)
        .arg(workspace.root.join("fuzz/seeds").join(name))
        .arg(format!("-timeout={SLOWEST}"))
        .arg(format!("-rss_limit_mb={MOST_MEMORY}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .args(["-print_final_stats=1", "-reload=0"]);
    // Most targets write a file for each input. On a disk, that takes nine tenths of the time.
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        command.env("TMPDIR", memory);
    }
    let file = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).spawn();
    let mut child = child.with_context(|| format!("cannot start {}", program.display()))?;
    let (status, took) = interrupt_after(&mut child, Duration::from_secs(u64::from(minutes) * 60))?;
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    if status.code() != Some(INTERRUPTED) {
        bail!(
            "FOUND A FAULT ({status}): {} says what, the input is in {}",
            log.display(),
            findings.display()
        );
    }
    let stat = |key: &str| {
        let line = text.lines().rev().find_map(|line| line.strip_prefix(key));
        line.map_or("?", str::trim).to_string()
    };
    let covered = text.lines().rev().find_map(|line| line.split_once("cov: ")?.1.split(' ').next());
    let inputs: u64 =
        stat("stat::number_of_executed_units:").parse().context("libFuzzer printed no count")?;
    Ok(format!(
        "{inputs:>12} inputs, {:>7} a second, {:>6} branches reached, {:>5} MB",
        inputs / took.as_secs().max(1),
        covered.unwrap_or("?"),
        stat("stat::peak_rss_mb:")
    ))
}

/// Waits until a process has ended, and interrupts it when it has used this much processor time. Returns what it used. On other
/// systems than Linux, wall-clock time counts.
fn interrupt_after(child: &mut Child, limit: Duration) -> Result<(ExitStatus, Duration)> {
    let started = Instant::now();
    let used = |id: u32| {
        let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // Fields 14 and 15: time of all threads in user and kernel mode, in 1/100 s. Count after the name, which may contain spaces.
        let fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
        let ticks: Option<u64> = fields.take(2).map(|ticks| ticks.parse::<u64>().ok()).sum();
        Some(Duration::from_millis(ticks? * 10))
    };
    let mut took = Duration::ZERO;
    let mut interrupted = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, took));
        }
        took = used(child.id()).unwrap_or_else(|| started.elapsed()).max(took);
        if took >= limit && !interrupted {
            output(Command::new("kill").args(["-INT", &child.id().to_string()]))?;
            interrupted = true;
        }
        thread::sleep(Duration::from_secs(1));
    }
}

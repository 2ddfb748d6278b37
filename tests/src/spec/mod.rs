//! Checks of any plugin against the rules of `docs/provider-spec.md` that are visible from outside.
//!
//! Every check runs in its own process. So a plugin that crashes or hangs fails only that check, and `init`, which runs once per
//! process, can be checked in several ways.

mod engines;
mod entry;
mod fixture;
mod raw;
mod sessions;
mod subject;

pub use subject::Subject;

use std::{
    fs::File,
    io::{Read, Seek},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Time limit for one check.
const LIMIT: Duration = Duration::from_secs(60);

/// The result of a check: nothing, or how the plugin breaks the rule.
pub type Verdict = Result<(), String>;

/// The result of a check as the exit code of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ending {
    /// The plugin follows the rule.
    Kept = 0,
    /// The plugin breaks the rule.
    Broken = 1,
    /// The check needs hardware that is not in this machine.
    NotRun = 77,
}

/// One check.
pub struct Check {
    /// Short name.
    pub name: &'static str,
    /// Numbers of the rules in `docs/provider-spec.md`.
    pub rules: &'static str,
    run: fn(&Subject) -> Verdict,
}

macro_rules! checks {
    ($($module:ident::$name:ident $rules:literal)*) => {
        /// Every check, in the order of the specification.
        pub const CHECKS: &[Check] =
            &[$(Check { name: stringify!($name), rules: $rules, run: $module::$name }),*];
    };
}

checks! {
    entry::manifest_describes_the_library "1, 2"
    entry::loads_without_its_runtime "3"
    entry::negotiates_the_version "4"
    entry::identity_is_that_of_the_manifest "5"
    entry::short_argument_structs_are_refused "6"
    entry::a_newer_host_is_served "6, 7"
    entry::calls_before_init_are_errors "9, 12"
    entry::an_absent_runtime_is_an_error "11"
    entry::a_garbage_runtime_is_an_error "11"
    entry::a_truncated_runtime_is_an_error "11"
    entry::init_reports_the_runtime "12"
    entry::a_second_init_does_no_harm "12"
    entry::devices_are_unique_and_stable "13"
    entry::an_unknown_device_is_refused "13, 14"
    entry::capabilities_make_sense "14"
    engines::an_unknown_operator_is_named "15"
    engines::a_damaged_model_is_refused "15"
    engines::an_assessment_lists_every_node "29"
    engines::a_precision_that_is_not_offered_is_refused "14, 15"
    engines::every_precision_offered_computes "14, 15"
    engines::unknown_options_are_refused "16"
    engines::engine_information_is_that_of_the_graph "17"
    engines::a_stored_engine_is_the_same_engine "18"
    engines::a_damaged_engine_is_refused "18"
    engines::a_foreign_compatibility_string_is_judged "18"
    engines::baked_engines_need_no_weights "17, 18"
    sessions::a_missing_weight_is_named "19"
    sessions::weights_may_lie_in_files "19"
    sessions::refit_is_exact "21"
    sessions::a_failed_refit_changes_nothing "21"
    sessions::every_output_is_filled "22"
    sessions::the_host_refuses_wrong_inputs "23"
    sessions::cancelling_a_build_works_as_declared "24"
    sessions::cancelling_a_run_works_as_declared "24"
    sessions::unknown_memory_is_not_zero "26"
    sessions::calls_come_from_any_thread "30"
    sessions::a_session_outlives_its_engine "32"
    sessions::tensors_stay_on_the_device "27, 28"
}

/// The small ONNX model that the checks build: inputs `x` f32 `[2, 4]` and `r` f32 `[2, 3]`, weights inside,
/// outputs `y`, `t` and `c` f32 `[2, 3]`.
pub fn small_model() -> Vec<u8> {
    prost::Message::encode_to_vec(&fixture::model())
}

/// Runs one check in this process and prints how the plugin breaks the rule, if it does. A check that ends with the error that the
/// provider's first device gives for its absence counts as not run.
pub fn run_one(manifest: &Path, name: &str) -> Ending {
    let Some(check) = CHECKS.iter().find(|c| c.name == name) else {
        println!("there is no check called {name}");
        return Ending::Broken;
    };
    let absent = |why: &str| {
        let absent = Subject::open(manifest).ok()?.absent()?;
        why.contains(&absent).then_some(absent)
    };
    match Subject::open(manifest).and_then(|subject| (check.run)(&subject)) {
        Ok(()) => Ending::Kept,
        Err(why) => match absent(&why) {
            Some(absent) => {
                println!("{absent}");
                Ending::NotRun
            }
            None => {
                println!("{why}");
                Ending::Broken
            }
        },
    }
}

/// Runs one check in its own process. Returns `Ok` with a reason if it was not run.
pub fn run_isolated(manifest: &Path, check: &Check) -> Result<Option<String>, String> {
    let system = |e: std::io::Error| format!("cannot start the check: {e}");
    let program = std::env::current_exe().map_err(system)?;
    let mut output = tempfile::tempfile().map_err(system)?;
    let errors = output.try_clone().map_err(system)?;
    // Start it like a worker: a runtime may bring its own C library.
    let runtime_dir = Subject::open(manifest)?.runtime_dir().ok().flatten();
    let mut command = runtime_dir.map_or_else(Vec::new, |dir| sdrun::worker::loader_of(&dir));
    command.push(program.into());
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .arg("--plugin")
        .arg(manifest)
        .args(["--check", check.name])
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(system)?)
        .stderr(errors)
        .spawn()
        .map_err(system)?;
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(system)? {
            break status;
        }
        if Instant::now() > deadline {
            // Neither can fail in a way that matters: the child is ours and has not been reaped.
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it took longer than {} seconds{}", LIMIT.as_secs(), words(&mut output)));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    match status.code() {
        Some(0) => Ok(None),
        Some(1) => Err(words(&mut output).trim_start_matches(": ").to_string()),
        Some(77) => Ok(Some(words(&mut output).trim_start_matches(": ").to_string())),
        _ => Err(format!("the process ended with {status}{}", words(&mut output))),
    }
}

/// The end of a check's output.
fn words(output: &mut File) -> String {
    let mut text = Vec::new();
    if output.rewind().and_then(|()| output.read_to_end(&mut text)).is_err() {
        return String::new();
    }
    let text = String::from_utf8_lossy(&text);
    let mut lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).rev().take(5).collect();
    lines.reverse();
    if lines.is_empty() { String::new() } else { format!(": {}", lines.join(" | ")) }
}

/// `Err` with a formatted text unless the condition holds.
macro_rules! require {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
use require;

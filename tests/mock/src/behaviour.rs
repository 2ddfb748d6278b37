use sdrun_abi::{Error, ErrorCode, Result};
use std::{fs, path::PathBuf, process::Command, str::FromStr, sync::OnceLock, time::Duration};

/// The calls in which a fault can occur.
pub(crate) const CALLS: [&str; 14] = [
    "init",
    "devices",
    "capabilities",
    "build",
    "load",
    "check",
    "assess",
    "serialize",
    "session",
    "refit",
    "run",
    "read",
    "memory",
    "drop",
];

/// What the provider does wrong.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Behaviour {
    /// `good`: nothing goes wrong.
    #[default]
    Good,
    /// `<fault>_in_<call>`: one call goes wrong.
    In(Fault, String),
    /// `print_to_stdout`: every call prints to stdout, including bytes that look like messages.
    PrintToStdout,
    /// `huge_log`: a build logs and prints megabytes.
    HugeLog,
    /// `slow_progress`: a build reports progress and a run polls, each until it is cancelled or a minute has passed.
    SlowProgress,
    /// `ignores_cancel`: a build calls the host a hundred times more, whatever it answers, and succeeds.
    IgnoresCancel,
    /// `hold_weights`: holds every weight until it has all of them.
    HoldWeights,
    /// `parallel_weights`: pulls weights from four threads.
    ParallelWeights,
    /// `encoded_weights`: takes weights in blocks of the encoding `mock_f64` (one f64 per element) if it can.
    EncodedWeights,
    /// `lying_refit`: claims to have taken all weights without asking for any.
    LyingRefit,
    /// `wrong_output_shape`: outputs are one element longer than the engine information says.
    WrongOutputShape,
    /// `huge_output`: asks for an output of 2^60 bytes.
    HugeOutput,
    /// `no_output`: a run succeeds without outputs.
    NoOutput,
    /// `asks_twice`: a run asks for output buffers twice.
    AsksTwice,
    /// `garbage_info`: the engine information is not JSON.
    GarbageInfo,
    /// `null_engine`: a build succeeds but returns no engine.
    NullEngine,
}

/// What happens in one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// `error`: an error with every field filled in.
    Error,
    /// `stderr_then_error`: an error without a message; the reason is on stderr.
    StderrThenError,
    /// `panic`
    Panic,
    /// `hang`
    Hang,
    /// `helper_then_hang`: starts a child process, prints its id on stderr and hangs.
    HelperThenHang,
    /// `abort`
    Abort,
    /// `stderr_then_abort`
    StderrThenAbort,
    /// `exit`: ends the process with code 7.
    Exit,
}

impl FromStr for Behaviour {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        if let Some((fault, call)) = name.split_once("_in_") {
            let fault = match fault {
                "error" => Some(Fault::Error),
                "stderr_then_error" => Some(Fault::StderrThenError),
                "panic" => Some(Fault::Panic),
                "hang" => Some(Fault::Hang),
                "helper_then_hang" => Some(Fault::HelperThenHang),
                "abort" => Some(Fault::Abort),
                "stderr_then_abort" => Some(Fault::StderrThenAbort),
                "exit" => Some(Fault::Exit),
                _ => None,
            };
            if let Some(fault) = fault.filter(|_| CALLS.contains(&call)) {
                return Ok(Behaviour::In(fault, call.into()));
            }
        }
        Ok(match name {
            "good" => Behaviour::Good,
            "print_to_stdout" => Behaviour::PrintToStdout,
            "huge_log" => Behaviour::HugeLog,
            "slow_progress" => Behaviour::SlowProgress,
            "ignores_cancel" => Behaviour::IgnoresCancel,
            "hold_weights" => Behaviour::HoldWeights,
            "parallel_weights" => Behaviour::ParallelWeights,
            "encoded_weights" => Behaviour::EncodedWeights,
            "lying_refit" => Behaviour::LyingRefit,
            "wrong_output_shape" => Behaviour::WrongOutputShape,
            "huge_output" => Behaviour::HugeOutput,
            "no_output" => Behaviour::NoOutput,
            "asks_twice" => Behaviour::AsksTwice,
            "garbage_info" => Behaviour::GarbageInfo,
            "null_engine" => Behaviour::NullEngine,
            _ => return Err(Error::invalid(format!("the mock provider has no behaviour `{name}`"))),
        })
    }
}

static CHOSEN: OnceLock<Behaviour> = OnceLock::new();

/// Chooses the behaviour, once.
pub(crate) fn choose(behaviour: Behaviour) {
    CHOSEN.get_or_init(|| behaviour);
}

/// The behaviour chosen by `init`.
pub(crate) fn chosen() -> &'static Behaviour {
    CHOSEN.get().unwrap_or(&Behaviour::Good)
}

static DRIVER: OnceLock<PathBuf> = OnceLock::new();

/// Chooses the file that has the version of the driver, once.
pub(crate) fn choose_driver(file: PathBuf) {
    DRIVER.get_or_init(|| file);
}

/// The driver that is installed now. Empty if none was chosen.
pub(crate) fn driver() -> String {
    DRIVER.get().and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default()
}

/// Runs at the start of every call.
pub(crate) fn enter(call: &str) -> Result<()> {
    match chosen() {
        Behaviour::In(fault, place) if place == call => fault.happen(call),
        Behaviour::PrintToStdout => {
            println!("entering {call}");
            crate::table::print_in_c();
            print!("\u{4}\0\0\0null{{\"done\":{{}}}}");
            Ok(())
        }
        _ => Ok(()),
    }
}

pub(crate) fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

impl Fault {
    fn happen(self, call: &str) -> Result<()> {
        match self {
            Fault::Error => Err(Error {
                code: ErrorCode::ResourceExhausted,
                message: format!("no memory in {call}"),
                hint: Some("buy more".into()),
                native_code: Some("MOCK_OOM".into()),
                file: Some("/no/such/file".into()),
            }),
            Fault::StderrThenError => {
                eprintln!("mock: file.cpp:12: the reason for {call}");
                Err(Error::new(ErrorCode::Unknown, "status 4"))
            }
            Fault::Panic => panic!("the mock panics in {call}"),
            Fault::Hang => hang(),
            Fault::HelperThenHang => {
                // A worker waits for its host. This one holds both ends of its pipe, so only a kill ends it.
                let helper = std::io::pipe().and_then(|(input, output)| {
                    Command::new(std::env::current_exe()?).arg("none").stdin(input).stdout(output).spawn()
                });
                if let Ok(helper) = helper {
                    eprintln!("helper {}", helper.id());
                }
                hang()
            }
            Fault::Abort => std::process::abort(),
            Fault::StderrThenAbort => {
                eprintln!("mock: assertion failed in {call}: 1 == 2");
                std::process::abort()
            }
            Fault::Exit => std::process::exit(7),
        }
    }
}

//! Runs another program to its end.

use sdrun_abi::{Flow, Host};
use std::{
    io::{self, Read},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// How often to check whether the host cancels.
const POLL: Duration = Duration::from_millis(50);

/// A program that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Whether it succeeded.
    pub success: bool,
    /// What it wrote to its standard error.
    pub stderr: String,
}

impl Ended {
    /// The last three lines of its standard error, on one line.
    pub fn last_words(&self) -> String {
        let mut last: Vec<&str> =
            self.stderr.lines().rev().filter(|line| !line.trim().is_empty()).take(3).collect();
        last.reverse();
        last.join(" | ")
    }
}

/// Runs a program without input, and reports `phase` as progress. If the host cancels, kills the program and returns `None`.
///
/// # Errors
/// The program cannot be started or waited for.
pub fn run_tool(mut command: Command, phase: &str, host: &dyn Host) -> io::Result<Option<Ended>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut pipe = child.stderr.take();
    // A separate thread reads the pipe, because a full pipe would block the program.
    let words = thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = &mut pipe {
            // After a read error, the bytes read so far are all we can report.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    });
    loop {
        if let Some(status) = child.try_wait()? {
            let stderr = words.join().unwrap_or_default();
            return Ok(Some(Ended { success: status.success(), stderr }));
        }
        if host.progress(phase, 0, 0) == Flow::Cancel || host.cancelled() {
            // It may have exited in the meantime.
            let _ = child.kill();
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

//! Runs one provider in a process of its own; started by the sdrun library, never by hand.

use std::process::ExitCode;

fn main() -> ExitCode {
    sdrun::worker::worker_main()
}

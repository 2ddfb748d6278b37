//! Runs one provider in its own process. The sdrun library starts it; users do not.

use std::process::ExitCode;

fn main() -> ExitCode {
    sdrun::worker::worker_main()
}

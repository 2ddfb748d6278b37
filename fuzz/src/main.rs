//! Calls the target that `SDRUN_FUZZ_TARGET` names under libFuzzer. One program for all of them: linking takes minutes.

#![no_main]

use std::sync::LazyLock;

/// # Panics
/// If the variable names no target.
static TARGET: LazyLock<&sdrun_fuzz::Target> = LazyLock::new(|| {
    // libFuzzer's panic hook aborts even if the code under test catches the panic. Without the hook, uncaught panics still abort.
    drop(std::panic::take_hook());
    let name = std::env::var("SDRUN_FUZZ_TARGET").unwrap_or_default();
    sdrun_fuzz::target(&name)
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));

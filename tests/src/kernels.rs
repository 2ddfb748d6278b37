//! What the stand-in for the HIP runtime (`tests/fake-hip`) counted.

use sdrun::{Session, Tensors, abi::NoHost};
use std::{collections::BTreeMap, path::PathBuf};

/// Kernels by name, and how often a run launches each.
pub type Kernels = BTreeMap<String, usize>;

/// What the last run of anything launched; `None` without `FAKE_HIP_COUNTS` or before the first run.
pub fn launched() -> Option<Kernels> {
    let text = std::fs::read_to_string(PathBuf::from(std::env::var_os("FAKE_HIP_COUNTS")?)).ok()?;
    let last = text.trim_end().strip_suffix("--")?.trim_end();
    let mut kernels = Kernels::new();
    for name in last.rsplit("--\n").next()?.lines() {
        *kernels.entry(name.to_string()).or_default() += 1;
    }
    Some(kernels)
}

/// What every run of a session launches.
///
/// # Errors
/// Those of [`Session::run`].
pub fn of_a_run(session: &mut Session, given: &Tensors) -> sdrun::Result<Option<Kernels>> {
    // Before the first run ends, kernels that were tried while compiling are counted with it.
    for _ in 0..2 {
        session.run(given, &NoHost)?;
    }
    Ok(launched())
}

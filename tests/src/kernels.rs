//! The kernels counted by the stand-in for the HIP runtime (`tests/fake-hip`).

use sdrun::{Session, Tensors, abi::NoHost};
use std::{collections::BTreeMap, path::PathBuf};

/// Kernels by name, with the number of launches per run.
pub type Kernels = BTreeMap<String, usize>;

/// The kernels launched by the last run; `None` without `FAKE_HIP_COUNTS` or before the first run.
pub fn launched() -> Option<Kernels> {
    let text = std::fs::read_to_string(PathBuf::from(std::env::var_os("FAKE_HIP_COUNTS")?)).ok()?;
    let last = text.trim_end().strip_suffix("--")?.trim_end();
    let mut kernels = Kernels::new();
    for name in last.rsplit("--\n").next()?.lines() {
        *kernels.entry(name.to_string()).or_default() += 1;
    }
    Some(kernels)
}

/// The kernels launched by every run of a session.
///
/// # Errors
/// Those of [`Session::run`].
pub fn of_a_run(session: &mut Session, given: &Tensors) -> sdrun::Result<Option<Kernels>> {
    // The count of the first run includes kernels that were tried during compilation.
    for _ in 0..2 {
        session.run(given, &NoHost)?;
    }
    Ok(launched())
}

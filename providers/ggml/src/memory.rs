//! Checks that main memory has room before it is filled. Linux overcommits: an allocation succeeds, and the process is killed
//! later, when it writes more than there is.

use sdrun_abi::{Error, ErrorCode, Result};
use sysinfo::System;

/// Smaller requests are not checked.
const WORTH_ASKING: u64 = 16 << 20;

/// Checks that `bytes` more can be used.
///
/// # Errors
/// `ResourceExhausted` with `hint` if `what` needs more than is free.
pub(crate) fn ensure(bytes: u64, what: &str, hint: &str) -> Result<()> {
    if bytes < WORTH_ASKING {
        return Ok(());
    }
    let Some(free) = free().filter(|free| bytes > *free) else { return Ok(()) };
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let (needed, free) = (gigabytes(bytes), gigabytes(free));
    let message = format!("{what} need {needed:.1} GB of memory, and {free:.1} are free");
    Err(Error::new(ErrorCode::ResourceExhausted, message).with_hint(hint))
}

/// Bytes of memory and swap that are available, within the limits of a container. `None` if the system does not say.
fn free() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let mut free = system.available_memory();
    if free == 0 {
        return None;
    }
    if let Some(limits) = system.cgroup_limits() {
        // The limit also counts cached file pages, which the system drops when memory is needed. So only RSS counts here.
        free = free.min(limits.total_memory.saturating_sub(limits.rss));
    }
    Some(free.saturating_add(system.free_swap()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ffi::{Home, Type},
        form::Form,
        kernels::Panels,
        tests::cpu,
        weights::Bank,
    };
    use sdrun_abi::{DType, NoHost, Weight, WeightSource, WeightSpec};

    struct Unasked;

    impl WeightSource for Unasked {
        fn get(&self, name: &str) -> Result<Weight<'_>> {
            panic!("asked for {name} without memory for it")
        }
    }

    #[test]
    fn weights_larger_than_memory_are_refused_before_any_is_read() {
        let columns = (free().unwrap() >> 12) as usize + (1 << 18);
        let spec = WeightSpec { name: "w".into(), dtype: DType::F32, shape: vec![1024, columns] };
        let mut bank = Bank::new(cpu(), &[spec], std::sync::Arc::default());
        let panels = Panels::columns([1, 1024, columns], 16);
        let form = Form::Panels { panels, transposed: false, blocks: None };
        bank.place("w", form, Type::F32, Home::Host).unwrap();
        let error = bank.load(&Unasked, &NoHost, 2).unwrap_err();
        assert_eq!(error.code, ErrorCode::ResourceExhausted, "{error}");
        assert!(error.message.contains("GB of memory") && error.hint.is_some(), "{error}");
        assert!(ensure(1, "", "").is_ok());
    }
}

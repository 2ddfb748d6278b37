//! Whether main memory has room for what is about to be filled. Linux promises more than there is and ends a process once it
//! is used, so that asking for memory does not tell.

use sdrun_abi::{Error, ErrorCode, Result};
use sysinfo::System;

/// Less than this is not asked for.
const WORTH_ASKING: u64 = 16 << 20;

/// Whether `bytes` more can be used.
///
/// # Errors
/// `ResourceExhausted`, with `hint`, where `what` needs more than there is.
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

/// Bytes of memory and swap that can be used without taking any from others, within the limits of a container; `None` where
/// the system does not tell.
fn free() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let mut free = system.available_memory();
    if free == 0 {
        return None;
    }
    if let Some(limits) = system.cgroup_limits() {
        // Its pages of files, which a limit counts too, are let go when memory is needed.
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

//! The user's build options.

use crate::{devices::Target, ffi::CompileOptions};
use sdrun_abi::{BuildSpec, Error, Result};

/// Reads the options of a build. Every option is off by default.
pub(crate) fn read(spec: &BuildSpec, target: &Target) -> Result<CompileOptions> {
    if spec.threads == Some(0) {
        return Err(Error::invalid("the number of threads must be at least 1"));
    }
    let mut options = CompileOptions { fast_math: false, exhaustive_tune: false, offload_copy: false };
    for (key, value) in &spec.options {
        let on = match value.as_str() {
            "on" => true,
            "off" => false,
            _ => {
                return Err(Error::invalid(format!("migraphx does not know {key}={value}"))
                    .with_hint(format!("use `{key}=on` or `{key}=off`")));
            }
        };
        match key.as_str() {
            "fast_math" => options.fast_math = on,
            "exhaustive_tune" => options.exhaustive_tune = on,
            "offload_copy" => options.offload_copy = on,
            _ => {
                return Err(Error::invalid(format!("migraphx has no option `{key}`"))
                    .with_hint("migraphx takes `fast_math`, `exhaustive_tune` and `offload_copy`"));
            }
        }
    }
    if target.hip.is_none() && (options.exhaustive_tune || options.offload_copy) {
        return Err(Error::invalid("`exhaustive_tune` and `offload_copy` are for GPUs")
            .with_hint(format!("leave them out for `{}`", target.device.id)));
    }
    Ok(options)
}

/// The enabled options as text, for the compatibility string of an engine.
pub(crate) fn text(options: CompileOptions) -> String {
    let all = [
        ("fast_math", options.fast_math),
        ("exhaustive_tune", options.exhaustive_tune),
        ("offload_copy", options.offload_copy),
    ];
    let on: Vec<&str> = all.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    on.join(",")
}

//! Programs: parsing, compiling, storing and running a graph.

use super::{
    api::{Api, Object, Owned, c_path, c_string, call},
    shape::Layout,
};
use sdrun_abi::{Error, ErrorCode, Result};
use std::{ffi::CStr, path::Path, ptr};

/// Compile options. We set all of them explicitly instead of relying on the library's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompileOptions {
    /// Approximate transcendental functions.
    pub(crate) fast_math: bool,
    /// Measure every available kernel for each operation.
    pub(crate) exhaustive_tune: bool,
    /// Copy all parameters to the device and the results back in every run.
    pub(crate) offload_copy: bool,
}

/// A graph as MIGraphX holds it. It has a single scratch buffer, so only one run at a time may use it.
pub(crate) struct Program(Owned);

impl Program {
    /// Reads the ONNX model in `file`. Pass the shape of every input: the library uses 1 for unknown dimensions.
    pub(crate) fn parse(api: &Api, file: &Path, inputs: &[(&str, &[usize])]) -> Result<Self> {
        let options = Owned::new(&api.onnx_options_destroy, |out| {
            call!(api, onnx_options_create(out), || "make options".into())
        })?;
        for (name, shape) in inputs {
            let c_name = c_string(name)?;
            call!(
                api,
                onnx_options_set_input_parameter_shape(
                    options.object(),
                    c_name.as_ptr(),
                    shape.as_ptr(),
                    shape.len()
                ),
                || format!("set the shape of input `{name}`")
            )?;
        }
        let path = c_path(file)?;
        let parse = || {
            Owned::new(&api.program_destroy, |out| {
                call!(api, parse_onnx(out, path.as_ptr(), options.object()), || "read this graph".into())
            })
        };
        parse().map(Program).map_err(|error| {
            // Parse again to get the operator's name from the library's output. It is now known not to crash here.
            let words = words_of(|| drop(parse()));
            let message =
                if words.is_empty() { error.message } else { format!("{}: {words}", error.message) };
            Error { code: ErrorCode::Unimplemented, message, ..error }
        })
    }

    /// Compiles the program, once, for the target `ref` or `gpu`. `gpu` means the current device of this thread.
    pub(crate) fn compile(&mut self, api: &Api, target: &str, options: CompileOptions) -> Result<()> {
        let c_target = c_string(target)?;
        let c_target = Owned::new(&api.target_destroy, |out| {
            call!(api, target_create(out, c_target.as_ptr()), || format!("load its target `{target}`"))
        })?;
        let doing = || "set a compile option".to_string();
        let list =
            Owned::new(&api.compile_options_destroy, |out| call!(api, compile_options_create(out), doing))?;
        call!(api, compile_options_set_offload_copy(list.object(), options.offload_copy), doing)?;
        call!(api, compile_options_set_fast_math(list.object(), options.fast_math), doing)?;
        if options.exhaustive_tune {
            call!(api, compile_options_set_exhaustive_tune_flag(list.object(), true), doing)?;
        }
        call!(api, program_compile(self.0.object(), c_target.object(), list.object()), || format!(
            "compile this graph for `{target}`"
        ))
    }

    /// Writes the program to `file`, replacing it.
    pub(crate) fn save(&self, api: &Api, file: &Path) -> Result<()> {
        self.write(api, file, "msgpack")
    }

    fn write(&self, api: &Api, file: &Path, format: &str) -> Result<()> {
        let options = file_options(api, format)?;
        let path = c_path(file)?;
        call!(api, save(self.0.object(), path.as_ptr(), options.object()), || format!(
            "write a program to {}",
            file.display()
        ))
    }

    /// Reads a program that [`save`](Program::save) wrote.
    pub(crate) fn load(api: &Api, file: &Path) -> Result<Self> {
        let options = file_options(api, "msgpack")?;
        let path = c_path(file)?;
        let program = Owned::new(&api.program_destroy, |out| {
            call!(api, load(out, path.as_ptr(), options.object()), || "read a compiled program".into())
        })?;
        Ok(Program(program))
    }

    /// Writes an empty program as JSON to `file`. Only this output contains the library's version.
    pub(crate) fn write_empty_json(api: &Api, file: &Path) -> Result<()> {
        let program = Owned::new(&api.program_destroy, |out| {
            call!(api, program_create(out), || "make a program".into())
        })?;
        Program(program).write(api, file, "json")
    }

    /// Names and layouts of the parameters, in no particular order.
    pub(crate) fn parameters(&self, api: &Api) -> Result<Vec<(String, Layout)>> {
        let doing = || "list the parameters".to_string();
        let shapes = Owned::new(&api.program_parameter_shapes_destroy, |out| {
            call!(api, program_get_parameter_shapes(out, self.0.object()), doing)
        })?;
        let mut count = 0;
        call!(api, program_parameter_shapes_size(&mut count, shapes.object()), doing)?;
        let mut names = vec![ptr::null(); count];
        if count > 0 {
            call!(api, program_parameter_shapes_names(names.as_mut_ptr(), shapes.object()), doing)?;
        }
        names
            .into_iter()
            .map(|name| {
                let mut shape = ptr::null_mut();
                call!(api, program_parameter_shapes_get(&mut shape, shapes.object(), name), doing)?;
                // SAFETY: the library lends NUL-terminated names that live as long as `shapes`.
                let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
                Ok((name, api.layout(shape)?))
            })
            .collect()
    }

    /// Layouts of the outputs; `None` for an output whose shape depends on values.
    pub(crate) fn outputs(&self, api: &Api) -> Result<Vec<Option<Layout>>> {
        let doing = || "list the outputs".to_string();
        let shapes = Owned::new(&api.shapes_destroy, |out| {
            call!(api, program_get_output_shapes(out, self.0.object()), doing)
        })?;
        let mut count = 0;
        call!(api, shapes_size(&mut count, shapes.object()), doing)?;
        (0..count)
            .map(|index| {
                let mut shape = ptr::null_mut();
                call!(api, shapes_get(&mut shape, shapes.object(), index), doing)?;
                api.layout_if_fixed(shape)
            })
            .collect()
    }

    pub(super) fn object(&self) -> Object {
        self.0.object()
    }
}

/// Returns what the library writes to stderr while `body` runs, since it reports the reason for an error only there.
/// The text is on one line, without source locations of the library. Empty if stderr cannot be captured. Do not use
/// this for calls that may crash: their last output would be lost.
fn words_of(body: impl FnOnce()) -> String {
    #[cfg(unix)]
    {
        use std::io::{Read, Seek};
        let caught = || -> std::io::Result<String> {
            let mut file = tempfile::tempfile()?;
            let stderr = rustix::io::dup(std::io::stderr())?;
            rustix::stdio::dup2_stderr(&file)?;
            body();
            rustix::stdio::dup2_stderr(stderr)?;
            let mut text = Vec::new();
            file.rewind()?;
            file.read_to_end(&mut text)?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        caught().map(|text| tidy(&text)).unwrap_or_default()
    }
    #[cfg(not(unix))]
    {
        let _ = body;
        String::new()
    }
}

/// Removes source locations. Of `migraphx_parse_onnx: Error: src/onnx/onnx_parser.cpp:576: parse_graph: Unknown
/// operator: Foo`, it keeps the part from `parse_graph` on.
#[cfg(any(unix, test))]
fn tidy(words: &str) -> String {
    let lines = words.lines().map(str::trim).filter(|line| !line.is_empty()).map(|line| {
        let line = line.split_once(": Error: ").map_or(line, |(_, line)| line);
        match line.split_once(": ") {
            Some((place, line)) if place.contains(".cpp:") || place.contains(".hpp:") => line,
            _ => line,
        }
    });
    lines.collect::<Vec<_>>().join("; ")
}

fn file_options(api: &Api, format: &str) -> Result<Owned> {
    let doing = || "set a file option".to_string();
    let options = Owned::new(&api.file_options_destroy, |out| call!(api, file_options_create(out), doing))?;
    let format = c_string(format)?;
    call!(api, file_options_set_file_format(options.object(), format.as_ptr()), doing)?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_librarys_words_are_caught_and_tidied() {
        let line =
            "migraphx_parse_onnx: Error: src/onnx/onnx_parser.cpp:576: parse_graph: Unknown operator: Foo";
        assert_eq!(
            tidy(&format!("\n{line}\nsecond: line\n")),
            "parse_graph: Unknown operator: Foo; second: line"
        );
        assert_eq!(tidy(""), "");
    }
}

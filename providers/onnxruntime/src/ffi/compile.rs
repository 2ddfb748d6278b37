use super::{
    c_string, check, handle,
    memory::Allocated,
    session::{Options, Settings, alone},
};
use crate::watch::cancellable;
use ort::{AsPointer, environment::Environment, sys};
use sdrun_abi::{Error, Host, Result, Weight};
use std::{
    ffi::CStr,
    ptr::{self, NonNull},
    slice,
};

/// Options of a compilation, released when dropped.
struct Compilation {
    api: &'static sys::OrtCompileApi,
    options: NonNull<sys::OrtModelCompilationOptions>,
}

impl Drop for Compilation {
    fn drop(&mut self) {
        // SAFETY: released once, by the owner.
        unsafe { (self.api.ReleaseModelCompilationOptions)(self.options.as_ptr()) }
    }
}

/// Compiles a model with weights like those of [`OrtSession::create`](super::OrtSession::create) for the device in `settings`. Returns a
/// model in ONNX, in which nodes `EPContext` hold what the execution provider compiled.
pub(crate) fn compile(
    environment: &Environment,
    onnx: &[u8],
    lent: &[(&str, Weight<'_>)],
    settings: &Settings<'_>,
    host: &dyn Host,
) -> Result<Vec<u8>> {
    let options = Options::new(settings, environment)?;
    let _lent = options.lend(lent)?;
    let canceller = options.canceller();
    cancellable(
        Some(host),
        || canceller.cancel(),
        || {
            let _alone = settings.device.map(|_| alone());
            run(environment, onnx, &options)
        },
    )
}

fn run(environment: &Environment, onnx: &[u8], options: &Options) -> Result<Vec<u8>> {
    // SAFETY: the call takes no arguments. The table is static, or null in a build that cannot compile.
    let api = unsafe { (ort::api().GetCompileApi)().as_ref() }
        .ok_or_else(|| Error::unsupported("this build of ONNX Runtime cannot compile models"))?;
    let mut compilation = ptr::null_mut();
    // SAFETY: environment and options are alive; the out pointer is valid.
    let status = unsafe {
        (api.CreateModelCompilationOptionsFromSessionOptions)(
            environment.ptr(),
            options.as_ptr(),
            &mut compilation,
        )
    };
    check(status, "prepare a compilation")?;
    let compilation = Compilation { api, options: handle(compilation)? };
    let mut found = Allocated::none()?;
    let mut length = 0;
    let raw = compilation.options.as_ptr();
    // SAFETY: the options are alive. The model and the two out pointers outlive the compilation, which is done in here.
    unsafe {
        let status =
            (api.ModelCompilationOptions_SetInputModelFromBuffer)(raw, onnx.as_ptr().cast(), onnx.len());
        check(status, "take the model")?;
        check(
            (api.ModelCompilationOptions_SetEpContextEmbedMode)(raw, true),
            "put what it compiles into the model",
        )?;
        let status = (api.ModelCompilationOptions_SetOutputModelBuffer)(
            raw,
            found.allocator(),
            found.place(),
            &mut length,
        );
        check(status, "return the compiled model")?;
        check((api.CompileModel)(environment.ptr(), raw), "compile the model")?;
    }
    let bytes = found.memory().cast::<u8>();
    if bytes.is_null() {
        return Err(Error::internal("ONNX Runtime compiled a model and returned none"));
    }
    // SAFETY: the call returned memory of this length, which is copied before it is freed.
    Ok(unsafe { slice::from_raw_parts(bytes, length) }.to_vec())
}

/// What an execution provider says of the machines that can use a model it has compiled; `None` if it compiled nothing in it.
pub(crate) fn compatibility(onnx: &[u8], provider: &str) -> Result<Option<String>> {
    let provider = c_string(provider)?;
    let mut found = Allocated::none()?;
    // SAFETY: pointer and length describe a live slice; the name is a C string; the out pointer is valid.
    let status = unsafe {
        (ort::api().GetCompatibilityInfoFromModelBytes)(
            onnx.as_ptr().cast(),
            onnx.len(),
            provider.as_ptr(),
            found.allocator(),
            found.place().cast(),
        )
    };
    check(status, "tell what a compiled model needs")?;
    let text = found.memory().cast();
    // SAFETY: a C string, which is copied before it is freed.
    let copy = || unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    Ok((!text.is_null()).then(copy))
}

/// How well a device can use a model that needs this: a number of `OrtCompiledModelCompatibility`.
pub(super) fn fit(device: NonNull<sys::OrtEpDevice>, needs: &str) -> Result<i32> {
    let needs = c_string(needs)?;
    let devices = [device.as_ptr().cast_const()];
    // Not the enum, for which a number of a newer version would be undefined behaviour.
    let mut found: i32 = 0;
    // SAFETY: the array has one device, which lives on; the text is a C string; the out pointer is valid.
    let status = unsafe {
        (ort::api().GetModelCompatibilityForEpDevices)(
            devices.as_ptr(),
            1,
            needs.as_ptr(),
            (&raw mut found).cast(),
        )
    };
    check(status, "tell whether the device can use a compiled model")?;
    Ok(found)
}

use super::{
    c_string, check,
    devices::{Assigned, EpDevice, assigned},
    handle,
    tensor::Tensor,
};
use crate::watch::cancellable;
use ort::{AsPointer, environment::Environment, session::RunOptions, sys};
use sdrun_abi::{Error, Host, OutputSpec, Result, TensorSpec, TensorView, Weight};
use std::{
    ffi::{CStr, CString, c_char, c_int},
    ptr::{self, NonNull},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// `OrtSessionOptions`.
pub(super) struct Options(NonNull<sys::OrtSessionOptions>);

/// Settings of a session.
pub(crate) struct Settings<'a> {
    /// Number of threads within an operator. Operators run one after another.
    pub(crate) threads: usize,
    /// Enables all graph optimisations, or none.
    pub(crate) optimise: bool,
    /// The folder of external data that is not lent from memory.
    pub(crate) folder: Option<&'a str>,
    /// The device of an extension; without one, everything runs on the CPU.
    pub(crate) device: Option<&'a EpDevice>,
    /// Settings of the device's execution provider.
    pub(crate) options: &'a [(&'static str, String)],
}

/// Key of that folder in `onnxruntime_session_options_config_keys.h`.
const FOLDER_KEY: &CStr = c"session.model_external_initializers_file_folder_path";
/// Key for the accuracy of products with dequantized weights, and its value for f32. By default ONNX Runtime also
/// quantizes the other operand to 8 bits, which causes errors of 1 %.
const DEQUANTIZED_PRODUCTS: (&CStr, &CStr) = (c"session.qdq_matmulnbits_accuracy_level", c"1");

impl Options {
    /// ONNX Runtime adds the CPU's execution provider itself.
    pub(super) fn new(settings: &Settings<'_>, environment: &Environment) -> Result<Self> {
        let api = ort::api();
        let threads = settings.threads;
        let threads = c_int::try_from(threads)
            .map_err(|_| Error::invalid(format!("{threads} threads are too many")))?;
        let folder = settings.folder.map(c_string).transpose()?;
        let level = match settings.optimise {
            true => sys::GraphOptimizationLevel::ORT_ENABLE_ALL,
            false => sys::GraphOptimizationLevel::ORT_DISABLE_ALL,
        };
        let mut options = ptr::null_mut();
        // SAFETY: the out pointer is valid; the options live until dropped.
        unsafe {
            check((api.CreateSessionOptions)(&mut options), "create session options")?;
            let options = Options(handle(options)?);
            check((api.SetIntraOpNumThreads)(options.0.as_ptr(), threads), "set the number of threads")?;
            check((api.SetInterOpNumThreads)(options.0.as_ptr(), 1), "set the number of threads")?;
            check(
                (api.SetSessionGraphOptimizationLevel)(options.0.as_ptr(), level),
                "set the optimisation level",
            )?;
            let (key, value) = DEQUANTIZED_PRODUCTS;
            let status = (api.AddSessionConfigEntry)(options.0.as_ptr(), key.as_ptr(), value.as_ptr());
            check(status, "set the accuracy of products")?;
            if let Some(folder) = &folder {
                let status =
                    (api.AddSessionConfigEntry)(options.0.as_ptr(), FOLDER_KEY.as_ptr(), folder.as_ptr());
                check(status, "take the folder of the weights")?;
            }
            if let Some(device) = settings.device {
                device.append(options.0, environment, settings.options)?;
            }
            Ok(options)
        }
    }

    /// Lends weights by name. What this returns must live until ONNX Runtime has read the model: by then it has copied or repacked what it
    /// keeps.
    pub(super) fn lend<'w>(&self, lent: &'w [(&str, Weight<'_>)]) -> Result<Lent<'w>> {
        let names = Names::new(lent.iter().map(|(name, _)| *name))?;
        let values = lent
            .iter()
            .map(|(_, weight)| Tensor::reading(weight.dtype, &weight.shape, weight.data()))
            .collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const sys::OrtValue> = values.iter().map(|v| v.as_ptr().cast_const()).collect();
        if !pointers.is_empty() {
            // SAFETY: both arrays have as many valid entries as stated. The options hold references to the values, whose memory
            // the caller lends.
            let status = unsafe {
                (ort::api().AddExternalInitializers)(
                    self.0.as_ptr(),
                    names.pointers.as_ptr(),
                    pointers.as_ptr(),
                    pointers.len(),
                )
            };
            check(status, "take the weights")?;
        }
        Ok(Lent { _names: names, _values: values })
    }

    pub(super) fn as_ptr(&self) -> *const sys::OrtSessionOptions {
        self.0.as_ptr()
    }

    pub(super) fn canceller(&self) -> Canceller {
        Canceller(self.0)
    }
}

/// Weights that options refer to.
pub(super) struct Lent<'w> {
    _names: Names,
    _values: Vec<Tensor<'w>>,
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: released once.
        unsafe { (ort::api().ReleaseSessionOptions)(self.0.as_ptr()) }
    }
}

/// Cancels the creation of a session from any thread.
pub(crate) struct Canceller(NonNull<sys::OrtSessionOptions>);

// SAFETY: it sets an atomic flag in the options, which is meant to be set from other threads.
unsafe impl Sync for Canceller {}

impl Canceller {
    pub(crate) fn cancel(&self) {
        // SAFETY: `OrtSession::create` keeps the options alive while it lends the canceller.
        let status = unsafe { (ort::api().SessionOptionsSetLoadCancellationFlag)(self.0.as_ptr(), true) };
        // If the flag cannot be set, the creation runs to its end.
        let _ = check(status, "cancel");
    }
}

/// The options of a session's runs.
pub(super) struct Terminable(RunOptions);

impl Terminable {
    /// Makes a run with these options, which the host can stop if one is given.
    pub(super) fn terminable<T>(
        &self,
        host: Option<&dyn Host>,
        run: impl FnOnce(*const sys::OrtRunOptions) -> Result<T>,
    ) -> Result<T> {
        let Terminable(options) = self;
        options.unterminate().map_err(|e| super::from_ort(e, "prepare a run"))?;
        // If the flag cannot be set, the run continues to its end.
        cancellable(host, || drop(options.terminate()), || run(options.ptr()))
    }
}

/// Names in the form that the C API takes.
struct Names {
    _strings: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Names {
    fn new<'a>(names: impl Iterator<Item = &'a str>) -> Result<Self> {
        let strings = names.map(c_string).collect::<Result<Vec<_>>>()?;
        // Moving the vector does not invalidate the pointers, because they point to the strings' own memory.
        let pointers = strings.iter().map(|s| s.as_ptr()).collect();
        Ok(Names { _strings: strings, pointers })
    }
}

/// `OrtSession` with the names of its inputs and outputs.
pub(crate) struct OrtSession {
    session: Arc<Owned>,
    pub(super) run_options: Terminable,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
    input_names: Names,
    output_names: Names,
    _environment: Environment,
}

// SAFETY: any thread may use a session (onnxruntime_c_api.h), and methods that run it take `&mut self`. The name
// pointers point into strings that the session owns.
unsafe impl Send for OrtSession {}

impl OrtSession {
    /// Creates a session for a model whose weights are external data. `lent` provides weights by name. They are needed
    /// only until this returns, because ONNX Runtime copies or repacks what it keeps. The other weights come from
    /// files in the folder of `settings`.
    pub(crate) fn create(
        environment: &Environment,
        onnx: &[u8],
        (inputs, outputs): (&[TensorSpec], &[TensorSpec]),
        lent: &[(&str, Weight<'_>)],
        settings: &Settings<'_>,
        host: &dyn Host,
    ) -> Result<Self> {
        let api = ort::api();
        let options = Options::new(settings, environment)?;
        let _lent = options.lend(lent)?;
        let extension = settings.device.is_some();
        let canceller = options.canceller();
        let create = || {
            let _alone = extension.then(alone);
            let mut session = ptr::null_mut();
            // SAFETY: environment and options are alive. Pointer and length describe a live slice, which the call
            // copies. The out pointer is valid.
            let status = unsafe {
                (api.CreateSessionFromArray)(
                    environment.ptr(),
                    onnx.as_ptr().cast(),
                    onnx.len(),
                    options.0.as_ptr(),
                    &mut session,
                )
            };
            check(status, "create a session")?;
            Ok(Arc::new(Owned { session: handle(session)?, extension }))
        };
        let session = cancellable(Some(host), || canceller.cancel(), create)?;
        let run_options =
            Terminable(RunOptions::new().map_err(|e| super::from_ort(e, "create run options"))?);
        let (input_names, output_names) =
            (Names::new(inputs.iter().map(|i| &*i.name))?, Names::new(outputs.iter().map(|o| &*o.name))?);
        Ok(OrtSession {
            session,
            run_options,
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            input_names,
            output_names,
            _environment: environment.clone(),
        })
    }

    /// Runs one inference from `inputs` into `outputs`, both without a copy.
    pub(crate) fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut [(&OutputSpec, &mut [u8])],
        host: Option<&dyn Host>,
    ) -> Result<()> {
        let inputs = self.wrap_inputs(inputs)?;
        if outputs.len() != self.outputs.len() {
            return Err(count_mismatch("outputs", self.outputs.len(), outputs.len()));
        }
        let outputs = outputs
            .iter_mut()
            .map(|(spec, buffer)| Tensor::writing(spec.dtype, &spec.shape, buffer))
            .collect::<Result<Vec<_>>>()?;
        let mut pointers: Vec<*mut sys::OrtValue> = outputs.iter().map(Tensor::as_ptr).collect();
        self.call(&inputs, &mut pointers, host)
    }

    /// Runs one inference into ONNX Runtime's own memory, for outputs whose shapes are known only after the run.
    /// `deliver` receives their types and shapes and returns buffers to copy them to.
    pub(crate) fn run_into_own<'s>(
        &mut self,
        inputs: &[TensorView<'_>],
        host: Option<&dyn Host>,
        deliver: impl FnOnce(&[OutputSpec]) -> Result<Vec<&'s mut [u8]>>,
    ) -> Result<()> {
        let inputs = self.wrap_inputs(inputs)?;
        let mut pointers = vec![ptr::null_mut(); self.outputs.len()];
        let result = self.call(&inputs, &mut pointers, host);
        // SAFETY: the call created every non-null value for us, even if it failed afterwards.
        let values: Vec<Tensor<'_>> =
            pointers.into_iter().filter_map(NonNull::new).map(|p| unsafe { Tensor::from_raw(p) }).collect();
        result?;
        let specs = values
            .iter()
            .zip(&self.outputs)
            .map(|(value, spec)| Ok(OutputSpec { dtype: spec.dtype, shape: value.shape()? }))
            .collect::<Result<Vec<_>>>()?;
        let buffers = deliver(&specs)?;
        if buffers.len() != values.len() {
            return Err(count_mismatch("outputs", values.len(), buffers.len()));
        }
        for ((value, buffer), spec) in values.iter().zip(buffers).zip(&self.outputs) {
            value.copy_to(buffer, &spec.name)?;
        }
        Ok(())
    }

    /// Keeps the session while this lives.
    pub(super) fn shared(&self) -> Arc<Owned> {
        self.session.clone()
    }

    pub(super) fn as_ptr(&self) -> *mut sys::OrtSession {
        self.session.session.as_ptr()
    }

    pub(super) fn input_names(&self) -> &[*const c_char] {
        &self.input_names.pointers
    }

    pub(super) fn output_names(&self) -> &[*const c_char] {
        &self.output_names.pointers
    }

    pub(super) fn outputs(&self) -> &[TensorSpec] {
        &self.outputs
    }

    /// Which execution provider runs which node. Recorded only for sessions on the device of an extension.
    pub(crate) fn assigned(&self) -> Result<Vec<Assigned>> {
        assigned(self.session.session)
    }

    fn wrap_inputs<'a>(&self, inputs: &[TensorView<'a>]) -> Result<Vec<Tensor<'a>>> {
        if inputs.len() != self.inputs.len() {
            return Err(count_mismatch("inputs", self.inputs.len(), inputs.len()));
        }
        inputs.iter().map(|i| Tensor::reading(i.dtype, i.shape, i.data)).collect()
    }

    fn call(
        &mut self,
        inputs: &[Tensor<'_>],
        outputs: &mut [*mut sys::OrtValue],
        host: Option<&dyn Host>,
    ) -> Result<()> {
        let api = ort::api();
        let inputs: Vec<*const sys::OrtValue> = inputs.iter().map(|i| i.as_ptr().cast_const()).collect();
        let (session, extension) = (self.as_ptr(), self.session.extension);
        let (input_names, output_names) = (self.input_names(), self.output_names());
        self.run_options.terminable(host, |options| {
            let _alone = extension.then(alone);
            // SAFETY: the session is alive, and only this call uses it (`&mut self`). Every array has as many valid
            // entries as stated, and those of the outputs are null or live values.
            let status = unsafe {
                (api.Run)(
                    session,
                    options,
                    input_names.as_ptr(),
                    inputs.as_ptr(),
                    inputs.len(),
                    output_names.as_ptr(),
                    outputs.len(),
                    outputs.as_mut_ptr(),
                )
            };
            check(status, "run the model")
        })
    }
}

/// A session, released when dropped.
pub(super) struct Owned {
    session: NonNull<sys::OrtSession>,
    /// Whether it uses the device of an extension.
    extension: bool,
}

// SAFETY: any thread may use and release a session (onnxruntime_c_api.h). Only `OrtSession` uses it, which takes `&mut self`; the others
// just keep it.
unsafe impl Send for Owned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        let _alone = self.extension.then(alone);
        // SAFETY: its only owner releases it once.
        unsafe { (ort::api().ReleaseSession)(self.session.as_ptr()) }
    }
}

/// Waits until no other thread uses the device of an extension. Sessions of one share its context without locks: WebGPU 0.4.0 crashes
/// if two are made at a time.
pub(super) fn alone() -> MutexGuard<'static, ()> {
    static DEVICES: Mutex<()> = Mutex::new(());
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count_mismatch(what: &str, needed: usize, given: usize) -> Error {
    Error::invalid(format!("the model has {needed} {what}, {given} were given"))
}

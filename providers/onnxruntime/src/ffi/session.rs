use super::{check, handle, tensor::Tensor};
use ort::{AsPointer, environment::Environment, session::RunOptions, sys};
use sdrun_abi::{Error, OutputSpec, Result, TensorSpec, TensorView, Weight};
use std::{
    ffi::{CStr, CString, c_char, c_int},
    ptr::{self, NonNull},
};

/// `OrtSessionOptions`.
struct Options(NonNull<sys::OrtSessionOptions>);

/// How a session is set up.
pub(crate) struct Settings<'a> {
    /// Threads for one operator; operators run one after another.
    pub(crate) threads: usize,
    /// All graph optimisations, or none.
    pub(crate) optimise: bool,
    /// The folder of external data that is not lent from memory.
    pub(crate) folder: Option<&'a str>,
}

/// Key of the folder in `onnxruntime_session_options_config_keys.h`.
const FOLDER_KEY: &CStr = c"session.model_external_initializers_file_folder_path";
/// Key of the accuracy of products with dequantized weights, and its value for f32. By default ONNX Runtime quantizes the
/// other operand to 8 bits too: errors of 1 %.
const DEQUANTIZED_PRODUCTS: (&CStr, &CStr) = (c"session.qdq_matmulnbits_accuracy_level", c"1");

impl Options {
    /// No execution provider is added, so the CPU's is the only one.
    fn new(settings: &Settings<'_>) -> Result<Self> {
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
            Ok(options)
        }
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: released once.
        unsafe { (ort::api().ReleaseSessionOptions)(self.0.as_ptr()) }
    }
}

/// Stops the creation of a session, from any thread, while it is under way.
pub(crate) struct Canceller(NonNull<sys::OrtSessionOptions>);

// SAFETY: the flag it sets is an atomic in the options made to be set from another thread.
unsafe impl Sync for Canceller {}

impl Canceller {
    pub(crate) fn cancel(&self) {
        // SAFETY: `OrtSession::create` keeps the options alive for as long as it lends the canceller.
        let status = unsafe { (ort::api().SessionOptionsSetLoadCancellationFlag)(self.0.as_ptr(), true) };
        // Where it cannot be set, the creation just runs to its end.
        let _ = check(status, "cancel");
    }
}

/// Stops a run from any thread.
pub(crate) struct Terminator<'a>(&'a RunOptions);

impl Terminator<'_> {
    pub(crate) fn terminate(&self) {
        // Where it cannot be set, the run just goes to its end.
        let _ = self.0.terminate();
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{text:?} contains a NUL character")))
}

/// Names as the C API takes them.
struct Names {
    _strings: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Names {
    fn new<'a>(names: impl Iterator<Item = &'a str>) -> Result<Self> {
        let strings = names.map(c_string).collect::<Result<Vec<_>>>()?;
        // The pointers stay valid when the vector moves: they point to the strings' own memory.
        let pointers = strings.iter().map(|s| s.as_ptr()).collect();
        Ok(Names { _strings: strings, pointers })
    }
}

/// `OrtSession` with the names of its inputs and outputs.
pub(crate) struct OrtSession {
    session: NonNull<sys::OrtSession>,
    run_options: RunOptions,
    inputs: Vec<TensorSpec>,
    outputs: Vec<TensorSpec>,
    input_names: Names,
    output_names: Names,
    _environment: Environment,
}

// SAFETY: a session may be used from any thread (onnxruntime_c_api.h); methods that run it take `&mut self`.
// The name pointers point into strings the session owns.
unsafe impl Send for OrtSession {}

impl OrtSession {
    /// Creates a session for a model whose weights are external data: `lent`, by name, until this returns
    /// (ONNX Runtime copies or repacks what it keeps), the others in files of the folder of `settings`.
    /// `create` is handed a way to cancel and the work to do.
    pub(crate) fn create(
        environment: &Environment,
        onnx: &[u8],
        (inputs, outputs): (&[TensorSpec], &[TensorSpec]),
        lent: &[(&str, Weight<'_>)],
        settings: &Settings<'_>,
        create: impl FnOnce(&Canceller, &mut dyn FnMut() -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        let api = ort::api();
        let options = Options::new(settings)?;
        let names = Names::new(lent.iter().map(|(name, _)| *name))?;
        let values = lent
            .iter()
            .map(|(_, weight)| Tensor::reading(weight.dtype, &weight.shape, weight.data()))
            .collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const sys::OrtValue> = values.iter().map(|v| v.as_ptr().cast_const()).collect();
        if !pointers.is_empty() {
            // SAFETY: both arrays have as many valid entries as stated. The options take references to the
            // values, which hold on to them; the memory is lent until the session is created, after which
            // the options have given their references up or are released below.
            let status = unsafe {
                (api.AddExternalInitializers)(
                    options.0.as_ptr(),
                    names.pointers.as_ptr(),
                    pointers.as_ptr(),
                    pointers.len(),
                )
            };
            check(status, "take the weights")?;
        }
        let mut session = ptr::null_mut();
        let mut work = || {
            // SAFETY: environment and options are alive; pointer and length are those of a live slice, which
            // the call copies; the out pointer is valid.
            let status = unsafe {
                (api.CreateSessionFromArray)(
                    environment.ptr(),
                    onnx.as_ptr().cast(),
                    onnx.len(),
                    options.0.as_ptr(),
                    &mut session,
                )
            };
            check(status, "create a session")
        };
        create(&Canceller(options.0), &mut work)?;
        // Released if anything below fails.
        let session = Released(handle(session)?);
        let run_options = RunOptions::new().map_err(|e| super::from_ort(e, "create run options"))?;
        let (input_names, output_names) =
            (Names::new(inputs.iter().map(|i| &*i.name))?, Names::new(outputs.iter().map(|o| &*o.name))?);
        let raw = session.0;
        std::mem::forget(session);
        Ok(OrtSession {
            session: raw,
            run_options,
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            input_names,
            output_names,
            _environment: environment.clone(),
        })
    }

    /// One inference from `inputs` into `outputs`, both used where they lie.
    pub(crate) fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut [(&OutputSpec, &mut [u8])],
        run: impl FnOnce(&Terminator<'_>, &mut dyn FnMut() -> Result<()>) -> Result<()>,
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
        self.call(&inputs, &mut pointers, run)
    }

    /// One inference into memory of ONNX Runtime's own, for outputs whose shapes are known only afterwards.
    /// `deliver` is handed their types and shapes and returns buffers to copy them to.
    pub(crate) fn run_into_own<'s>(
        &mut self,
        inputs: &[TensorView<'_>],
        run: impl FnOnce(&Terminator<'_>, &mut dyn FnMut() -> Result<()>) -> Result<()>,
        deliver: impl FnOnce(&[OutputSpec]) -> Result<Vec<&'s mut [u8]>>,
    ) -> Result<()> {
        let inputs = self.wrap_inputs(inputs)?;
        let mut pointers = vec![ptr::null_mut(); self.outputs.len()];
        let result = self.call(&inputs, &mut pointers, run);
        // SAFETY: what is not null is a value that the call made for us, also where it failed later.
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
        run: impl FnOnce(&Terminator<'_>, &mut dyn FnMut() -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let api = ort::api();
        let inputs: Vec<*const sys::OrtValue> = inputs.iter().map(|i| i.as_ptr().cast_const()).collect();
        self.run_options.unterminate().map_err(|e| super::from_ort(e, "prepare a run"))?;
        let mut work = || {
            // SAFETY: the session is alive and used by this call only (`&mut self`); every array has as many
            // valid entries as stated, the outputs' are null or live values.
            let status = unsafe {
                (api.Run)(
                    self.session.as_ptr(),
                    self.run_options.ptr(),
                    self.input_names.pointers.as_ptr(),
                    inputs.as_ptr(),
                    inputs.len(),
                    self.output_names.pointers.as_ptr(),
                    outputs.len(),
                    outputs.as_mut_ptr(),
                )
            };
            check(status, "run the model")
        };
        run(&Terminator(&self.run_options), &mut work)
    }
}

impl Drop for OrtSession {
    fn drop(&mut self) {
        drop(Released(self.session));
    }
}

/// Releases a session when dropped.
struct Released(NonNull<sys::OrtSession>);

impl Drop for Released {
    fn drop(&mut self) {
        // SAFETY: released once, by the one owner.
        unsafe { (ort::api().ReleaseSession)(self.0.as_ptr()) }
    }
}

fn count_mismatch(what: &str, needed: usize, given: usize) -> Error {
    Error::invalid(format!("the model has {needed} {what}, {given} were given"))
}

//! Models on providers, with weights.

use crate::{
    calls::Calls,
    failure::{Failure, Result, caught, text},
    given::{self, Versioned},
    registry::{Place, Placed, Registry, out_of_range},
};
use sdrun::{
    BuildOptions, HostTensor, Model, Shapes, Tensors, WeightFiles, abi, abi::DType, graph::OpenOptions,
};
use std::{
    ffi::{CString, c_char, c_void},
    ptr,
    sync::{Mutex, PoisonError},
};

/// An adapter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Lora {
    /// The file.
    pub file: *const c_char,
    /// Its strength; usually 1.
    pub strength: f32,
}

/// The shape of an input.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shape {
    /// The input's name.
    pub name: *const c_char,
    /// Its sizes.
    pub dims: *const usize,
    /// How many there are.
    pub rank: usize,
}

/// A model with weights. All fields but `model` may be zero.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SessionOptions {
    /// `sizeof(sdrun_session_options)`.
    pub struct_size: usize,
    /// An ONNX file, or the name of a built-in model.
    pub model: *const c_char,
    /// A checkpoint in place of the model's own weights.
    pub weights: *const c_char,
    /// Adapters.
    pub loras: *const Lora,
    /// Their number.
    pub lora_count: usize,
    /// Shapes of inputs with open dimensions.
    pub shapes: *const Shape,
    /// Their number.
    pub shape_count: usize,
    /// Where it runs.
    pub place: Place,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers and numbers.
unsafe impl Versioned for SessionOptions {}

/// What a session takes or returns. Its texts and sizes live as long as the session.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorInfo {
    /// `sizeof(sdrun_tensor_info)`, set by the caller.
    pub struct_size: usize,
    /// Its name.
    pub name: *const c_char,
    /// `f32`, `f16`, `bf16`, `i64`, `bool`, …
    pub dtype: *const c_char,
    /// Its sizes; -1 is open.
    pub dims: *const i64,
    /// How many there are.
    pub rank: usize,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers and numbers.
unsafe impl Versioned for TensorInfo {}

/// The values of a tensor, row by row, without gaps.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Array {
    /// Its name.
    pub name: *const c_char,
    /// `f32`, `f16`, `bf16`, `i64`, `bool`, …
    pub dtype: *const c_char,
    /// Its sizes.
    pub dims: *const usize,
    /// How many there are.
    pub rank: usize,
    /// The values.
    pub data: *const c_void,
    /// Their size in bytes.
    pub bytes: usize,
}

/// The outputs of a run.
pub struct Arrays(Vec<(CString, CString, HostTensor)>);

/// A model with weights, ready to run.
pub struct Session {
    session: Mutex<sdrun::Session>,
    registry: sdrun::Registry,
    model: Model,
    weights: Mutex<WeightFiles>,
    provider: CString,
    device: CString,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

struct Tensor {
    name: CString,
    dtype: CString,
    dims: Vec<i64>,
}

impl Tensor {
    fn new(spec: &abi::TensorSpec) -> Self {
        let dim = |dim: &Option<usize>| dim.map_or(-1, |size| i64::try_from(size).unwrap_or(i64::MAX));
        Tensor {
            name: text(&*spec.name),
            dtype: text(spec.dtype.name()),
            dims: spec.shape.iter().map(dim).collect(),
        }
    }
}

/// The files of a checkpoint with adapters.
///
/// # Safety
/// Pointers are null or valid.
unsafe fn weight_files(weights: *const c_char, loras: *const Lora, count: usize) -> Result<WeightFiles> {
    // SAFETY: as the caller promises.
    let (base, loras) = unsafe { (given::path(weights)?, given::array(loras, count)) };
    let mut files = base.map(WeightFiles::of).unwrap_or_default();
    for lora in loras {
        // SAFETY: as the caller promises.
        let file = unsafe { given::path(lora.file)? };
        let file = file.ok_or_else(|| Failure::invalid("an adapter has no file"))?;
        files = files.adapter(file, lora.strength);
    }
    Ok(files)
}

/// Builds an engine for a model, or takes it from the cache, and gives it weights. `calls` may be null.
///
/// # Safety
/// Pointers are null or valid; `session` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_open(
    registry: *const Registry,
    options: *const SessionOptions,
    calls: *const Calls,
    session: *mut *mut Session,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (registry, calls, out, asked) = unsafe {
            let out = given::out(session)?;
            let options = given::options(options)?;
            let asked = Asked::read(&options)?;
            (&given::object(registry)?.0, Calls::read(calls)?, out, asked)
        };
        *out = Box::into_raw(Box::new(asked.open(registry, &calls)?));
        Ok(())
    })
}

/// Session options that were read.
struct Asked {
    model: String,
    weights: WeightFiles,
    shapes: Shapes,
    place: Placed,
}

impl Asked {
    /// # Safety
    /// Pointers are null or valid.
    unsafe fn read(options: &SessionOptions) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (model, weights, place, given) = unsafe {
            (
                given::text(options.model)?,
                weight_files(options.weights, options.loras, options.lora_count)?,
                options.place.read()?,
                given::array(options.shapes, options.shape_count),
            )
        };
        let mut shapes = Shapes::new();
        for shape in given {
            // SAFETY: as the caller promises.
            let (name, dims) = unsafe { (given::text(shape.name)?, given::array(shape.dims, shape.rank)) };
            let name = name.ok_or_else(|| Failure::invalid("a shape has no name"))?;
            shapes.insert(name.into(), dims.to_vec());
        }
        let model = model.ok_or_else(|| Failure::invalid("the session's model is null"))?.to_string();
        Ok(Asked { model, weights, shapes, place })
    }

    fn open(self, registry: &sdrun::Registry, calls: &Calls) -> Result<Session> {
        let Asked { model, weights, shapes, place } = self;
        let open = OpenOptions { weights: weights.policy(), ..OpenOptions::default() };
        let model = Model::find(&model, registry.paths(), &open, calls)?;
        let plain = place.options();
        let options = |device| -> BuildOptions { plain(device).shapes(shapes.clone()) };
        let engine = match place.only(registry, calls)? {
            Some((provider, device)) => provider.build(&model, &options(device), calls)?,
            None => {
                let mut choice = registry.choose(&model, &place.wishes(), &options, calls);
                choice.try_each(|candidate| candidate.provider.build(&model, &candidate.options, calls))?
            }
        };
        let opened = weights.of_model(&model, registry.paths(), calls)?;
        let session = engine.session(&opened.stack, calls)?;
        Ok(Session {
            provider: text(engine.provider().id()),
            device: text(&*engine.device().id),
            inputs: session.info().inputs.iter().map(Tensor::new).collect(),
            outputs: session.info().outputs.iter().map(Tensor::new).collect(),
            session: Mutex::new(session),
            weights: Mutex::new(weights),
            registry: registry.clone(),
            model,
        })
    }
}

/// Frees a session. Null is allowed.
///
/// # Safety
/// `session` is null or comes from `sdrun_session_open`, and nobody uses it afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_free(session: *mut Session) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(session) };
}

/// Id of the provider that runs it. It lives as long as the session.
///
/// # Safety
/// `session` is null or comes from `sdrun_session_open` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_provider(session: *const Session) -> *const c_char {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { session.as_ref() }.map_or(ptr::null(), |session| session.provider.as_ptr())
}

/// Id of the device that it runs on. It lives as long as the session.
///
/// # Safety
/// As `sdrun_session_provider`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_device(session: *const Session) -> *const c_char {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { session.as_ref() }.map_or(ptr::null(), |session| session.device.as_ptr())
}

/// The number of inputs.
///
/// # Safety
/// As `sdrun_session_provider`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_input_count(session: *const Session) -> usize {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { session.as_ref() }.map_or(0, |session| session.inputs.len())
}

/// The number of outputs.
///
/// # Safety
/// As `sdrun_session_provider`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_output_count(session: *const Session) -> usize {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { session.as_ref() }.map_or(0, |session| session.outputs.len())
}

/// The input with this number, from 0.
///
/// # Safety
/// As `sdrun_session_provider`; `info` points to a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_input(
    session: *const Session,
    number: usize,
    info: *mut TensorInfo,
) -> *mut Failure {
    // SAFETY: as the function's contract says.
    caught(|| unsafe { describe(&given::object(session)?.inputs, "input", number, info) })
}

/// The output with this number, from 0.
///
/// # Safety
/// As `sdrun_session_input`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_output(
    session: *const Session,
    number: usize,
    info: *mut TensorInfo,
) -> *mut Failure {
    // SAFETY: as the function's contract says.
    caught(|| unsafe { describe(&given::object(session)?.outputs, "output", number, info) })
}

/// # Safety
/// As [`given::fill`].
unsafe fn describe(tensors: &[Tensor], what: &str, number: usize, info: *mut TensorInfo) -> Result<()> {
    let tensor = tensors.get(number).ok_or_else(|| out_of_range(what, number, tensors.len()))?;
    let value = TensorInfo {
        struct_size: 0,
        name: tensor.name.as_ptr(),
        dtype: tensor.dtype.as_ptr(),
        dims: tensor.dims.as_ptr(),
        rank: tensor.dims.len(),
    };
    // SAFETY: as the caller promises.
    unsafe { given::fill(info, &value) }
}

/// Runs once, with an array for each input. Calls from several threads wait for each other. `calls` may be null.
///
/// # Safety
/// Pointers are null or valid; `outputs` can be written. Nobody changes the inputs during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_run(
    session: *const Session,
    inputs: *const Array,
    input_count: usize,
    calls: *const Calls,
    outputs: *mut *mut Arrays,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (session, calls, out, inputs) = unsafe {
            let out = given::out(outputs)?;
            let inputs = given::array(inputs, input_count);
            (given::object(session)?, Calls::read(calls)?, out, inputs)
        };
        // SAFETY: as the function's contract says.
        let inputs: Tensors = inputs.iter().map(|array| unsafe { tensor(array) }).collect::<Result<_>>()?;
        let done = session.session.lock().unwrap_or_else(PoisonError::into_inner).run(&inputs, &calls)?;
        let arrays = done.into_iter().map(|(name, tensor)| (text(name), text(tensor.dtype().name()), tensor));
        *out = Box::into_raw(Box::new(Arrays(arrays.collect())));
        Ok(())
    })
}

/// # Safety
/// Its pointers are null or valid.
unsafe fn tensor(array: &Array) -> Result<(String, HostTensor)> {
    // SAFETY: as the caller promises.
    let (name, dtype, dims, bytes) = unsafe {
        (
            given::text(array.name)?.ok_or_else(|| Failure::invalid("an input has no name"))?,
            given::text(array.dtype)?.unwrap_or("f32"),
            given::array(array.dims, array.rank),
            given::array(array.data.cast::<u8>(), array.bytes),
        )
    };
    let known = DType::ALL.into_iter().find(|known| known.name() == dtype);
    let dtype = known.ok_or_else(|| {
        let names = DType::ALL.map(DType::name).join(", ");
        Failure::invalid(format!("the input `{name}` has the type {dtype:?}: use one of {names}"))
    })?;
    let tensor = HostTensor::from_bytes(dtype, dims.to_vec(), bytes).map_err(|error| {
        let failure = Failure::from(error);
        failure.of(&format!("the input `{name}`"))
    })?;
    Ok((name.into(), tensor))
}

/// The number of arrays.
///
/// # Safety
/// `arrays` is null or comes from `sdrun_session_run` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_arrays_count(arrays: *const Arrays) -> usize {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { arrays.as_ref() }.map_or(0, |arrays| arrays.0.len())
}

/// The array with this number, from 0. What it points to lives as long as `arrays`.
///
/// # Safety
/// As `sdrun_arrays_count`; `array` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_arrays_get(
    arrays: *const Arrays,
    number: usize,
    array: *mut Array,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (arrays, array) = unsafe { (given::object(arrays)?, array.as_mut()) };
        let array = array.ok_or_else(|| Failure::invalid("the place for the array is null"))?;
        let found = arrays.0.get(number).ok_or_else(|| out_of_range("array", number, arrays.0.len()))?;
        let (name, dtype, tensor) = found;
        *array = Array {
            name: name.as_ptr(),
            dtype: dtype.as_ptr(),
            dims: tensor.shape().as_ptr(),
            rank: tensor.shape().len(),
            data: tensor.bytes().as_ptr().cast(),
            bytes: tensor.bytes().len(),
        };
        Ok(())
    })
}

/// Frees arrays. Null is allowed.
///
/// # Safety
/// As `sdrun_arrays_count`; nobody uses them afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_arrays_free(arrays: *mut Arrays) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(arrays) };
}

/// Replaces the weights: by another checkpoint if `weights` is not null, and by these adapters in place of the former ones. Writes how
/// many tensors changed to `changed`, unless it is null. After a failure the former weights are in use. `calls` may be null.
///
/// # Safety
/// Pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_session_refit(
    session: *const Session,
    weights: *const c_char,
    loras: *const Lora,
    lora_count: usize,
    calls: *const Calls,
    changed: *mut usize,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (session, calls, mut files, changed) = unsafe {
            let files = weight_files(weights, loras, lora_count)?;
            (given::object(session)?, Calls::read(calls)?, files, changed.as_mut())
        };
        let mut running = session.session.lock().unwrap_or_else(PoisonError::into_inner);
        let mut current = session.weights.lock().unwrap_or_else(PoisonError::into_inner);
        if files.base.is_empty() {
            files.base = current.base.clone();
        }
        let opened = files.of_model(&session.model, session.registry.paths(), &calls)?;
        let report = running.refit(&opened.stack, &calls)?;
        *current = files;
        if let Some(changed) = changed {
            *changed = report.tensors;
        }
        Ok(())
    })
}

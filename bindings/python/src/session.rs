//! A model on a provider, with weights.

use crate::{arrays, failed, registry, wishes, work};
use pyo3::prelude::*;
use sdrun::{BuildOptions, Isolation, Model, Registry, WeightFiles, abi::Precision, graph::OpenOptions};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// Name, element type, shape with `None` for open dimensions.
type Spec = (String, String, Vec<Option<usize>>);

/// A model with weights, ready to run. One call at a time; others wait.
#[pyclass(frozen)]
pub(crate) struct Session {
    session: Mutex<sdrun::Session>,
    registry: Registry,
    model: Model,
    weights: Mutex<WeightFiles>,
    /// Id of the provider.
    #[pyo3(get)]
    provider: String,
    /// Id of the device.
    #[pyo3(get)]
    device: String,
    /// The precision.
    #[pyo3(get)]
    precision: String,
    /// Its inputs.
    #[pyo3(get)]
    inputs: Vec<Spec>,
    /// Its outputs.
    #[pyo3(get)]
    outputs: Vec<Spec>,
}

/// The files of a checkpoint with adapters.
fn weight_files(checkpoint: Option<PathBuf>, loras: Vec<(PathBuf, f32)>) -> WeightFiles {
    let base = checkpoint.map(WeightFiles::of).unwrap_or_default();
    loras.into_iter().fold(base, |files, (file, strength)| files.adapter(file, strength))
}

#[pymethods]
impl Session {
    /// Builds or loads an engine for `model` and gives it weights.
    #[new]
    #[pyo3(signature = (model, weights, loras, shapes, provider, device, precision, threads))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        model: String,
        weights: Option<PathBuf>,
        loras: Vec<(PathBuf, f32)>,
        shapes: BTreeMap<String, Vec<usize>>,
        provider: Option<String>,
        device: Option<String>,
        precision: Option<&str>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let precision = crate::precision(precision)?.unwrap_or(Precision::Fp32);
        let files = weight_files(weights, loras);
        work::run(py, None, move |host, _| {
            let registry = registry()?;
            let open = OpenOptions { weights: files.policy(), ..OpenOptions::default() };
            let model = Model::find(&model, registry.paths(), &open, host)?;
            let options = |device| {
                let mut options = BuildOptions::new(device).shapes(shapes.clone());
                (options.precision, options.threads) = (precision, threads);
                options
            };
            let engine = match &provider {
                Some(id) => {
                    let provider = registry.open_with(id, &Isolation::default(), host)?;
                    let device = provider.present_device(device.as_deref())?;
                    provider.build(&model, &options(device), host)?
                }
                None => {
                    let mut choice = registry.choose(&model, &wishes(device), &options, host);
                    choice.try_each(|candidate| candidate.provider.build(&model, &candidate.options, host))?
                }
            };
            let weights = files.of_model(&model, registry.paths(), host)?;
            let session = engine.session(&weights.stack, host)?;
            let spec = |spec: &sdrun::abi::TensorSpec| {
                (spec.name.clone(), spec.dtype.to_string(), spec.shape.clone())
            };
            Ok(Session {
                provider: engine.provider().id().to_string(),
                device: engine.device().id.clone(),
                precision: precision.to_string(),
                inputs: session.info().inputs.iter().map(spec).collect(),
                outputs: session.info().outputs.iter().map(spec).collect(),
                session: Mutex::new(session),
                weights: Mutex::new(files),
                registry,
                model,
            })
        })?
        .map_err(failed)
    }

    /// Runs once. Takes an array for each input and returns one for each output.
    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: BTreeMap<String, Bound<'py, PyAny>>,
    ) -> PyResult<BTreeMap<String, Bound<'py, PyAny>>> {
        let specs = py.detach(|| self.locked().info().inputs.clone());
        let inputs = arrays::inputs(&inputs, &specs)?;
        let outputs = work::run(py, None, |host, _| self.locked().run(&inputs, host))?.map_err(failed)?;
        outputs.iter().map(|(name, tensor)| Ok((name.clone(), arrays::array(py, tensor)?))).collect()
    }

    /// Replaces the weights: by another checkpoint if one is given, and by these adapters in place of the former. Returns how many
    /// tensors the provider took. After an error the former weights are in use.
    fn refit(&self, py: Python<'_>, weights: Option<PathBuf>, loras: Vec<(PathBuf, f32)>) -> PyResult<usize> {
        work::run(py, None, move |host, _| {
            let mut session = self.locked();
            let mut current = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
            let base = current.base.clone();
            let mut files = weight_files(weights, loras);
            if files.base.is_empty() {
                files.base = base;
            }
            let opened = files.of_model(&self.model, self.registry.paths(), host)?;
            let report = session.refit(&opened.stack, host)?;
            *current = files;
            Ok(report.tensors)
        })?
        .map_err(failed)
    }
}

impl Session {
    fn locked(&self) -> std::sync::MutexGuard<'_, sdrun::Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

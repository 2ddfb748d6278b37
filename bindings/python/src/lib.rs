//! The native part of the Python package `sdrun`. `sdrun/__init__.py` makes a Python API of it.
//!
//! * `work`: runs calls on another thread, so that Python goes on, Ctrl-C stops them and callbacks hear of progress.
//! * `arrays`: NumPy arrays from and to tensors.
//! * `session`: models on providers.
//! * `pipeline`: pictures.

mod arrays;
mod pipeline;
mod session;
mod work;

use pyo3::{exceptions::PyException, prelude::*};
use sdrun::{Discovery, Isolation, Registry, Wishes, abi};
use std::{path::PathBuf, sync::OnceLock};

pyo3::create_exception!(_sdrun, Error, PyException, "An error of sdrun.");

/// The folder of the package, with the plugins that it brings.
static HOME: OnceLock<PathBuf> = OnceLock::new();

/// Providers: those of the package first, then those that the user has installed.
fn registry() -> sdrun::Result<Registry> {
    let provider_paths = HOME.get().into_iter().map(|home| home.join("providers")).collect();
    Registry::discover_with(&Discovery { provider_paths, ..Discovery::default() })
}

/// An exception with the error's sentence, and its kind and hint as attributes.
fn exception(message: String, code: abi::ErrorCode, hint: Option<abi::Hint>) -> PyErr {
    Python::attach(|py| {
        let error = PyErr::new::<Error, _>(message);
        let value = error.value(py);
        let hint = hint.map(|hint| hint.to_string());
        let set = value.setattr("code", format!("{code:?}")).and_then(|()| value.setattr("hint", hint));
        set.err().unwrap_or(error)
    })
}

fn failed(error: sdrun::Error) -> PyErr {
    exception(error.to_string(), error.code(), error.hint())
}

fn not_drawn(error: sdrun_diffusion::pipeline::Error) -> PyErr {
    exception(error.to_string(), error.code(), error.hint())
}

fn invalid(message: impl Into<String>) -> PyErr {
    failed(abi::Error::invalid(message.into()).into())
}

/// A choice among the devices of this name, or among all.
fn wishes(device: Option<String>) -> Wishes {
    let mut wishes = Wishes::new();
    wishes.device = device;
    wishes
}

fn precision(name: Option<&str>) -> PyResult<Option<abi::Precision>> {
    name.map(|name| name.parse().map_err(|why: String| invalid(why))).transpose()
}

#[pymodule]
mod _sdrun {
    use super::*;

    #[pymodule_export]
    use super::{Error, pipeline::Pipeline, session::Session};

    /// Sets the folder of the package. Called once, by the package itself.
    #[pyfunction]
    fn set_home(folder: PathBuf) {
        let _ = HOME.set(folder);
    }

    /// Id, version and devices of each provider: `(id, summary, why_not, [(id, name, kind, absent)])`.
    #[pyfunction]
    fn providers(py: Python<'_>) -> PyResult<Vec<Found>> {
        work::run(py, None, |host, _| {
            let registry = registry()?;
            let mut found = Vec::new();
            for provide in registry.usable() {
                let opened = registry.open_with(&provide.id, &Isolation::default(), host);
                let devices = opened.and_then(|provider| provider.devices());
                let (devices, why_not) = match devices {
                    Ok(devices) => (devices, None),
                    Err(why) => (Vec::new(), Some(why.to_string())),
                };
                let devices =
                    devices.into_iter().map(|d| (d.id, d.name, d.kind.name().to_string(), d.absent));
                found.push((provide.id.clone(), provide.summary.clone(), why_not, devices.collect()));
            }
            Ok(found)
        })?
        .map_err(failed)
    }
}

type Found = (String, String, Option<String>, Vec<(String, String, String, Option<String>)>);

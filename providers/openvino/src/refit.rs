//! Sessions of engines without weights: the graph is read and compiled for each set of weights.
//!
//! Two compiled models would need twice the memory of one (for a UNet of 860 M parameters, one takes 6 GB). So the
//! old model is dropped before the new one is compiled. The session keeps the source of the old one: nodes, and
//! weights in mapped files. If the new model fails to compile, the old one is compiled from that again.

use crate::{engine::Recipe, ffi::Model, session::OvSession};
use sdrun_abi::{
    Error, Host, LogLevel, MemoryReport, NoHost, OutputSink, RefitReport, Result, Session, TensorView,
    WeightSource,
};
use sdrun_provider_common::{phase, rebuilt};
use std::sync::Arc;

pub(crate) struct Refittable {
    recipe: Arc<Recipe>,
    /// The model that the session was compiled from.
    model: Model,
    /// `None` only if neither the new nor the old weights could be compiled.
    session: Option<OvSession>,
}

impl Refittable {
    pub(crate) fn new(recipe: Arc<Recipe>, weights: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        let model = recipe.read_with(weights, host)?;
        let session = Some(compile(&recipe, &model, true, host)?);
        Ok(Refittable { recipe, model, session })
    }

    fn session(&self) -> Result<&OvSession> {
        self.session.as_ref().ok_or_else(lost)
    }
}

fn compile(recipe: &Recipe, model: &Model, keep: bool, host: &dyn Host) -> Result<OvSession> {
    OvSession::new(&recipe.compile(model, keep, host)?, &recipe.info, recipe.checks.clone())
}

fn lost() -> Error {
    Error::precondition(
        "the session has no weights: a refit failed, and so did the return to the old weights",
    )
    .with_hint("free memory, then refit all weights or open a new session")
}

impl Session for Refittable {
    fn refit(
        &mut self,
        _changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let next = self.recipe.read_with(weights, host)?;
        phase(host, "compile", 0, 1)?;
        self.session = None;
        match compile(&self.recipe, &next, false, host) {
            Ok(session) => (self.model, self.session) = (next, Some(session)),
            Err(error) => {
                drop(next);
                // Do not let the host cancel this: it cancelled the refit, not the session.
                self.session = compile(&self.recipe, &self.model, false, &NoHost)
                    .inspect_err(|e| host.log(LogLevel::Error, "openvino", &e.message))
                    .ok();
                return Err(error);
            }
        }
        Ok(rebuilt(&self.recipe.info))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        self.session.as_mut().ok_or_else(lost)?.run(inputs, outputs, host)
    }

    fn memory(&self) -> Result<MemoryReport> {
        self.session()?.memory()
    }
}

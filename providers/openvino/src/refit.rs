//! Sessions of engines without weights: the graph is read and compiled for each set of weights.
//!
//! Two compiled models at once would take twice the memory of one (a UNet of 860 M parameters: 6 GB), so the former one
//! goes before the next is compiled. What stays of it is the model it was compiled from: nodes, and weights that are
//! mapped files. Should the next one fail to compile, the former is compiled from that again.

use crate::{engine::Recipe, ffi::Model, session::OvSession};
use sdrun_abi::{
    Error, Host, LogLevel, MemoryReport, NoHost, OutputSink, RefitReport, Result, Session, TensorView,
    WeightSource,
};
use sdrun_provider_common::{phase, rebuilt};
use std::sync::Arc;

pub(crate) struct Refittable {
    recipe: Arc<Recipe>,
    /// What the session was compiled from.
    model: Model,
    /// Gone only where neither new weights nor the former ones could be compiled.
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
    OvSession::new(&recipe.compile(model, keep, host)?, &recipe.info)
}

fn lost() -> Error {
    Error::precondition(
        "the session has no weights: a refit failed, and so did going back to the former weights",
    )
    .with_hint("free memory, then give the session weights or open it anew")
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
                // Not to be cancelled: the host's wish ended the refit, not the session.
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

//! Engines whose weights are inputs of the compiled model: the option `weights=inputs`.
//!
//! The model is compiled once, without weights. New weights only need to be copied and bound, while another
//! compilation takes seconds. The cost is OpenVINO's optimisation of constants: nothing for a VAE, and a 1.15 times
//! longer run for a UNet (docs/measurements/2026-11-22-weights.md).

use crate::{devices::Target, engine::Recipe, ffi::CompiledModel, runtime::Runtime, session::OvSession};
use bytes::Bytes;
use sdrun_abi::{
    AlignedBuffer, BuildSpec, Engine, EngineInfo, Error, Host, MemoryReport, OutputSink, RefitReport, Result,
    Session, TensorSpec, TensorView, WeightSource, WeightSpec, WeightUpdate,
};
use sdrun_provider_common::{phase, weight};
use std::{collections::HashMap, sync::Arc};

pub(crate) struct AsInputs {
    recipe: Recipe,
    compiled: Arc<CompiledModel>,
}

impl AsInputs {
    /// Reads and compiles the graph. It comes from the host or from an engine, whose payload is the same.
    pub(crate) fn compile(
        runtime: &'static Runtime,
        model: Bytes,
        spec: &BuildSpec,
        target: Target,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let recipe = Recipe::of_graph(runtime, model, spec, target)?;
        let compiled = Arc::new(recipe.compile_with_weights_as_inputs(host)?);
        Ok(Box::new(AsInputs { recipe, compiled }))
    }
}

impl Engine for AsInputs {
    fn info(&self) -> &EngineInfo {
        &self.recipe.info
    }

    fn serialize(&self) -> Result<Vec<u8>> {
        Ok(self.recipe.payload())
    }

    fn session(&self, weights: &dyn WeightSource, host: &dyn Host) -> Result<Box<dyn Session>> {
        let mut info = self.recipe.info.clone();
        let mut bound = Vec::with_capacity(info.weights.len());
        for (index, spec) in self.recipe.info.weights.iter().enumerate() {
            phase(host, "weights", index as u64, self.recipe.info.weights.len() as u64)?;
            bound.push((spec.clone(), copy_of(weights, spec)?));
            let shape = spec.shape.iter().copied().map(Some).collect();
            info.inputs.push(TensorSpec { name: spec.name.clone(), dtype: spec.dtype, shape });
        }
        let index = bound.iter().enumerate().map(|(index, (spec, _))| (spec.name.clone(), index)).collect();
        let inner = OvSession::new(&self.compiled, &info, self.recipe.checks.clone())?;
        Ok(Box::new(AsInputsSession { inner, weights: bound, index }))
    }
}

fn copy_of(source: &dyn WeightSource, spec: &WeightSpec) -> Result<AlignedBuffer> {
    AlignedBuffer::copy_of(weight(source, spec)?.data())
}

struct AsInputsSession {
    inner: OvSession,
    /// In the order of the model's inputs, after the graph's own.
    weights: Vec<(WeightSpec, AlignedBuffer)>,
    index: HashMap<String, usize>,
}

impl Session for AsInputsSession {
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let mut fresh = Vec::with_capacity(changed.len());
        for (step, name) in changed.iter().enumerate() {
            phase(host, "weights", step as u64, changed.len() as u64)?;
            let index = *self
                .index
                .get(*name)
                .ok_or_else(|| Error::not_found(format!("the engine has no weight `{name}`")))?;
            fresh.push((index, copy_of(weights, &self.weights[index].0)?));
        }
        // Everything that can fail is done. Only now replace the old weights.
        let mut bytes = 0;
        for (index, buffer) in fresh {
            bytes += buffer.len() as u64;
            self.weights[index].1 = buffer;
        }
        Ok(RefitReport::new(WeightUpdate::AsInputs, changed.len(), bytes))
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        let mut all = inputs.to_vec();
        all.extend(self.weights.iter().map(|(spec, data)| TensorView {
            dtype: spec.dtype,
            shape: &spec.shape,
            data: &data[..],
        }));
        self.inner.run(&all, outputs, host)
    }

    fn memory(&self) -> Result<MemoryReport> {
        self.inner.memory()
    }
}

//! Sessions: a program and the buffers it runs on.

use crate::{
    engine::Compiled,
    ffi::{Bound, Buffer, DeviceBuffer, Layout, Stream},
};
use sdrun_abi::{
    AlignedBuffer, Error, ErrorCode, Host, MemoryReport, OutputSink, OutputSpec, RefitReport, Result,
    Session, TensorSpec, TensorView, WeightSource, WeightUpdate,
};
use sdrun_provider_common::{phase, weight};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// How a program for a GPU calls the buffers its outputs go to.
const OUTPUT_PREFIX: &str = "main:#output_";

pub(crate) struct MgxSession {
    compiled: Arc<Compiled>,
    bound: Bound,
    stream: Option<Stream>,
    /// Bytes of the weights as they are bound.
    weight_bytes: u64,
}

/// What becomes of a weight: parameters by name, with their new values.
struct Fresh {
    buffers: Vec<(String, Buffer)>,
    /// Of the weights pulled.
    tensors: usize,
    bytes: u64,
}

impl MgxSession {
    pub(crate) fn new(compiled: Arc<Compiled>, weights: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        compiled.target.select(compiled.runtime)?;
        let api = &compiled.runtime.api;
        let mut bound = Bound::new(api)?;
        let all: HashSet<&str> = compiled.info.weights.iter().map(|w| w.name.as_str()).collect();
        let fresh = compiled.pull(&all, weights, host)?;
        let layouts: HashMap<&str, &Layout> =
            compiled.parameters.iter().map(|(name, layout)| (name.as_str(), layout)).collect();
        let mut weight_bytes = 0;
        for (name, buffer) in fresh.buffers {
            weight_bytes += buffer.len() as u64;
            if let Some(layout) = layouts.get(name.as_str()) {
                bound.bind(api, &name, layout, buffer)?;
            }
        }
        let is_input = |name: &str| compiled.info.inputs.iter().any(|input| input.name == name);
        for (name, layout) in &compiled.parameters {
            if is_input(name) || name.starts_with(OUTPUT_PREFIX) {
                bound.bind(api, name, layout, compiled.buffer(layout)?)?;
            } else if !bound.has(name) {
                return Err(Error::internal(format!(
                    "the program wants a parameter `{name}` that is no input, output or weight"
                )));
            }
        }
        let stream = match (&compiled.runtime.hip, &compiled.target.hip) {
            (Some(hip), Some(_)) if !compiled.options.offload_copy => Some(Stream::new(hip)?),
            _ => None,
        };
        Ok(MgxSession { bound, stream, weight_bytes, compiled })
    }
}

impl Compiled {
    /// A buffer for a parameter, where the program expects it.
    fn buffer(&self, layout: &Layout) -> Result<Buffer> {
        let bytes = layout.dtype.bytes_of(&layout.lengths);
        let bytes = bytes.ok_or_else(|| Error::internal("a parameter of the program is too large"))?;
        match (&self.runtime.hip, &self.target.hip) {
            (Some(hip), Some(_)) if !self.options.offload_copy => {
                Ok(Buffer::Device(DeviceBuffer::new(hip, bytes)?))
            }
            _ => Ok(Buffer::Host(AlignedBuffer::new(bytes))),
        }
    }

    /// Buffers with the values of all parameters that depend on the weights in `names`.
    fn pull(&self, names: &HashSet<&str>, source: &dyn WeightSource, host: &dyn Host) -> Result<Fresh> {
        let layouts: HashMap<&str, &Layout> =
            self.parameters.iter().map(|(name, layout)| (name.as_str(), layout)).collect();
        let fill = |name: &str, bytes: &[u8]| -> Result<Option<(String, Buffer)>> {
            // What the compiler found to have no effect is no parameter.
            let Some(layout) = layouts.get(name) else { return Ok(None) };
            let mut buffer = self.buffer(layout)?;
            buffer.write(bytes)?;
            Ok(Some((name.to_string(), buffer)))
        };
        let steps: Vec<_> = self.preparation.steps(|name| names.contains(name)).collect();
        let prepared: HashSet<&str> =
            steps.iter().flat_map(|step| step.weights.iter().map(String::as_str)).collect();
        let specs: Vec<_> = self.info.weights.iter().filter(|w| names.contains(w.name.as_str())).collect();
        let total = (specs.len() + steps.len()) as u64;
        let mut fresh = Fresh { buffers: Vec::new(), tensors: specs.len(), bytes: 0 };
        for (index, spec) in specs.into_iter().enumerate() {
            phase(host, "weights", index as u64, total)?;
            fresh.bytes += spec.dtype.bytes_of(&spec.shape).unwrap_or_default() as u64;
            if layouts.contains_key(spec.name.as_str()) || !prepared.contains(spec.name.as_str()) {
                fresh.buffers.extend(fill(&spec.name, weight(source, spec)?.data())?);
            }
        }
        for (index, step) in steps.iter().enumerate() {
            phase(host, "weights", fresh.tensors as u64 + index as u64, total)?;
            let tensor = self.preparation.compute(step, source)?;
            fresh.buffers.extend(fill(self.preparation.name(step), tensor.data())?);
        }
        Ok(fresh)
    }
}

impl Session for MgxSession {
    fn refit(
        &mut self,
        changed: &[&str],
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<RefitReport> {
        let compiled = &self.compiled;
        if compiled.info.weights.is_empty() {
            return Err(Error::precondition("the weights of this engine are baked in and cannot be changed")
                .with_hint("build the engine without baking"));
        }
        compiled.target.select(compiled.runtime)?;
        // Everything that can fail is done before the first of the former weights goes.
        let fresh = compiled.pull(&changed.iter().copied().collect(), weights, host)?;
        let mut former: Vec<(String, Option<Buffer>)> = Vec::with_capacity(fresh.buffers.len());
        for (name, buffer) in fresh.buffers {
            match self.bind(&name, buffer) {
                Ok(old) => former.push((name, old)),
                Err(error) => {
                    for (name, old) in former {
                        old.map_or(Ok(None), |old| self.bind(&name, old))?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(RefitReport { method: WeightUpdate::AsInputs, tensors: fresh.tensors, bytes: fresh.bytes })
    }

    fn run(&mut self, inputs: &[TensorView<'_>], sink: &mut dyn OutputSink, host: &dyn Host) -> Result<()> {
        if host.cancelled() {
            return Err(Error::new(ErrorCode::Cancelled, "the run was cancelled before it began"));
        }
        let compiled = &self.compiled;
        compiled.target.select(compiled.runtime)?;
        for (spec, input) in compiled.info.inputs.iter().zip(inputs) {
            // Inputs that nothing uses are no parameters.
            if self.bound.has(&spec.name) {
                self.bound.buffer(&spec.name)?.write(input.data)?;
            }
        }
        let api = &compiled.runtime.api;
        let results = self.bound.run(api, &mut compiled.program(), self.stream.as_ref())?;
        let outputs = results.outputs(api)?;
        if outputs.len() != compiled.info.outputs.len() {
            return Err(Error::internal("MIGraphX delivers another number of outputs than it compiled"));
        }
        let specs = compiled
            .info
            .outputs
            .iter()
            .zip(&outputs)
            .map(|(stated, output)| as_stated(stated, &output.layout));
        let specs = specs.collect::<Result<Vec<_>>>()?;
        for (output, buffer) in outputs.iter().zip(sink.allocate(&specs)?) {
            output.read(buffer)?;
        }
        Ok(())
    }

    fn memory(&self) -> Result<MemoryReport> {
        let device = self.compiled.resident.map(|program| program + self.bound.bytes());
        Ok(MemoryReport { weights: Some(self.weight_bytes), activations: None, device })
    }
}

/// The shape of an output: the stated one where it is known (a scalar has a dimension in MIGraphX). An error where the
/// result is another tensor than stated.
fn as_stated(stated: &TensorSpec, found: &Layout) -> Result<OutputSpec> {
    let known: Option<Vec<usize>> = stated.shape.iter().copied().collect();
    let agrees = stated.shape.len() == found.lengths.len()
        && stated.shape.iter().zip(&found.lengths).all(|(stated, found)| stated.is_none_or(|n| n == *found));
    let scalar = stated.shape.is_empty() && found.lengths == [1];
    if stated.dtype != found.dtype || !(agrees || scalar) {
        return Err(Error::internal(format!(
            "MIGraphX delivers {} {:?} for the output `{}`, which the graph states as {} {:?}",
            found.dtype, found.lengths, stated.name, stated.dtype, stated.shape
        )));
    }
    Ok(OutputSpec { dtype: found.dtype, shape: known.unwrap_or_else(|| found.lengths.clone()) })
}

impl MgxSession {
    fn bind(&mut self, name: &str, buffer: Buffer) -> Result<Option<Buffer>> {
        let layout = self.compiled.parameters.iter().find(|(known, _)| known == name);
        let (_, layout) = layout.ok_or_else(|| Error::internal(format!("there is no parameter `{name}`")))?;
        self.bound.bind(&self.compiled.runtime.api, name, layout, buffer)
    }
}

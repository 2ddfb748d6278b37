//! Sessions: programs and their buffers.

use crate::{
    engine::{Bucket, Compiled},
    ffi::{Bound, Buffer, DeviceBuffer, Layout, Stream},
};
use sdrun_abi::{
    AlignedBuffer, Error, ErrorCode, Host, MemoryReport, OutputSink, OutputSpec, RefitReport, Result,
    Session, TensorSpec, TensorView, WeightSource, WeightUpdate,
};
use sdrun_provider_common::{baked_in, phase, weight};
use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

/// Prefix of MIGraphX's names for the output buffers of a GPU program.
const OUTPUT_PREFIX: &str = "main:#output_";

pub(crate) struct MgxSession {
    compiled: Arc<Compiled>,
    /// The bound buffers of each program. Programs share the buffer of a weight that they take in the same form.
    bound: Vec<Bound>,
    stream: Option<Stream>,
}

/// New values of weights that are not bound yet.
struct Fresh {
    /// New values of parameters: program, name, buffer.
    buffers: Vec<(usize, String, Arc<Buffer>)>,
    /// Number of weights that the source delivered.
    tensors: usize,
    bytes: u64,
}

impl MgxSession {
    pub(crate) fn new(compiled: Arc<Compiled>, weights: &dyn WeightSource, host: &dyn Host) -> Result<Self> {
        compiled.target.select(compiled.runtime)?;
        let api = &compiled.runtime.api;
        let bound = compiled.buckets.iter().map(|_| Bound::new(api)).collect::<Result<_>>()?;
        let stream = match (&compiled.runtime.hip, &compiled.target.hip) {
            (Some(hip), Some(_)) if !compiled.options.offload_copy => Some(Stream::new(hip)?),
            _ => None,
        };
        let mut session = MgxSession { compiled: compiled.clone(), bound, stream };
        let all: HashSet<&str> = compiled.info.weights.iter().map(|w| w.name.as_str()).collect();
        for (index, name, buffer) in compiled.pull(&all, weights, host)?.buffers {
            session.bind(index, &name, buffer)?;
        }
        for (index, bucket) in compiled.buckets.iter().enumerate() {
            for (name, layout) in &bucket.parameters {
                if compiled.is_input_or_output(name) {
                    session.bind(index, name, Arc::new(compiled.buffer(layout)?))?;
                } else if !session.bound[index].has(name) {
                    return Err(Error::internal(format!(
                        "the program has a parameter `{name}` that is not an input, output or weight"
                    )));
                }
            }
        }
        Ok(session)
    }

    fn bind(&mut self, index: usize, name: &str, buffer: Arc<Buffer>) -> Result<Option<Arc<Buffer>>> {
        let layout = self.compiled.buckets[index].parameters.get(name);
        let layout = layout.ok_or_else(|| Error::internal(format!("there is no parameter `{name}`")))?;
        self.bound[index].bind(&self.compiled.runtime.api, name, layout, buffer)
    }

    /// Bytes of the buffers whose parameters satisfy `counts`. Counts each buffer once.
    fn bytes(&self, counts: impl Fn(&str) -> bool) -> u64 {
        let mut seen = HashSet::new();
        let buffers = self.bound.iter().flat_map(Bound::buffers);
        let counted = buffers.filter(|(name, buffer)| counts(name) && seen.insert(Arc::as_ptr(buffer)));
        counted.map(|(_, buffer)| buffer.len() as u64).sum()
    }
}

impl Compiled {
    fn is_input_or_output(&self, parameter: &str) -> bool {
        parameter.starts_with(OUTPUT_PREFIX) || self.info.inputs.iter().any(|input| input.name == parameter)
    }

    /// Allocates a buffer for a parameter, in the memory where the program expects it.
    fn buffer(&self, layout: &Layout) -> Result<Buffer> {
        let bytes = layout.dtype.bytes_of(&layout.lengths);
        let bytes = bytes.ok_or_else(|| Error::internal("a parameter of the program is too large"))?;
        match (&self.runtime.hip, &self.target.hip) {
            (Some(hip), Some(_)) if !self.options.offload_copy => {
                Ok(Buffer::Device(DeviceBuffer::new(hip, bytes)?))
            }
            _ => Ok(Buffer::Host(AlignedBuffer::new(bytes)?)),
        }
    }

    /// Allocates a buffer with these contents.
    fn filled(&self, layout: &Layout, bytes: &[u8]) -> Result<Arc<Buffer>> {
        let mut buffer = self.buffer(layout)?;
        buffer.write(bytes)?;
        Ok(Arc::new(buffer))
    }

    /// The index of the program for inputs of these shapes.
    fn bucket_for(&self, inputs: &[TensorView<'_>]) -> Result<usize> {
        let fits =
            |bucket: &Bucket| bucket.inputs.iter().zip(inputs).all(|(shape, input)| shape == input.shape);
        self.buckets.iter().position(fits).ok_or_else(|| {
            let listed = |shapes: &mut dyn Iterator<Item = &[usize]>| {
                let named = self.info.inputs.iter().zip(shapes);
                named.map(|(input, shape)| format!("{} {shape:?}", input.name)).collect::<Vec<_>>().join(", ")
            };
            let built = self.buckets.iter().map(|b| listed(&mut b.inputs.iter().map(Vec::as_slice)));
            Error::invalid(format!(
                "the engine was built for {1}, not for {0}",
                listed(&mut inputs.iter().map(|input| input.shape)),
                built.collect::<Vec<_>>().join("; for ")
            ))
            .with_hint("build it again and include these shapes")
        })
    }

    /// Creates buffers with the values of all parameters that depend on the weights in `names`.
    fn pull(&self, names: &HashSet<&str>, source: &dyn WeightSource, host: &dyn Host) -> Result<Fresh> {
        let buckets = || self.buckets.iter().enumerate();
        let steps: Vec<_> = buckets()
            .flat_map(|(at, b)| b.preparation.steps(|name| names.contains(name)).map(move |step| (at, step)))
            .collect();
        let prepared: HashSet<&str> =
            steps.iter().flat_map(|(_, step)| step.weights.iter().map(String::as_str)).collect();
        let specs: Vec<_> = self.info.weights.iter().filter(|w| names.contains(w.name.as_str())).collect();
        let total = (specs.len() + steps.len()) as u64;
        let mut fresh = Fresh { buffers: Vec::new(), tensors: specs.len(), bytes: 0 };
        for (index, spec) in specs.into_iter().enumerate() {
            phase(host, "weights", index as u64, total)?;
            fresh.bytes += spec.dtype.bytes_of(&spec.shape).unwrap_or_default() as u64;
            // The compiler drops inputs that have no effect, so such a weight has no parameter.
            let mut takers =
                buckets().filter_map(|(at, b)| Some((at, b.parameters.get(&spec.name)?))).peekable();
            if takers.peek().is_none() && prepared.contains(spec.name.as_str()) {
                continue;
            }
            let weight = weight(source, spec)?;
            if let Some((_, layout)) = takers.peek() {
                let buffer = self.filled(layout, weight.data())?;
                fresh.buffers.extend(takers.map(|(at, _)| (at, spec.name.clone(), buffer.clone())));
            }
        }
        let mut made: HashMap<[u8; 32], Arc<Buffer>> = HashMap::new();
        for (index, (at, step)) in steps.into_iter().enumerate() {
            phase(host, "weights", fresh.tensors as u64 + index as u64, total)?;
            let bucket = &self.buckets[at];
            let name = bucket.preparation.name(step);
            let Some(layout) = bucket.parameters.get(name) else { continue };
            let buffer = match made.entry(step.digest) {
                Entry::Occupied(made) => made.get().clone(),
                Entry::Vacant(place) => {
                    let tensor = bucket.preparation.compute(step, source)?;
                    place.insert(self.filled(layout, tensor.data())?).clone()
                }
            };
            fresh.buffers.push((at, name.to_string(), buffer));
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
            return Err(baked_in());
        }
        compiled.target.select(compiled.runtime)?;
        // Do everything that can fail before replacing the first old weight.
        let fresh = compiled.pull(&changed.iter().copied().collect(), weights, host)?;
        let mut former: Vec<(usize, String, Option<Arc<Buffer>>)> = Vec::with_capacity(fresh.buffers.len());
        for (index, name, buffer) in fresh.buffers {
            match self.bind(index, &name, buffer) {
                Ok(old) => former.push((index, name, old)),
                Err(error) => {
                    for (index, name, old) in former {
                        old.map_or(Ok(None), |old| self.bind(index, &name, old))?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(RefitReport::new(WeightUpdate::AsInputs, fresh.tensors, fresh.bytes))
    }

    fn run(&mut self, inputs: &[TensorView<'_>], sink: &mut dyn OutputSink, host: &dyn Host) -> Result<()> {
        if host.cancelled() {
            return Err(Error::new(ErrorCode::Cancelled, "the run was cancelled before it began"));
        }
        let compiled = &self.compiled;
        compiled.checks.inputs(inputs)?;
        let index = compiled.bucket_for(inputs)?;
        let bound = &mut self.bound[index];
        compiled.target.select(compiled.runtime)?;
        for (spec, input) in compiled.info.inputs.iter().zip(inputs) {
            // Unused inputs have no parameter.
            if bound.has(&spec.name) {
                bound.write(&spec.name, input.data)?;
            }
        }
        let api = &compiled.runtime.api;
        let results = bound.run(api, &mut compiled.buckets[index].program(), self.stream.as_ref())?;
        let outputs = results.outputs(api)?;
        if outputs.len() != compiled.info.outputs.len() {
            return Err(Error::internal("MIGraphX returned a different number of outputs than it compiled"));
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
        let weights = self.bytes(|name| !self.compiled.is_input_or_output(name));
        let device = self.compiled.resident.map(|programs| programs + self.bytes(|_| true));
        Ok(MemoryReport::new(Some(weights), None, device))
    }
}

/// The shape of an output: the stated one if it is known, because MIGraphX gives a scalar a dimension. Fails if the
/// result does not match what the graph states.
fn as_stated(stated: &TensorSpec, found: &Layout) -> Result<OutputSpec> {
    let known: Option<Vec<usize>> = stated.shape.iter().copied().collect();
    let agrees = stated.shape.len() == found.lengths.len()
        && stated.shape.iter().zip(&found.lengths).all(|(stated, found)| stated.is_none_or(|n| n == *found));
    let scalar = stated.shape.is_empty() && found.lengths == [1];
    if stated.dtype != found.dtype || !(agrees || scalar) {
        return Err(Error::internal(format!(
            "MIGraphX returned {} {:?} for the output `{}`, but the graph states {} {:?}",
            found.dtype, found.lengths, stated.name, stated.dtype, stated.shape
        )));
    }
    Ok(OutputSpec { dtype: found.dtype, shape: known.unwrap_or_else(|| found.lengths.clone()) })
}

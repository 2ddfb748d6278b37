//! Sessions: a compiled model and an inference request.

use crate::ffi::{CompiledModel, InferRequest, Io};
use sdrun_abi::{
    EngineInfo, Error, Host, MemoryReport, OutputSink, OutputSpec, RefitReport, Result, Session, TensorSpec,
    TensorView, WeightSource, shape_fits,
};
use sdrun_provider_common::{baked_in, checks::Checks};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// If the last run took longer than this, the next one is polled for cancellation. Shorter runs end soon enough, and
/// avoid the cost of passing the work to another thread.
const WATCHED_FROM: Duration = Duration::from_millis(100);

/// Fill value of output buffers before the first run. If an output is an input passed straight through, OpenVINO
/// leaves the buffer untouched (seen with 2026.4.1 on the CPU). Such a model then runs with OpenVINO's own output
/// memory. If real results equal the fill value, that only costs an extra copy.
const UNWRITTEN: u8 = 0xA5;

fn is_unwritten(buffer: &[u8]) -> bool {
    !buffer.is_empty() && buffer.iter().all(|byte| *byte == UNWRITTEN)
}

/// A compiled model that can run with its current weights.
pub(crate) struct OvSession {
    request: InferRequest,
    checks: Checks,
    /// The outputs for `checks`, after those of the model.
    counts: Vec<[u8; 4]>,
    /// Types and shapes of the outputs if all shapes are fixed. Then OpenVINO writes directly into the sink's
    /// buffers.
    fixed: Option<Vec<OutputSpec>>,
    /// Whether a run has confirmed that OpenVINO writes into those buffers.
    proven: bool,
    /// Duration of the last run; `None` before the first.
    last_run: Option<Duration>,
}

impl OvSession {
    pub(crate) fn new(compiled: &Arc<CompiledModel>, info: &EngineInfo, checks: Checks) -> Result<Self> {
        let (outputs, counts) = (checks.with_outputs(&info.outputs), checks.counts());
        let fixed = fixed_outputs(&compiled.output_shapes()?, &outputs)?;
        let io = |specs: &[TensorSpec]| -> Vec<Io> {
            specs.iter().map(|spec| Io { name: spec.name.clone(), dtype: spec.dtype }).collect()
        };
        let request = compiled.request(io(&info.inputs), io(&outputs))?;
        Ok(OvSession { request, checks, counts, fixed, proven: false, last_run: None })
    }
}

/// The outputs as OpenVINO will write them if all their shapes are fixed, else `None`. Fails if OpenVINO infers a
/// shape that the graph contradicts.
fn fixed_outputs(found: &[Option<Vec<usize>>], stated: &[TensorSpec]) -> Result<Option<Vec<OutputSpec>>> {
    if found.len() != stated.len() {
        return Err(Error::internal(format!(
            "OpenVINO compiles {} outputs, but the model has {}",
            found.len(),
            stated.len()
        )));
    }
    let mut fixed = Vec::new();
    for (shape, spec) in found.iter().zip(stated) {
        let Some(shape) = shape else { return Ok(None) };
        if let Some(large) = spec.shape.iter().flatten().find(|dim| **dim > i32::MAX as usize) {
            let message =
                format!("OpenVINO has no dimensions above {}; output `{}` has {large}", i32::MAX, spec.name);
            return Err(Error::unsupported(message));
        }
        if !shape_fits(&spec.shape, shape) {
            let stated: Vec<String> =
                spec.shape.iter().map(|dim| dim.map_or("?".into(), |dim| dim.to_string())).collect();
            return Err(Error::unsupported(format!(
                "OpenVINO infers the shape {shape:?} for output `{}`, the model states [{}]",
                spec.name,
                stated.join(", ")
            )));
        }
        fixed.push(OutputSpec { dtype: spec.dtype, shape: shape.clone() });
    }
    Ok(Some(fixed))
}

impl Session for OvSession {
    fn refit(
        &mut self,
        _changed: &[&str],
        _weights: &dyn WeightSource,
        _host: &dyn Host,
    ) -> Result<RefitReport> {
        Err(baked_in())
    }

    fn run(
        &mut self,
        inputs: &[TensorView<'_>],
        outputs: &mut dyn OutputSink,
        host: &dyn Host,
    ) -> Result<()> {
        self.checks.inputs(inputs)?;
        let poll = || host.cancelled();
        let watched = self.last_run.is_none_or(|took| took > WATCHED_FROM);
        let cancelled: Option<&dyn Fn() -> bool> = if watched { Some(&poll) } else { None };
        let start = Instant::now();
        match &self.fixed {
            Some(all) => {
                let (specs, own) = all.split_at(all.len() - self.counts.len());
                let mut buffers = outputs.allocate(specs)?;
                if !self.proven {
                    buffers.iter_mut().for_each(|buffer| buffer.fill(UNWRITTEN));
                }
                let counts = own.iter().zip(self.counts.iter_mut().map(|count| &mut count[..]));
                let mut targets: Vec<(&OutputSpec, &mut [u8])> =
                    specs.iter().zip(buffers.iter_mut().map(|buffer| &mut **buffer)).chain(counts).collect();
                self.request.run(inputs, &mut targets, cancelled)?;
                if !self.proven && buffers.iter().any(|buffer| is_unwritten(buffer)) {
                    let mut request = self.request.again()?;
                    request.run_into_own(inputs, cancelled)?;
                    for (index, buffer) in buffers.into_iter().enumerate() {
                        request.output(index, buffer)?;
                    }
                    (self.request, self.fixed) = (request, None);
                }
                self.proven = true;
            }
            None => {
                let all = self.request.run_into_own(inputs, cancelled)?;
                let specs = &all[..all.len() - self.counts.len()];
                let counts = self.counts.iter_mut().map(|count| &mut count[..]);
                for (index, buffer) in outputs.allocate(specs)?.into_iter().chain(counts).enumerate() {
                    self.request.output(index, buffer)?;
                }
            }
        }
        self.checks.computed(&self.counts)?;
        self.last_run = Some(start.elapsed());
        Ok(())
    }

    fn memory(&self) -> Result<MemoryReport> {
        // OpenVINO does not report its memory.
        Ok(MemoryReport::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::DType;

    #[test]
    fn outputs_are_fixed_only_where_all_shapes_are() {
        let spec = |shape: &[Option<usize>]| TensorSpec {
            name: "y".into(),
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        let stated = [spec(&[Some(2), None]), spec(&[])];
        let fixed = fixed_outputs(&[Some(vec![2, 3]), Some(vec![])], &stated).unwrap().unwrap();
        assert_eq!(fixed[0].shape, [2, 3]);
        assert!(fixed_outputs(&[Some(vec![2, 3]), None], &stated).unwrap().is_none());
        for wrong in [vec![3, 3], vec![2], vec![2, 3, 1]] {
            let error = fixed_outputs(&[Some(wrong), Some(vec![])], &stated).unwrap_err();
            assert!(error.message.contains("`y`"), "{error}");
        }
        assert!(fixed_outputs(&[None], &stated).is_err());
    }
}

use crate::{AlignedBuffer, DType, Error, Result};
use serde::{Deserialize, Serialize};
use std::{any::Any, fmt};

/// A borrowed host tensor: contiguous, little-endian, row-major. The host aligns `data` to 64 bytes.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
    /// The bytes.
    pub data: &'a [u8],
}

/// A tensor in device memory. A run creates it, and later runs on the same device can take it as an input, in any
/// session of the same provider. Its values never change. It may outlive the session that created it. Dropping it
/// frees the memory.
pub trait DeviceTensor: Any + Send + Sync {
    /// Type and shape.
    fn spec(&self) -> &OutputSpec;

    /// Copies the values to `bytes`, whose length must match the type and shape.
    fn read(&self, bytes: &mut [u8]) -> Result<()>;
}

impl dyn DeviceTensor {
    /// Downcasts to the creator's type; `None` if it has another type.
    pub fn downcast_ref<T: DeviceTensor>(&self) -> Option<&T> {
        let tensor: &dyn Any = self;
        tensor.downcast_ref()
    }
}

impl fmt::Debug for dyn DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceTensor({} {:?})", self.spec().dtype, self.spec().shape)
    }
}

/// An input of [`Session::run_on_device`](crate::Session::run_on_device).
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// In main memory.
    Host(TensorView<'a>),
    /// On the device that created it. Fails with `InvalidArgument` for another provider, process or device.
    Device(&'a dyn DeviceTensor),
}

impl<'a> Input<'a> {
    /// Type and shape.
    pub fn spec(&self) -> (DType, &'a [usize]) {
        match *self {
            Input::Host(view) => (view.dtype, view.shape),
            Input::Device(tensor) => (tensor.spec().dtype, &tensor.spec().shape),
        }
    }
}

/// Type and shape of an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputSpec {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
}

/// Receives the outputs of a run.
pub trait OutputSink {
    /// Returns buffers for all outputs, in order, aligned to 64 bytes. The provider fills them before the run
    /// returns.
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>>;
}

/// An [`OutputSink`] that keeps outputs in vectors and reuses them between runs.
#[derive(Debug, Default)]
pub struct VecSink {
    specs: Vec<OutputSpec>,
    buffers: Vec<AlignedBuffer>,
}

impl VecSink {
    /// Type, shape and bytes of output `index` of the last run.
    pub fn get(&self, index: usize) -> Option<TensorView<'_>> {
        let (spec, buffer) = (self.specs.get(index)?, self.buffers.get(index)?);
        Some(TensorView { dtype: spec.dtype, shape: &spec.shape, data: buffer })
    }
    /// Number of outputs of the last run.
    pub fn len(&self) -> usize {
        self.specs.len()
    }
    /// Whether nothing has been written yet.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }
}

impl OutputSink for VecSink {
    fn allocate(&mut self, outputs: &[OutputSpec]) -> Result<Vec<&mut [u8]>> {
        self.buffers.resize_with(outputs.len(), AlignedBuffer::default);
        for (buffer, spec) in self.buffers.iter_mut().zip(outputs) {
            let len = spec
                .dtype
                .bytes_of(&spec.shape)
                .ok_or_else(|| Error::invalid(format!("output shape {:?} is too large", spec.shape)))?;
            buffer.resize(len)?;
        }
        self.specs = outputs.to_vec();
        Ok(self.buffers.iter_mut().map(|b| &mut **b).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sink_buffers_are_aligned_and_reused() {
        let mut sink = VecSink::default();
        let spec = [
            OutputSpec { dtype: DType::F32, shape: vec![3] },
            OutputSpec { dtype: DType::U8, shape: vec![65] },
        ];
        let first: Vec<*const u8> = sink.allocate(&spec).unwrap().iter().map(|b| b.as_ptr()).collect();
        let again: Vec<*const u8> = sink.allocate(&spec).unwrap().iter().map(|b| b.as_ptr()).collect();
        assert_eq!(first, again);
        assert!(first.iter().all(|p| p.addr() % 64 == 0));
        assert_eq!(sink.get(1).unwrap().data.len(), 65);
        assert!(sink.get(2).is_none());
    }
}

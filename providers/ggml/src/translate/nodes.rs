//! Building blocks of many operators.

use super::{Outcome, Translator, describe, refuse};
use crate::{
    ffi::{Extent, Kernel, Tensor, Type},
    gpu,
    kernels::{Layout, PackPanels, Panels, StridedCopy},
    shape,
};
use sdrun_graph::Node;

impl Translator<'_> {
    /// A node that runs a kernel. Errors at run time name `node`.
    pub(crate) fn custom(
        &mut self,
        node: &Node,
        kernel: impl Kernel + 'static,
        inputs: &[Tensor],
        type_: Type,
        extent: Extent,
    ) -> Outcome<Tensor> {
        Ok(self.builder.custom(&describe(node), Box::new(kernel), inputs, type_, extent)?)
    }
    /// Reads `input` with `strides` (in elements) from element `start` on. Copies unless the result is a contiguous run of the input.
    pub(crate) fn strided(
        &mut self,
        node: &Node,
        input: Tensor,
        dims: &[usize],
        strides: &[isize],
        start: usize,
    ) -> Outcome<Tensor> {
        let (type_, len) = (self.builder.type_of(input), self.builder.len(input));
        let Some(copy) = StridedCopy::new(dims, strides, start, type_.size(), len) else {
            return refuse("it would read outside its input");
        };
        let extent = shape::extent(dims);
        match copy.as_run() {
            Some(0) if shape::len(dims) == len => return Ok(self.builder.reshape(input, extent)?),
            Some(start) => return Ok(self.builder.run(input, start, extent)?),
            None => {}
        }
        if self.target.gpu().is_some()
            && let Some(copy) = gpu::strided(&mut self.builder, input, dims, strides, start)?
        {
            return Ok(self.builder.reshape(copy, extent)?);
        }
        self.custom(node, copy, &[input], type_, extent)
    }
    /// Transposes `input`, which has the shape `shape`, to the order `perm` of axes.
    pub(crate) fn transpose(
        &mut self,
        node: &Node,
        input: Tensor,
        shape: &[usize],
        perm: &[usize],
    ) -> Outcome<Tensor> {
        let dense = shape::strides(shape);
        let dims: Vec<usize> = perm.iter().map(|axis| shape[*axis]).collect();
        let strides: Vec<isize> = perm.iter().map(|axis| dense[*axis] as isize).collect();
        self.strided(node, input, &dims, &strides, 0)
    }
    /// Packs a computed tensor into panels. `layout` describes one matrix; `dims` and `strides` describe the stack, which has one matrix
    /// for each group of the panels.
    pub(crate) fn panels(
        &mut self,
        node: &Node,
        tensor: Tensor,
        panels: Panels,
        layout: Layout,
        dims: &[usize],
        strides: &[isize],
    ) -> Outcome<Tensor> {
        let kernel = PackPanels { panels, dims: dims.to_vec(), strides: strides.to_vec(), layout };
        self.custom(node, kernel, &[tensor], Type::F32, [panels.len(), 1, 1, 1])
    }
}

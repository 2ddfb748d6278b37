//! Operations of ggml for devices. On the CPU, our kernels do the same.

use super::{
    api::*,
    builder::{Builder, MULTIPLICATIONS_PER_NS},
    tensor::{Extent, Tensor, Type, check, count, signed},
};
use sdrun_abi::Result;
use std::{
    collections::HashSet,
    ffi::{c_int, c_void},
};

/// The function of the gate of a gated linear unit: `enum ggml_glu_op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(i32)]
pub(crate) enum Gate {
    Relu = 0,
    GeluTanh = 1,
    Silu = 2,
    GeluErf = 4,
    GeluQuick = 5,
}

impl Builder {
    /// The number of tensors so far.
    pub(crate) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Assigns to the GPU every node that computes `tensor` and is newer than the first `before` tensors, if the GPU supports all of
    /// them. Returns whether it does. Nodes that ggml's scheduler assigns itself may run on the CPU, where ggml looks some functions
    /// up in f16 tables.
    pub(crate) fn give_to_device(&mut self, tensor: Tensor, before: usize) -> bool {
        let Some(gpu) = self.target.gpu() else { return false };
        let new: HashSet<TensorPtr> = self.tensors[before..].iter().copied().collect();
        let (mut left, mut seen) = (vec![self.raw(tensor)], HashSet::new());
        let mut nodes = Vec::new();
        while let Some(raw) = left.pop() {
            if !new.contains(&raw) || !seen.insert(raw) {
                continue;
            }
            // SAFETY: tensors of this builder and a device of its ggml.
            let (computes, runs, sources) = unsafe {
                let computes = (*raw).op != OP_NONE && (*raw).view_src.is_null();
                let runs = !computes || (self.target.ggml.api.ggml_backend_dev_supports_op)(gpu.device, raw);
                (computes, runs, (*raw).src)
            };
            if !runs {
                return false;
            }
            nodes.extend(computes.then_some(raw));
            left.extend(sources.into_iter().filter(|source| !source.is_null()));
        }
        self.device_nodes.extend(nodes);
        true
    }

    // ---- moving elements, all f32 ----

    /// A copy of elements of `a` that begins at element `start`. `dims` and `steps`, the distances between elements, are positive, the
    /// outermost first. There are at most four dimensions, or three if no step is 1.
    pub(crate) fn gather_strided(
        &mut self,
        a: Tensor,
        start: usize,
        dims: &[usize],
        steps: &[usize],
    ) -> Result<Tensor> {
        self.check_f32(&[a], "a strided view")?;
        let mut axes: Vec<(usize, usize)> = dims.iter().copied().zip(steps.iter().copied()).rev().collect();
        if !axes.iter().any(|(_, step)| *step == 1) {
            axes.insert(0, (1, 1));
        }
        let last: usize = axes.iter().map(|(dim, step)| (dim - 1) * step).sum();
        let fits = axes.len() <= 4 && start + last < self.len(a) && steps.iter().all(|step| *step > 0);
        check(fits, "a strided view", "at most four dimensions inside the tensor")?;
        // ggml's views are dense along their first dimension. So the dense dimension comes first and is then permuted to its place.
        let dense = axes.iter().position(|(_, step)| *step == 1).unwrap_or(0);
        let mut order: Vec<usize> = (0..4).filter(|axis| *axis != dense).collect();
        order.insert(0, dense);
        let axis = |i: usize| axes.get(order[i]).copied().unwrap_or((1, last + 1));
        let (ne, nb) = ([0, 1, 2, 3].map(|i| axis(i).0 as i64), [1, 2, 3].map(|i| axis(i).1 * 4));
        let view = self.view(|api, ctx, this| unsafe {
            // SAFETY: the last element lies inside the tensor.
            let a = this.raw(a);
            (api.ggml_view_4d)(ctx, a, ne[0], ne[1], ne[2], ne[3], nb[0], nb[1], nb[2], start * 4)
        })?;
        let [x, y, z, w] = [0, 1, 2, 3].map(|i| order[i] as c_int);
        let turned = self.view(|api, ctx, this| {
            // SAFETY: a permutation of a tensor's dimensions.
            unsafe { (api.ggml_permute)(ctx, this.raw(view), x, y, z, w) }
        })?;
        // SAFETY: any tensor can be made contiguous.
        self.node(|api, ctx, this| unsafe { (api.ggml_cont)(ctx, this.raw(turned)) })
    }
    /// `a` repeated along each dimension up to `extent`, a multiple of its own.
    pub(crate) fn repeat(&mut self, a: Tensor, extent: Extent) -> Result<Tensor> {
        let ne = self.multiples(a, extent, "repeat")?;
        // SAFETY: checked above.
        self.node(|api, ctx, this| unsafe {
            (api.ggml_repeat_4d)(ctx, this.raw(a), ne[0], ne[1], ne[2], ne[3])
        })
    }
    /// `a` followed by `b` along dimension 0.
    pub(crate) fn concat(&mut self, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.check_f32(&[a, b], "concat")?;
        check(self.extent(a)[1..] == self.extent(b)[1..], "concat", "equal extents beside the axis")?;
        // SAFETY: checked above.
        self.node(|api, ctx, this| unsafe { (api.ggml_concat)(ctx, this.raw(a), this.raw(b), 0) })
    }
    /// `a` with each element repeated along each dimension, up to `extent`.
    pub(crate) fn upscale(&mut self, a: Tensor, extent: Extent) -> Result<Tensor> {
        let ne = self.multiples(a, extent, "upscale")?;
        // SAFETY: checked above.
        self.node(|api, ctx, this| unsafe {
            (api.ggml_interpolate)(ctx, this.raw(a), ne[0], ne[1], ne[2], ne[3], SCALE_MODE_NEAREST)
        })
    }
    /// `extent` for ggml, after checking that the extent of `a` divides it.
    fn multiples(&self, a: Tensor, extent: Extent, operation: &str) -> Result<[i64; 4]> {
        self.check_f32(&[a], operation)?;
        let fits = self.extent(a).iter().zip(extent).all(|(own, all)| all % own == 0);
        check(fits && count(extent)? > 0, operation, "multiples of the extent")?;
        Ok(signed(extent))
    }
    /// `a` padded with this many zeros before and after it along each dimension.
    pub(crate) fn pad(&mut self, a: Tensor, zeros: [[usize; 2]; 4]) -> Result<Tensor> {
        self.check_f32(&[a], "pad")?;
        let small = zeros.iter().flatten().all(|n| *n < 1 << 24);
        check(small, "pad", "fewer zeros")?;
        let n = zeros.map(|pair| pair.map(|n| n as c_int));
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe {
            let a = this.raw(a);
            (api.ggml_pad_ext)(ctx, a, n[0][0], n[0][1], n[1][0], n[1][1], n[2][0], n[2][1], n[3][0], n[3][1])
        })
    }

    // ---- along dimension 0, all f32 ----

    /// `(x - mean) / sqrt(variance + epsilon)`, or `x / sqrt(mean of squares + epsilon)` if not `centred`.
    pub(crate) fn norm(&mut self, a: Tensor, epsilon: f32, centred: bool) -> Result<Tensor> {
        self.check_f32(&[a], "norm")?;
        self.node(|api, ctx, this| {
            let function = if centred { api.ggml_norm } else { api.ggml_rms_norm };
            // SAFETY: a contiguous f32 tensor.
            unsafe { function(ctx, this.raw(a), epsilon) }
        })
    }
    /// `gate` of one half, the second if `swapped`, times the other half.
    pub(crate) fn glu(&mut self, a: Tensor, gate: Gate, swapped: bool) -> Result<Tensor> {
        self.check_f32(&[a], "glu")?;
        check(self.extent(a)[0].is_multiple_of(2), "glu", "two halves")?;
        // SAFETY: checked above.
        self.node(|api, ctx, this| unsafe { (api.ggml_glu)(ctx, this.raw(a), gate as c_int, swapped) })
    }

    // ---- products, and normalization of images ----

    /// `out[n, m] = sum over k of a[k, n] * b[k, m]` in f32, for each outer index of `b`. The outer dimensions of `a` are repeated.
    /// `a` may have any floating-point or block type.
    pub(crate) fn mul_mat(&mut self, a: Tensor, b: Tensor) -> Result<Tensor> {
        self.check_f32(&[b], "mul_mat")?;
        check(
            matches!(self.type_of(a), Type::F32 | Type::F16 | Type::Bf16 | Type::Q8_0 | Type::Q4K),
            "mul_mat",
            "floating-point matrices",
        )?;
        check(self.is_contiguous(a), "mul_mat", "contiguous tensors")?;
        let (ea, eb) = (self.extent(a), self.extent(b));
        let fits = ea[0] == eb[0] && eb[2] % ea[2] == 0 && eb[3] % ea[3] == 0;
        check(fits, "mul_mat", "equal inner and repeatable outer extents")?;
        self.work += ea[0] * ea[1] * eb[1] * eb[2] * eb[3] / MULTIPLICATIONS_PER_NS;
        self.node(|api, ctx, this| unsafe {
            // SAFETY: checked above; the result is a product.
            let product = (api.ggml_mul_mat)(ctx, this.raw(a), this.raw(b));
            (api.ggml_mul_mat_set_prec)(product, PREC_F32);
            product
        })
    }
    /// Attention without a mask. Queries, keys and values are `[size, length, heads, batch]`, or `[size, heads, length, batch]` if
    /// `heads_inside`. Keys and values are first converted to `type_`. The result is `[size, heads, length, batch]`.
    pub(crate) fn flash_attention(
        &mut self,
        [q, k, v]: [Tensor; 3],
        heads_inside: [bool; 3],
        type_: Type,
        scale: f32,
    ) -> Result<Tensor> {
        self.check_f32(&[q, k, v], "attention")?;
        let mut turned = [q, k, v];
        for (tensor, _) in turned.iter_mut().zip(heads_inside).filter(|(_, inside)| *inside) {
            let plain = *tensor;
            // SAFETY: a permutation of a tensor's dimensions.
            *tensor =
                self.view(|api, ctx, this| unsafe { (api.ggml_permute)(ctx, this.raw(plain), 0, 2, 1, 3) })?;
        }
        let [eq, ek, ev] = turned.map(|tensor| self.extent(tensor));
        let fits = eq[0] == ek[0]
            && ek[1] == ev[1]
            && ek[2] == ev[2]
            && eq[2].is_multiple_of(ek[2])
            && eq[3] == ek[3]
            && eq[3] == ev[3]
            && matches!(type_, Type::F32 | Type::F16);
        check(fits, "attention", "queries, keys and values that go together")?;
        for tensor in turned[1..].iter_mut().filter(|_| type_ != Type::F32) {
            let wide = *tensor;
            // SAFETY: any f32 tensor can be rounded.
            *tensor =
                self.node(|api, ctx, this| unsafe { (api.ggml_cast)(ctx, this.raw(wide), type_ as c_int) })?;
        }
        let [q, k, v] = turned;
        self.work += 2 * ek[1] * eq.iter().product::<usize>() / MULTIPLICATIONS_PER_NS;
        let none = std::ptr::null_mut::<c_void>().cast();
        // SAFETY: checked above; the result is an attention.
        self.node(|api, ctx, this| unsafe {
            let y =
                (api.ggml_flash_attn_ext)(ctx, this.raw(q), this.raw(k), this.raw(v), none, scale, 0.0, 0.0);
            (api.ggml_flash_attn_ext_set_prec)(y, PREC_F32);
            y
        })
    }
    /// Group normalization over groups of dimension 2.
    pub(crate) fn group_norm(&mut self, a: Tensor, groups: usize, epsilon: f32) -> Result<Tensor> {
        self.check_f32(&[a], "group_norm")?;
        check(
            groups > 0 && self.extent(a)[2].is_multiple_of(groups),
            "group_norm",
            "groups that divide the channels",
        )?;
        // SAFETY: a contiguous f32 tensor.
        self.node(|api, ctx, this| unsafe {
            (api.ggml_group_norm)(ctx, this.raw(a), groups as c_int, epsilon)
        })
    }
    /// Convolution of `b` `[w, h, channels, batch]` with `a` `[kw, kh, channels, filters]`. Strides, padding (the same on both sides)
    /// and dilations are for the height, then for the width.
    pub(crate) fn conv_2d(
        &mut self,
        a: Tensor,
        b: Tensor,
        stride: [usize; 2],
        pad: [usize; 2],
        dilation: [usize; 2],
    ) -> Result<Tensor> {
        self.check_f32(&[b], "conv_2d")?;
        check(matches!(self.type_of(a), Type::F32 | Type::F16), "conv_2d", "f32 or f16 filters")?;
        let (ea, eb) = (self.extent(a), self.extent(b));
        let fits = (0..2).all(|i| eb[i] + 2 * pad[1 - i] > (ea[i] - 1) * dilation[1 - i]);
        check(ea[2] == eb[2] && fits, "conv_2d", "equal channels and a window that fits")?;
        self.work += ea.iter().product::<usize>() * eb[0] * eb[1] * eb[3] / MULTIPLICATIONS_PER_NS;
        let n = |v: usize| v as c_int;
        self.node(|api, ctx, this| unsafe {
            // SAFETY: checked above.
            (api.ggml_conv_2d_direct)(
                ctx,
                this.raw(a),
                this.raw(b),
                n(stride[1]),
                n(stride[0]),
                n(pad[1]),
                n(pad[0]),
                n(dilation[1]),
                n(dilation[0]),
            )
        })
    }
}

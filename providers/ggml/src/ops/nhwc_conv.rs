//! Convolution with channels last.

use super::{
    Operator,
    activation::activation,
    conv::{add_after, operands, window},
    matmul::{Left, product},
};
use crate::{
    ffi::{Tensor, Type},
    form::Form,
    kernels::{Activation, DepthwiseNhwc, Layout, Patches, Window},
    shape,
    translate::{Operand, Outcome, Translator, View, refuse},
};
use sdrun_graph::{Node, ValueId};

pub(super) const OPERATORS: &[Operator] = &[Operator {
    name: "NhwcConv",
    takes: "float, two spatial dimensions, one group or depthwise",
    translate: nhwc_conv,
}];

/// What a node computes: `act(conv(X, W, B) + Z)`.
struct NhwcConv {
    x: ValueId,
    /// Of X: images and channels.
    batch: usize,
    channels: usize,
    filters: ValueId,
    /// Of W.
    count: usize,
    depth: usize,
    group: i64,
    window: Window,
    bias: Option<Operand>,
    addend: Option<Operand>,
    activation: Option<Activation>,
    out: Vec<usize>,
}

impl NhwcConv {
    fn of(t: &mut Translator<'_>, node: &Node) -> Outcome<Self> {
        let [(x, x_shape), (filters, filters_shape)] = operands(t, node)?;
        let out = t.output_shape(node, 0)?;
        let (&[batch, _, _, channels], &[count, depth, ..]) = (&x_shape[..], &filters_shape[..]) else {
            return refuse("its input is no image");
        };
        let (window, _) = window(node, &x_shape[1..3], &out[1..3], &filters_shape[2..])?;
        let (bias, addend) = (t.optional_float(node, 2)?, t.optional_float(node, 3)?);
        let (group, activation) = (node.int_or("group", 1), activation(node)?);
        Ok(NhwcConv {
            x,
            batch,
            channels,
            filters,
            count,
            depth,
            group,
            window,
            bias,
            addend,
            activation,
            out,
        })
    }

    /// Whether it is a product of matrices.
    fn is_product(&self) -> bool {
        self.depth == self.channels && self.group == 1
    }
    fn is_depthwise(&self) -> bool {
        self.depth == 1 && self.count == self.channels && self.group == self.channels as i64
    }
    fn taps(&self) -> usize {
        self.window.kernel.iter().product()
    }

    /// The left operand of the product: for each image a row for each pixel of the output.
    fn left(&self, t: &mut Translator<'_>) -> Outcome<Left> {
        let rows = [self.batch, self.window.output.iter().product(), self.depth * self.taps()];
        if self.window.is_pointwise() {
            return Ok((t.view_as(self.x, &rows)?, None));
        }
        let x = t.view(self.x)?;
        let [row, col, channel] = [1, 2, 3].map(|axis| x.strides[axis].unsigned_abs());
        let patches = Patches::new(self.window.clone(), self.channels, [channel, row, col]);
        let strides = vec![x.strides[0], 0, 0];
        Ok((View { shape: rows.to_vec(), strides, ..x }, Some(patches)))
    }

    /// The filters, stored or computed, in the layout that the depthwise kernel needs.
    fn depthwise_filters(&self, t: &mut Translator<'_>, node: &Node) -> Outcome<Tensor> {
        let panels = DepthwiseNhwc::panels(self.channels, self.taps());
        if t.is_stored(self.filters) {
            let form = Form::Panels { panels, transposed: false, blocks: None };
            return t.weight(self.filters, form, Type::F32);
        }
        let plain = t.operand(self.filters)?;
        let layout = Layout { start: 0, row_step: self.taps(), depth_step: 1 };
        t.panels(node, plain.tensor, panels, layout, &[], &[])
    }

    fn depthwise(&self, activation: Option<Activation>) -> DepthwiseNhwc {
        let NhwcConv { batch, channels, .. } = *self;
        let (window, bias) = (self.window.clone(), self.bias.is_some());
        DepthwiseNhwc { batch, channels, window, bias, activation }
    }
}

/// A matrix product, possibly over patches, or a depthwise convolution.
fn nhwc_conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let conv = NhwcConv::of(t, node)?;
    let y = if conv.is_product() {
        let left = conv.left(t)?;
        let matrix = (conv.filters, vec![conv.count, conv.depth * conv.taps()], true);
        product(t, node, left, matrix, &conv.out, [conv.bias, conv.addend], conv.activation)?
    } else if conv.is_depthwise() {
        let mut inputs = vec![t.operand(conv.x)?.tensor, conv.depthwise_filters(t, node)?];
        inputs.extend(conv.bias.iter().map(|bias| bias.tensor));
        let kernel = conv.depthwise(conv.activation.filter(|_| conv.addend.is_none()));
        let y = t.custom(node, kernel, &inputs, Type::F32, shape::extent(&conv.out))?;
        add_after(t, node, y, &conv.out, conv.addend, conv.activation)?
    } else {
        return refuse("it has groups of several channels");
    };
    t.define(node, 0, y)
}

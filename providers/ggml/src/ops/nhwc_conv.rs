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
    kernels::{Activation, DepthwiseNhwc, Gemm, InvertedResidual, Layout, Panels, Patches, Window},
    shape,
    simd::{
        Level,
        product::{DEPTH, Taps},
    },
    translate::{Operand, Outcome, Translator, View, refuse},
};
use sdrun_graph::{Node, ValueId, fused::DOMAIN};

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

    /// The filters, stored or computed, as the depthwise kernel wants them.
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

/// A product of matrices, of which one may be made of patches, or depthwise.
fn nhwc_conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let conv = NhwcConv::of(t, node)?;
    let y = if let Some(y) = inverted_residual(t, node, &conv)? {
        y
    } else if conv.is_product() {
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

/// Elements of an image that no second level cache keeps from one operation to the next.
const LARGE: usize = 1 << 17;

/// The output of a product, of a depthwise convolution that nobody else reads, of another product that nobody else reads, where
/// the image between them is large: one kernel computes the three.
fn inverted_residual(t: &mut Translator<'_>, node: &Node, projection: &NhwcConv) -> Outcome<Option<Tensor>> {
    let before = |t: &mut Translator<'_>, conv: &NhwcConv| {
        let node = t.producer(conv.x).filter(|n| n.domain == DOMAIN && n.op_type == "NhwcConv");
        match node.filter(|_| t.is_read_once(conv.x)) {
            Some(node) => NhwcConv::of(t, node).map(Some),
            None => Ok(None),
        }
    };
    let Some(depthwise) = before(t, projection)? else { return Ok(None) };
    let Some(expansion) = before(t, &depthwise)? else { return Ok(None) };
    let convs = [&expansion, &depthwise, projection];
    let kinds = expansion.is_product() && depthwise.is_depthwise() && projection.is_product();
    let whole = |addend: &Operand| shape::len(&addend.shape) == shape::len(&projection.out);
    let fits = kinds
        && projection.window.is_pointwise()
        && convs.iter().all(|conv| t.is_stored(conv.filters))
        && expansion.addend.is_none()
        && depthwise.addend.is_none()
        && projection.addend.as_ref().is_none_or(whole)
        && shape::len(&expansion.out[1..]) >= LARGE;
    if !fits {
        return Ok(None);
    }
    let (x, patches) = expansion.left(t)?;
    let mut inputs = vec![x.tensor];
    let widening = stored_product(t, &expansion, (&x.strides, patches), &mut inputs)?;
    inputs.push(depthwise.depthwise_filters(t, node)?);
    inputs.extend(depthwise.bias.iter().map(|bias| bias.tensor));
    let row = depthwise.channels as isize;
    let narrowing = stored_product(t, projection, (&[0, row, 1], None), &mut inputs)?;
    let kernel = InvertedResidual {
        expansion: widening,
        depthwise: depthwise.depthwise(depthwise.activation),
        projection: narrowing,
    };
    t.custom(node, kernel, &inputs, Type::F32, shape::extent(&projection.out)).map(Some)
}

/// The product of stored filters and pixels that lie so, whose other inputs are put after `inputs`.
fn stored_product(
    t: &mut Translator<'_>,
    conv: &NhwcConv,
    (steps, patches): (&[isize], Option<Patches>),
    inputs: &mut Vec<Tensor>,
) -> Outcome<Gemm> {
    let level = Level::detect();
    let panels = Panels::right(level, t.words(), [1, conv.count, conv.depth * conv.taps()]);
    let (blocks, filters) = t.matrix(conv.filters, panels, false)?;
    inputs.push(filters);
    inputs.extend(conv.bias.iter().chain(&conv.addend).map(|added| added.tensor));
    let [row_step, depth_step] = [steps[1], steps[2]].map(isize::unsigned_abs);
    Ok(Gemm {
        level,
        batch: conv.batch,
        rows: conv.window.output.iter().product(),
        dims: vec![conv.batch],
        strides: vec![steps[0]],
        layout: Layout { start: 0, row_step, depth_step },
        patches,
        panels,
        blocks,
        bias: conv.bias.is_some(),
        addend: conv.addend.is_some(),
        activation: conv.activation,
        taps: Taps::dense(DEPTH, panels.block),
    })
}

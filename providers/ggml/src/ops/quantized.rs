//! Products and convolutions of quantized tensors.

use super::{Operator, conv::window};
use crate::{
    ffi::{Tensor, Type},
    form::Form,
    kernels::{Extract, FindRange, Finish, IntegerProduct, PackQuads, Quads, QuantizeRows, Right, Zeros},
    shape,
    simd::int8::Bytes,
    translate::{Outcome, Translator, refuse},
};
use sdrun_abi::DType;
use sdrun_graph::{Node, ValueId};

const MATRICES: &str = "bytes, any ranks from 2 and batch shapes that broadcast";
const FILTERS: &str = "bytes, one or two spatial dimensions";

pub(super) const OPERATORS: &[Operator] = &[
    Operator { name: "MatMulInteger", takes: MATRICES, translate: matmul_integer },
    Operator { name: "QLinearMatMul", takes: MATRICES, translate: qlinear_matmul },
    Operator { name: "MatMulIntegerToFloat", takes: MATRICES, translate: matmul_to_float },
    Operator {
        name: "DynamicQuantizeMatMul",
        takes: "a float matrix and one of bytes",
        translate: dynamic_matmul,
    },
    Operator { name: "ConvInteger", takes: FILTERS, translate: conv_integer },
    Operator { name: "QLinearConv", takes: FILTERS, translate: qlinear_conv },
];

/// A right operand in [`Quads::Panels`].
pub(super) struct Factors {
    pub(super) tensor: Tensor,
    pub(super) scale: Tensor,
    pub(super) zero: Option<Tensor>,
    pub(super) signed: bool,
    pub(super) depth: usize,
    pub(super) cols: usize,
}

/// A tensor of bytes packed for products. Weights are packed when they are loaded, computed tensors in every run.
pub(super) fn quads(t: &mut Translator<'_>, node: &Node, id: ValueId, quads: Quads) -> Outcome<Tensor> {
    let dtype = t.dtype(id)?;
    if !matches!(dtype, DType::I8 | DType::U8) {
        return refuse(format!("an operand is {dtype}"));
    }
    let stored = t.stored_source(id);
    if t.is_stored(stored) {
        return t.weight(stored, Form::Quads(quads), Type::I8);
    }
    let tensor = t.operand(id)?.tensor;
    let kernel = PackQuads { quads, signed: dtype == DType::I8 };
    t.custom(node, kernel, &[tensor], Type::I8, [quads.bytes(), 1, 1, 1])
}

/// The optional zero point of an operand of this type.
pub(super) fn zero_point(
    t: &mut Translator<'_>,
    id: Option<ValueId>,
    dtype: DType,
) -> Outcome<Option<Tensor>> {
    let Some(id) = id else { return Ok(None) };
    if t.dtype(id)? != dtype {
        return refuse("a zero point is of another type than its operand");
    }
    Ok(Some(t.operand(id)?.tensor))
}

/// The inputs of a kernel under construction.
struct Slots(Vec<Tensor>);

impl Slots {
    fn add(&mut self, tensor: Tensor) -> usize {
        self.0.push(tensor);
        self.0.len() - 1
    }
    /// The zero points of operand `id`: input `i` of the node.
    fn zeros(&mut self, t: &mut Translator<'_>, node: &Node, id: ValueId, i: usize) -> Outcome<Zeros> {
        let dtype = t.dtype(id)?;
        let input = zero_point(t, node.input(i), dtype)?.map(|tensor| self.add(tensor));
        Ok(Zeros { input, signed: dtype == DType::I8 })
    }
    /// Scales or a bias: input `i` of the node, of one of these lengths.
    fn list(&mut self, t: &mut Translator<'_>, node: &Node, i: usize, lens: &[usize]) -> Outcome<usize> {
        let list = t.float(node, i)?;
        check_list(&list.shape, lens)?;
        Ok(self.add(list.tensor))
    }
}

fn check_list(list: &[usize], lens: &[usize]) -> Outcome {
    if lens.contains(&shape::len(list)) {
        return Ok(());
    }
    refuse(format!("a scale, zero point or bias has the shape {list:?}"))
}

/// A product of two matrices of bytes, and its inputs.
struct Matrices {
    slots: Slots,
    kernel: IntegerProduct,
    out: Vec<usize>,
}

impl Matrices {
    /// Inputs `a` and `b` of a node with the zero points `a_zero` and `b_zero`.
    fn new(
        t: &mut Translator<'_>,
        node: &Node,
        [a, b]: [usize; 2],
        [a_zero, b_zero]: [usize; 2],
    ) -> Outcome<Self> {
        let (a, b) = (t.input_id(node, a)?, t.input_id(node, b)?);
        let (a_shape, b_shape, out) = (t.shape(a)?, t.shape(b)?, t.output_shape(node, 0)?);
        let (Some((a_batch, &[rows, depth])), Some((b_batch, &[_, cols]))) =
            (a_shape.split_last_chunk::<2>(), b_shape.split_last_chunk::<2>())
        else {
            return refuse("an operand is a vector");
        };
        let zero_len = |t: &Translator<'_>, i: usize| {
            node.input(i).map_or(Ok(1), |id| t.shape(id).map(|s| shape::len(&s)))
        };
        let (a_zeros, b_zeros) = (zero_len(t, a_zero)?, zero_len(t, b_zero)?);
        let (mut rows, mut matrices) = (rows, vec![(0, 0)]);
        if shape::len(b_batch) == 1 && a_zeros == 1 {
            // If one matrix serves all batches, the batches are just more rows.
            rows *= shape::len(a_batch);
        } else {
            let (Some(left), Some(right)) =
                (broadcast_indices(a_batch, &out), broadcast_indices(b_batch, &out))
            else {
                return refuse("its batches do not broadcast");
            };
            matrices = left.into_iter().zip(right).collect();
        }
        for (zeros, count, all) in [(a_zeros, rows, a_batch), (b_zeros, cols, b_batch)] {
            if ![1, count, count * shape::len(all)].contains(&zeros) {
                return refuse(format!("there are {zeros} zero points"));
            }
        }
        let kernel = IntegerProduct {
            bytes: Bytes::detect(),
            rows,
            cols,
            channels: depth,
            taps: 1,
            right: Right::Panels,
            left_zeros: Zeros { input: None, signed: false },
            right_zeros: Zeros { input: None, signed: false },
            finish: Finish::Sums,
            matrices,
        };
        let left = kernel.left_quads(shape::len(&a_shape) / (rows * depth));
        let left = quads(t, node, a, left)?;
        let right = quads(t, node, b, Quads::Panels { matrices: shape::len(b_batch), depth, cols })?;
        let mut slots = Slots(vec![left, right]);
        let left_zeros = slots.zeros(t, node, a, a_zero)?;
        let right_zeros = slots.zeros(t, node, b, b_zero)?;
        Ok(Matrices { slots, kernel: IntegerProduct { left_zeros, right_zeros, ..kernel }, out })
    }

    fn finish(self, t: &mut Translator<'_>, node: &Node, finish: Finish, type_: Type) -> Outcome {
        let kernel = IntegerProduct { finish, ..self.kernel };
        let y = t.custom(node, kernel, &self.slots.0, type_, shape::extent(&self.out))?;
        t.define(node, 0, y)
    }
}

/// The index in a stack `batch` of the operand of each matrix of `out`.
fn broadcast_indices(batch: &[usize], out: &[usize]) -> Option<Vec<usize>> {
    let stack = &out[..out.len() - 2];
    let strides = shape::broadcast_view(batch, &shape::dense(batch), stack)?;
    let index = |i: usize| usize::try_from(shape::offset(i, stack, &strides)).ok();
    (0..shape::len(stack)).map(index).collect()
}

fn matmul_integer(t: &mut Translator<'_>, node: &Node) -> Outcome {
    Matrices::new(t, node, [0, 1], [2, 3])?.finish(t, node, Finish::Sums, Type::I32)
}

fn matmul_to_float(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let mut product = Matrices::new(t, node, [0, 1], [4, 5])?;
    let cols = product.kernel.cols;
    let left = product.slots.list(t, node, 2, &[1])?;
    let right = product.slots.list(t, node, 3, &[1, cols])?;
    let bias = node.input(6).map(|_| product.slots.list(t, node, 6, &[cols])).transpose()?;
    product.finish(t, node, Finish::Scale { left, right, bias }, Type::F32)
}

fn qlinear_matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let mut product = Matrices::new(t, node, [0, 3], [2, 5])?;
    let (rows, cols) = (product.kernel.rows, product.kernel.cols);
    let left = product.slots.list(t, node, 1, &[1, rows])?;
    let right = product.slots.list(t, node, 4, &[1, cols])?;
    let finish = requantize(t, node, &mut product.slots, (left, right), None)?;
    product.finish(t, node, finish, Type::I8)
}

/// Requantizes to the scale and zero point of the output, which are inputs 6 and 7.
fn requantize(
    t: &mut Translator<'_>,
    node: &Node,
    slots: &mut Slots,
    (left, right): (usize, usize),
    bias: Option<usize>,
) -> Outcome<Finish> {
    let zero = t.input_id(node, 7)?;
    check_list(&t.shape(zero)?, &[1])?;
    let out = slots.list(t, node, 6, &[1])?;
    let dtype = t.dtype(zero)?;
    if !matches!(dtype, DType::I8 | DType::U8) {
        return refuse(format!("its output is {dtype}"));
    }
    Ok(Finish::Requantize { left, right, out, zero: slots.zeros(t, node, zero, 7)?, bias })
}

fn dynamic_matmul(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let (a, b) = (t.float(node, 0)?, t.input_id(node, 1)?);
    let (b_shape, out) = (t.shape(b)?, t.output_shape(node, 0)?);
    let (Some(&depth), &[_, cols]) = (a.shape.last().filter(|_| a.shape.len() > 1), &b_shape[..]) else {
        return refuse("the second operand is no matrix, or the first is a vector");
    };
    let dtype = t.dtype(b)?;
    let tensor = quads(t, node, b, Quads::Panels { matrices: 1, depth, cols })?;
    let scale = t.float(node, 2)?;
    check_list(&scale.shape, &[1, cols])?;
    if let Some(zero) = node.input(3) {
        check_list(&t.shape(zero)?, &[1, cols])?;
    }
    let zero = zero_point(t, node.input(3), dtype)?;
    let bias = t.optional_float(node, 4)?;
    if let Some(bias) = &bias {
        check_list(&bias.shape, &[cols])?;
    }
    let factors = Factors { tensor, scale: scale.tensor, zero, signed: dtype == DType::I8, depth, cols };
    let left = (a.tensor, [shape::len(&a.shape) / depth, depth]);
    let y = dynamic_product(t, node, left, (factors, 1), bias.map(|bias| bias.tensor))?;
    let y = t.builder.reshape(y, shape::extent(&out))?;
    t.define(node, 0, y)
}

/// Quantizes an f32 matrix of `rows` x `depth` and multiplies it by each of a stack of quantized matrices.
pub(super) fn dynamic_product(
    t: &mut Translator<'_>,
    node: &Node,
    (a, [rows, depth]): (Tensor, [usize; 2]),
    (b, matrices): (Factors, usize),
    bias: Option<Tensor>,
) -> Outcome<Tensor> {
    let range = t.custom(node, FindRange, &[a], Type::I8, [FindRange::BYTES, 1, 1, 1])?;
    let scale = t.custom(node, Extract { start: 0, len: 1, size: 4 }, &[range], Type::F32, [1; 4])?;
    let zero = t.custom(node, Extract { start: 4, len: 1, size: 1 }, &[range], Type::I8, [1; 4])?;
    let bytes = rows * depth.next_multiple_of(4);
    let left = t.custom(node, QuantizeRows { rows, depth }, &[a, range], Type::I8, [bytes, 1, 1, 1])?;
    let mut slots = Slots(vec![left, b.tensor]);
    let left_zeros = Zeros { input: Some(slots.add(zero)), signed: false };
    let right_zeros = Zeros { input: b.zero.map(|zero| slots.add(zero)), signed: b.signed };
    let (left, right) = (slots.add(scale), slots.add(b.scale));
    let kernel = IntegerProduct {
        bytes: Bytes::detect(),
        matrices: (0..matrices).map(|matrix| (0, matrix)).collect(),
        rows,
        cols: b.cols,
        channels: b.depth,
        taps: 1,
        right: Right::Panels,
        left_zeros,
        right_zeros,
        finish: Finish::Scale { left, right, bias: bias.map(|bias| slots.add(bias)) },
    };
    t.custom(node, kernel, &slots.0, Type::F32, [b.cols, rows, matrices, 1])
}

/// A convolution of inputs `x` and `w` with their zero points.
fn convolution(
    t: &mut Translator<'_>,
    node: &Node,
    [x, w]: [usize; 2],
    [x_zero, w_zero]: [usize; 2],
) -> Outcome<Matrices> {
    let (x, w) = (t.input_id(node, x)?, t.input_id(node, w)?);
    let (x_shape, w_shape, out) = (t.shape(x)?, t.shape(w)?, t.output_shape(node, 0)?);
    if x_shape.len() < 3 {
        return refuse("it has no spatial dimension");
    }
    let (window, _) = window(node, &x_shape[2..], &out[2..], &w_shape[2..])?;
    let groups = usize::try_from(node.int_or("group", 1)).unwrap_or(0);
    if groups == 0 || !x_shape[1].is_multiple_of(groups) || !w_shape[0].is_multiple_of(groups) {
        return refuse(format!("it has {groups} groups"));
    }
    let (images, channels, filters) = (x_shape[0], x_shape[1] / groups, w_shape[0] / groups);
    for (i, lens) in [(x_zero, &[1][..]), (w_zero, &[1, filters * groups])] {
        if let Some(id) = node.input(i) {
            check_list(&t.shape(id)?, lens)?;
        }
    }
    let kernel = IntegerProduct {
        bytes: Bytes::detect(),
        matrices: (0..images * groups).map(|i| (i % groups, i)).collect(),
        rows: filters,
        cols: shape::len(&out[2..]),
        channels,
        taps: shape::len(&w_shape[2..]),
        right: Right::Patches { window, channels: channels.div_ceil(4) },
        left_zeros: Zeros { input: None, signed: false },
        right_zeros: Zeros { input: None, signed: false },
        finish: Finish::Sums,
    };
    let left = quads(t, node, w, kernel.left_quads(groups))?;
    let image = Quads::Image { planes: images * groups, channels, pixels: shape::len(&x_shape[2..]) };
    let mut slots = Slots(vec![left, quads(t, node, x, image)?]);
    let left_zeros = slots.zeros(t, node, w, w_zero)?;
    let right_zeros = slots.zeros(t, node, x, x_zero)?;
    Ok(Matrices { slots, kernel: IntegerProduct { left_zeros, right_zeros, ..kernel }, out })
}

fn conv_integer(t: &mut Translator<'_>, node: &Node) -> Outcome {
    convolution(t, node, [0, 1], [2, 3])?.finish(t, node, Finish::Sums, Type::I32)
}

fn qlinear_conv(t: &mut Translator<'_>, node: &Node) -> Outcome {
    let mut product = convolution(t, node, [0, 3], [2, 5])?;
    let filters = product.out[1];
    let left = product.slots.list(t, node, 4, &[1, filters])?;
    let right = product.slots.list(t, node, 1, &[1])?;
    let bias = match node.input(8) {
        None => None,
        Some(id) => {
            let bias = t.operand(id)?;
            if bias.dtype != DType::I32 {
                return refuse(format!("its bias is {}", bias.dtype));
            }
            check_list(&bias.shape, &[filters])?;
            Some(product.slots.add(bias.tensor))
        }
    };
    let finish = requantize(t, node, &mut product.slots, (left, right), bias)?;
    product.finish(t, node, finish, Type::I8)
}

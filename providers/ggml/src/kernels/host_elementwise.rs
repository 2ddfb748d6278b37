use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
    storage::{from_storage, into_storage},
};
use sdrun_abi::DType;
use sdrun_graph::{Node, Tensor, eval};

/// Operators whose output elements depend on one element of each input, for every type.
const ELEMENTWISE: [&str; 65] = [
    "Abs",
    "Acos",
    "Acosh",
    "Add",
    "And",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BitShift",
    "BitwiseAnd",
    "BitwiseNot",
    "BitwiseOr",
    "BitwiseXor",
    "Cast",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "Cosh",
    "Div",
    "Elu",
    "Equal",
    "Erf",
    "Exp",
    "Floor",
    "Greater",
    "GreaterOrEqual",
    "HardSigmoid",
    "HardSwish",
    "IsInf",
    "IsNaN",
    "LeakyRelu",
    "Less",
    "LessOrEqual",
    "Log",
    "Max",
    "Mean",
    "Min",
    "Mish",
    "Mod",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "PRelu",
    "Pow",
    "Reciprocal",
    "Relu",
    "Round",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sign",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Sub",
    "Sum",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Where",
    "Xor",
];

/// An element-wise node that the reference implementation (`sdrun_graph::eval`) evaluates on all threads, one run of elements at a
/// time.
pub(crate) struct HostElementwise {
    node: Node,
    opset: i64,
    operands: Vec<Operand>,
    /// The shape of the output.
    dims: Vec<usize>,
}

struct Operand {
    dtype: DType,
    /// The value, if it is known before the run. Otherwise the operand is an input of the kernel.
    constant: Option<Tensor>,
    /// The stride of each dimension of the output, in elements.
    strides: Vec<isize>,
    dense: bool,
    /// Whether it has no dimensions.
    scalar: bool,
}

impl HostElementwise {
    /// For a node with these inputs, each a constant or the kernel's next input. Returns `None` if the node is not element-wise.
    pub(crate) fn new(
        node: &Node,
        opset: i64,
        inputs: &[(DType, Vec<usize>, Option<Tensor>)],
        dims: &[usize],
    ) -> Option<Self> {
        let plain = node.domain.is_empty() && ELEMENTWISE.contains(&&*node.op_type);
        (plain && node.inputs.iter().all(Option::is_some)).then_some(())?;
        let mut operands = Vec::with_capacity(inputs.len());
        for (dtype, shape, constant) in inputs {
            let strides = shape::broadcast_strides(shape, dims)?;
            let dense = shape::len(shape) == shape::len(dims);
            let scalar = shape.is_empty();
            operands.push(Operand { dtype: *dtype, constant: constant.clone(), strides, dense, scalar });
        }
        Some(HostElementwise { node: node.clone(), opset, operands, dims: dims.to_vec() })
    }

    /// The elements of an operand for a run of the output, or a single element if it is the same for the whole run.
    fn run(&self, operand: &Operand, bytes: &[u8], size: usize, start: usize, len: usize) -> Vec<u8> {
        if operand.dense {
            return bytes[start * size..(start + len) * size].to_vec();
        }
        if operand.strides.iter().all(|stride| *stride == 0) {
            return bytes[..size].to_vec();
        }
        let mut run = Vec::with_capacity(len * size);
        for i in start..start + len {
            let at = shape::offset(i, &self.dims, &operand.strides) as usize * size;
            run.extend_from_slice(&bytes[at..at + size]);
        }
        run
    }
}

impl Kernel for HostElementwise {
    fn grid(&self, workers: usize) -> Grid {
        Grid::even(shape::len(&self.dims), workers)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let (start, len) = (tile.cols.start, tile.cols.len());
        let mut next = 0;
        let mut arguments = Vec::with_capacity(self.operands.len());
        for operand in &self.operands {
            let bytes = match &operand.constant {
                Some(tensor) => self.run(operand, tensor.data(), operand.dtype.size(), start, len),
                None => {
                    next += 1;
                    let type_ = inputs.type_of(next - 1);
                    let stored = self.run(operand, inputs.bytes(next - 1), type_.size(), start, len);
                    from_storage(operand.dtype, type_, &stored)?
                }
            };
            let count = bytes.len() / operand.dtype.size();
            // Clip requires scalar bounds.
            let shape = if operand.scalar { vec![] } else { vec![count] };
            arguments.push(Tensor::new(operand.dtype, shape, bytes).map_err(|e| e.to_string())?);
        }
        let arguments: Vec<Option<&Tensor>> = arguments.iter().map(Some).collect();
        let results = eval::evaluate(&self.node, self.opset, &arguments).map_err(|e| e.to_string())?;
        let result = results.first().ok_or("the output is missing")?;
        let bytes = into_storage(result.dtype(), result.data())?;
        let out = tile.run_bytes();
        match bytes.len() {
            0 => return Err("the output is empty".into()),
            n if n == out.len() => out.copy_from_slice(&bytes),
            // All operands are constant in the run.
            n => out.chunks_exact_mut(n).for_each(|element| element.copy_from_slice(&bytes)),
        }
        Ok(())
    }
}

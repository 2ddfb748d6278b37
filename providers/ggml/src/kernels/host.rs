use crate::{
    ffi::{Grid, Inputs, Kernel, Tile},
    shape,
    storage::{from_storage, into_storage},
};
use sdrun_abi::DType;
use sdrun_graph::{Node, Tensor, eval};

/// An input of a [`HostNode`].
pub(crate) enum Argument {
    /// An absent optional input.
    Absent,
    /// A value known before the run.
    Constant(Tensor),
    /// The next input of the kernel, with its type and shape in the graph.
    Computed(DType, Vec<usize>),
}

impl Argument {
    /// The shape, if the argument is present.
    pub(crate) fn shape(&self) -> Option<&[usize]> {
        match self {
            Argument::Absent => None,
            Argument::Constant(tensor) => Some(tensor.shape()),
            Argument::Computed(_, shape) => Some(shape),
        }
    }
}

/// An output of a [`HostNode`]: its type and shape in the graph.
#[derive(Clone)]
pub(crate) struct Produced {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// A node that the reference implementation (`sdrun_graph::eval`) evaluates on one thread. The output is one blob with the stored bytes
/// of all outputs, each at a multiple of 64.
pub(crate) struct HostNode {
    pub(crate) node: Node,
    pub(crate) opset: i64,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) outputs: Vec<Option<Produced>>,
    /// Bytes of an element of the kernel's output tensor: 1 for a blob, else those of the only output's type.
    pub(crate) unit: usize,
}

impl Produced {
    /// The size in bytes, as stored.
    pub(crate) fn bytes(&self) -> usize {
        crate::storage::storage_type(self.dtype).map_or(0, |type_| type_.size()) * shape::len(&self.shape)
    }
}

impl HostNode {
    /// The offset of each output in the blob, and the blob's length.
    pub(crate) fn layout(outputs: &[Option<Produced>]) -> (Vec<usize>, usize) {
        let mut end = 0;
        let starts = outputs
            .iter()
            .map(|output| {
                let start = end;
                end += output.as_ref().map_or(0, |output| output.bytes().next_multiple_of(64));
                start
            })
            .collect();
        (starts, end)
    }
    fn len(&self) -> usize {
        match &self.outputs[..] {
            [Some(only)] => only.bytes(),
            several => Self::layout(several).1,
        }
    }
}

impl Kernel for HostNode {
    fn grid(&self, _: usize) -> Grid {
        let len = self.len() / self.unit;
        Grid::flat(len, len)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let mut next = 0;
        let mut arguments = Vec::with_capacity(self.arguments.len());
        for argument in &self.arguments {
            arguments.push(match argument {
                Argument::Absent => None,
                Argument::Constant(tensor) => Some(tensor.clone()),
                Argument::Computed(dtype, shape) => {
                    next += 1;
                    let bytes = from_storage(*dtype, inputs.type_of(next - 1), inputs.bytes(next - 1))?;
                    Some(Tensor::new(*dtype, shape.clone(), bytes).map_err(|e| e.to_string())?)
                }
            });
        }
        let borrowed: Vec<Option<&Tensor>> = arguments.iter().map(Option::as_ref).collect();
        let results = eval::evaluate(&self.node, self.opset, &borrowed).map_err(|e| e.to_string())?;
        let single = self.outputs.len() == 1;
        let (starts, _) = Self::layout(&self.outputs);
        let out = tile.run_bytes();
        for (i, (expected, start)) in self.outputs.iter().zip(starts).enumerate() {
            let Some(expected) = expected else { continue };
            let result = results.get(i).ok_or_else(|| format!("output {i} is missing"))?;
            if result.dtype() != expected.dtype || result.shape() != expected.shape {
                return Err(format!(
                    "output {i} is {} {:?}, expected {} {:?}",
                    result.dtype(),
                    result.shape(),
                    expected.dtype,
                    expected.shape
                ));
            }
            let bytes = into_storage(result.dtype(), result.data())?;
            let start = if single { 0 } else { start };
            out[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
}

/// Copies one output out of the blob of a [`HostNode`].
pub(crate) struct Extract {
    pub(crate) start: usize,
    /// The number of elements of the output, and the bytes of one.
    pub(crate) len: usize,
    pub(crate) size: usize,
}

impl Kernel for Extract {
    fn grid(&self, workers: usize) -> Grid {
        Grid::even(self.len, workers)
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        let start = self.start + tile.cols.start * self.size;
        let out = tile.run_bytes();
        let len = out.len();
        out.copy_from_slice(&inputs.bytes(0)[start..start + len]);
        Ok(())
    }
}

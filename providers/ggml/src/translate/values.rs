//! What is known about the values of a graph before it runs.

use super::{Outcome, Translator, refuse};
use crate::{
    ffi::{Target, Type},
    shape,
    simd::{Level, Words},
};
use sdrun_abi::{DType, Precision};
use sdrun_graph::{Node, Tensor as HostTensor, ValueId};

impl<'g> Translator<'g> {
    /// The element type of a value.
    pub(crate) fn dtype(&self, id: ValueId) -> Outcome<DType> {
        match self.graph.value(id).dtype {
            Some(dtype) => Ok(dtype),
            None => refuse(format!("the type of {:?} is not known", self.graph.value(id).name)),
        }
    }
    /// The shape of a value. Refuses values without elements.
    pub(crate) fn shape(&self, id: ValueId) -> Outcome<Vec<usize>> {
        let value = self.graph.value(id);
        match value.known_shape() {
            Some(shape) if shape.contains(&0) => {
                refuse(format!("{:?} has no elements: {shape:?}", value.name))
            }
            Some(shape) if !shape::is_addressable(&shape) => {
                refuse(format!("{:?} is too large: {shape:?}", value.name))
            }
            Some(shape) => Ok(shape),
            None => refuse(format!("the shape of {:?} is not known", value.name)),
        }
    }
    /// The shape of output `i` of a node.
    pub(crate) fn output_shape(&self, node: &Node, i: usize) -> Outcome<Vec<usize>> {
        match node.output(i) {
            Some(id) => self.shape(id),
            None => refuse(format!("output {i} is missing")),
        }
    }
    /// Input `i` of a node, which must be present.
    pub(crate) fn input_id(&self, node: &Node, i: usize) -> Outcome<ValueId> {
        node.input(i).map_or_else(|| refuse(format!("input {i} is missing")), Ok)
    }
    /// The constant of a value that is known before the run.
    pub(crate) fn constant(&self, id: ValueId) -> Option<&HostTensor> {
        self.constants.get(&id).or_else(|| self.graph.constant(id))
    }
    /// The only element of a floating-point constant.
    pub(crate) fn scalar(&self, id: ValueId) -> Option<f32> {
        let constant = self.constant(id)?;
        if constant.len() == 1 { constant.to_f32s()?.first().copied() } else { None }
    }
    /// The integers of constant input `i` of a node. `None` if the input is absent.
    pub(crate) fn constant_ints(&self, node: &Node, i: usize, what: &str) -> Outcome<Option<Vec<i64>>> {
        let Some(id) = node.input(i) else { return Ok(None) };
        match self.constant(id).and_then(HostTensor::to_i64s) {
            Some(ints) => Ok(Some(ints)),
            None => refuse(format!("{what} are computed by the graph")),
        }
    }
    /// Whether a value is an initializer.
    pub(crate) fn is_stored(&self, id: ValueId) -> bool {
        self.graph.initializers.contains_key(&id) || self.constants.contains_key(&id)
    }
    /// The initializer of which a value is a reshaped form, or else the value itself.
    pub(crate) fn stored_source(&self, id: ValueId) -> ValueId {
        const SAME: [&str; 5] = ["Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"];
        let mut source = id;
        while let Some(node) = self.producer(source)
            && node.domain.is_empty()
            && SAME.contains(&&*node.op_type)
            && let Some(input) = node.input(0)
        {
            source = input;
        }
        if self.is_stored(source) { source } else { id }
    }
    /// The node that computes a value.
    pub(crate) fn producer(&self, id: ValueId) -> Option<&'g Node> {
        self.producers.get(&id).map(|index| &self.graph.nodes[*index])
    }
    /// The words of our products: bf16 pairs if the precision allows them and the processor multiplies them.
    pub(crate) fn words(&self) -> Words {
        let low = matches!(self.precision, Precision::Bf16 | Precision::Q8_0 | Precision::Q4K);
        if low && Level::detect().multiplies_bf16() { Words::Bf16 } else { Words::F32 }
    }
    /// The words of products with a stored matrix of this many elements: bytes if it is in blocks and the processor multiplies them.
    pub(crate) fn words_of_matrix(&self, elements: usize) -> Words {
        let blocks = self.blocks(elements);
        let bytes = blocks.is_some_and(|blocks| Level::detect().multiplies_bytes(blocks.largest()));
        if bytes { Words::Bytes } else { self.words() }
    }
    /// The device on which the graph runs.
    pub(crate) fn target(&self) -> Target {
        self.target
    }
    /// The precision of the engine.
    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }
    /// The storage type of matrices and convolution filters without blocks.
    pub(crate) fn matrix_type(&self) -> Type {
        match self.precision {
            Precision::Fp32 => Type::F32,
            Precision::Fp16 | Precision::Q8_0 | Precision::Q4K => Type::F16,
            Precision::Bf16 => Type::Bf16,
        }
    }
}

//! The tensors of operands and results.

use super::{Operand, Outcome, Translator, View, refuse};
use crate::{
    ffi::{Home, Tensor, Type},
    form::Form,
    kernels::{Blocks, Panels},
    ops, shape,
    simd::Words,
    storage::{is_f32, storage_type},
    weights::Constant,
};
use sdrun_abi::{Error, Precision};
use sdrun_graph::{Initializer, Node, Tensor as HostTensor, ValueId};

impl Translator<'_> {
    /// The tensor of a value, in plain row-major form.
    pub(crate) fn operand(&mut self, id: ValueId) -> Outcome<Operand> {
        let (dtype, shape) = (self.dtype(id)?, self.shape(id)?);
        let tensor = match self.values.get(&id) {
            Some(tensor) => *tensor,
            None if self.is_stored(id) => {
                let Some(type_) = storage_type(dtype) else {
                    return refuse(format!("{dtype} values are not supported"));
                };
                self.weight(id, Form::Plain, type_)?
            }
            None => {
                let name = &self.graph.value(id).name;
                return Err(Error::internal(format!("value {name:?} is used before it is computed")).into());
            }
        };
        Ok(Operand { tensor, dtype, shape })
    }
    /// Input `i` of a node, which must be present and of a type that is computed in f32.
    pub(crate) fn float(&mut self, node: &Node, i: usize) -> Outcome<Operand> {
        let id = self.input_id(node, i)?;
        let dtype = self.dtype(id)?;
        if !is_f32(dtype) {
            return refuse(format!("input {i} is {dtype}"));
        }
        self.operand(id)
    }
    /// As [`float`](Self::float), if the input is present.
    pub(crate) fn optional_float(&mut self, node: &Node, i: usize) -> Outcome<Option<Operand>> {
        if node.input(i).is_some() { self.float(node, i).map(Some) } else { Ok(None) }
    }
    /// An initializer, stored in `form` in main memory.
    pub(crate) fn weight(&mut self, id: ValueId, form: Form, type_: Type) -> Outcome<Tensor> {
        self.weight_at(id, form, type_, Home::Host)
    }
    /// As [`weight`](Self::weight), in main memory or in the memory of the device.
    pub(crate) fn weight_at(&mut self, id: ValueId, form: Form, type_: Type, home: Home) -> Outcome<Tensor> {
        if let Some(tensor) = self.stored.get(&(id, form, type_, home)) {
            return Ok(*tensor);
        }
        let tensor = match (self.constant(id), self.graph.initializers.get(&id)) {
            (Some(constant), _) => {
                let value = constant.clone();
                let tensor = self.builder.constant(type_, form.extent(value.shape()), home)?;
                self.placed.push(Constant { tensor, value, form, type_ });
                tensor
            }
            (None, Some(Initializer::Weight(_))) => {
                self.shape(id)?;
                let stored = self.bank.place(&self.graph.value(id).name, form, type_, home)?;
                self.builder.stored(self.bank.store(), stored)?
            }
            _ => return Err(Error::internal("a computed value was taken for a weight").into()),
        };
        self.stored.insert((id, form, type_, home), tensor);
        Ok(tensor)
    }
    /// The block format for matrices of this many elements, if the precision has one. Small matrices stay without blocks: they save
    /// little, and they are often the first and last of a network, where precision matters most.
    pub(crate) fn blocks(&self, elements: usize) -> Option<Blocks> {
        const SMALL: usize = 1 << 16;
        let blocks = match self.precision {
            Precision::Q8_0 => Some(Blocks::Q8_0),
            Precision::Q4K => Some(Blocks::Q4K),
            _ => None,
        };
        blocks.filter(|_| elements >= SMALL)
    }
    /// A stored matrix in panels, and their block format.
    pub(crate) fn matrix(
        &mut self,
        id: ValueId,
        panels: Panels,
        transposed: bool,
    ) -> Outcome<(Option<Blocks>, Tensor)> {
        let blocks = self.blocks(panels.groups * panels.rows * panels.depth);
        let type_ = match (blocks, panels.words) {
            (Some(_), _) => Type::I8,
            (None, Words::Bf16) => Type::Bf16,
            (None, _) => self.matrix_type(),
        };
        Ok((blocks, self.weight(id, Form::Panels { panels, transposed, blocks }, type_)?))
    }
    /// A tensor with these f32 elements.
    pub(crate) fn constant_tensor(&mut self, value: HostTensor, home: Home) -> Outcome<Tensor> {
        let tensor = self.builder.constant(Type::F32, shape::extent(value.shape()), home)?;
        self.placed.push(Constant { tensor, value, form: Form::Plain, type_: Type::F32 });
        Ok(tensor)
    }
    /// Defines output `i` of a node as `tensor`.
    pub(crate) fn define(&mut self, node: &Node, i: usize, tensor: Tensor) -> Outcome {
        let Some(id) = node.output(i) else { return Ok(()) };
        self.define_value(id, tensor)
    }
    /// Defines a value as `tensor`.
    pub(crate) fn define_value(&mut self, id: ValueId, tensor: Tensor) -> Outcome {
        let (shape, dtype) = (self.shape(id)?, self.dtype(id)?);
        let (len, type_) = (self.builder.len(tensor), self.builder.type_of(tensor));
        if len != shape::len(&shape) || Some(type_) != storage_type(dtype) {
            let name = &self.graph.value(id).name;
            let found = format!("{len} elements of type {type_:?}");
            return Err(
                Error::internal(format!("{name:?} is {dtype} {shape:?} but {found} were computed")).into()
            );
        }
        self.values.insert(id, tensor);
        Ok(())
    }
    /// Defines a placeholder for a value whose node is not translated.
    pub(crate) fn stand_in(&mut self, id: ValueId, tensor: Tensor) {
        self.values.insert(id, tensor);
    }
    /// Defines output 0 of a node as a constant.
    pub(crate) fn define_constant(&mut self, node: &Node, constant: HostTensor) {
        if let Some(id) = node.output(0) {
            self.constants.insert(id, constant);
        }
    }

    /// A value as a strided view. Avoids copying the results of Transpose and of Reshapes of it.
    pub(crate) fn view(&mut self, id: ValueId) -> Outcome<View> {
        let shape = self.shape(id)?;
        if let Some(node) = self.producer(id).filter(|node| matches!(&node.domain[..], "" | "ai.onnx"))
            && let Some(source) = node.input(0)
            && is_f32(self.dtype(source)?)
        {
            match &node.op_type[..] {
                "Transpose" => {
                    let view = self.view(source)?;
                    if let Some(perm) = ops::permutation(node, view.shape.len()) {
                        let strides = perm.iter().map(|axis| view.strides[*axis]).collect();
                        return Ok(View { shape, strides, ..view });
                    }
                }
                "Reshape" | "Unsqueeze" | "Squeeze" | "Flatten" | "Identity" => {
                    let view = self.view(source)?;
                    if let Some(strides) = shape::reshape_strides(&view.shape, &view.strides, &shape) {
                        return Ok(View { shape, strides, ..view });
                    }
                }
                _ => {}
            }
        }
        let tensor = self.operand(id)?.tensor;
        let strides = shape::dense(&shape);
        Ok(View { tensor, shape, strides })
    }
    /// A value as a strided view with another shape. Copies the value if strides cannot express that.
    pub(crate) fn view_as(&mut self, id: ValueId, shape: &[usize]) -> Outcome<View> {
        let view = self.view(id)?;
        let (tensor, strides) = match shape::reshape_strides(&view.shape, &view.strides, shape) {
            Some(strides) => (view.tensor, strides),
            None => (self.operand(id)?.tensor, shape::dense(shape)),
        };
        Ok(View { tensor, shape: shape.to_vec(), strides })
    }
}

use super::Activation;
use crate::{Attribute, Node, Tensor, ValueId};
use std::collections::BTreeMap;

/// The nodes that define a fused node. Values are numbered: first the node's inputs, then constants and results.
pub(super) struct Body {
    present: Vec<bool>,
    next: u32,
    constants: Vec<(ValueId, Tensor)>,
    steps: Vec<Node>,
    outputs: Vec<Option<ValueId>>,
}

impl Body {
    pub(super) fn new(node: &Node) -> Self {
        let present: Vec<bool> = node.inputs.iter().map(Option::is_some).collect();
        let next = present.len() as u32;
        Body { present, next, constants: Vec::new(), steps: Vec::new(), outputs: Vec::new() }
    }

    fn fresh(&mut self) -> ValueId {
        self.next += 1;
        ValueId(self.next - 1)
    }
    /// Input `i`, if present.
    pub(super) fn input(&self, i: usize) -> Option<ValueId> {
        self.present.get(i).copied().unwrap_or(false).then_some(ValueId(i as u32))
    }
    /// Input `i`, which must be present.
    pub(super) fn need(&self, i: usize) -> Result<ValueId, String> {
        self.input(i).ok_or_else(|| format!("required input {i} is missing"))
    }
    pub(super) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let id = self.fresh();
        self.constants.push((id, tensor));
        id
    }
    /// A node with one output.
    pub(super) fn node<const N: usize>(
        &mut self,
        op: &str,
        inputs: &[ValueId],
        attributes: [(&str, Attribute); N],
    ) -> ValueId {
        self.nodes(op, inputs, attributes, 1)[0]
    }
    /// A node with `outputs` outputs.
    pub(super) fn nodes<const N: usize>(
        &mut self,
        op: &str,
        inputs: &[ValueId],
        attributes: [(&str, Attribute); N],
        outputs: usize,
    ) -> Vec<ValueId> {
        let attributes = attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let inputs = inputs.iter().copied().map(Some).collect();
        self.step(op, inputs, attributes, outputs)
    }
    fn step(
        &mut self,
        op: &str,
        inputs: Vec<Option<ValueId>>,
        attributes: BTreeMap<String, Attribute>,
        outputs: usize,
    ) -> Vec<ValueId> {
        let outputs: Vec<ValueId> = (0..outputs).map(|_| self.fresh()).collect();
        self.steps.push(Node {
            name: String::new(),
            domain: String::new(),
            op_type: op.to_owned(),
            inputs,
            outputs: outputs.iter().copied().map(Some).collect(),
            attributes,
            metadata: BTreeMap::new(),
        });
        outputs
    }
    /// The Conv of `x` within a node that fuses more.
    pub(super) fn conv(&mut self, node: &Node, x: ValueId) -> Result<ValueId, String> {
        let inputs = vec![Some(x), Some(self.need(1)?), self.input(2)];
        let mut attributes = node.attributes.clone();
        attributes.retain(|name, _| !name.starts_with("activation"));
        Ok(self.step("Conv", inputs, attributes, 1)[0])
    }
    /// The ai.onnx operator with the node's name and all its outputs.
    pub(super) fn same(&mut self, node: &Node) {
        let inputs = (0..self.present.len()).map(|i| self.input(i)).collect();
        let outputs = self.step(&node.op_type, inputs, node.attributes.clone(), node.outputs.len());
        self.outputs = outputs.into_iter().map(Some).collect();
    }
    pub(super) fn activation(&mut self, activation: &Activation, x: ValueId) -> ValueId {
        match *activation {
            Activation::Relu => self.node("Relu", &[x], []),
            Activation::Clip(low, high) => {
                // Bounds must have the type of x, which is not known here.
                let bounds = [low, high].map(|bound| {
                    let bound = self.constant(Tensor::scalar(bound));
                    self.node("CastLike", &[bound, x], [])
                });
                self.node("Clip", &[x, bounds[0], bounds[1]], [])
            }
            Activation::Swish(alpha) => self.node("Swish", &[x], [("alpha", Attribute::Float(alpha))]),
            Activation::Gelu => self.node("Gelu", &[x], []),
            Activation::GeluTanh => {
                self.node("Gelu", &[x], [("approximate", Attribute::String(b"tanh".to_vec()))])
            }
        }
    }
    /// Applies the node's activation, if any, and makes the result the output.
    pub(super) fn activate(&mut self, node: &Node, y: ValueId) -> Result<(), String> {
        let y = match Activation::of(node)? {
            Some(activation) => self.activation(&activation, y),
            None => y,
        };
        self.finish(y);
        Ok(())
    }
    pub(super) fn finish(&mut self, y: ValueId) {
        self.outputs = vec![Some(y)];
    }

    /// Visits the nodes in order. The caller decides what a value is (a fact or a tensor).
    pub(super) fn run<T: Clone, E>(
        &self,
        inputs: &[Option<T>],
        constant: impl Fn(Tensor) -> T,
        step: impl Fn(&Node, Vec<Option<&T>>) -> Result<Vec<T>, E>,
    ) -> Result<Vec<T>, E> {
        let mut values: Vec<Option<T>> = inputs.to_vec();
        values.resize(self.next as usize, None);
        for (id, tensor) in &self.constants {
            values[id.0 as usize] = Some(constant(tensor.clone()));
        }
        for node in &self.steps {
            let arguments = node.inputs.iter().map(|id| values[(*id)?.0 as usize].as_ref()).collect();
            let results = step(node, arguments)?;
            for (id, result) in node.outputs.iter().flatten().zip(results) {
                values[id.0 as usize] = Some(result);
            }
        }
        Ok(self.outputs.iter().filter_map(|id| values[(*id)?.0 as usize].take()).collect())
    }
}

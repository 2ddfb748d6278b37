//! Nodes that the reference implementation evaluates in the middle of a ggml graph.

use super::{Outcome, Translator, refuse};
use crate::{
    ffi::{MAX_INPUTS, Type},
    kernels::{Argument, Extract, HostElementwise, HostNode, Produced},
    shape,
    storage::storage_type,
};
use sdrun_graph::{Node, Tensor as HostTensor, eval};

impl<'g> Translator<'g> {
    /// Has the reference implementation evaluate a node.
    pub(super) fn host_node(&mut self, node: &'g Node) -> Outcome {
        let opset = self.opset_of(node);
        if !eval::supports(node, opset) {
            return refuse("the reference implementation does not cover it");
        }
        self.check_outputs(node)?;
        let (mut arguments, mut inputs) = (Vec::new(), Vec::new());
        for id in &node.inputs {
            let Some(id) = id else {
                arguments.push(Argument::Absent);
                continue;
            };
            if let Some(constant) = self.constant(*id) {
                arguments.push(Argument::Constant(constant.clone()));
            } else {
                let operand = self.operand(*id)?;
                inputs.push(operand.tensor);
                arguments.push(Argument::Computed(operand.dtype, operand.shape));
            }
        }
        if inputs.len() > MAX_INPUTS {
            return refuse(format!("{} computed inputs are more than {MAX_INPUTS}", inputs.len()));
        }
        let mut outputs = Vec::new();
        for id in &node.outputs {
            outputs.push(match id {
                Some(id) => Some(Produced { dtype: self.dtype(*id)?, shape: self.shape(*id)? }),
                None => None,
            });
        }
        probe(node, opset, &arguments, &outputs)?;
        if let [Some(only)] = &outputs[..] {
            let known: Vec<_> = arguments
                .iter()
                .filter_map(|argument| match argument {
                    Argument::Absent => None,
                    Argument::Constant(tensor) => {
                        Some((tensor.dtype(), tensor.shape().to_vec(), Some(tensor.clone())))
                    }
                    Argument::Computed(dtype, shape) => Some((*dtype, shape.clone(), None)),
                })
                .collect();
            if let Some(kernel) = HostElementwise::new(node, opset, &known, &only.shape) {
                let type_ = storage_type(only.dtype).unwrap_or(Type::I8);
                let tensor = self.custom(node, kernel, &inputs, type_, shape::extent(&only.shape))?;
                return self.define(node, 0, tensor);
            }
        }
        *self.host_operators.entry(node.op_type.clone()).or_default() += 1;
        let kernel = |unit| HostNode { node: node.clone(), opset, arguments, outputs: outputs.clone(), unit };
        if let [Some(only)] = &outputs[..] {
            let type_ = storage_type(only.dtype).unwrap_or(Type::I8);
            let tensor =
                self.custom(node, kernel(type_.size()), &inputs, type_, shape::extent(&only.shape))?;
            return self.define(node, 0, tensor);
        }
        let (starts, len) = HostNode::layout(&outputs);
        let blob = self.custom(node, kernel(1), &inputs, Type::I8, [len, 1, 1, 1])?;
        for (i, (output, start)) in outputs.iter().zip(starts).enumerate() {
            let Some(output) = output else { continue };
            let type_ = storage_type(output.dtype).unwrap_or(Type::I8);
            let extract = Extract { start, len: shape::len(&output.shape), size: type_.size() };
            let tensor = self.custom(node, extract, &[blob], type_, shape::extent(&output.shape))?;
            self.define(node, i, tensor)?;
        }
        Ok(())
    }
}

/// Evaluates a node on zeros to learn, before the run, whether its attributes and types are supported. Nodes with much data or work are not
/// checked.
fn probe(node: &Node, opset: i64, arguments: &[Argument], outputs: &[Option<Produced>]) -> Outcome {
    const LIMIT: usize = 1 << 22;
    let shapes: Vec<Option<&[usize]>> = arguments.iter().map(Argument::shape).collect();
    let made: Vec<&[usize]> = outputs.iter().flatten().map(|output| &output.shape[..]).collect();
    if eval::is_long(node, &shapes, &made) {
        return Ok(());
    }
    let mut bytes: usize = outputs.iter().flatten().map(Produced::bytes).sum();
    let mut zeros = Vec::with_capacity(arguments.len());
    for argument in arguments {
        zeros.push(match argument {
            Argument::Absent => None,
            Argument::Constant(constant) => Some(constant.clone()),
            Argument::Computed(dtype, shape) => {
                let len = dtype.bytes_of(shape).unwrap_or(usize::MAX);
                bytes = bytes.saturating_add(len);
                if bytes > LIMIT {
                    return Ok(());
                }
                HostTensor::new(*dtype, shape.clone(), vec![0; len]).ok()
            }
        });
    }
    let inputs: Vec<Option<&HostTensor>> = zeros.iter().map(Option::as_ref).collect();
    match eval::evaluate(node, opset, &inputs) {
        Err(eval::EvalError::Unsupported { why, .. }) => {
            refuse(format!("the reference implementation refuses it: {why}"))
        }
        // An error on zeros says nothing about other values.
        Ok(_) | Err(eval::EvalError::Invalid(_)) => Ok(()),
    }
}

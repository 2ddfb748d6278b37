//! Translates the nodes of a graph to a ggml compute graph.
//!
//! Every value of the graph becomes one contiguous tensor with its elements in row-major order and in the type that
//! [`storage`](crate::storage) chooses. The extents of that tensor mean nothing: operators take the view they need, so that Reshape
//! and similar operators cost nothing. Each node first goes to its entry in the operator table. If the table refuses it,
//! `sdrun_graph::eval` evaluates it. If that does not support the node either, it is refused with the reasons.

mod host_node;
mod nodes;
mod operands;
mod values;

use crate::{
    ffi::{Builder, Home, Target, Tensor, Type},
    form::Form,
    gpu, ops, shape,
    storage::storage_type,
    unsupported::Unsupported,
    weights::{Bank, Constant},
};
use sdrun_abi::{DType, Error, OutputSpec, Precision, Result};
use sdrun_graph::{Graph, Node, Tensor as HostTensor, ValueId, eval};
use std::collections::{BTreeMap, HashMap};

/// Why an operator is not translated.
pub(crate) enum Refusal {
    /// The operator, an attribute, a type or a shape is not supported. The reason is one clause.
    Unsupported(String),
    /// Another error.
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::Failed(error)
    }
}

/// The result of translating a node.
pub(crate) type Outcome<T = ()> = std::result::Result<T, Refusal>;

/// A refusal with this reason.
pub(crate) fn refuse<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Refusal::Unsupported(why.into()))
}

/// A translated graph, without memory so far.
pub(crate) struct Translation {
    pub(crate) builder: Builder,
    /// The tensors of the graph's inputs and outputs, in order, with their types in the graph.
    pub(crate) inputs: Vec<(Tensor, DType)>,
    pub(crate) outputs: Vec<(Tensor, DType)>,
    /// The types and shapes of the outputs.
    pub(crate) output_specs: Vec<OutputSpec>,
    /// The contents of the tensors of constants.
    pub(crate) constants: Vec<Constant>,
    /// The operators that `sdrun_graph::eval` evaluates, with their number of nodes.
    pub(crate) host_operators: BTreeMap<String, usize>,
}

/// An operand of an operator: a tensor that holds a value of the graph.
#[derive(Clone)]
pub(crate) struct Operand {
    pub(crate) tensor: Tensor,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// A value of the graph as a strided view of a tensor.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) tensor: Tensor,
    pub(crate) shape: Vec<usize>,
    /// The stride of each dimension, in elements.
    pub(crate) strides: Vec<isize>,
}

/// The state of a translation, and the functions with which operators translate themselves.
pub(crate) struct Translator<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) builder: Builder,
    target: Target,
    precision: Precision,
    values: HashMap<ValueId, Tensor>,
    constants: HashMap<ValueId, HostTensor>,
    bank: &'g mut Bank,
    stored: HashMap<(ValueId, Form, Type, Home), Tensor>,
    placed: Vec<Constant>,
    producers: HashMap<ValueId, usize>,
    host_operators: BTreeMap<String, usize>,
}

/// Translates `graph`, whose shapes must all be known, into a graph that reads its weights from `bank`.
///
/// # Errors
/// `Unimplemented`, naming all unsupported operators with their nodes and reasons.
pub(crate) fn translate<'g>(
    graph: &'g Graph,
    precision: Precision,
    target: Target,
    bank: &'g mut Bank,
) -> Result<Translation> {
    let producers = graph
        .nodes
        .iter()
        .enumerate()
        .flat_map(|(i, node)| node.outputs.iter().flatten().map(move |id| (*id, i)));
    let mut translator = Translator {
        graph,
        builder: Builder::new(target),
        target,
        precision,
        values: HashMap::new(),
        constants: HashMap::new(),
        bank,
        stored: HashMap::new(),
        placed: Vec::new(),
        producers: producers.collect(),
        host_operators: BTreeMap::new(),
    };
    let mut inputs = Vec::new();
    for id in &graph.inputs {
        let input = translator.input_tensor(*id).map_err(|refusal| explain_value(graph, *id, refusal))?;
        inputs.push(input);
    }
    let mut unsupported = Unsupported::default();
    for node in &graph.nodes {
        // Once a shape is unknown, only operators without any implementation can be reported.
        if unsupported.is_open_ended() {
            if translator.is_unknown(node) {
                unsupported.note(node, UNKNOWN);
            }
            continue;
        }
        match translator.node(node) {
            Ok(()) => {}
            Err(Refusal::Failed(error)) => return Err(error),
            Err(Refusal::Unsupported(why)) => unsupported.add(&mut translator, node, &why)?,
        }
    }
    unsupported.into_result()?;
    let (mut outputs, mut output_specs) = (Vec::new(), Vec::new());
    for id in &graph.outputs {
        let output = translator.operand(*id).map_err(|refusal| explain_value(graph, *id, refusal))?;
        outputs.push((output.tensor, output.dtype));
        output_specs.push(OutputSpec { dtype: output.dtype, shape: output.shape });
    }
    let Translator { builder, placed, host_operators, .. } = translator;
    Ok(Translation { builder, inputs, outputs, output_specs, constants: placed, host_operators })
}

/// The reason if neither the table nor the reference implementation has an operator.
const UNKNOWN: &str = "ggml has no counterpart, and the reference implementation does not cover it";

/// `Conv`, or `ai.onnx.ml.Binarizer`.
pub(crate) fn operator_name(node: &Node) -> String {
    if node.domain.is_empty() { node.op_type.clone() } else { format!("{}.{}", node.domain, node.op_type) }
}

/// `operator Conv of node "/conv_in/Conv"`.
pub(crate) fn describe(node: &Node) -> String {
    let name = match (&node.name[..], node.outputs.iter().flatten().next()) {
        ("", None) => String::new(),
        ("", Some(_)) => " of an unnamed node".into(),
        (name, _) => format!(" of node {name:?}"),
    };
    format!("operator {}{name}", operator_name(node))
}

fn explain_value(graph: &Graph, id: ValueId, refusal: Refusal) -> Error {
    match refusal {
        Refusal::Unsupported(why) => Error::unsupported(format!("value {:?}: {why}", graph.value(id).name)),
        Refusal::Failed(error) => error,
    }
}

impl<'g> Translator<'g> {
    fn input_tensor(&mut self, id: ValueId) -> Outcome<(Tensor, DType)> {
        let (dtype, shape) = (self.dtype(id)?, self.shape(id)?);
        let Some(type_) = storage_type(dtype) else {
            return refuse(format!("{dtype} values are not supported"));
        };
        let tensor = self.builder.input(type_, shape::extent(&shape))?;
        self.values.insert(id, tensor);
        Ok((tensor, dtype))
    }

    fn node(&mut self, node: &'g Node) -> Outcome {
        let operator = ops::find(node);
        let before = self.builder.tensors();
        if let Some(translate) = self.target.gpu().and_then(|_| gpu::find(node)) {
            match self.check_outputs(node).and_then(|()| translate(self, node)) {
                Ok(()) if self.give_to_device(node, before) => return Ok(()),
                // The CPU may support it.
                Ok(()) | Err(Refusal::Unsupported(_)) => {}
                failed => return failed,
            }
        }
        let native = match operator {
            Some(operator) => self.check_outputs(node).and_then(|()| (operator.translate)(self, node)),
            None => refuse("ggml has no counterpart"),
        };
        let why = match native {
            Ok(()) => {
                // ggml's own operations may run on the device; our kernels cannot.
                self.give_to_device(node, before);
                return Ok(());
            }
            Err(Refusal::Unsupported(why)) => why,
            Err(failed) => return Err(failed),
        };
        match self.host_node(node) {
            Err(Refusal::Unsupported(host)) => {
                let takes = operator.map(|op| format!(" (it takes {})", op.takes)).unwrap_or_default();
                let reasons = if host == why { why } else { format!("{why}{takes}, and {host}") };
                refuse(reasons)
            }
            other => other,
        }
    }

    /// Whether neither the operator table nor the reference implementation has a node's operator.
    fn is_unknown(&self, node: &Node) -> bool {
        ops::find(node).is_none() && !eval::supports(node, self.opset_of(node))
    }

    /// The version of the operator set of a node's domain.
    fn opset_of(&self, node: &Node) -> i64 {
        self.graph.opsets.get(&node.domain).copied().unwrap_or_else(|| self.graph.opset())
    }

    /// Assigns to the device all tensors since `before` that compute the node's outputs. Returns whether the device supports them.
    fn give_to_device(&mut self, node: &Node, before: usize) -> bool {
        let mut outputs = node.outputs.iter().flatten().filter_map(|id| self.values.get(id));
        outputs.all(|tensor| self.builder.give_to_device(*tensor, before))
    }

    /// Refuses a node with an output that ggml cannot store, before any tensor is added for it.
    fn check_outputs(&self, node: &Node) -> Outcome {
        for id in node.outputs.iter().flatten() {
            let dtype = self.dtype(*id)?;
            self.shape(*id)?;
            if storage_type(dtype).is_none() {
                return refuse(format!("{dtype} values are not supported"));
            }
        }
        Ok(())
    }
}

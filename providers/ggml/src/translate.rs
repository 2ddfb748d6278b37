//! From the graph's nodes to a ggml compute graph.
//!
//! Every value of the graph becomes one contiguous tensor that holds its elements in row-major order, stored as
//! [`storage`](crate::storage) says. The extents of that tensor mean nothing: operators take the view they need, so
//! that Reshape and its kind cost nothing. Each node is offered to its entry in the operator table; what the table
//! refuses is evaluated by `sdrun_graph::eval` where that can do it, and else refused with the reasons.

use crate::{
    ffi::{Builder, Extent, Home, Kernel, MAX_INPUTS, Target, Tensor, Type, product::Words, simd::Level},
    form::Form,
    gpu,
    kernels::{
        Argument, Blocks, Extract, HostElementwise, HostNode, Layout, PackPanels, Panels, Produced,
        StridedCopy,
    },
    ops, shape,
    storage::{is_f32, storage_type},
    unsupported::Unsupported,
    weights::{Bank, Constant},
};
use sdrun_abi::{DType, Error, OutputSpec, Precision, Result};
use sdrun_graph::{Graph, Initializer, Node, Tensor as HostTensor, ValueId, eval};
use std::collections::{BTreeMap, HashMap};

/// Why an operator is not translated.
pub(crate) enum Refusal {
    /// The operator, an attribute, a type or a shape is not covered: one clause.
    Unsupported(String),
    /// Something went wrong.
    Failed(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::Failed(error)
    }
}

/// What translating a node yields.
pub(crate) type Outcome<T = ()> = std::result::Result<T, Refusal>;

/// A refusal with this reason.
pub(crate) fn refuse<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Refusal::Unsupported(why.into()))
}

/// A graph in ggml's terms, without memory yet.
pub(crate) struct Translation {
    pub(crate) builder: Builder,
    /// Tensors of the graph's inputs and outputs, in order, with their types in the graph.
    pub(crate) inputs: Vec<(Tensor, DType)>,
    pub(crate) outputs: Vec<(Tensor, DType)>,
    /// Types and shapes of the outputs.
    pub(crate) output_specs: Vec<OutputSpec>,
    /// What fills the tensors of constants.
    pub(crate) constants: Vec<Constant>,
    /// Operators that are evaluated by `sdrun_graph::eval`, with their number of nodes.
    pub(crate) host_operators: BTreeMap<String, usize>,
}

/// An operand of an operator: a tensor that holds a value of the graph.
#[derive(Clone)]
pub(crate) struct Operand {
    pub(crate) tensor: Tensor,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

/// A value of the graph as elements of a tensor.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) tensor: Tensor,
    pub(crate) shape: Vec<usize>,
    /// Of each dimension, in elements.
    pub(crate) strides: Vec<isize>,
}

/// The state of a translation, and what operators need to say themselves in ggml's terms.
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
    /// How often values are read by nodes, and as outputs.
    reads: HashMap<ValueId, usize>,
    host_operators: BTreeMap<String, usize>,
}

/// Translates `graph`, all of whose shapes are known, into a graph that reads its weights from `bank`.
///
/// # Errors
/// `Unimplemented` naming the operator, the node and the reasons.
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
    let mut reads: HashMap<ValueId, usize> = HashMap::new();
    let read = graph.nodes.iter().flat_map(|node| node.inputs.iter().flatten()).chain(&graph.outputs);
    read.for_each(|id| *reads.entry(*id).or_default() += 1);
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
        reads,
        host_operators: BTreeMap::new(),
    };
    let mut inputs = Vec::new();
    for id in &graph.inputs {
        let input = translator.input_tensor(*id).map_err(|refusal| explain_value(graph, *id, refusal))?;
        inputs.push(input);
    }
    let mut unsupported = Unsupported::default();
    for node in &graph.nodes {
        // What depends on unknown shapes is not judged, but for operators that nothing here computes.
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

/// Why an operator is refused that neither the table nor the reference implementation has.
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
                // The CPU may take it.
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
                // What is ggml's own may run there, what is ours does not.
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

    /// The version of the operator set that a node's operator is of.
    fn opset_of(&self, node: &Node) -> i64 {
        self.graph.opsets.get(&node.domain).copied().unwrap_or_else(|| self.graph.opset())
    }

    /// Has the device run what makes the node's outputs of tensors that were there `before`; whether it can run all of it.
    fn give_to_device(&mut self, node: &Node, before: usize) -> bool {
        let mut outputs = node.outputs.iter().flatten().filter_map(|id| self.values.get(id));
        outputs.all(|tensor| self.builder.give_to_device(*tensor, before))
    }

    /// A node without outputs that ggml could hold is refused before anything is made for it.
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

    // ---- what is known about values ----

    /// Element type of a value.
    pub(crate) fn dtype(&self, id: ValueId) -> Outcome<DType> {
        match self.graph.value(id).dtype {
            Some(dtype) => Ok(dtype),
            None => refuse(format!("the type of {:?} is not known", self.graph.value(id).name)),
        }
    }
    /// Shape of a value, none of its dimensions 0.
    pub(crate) fn shape(&self, id: ValueId) -> Outcome<Vec<usize>> {
        let value = self.graph.value(id);
        match value.known_shape() {
            Some(shape) if shape.contains(&0) => {
                refuse(format!("{:?} has no elements: {shape:?}", value.name))
            }
            Some(shape) => Ok(shape),
            None => refuse(format!("the shape of {:?} is not known", value.name)),
        }
    }
    /// Shape of output `i` of a node.
    pub(crate) fn output_shape(&self, node: &Node, i: usize) -> Outcome<Vec<usize>> {
        match node.output(i) {
            Some(id) => self.shape(id),
            None => refuse(format!("output {i} is missing")),
        }
    }
    /// Input `i` of a node, which must be there.
    pub(crate) fn input_id(&self, node: &Node, i: usize) -> Outcome<ValueId> {
        node.input(i).map_or_else(|| refuse(format!("input {i} is missing")), Ok)
    }
    /// The constant a value is, where it is known before the run.
    pub(crate) fn constant(&self, id: ValueId) -> Option<&HostTensor> {
        self.constants.get(&id).or_else(|| self.graph.constant(id))
    }
    /// The only element of a floating-point constant.
    pub(crate) fn scalar(&self, id: ValueId) -> Option<f32> {
        let constant = self.constant(id)?;
        if constant.len() == 1 { constant.to_f32s()?.first().copied() } else { None }
    }
    /// The integers of constant input `i` of a node; `None` where the input is absent.
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
    /// The initializer whose elements a value has in the same order, or the value.
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
    /// Whether one node reads a value, once, and it is no output.
    pub(crate) fn is_read_once(&self, id: ValueId) -> bool {
        self.reads.get(&id) == Some(&1)
    }
    /// What our products multiply: pairs of bf16 where the precision allows it and the processor can.
    pub(crate) fn words(&self) -> Words {
        let low = matches!(self.precision, Precision::Bf16 | Precision::Q8_0 | Precision::Q4K);
        if low && Level::detect().multiplies_bf16() { Words::Bf16 } else { Words::F32 }
    }
    /// Where the graph runs.
    pub(crate) fn target(&self) -> Target {
        self.target
    }
    /// What the engine was built for.
    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }
    /// What matrices and convolution filters are stored in, but for those in blocks.
    pub(crate) fn matrix_type(&self) -> Type {
        match self.precision {
            Precision::Fp32 => Type::F32,
            Precision::Fp16 | Precision::Q8_0 | Precision::Q4K => Type::F16,
            Precision::Bf16 => Type::Bf16,
        }
    }

    // ---- operands and results ----

    /// The tensor of a value, stored plainly.
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
    /// Input `i` of a node, which must be there and be computed in f32.
    pub(crate) fn float(&mut self, node: &Node, i: usize) -> Outcome<Operand> {
        let id = self.input_id(node, i)?;
        let dtype = self.dtype(id)?;
        if !is_f32(dtype) {
            return refuse(format!("input {i} is {dtype}"));
        }
        self.operand(id)
    }
    /// Input `i` of a node, computed in f32 where it is there.
    pub(crate) fn optional_float(&mut self, node: &Node, i: usize) -> Outcome<Option<Operand>> {
        if node.input(i).is_some() { self.float(node, i).map(Some) } else { Ok(None) }
    }
    /// An initializer in a form an operator wants it stored in.
    pub(crate) fn weight(&mut self, id: ValueId, form: Form, type_: Type) -> Outcome<Tensor> {
        self.weight_at(id, form, type_, Home::Host)
    }
    /// As [`weight`](Self::weight), in main memory or in that of the device.
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
            _ => return Err(Error::internal("a value that is not stored was taken for a weight").into()),
        };
        self.stored.insert((id, form, type_, home), tensor);
        Ok(tensor)
    }
    /// The blocks that matrices of so many elements are to be kept in: where the precision asks for them, but not small ones,
    /// which save little and are often the first and the last of a network, where precision matters most.
    pub(crate) fn blocks(&self, elements: usize) -> Option<Blocks> {
        const SMALL: usize = 1 << 16;
        let blocks = match self.precision {
            Precision::Q8_0 => Some(Blocks::Q8_0),
            Precision::Q4K => Some(Blocks::Q4K),
            _ => None,
        };
        blocks.filter(|_| elements >= SMALL)
    }
    /// A stored matrix in panels, and the blocks these are in.
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
            (None, Words::F32) => self.matrix_type(),
        };
        Ok((blocks, self.weight(id, Form::Panels { panels, transposed, blocks }, type_)?))
    }
    /// A tensor of these f32 elements.
    pub(crate) fn constant_tensor(&mut self, value: HostTensor, home: Home) -> Outcome<Tensor> {
        let tensor = self.builder.constant(Type::F32, shape::extent(value.shape()), home)?;
        self.placed.push(Constant { tensor, value, form: Form::Plain, type_: Type::F32 });
        Ok(tensor)
    }
    /// Makes `tensor` output `i` of a node.
    pub(crate) fn define(&mut self, node: &Node, i: usize, tensor: Tensor) -> Outcome {
        let Some(id) = node.output(i) else { return Ok(()) };
        self.define_value(id, tensor)
    }
    /// Makes `tensor` a value.
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
    /// Puts a tensor in the place of a value that is not translated.
    pub(crate) fn stand_in(&mut self, id: ValueId, tensor: Tensor) {
        self.values.insert(id, tensor);
    }
    /// Makes a constant a value.
    pub(crate) fn define_constant(&mut self, node: &Node, constant: HostTensor) {
        if let Some(id) = node.output(0) {
            self.constants.insert(id, constant);
        }
    }

    /// A value read with strides: what a Transpose, or a Reshape of one, makes of its input is not copied.
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
    /// A value read with strides as one of another shape; where strides cannot say that, the value is computed plainly.
    pub(crate) fn view_as(&mut self, id: ValueId, shape: &[usize]) -> Outcome<View> {
        let view = self.view(id)?;
        let (tensor, strides) = match shape::reshape_strides(&view.shape, &view.strides, shape) {
            Some(strides) => (view.tensor, strides),
            None => (self.operand(id)?.tensor, shape::dense(shape)),
        };
        Ok(View { tensor, shape: shape.to_vec(), strides })
    }
    /// A computed tensor packed in panels. `layout` is that of a matrix, `dims` and `strides` those of the stack of as
    /// many matrices as the panels have groups.
    pub(crate) fn panels(
        &mut self,
        node: &Node,
        tensor: Tensor,
        panels: Panels,
        layout: Layout,
        dims: &[usize],
        strides: &[isize],
    ) -> Outcome<Tensor> {
        let kernel = PackPanels { panels, dims: dims.to_vec(), strides: strides.to_vec(), layout };
        self.custom(node, kernel, &[tensor], Type::F32, [panels.len(), 1, 1, 1])
    }

    // ---- building blocks ----

    /// A kernel's node; errors at run time name `node`.
    pub(crate) fn custom(
        &mut self,
        node: &Node,
        kernel: impl Kernel + 'static,
        inputs: &[Tensor],
        type_: Type,
        extent: Extent,
    ) -> Outcome<Tensor> {
        Ok(self.builder.custom(&describe(node), Box::new(kernel), inputs, type_, extent)?)
    }
    /// A copy of `input` read with `strides` (in elements) from element `start` on; no copy where the result is a run
    /// of the input.
    pub(crate) fn strided(
        &mut self,
        node: &Node,
        input: Tensor,
        dims: &[usize],
        strides: &[isize],
        start: usize,
    ) -> Outcome<Tensor> {
        let (type_, len) = (self.builder.type_of(input), self.builder.len(input));
        let Some(copy) = StridedCopy::new(dims, strides, start, type_.size(), len) else {
            return refuse("it would read outside its input");
        };
        let extent = shape::extent(dims);
        match copy.as_run() {
            Some(0) if shape::len(dims) == len => return Ok(self.builder.reshape(input, extent)?),
            Some(start) => return Ok(self.builder.run(input, start, extent)?),
            None => {}
        }
        if self.target.gpu().is_some()
            && let Some(copy) = gpu::strided(&mut self.builder, input, dims, strides, start)?
        {
            return Ok(self.builder.reshape(copy, extent)?);
        }
        self.custom(node, copy, &[input], type_, extent)
    }
    /// `input`, of shape `shape`, with its axes in the order `perm`.
    pub(crate) fn transpose(
        &mut self,
        node: &Node,
        input: Tensor,
        shape: &[usize],
        perm: &[usize],
    ) -> Outcome<Tensor> {
        let dense = shape::strides(shape);
        let dims: Vec<usize> = perm.iter().map(|axis| shape[*axis]).collect();
        let strides: Vec<isize> = perm.iter().map(|axis| dense[*axis] as isize).collect();
        self.strided(node, input, &dims, &strides, 0)
    }

    /// Leaves a node to the reference implementation.
    fn host_node(&mut self, node: &'g Node) -> Outcome {
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

/// Evaluates a node on zeros, to learn before the run whether its attributes and types are covered. Large nodes are
/// taken on trust.
fn probe(node: &Node, opset: i64, arguments: &[Argument], outputs: &[Option<Produced>]) -> Outcome {
    const LIMIT: usize = 1 << 22;
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
        // What zeros make of it says nothing about other values.
        Ok(_) | Err(eval::EvalError::Invalid(_)) => Ok(()),
    }
}

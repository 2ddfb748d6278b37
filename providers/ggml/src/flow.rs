//! Graphs that decide at run time what is computed: If, Loop and Scan, and values whose shapes only a run tells.
//!
//! Such a graph is cut at the first node that decides: what is before it, the node, and the rest, which is looked at when the
//! shapes it is given are known and may be cut again. Each part is translated as a graph of its own, and so are bodies, once for
//! each set of shapes. Between parts values are in main memory.

use crate::{
    ffi::Executor,
    optimize::optimize,
    session::Plan,
    topology::{Topology, explain},
    translate::{describe, translate},
    weights::Bank,
};
use sdrun_abi::{DType, Error, ErrorCode, Host, Result};
use sdrun_graph::{
    Attribute, Body, Dim, Graph, Initializer, Node, OpenDims, Tensor, ValueId, eval, proto::GraphProto,
    simplify,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Shapes that a part of a graph is kept for, the latest first.
const MAX_PLANS: usize = 4;

/// Element type and shape.
pub(crate) type Spec = (DType, Vec<usize>);

/// Whether a graph has nodes that decide at run time.
pub(crate) fn decides(graph: &Graph) -> bool {
    graph.nodes.iter().any(is_flow)
}

fn is_flow(node: &Node) -> bool {
    node.domain.is_empty() && matches!(&*node.op_type, "If" | "Loop" | "Scan")
}

/// What running a part takes.
pub(crate) struct Runner<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) bank: &'a mut Bank,
    pub(crate) executor: &'a mut Executor,
    pub(crate) host: &'a dyn Host,
}

/// What planning a part takes.
pub(crate) struct Planner<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) bank: &'a mut Bank,
    /// Operators that the reference implementation evaluates, with their number of nodes.
    pub(crate) host_operators: &'a mut BTreeMap<String, usize>,
}

/// A part of a graph, or a body, with its translations.
pub(crate) struct Unit {
    graph: Graph,
    /// The latest first.
    plans: Vec<(Vec<Spec>, Step)>,
}

enum Step {
    Straight(Box<Straight>),
    Cut(Box<Cut>),
}

/// A part without decisions.
struct Straight {
    outputs: Vec<Source>,
    /// Which of the part's inputs the plan reads.
    inputs: Vec<usize>,
    plan: Option<Plan>,
}

/// Where an output comes from.
enum Source {
    Input(usize),
    Constant(Tensor),
    /// The next output of the plan.
    Computed,
}

/// A graph around the node that decides.
struct Cut {
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    constants: HashMap<ValueId, Tensor>,
    /// Weights that the node reads itself.
    weights: Vec<(ValueId, String)>,
    before: Unit,
    node: Node,
    opset: i64,
    /// Of each body, by the name of its attribute: what captures it has, and its inputs without these.
    bodies: BTreeMap<String, (Vec<ValueId>, usize, Unit)>,
    after: Unit,
}

impl Unit {
    pub(crate) fn new(graph: Graph) -> Self {
        Unit { graph, plans: Vec::new() }
    }

    /// Translates for inputs of these types, where they are known; else has the weights kept as they are in the graph, so that any
    /// form can be made of them. Returns the types of the outputs, as far as they are known.
    ///
    /// # Errors
    /// What no run could compute.
    pub(crate) fn prepare(
        &mut self,
        specs: Option<&[Spec]>,
        planner: &mut Planner<'_>,
    ) -> Result<Vec<Option<Spec>>> {
        let Some(specs) = specs else {
            self.keep_plain(planner)?;
            return Ok(vec![None; self.graph.outputs.len()]);
        };
        let step = plan(&self.graph, specs, planner)?;
        let known = known_outputs(&step, specs);
        self.plans.insert(0, (specs.to_vec(), step));
        Ok(known)
    }

    /// Without shapes only operators can be refused.
    fn keep_plain(&self, planner: &mut Planner<'_>) -> Result<()> {
        let graph = &self.graph;
        let captured: BTreeSet<ValueId> = graph.nodes.iter().flat_map(|node| captures(graph, node)).collect();
        let read: BTreeSet<ValueId> = graph
            .nodes
            .iter()
            .flat_map(|node| node.inputs.iter().flatten().copied())
            .chain(captured)
            .collect();
        for id in read {
            if let Some(Initializer::Weight(weight)) = graph.initializers.get(&id) {
                planner.bank.place_plain(&graph.value(id).name, weight.dtype)?;
            }
        }
        for node in &graph.nodes {
            let opset = graph.opsets.get(&node.domain).copied().unwrap_or_else(|| graph.opset());
            for name in body_names(node) {
                let body = graph.body(node, name).map_err(explain)?;
                Unit::new(body.graph).keep_plain(planner)?;
            }
            if !is_flow(node) && crate::ops::find(node).is_none() && !eval::supports(node, opset) {
                return Err(Error::unsupported(format!("the ggml provider cannot run {}", describe(node))));
            }
        }
        Ok(())
    }

    /// The outputs for these inputs.
    pub(crate) fn run(&mut self, inputs: Vec<Tensor>, runner: &mut Runner<'_>) -> Result<Vec<Tensor>> {
        if runner.host.cancelled() {
            return Err(Error::new(ErrorCode::Cancelled, "the run was cancelled"));
        }
        let fits = |specs: &[Spec]| {
            specs.iter().zip(&inputs).all(|((dtype, shape), t)| *dtype == t.dtype() && shape == t.shape())
        };
        match self.plans.iter().position(|(specs, _)| fits(specs)) {
            Some(at) => self.plans[..=at].rotate_right(1),
            None => {
                let specs: Vec<Spec> = inputs.iter().map(|t| (t.dtype(), t.shape().to_vec())).collect();
                let mut ignored = BTreeMap::new();
                let mut planner = Planner {
                    topology: runner.topology,
                    bank: &mut *runner.bank,
                    host_operators: &mut ignored,
                };
                let step = plan(&self.graph, &specs, &mut planner)?;
                runner.bank.derive()?;
                self.plans.truncate(MAX_PLANS - 1);
                self.plans.insert(0, (specs, step));
            }
        }
        match self.plans.first_mut() {
            Some((_, Step::Straight(straight))) => straight.run(inputs, runner),
            Some((_, Step::Cut(cut))) => cut.run(inputs, runner),
            None => Err(Error::internal("no plan for the inputs")),
        }
    }

    /// Bytes of constants.
    pub(crate) fn constant_bytes(&self) -> u64 {
        let of = |step: &Step| match step {
            Step::Straight(straight) => straight.plan.as_ref().map_or(0, Plan::constant_bytes),
            Step::Cut(cut) => {
                let bodies = cut.bodies.values().map(|(_, _, unit)| unit.constant_bytes());
                cut.before.constant_bytes() + cut.after.constant_bytes() + bodies.sum::<u64>()
            }
        };
        self.plans.iter().map(|(_, step)| of(step)).sum()
    }
}

fn body_names(node: &Node) -> impl Iterator<Item = &str> {
    node.attributes.iter().filter(|(_, value)| matches!(value, Attribute::Graph(_))).map(|(name, _)| &**name)
}

/// Values that the bodies of a node capture.
fn captures(graph: &Graph, node: &Node) -> Vec<ValueId> {
    if body_names(node).next().is_none() {
        return Vec::new();
    }
    graph.captured_by(node)
}

/// Types of the outputs that are known before a run.
fn known_outputs(step: &Step, inputs: &[Spec]) -> Vec<Option<Spec>> {
    match step {
        Step::Straight(straight) => {
            let Straight { outputs, plan, .. } = &**straight;
            let mut computed = plan.iter().flat_map(Plan::output_specs);
            let spec = |source: &Source| match source {
                Source::Input(i) => inputs.get(*i).cloned(),
                Source::Constant(tensor) => Some((tensor.dtype(), tensor.shape().to_vec())),
                Source::Computed => computed.next().map(|spec| (spec.dtype, spec.shape.clone())),
            };
            outputs.iter().map(spec).collect()
        }
        Step::Cut(cut) => match cut.after.plans.first() {
            Some((specs, step)) => known_outputs(step, specs),
            None => vec![None; cut.outputs.len()],
        },
    }
}

/// Translates a part for inputs of these types.
fn plan(graph: &Graph, specs: &[Spec], planner: &mut Planner<'_>) -> Result<Step> {
    let mut graph = graph.clone();
    for (id, (dtype, shape)) in graph.inputs.clone().into_iter().zip(specs) {
        let value = graph.value_mut(id);
        value.dtype = Some(*dtype);
        value.shape = Some(shape.iter().map(|d| Dim::Known(*d)).collect());
    }
    simplify(&mut graph, &BTreeMap::new(), OpenDims::Refuse)
        .and_then(|_| optimize(&mut graph, planner.topology.target().gpu.is_some()))
        .map_err(explain)?;
    match graph.nodes.iter().position(|node| cuts(&graph, node)) {
        None => Straight::new(graph, planner).map(|straight| Step::Straight(Box::new(straight))),
        Some(at) => Cut::new(graph, at, planner).map(|cut| Step::Cut(Box::new(cut))),
    }
}

/// Whether what follows a node is known only after it ran.
fn cuts(graph: &Graph, node: &Node) -> bool {
    let opset = graph.opsets.get(&node.domain).copied().unwrap_or_else(|| graph.opset());
    let known = |id: &ValueId| graph.value(*id).dtype.is_some() && graph.value(*id).known_shape().is_some();
    is_flow(node) || (!node.outputs.iter().flatten().all(known) && eval::supports(node, opset))
}

impl Straight {
    fn new(mut graph: Graph, planner: &mut Planner<'_>) -> Result<Self> {
        let source =
            |id: &ValueId| match (graph.inputs.iter().position(|input| input == id), graph.constant(*id)) {
                (Some(i), _) => Source::Input(i),
                (None, Some(constant)) => Source::Constant(constant.clone()),
                (None, None) => Source::Computed,
            };
        let outputs: Vec<Source> = graph.outputs.iter().map(source).collect();
        let mut keep = outputs.iter().map(|source| matches!(source, Source::Computed));
        graph.outputs.retain(|_| keep.next().unwrap_or_default());
        if graph.outputs.is_empty() {
            return Ok(Straight { outputs, inputs: Vec::new(), plan: None });
        }
        let read: BTreeSet<ValueId> =
            graph.nodes.iter().flat_map(|node| node.inputs.iter().flatten().copied()).collect();
        let inputs = (0..graph.inputs.len()).filter(|i| read.contains(&graph.inputs[*i])).collect();
        graph.inputs.retain(|id| read.contains(id));
        let Planner { topology, bank, host_operators } = planner;
        let translation = translate(&graph, topology.precision(), topology.target(), bank)?;
        for (name, count) in &translation.host_operators {
            *host_operators.entry(name.clone()).or_default() += count;
        }
        let threads = topology.threads_for(&translation.builder);
        Ok(Straight { outputs, inputs, plan: Some(Plan::new(Vec::new(), translation, threads)?) })
    }

    fn run(&mut self, inputs: Vec<Tensor>, runner: &mut Runner<'_>) -> Result<Vec<Tensor>> {
        let mut computed = Vec::new();
        if let Some(plan) = &mut self.plan {
            let given: Vec<&Tensor> = self.inputs.iter().map(|i| &inputs[*i]).collect();
            computed = plan.run_on_host(&given, runner.executor, runner.bank.store(), runner.host)?;
        }
        let mut computed = computed.into_iter();
        let value = |source: &Source| match source {
            Source::Input(i) => Ok(inputs[*i].clone()),
            Source::Constant(tensor) => Ok(tensor.clone()),
            Source::Computed => computed.next().ok_or_else(|| Error::internal("an output is missing")),
        };
        self.outputs.iter().map(value).collect()
    }
}

impl Cut {
    fn new(graph: Graph, at: usize, planner: &mut Planner<'_>) -> Result<Self> {
        let node = graph.nodes[at].clone();
        let part = |nodes: &[Node], inputs: Vec<ValueId>, outputs: Vec<ValueId>| {
            Unit::new(Graph { nodes: nodes.to_vec(), inputs, outputs, ..graph.clone() })
        };
        let reads = |nodes: &[Node]| -> BTreeSet<ValueId> {
            let of = |node: &Node| {
                [node.inputs.iter().flatten().copied().collect(), captures(&graph, node)].concat()
            };
            nodes.iter().flat_map(of).collect()
        };
        let makes = |nodes: &[Node]| -> BTreeSet<ValueId> {
            nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied()).collect()
        };
        let (head, tail) = (&graph.nodes[..at], &graph.nodes[at + 1..]);
        let made_after = makes(tail);
        let mut after = reads(tail);
        after.extend(&graph.outputs);
        after.retain(|id| !made_after.contains(id) && !graph.initializers.contains_key(id));
        let made_before = makes(head);
        let mut needed = after.clone();
        needed.extend(reads(&graph.nodes[at..=at]));
        needed.retain(|id| made_before.contains(id));
        let mut before = part(head, graph.inputs.clone(), needed.into_iter().collect());
        let mut after = part(tail, after.into_iter().collect(), graph.outputs.clone());

        let spec = |id: ValueId| -> Option<Spec> {
            let value = graph.value(id);
            Some((value.dtype?, value.known_shape()?))
        };
        let specs = |ids: &[ValueId]| ids.iter().map(|id| spec(*id)).collect::<Option<Vec<Spec>>>();
        before.prepare(specs(&graph.inputs).as_deref(), planner)?;
        let (mut bodies, mut failed, mut outputs) = (BTreeMap::new(), Vec::new(), Vec::new());
        for name in body_names(&node) {
            let Body { graph: body, formal, captures } = graph.body(&node, name).map_err(explain)?;
            let mut unit = Unit::new(body);
            // What a body of a loop is given depends on the run.
            let known = if formal == 0 { specs(&captures) } else { None };
            match unit.prepare(known.as_deref(), planner) {
                Ok(known) => outputs.push(known),
                // It may never be taken.
                Err(error) => failed.push(error),
            }
            bodies.insert(name.to_owned(), (captures, formal, unit));
        }
        if let Some(error) = failed.pop().filter(|_| failed.len() + 1 == bodies.len()) {
            let message = format!("{}: {}", describe(&node), error.message);
            return Err(Error { message, ..error });
        }
        // Where all branches agree, what follows them is known too.
        let agreed = |i: usize| {
            let first = outputs.first()?.get(i)?.clone()?;
            let same = outputs.iter().all(|outputs| outputs.get(i) == Some(&Some(first.clone())));
            same.then_some(first)
        };
        let given: Option<Vec<Spec>> = after
            .graph
            .inputs
            .iter()
            .map(|id| match node.outputs.iter().position(|output| *output == Some(*id)) {
                Some(i) if node.op_type == "If" => agreed(i),
                Some(_) => None,
                None => spec(*id),
            })
            .collect();
        after.prepare(given.as_deref(), planner)?;
        let opset = graph.opsets.get(&node.domain).copied().unwrap_or_else(|| graph.opset());
        let constants = graph.initializers.iter().filter_map(|(id, initializer)| match initializer {
            Initializer::Constant(tensor) => Some((*id, tensor.clone())),
            Initializer::Weight(_) => None,
        });
        let mut weights = Vec::new();
        for id in node.inputs.iter().flatten() {
            if let Some(Initializer::Weight(weight)) = graph.initializers.get(id) {
                let name = graph.value(*id).name.clone();
                planner.bank.place_plain(&name, weight.dtype)?;
                weights.push((*id, name));
            }
        }
        Ok(Cut {
            inputs: graph.inputs.clone(),
            outputs: graph.outputs.clone(),
            constants: constants.collect(),
            weights,
            before,
            node,
            opset,
            bodies,
            after,
        })
    }

    fn run(&mut self, inputs: Vec<Tensor>, runner: &mut Runner<'_>) -> Result<Vec<Tensor>> {
        let mut values: HashMap<ValueId, Tensor> = self.constants.clone();
        for (id, name) in &self.weights {
            values.insert(*id, runner.bank.plain(name)?);
        }
        values.extend(self.inputs.iter().copied().zip(inputs.iter().cloned()));
        let outputs = self.before.run(inputs, runner)?;
        values.extend(self.before.graph.outputs.iter().copied().zip(outputs));
        let results = self.decide(&values, runner).map_err(|error| {
            let message = format!("{}: {}", describe(&self.node), error.message);
            Error { message, ..error }
        })?;
        for (id, result) in self.node.outputs.iter().zip(results) {
            if let Some(id) = id {
                values.insert(*id, result);
            }
        }
        let given = self.after.graph.inputs.iter().map(|id| take(&values, *id)).collect::<Result<_>>()?;
        self.after.run(given, runner)
    }

    /// The outputs of the node.
    fn decide(&mut self, values: &HashMap<ValueId, Tensor>, runner: &mut Runner<'_>) -> Result<Vec<Tensor>> {
        let inputs: Vec<Option<Tensor>> = self
            .node
            .inputs
            .iter()
            .map(|id| id.map(|id| take(values, id)).transpose())
            .collect::<Result<_>>()?;
        let input = |i: usize| inputs.get(i).cloned().flatten();
        if !is_flow(&self.node) {
            let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
            return eval::evaluate(&self.node, self.opset, &inputs)
                .map_err(|e| Error::invalid(e.to_string()));
        }
        let name = match &*self.node.op_type {
            "If" if truth(input(0))?.unwrap_or_default() => "then_branch",
            "If" => "else_branch",
            _ => "body",
        };
        let Some((captures, formal, unit)) = self.bodies.get_mut(name) else {
            return Err(Error::invalid(format!("it has no body {name}")));
        };
        let captured: Vec<Tensor> = captures.iter().map(|id| take(values, *id)).collect::<Result<_>>()?;
        let node = &self.node;
        let body = match node.attributes.get(name) {
            Some(Attribute::Graph(body)) => &**body,
            _ => return Err(Error::invalid(format!("it has no body {name}"))),
        };
        let run = |mut given: Vec<Tensor>| {
            if given.len() != *formal {
                return Err(Error::invalid(format!(
                    "its body has {formal} inputs, {} are given",
                    given.len()
                )));
            }
            given.extend(captured.iter().cloned());
            unit.run(given, runner)
        };
        match &*node.op_type {
            "If" => {
                let mut run = run;
                run(Vec::new())
            }
            "Loop" => repeat(&inputs, body, run),
            _ if self.opset < 9 => Err(Error::unsupported("Scan of operator set 8 is not supported")),
            _ => scan(node, inputs, run),
        }
    }
}

fn take(values: &HashMap<ValueId, Tensor>, id: ValueId) -> Result<Tensor> {
    values.get(&id).cloned().ok_or_else(|| Error::internal("a value is missing where the graph is cut"))
}

/// The boolean that decides.
fn truth(tensor: Option<Tensor>) -> Result<Option<bool>> {
    let Some(tensor) = tensor else { return Ok(None) };
    match tensor.to_i64s().as_deref() {
        Some([value]) => Ok(Some(*value != 0)),
        _ => {
            Err(Error::invalid(format!("its condition has the shape {:?}, not one element", tensor.shape())))
        }
    }
}

/// Runs the body of a Loop until its condition is false or it ran often enough.
fn repeat(
    inputs: &[Option<Tensor>],
    body: &GraphProto,
    mut run: impl FnMut(Vec<Tensor>) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let input = |i: usize| inputs.get(i).cloned().flatten();
    let most = input(0).map(|t| t.to_i64s().and_then(|v| v.first().copied()).unwrap_or_default());
    let mut condition = truth(input(1))?.unwrap_or(true);
    let mut carried: Vec<Tensor> = inputs.iter().skip(2).flatten().cloned().collect();
    let (count, scans) = (carried.len(), body.output.len().saturating_sub(1 + carried.len()));
    let mut rows: Vec<Vec<Tensor>> = vec![Vec::new(); scans];
    // Exporters give scalars, or vectors of one element.
    let as_input = |i: usize, tensor: Tensor| -> Result<Tensor> {
        let shape = body.input.get(i).and_then(|v| v.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref());
        let rank = shape.map_or(0, |shape| shape.dim.len());
        Tensor::new(tensor.dtype(), vec![1; rank], tensor.data().clone()).map_err(explain)
    };
    let mut step = 0i64;
    while condition && most.is_none_or(|most| step < most) {
        let mut given = vec![as_input(0, Tensor::scalar(step))?, as_input(1, Tensor::scalar(condition))?];
        given.append(&mut carried);
        let mut results = run(given)?.into_iter();
        condition = truth(results.next())?.unwrap_or_default();
        carried = results.by_ref().take(count).collect();
        rows.iter_mut().zip(results).for_each(|(rows, row)| rows.push(row));
        step += 1;
    }
    for (i, rows) in rows.iter().enumerate() {
        carried.push(if rows.is_empty() { empty(body, 1 + count + i)? } else { stack(rows, 0)? });
    }
    Ok(carried)
}

/// The output of a Loop that never ran.
fn empty(body: &GraphProto, i: usize) -> Result<Tensor> {
    let unknown = || Error::unsupported(format!("it never ran, and output {i} of its body has no type"));
    let declared =
        body.output.get(i).and_then(|v| v.r#type.as_ref()?.tensor_type.as_ref()).ok_or_else(unknown)?;
    let dtype = declared.elem_type.and_then(DType::from_onnx).ok_or_else(unknown)?;
    let dims = declared.shape.iter().flat_map(|shape| &shape.dim);
    let dims = dims.map(|dim| dim.dim_value.and_then(|n| usize::try_from(n).ok()).unwrap_or(0));
    Tensor::new(dtype, [0].into_iter().chain(dims).collect(), Vec::new()).map_err(explain)
}

/// Tensors of one shape as one with another dimension at `axis`.
fn stack(rows: &[Tensor], axis: i64) -> Result<Tensor> {
    let Some(first) = rows.first() else { return Err(Error::invalid("nothing to stack")) };
    let rank = first.shape().len() as i64 + 1;
    let axis = if axis < 0 { axis + rank } else { axis };
    let axis = usize::try_from(axis)
        .ok()
        .filter(|a| (*a as i64) < rank)
        .ok_or_else(|| Error::invalid(format!("axis {axis} of rank {rank}")))?;
    if rows.iter().any(|row| row.dtype() != first.dtype() || row.shape() != first.shape()) {
        return Err(Error::invalid("the body gave outputs of different shapes, which cannot be stacked"));
    }
    let outer: usize = first.shape()[..axis].iter().product();
    let chunk = first.data().len() / outer.max(1);
    let mut data = Vec::with_capacity(first.data().len() * rows.len());
    for i in 0..outer {
        rows.iter().for_each(|row| data.extend_from_slice(&row.data()[i * chunk..(i + 1) * chunk]));
    }
    let mut shape = first.shape().to_vec();
    shape.insert(axis, rows.len());
    Tensor::new(first.dtype(), shape, data).map_err(explain)
}

/// The part of a tensor at index `at` of `axis`, without that dimension.
fn slice(tensor: &Tensor, axis: usize, at: usize) -> Result<Tensor> {
    let mut shape = tensor.shape().to_vec();
    let outer: usize = shape[..axis].iter().product();
    let inner = shape[axis + 1..].iter().product::<usize>() * tensor.dtype().size();
    let count = shape.remove(axis);
    let data = (0..outer)
        .flat_map(|i| &tensor.data()[(i * count + at) * inner..][..inner])
        .copied()
        .collect::<Vec<u8>>();
    Tensor::new(tensor.dtype(), shape, data).map_err(explain)
}

/// Runs the body of a Scan for each slice of its inputs.
fn scan(
    node: &Node,
    inputs: Vec<Option<Tensor>>,
    mut run: impl FnMut(Vec<Tensor>) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let inputs: Vec<Tensor> = inputs.into_iter().flatten().collect();
    let scanned = node
        .int("num_scan_inputs")
        .and_then(|n| usize::try_from(n).ok())
        .filter(|n| (1..=inputs.len()).contains(n));
    let scanned = scanned.ok_or_else(|| Error::invalid("num_scan_inputs does not fit its inputs"))?;
    let (states, sequences) = inputs.split_at(inputs.len() - scanned);
    let list = |name: &str, i: usize| node.ints(name).and_then(|list| list.get(i).copied()).unwrap_or(0);
    let axis = |i: usize| {
        let rank = sequences[i].shape().len();
        crate::shape::axis(list("scan_input_axes", i), rank)
            .ok_or_else(|| Error::invalid("an axis is out of range"))
    };
    let axes: Vec<usize> = (0..scanned).map(axis).collect::<Result<_>>()?;
    let steps = sequences[0].shape()[axes[0]];
    if sequences.iter().zip(&axes).any(|(sequence, axis)| sequence.shape()[*axis] != steps) {
        return Err(Error::invalid("its sequences have different lengths"));
    }
    let mut carried = states.to_vec();
    let mut rows: Vec<Vec<Tensor>> = vec![Vec::new(); node.outputs.len().saturating_sub(carried.len())];
    for step in 0..steps {
        let mut given = carried;
        for (i, (sequence, axis)) in sequences.iter().zip(&axes).enumerate() {
            let at = if list("scan_input_directions", i) == 1 { steps - 1 - step } else { step };
            given.push(slice(sequence, *axis, at)?);
        }
        let mut results = run(given)?.into_iter();
        carried = results.by_ref().take(states.len()).collect();
        rows.iter_mut().zip(results).for_each(|(rows, row)| rows.push(row));
    }
    for (i, mut rows) in rows.into_iter().enumerate() {
        if list("scan_output_directions", i) == 1 {
            rows.reverse();
        }
        carried.push(stack(&rows, list("scan_output_axes", i))?);
    }
    Ok(carried)
}

//! Graphs with control flow (If, Loop and Scan), or with values whose shapes depend on the run.
//!
//! Such a graph is cut at the first such node into the part before it, the node, and the rest. The rest is translated when the shapes
//! of its inputs are known, and may be cut again. Each part and each body is translated as a separate graph, once for each set of
//! shapes. Values between parts are in main memory.

mod cut;
mod loops;

use crate::{
    ffi::Executor,
    optimize::optimize,
    session::Plan,
    topology::{Topology, explain},
    translate::{describe, translate},
    weights::Bank,
};
use cut::Cut;
use sdrun_abi::{DType, Error, ErrorCode, Host, Result};
use sdrun_graph::{Attribute, Dim, Graph, Initializer, Node, OpenDims, Tensor, ValueId, eval, simplify};
use std::collections::{BTreeMap, BTreeSet};

/// The most sets of shapes for which a part keeps its translation.
const MAX_PLANS: usize = 4;

/// An element type and a shape.
pub(crate) type Spec = (DType, Vec<usize>);

/// Whether a graph has control-flow nodes.
pub(crate) fn decides(graph: &Graph) -> bool {
    graph.nodes.iter().any(is_flow)
}

fn is_flow(node: &Node) -> bool {
    node.domain.is_empty() && matches!(&*node.op_type, "If" | "Loop" | "Scan")
}

/// The resources for running a part.
pub(crate) struct Runner<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) bank: &'a mut Bank,
    pub(crate) executor: &'a mut Executor,
    pub(crate) host: &'a dyn Host,
}

/// The resources for translating a part.
pub(crate) struct Planner<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) bank: &'a mut Bank,
    /// The operators that the reference implementation evaluates, with their number of nodes.
    pub(crate) host_operators: &'a mut BTreeMap<String, usize>,
}

/// A part of a graph, or a body, with its translations.
pub(crate) struct Unit {
    graph: Graph,
    /// The translation for each set of shapes, the latest first.
    plans: Vec<(Vec<Spec>, Step)>,
}

enum Step {
    Straight(Box<Straight>),
    Cut(Box<Cut>),
}

/// A part without control flow.
struct Straight {
    outputs: Vec<Source>,
    /// The indices of the part's inputs that the plan reads.
    inputs: Vec<usize>,
    plan: Option<Plan>,
}

/// The source of an output.
enum Source {
    Input(usize),
    Constant(Tensor),
    /// The next output of the plan.
    Computed,
}

impl Unit {
    pub(crate) fn new(graph: Graph) -> Self {
        Unit { graph, plans: Vec::new() }
    }

    /// Translates for inputs of these types and shapes. If they are unknown, keeps the weights in plain form, from which every other
    /// form can be derived. Returns the types and shapes of the outputs, as far as they are known.
    ///
    /// # Errors
    /// If no run could succeed.
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

    /// Keeps the weights in plain form. Without shapes, only unknown operators can be refused.
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

    /// Computes the outputs for these inputs.
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

    /// The bytes of constants.
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

/// The types and shapes of the outputs that are known before a run.
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

/// Translates a part for inputs of these types and shapes.
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

/// Whether the graph must be cut at a node, because later shapes are known only after it ran.
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

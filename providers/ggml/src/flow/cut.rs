//! A graph cut at a control-flow node.

use super::{
    Planner, Runner, Spec, Unit, body_names, captures, is_flow,
    loops::{repeat, scan, truth},
};
use crate::{topology::explain, translate::describe};
use sdrun_abi::{Error, Result};
use sdrun_graph::{Attribute, Body, Graph, Initializer, Node, Tensor, ValueId, eval};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A graph cut at a node: the part before it, the node with its bodies, and the part after it.
pub(super) struct Cut {
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
    constants: HashMap<ValueId, Tensor>,
    /// Weights that the node itself reads.
    weights: Vec<(ValueId, String)>,
    pub(super) before: Unit,
    node: Node,
    opset: i64,
    /// Each body, by the name of its attribute: its captures, the number of its own inputs, and its graph.
    pub(super) bodies: BTreeMap<String, (Vec<ValueId>, usize, Unit)>,
    pub(super) after: Unit,
}

impl Cut {
    pub(super) fn new(graph: Graph, at: usize, planner: &mut Planner<'_>) -> Result<Self> {
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
            // The inputs of a loop's body depend on the run.
            let known = if formal == 0 { specs(&captures) } else { None };
            match unit.prepare(known.as_deref(), planner) {
                Ok(known) => outputs.push(known),
                // The branch may never be taken.
                Err(error) => failed.push(error),
            }
            bodies.insert(name.to_owned(), (captures, formal, unit));
        }
        if let Some(error) = failed.pop().filter(|_| failed.len() + 1 == bodies.len()) {
            let message = format!("{}: {}", describe(&node), error.message);
            return Err(Error { message, ..error });
        }
        // If all branches agree, the types after them are known too.
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

    pub(super) fn run(&mut self, inputs: Vec<Tensor>, runner: &mut Runner<'_>) -> Result<Vec<Tensor>> {
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

    /// Runs the node and returns its outputs.
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
            return eval::evaluate(&self.node, self.opset, &inputs).map_err(|e| match e {
                eval::EvalError::Unsupported { .. } => Error::unsupported(e.to_string()),
                eval::EvalError::Invalid(_) => Error::invalid(e.to_string()),
            });
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

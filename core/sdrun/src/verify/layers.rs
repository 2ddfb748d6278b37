//! Finds where a provider's values first differ from the reference's, and cuts that part out.

use super::{Comparison, Tolerance, compare};
use crate::{Model, Result, Tensors};
use sdrun_abi::{DType, Error as AbiError};
use sdrun_graph::{Graph, ValueId};
use std::collections::BTreeSet;

/// Runs a model on the given inputs and returns its outputs.
pub type Run<'a> = dyn FnMut(&Model, &Tensors) -> Result<Tensors> + 'a;

/// Two ways to run a model, and how far they may differ.
pub struct Sides<'a> {
    /// What is examined.
    pub candidate: &'a mut Run<'a>,
    /// What is right.
    pub reference: &'a mut Run<'a>,
    /// How far values may differ.
    pub tolerance: Tolerance,
}

/// The first node whose values differ although those of all nodes before it do not.
#[derive(Clone, Debug)]
pub struct Divergence {
    /// The node's name; may be empty.
    pub node: String,
    /// Its operator.
    pub op: String,
    /// How far its output is from the reference's.
    pub output: Comparison,
    /// The same for those of its inputs that other nodes compute.
    pub inputs: Vec<Comparison>,
    value: ValueId,
}

/// A part of a model that gives wrong values for right inputs.
pub struct Reduced {
    /// The part, without weights of its own; those of the whole model fit.
    pub model: Model,
    /// Its inputs, from the reference.
    pub inputs: Tensors,
    /// Its outputs, from the reference.
    pub expected: Tensors,
    /// How far the candidate's output is from that.
    pub output: Comparison,
}

/// How many values to look at in one run: each may be large.
const PROBES: usize = 24;

impl Sides<'_> {
    /// Looks for the first node whose values differ, in a graph bound to the shapes of `inputs`. Adds intermediate values to the outputs,
    /// and narrows down between the last right and the first wrong one. `None` if the outputs are right, also if they are right only as
    /// long as intermediate values are outputs, which hinders fusion.
    ///
    /// # Errors
    /// Errors of both sides.
    pub fn first_divergence(
        &mut self,
        model: &Model,
        bound: &Graph,
        inputs: &Tensors,
    ) -> Result<Option<Divergence>> {
        // Values to look at: the first output of each node, where it can be compared.
        let values: Vec<(usize, ValueId)> = bound
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(index, node)| {
                let id = node.outputs.iter().flatten().next()?;
                let float = bound.value(*id).dtype.is_some_and(DType::is_float);
                (float && bound.value(*id).known_shape().is_some()).then_some((index, *id))
            })
            .collect();
        // All before `low` are right, as far as is known; the one at `high` is wrong.
        let (mut low, mut high) = (0, values.len());
        let mut wrong = None;
        while low < high {
            let count = PROBES.min(high - low);
            // Evenly spaced; the last one lies just before `high`.
            let probes: BTreeSet<usize> = (1..=count).map(|i| low + (high - low) * i / count - 1).collect();
            let ids: Vec<ValueId> = probes.iter().map(|at| values[*at].1).collect();
            let compared = self.compared(model, bound, inputs, &ids)?;
            let first = probes.iter().zip(compared).find(|(_, c)| !self.tolerance.accepts(c));
            match first {
                Some((at, comparison)) => {
                    let before = probes.range(..*at).next_back();
                    wrong = Some((*at, comparison));
                    (low, high) = (before.map_or(low, |before| before + 1), *at);
                }
                None => low = high,
            }
        }
        let Some((at, output)) = wrong else { return Ok(None) };
        let (index, value) = values[at];
        let node = &bound.nodes[index];
        let computed = |id: &ValueId| {
            let float = bound.value(*id).dtype.is_some_and(DType::is_float);
            float && !bound.initializers.contains_key(id) && !bound.inputs.contains(id)
        };
        let before: BTreeSet<ValueId> = node.inputs.iter().flatten().copied().filter(computed).collect();
        let before: Vec<ValueId> = before.into_iter().collect();
        let inputs =
            if before.is_empty() { Vec::new() } else { self.compared(model, bound, inputs, &before)? };
        Ok(Some(Divergence { node: node.name.clone(), op: node.op_type.clone(), output, inputs, value }))
    }

    /// Compares intermediate values, in the order of `ids`.
    fn compared(
        &mut self,
        model: &Model,
        bound: &Graph,
        inputs: &Tensors,
        ids: &[ValueId],
    ) -> Result<Vec<Comparison>> {
        let mut graph = bound.clone();
        graph.outputs.extend(ids.iter().filter(|id| !bound.outputs.contains(id)));
        let probed = model.with_graph(graph);
        let found = (self.candidate)(&probed, inputs)?;
        let expected = (self.reference)(&probed, inputs)?;
        let mut compared = compare(&found, &expected)?;
        ids.iter()
            .map(|id| {
                let name = &bound.value(*id).name;
                let at = compared.iter().position(|c| c.output == *name);
                at.map(|at| compared.swap_remove(at))
                    .ok_or_else(|| AbiError::internal(format!("value {name:?} was not returned")).into())
            })
            .collect()
    }

    /// Cuts out the smallest part of the graph before a divergence that gives wrong values for the reference's inputs: the node alone, or
    /// as many of the nodes before it as it takes.
    ///
    /// # Errors
    /// Errors of both sides. `FailedPrecondition` if only the whole graph is wrong.
    pub fn reduce(
        &mut self,
        model: &Model,
        bound: &Graph,
        inputs: &Tensors,
        divergence: &Divergence,
    ) -> Result<Reduced> {
        let ancestors = bound.ancestors(divergence.value);
        let mut size = 1;
        let mut failing = loop {
            let size_now = size.min(ancestors.len());
            if let Some(reduced) =
                self.part(model, bound, inputs, divergence, &ancestors[ancestors.len() - size_now..])?
            {
                break (size_now, reduced);
            }
            if size_now == ancestors.len() {
                let message = "the part alone is right: the error depends on the rest of the graph";
                return Err(AbiError::precondition(message).into());
            }
            size *= 2;
        };
        // Between half of it and all of it.
        let mut works = failing.0 / 2;
        while failing.0 - works > 1 {
            let middle = works + (failing.0 - works) / 2;
            match self.part(model, bound, inputs, divergence, &ancestors[ancestors.len() - middle..])? {
                Some(reduced) => failing = (middle, reduced),
                None => works = middle,
            }
        }
        Ok(failing.1)
    }

    /// Runs a part of the graph on both sides; `None` if it is right.
    fn part(
        &mut self,
        model: &Model,
        bound: &Graph,
        inputs: &Tensors,
        divergence: &Divergence,
        nodes: &[usize],
    ) -> Result<Option<Reduced>> {
        let part = bound.part(&nodes.iter().copied().collect(), &[divergence.value]);
        // What the part gets from other nodes, from the reference.
        let missing: Vec<ValueId> = part
            .inputs
            .iter()
            .filter_map(|id| bound.find(&part.value(*id).name))
            .filter(|id| !bound.inputs.contains(id))
            .collect();
        let mut graph = bound.clone();
        graph.outputs.extend(missing.iter().filter(|id| !bound.outputs.contains(id)));
        let mut values = match missing.is_empty() {
            true => Tensors::new(),
            false => (self.reference)(&model.with_graph(graph), inputs)?,
        };
        let mut given = Tensors::new();
        for id in &part.inputs {
            let name = part.value(*id).name.clone();
            let tensor = match inputs.get(&name) {
                Some(tensor) => Some(crate::HostTensor::from_bytes(
                    tensor.dtype(),
                    tensor.shape().to_vec(),
                    tensor.bytes(),
                )?),
                None => values.remove(&name),
            };
            let tensor =
                tensor.ok_or_else(|| AbiError::internal(format!("value {name:?} was not returned")))?;
            given.insert(name, tensor);
        }
        let part = model.with_graph(part);
        let expected = (self.reference)(&part, &given)?;
        let found = (self.candidate)(&part, &given)?;
        let output = compare(&found, &expected)?.into_iter().find(|c| !self.tolerance.accepts(c));
        Ok(output.map(|output| Reduced { model: part, inputs: given, expected, output }))
    }
}

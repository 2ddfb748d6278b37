//! Groups of nodes that ggml, or a kernel of ours, computes as one.
//!
//! A pattern is translated at the place of its last node; the nodes before it are left out. What is between is used by
//! nobody else and is no output of the graph. Everything that could make a translation impossible is checked here.

use crate::{
    ffi::Unary,
    kernels::Activation,
    ops::{GroupNormParts, group_norm},
    shape,
    storage::is_f32,
    translate::{Operand, Outcome, Translator},
};
use sdrun_graph::{Graph, Node, ValueId};
use std::collections::{HashMap, HashSet};

/// One group of nodes.
pub(crate) struct Pattern<'g> {
    last: &'g Node,
    kind: Kind,
}

enum Kind {
    /// `x * sigmoid(x)`.
    Silu(ValueId),
    /// `x * 0.5 * (1 + erf(x / sqrt(2)))`.
    GeluErf(ValueId),
    /// A normalisation by groups with factors and activation after it.
    GroupNorm(Norm),
}

struct Norm {
    x: ValueId,
    groups: usize,
    epsilon: f32,
    scale: ValueId,
    bias: ValueId,
    weight: Option<ValueId>,
    shift: Option<ValueId>,
    silu: bool,
}

/// All patterns of a graph.
#[derive(Default)]
pub(crate) struct Patterns<'g> {
    at: HashMap<usize, Pattern<'g>>,
    inside: HashSet<usize>,
}

impl<'g> Patterns<'g> {
    /// Finds them.
    pub(crate) fn find(graph: &'g Graph) -> Self {
        let search = Search::new(graph);
        let mut found = Patterns::default();
        // The long ones first, for short ones may be parts of them.
        for (index, node) in graph.nodes.iter().enumerate() {
            if let Some((norm, nodes)) = search.group_norm(index, node) {
                found.add(graph, nodes, Kind::GroupNorm(norm));
            }
        }
        for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op_type == "Mul") {
            let simple = search.silu(index, node).or_else(|| search.gelu(index, node));
            if let Some((kind, nodes)) = simple {
                found.add(graph, nodes, kind);
            }
        }
        found
    }

    fn add(&mut self, graph: &'g Graph, nodes: Vec<usize>, kind: Kind) {
        let taken = nodes.iter().any(|index| self.inside.contains(index) || self.at.contains_key(index));
        let Some(last) = nodes.iter().max().copied().filter(|_| !taken) else { return };
        self.inside.extend(nodes.into_iter().filter(|index| *index != last));
        self.at.insert(last, Pattern { last: &graph.nodes[last], kind });
    }
    /// Whether a node is computed as part of a pattern that ends at another node.
    pub(crate) fn is_inside(&self, index: usize) -> bool {
        self.inside.contains(&index)
    }
    /// The pattern that ends at a node.
    pub(crate) fn at(&self, index: usize) -> Option<&Pattern<'g>> {
        self.at.get(&index)
    }
}

impl Pattern<'_> {
    /// Translates the whole pattern.
    pub(crate) fn translate(&self, t: &mut Translator<'_>) -> Outcome {
        let y = match &self.kind {
            Kind::Silu(x) => {
                let x = t.operand(*x)?;
                t.builder.unary(Unary::Silu, x.tensor)?
            }
            Kind::GeluErf(x) => {
                let x = t.operand(*x)?;
                t.builder.unary(Unary::GeluErf, x.tensor)?
            }
            Kind::GroupNorm(norm) => {
                let optional = |t: &mut Translator<'_>, id: Option<ValueId>| -> Outcome<Option<Operand>> {
                    id.map(|id| t.operand(id)).transpose()
                };
                let parts = GroupNormParts {
                    x: t.operand(norm.x)?,
                    groups: norm.groups,
                    epsilon: norm.epsilon,
                    affine: Some((t.operand(norm.scale)?, t.operand(norm.bias)?)),
                    weight: optional(t, norm.weight)?,
                    shift: optional(t, norm.shift)?,
                    activation: norm.silu.then_some(Activation::Swish(1.0)),
                };
                group_norm(t, self.last, parts)?
            }
        };
        t.define(self.last, 0, y)
    }
}

/// Who makes and who uses each value.
struct Search<'g> {
    graph: &'g Graph,
    producers: HashMap<ValueId, usize>,
    consumers: HashMap<ValueId, Vec<usize>>,
}

impl<'g> Search<'g> {
    fn new(graph: &'g Graph) -> Self {
        let (mut producers, mut consumers) = (HashMap::new(), HashMap::<ValueId, Vec<usize>>::new());
        for (index, node) in graph.nodes.iter().enumerate() {
            producers.extend(node.outputs.iter().flatten().map(|id| (*id, index)));
            for id in node.inputs.iter().flatten() {
                consumers.entry(*id).or_default().push(index);
            }
        }
        // A graph output has one consumer more than there are nodes that use it.
        for id in &graph.outputs {
            consumers.entry(*id).or_default().push(usize::MAX);
        }
        Search { graph, producers, consumers }
    }

    /// The node that makes a value, if it is of this operator.
    fn made_by(&self, id: ValueId, op: &str) -> Option<(usize, &'g Node)> {
        let index = *self.producers.get(&id)?;
        let node = &self.graph.nodes[index];
        (node.op_type == op && node.domain.is_empty()).then_some((index, node))
    }
    /// The only node that uses a value, if it is of this operator.
    fn used_by(&self, id: ValueId, op: &str) -> Option<(usize, &'g Node)> {
        let &[index] = &self.consumers.get(&id)?[..] else { return None };
        let node = self.graph.nodes.get(index)?;
        (node.op_type == op && node.domain.is_empty()).then_some((index, node))
    }
    fn is_used_once(&self, id: ValueId) -> bool {
        self.consumers.get(&id).is_some_and(|users| users.len() == 1)
    }
    fn is_float(&self, id: ValueId) -> bool {
        self.graph.value(id).dtype.is_some_and(is_f32)
    }
    fn shape(&self, id: ValueId) -> Option<Vec<usize>> {
        self.graph.value(id).known_shape().filter(|shape| !shape.contains(&0))
    }
    fn same_shape(&self, a: ValueId, b: ValueId) -> bool {
        self.shape(a).is_some_and(|shape| self.shape(b) == Some(shape))
    }
    fn is_scalar(&self, id: ValueId, value: f32) -> bool {
        let Some(constant) = self.graph.constant(id).filter(|c| c.len() == 1) else { return false };
        // Half precision holds 1 / sqrt(2) to three digits.
        constant.to_f32s().is_some_and(|v| (v[0] - value).abs() <= 5e-4 * value.abs())
    }
    /// Both inputs of a node in both orders.
    fn pairs(node: &Node) -> Option<[(ValueId, ValueId); 2]> {
        let (a, b) = (node.input(0)?, node.input(1)?);
        Some([(a, b), (b, a)])
    }

    fn silu(&self, index: usize, node: &'g Node) -> Option<(Kind, Vec<usize>)> {
        Self::pairs(node)?.into_iter().find_map(|(x, gate)| {
            let (sigmoid, gate_node) = self.made_by(gate, "Sigmoid")?;
            let fits = gate_node.input(0) == Some(x) && self.is_used_once(gate) && self.is_float(x);
            fits.then(|| (Kind::Silu(x), vec![sigmoid, index]))
        })
    }

    fn gelu(&self, index: usize, node: &'g Node) -> Option<(Kind, Vec<usize>)> {
        let (mut leaves, mut nodes) = (Vec::new(), vec![index]);
        for id in [node.input(0)?, node.input(1)?] {
            match self.made_by(id, "Mul").filter(|_| self.is_used_once(id)) {
                Some((inner, product)) => {
                    leaves.extend([product.input(0)?, product.input(1)?]);
                    nodes.push(inner);
                }
                None => leaves.push(id),
            }
        }
        let half = leaves.iter().position(|id| self.is_scalar(*id, 0.5))?;
        leaves.remove(half);
        let &[a, b] = &leaves[..] else { return None };
        [(a, b), (b, a)].into_iter().find_map(|(x, gate)| {
            let (add, sum) = self.made_by(gate, "Add").filter(|_| self.is_used_once(gate))?;
            let (erf, one) = Self::pairs(sum)?.into_iter().find(|(_, one)| self.is_scalar(*one, 1.0))?;
            debug_assert!(self.graph.constant(one).is_some());
            let (erf_index, erf_node) = self.made_by(erf, "Erf").filter(|_| self.is_used_once(erf))?;
            let scaled = erf_node.input(0).filter(|id| self.is_used_once(*id))?;
            let root = std::f32::consts::SQRT_2;
            let scale_index = match (self.made_by(scaled, "Div"), self.made_by(scaled, "Mul")) {
                (Some((i, div)), _) => {
                    (div.input(0) == Some(x) && self.is_scalar(div.input(1)?, root)).then_some(i)
                }
                (None, Some((i, mul))) => {
                    let fits =
                        Self::pairs(mul)?.into_iter().any(|(y, c)| y == x && self.is_scalar(c, 1.0 / root));
                    fits.then_some(i)
                }
                _ => None,
            }?;
            let fits = self.is_float(x) && self.same_shape(x, node.output(0)?);
            let nodes = [&nodes[..], &[add, erf_index, scale_index]].concat();
            fits.then_some((Kind::GeluErf(x), nodes))
        })
    }

    fn group_norm(&self, index: usize, node: &'g Node) -> Option<(Norm, Vec<usize>)> {
        let epsilon = node.float("epsilon").unwrap_or(1e-5);
        let (mut x, scale, bias) = (node.input(0)?, node.input(1)?, node.input(2)?);
        let (mut nodes, mut y) = (vec![index], node.output(0)?);
        let groups = match &node.op_type[..] {
            "GroupNormalization" => usize::try_from(node.int("num_groups")?).ok()?,
            "InstanceNormalization" => {
                let groups = *self.shape(x)?.get(1)?;
                // Exporters say GroupNorm as an InstanceNorm of a tensor whose channels are the groups.
                let before = self.made_by(x, "Reshape").filter(|_| self.is_used_once(x));
                if let (Some((first, into)), Some((second, back))) = (before, self.used_by(y, "Reshape")) {
                    let (source, result) = (into.input(0)?, back.output(0)?);
                    let (outer, inner) = (self.shape(source)?, self.shape(x)?);
                    let regroups = outer.len() >= 2 && outer[0] == inner[0] && outer[1] % groups == 0;
                    if regroups && self.same_shape(source, result) {
                        nodes.extend([first, second]);
                        (x, y) = (source, result);
                    }
                }
                groups
            }
            _ => return None,
        };
        let shape = self.shape(x)?;
        let channels = *shape.get(1)?;
        let affine = shape::len(&self.shape(scale)?);
        let sound = groups > 0
            && channels % groups == 0
            && [groups, channels].contains(&affine)
            && shape::len(&self.shape(bias)?) == affine
            && [x, scale, bias].into_iter().all(|id| self.is_float(id));
        if !sound {
            return None;
        }
        let mut norm = Norm { x, groups, epsilon, scale, bias, weight: None, shift: None, silu: false };
        let mut factor = |op: &str, y: &mut ValueId| {
            let (index, node) = self.used_by(*y, op)?;
            let (_, other) = Self::pairs(node)?.into_iter().find(|(this, _)| this == &*y)?;
            (other != *y && self.is_per_channel(other, &shape)).then(|| {
                nodes.push(index);
                *y = node.output(0).unwrap_or(*y);
                other
            })
        };
        norm.weight = factor("Mul", &mut y);
        norm.shift = factor("Add", &mut y);
        if let Some((sigmoid, product)) = self.silu_of(y) {
            nodes.extend([sigmoid, product]);
            norm.silu = true;
        }
        (nodes.len() > 1).then_some((norm, nodes))
    }

    /// Whether a value has one element for each channel of `shape` and is broadcast along the rest.
    fn is_per_channel(&self, id: ValueId, shape: &[usize]) -> bool {
        let Some(own) = self.shape(id).filter(|own| own.len() <= shape.len() && self.is_float(id)) else {
            return false;
        };
        let lead = shape.len() - own.len();
        let aligned = own.iter().enumerate().all(|(i, d)| *d == if lead + i == 1 { shape[1] } else { 1 });
        aligned && lead <= 1 && shape::len(&own) == shape[1]
    }

    /// The Sigmoid and the Mul that are the only users of a value and make a SiLU of it.
    fn silu_of(&self, id: ValueId) -> Option<(usize, usize)> {
        let &[a, b] = &self.consumers.get(&id)?[..] else { return None };
        [(a, b), (b, a)].into_iter().find(|(sigmoid, product)| {
            let (Some(gate), Some(node)) = (self.graph.nodes.get(*sigmoid), self.graph.nodes.get(*product))
            else {
                return false;
            };
            gate.op_type == "Sigmoid"
                && node.op_type == "Mul"
                && gate
                    .output(0)
                    .is_some_and(|out| self.is_used_once(out) && node.inputs.contains(&Some(out)))
                && node.inputs.contains(&Some(id))
        })
    }
}

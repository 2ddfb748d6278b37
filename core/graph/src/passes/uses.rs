//! Queries that rewrite rules make on a graph.

use crate::{Dim, Graph, Node, Tensor, ValueId};
use sdrun_abi::DType;

const NOBODY: u32 = u32::MAX;

/// A graph with the producers and users of its values; built once per pass.
pub(crate) struct Uses<'g> {
    pub(crate) graph: &'g Graph,
    /// The node that produces each value.
    producer: Vec<u32>,
    /// How often nodes and graph outputs use each value.
    count: Vec<u32>,
    /// The last node that uses each value.
    user: Vec<u32>,
}

impl<'g> Uses<'g> {
    pub(crate) fn new(graph: &'g Graph) -> Self {
        let values = graph.values.len();
        let mut uses = Uses {
            graph,
            producer: vec![NOBODY; values],
            count: vec![0; values],
            user: vec![NOBODY; values],
        };
        for (index, node) in graph.nodes.iter().enumerate() {
            for id in node.outputs.iter().flatten() {
                uses.producer[id.0 as usize] = index as u32;
            }
            for id in node.inputs.iter().flatten() {
                uses.count[id.0 as usize] += 1;
                uses.user[id.0 as usize] = index as u32;
            }
        }
        for id in graph.captures().values().flatten().chain(&graph.outputs) {
            uses.count[id.0 as usize] += 1;
            uses.user[id.0 as usize] = NOBODY;
        }
        uses
    }

    /// Index of the node that produces a value.
    pub(crate) fn place(&self, id: ValueId) -> Option<usize> {
        self.producer.get(id.0 as usize).filter(|place| **place != NOBODY).map(|place| *place as usize)
    }
    /// The node that produces a value.
    pub(crate) fn producer(&self, id: ValueId) -> Option<&'g Node> {
        self.place(id).map(|place| &self.graph.nodes[place])
    }
    /// The node that produces a value, if it is the given operator of the default domain.
    pub(crate) fn made_by(&self, id: ValueId, op: &str) -> Option<&'g Node> {
        self.producer(id).filter(|node| is_op(node, op))
    }
    /// As [`Uses::made_by`], if the value is also used exactly once.
    pub(crate) fn made_once_by(&self, id: ValueId, op: &str) -> Option<&'g Node> {
        self.made_by(id, op).filter(|_| self.is_used_once(id))
    }
    /// Whether a value has exactly one use: one input of one node.
    pub(crate) fn is_used_once(&self, id: ValueId) -> bool {
        self.count[id.0 as usize] == 1 && self.user[id.0 as usize] != NOBODY
    }
    /// The only user of a value.
    pub(crate) fn only_user(&self, id: ValueId) -> Option<&'g Node> {
        self.is_used_once(id).then(|| &self.graph.nodes[self.user[id.0 as usize] as usize])
    }

    /// Whether node `a` comes after node `b`.
    pub(crate) fn is_later(&self, a: &Node, b: &Node) -> bool {
        let place = |node: &Node| node.output(0).map(|id| self.producer[id.0 as usize]);
        place(a) > place(b)
    }

    pub(crate) fn dtype(&self, id: ValueId) -> Option<DType> {
        self.graph.value(id).dtype
    }
    pub(crate) fn is_float(&self, id: ValueId) -> bool {
        self.dtype(id).is_some_and(|dtype| dtype.is_float())
    }
    pub(crate) fn shape(&self, id: ValueId) -> Option<&'g [Dim]> {
        self.graph.value(id).shape.as_deref()
    }
    pub(crate) fn rank(&self, id: ValueId) -> Option<usize> {
        Some(self.shape(id)?.len())
    }
    /// Dimension `axis` counted from the front, if known.
    pub(crate) fn dim(&self, id: ValueId, axis: usize) -> Option<usize> {
        self.shape(id)?.get(axis)?.known()
    }
    /// The last dimension, if known.
    pub(crate) fn last_dim(&self, id: ValueId) -> Option<usize> {
        self.shape(id)?.last()?.known()
    }
    /// Whether two values are known to have the same shape.
    pub(crate) fn same_shape(&self, a: ValueId, b: ValueId) -> bool {
        match (self.shape(a), self.shape(b)) {
            (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_dim(a, b)),
            _ => false,
        }
    }
    pub(crate) fn constant(&self, id: ValueId) -> Option<&'g Tensor> {
        self.graph.constant(id)
    }
    /// The integers of input `i`, if constant.
    pub(crate) fn ints(&self, node: &Node, i: usize) -> Option<Vec<i64>> {
        self.constant(node.input(i)?)?.to_few_i64s()
    }
    /// The single element of a floating-point constant.
    pub(crate) fn scalar(&self, id: ValueId) -> Option<f32> {
        let constant = self.constant(id).filter(|c| c.len() == 1)?;
        constant.to_f32s()?.first().copied()
    }
    /// If a Mul or Div scales its other operand by a scalar that preserves the shape: that operand and the factor.
    pub(crate) fn scaled(&self, node: &Node) -> Option<(ValueId, f32)> {
        let (a, b) = (node.input(0)?, node.input(1)?);
        let fits = |x: ValueId, c: ValueId| {
            Some(self.constant(c)?.shape().len() <= self.rank(x)?).filter(|fits| *fits)?;
            self.scalar(c)
        };
        match &*node.op_type {
            "Mul" if node.domain.is_empty() => {
                fits(a, b).map(|c| (a, c)).or_else(|| fits(b, a).map(|c| (b, c)))
            }
            "Div" if node.domain.is_empty() => fits(a, b).map(|c| (a, 1.0 / c)),
            _ => None,
        }
    }
    /// Whether a value is a scalar constant equal to `expected`, within the precision of its type.
    pub(crate) fn is_scalar(&self, id: ValueId, expected: f32) -> bool {
        // Half-precision exports were often rounded twice, via bf16.
        let tolerance = match self.dtype(id) {
            Some(DType::F32 | DType::F64) => 1e-5,
            _ => 2e-3,
        };
        self.scalar(id).is_some_and(|v| (v - expected).abs() <= tolerance * expected.abs())
    }
    /// The value before any casts between floating-point types.
    pub(crate) fn before_casts(&self, mut id: ValueId) -> ValueId {
        while let Some(from) = self.made_by(id, "Cast").and_then(|cast| cast.input(0)) {
            if !self.is_float(from) || !self.is_float(id) {
                break;
            }
            id = from;
        }
        id
    }
    /// If a node reduces its last axis and keeps it with size 1: the value it reduces.
    pub(crate) fn reduced_last_axis(&self, node: &Node) -> Option<ValueId> {
        let x = node.input(0)?;
        let axes = node.ints("axes").map(<[i64]>::to_vec).or_else(|| self.ints(node, 1))?;
        let last = self.rank(x).map(|rank| rank as i64 - 1);
        let fits = matches!(axes[..], [axis] if axis == -1 || Some(axis) == last);
        (fits && node.int_or("keepdims", 1) == 1).then_some(x)
    }
}

/// Whether a node is the given operator of the default domain.
pub(crate) fn is_op(node: &Node, op: &str) -> bool {
    node.op_type == op && node.domain.is_empty()
}

/// The two inputs of a node, in both orders.
pub(crate) fn pairs(node: &Node) -> Option<[(ValueId, ValueId); 2]> {
    let (a, b) = (node.input(0)?, node.input(1)?);
    Some([(a, b), (b, a)])
}

/// Whether two dimensions are known to be equal.
pub(crate) fn same_dim(a: &Dim, b: &Dim) -> bool {
    a == b && *a != Dim::Unknown
}

/// The permutation of a Transpose.
pub(crate) fn permutation(node: &Node, rank: usize) -> Option<Vec<usize>> {
    let perm: Vec<usize> = match node.ints("perm") {
        None => (0..rank).rev().collect(),
        Some(perm) => perm.iter().map(|axis| usize::try_from(*axis).ok()).collect::<Option<_>>()?,
    };
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    sorted.iter().copied().eq(0..rank).then_some(perm)
}

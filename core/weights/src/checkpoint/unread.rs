//! Tensors of a component that a graph does not read.

use super::{
    harmless::{Rules, describe},
    layout::Part,
    state_dict::{ComponentWeights, first_few},
};
use crate::{Binding, StateDict};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};

/// Tensors of a checkpoint's component that a graph does not read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Unread {
    /// Tensors without effect, by reason.
    pub harmless: BTreeMap<&'static str, Vec<String>>,
    /// Tensors that change the result and that the caller chose to leave out.
    pub left_out: Vec<String>,
}

impl Unread {
    /// Their number.
    pub fn len(&self) -> usize {
        self.left_out.len() + self.harmless.values().map(Vec::len).sum::<usize>()
    }

    /// Whether the graph reads every tensor.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Compares the tensors of a component with those a graph reads. Names are diffusers'; tensors outside the network keep
    /// the file's names.
    pub(super) fn new(part: &Part, weights: &ComponentWeights, binding: &Binding) -> Unread {
        let sources = binding.tensors.iter().flat_map(|tensor| &tensor.sources);
        let read: HashSet<&str> = sources.filter_map(|name| weights.canonical(name)).collect();
        let names = weights.names();
        let rules = Rules::new(part.network, read.iter().copied(), names.iter().copied());
        let mut unread = Unread::default();
        let own = names.into_iter().filter(|name| !read.contains(name)).map(|name| (name, name));
        let extra = part.table.extra.iter().map(|name| (name.as_str(), part.key(name)));
        for (name, shown) in own.chain(extra) {
            match rules.harmless(name) {
                Some(reason) => unread.harmless.entry(reason).or_default().push(shown.to_string()),
                None => unread.left_out.push(shown.to_string()),
            }
        }
        unread
    }

    /// The tensors left out, by kind: `norms of queries and keys: a, b`.
    pub(crate) fn description(&self) -> String {
        let mut kinds: Vec<(&'static str, Vec<String>)> = Vec::new();
        for name in &self.left_out {
            let kind = describe(name);
            match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, names)) => names.push(name.clone()),
                None => kinds.push((kind, vec![name.clone()])),
            }
        }
        let kinds: Vec<String> =
            kinds.iter().map(|(kind, names)| format!("{kind}: {}", first_few(names))).collect();
        kinds.join("; ")
    }
}

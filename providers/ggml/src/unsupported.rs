//! Collects every node that cannot be translated, for one error.

use crate::{
    shape,
    storage::storage_type,
    translate::{Translator, describe, operator_name},
};
use sdrun_abi::{Error, Hint, Result};
use sdrun_graph::Node;

/// The most nodes of one operator that the error names.
const NAMED: usize = 4;

/// The untranslated nodes by operator, in the order of the graph.
#[derive(Default)]
pub(crate) struct Unsupported {
    operators: Vec<Operator>,
    /// Whether an untranslated node has an output of unknown type or shape, so that later nodes cannot be translated.
    open_ended: bool,
}

/// The untranslated nodes of one operator.
struct Operator {
    name: String,
    /// The first node, and the reason.
    first: (String, String),
    /// The names of the first few named nodes.
    names: Vec<String>,
    nodes: usize,
    /// Whether all nodes have the same reason.
    alike: bool,
}

impl Unsupported {
    /// Adds a node and defines placeholders for its outputs, so that the nodes that read them can still be checked.
    pub(crate) fn add(&mut self, t: &mut Translator<'_>, node: &Node, why: &str) -> Result<()> {
        self.note(node, why);
        for id in node.outputs.iter().flatten() {
            let value = t.graph.value(*id);
            let type_ = value.dtype.and_then(storage_type);
            match (type_, value.known_shape()) {
                (Some(type_), Some(shape)) if !shape.contains(&0) => {
                    let tensor = t.builder.input(type_, shape::extent(&shape))?;
                    t.stand_in(*id, tensor);
                }
                _ => self.open_ended = true,
            }
        }
        Ok(())
    }

    /// Adds a node.
    pub(crate) fn note(&mut self, node: &Node, why: &str) {
        let name = operator_name(node);
        let at = self.operators.iter().position(|operator| operator.name == name).unwrap_or_else(|| {
            let first = (describe(node), why.to_owned());
            self.operators.push(Operator { name, first, names: Vec::new(), nodes: 0, alike: true });
            self.operators.len() - 1
        });
        let operator = &mut self.operators[at];
        operator.nodes += 1;
        operator.alike &= operator.first.1 == why;
        if !node.name.is_empty() && operator.names.len() < NAMED {
            operator.names.push(format!("{:?}", node.name));
        }
    }

    /// Whether later nodes cannot be translated.
    pub(crate) fn is_open_ended(&self) -> bool {
        self.open_ended
    }

    /// # Errors
    /// `Unimplemented`, listing all added nodes, if there are any.
    pub(crate) fn into_result(self) -> Result<()> {
        let nodes: usize = self.operators.iter().map(|operator| operator.nodes).sum();
        let message = match &self.operators[..] {
            [] => return Ok(()),
            [only] if nodes == 1 => format!("{}: {}", only.first.0, only.first.1),
            several => {
                let list: Vec<String> = several.iter().map(Operator::text).collect();
                format!("{nodes} nodes: {}", list.join("; "))
            }
        };
        Err(Error::unsupported(format!("the ggml provider cannot run {message}"))
            .with_hint(Hint::UseProvider(None)))
    }
}

impl Operator {
    /// `GRU x9 ("a", "b", "c", "d", ...): why`
    fn text(&self) -> String {
        let more = if self.names.len() < self.nodes { ", ..." } else { "" };
        let names =
            if self.names.is_empty() { String::new() } else { format!(" ({}{more})", self.names.join(", ")) };
        let which = if self.alike { "" } else { "the first one: " };
        format!("{} x{}{names}: {which}{}", self.name, self.nodes, self.first.1)
    }
}

//! Everything in a graph that cannot be translated, told at once.

use crate::{
    shape,
    storage::storage_type,
    translate::{Translator, describe},
};
use sdrun_abi::{Error, Result};
use sdrun_graph::Node;

/// Most nodes that are named in one error.
const NAMED: usize = 50;

/// The nodes that are not translated, with the reasons.
#[derive(Default)]
pub(crate) struct Unsupported {
    nodes: Vec<String>,
    /// Whether something of which not even the shape is known is missing, so that what follows is not looked at.
    open_ended: bool,
}

impl Unsupported {
    /// Notes a node and puts something in the place of its outputs, so that the nodes behind it can be looked at too.
    pub(crate) fn add(&mut self, t: &mut Translator<'_>, node: &Node, why: &str) -> Result<()> {
        self.nodes.push(format!("{}: {why}", describe(node)));
        for id in node.outputs.iter().flatten() {
            let value = t.graph.value(*id);
            let type_ = value.dtype.and_then(storage_type);
            match (type_, value.known_shape()) {
                (Some(type_), Some(shape)) => {
                    let tensor = t.builder.input(type_, shape::extent(&shape))?;
                    t.stand_in(*id, tensor);
                }
                _ => self.open_ended = true,
            }
        }
        Ok(())
    }

    /// Whether the rest of the graph cannot be judged.
    pub(crate) fn is_open_ended(&self) -> bool {
        self.open_ended
    }

    /// An error with all of them, where there are any.
    pub(crate) fn into_result(self) -> Result<()> {
        let hint = "another provider may support it; `sdrun providers` lists them";
        match &self.nodes[..] {
            [] => Ok(()),
            [one] => Err(Error::unsupported(format!("the ggml provider cannot run {one}")).with_hint(hint)),
            several => {
                let mut list = several[..several.len().min(NAMED)].join("; ");
                if several.len() > NAMED {
                    list += &format!("; and {} more", several.len() - NAMED);
                }
                let what = format!("the ggml provider cannot run {} nodes: {list}", several.len());
                Err(Error::unsupported(what).with_hint(hint))
            }
        }
    }
}

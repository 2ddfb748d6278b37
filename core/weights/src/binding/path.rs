//! Names an operand of a node after the module that the node belongs to.

use sdrun_graph::{Dim, Graph, Initializer, Node, ValueId};
use std::collections::HashMap;

/// Key of the node metadata in which the torch.export-based exporter keeps the modules a node is in: a Python list,
/// outermost first, whose last entry is the operation itself.
const SCOPES_KEY: &str = "pkg.torch.onnx.name_scopes";

/// The path of a node's module (`decoder.mid_block.resnets.0.norm1`), if the file contains it.
///
/// TorchScript writes `/decoder/mid_block/resnets.0/norm1/Mul`. The parts are the attributes on the way to the module,
/// the last one is the operation. Inside `nn.Sequential` a part repeats the one before it (`features/features.2/conv`).
pub(super) fn module_path(node: &Node) -> Option<String> {
    if let Some(scopes) = node.metadata.get(SCOPES_KEY) {
        return scope_before_last(scopes);
    }
    let (path, _) = node.name.strip_prefix('/')?.rsplit_once('/')?;
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !part.is_empty()) {
        match parts.last_mut() {
            Some(last) if part.strip_prefix(*last).is_some_and(|rest| rest.starts_with('.')) => *last = part,
            _ => parts.push(part),
        }
    }
    (!parts.is_empty()).then(|| parts.join("."))
}

/// The last entry but one of a list that Python printed. Names of modules hold neither quotes nor commas.
fn scope_before_last(list: &str) -> Option<String> {
    let inside = list.trim().strip_prefix('[')?.strip_suffix(']')?;
    let name = inside.rsplit(',').nth(1)?.trim().trim_matches(['\'', '"']);
    (!name.is_empty()).then(|| name.to_owned())
}

/// A use of an initializer by an operator that computes with it.
#[derive(Clone, Copy)]
pub(super) struct Use<'g> {
    pub(super) node: &'g Node,
    pub(super) slot: usize,
    /// Whether there is a `Transpose` of a matrix in between.
    pub(super) transposed: bool,
}

/// The nodes that use each value.
pub(super) struct Uses<'g> {
    graph: &'g Graph,
    nodes: HashMap<ValueId, Vec<(&'g Node, usize)>>,
}

impl<'g> Uses<'g> {
    pub(super) fn new(graph: &'g Graph) -> Self {
        let mut nodes: HashMap<_, Vec<_>> = HashMap::new();
        for node in &graph.nodes {
            for (slot, id) in node.inputs.iter().enumerate() {
                if let Some(id) = id {
                    nodes.entry(*id).or_default().push((node, slot));
                }
            }
        }
        Uses { graph, nodes }
    }

    /// All uses of a value, also through a cast or a transpose.
    pub(super) fn of(&self, id: ValueId) -> Vec<Use<'g>> {
        let mut found = Vec::new();
        self.follow(id, false, 4, &mut found);
        found
    }

    fn follow(&self, id: ValueId, transposed: bool, steps: usize, found: &mut Vec<Use<'g>>) {
        for (node, slot) in self.nodes.get(&id).into_iter().flatten() {
            let turns = node.op_type == "Transpose" && node.ints("perm") == Some(&[1, 0]);
            match node.output(0) {
                Some(output) if steps > 0 && (turns || matches!(&*node.op_type, "Cast" | "Identity")) => {
                    self.follow(output, transposed != turns, steps - 1, found);
                }
                _ => found.push(Use { node, slot: *slot, transposed }),
            }
        }
    }

    /// Rank of what the initializer is multiplied with or added to, if known.
    fn partner_rank(&self, used: &Use<'_>) -> Option<usize> {
        let other = used.node.input(1 - used.slot.min(1))?;
        self.graph.value(other).shape.as_deref().map(<[Dim]>::len)
    }

    /// The operand's name and shape in its module's state dict; `None` if no rule applies.
    pub(super) fn operand(&self, used: &Use<'_>, shape: &[usize]) -> Option<Operand> {
        let node = used.node;
        let (leaf, kind) = rule(node, used.slot)?;
        let source = match (kind, shape) {
            (Kind::Matrix { transposed }, [a, b]) if transposed != used.transposed => vec![*b, *a],
            (Kind::Matrix { .. }, [_, _]) => shape.to_vec(),
            _ if used.transposed => return None,
            (Kind::Kernel, [_, _, _, ..]) | (Kind::Vector, [_]) | (Kind::Normalised, [_, ..]) => {
                shape.to_vec()
            }
            (Kind::Channels, _) => vec![channels(shape, self.partner_rank(used))?],
            (Kind::Table, [1, height, width, channels]) if height == width => {
                vec![1, height * width, *channels]
            }
            _ => return None,
        };
        let transposed = matches!(kind, Kind::Matrix { transposed } if transposed != used.transposed);
        Some(Operand { leaf, source_shape: source, transposed })
    }

    /// Whether a constant initializer is the unit weight or zero bias that an exporter adds to a normalisation operator whose
    /// module has none.
    pub(super) fn only_normalises(&self, uses: &[Use<'_>]) -> bool {
        !uses.is_empty()
            && uses
                .iter()
                .all(|used| used.slot > 0 && used.node.op_type.ends_with("Normalization") && !used.transposed)
    }

    pub(super) fn weights(&self) -> impl Iterator<Item = (ValueId, &'g str, &'g sdrun_graph::WeightRef)> {
        self.graph.initializers.iter().filter_map(|(id, initializer)| match initializer {
            Initializer::Weight(weight) => Some((*id, &*self.graph.value(*id).name, weight)),
            Initializer::Constant(_) => None,
        })
    }
}

/// A module's tensor.
pub(super) struct Operand {
    /// `weight`, `bias`, …: its name after the module's path.
    pub(super) leaf: &'static str,
    pub(super) source_shape: Vec<usize>,
    pub(super) transposed: bool,
}

/// An operand's shape in the state dict, given that in the graph.
#[derive(Clone, Copy)]
enum Kind {
    /// Two dimensions, exchanged where `transposed`: a linear layer keeps `[out, in]`.
    Matrix { transposed: bool },
    /// At least three dimensions, the same.
    Kernel,
    /// One dimension, the same.
    Vector,
    /// The normalised dimensions, the same.
    Normalised,
    /// One dimension, to which `[C, 1, 1]` is broadcast.
    Channels,
    /// A square of positions, which is one row in the state dict.
    Table,
}

fn rule(node: &Node, slot: usize) -> Option<(&'static str, Kind)> {
    Some(match (&*node.op_type, slot) {
        ("MatMul", 1) => ("weight", Kind::Matrix { transposed: true }),
        ("Gemm", 1) => ("weight", Kind::Matrix { transposed: node.int_or("transB", 0) == 0 }),
        ("Gather", 0) => ("weight", Kind::Matrix { transposed: false }),
        ("Conv" | "ConvTranspose", 1) => ("weight", Kind::Kernel),
        ("Gemm" | "Conv" | "ConvTranspose", 2) => ("bias", Kind::Vector),
        ("LayerNormalization" | "RMSNormalization", 1) => ("weight", Kind::Normalised),
        ("LayerNormalization", 2) => ("bias", Kind::Normalised),
        ("GroupNormalization" | "InstanceNormalization" | "BatchNormalization", 1) => {
            ("weight", Kind::Vector)
        }
        ("GroupNormalization" | "InstanceNormalization" | "BatchNormalization", 2) => ("bias", Kind::Vector),
        ("BatchNormalization", 3) => ("running_mean", Kind::Vector),
        ("BatchNormalization", 4) => ("running_var", Kind::Vector),
        ("Mul", 0 | 1) | ("PRelu", 1) => ("weight", Kind::Channels),
        ("Add", 0 | 1) => ("bias", Kind::Channels),
        // diffusers' PatchEmbed cuts the middle out of a table that is its own tensor, not a submodule's.
        ("Slice", 0) if module_path(node).is_some_and(|path| path.ends_with("pos_embed")) => {
            ("pos_embed", Kind::Table)
        }
        _ => return None,
    })
}

/// C of `[C]`, `[C, 1, 1]` or `[1, C, 1, 1]`. A row `[1, C]` is no weight of a module but a table of the program
/// (the frequencies of a time embedding); `[C]` is one along the last dimension of at least two.
fn channels(shape: &[usize], partner_rank: Option<usize>) -> Option<usize> {
    let (channels, ones) = match shape {
        [1, c, rest @ ..] if !rest.is_empty() => (*c, rest),
        [c, rest @ ..] => (*c, rest),
        [] => return None,
    };
    let along_last = ones.is_empty() && partner_rank == Some(1);
    (channels > 1 && ones.iter().all(|d| *d == 1) && !along_last).then_some(channels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, scopes: Option<&str>) -> Node {
        Node {
            name: name.into(),
            domain: String::new(),
            op_type: "Mul".into(),
            inputs: vec![],
            outputs: vec![],
            attributes: Default::default(),
            metadata: scopes.map(|s| (SCOPES_KEY.to_owned(), s.to_owned())).into_iter().collect(),
        }
    }

    #[test]
    fn paths_of_modules() {
        for (name, path) in [
            (
                "/down_blocks.0/attentions.0/transformer_blocks.0/attn1/to_q/MatMul",
                Some("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"),
            ),
            ("/features/features.2/conv/conv.0/Conv", Some("features.2.conv.0")),
            ("/conv/conv1/Conv", Some("conv.conv1")),
            ("/Mul", None),
            ("Mul_17", None),
            ("", None),
        ] {
            assert_eq!(module_path(&node(name, None)).as_deref(), path, "{name}");
        }
        for (scopes, path) in [
            (
                "['', 'decoder', 'decoder.mid_block.resnets.0.norm1', 'group_norm']",
                Some("decoder.mid_block.resnets.0.norm1"),
            ),
            ("['', 'mul']", None),
            ("[]", None),
            ("decoder", None),
        ] {
            assert_eq!(module_path(&node("node_Mul_29", Some(scopes))).as_deref(), path, "{scopes}");
        }
    }

    #[test]
    fn shapes_of_channels() {
        for (shape, found) in [
            (&[320][..], Some(320)),
            (&[320, 1, 1], Some(320)),
            (&[1, 320, 1, 1], Some(320)),
            (&[1, 160], None),
            (&[320, 2, 1], None),
            (&[1, 1, 1], None),
        ] {
            assert_eq!(channels(shape, Some(4)), found, "{shape:?}");
        }
        assert_eq!(channels(&[160], Some(1)), None);
    }
}

//! The topology hash: identifies a graph independently of its weights.

use crate::{
    Attribute, Dim, Graph, Initializer, Node, Value, ValueId, onnx_out,
    passes::is_random,
    proto::{AttributeProto, GraphProto},
};
use prost::Message;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;

type Digest = [u8; 32];

impl Graph {
    /// SHA-256, in hexadecimal, of everything the graph computes except the values of its weights.
    ///
    /// It covers operators, attributes, operator sets, wiring, names, types and shapes of inputs and outputs,
    /// constants, and names, types and shapes of weights (an engine receives its weights by name). It ignores values
    /// and locations of weights, names of nodes and intermediate values, the order of initializers and of independent
    /// nodes, documentation and metadata.
    pub fn topology_hash(&self) -> String {
        let values = self.value_digests();
        let mut hash = Hasher::new("topology");
        hash.number(self.opsets.len());
        for (domain, version) in &self.opsets {
            hash.bytes(domain.as_bytes()).number(*version as usize);
        }
        for ids in [&self.inputs, &self.outputs] {
            hash.number(ids.len());
            for id in ids {
                hash.value(self.value(*id)).digest(&values.of(*id));
            }
        }
        // Sorted, so that the order of independent nodes and of initializers has no effect.
        let mut nodes = values.nodes;
        nodes.sort_unstable();
        hash.number(nodes.len());
        nodes.iter().for_each(|node| {
            hash.digest(node);
        });
        let mut weights: Vec<_> = self.weights().collect();
        weights.sort_by_key(|(name, _)| *name);
        hash.number(weights.len());
        for (name, weight) in weights {
            hash.bytes(name.as_bytes()).number(weight.dtype as usize).shape(&weight.shape);
        }
        hash.finish().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A digest of everything that each value is computed from.
    pub(crate) fn value_digests(&self) -> Digests {
        let mut digests = Digests { values: vec![[0; 32]; self.values.len()], nodes: Vec::new() };
        for id in &self.inputs {
            digests.values[id.0 as usize] =
                Hasher::new("input").bytes(self.value(*id).name.as_bytes()).finish();
        }
        for (id, initializer) in &self.initializers {
            digests.values[id.0 as usize] = match initializer {
                Initializer::Constant(tensor) => {
                    let mut hash = Hasher::new("constant");
                    hash.number(tensor.dtype() as usize).shape(tensor.shape()).bytes(tensor.data()).finish()
                }
                Initializer::Weight(_) => {
                    Hasher::new("weight").bytes(self.value(*id).name.as_bytes()).finish()
                }
            };
        }
        let ids = self.ids_by_name();
        let mut seen: HashMap<Digest, usize> = HashMap::new();
        for node in &self.nodes {
            let outer = |name: &str| ids.get(name).map_or([0; 32], |id| digests.of(*id));
            let mut digest = self.node_digest(node, &digests, &outer);
            if is_random(node) {
                // Two such nodes produce different values even if they are identical.
                let before = seen.entry(digest).or_default();
                *before += 1;
                digest = Hasher::new("random").digest(&digest).number(*before).finish();
            }
            for (i, id) in node.outputs.iter().enumerate() {
                let Some(id) = id else { continue };
                digests.values[id.0 as usize] = Hasher::new("output").digest(&digest).number(i).finish();
            }
            digests.nodes.push(digest);
        }
        digests
    }

    fn node_digest(&self, node: &Node, digests: &Digests, outer: &dyn Fn(&str) -> Digest) -> Digest {
        let mut hash = Hasher::new("node");
        hash.bytes(node.domain.as_bytes()).bytes(node.op_type.as_bytes());
        // Trailing absent inputs and outputs may be listed or omitted.
        let listed =
            |ids: &[Option<ValueId>]| ids.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let inputs = listed(&node.inputs);
        hash.number(inputs);
        for id in &node.inputs[..inputs] {
            hash.digest(&id.map_or([0; 32], |id| digests.of(id)));
        }
        let outputs = listed(&node.outputs);
        hash.number(outputs);
        for id in &node.outputs[..outputs] {
            hash.number(usize::from(id.is_some()));
        }
        hash.number(node.attributes.len());
        for (name, attribute) in &node.attributes {
            match attribute {
                Attribute::Graph(body) => {
                    hash.bytes(name.as_bytes()).digest(&body_digest(body, outer));
                }
                Attribute::Other(other) => {
                    hash.bytes(name.as_bytes()).digest(&attribute_digest(other, outer));
                }
                _ => {
                    hash.bytes(&onnx_out::attribute_proto(name, attribute).encode_to_vec());
                }
            }
        }
        hash.finish()
    }
}

pub(crate) struct Digests {
    values: Vec<Digest>,
    nodes: Vec<Digest>,
}

impl Digests {
    pub(crate) fn of(&self, id: ValueId) -> Digest {
        self.values[id.0 as usize]
    }
}

/// What a body computes from its inputs and captured values. The format requires topological order in bodies, so
/// nodes are taken in order.
fn body_digest(body: &GraphProto, outer: &dyn Fn(&str) -> Digest) -> Digest {
    let mut inner: HashMap<&str, Digest> = HashMap::new();
    for (i, input) in body.input.iter().enumerate() {
        inner.insert(input.name(), Hasher::new("body input").number(i).finish());
    }
    for tensor in &body.initializer {
        let mut anonymous = tensor.clone();
        (anonymous.name, anonymous.doc_string) = (None, None);
        anonymous.metadata_props.clear();
        inner.insert(tensor.name(), Hasher::new("body constant").bytes(&anonymous.encode_to_vec()).finish());
    }
    for node in &body.node {
        let find = |name: &str| inner.get(name).copied().unwrap_or_else(|| outer(name));
        let mut hash = Hasher::new("node");
        hash.bytes(node.domain().as_bytes())
            .bytes(node.op_type().as_bytes())
            .bytes(node.overload().as_bytes());
        hash.number(node.input.len());
        for name in &node.input {
            hash.digest(&if name.is_empty() { [0; 32] } else { find(name) });
        }
        let mut attributes: Vec<&AttributeProto> = node.attribute.iter().collect();
        attributes.sort_by_key(|attribute| attribute.name());
        hash.number(attributes.len());
        for attribute in attributes {
            hash.bytes(attribute.name().as_bytes()).digest(&attribute_digest(attribute, &find));
        }
        let digest = hash.number(node.output.len()).finish();
        for (i, name) in node.output.iter().enumerate() {
            inner.insert(name, Hasher::new("output").digest(&digest).number(i).finish());
        }
    }
    let mut hash = Hasher::new("body");
    for output in &body.output {
        hash.digest(&inner.get(output.name()).copied().unwrap_or_else(|| outer(output.name())));
    }
    hash.finish()
}

/// An attribute as in the file, without its documentation.
fn attribute_digest(attribute: &AttributeProto, outer: &dyn Fn(&str) -> Digest) -> Digest {
    let mut hash = Hasher::new("attribute");
    let bodies: Vec<&GraphProto> = attribute.g.iter().map(|g| &**g).chain(&attribute.graphs).collect();
    hash.number(bodies.len());
    for body in bodies {
        hash.digest(&body_digest(body, outer));
    }
    let rest = AttributeProto {
        name: attribute.name.clone(),
        ref_attr_name: attribute.ref_attr_name.clone(),
        r#type: attribute.r#type,
        f: attribute.f,
        i: attribute.i,
        s: attribute.s.clone(),
        t: attribute.t.clone(),
        sparse_tensor: attribute.sparse_tensor.clone(),
        tp: attribute.tp.clone(),
        floats: attribute.floats.clone(),
        ints: attribute.ints.clone(),
        strings: attribute.strings.clone(),
        tensors: attribute.tensors.clone(),
        sparse_tensors: attribute.sparse_tensors.clone(),
        type_protos: attribute.type_protos.clone(),
        ..Default::default()
    };
    hash.bytes(&rest.encode_to_vec()).finish()
}

/// SHA-256 over fields. Each field is preceded by its length, so fields cannot run into each other.
struct Hasher(Sha256);

impl Hasher {
    /// `kind` keeps hashes for different purposes apart.
    fn new(kind: &str) -> Self {
        let mut hash = Hasher(Sha256::new());
        hash.bytes(kind.as_bytes());
        hash
    }
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }
    fn number(&mut self, number: usize) -> &mut Self {
        self.0.update((number as u64).to_le_bytes());
        self
    }
    fn digest(&mut self, digest: &Digest) -> &mut Self {
        self.0.update(digest);
        self
    }
    fn shape(&mut self, shape: &[usize]) -> &mut Self {
        self.number(shape.len());
        shape.iter().for_each(|d| {
            self.number(*d);
        });
        self
    }
    fn value(&mut self, value: &Value) -> &mut Self {
        self.bytes(value.name.as_bytes()).number(value.dtype.map_or(0, |dtype| dtype as usize));
        let Some(dims) = &value.shape else { return self.number(usize::MAX) };
        self.number(dims.len());
        for dim in dims {
            match dim {
                Dim::Known(n) => self.number(0).number(*n),
                Dim::Symbol(name) => self.number(1).bytes(name.as_bytes()),
                Dim::Unknown => self.number(2),
            };
        }
        self
    }
    fn finish(&mut self) -> Digest {
        self.0.finalize_reset().into()
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Attribute, Tensor,
        proto::GraphProto,
        testing::{Model, model, node, ramp, value},
    };
    use sdrun_abi::DType;

    type Change = fn(&mut Model);

    fn base() -> Model {
        model(17)
            .input("x", DType::F32, "n 2")
            .input("z", DType::F32, "n 2")
            .initializer("w", &ramp(&[2, 2]))
            .initializer("v", &ramp(&[2]))
            .initializer("axes", &Tensor::from_i64s(&[0]))
            .node("MatMul", &["x", "w"], &["a"])
            .node_with("Softmax", &["z"], &["b"], [("axis", Attribute::Int(1))])
            .node("Sub", &["a", "b"], &["c"])
            .node("Mul", &["c", "v"], &["d"])
            .node("Unsqueeze", &["d", "axes"], &["y"])
            .output("y", "1 n 2")
    }

    fn hash(change: impl FnOnce(&mut Model)) -> String {
        let mut file = base();
        change(&mut file);
        file.graph().topology_hash()
    }

    #[test]
    fn it_is_stable_hexadecimal() {
        let hash = hash(|_| {});
        assert_eq!(hash.len(), 64);
        assert!(hash.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()));
    }

    #[test]
    fn what_does_not_change_the_hash() {
        let original = hash(|_| {});
        let same: [(&str, Change); 8] = [
            ("weight values", |m| m.graph_mut().initializer[0].raw_data = Some(vec![9; 16].into())),
            ("initializer order", |m| m.graph_mut().initializer.reverse()),
            ("order of independent nodes", |m| m.graph_mut().node.swap(0, 1)),
            ("node names", |m| m.graph_mut().node[0].name = Some("named".into())),
            ("names between nodes", |m| {
                m.graph_mut().node[0].output[0] = "other".into();
                m.graph_mut().node[2].input[0] = "other".into();
            }),
            ("names of constants", |m| {
                m.graph_mut().initializer[2].name = Some("dims".into());
                m.graph_mut().node[4].input[1] = "dims".into();
            }),
            ("documentation and producer", |m| {
                m.0.doc_string = Some("words".into());
                m.0.producer_name = Some("someone".into());
                m.graph_mut().node[0].doc_string = Some("words".into());
            }),
            ("types of values between nodes", |m| {
                m.graph_mut().value_info.push(value("a", DType::F32, "n 2"))
            }),
        ];
        for (what, change) in same {
            assert_eq!(hash(change), original, "{what}");
        }
    }

    #[test]
    fn what_changes_the_hash() {
        let changes: [(&str, Change); 14] = [
            ("nothing", |_| {}),
            ("operator", |m| m.graph_mut().node[3].op_type = Some("Div".into())),
            ("attribute value", |m| m.graph_mut().node[1].attribute[0].i = Some(0)),
            ("attribute", |m| m.graph_mut().node[1].attribute.clear()),
            ("opset", |m| m.0.opset_import[0].version = Some(18)),
            ("order of inputs", |m| m.graph_mut().node[2].input.reverse()),
            ("wiring", |m| m.graph_mut().node[2].input[1] = "z".into()),
            ("input name", |m| {
                m.graph_mut().input[1].name = Some("q".into());
                m.graph_mut().node[1].input[0] = "q".into();
            }),
            ("input type", |m| m.graph_mut().input[0] = value("x", DType::F16, "n 2")),
            ("input shape", |m| m.graph_mut().input[0] = value("x", DType::F32, "3 2")),
            ("output name", |m| {
                m.graph_mut().output[0].name = Some("out".into());
                m.graph_mut().node[4].output[0] = "out".into();
            }),
            ("constant", |m| {
                m.graph_mut().initializer[2].raw_data = Some(vec![1, 0, 0, 0, 0, 0, 0, 0].into())
            }),
            ("weight name", |m| {
                m.graph_mut().initializer[1].name = Some("u".into());
                m.graph_mut().node[3].input[1] = "u".into();
            }),
            ("weight shape", |m| m.graph_mut().initializer[1].dims = vec![1, 2]),
        ];
        let hashes: Vec<String> = changes.iter().map(|(_, change)| hash(change)).collect();
        for (i, (what, _)) in changes.iter().enumerate() {
            assert_eq!(hashes.iter().position(|h| *h == hashes[i]), Some(i), "{what}");
        }
    }

    #[test]
    fn bodies_are_hashed_by_what_they_compute() {
        let with = |input: &str, inner: &str, op: &str| {
            let body = GraphProto {
                node: vec![node(op, &[input], &[inner])],
                output: vec![value(inner, DType::F32, "2")],
                ..Default::default()
            };
            let branch = ("then_branch", Attribute::Graph(Box::new(body)));
            base().node_with("If", &["x"], &["i"], [branch]).output("i", "2").graph().topology_hash()
        };
        assert_eq!(with("a", "r", "Neg"), with("a", "s", "Neg"), "names inside");
        assert_ne!(with("a", "r", "Neg"), with("a", "r", "Abs"), "operators inside");
        assert_ne!(with("a", "r", "Neg"), with("b", "r", "Neg"), "captured values");
    }

    #[test]
    fn random_values_have_distinct_digests() {
        let draw = |second: &str| {
            model(17)
                .node_with("RandomNormal", &[], &["p"], [("shape", Attribute::Ints(vec![2]))])
                .node_with("RandomNormal", &[], &["q"], [("shape", Attribute::Ints(vec![2]))])
                .node("Sub", &["p", second], &["y"])
                .output("y", "2")
                .output("q", "2")
                .graph()
                .topology_hash()
        };
        assert_ne!(draw("p"), draw("q"));
    }
}

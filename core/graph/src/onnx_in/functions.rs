//! Inlines model-local functions: every call is replaced by the function's nodes.
//!
//! Names inside a function become `call/name`, so node names still tell which module they belong to.

use super::tensors::Fault;
use crate::{
    proto::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto},
    scope::defined,
};
use prost::Message;
use std::collections::{HashMap, HashSet};

/// Calls and bodies nested deeper than this count as a function that calls itself.
const MAX_DEPTH: usize = 32;
/// Bounds on the result of inlining: a few lines of functions that call each other can describe a graph that exceeds
/// any memory.
const MAX_NODES: usize = 1_000_000;
const MAX_BYTES: usize = 1 << 30;

/// The canonical name of a domain: `ai.onnx` and the empty name are the same domain.
pub(super) fn domain(name: &str) -> &str {
    if name == "ai.onnx" { "" } else { name }
}

/// Replaces calls of model-local functions in the graph and in all bodies. No functions remain.
pub(super) fn inline(model: &mut ModelProto) -> Result<(), Fault> {
    let functions = std::mem::take(&mut model.functions);
    let Some(graph) = model.graph.as_mut().filter(|_| !functions.is_empty()) else { return Ok(()) };
    let mut by_key = HashMap::new();
    for function in &functions {
        let key = (domain(function.domain()), function.name(), function.overload());
        if by_key.insert(key, function).is_some() {
            return Err(Fault::Malformed(format!(
                "function {:?} of domain {:?} is defined twice",
                key.1, key.0
            )));
        }
    }
    let mut inliner = Inliner {
        functions: by_key,
        opsets: &mut model.opset_import,
        names: HashSet::new(),
        serial: 0,
        nodes_left: MAX_NODES,
        bytes_left: MAX_BYTES,
    };
    inliner.reserve_names(graph);
    graph.node = inliner.expand(std::mem::take(&mut graph.node), 0)?;
    Ok(())
}

struct Inliner<'a> {
    functions: HashMap<(&'a str, &'a str, &'a str), &'a FunctionProto>,
    opsets: &'a mut Vec<OperatorSetIdProto>,
    /// Names already taken by values.
    names: HashSet<String>,
    serial: usize,
    nodes_left: usize,
    bytes_left: usize,
}

impl Inliner<'_> {
    fn reserve_names(&mut self, graph: &GraphProto) {
        self.names.extend(defined(graph).map(str::to_owned));
        for node in &graph.node {
            self.names.extend(node.input.iter().cloned());
            for attribute in &node.attribute {
                attribute.g.iter().for_each(|body| self.reserve_names(body));
                attribute.graphs.iter().for_each(|body| self.reserve_names(body));
            }
        }
    }

    fn expand(&mut self, nodes: Vec<NodeProto>, depth: usize) -> Result<Vec<NodeProto>, Fault> {
        let mut expanded = Vec::with_capacity(nodes.len());
        for mut node in nodes {
            self.nodes_left = self.nodes_left.checked_sub(1).ok_or_else(|| too_large(node.op_type()))?;
            let key = (domain(node.domain()), node.op_type(), node.overload());
            if let Some(function) = self.functions.get(&key).copied() {
                if depth == MAX_DEPTH {
                    return Err(Fault::Malformed(format!(
                        "function {:?} calls itself, or calls nest deeper than {MAX_DEPTH} levels",
                        key.1
                    )));
                }
                let body = self.instantiate(&node, function)?;
                expanded.extend(self.expand(body, depth + 1)?);
                continue;
            }
            for attribute in &mut node.attribute {
                for body in attribute.g.iter_mut().map(|g| &mut **g).chain(&mut attribute.graphs) {
                    if depth == MAX_DEPTH {
                        return Err(Fault::Malformed(format!("bodies nest deeper than {MAX_DEPTH} levels")));
                    }
                    body.node = self.expand(std::mem::take(&mut body.node), depth + 1)?;
                }
            }
            expanded.push(node);
        }
        Ok(expanded)
    }

    /// The nodes of one call.
    fn instantiate(&mut self, call: &NodeProto, function: &FunctionProto) -> Result<Vec<NodeProto>, Fault> {
        let name = function.name();
        let wrong = |why: String| Fault::Malformed(format!("function {name:?}: {why}"));
        self.import_opsets(function)?;
        if call.input.len() > function.input.len() || call.output.len() > function.output.len() {
            return Err(wrong(format!("node {:?} calls it with too many inputs or outputs", call.name())));
        }
        let prefix = [call.name(), name].into_iter().find(|part| !part.is_empty()).unwrap_or("function");
        let scope =
            Call { function: name, prefix, arguments: &call.attribute, defaults: &function.attribute_proto };

        let mut names = HashMap::new();
        for (i, formal) in function.input.iter().enumerate() {
            names.insert(formal.clone(), call.input.get(i).cloned().unwrap_or_default());
        }
        let mut nodes = Vec::new();
        for (i, formal) in function.output.iter().enumerate() {
            let Some(actual) = call.output.get(i).filter(|name| !name.is_empty()) else { continue };
            match names.get(formal) {
                // Passes on an input, or a second output with the same name.
                Some(source) => nodes.push(identity(prefix, source, actual)),
                None => {
                    names.insert(formal.clone(), actual.clone());
                }
            }
        }
        let inputs: HashSet<&str> = function.input.iter().map(String::as_str).collect();
        for node in &function.node {
            for output in node.output.iter().filter(|name| !name.is_empty()) {
                if inputs.contains(output.as_str()) {
                    return Err(wrong(format!("it overwrites its input {output:?}")));
                }
                if !names.contains_key(output) {
                    names.insert(output.clone(), self.fresh(prefix, output));
                }
            }
        }
        for node in &function.node {
            nodes.push(self.adapt(node, &names, &scope)?);
        }
        Ok(nodes)
    }

    fn spend(&mut self, bytes: usize, call: &Call<'_>) -> Result<(), Fault> {
        self.bytes_left = self.bytes_left.checked_sub(bytes).ok_or_else(|| too_large(call.function))?;
        Ok(())
    }

    /// A copy of a node with renamed values and resolved attribute references.
    fn adapt(
        &mut self,
        node: &NodeProto,
        names: &HashMap<String, String>,
        call: &Call<'_>,
    ) -> Result<NodeProto, Fault> {
        let rename = |value: &String| match names.get(value) {
            Some(new) => Ok(new.clone()),
            None if value.is_empty() => Ok(String::new()),
            None => Err(call.undefined(value)),
        };
        let mut adapted = NodeProto {
            input: node.input.iter().map(rename).collect::<Result<_, _>>()?,
            output: node.output.iter().map(rename).collect::<Result<_, _>>()?,
            name: node
                .name
                .as_ref()
                .filter(|name| !name.is_empty())
                .map(|name| format!("{}/{name}", call.prefix)),
            op_type: node.op_type.clone(),
            domain: node.domain.clone(),
            overload: node.overload.clone(),
            metadata_props: node.metadata_props.clone(),
            ..Default::default()
        };
        self.spend(adapted.encoded_len(), call)?;
        for attribute in &node.attribute {
            // Looking up arguments costs time rather than memory, but must be bounded too.
            self.spend(call.arguments.len() + call.defaults.len(), call)?;
            let Some(found) = call.resolve(attribute) else { continue };
            self.spend(found.encoded_len(), call)?;
            let mut resolved = AttributeProto { name: attribute.name.clone(), ..found.clone() };
            // A body that is given as an argument refers to the caller's values.
            if std::ptr::eq(found, attribute) {
                for body in resolved.g.iter_mut().map(|g| &mut **g).chain(&mut resolved.graphs) {
                    self.adapt_body(body, names, call)?;
                }
            }
            adapted.attribute.push(resolved);
        }
        Ok(adapted)
    }

    /// Bodies are renamed too, because their names must not shadow names of the enclosing graph.
    fn adapt_body(
        &mut self,
        body: &mut GraphProto,
        outer: &HashMap<String, String>,
        call: &Call<'_>,
    ) -> Result<(), Fault> {
        self.spend(outer.len(), call)?;
        let mut names = outer.clone();
        for name in defined(body).filter(|name| !name.is_empty()) {
            let new = self.fresh(call.prefix, name);
            names.insert(name.to_owned(), new);
        }
        let rename = |name: &mut Option<String>| {
            let old = name.as_deref().unwrap_or_default();
            let new = names.get(old).ok_or_else(|| call.undefined(old))?;
            *name = Some(new.clone());
            Ok(())
        };
        body.input.iter_mut().try_for_each(|value| rename(&mut value.name))?;
        body.output.iter_mut().try_for_each(|value| rename(&mut value.name))?;
        body.initializer.iter_mut().try_for_each(|tensor| rename(&mut tensor.name))?;
        body.value_info.clear();
        body.node = body.node.iter().map(|node| self.adapt(node, &names, call)).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// An unused name for a value of a call.
    fn fresh(&mut self, prefix: &str, name: &str) -> String {
        let mut candidate = format!("{prefix}/{name}");
        while !self.names.insert(candidate.clone()) {
            self.serial += 1;
            candidate = format!("{prefix}/{name}_{}", self.serial);
        }
        candidate
    }

    fn import_opsets(&mut self, function: &FunctionProto) -> Result<(), Fault> {
        for import in &function.opset_import {
            let wanted = domain(import.domain());
            match self.opsets.iter().find(|known| domain(known.domain()) == wanted) {
                None => self.opsets.push(import.clone()),
                Some(known) if known.version.unwrap_or(1) == import.version.unwrap_or(1) => {}
                Some(known) => {
                    return Err(Fault::Unsupported(format!(
                        "function {:?} needs version {} of operator domain {wanted:?}, but the model imports version {}",
                        function.name(),
                        import.version.unwrap_or(1),
                        known.version.unwrap_or(1),
                    )));
                }
            }
        }
        Ok(())
    }
}

/// What the nodes of one call refer to.
struct Call<'a> {
    function: &'a str,
    /// Goes before the names of nodes and values.
    prefix: &'a str,
    arguments: &'a [AttributeProto],
    defaults: &'a [AttributeProto],
}

impl Call<'_> {
    /// The attribute, or what it refers to; `None` if it refers to an argument that was not given.
    fn resolve<'a>(&'a self, attribute: &'a AttributeProto) -> Option<&'a AttributeProto> {
        let Some(reference) = attribute.ref_attr_name.as_deref().filter(|name| !name.is_empty()) else {
            return Some(attribute);
        };
        let is_it = |candidate: &&AttributeProto| candidate.name.as_deref() == Some(reference);
        self.arguments.iter().find(is_it).or_else(|| self.defaults.iter().find(is_it))
    }

    fn undefined(&self, value: &str) -> Fault {
        Fault::Malformed(format!("function {:?} uses value {value:?}, which is not defined", self.function))
    }
}

fn identity(prefix: &str, from: &str, to: &str) -> NodeProto {
    NodeProto {
        op_type: Some("Identity".into()),
        name: Some(format!("{prefix}/Identity")),
        input: vec![from.to_owned()],
        output: vec![to.to_owned()],
        ..Default::default()
    }
}

fn too_large(function: &str) -> Fault {
    Fault::Unsupported(format!(
        "its functions make a graph of more than {MAX_NODES} nodes or {MAX_BYTES} bytes (at {function:?})"
    ))
}

#[cfg(test)]
mod tests {
    use crate::{
        Attribute, Graph,
        proto::{AttributeProto, FunctionProto, GraphProto, NodeProto},
        testing::{Model, attribute, import, model, node, value},
    };
    use sdrun_abi::DType;

    fn function(name: &str, inputs: &[&str], outputs: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
        let NodeProto { input, output, .. } = node("", inputs, outputs);
        FunctionProto {
            name: Some(name.into()),
            domain: Some("local".into()),
            input,
            output,
            node: nodes,
            opset_import: vec![import("", 17), import("local", 1)],
            ..Default::default()
        }
    }

    fn call(name: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        NodeProto { domain: Some("local".into()), ..node(name, inputs, outputs) }
    }

    fn named(name: &str, node: NodeProto) -> NodeProto {
        NodeProto { name: Some(name.into()), ..node }
    }

    fn calling(functions: Vec<FunctionProto>, calls: Vec<NodeProto>) -> Model {
        let mut file = model(17).input("x", DType::F32, "2").output("y", "2");
        file.0.opset_import.push(import("local", 1));
        file.0.functions = functions;
        file.graph_mut().node = calls;
        file
    }

    /// `node: op(inputs) -> outputs` for every node.
    fn listing(graph: &Graph) -> Vec<String> {
        let names = |ids: &[Option<crate::ValueId>]| {
            ids.iter()
                .map(|id| id.map_or("", |id| graph.value(id).name.as_str()))
                .collect::<Vec<_>>()
                .join(",")
        };
        graph
            .nodes
            .iter()
            .map(|n| format!("{}: {}({}) -> {}", n.name, n.op_type, names(&n.inputs), names(&n.outputs)))
            .collect()
    }

    #[test]
    fn nested_calls_become_nodes_with_paths_for_names() {
        let inner = function("inner", &["a"], &["r"], vec![named("neg", node("Neg", &["a"], &["r"]))]);
        let outer = function(
            "outer",
            &["a", "b"],
            &["r"],
            vec![
                named("first", call("inner", &["a"], &["t"])),
                named("sum", node("Add", &["t", "b"], &["r"])),
            ],
        );
        let calls = vec![
            named("block1", call("outer", &["x", "x"], &["m"])),
            named("block2", call("outer", &["m", "x"], &["y"])),
        ];
        let graph = calling(vec![inner, outer], calls).graph();
        assert_eq!(
            listing(&graph),
            [
                "block1/first/neg: Neg(x) -> block1/t",
                "block1/sum: Add(block1/t,x) -> m",
                "block2/first/neg: Neg(m) -> block2/t",
                "block2/sum: Add(block2/t,x) -> y",
            ]
        );
    }

    #[test]
    fn names_stay_unique() {
        let twice =
            function("twice", &["a"], &["r"], vec![node("Neg", &["a"], &["t"]), node("Neg", &["t"], &["r"])]);
        let calls = vec![
            node("Abs", &["x"], &["twice/t"]),
            call("twice", &["twice/t"], &["m"]),
            call("twice", &["m"], &["y"]),
        ];
        let graph = calling(vec![twice], calls).graph();
        assert_eq!(
            listing(&graph)[1..],
            [
                ": Neg(twice/t) -> twice/t_1",
                ": Neg(twice/t_1) -> m",
                ": Neg(m) -> twice/t_2",
                ": Neg(twice/t_2) -> y"
            ]
        );
    }

    #[test]
    fn attribute_references_take_the_argument_the_default_or_nothing() {
        let reference = |name: &str, to: &str| AttributeProto {
            name: Some(name.into()),
            ref_attr_name: Some(to.into()),
            r#type: Some(2),
            ..Default::default()
        };
        let attributes =
            vec![reference("axis", "given"), reference("start", "by_default"), reference("end", "absent")];
        let mut f = function(
            "f",
            &["a"],
            &["r"],
            vec![NodeProto { attribute: attributes, ..node("Op", &["a"], &["r"]) }],
        );
        f.attribute = vec!["given".into(), "absent".into()];
        f.attribute_proto =
            vec![attribute("given", Attribute::Int(1)), attribute("by_default", Attribute::Int(2))];
        let mut called = call("f", &["x"], &["y"]);
        called.attribute = vec![attribute("given", Attribute::Int(9))];
        let graph = calling(vec![f], vec![called]).graph();
        let found = &graph.nodes[0];
        assert_eq!((found.int("axis"), found.int("start"), found.int("end")), (Some(9), Some(2), None));
        assert_eq!(found.attributes.len(), 2);
    }

    #[test]
    fn absent_inputs_and_unwanted_outputs_stay_so() {
        let f = function(
            "f",
            &["a", "b"],
            &["r", "s"],
            vec![node("Clip", &["a", "b"], &["r"]), node("Neg", &["a"], &["s"])],
        );
        let graph = calling(vec![f], vec![call("f", &["x"], &["y"])]).graph();
        assert_eq!(listing(&graph), [": Clip(x,) -> y", ": Neg(x) -> f/s"]);
    }

    #[test]
    fn an_input_can_be_handed_on() {
        let f = function("f", &["a"], &["a"], vec![]);
        let graph = calling(vec![f], vec![call("f", &["x"], &["y"])]).graph();
        assert_eq!(listing(&graph), ["f/Identity: Identity(x) -> y"]);
    }

    #[test]
    fn bodies_are_renamed_and_searched_for_calls() {
        let branch = GraphProto {
            node: vec![call("neg", &["a"], &["t"])],
            output: vec![value("t", DType::F32, "2")],
            ..Default::default()
        };
        let neg = function("neg", &["v"], &["r"], vec![node("Neg", &["v"], &["r"])]);
        let attribute = vec![attribute("then_branch", Attribute::Graph(Box::new(branch)))];
        let f = function("f", &["a"], &["r"], vec![NodeProto { attribute, ..node("If", &["a"], &["r"]) }]);
        let graph = calling(vec![neg, f], vec![call("f", &["x"], &["y"])]).graph();
        let Attribute::Graph(body) = &graph.nodes[0].attributes["then_branch"] else { panic!() };
        assert_eq!((body.node[0].op_type(), &*body.node[0].input), ("Neg", &["x".to_owned()][..]));
        assert_eq!((body.output[0].name(), &*body.node[0].output), ("f/t", &["f/t".to_owned()][..]));
    }

    #[test]
    fn functions_against_the_rules_are_refused() {
        let good = || function("f", &["a"], &["r"], vec![node("Neg", &["a"], &["r"])]);
        let run = |f: FunctionProto| calling(vec![f], vec![call("f", &["x"], &["y"])]).error();

        let twice = calling(vec![good(), good()], vec![call("f", &["x"], &["y"])]);
        assert!(twice.error().contains("defined twice"), "{}", twice.error());
        let many = calling(vec![good()], vec![call("f", &["x", "x"], &["y"])]);
        assert!(many.error().contains("too many inputs"), "{}", many.error());
        let error = run(FunctionProto { node: vec![call("f", &["a"], &["r"])], ..good() });
        assert!(error.contains("\"f\" calls itself"), "{error}");
        let error = run(FunctionProto { node: vec![node("Neg", &["zzz"], &["r"])], ..good() });
        assert!(error.contains("\"zzz\", which is not defined"), "{error}");
        let error = run(FunctionProto { node: vec![node("Neg", &["a"], &["a"])], ..good() });
        assert!(error.contains("overwrites its input"), "{error}");
        let error = run(FunctionProto { node: vec![], ..good() });
        assert!(error.contains("output \"y\" is not computed"), "{error}");
        let error = run(FunctionProto { opset_import: vec![import("", 18)], ..good() });
        assert!(error.contains("version 18") && error.contains("17"), "{error}");
    }

    #[test]
    fn growth_is_bounded() {
        // f0 has no nodes at all; each further function calls the one before it ten times.
        let mut functions = vec![function("f0", &["a"], &["a"], vec![])];
        for i in 1..20 {
            let before = format!("f{}", i - 1);
            let calls = (0..10).map(|_| call(&before, &["a"], &[])).collect();
            functions.push(function(&format!("f{i}"), &["a"], &["a"], calls));
        }
        let error = calling(functions, vec![call("f19", &["x"], &["y"])]).error();
        assert!(error.contains("more than 1000000 nodes"), "{error}");
    }
}

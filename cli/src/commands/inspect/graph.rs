//! `sdrun inspect` of an ONNX model.

use super::{Amount, Args, Weights};
use crate::{context::Context, format};
use sdrun::{
    Model, Shapes,
    abi::{DType, Precision},
    graph::{
        Attribute, Dim, Graph, Initializer, OpenDims, SimplifyReport, ValueId, WeightData, WeightsPolicy,
        footprint,
        passes::{self, PassReport},
        proto, simplify,
    },
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    io::{self, Write},
};

#[derive(Serialize)]
struct Report {
    kind: &'static str,
    model: String,
    producer: String,
    ir_version: i64,
    /// Versions by domain; `ai.onnx` is the default one.
    opsets: BTreeMap<String, i64>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    /// Number of nodes, including bodies of If, Loop and Scan.
    nodes: usize,
    /// How many of them are in bodies.
    nodes_in_bodies: usize,
    /// Number of nodes by operator, including bodies.
    operators: BTreeMap<String, usize>,
    weights: Weights,
    /// What belongs to the topology: integers, shapes, scalars, zero points.
    constants: Amount,
    /// Weights stored in the model file itself.
    inline: Amount,
    /// Weights stored in other files.
    files: Vec<File>,
    topology: Topology,
    /// What a session needs at least, where every shape is known.
    memory: Vec<Memory>,
    /// With `--passes`: what is done to every model before a provider is given it.
    #[serde(skip_serializing_if = "Option::is_none")]
    simplified: Option<SimplifyReport>,
    /// With `--passes`: what a provider can do to it afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    merged: Option<Merged>,
}

/// What the passes of [`passes::ALL`] do to a simplified graph.
#[derive(Serialize)]
struct Merged {
    nodes_after: usize,
    passes: Vec<PassReport>,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    dtype: Option<DType>,
    /// Sizes, or names of open dimensions; absent if the rank is unknown.
    shape: Option<Vec<Size>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Size {
    Known(usize),
    Open(String),
}

#[derive(Serialize)]
struct File {
    /// Absolute if the file exists, else as the model states it.
    path: String,
    present: bool,
    #[serde(flatten)]
    amount: Amount,
}

/// Memory of a session: its weights, and the most that is alive at once while it runs.
#[derive(Serialize)]
struct Memory {
    precision: Precision,
    weights_bytes: u64,
    activations_bytes: u64,
}

#[derive(Serialize)]
struct Topology {
    /// `None` if the graph cannot be simplified.
    hash: Option<String>,
    /// Whether every input dimension is fixed, so that engines have this hash.
    bound: bool,
    /// Why there is no hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(super) fn run(what: &str, args: &Args, context: &Context) -> anyhow::Result<()> {
    // Its weights need not be there, nor be generated.
    let model = args.model.open(what, WeightsPolicy::MayBeAbsent, context)?;
    let (graph, given) = (model.graph(), args.model.shapes()?);
    let shapes = if given.is_empty() { given.clone() } else { model.shapes(&given) };
    let asked = args.passes || !args.model.shapes.is_empty();
    let mut bound = graph.clone();
    let (topology, changes) = match topology(&mut bound, &shapes, args.passes) {
        Ok(found) => found,
        // This is an error only if the user asked about the bound or simplified graph. Otherwise show the rest.
        Err(e) if asked => return Err(e.into()),
        Err(e) => (Topology { hash: None, bound: false, error: Some(e.to_string()) }, None),
    };
    let mut report = describe(what, graph, args.weights);
    if asked {
        report.inputs = tensors(&bound, &bound.inputs);
        report.outputs = tensors(&bound, &bound.outputs);
    }
    report.topology = topology;
    (report.simplified, report.merged) = changes.unzip();
    report.memory = memory(&model, &given);
    context.present(&report, |out| show(out, &report))
}

/// What a session needs in each of the usual precisions; nothing where a shape is open or the graph cannot be simplified.
fn memory(model: &Model, shapes: &Shapes) -> Vec<Memory> {
    let Ok(bound) = model.bound(shapes) else { return Vec::new() };
    let of = |precision| {
        let print = footprint(&bound, precision).ok()??;
        Some(Memory { precision, weights_bytes: print.weights, activations_bytes: print.activations })
    };
    [Precision::Fp32, Precision::Fp16].into_iter().filter_map(of).collect()
}

/// Binds a graph to these shapes and simplifies it. Returns its topology and, where `merge` asks for it, what passes do to the graph.
fn topology(
    graph: &mut Graph,
    shapes: &Shapes,
    merge: bool,
) -> sdrun::Result<(Topology, Option<(SimplifyReport, Merged)>)> {
    let report = simplify(graph, shapes, OpenDims::Allow)?;
    let bound = graph.inputs.iter().all(|id| graph.value(*id).known_shape().is_some());
    let topology = Topology { hash: Some(graph.topology_hash()), bound, error: None };
    if !merge {
        return Ok((topology, None));
    }
    let passes = passes::optimize(graph, passes::ALL)?;
    Ok((topology, Some((report, Merged { nodes_after: graph.nodes.len(), passes }))))
}

fn describe(what: &str, graph: &Graph, list: bool) -> Report {
    let mut weights = Weights { list: list.then(Vec::new), ..Weights::default() };
    let (mut constants, mut inline) = (Amount::default(), Amount::default());
    let mut files: BTreeMap<String, File> = BTreeMap::new();
    for (id, initializer) in &graph.initializers {
        let bytes = initializer.dtype().bytes_of(initializer.shape()).unwrap_or_default();
        let Initializer::Weight(weight) = initializer else {
            constants.add(bytes);
            continue;
        };
        weights.add(&graph.value(*id).name, weight.dtype, &weight.shape);
        let (path, present) = match &weight.data {
            WeightData::Inline(_) => {
                inline.add(bytes);
                continue;
            }
            WeightData::External { file, .. } => (file.display().to_string(), true),
            WeightData::Absent { location, .. } => (location.clone(), false),
        };
        let file = files.entry(path.clone()).or_insert(File { path, present, amount: Amount::default() });
        file.amount.add(bytes);
    }
    let operators = operators(graph);
    let nodes = operators.values().sum();
    Report {
        kind: "onnx",
        model: what.to_string(),
        producer: graph.producer.clone(),
        ir_version: graph.ir_version,
        opsets: graph.opsets.iter().map(|(domain, version)| (domain_name(domain), *version)).collect(),
        inputs: tensors(graph, &graph.inputs),
        outputs: tensors(graph, &graph.outputs),
        nodes,
        nodes_in_bodies: nodes - graph.nodes.len(),
        operators,
        weights,
        constants,
        inline,
        files: files.into_values().collect(),
        topology: Topology { hash: None, bound: false, error: None },
        memory: Vec::new(),
        simplified: None,
        merged: None,
    }
}

fn domain_name(domain: &str) -> String {
    if domain.is_empty() { "ai.onnx".into() } else { domain.into() }
}

fn tensors(graph: &Graph, ids: &[ValueId]) -> Vec<Tensor> {
    let size = |dim: &Dim| match dim {
        Dim::Known(n) => Size::Known(*n),
        Dim::Symbol(name) => Size::Open(name.clone()),
        Dim::Unknown => Size::Open("?".into()),
    };
    ids.iter()
        .map(|id| {
            let value = graph.value(*id);
            let shape = value.shape.as_ref().map(|dims| dims.iter().map(size).collect());
            Tensor { name: value.name.clone(), dtype: value.dtype, shape }
        })
        .collect()
}

fn operators(graph: &Graph) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for node in &graph.nodes {
        *counts.entry(operator(&node.domain, &node.op_type)).or_default() += 1;
        for attribute in node.attributes.values() {
            if let Attribute::Graph(body) = attribute {
                count_body(body, &mut counts);
            }
        }
    }
    counts
}

fn count_body(body: &proto::GraphProto, counts: &mut BTreeMap<String, usize>) {
    for node in &body.node {
        let (domain, op) =
            (node.domain.as_deref().unwrap_or_default(), node.op_type.as_deref().unwrap_or_default());
        *counts.entry(operator(domain, op)).or_default() += 1;
        // The protobuf decoder limits how deep bodies nest.
        for attribute in &node.attribute {
            attribute.g.iter().for_each(|g| count_body(g, counts));
            attribute.graphs.iter().for_each(|g| count_body(g, counts));
        }
    }
}

fn operator(domain: &str, op: &str) -> String {
    if domain.is_empty() || domain == "ai.onnx" { op.to_string() } else { format!("{domain}.{op}") }
}

fn show(out: &mut dyn Write, r: &Report) -> io::Result<()> {
    writeln!(out, "model      {}", format::line(&r.model))?;
    let producer = if r.producer.is_empty() { "unknown" } else { &r.producer };
    writeln!(out, "producer   {}", format::line(producer))?;
    let opsets = r.opsets.iter().map(|(domain, version)| format!("{domain} {version}"));
    writeln!(out, "opsets     {} (IR version {})", format::list(opsets), r.ir_version)?;
    for (title, tensors) in [("inputs", &r.inputs), ("outputs", &r.outputs)] {
        writeln!(out, "{title}")?;
        for t in tensors {
            let dtype = t.dtype.map_or("?", DType::name);
            writeln!(out, "  {} {dtype} {}", format::line(&t.name), shape(t))?;
        }
    }
    let mut by_count: Vec<(&String, &usize)> = r.operators.iter().collect();
    by_count.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), *name));
    let operators = by_count.into_iter().map(|(name, count)| format!("{name} {count}"));
    let inside = match r.nodes_in_bodies {
        0 => String::new(),
        n => format!(", {n} of them inside If, Loop or Scan"),
    };
    writeln!(out, "nodes      {}{inside} ({})", r.nodes, format::list(operators))?;
    r.weights.show(out)?;
    if r.inline.tensors > 0 {
        writeln!(out, "  {} of them in the model file", format::bytes(r.inline.bytes))?;
    }
    for f in &r.files {
        let state = if f.present { "" } else { " (not there)" };
        writeln!(out, "  {} of them in {}{state}", format::bytes(f.amount.bytes), format::line(&f.path))?;
    }
    writeln!(out, "constants  {} tensors, {}", r.constants.tensors, format::bytes(r.constants.bytes))?;
    match (&r.topology.hash, &r.topology.error) {
        (Some(hash), _) if r.topology.bound => writeln!(out, "topology   {hash}")?,
        (Some(hash), _) => writeln!(
            out,
            "topology   {hash} (with open dimensions; give --shape for the hash that engines have)"
        )?,
        (None, error) => writeln!(out, "topology   unknown: {}", error.as_deref().unwrap_or_default())?,
    }
    if !r.memory.is_empty() {
        let each = r.memory.iter().map(|m| {
            let (weights, activations) = (format::bytes(m.weights_bytes), format::bytes(m.activations_bytes));
            format!("{}: weights {weights}, activations {activations}", m.precision)
        });
        writeln!(out, "memory     {}, at least", each.collect::<Vec<_>>().join("; "))?;
    }
    if let Some(s) = &r.simplified {
        writeln!(out, "passes     {} nodes became {} in {} rounds", s.nodes_before, s.nodes_after, s.rounds)?;
        show_passes(out, &s.passes)?;
    }
    if let Some(m) = &r.merged {
        let before = r.simplified.as_ref().map_or(0, |s| s.nodes_after);
        writeln!(out, "fusion     {before} nodes become {} on providers that fuse nodes", m.nodes_after)?;
        show_passes(out, &m.passes)?;
    }
    Ok(())
}

/// A table of the passes that changed something.
fn show_passes(out: &mut dyn Write, reports: &[PassReport]) -> io::Result<()> {
    let mut table = format::table(["pass", "changes", "nodes", "removed and added"]);
    for report in reports.iter().filter(|report| report.changes > 0) {
        let mut operators: Vec<_> = report.operators.iter().collect();
        operators.sort_by_key(|(name, change)| (std::cmp::Reverse(change.abs()), *name));
        let mut list: Vec<String> =
            operators.iter().take(SHOWN).map(|(name, change)| format!("{name} {change:+}")).collect();
        if operators.len() > SHOWN {
            list.push("…".into());
        }
        if report.initializers != 0 {
            list.push(format!("initializers {:+}", report.initializers));
        }
        table.add_row([
            report.name.to_string(),
            report.changes.to_string(),
            format!("{:+}", report.nodes()),
            list.join(", "),
        ]);
    }
    format::right(&mut table, 1..3);
    writeln!(out, "{table}")
}

/// Number of operators shown per pass.
const SHOWN: usize = 6;

fn shape(tensor: &Tensor) -> String {
    let Some(sizes) = &tensor.shape else { return "of unknown rank".into() };
    let sizes: Vec<String> = sizes
        .iter()
        .map(|size| match size {
            Size::Known(n) => n.to_string(),
            Size::Open(name) => format::line(name).into_owned(),
        })
        .collect();
    format!("[{}]", sizes.join(", "))
}

//! Infers the table from names and paths.

use super::{
    BoundTensor, ImportReport, Reason, Unbound, export, names,
    path::{Use, Uses, module_path},
};
use crate::{Binding, OnnxWeights, Transform};
use sdrun_abi::{DType, WeightSource};
use sdrun_graph::{Graph, WeightData, WeightRef};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

/// What is known about one weight.
pub(super) struct Finding {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    used_by: Vec<String>,
    pub(super) state: State,
}

pub(super) enum State {
    /// It has this name in the state dict.
    Bound { tensor: BoundTensor, by_name: bool },
    /// It is an unknown weight.
    Unbound { reason: Reason, candidates: Vec<String> },
    /// It is a constant of the program.
    Literal,
}

impl Finding {
    pub(super) fn unbind(&mut self, reason: Reason, candidates: Vec<String>) {
        self.state = State::Unbound { reason, candidates };
    }
    pub(super) fn bound(&self) -> Option<&BoundTensor> {
        match &self.state {
            State::Bound { tensor, .. } => Some(tensor),
            _ => None,
        }
    }
    fn source(&self) -> Option<&str> {
        self.bound()?.sources.first().map(String::as_str)
    }
    /// The weight as `source`.
    pub(super) fn tensor(
        &self,
        source: String,
        transform: Transform,
        source_shape: Vec<usize>,
    ) -> BoundTensor {
        let (name, shape, dtype) = (self.name.clone(), self.shape.clone(), self.dtype);
        BoundTensor { name, sources: vec![source], transform, source_shape, shape, dtype }
    }
}

impl Binding {
    /// Recovers the table of any export from the names of its weights and nodes.
    ///
    /// A weight with a name of a state dict keeps it. Any other is named after the module of the node that uses it, if its
    /// layout differs from the state dict's: `/mid_block/attentions.0/to_q/MatMul` makes its matrix the
    /// transpose of `mid_block.attentions.0.to_q.weight`, `/conv_norm_out/Mul` makes `[C, 1, 1]` `conv_norm_out.weight`.
    /// `Constant` nodes, and nameless initializers that are float64 or only give a normalisation unit weights or zero
    /// biases, are literals.
    /// Everything else, and any doubtful name or shape, is in the report and not in the table.
    pub fn infer(graph: &Graph) -> (Binding, ImportReport) {
        let findings = findings(graph);
        conclude(findings, ImportReport::default())
    }

    /// As [`infer`](Binding::infer), for the graph in this model file. If the weights do not tell which component it is, the
    /// folder of the export may: `text_encoder/model.onnx` beside `model_index.json`, or a `config.json` with a known class.
    pub fn infer_file(graph: &Graph, model: &Path) -> (Binding, ImportReport) {
        let (mut binding, report) = Self::infer(graph);
        binding.component = binding.component.or_else(|| export::component(model));
        (binding, report)
    }
}

/// Findings from names and paths, in the graph's order, under the names of a state dict.
pub(super) fn findings(graph: &Graph) -> Vec<Finding> {
    let uses = Uses::new(graph);
    let mut findings: Vec<Finding> =
        uses.weights().map(|(id, name, weight)| finding(&uses, &uses.of(id), name, weight)).collect();
    let values = OnnxWeights::new(graph);
    one_weight_each(&mut findings, &values);
    equal_lengths(&mut findings);
    let mut bound: Vec<BoundTensor> = findings.iter().filter_map(|f| f.bound().cloned()).collect();
    names::canonicalise(&mut bound);
    let mut bound = bound.into_iter();
    for finding in &mut findings {
        if let State::Bound { tensor, .. } = &mut finding.state
            && let Some(renamed) = bound.next()
        {
            *tensor = renamed;
        }
    }
    findings
}

fn finding(uses: &Uses<'_>, of_it: &[Use<'_>], name: &str, weight: &WeightRef) -> Finding {
    let used_by = of_it.iter().take(3).map(|used| format!("{} {:?}", used.node.op_type, used.node.name));
    let mut finding = Finding {
        name: name.to_owned(),
        dtype: weight.dtype,
        shape: weight.shape.clone(),
        used_by: used_by.collect(),
        state: State::Literal,
    };
    let own_name = names::is_state_dict_name(name);
    // Checkpoints hold no float64, but programs compute tables in it.
    let computed = weight.dtype == DType::F64 || is_filled(weight) && uses.only_normalises(of_it);
    if names::is_program_constant(name) || !own_name && computed {
        return finding;
    }
    let mut claims = BTreeMap::new();
    let mut paths = 0;
    for used in of_it {
        let Some(path) = module_path(used.node) else { continue };
        paths += 1;
        if let Some(operand) = uses.operand(used, &weight.shape) {
            claims.insert(format!("{path}.{}", operand.leaf), operand);
        }
    }
    let first = claims.pop_first();
    if !claims.is_empty() {
        let candidates = first.into_iter().map(|(source, _)| source).chain(claims.into_keys());
        finding.unbind(Reason::Merged, candidates.collect());
    } else if own_name {
        let tensor = finding.tensor(name.to_owned(), Transform::Identity, weight.shape.clone());
        finding.state = State::Bound { tensor, by_name: true };
    } else if let Some((source, operand)) = first {
        let transform = match operand.transposed {
            true => Transform::Transpose,
            false if operand.source_shape == weight.shape => Transform::Identity,
            false => Transform::Reshape,
        };
        // An exporter renames a tensor that it transposes or reshapes, and keeps the name of an unchanged one. So this one
        // has other values than the checkpoint: batch normalisation was folded into it, or it never was a weight (the
        // frequencies of an embedding).
        if transform == Transform::Identity || name.starts_with("onnx::Conv") {
            finding.unbind(Reason::Folded, vec![source]);
        } else {
            let tensor = finding.tensor(source, transform, operand.source_shape);
            finding.state = State::Bound { tensor, by_name: false };
        }
    } else {
        let reason = if paths == 0 { Reason::NoPath } else { Reason::NoRule };
        finding.unbind(reason, Vec::new());
    }
    finding
}

/// Whether all elements are equal. Does not read external data.
fn is_filled(weight: &WeightRef) -> bool {
    let size = weight.dtype.size();
    matches!(&weight.data, WeightData::Inline(data)
        if data.chunks_exact(size).all(|element| *element == data[..size]))
}

/// Several weights may be the same tensor of the state dict only if they are equal: a module that is called twice.
fn one_weight_each(findings: &mut [Finding], values: &OnnxWeights) {
    let mut by_source: HashMap<String, Vec<usize>> = HashMap::new();
    for (index, finding) in findings.iter().enumerate() {
        if let Some(source) = finding.source() {
            by_source.entry(source.to_owned()).or_default().push(index);
        }
    }
    for (source, indices) in by_source.into_iter().filter(|(_, indices)| indices.len() > 1) {
        let equal = |a: usize, b: usize| {
            let same = |f: &Finding| f.bound().map(|t| (t.transform, t.shape.clone()));
            same(&findings[a]) == same(&findings[b])
                && match (values.get(&findings[a].name), values.get(&findings[b].name)) {
                    (Ok(a), Ok(b)) => a.data() == b.data(),
                    _ => false,
                }
        };
        if indices.iter().all(|index| equal(indices[0], *index)) {
            continue;
        }
        // A name counts more than a path.
        let is_named = |index: &&usize| matches!(findings[**index].state, State::Bound { by_name: true, .. });
        let doubtful: Vec<usize> = indices.iter().filter(|index| !is_named(index)).copied().collect();
        for index in doubtful {
            findings[index].unbind(Reason::OneSourceTwice, vec![source.clone()]);
        }
    }
}

/// The bias of a linear layer, convolution or normalisation is as long as its weight has rows.
fn equal_lengths(findings: &mut [Finding]) {
    let by_source: HashMap<String, usize> =
        findings.iter().enumerate().filter_map(|(i, f)| Some((f.source()?.to_owned(), i))).collect();
    let mut doubtful = BTreeSet::new();
    for (source, bias) in &by_source {
        let Some(path) = source.strip_suffix(".bias") else { continue };
        let Some(weight) = by_source.get(&format!("{path}.weight")) else { continue };
        let shape = |index: usize| findings[index].bound().map(|tensor| &*tensor.source_shape);
        let (Some([length]), Some(weight_shape)) = (shape(*bias), shape(*weight)) else { continue };
        // The weight of a transposed convolution is [in, out / groups, ...].
        let transposed_convolution = weight_shape.len() > 2 && length.is_multiple_of(weight_shape[1].max(1));
        if weight_shape.first() != Some(length) && !transposed_convolution {
            doubtful.extend([*bias, *weight]);
        }
    }
    for index in doubtful {
        let finding = &mut findings[index];
        if let State::Bound { tensor, by_name: false } = &finding.state {
            let candidates = tensor.sources.clone();
            finding.unbind(Reason::Shape, candidates);
        }
    }
}

/// The table and the report.
pub(super) fn conclude(findings: Vec<Finding>, mut report: ImportReport) -> (Binding, ImportReport) {
    let mut binding = Binding::default();
    for Finding { name, dtype, shape, used_by, state } in findings {
        match state {
            State::Bound { tensor, by_name } => {
                *(if by_name { &mut report.by_name } else { &mut report.by_path }) += 1;
                binding.tensors.push(tensor);
            }
            State::Unbound { reason, candidates } => {
                report.unbound.push(Unbound { name, dtype, shape, used_by, reason, candidates });
            }
            State::Literal => report.literals.push(name),
        }
    }
    binding.component = names::canonicalise(&mut binding.tensors);
    (binding, report)
}

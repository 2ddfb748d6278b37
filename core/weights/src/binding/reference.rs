//! Compares the table with the values of the checkpoint that a graph was exported from.

use super::{
    Contradiction, ImportReport, Reason, Unbound,
    infer::{Finding, State, conclude, findings},
};
use crate::{
    Binding, StateDict, Transform,
    convert::{convert, is_convertible},
    layout::transpose,
    memory::zeroed,
};
use rayon::prelude::*;
use sdrun_abi::{DType, ErrorCode, Result, WeightSource};
use sdrun_graph::Graph;
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Type and value of a tensor, whatever its shape.
type Fingerprint = [u8; 32];

impl Binding {
    /// Does what [`infer`](Binding::infer) does, and compares every value in `weights` (the graph's own, for example
    /// [`OnnxWeights`](crate::OnnxWeights)) with those of `reference`, the checkpoint that the graph was exported from. Values
    /// are compared unchanged and transposed, converted to the graph's types.
    ///
    /// A value that occurs once in the reference decides; a name or path that differs is reported. A name or path whose
    /// tensor has an equal value is confirmed, even if others have the same value (zero biases). A weight whose value is not
    /// found keeps its name or path if the reference has a tensor of that name and shape; the report lists it.
    ///
    /// Reads both checkpoints completely, one tensor per thread at a time. Errors are those of the sources. A graph weight
    /// without values is not an error, but stays unconfirmed.
    pub fn infer_with_reference(
        graph: &Graph,
        weights: &dyn WeightSource,
        reference: &dyn StateDict,
    ) -> Result<(Binding, ImportReport)> {
        let mut findings = findings(graph);
        let dtypes: BTreeSet<DType> = findings.iter().map(|finding| finding.dtype).collect();
        let known = Reference::read(reference, &dtypes)?;
        let values: Vec<Option<Fingerprint>> =
            findings.par_iter().map(|finding| value_of(weights, &finding.name)).collect::<Result<_>>()?;
        let mut report = ImportReport::default();
        let mut by_value = 0;
        for (finding, value) in findings.iter_mut().zip(values) {
            by_value += usize::from(known.compare(finding, value, &mut report));
        }
        let (binding, mut report) = conclude(findings, report);
        // Weights bound by value were counted as bound by path.
        report.by_path -= by_value;
        report.by_value = by_value;
        let used: HashSet<&str> =
            binding.tensors.iter().flat_map(|tensor| &tensor.sources).map(String::as_str).collect();
        report.unused =
            known.shapes.keys().filter(|name| !used.contains(**name)).map(|n| n.to_string()).collect();
        report.unused.sort();
        if report.unused.is_empty() {
            // Every tensor of the checkpoint was found, so the exporter computed the rest.
            let doubtful = |unbound: &Unbound| {
                matches!(unbound.reason, Reason::Merged | Reason::OneSourceTwice | Reason::EqualValues)
            };
            let (unbound, rest) = std::mem::take(&mut report.unbound).into_iter().partition(doubtful);
            report.unbound = unbound;
            report.literals.extend(rest.into_iter().map(|tensor: Unbound| tensor.name));
        }
        Ok((binding, report))
    }
}

fn value_of(weights: &dyn WeightSource, name: &str) -> Result<Option<Fingerprint>> {
    match weights.get(name) {
        Ok(weight) => Ok(Some(fingerprint(weight.dtype, weight.data()))),
        Err(error) if error.code == ErrorCode::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn fingerprint(dtype: DType, data: &[u8]) -> Fingerprint {
    Sha256::new().chain_update([dtype as u8]).chain_update(data).finalize().into()
}

/// The tensors of a checkpoint by value.
struct Reference<'r> {
    shapes: HashMap<&'r str, Vec<usize>>,
    /// Name, and whether its transpose has the value.
    by_value: HashMap<Fingerprint, Vec<(&'r str, bool)>>,
}

impl<'r> Reference<'r> {
    fn read(source: &'r dyn StateDict, dtypes: &BTreeSet<DType>) -> Result<Self> {
        let names = source.names();
        let tensors: Vec<_> = names
            .par_iter()
            .map(|name| {
                let weight = source.get(name)?;
                let mut values = Vec::new();
                for dtype in dtypes {
                    let converted;
                    let data = if *dtype == weight.dtype {
                        weight.data()
                    } else if is_convertible(*dtype) && is_convertible(weight.dtype) {
                        // A value that this type cannot hold was not exported in it.
                        let Ok(data) = convert(weight.data(), weight.dtype, *dtype) else { continue };
                        converted = data;
                        &converted
                    } else {
                        continue;
                    };
                    values.push((fingerprint(*dtype, data), false));
                    if weight.shape.len() == 2 {
                        let mut turned = zeroed(data.len())?;
                        transpose(data, dtype.size(), &weight.shape, &mut turned);
                        values.push((fingerprint(*dtype, &turned), true));
                    }
                }
                Ok((*name, weight.shape, values))
            })
            .collect::<Result<_>>()?;
        let mut known = Reference { shapes: HashMap::new(), by_value: HashMap::new() };
        for (name, shape, values) in tensors {
            known.shapes.insert(name, shape);
            for (value, turned) in values {
                let entries = known.by_value.entry(value).or_default();
                // A symmetric matrix is its own transpose.
                if !entries.iter().any(|(other, _)| *other == name) {
                    entries.push((name, turned));
                }
            }
        }
        Ok(known)
    }

    /// Corrects a finding by its value; true if it is now bound by the value alone.
    fn compare(&self, finding: &mut Finding, value: Option<Fingerprint>, report: &mut ImportReport) -> bool {
        let found: Vec<_> = value
            .and_then(|value| self.by_value.get(&value))
            .into_iter()
            .flatten()
            .filter_map(|(name, turned)| self.place(finding, name, *turned))
            .collect();
        let named =
            finding.bound().and_then(|tensor| Some((tensor.sources.first()?.clone(), tensor.transform)));
        if let Some((source, transform)) = &named {
            if found.iter().any(|(name, by_value, _)| name == source && by_value == transform) {
                report.confirmed += 1;
                return false;
            }
            if found.is_empty() {
                let expected = finding.bound().map(|tensor| &tensor.source_shape);
                if self.shapes.get(&**source) == expected {
                    report.unconfirmed.push(finding.name.clone());
                } else {
                    finding.unbind(Reason::NotInReference, vec![source.clone()]);
                }
                return false;
            }
            // A name of another version of the library is no contradiction.
            if self.shapes.contains_key(&**source) || found.len() > 1 {
                report.contradictions.push(Contradiction {
                    name: finding.name.clone(),
                    by_name: source.clone(),
                    by_value: found.iter().map(|(name, ..)| name.to_string()).collect(),
                });
            }
        }
        match &*found {
            [(source, transform, shape)] => {
                let tensor = finding.tensor(source.to_string(), *transform, shape.to_vec());
                finding.state = State::Bound { tensor, by_name: false };
                true
            }
            [] => false,
            // Ones and zeros are equal to many tensors.
            _ if matches!(finding.state, State::Literal) => false,
            several => {
                let candidates = several.iter().map(|(name, ..)| name.to_string()).collect();
                finding.unbind(Reason::EqualValues, candidates);
                false
            }
        }
    }

    /// How the tensor `name` becomes the weight of equal value; `None` where shapes do not allow it.
    fn place(
        &self,
        finding: &Finding,
        name: &'r str,
        turned: bool,
    ) -> Option<(&'r str, Transform, &[usize])> {
        let shape = &**self.shapes.get(name)?;
        let transform = match turned {
            true => Transform::Transpose,
            false if shape == finding.shape => Transform::Identity,
            false => Transform::Reshape,
        };
        transform.fits(shape, &finding.shape).then_some((name, transform, shape))
    }
}

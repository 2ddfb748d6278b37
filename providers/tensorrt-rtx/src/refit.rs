//! Refits an engine on a GPU.

use crate::{
    ffi::{cuda::Stream, data_type, engine::Engine},
    payload::Description,
    table::{Entry, Values},
};
use sdrun_abi::{Error, ErrorCode, Host, RefitReport, Result, WeightSource, WeightSpec, WeightUpdate};
use sdrun_provider_common::phase;
use std::collections::{BTreeMap, BTreeSet};

/// Why a refit failed.
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// Whether the engine may already hold some of the new weights.
    pub(crate) half_done: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure { error, half_done: false }
    }
}

/// Sets the weights of the engine that depend on those in `changed`, or all of them. Adds those that the library
/// requires along with them.
///
/// Checks completeness from both sides: every weight the library takes is in the table, every weight of the graph
/// reaches one, and none is missing at the end.
pub(crate) fn apply(
    engine: &Engine,
    stream: &Stream,
    description: &Description,
    changed: Option<&[&str]>,
    source: &dyn WeightSource,
    host: &dyn Host,
) -> Result<RefitReport, Failure> {
    let specs: BTreeMap<&str, &WeightSpec> =
        description.info.weights.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    // Declared before the refitter, which borrows from it.
    let mut values: Vec<(&Entry, Values<'_>)> = Vec::new();
    let refitter = engine.refitter(host)?;
    let table = known(&refitter.all(), description)?;
    check_coverage(&table, description)?;
    for entry in table.values() {
        check_prototype(entry, refitter.prototype(&entry.name)?)?;
    }
    let chosen: Vec<&Entry> = match changed {
        None => table.values().copied().collect(),
        Some(changed) => {
            let changed: BTreeSet<&str> = changed.iter().copied().collect();
            let touched = |entry: &&&Entry| {
                entry.transform.sources().iter().any(|source| changed.contains(source.as_str()))
            };
            table.values().filter(touched).copied().collect()
        }
    };
    drop(refitter);

    let total = chosen.len() as u64;
    for (index, entry) in chosen.iter().enumerate() {
        if index % 16 == 0 {
            phase(host, "weights", index as u64, total)?;
        }
        values.push((entry, entry.values(&specs, source)?));
    }
    // The library reports further required weights only after these are set, hence up to two rounds.
    loop {
        let mut refitter = engine.refitter(host)?;
        let mut set: BTreeSet<&str> = BTreeSet::new();
        for (entry, values) in &values {
            let code = data_type(entry.dtype).unwrap_or(-1);
            refitter.set(&entry.name, code, entry.count, values.bytes(), host)?;
            set.insert(&entry.name);
        }
        let missing = refitter.missing();
        if missing.is_empty() {
            phase(host, "refit", 0, 1)?;
            refitter.refit(stream, host).map_err(|error| Failure { error, half_done: true })?;
            let _ = phase(host, "refit", 1, 1);
            break;
        }
        drop(refitter);
        for name in missing {
            match table.get(&*name).filter(|entry| !set.contains(entry.name.as_str())) {
                Some(entry) => values.push((entry, entry.values(&specs, source)?)),
                None => {
                    return Err(Error::internal(format!(
                        "TensorRT-RTX still lacks the weight `{name}` although it was set"
                    ))
                    .into());
                }
            }
        }
    }
    let bytes = values.iter().map(|(_, values)| values.bytes().len() as u64).sum();
    Ok(RefitReport::new(WeightUpdate::InPlace, values.len(), bytes))
}

/// The entries of the table that the engine takes.
fn known<'d>(names: &[String], description: &'d Description) -> Result<BTreeMap<&'d str, &'d Entry>> {
    let table: BTreeMap<&str, &Entry> = description.table.iter().map(|e| (e.name.as_str(), e)).collect();
    names
        .iter()
        .map(|name| {
            table.get_key_value(&**name).map(|(name, entry)| (*name, *entry)).ok_or_else(|| {
                Error::new(
                    ErrorCode::DataLoss,
                    format!("the engine takes the weight `{name}`, which its refit table does not name"),
                )
                .with_hint("build it again")
            })
        })
        .collect()
}

/// Checks that every weight of the graph reaches a weight the engine takes: the library does not always report missing
/// ones.
fn check_coverage(table: &BTreeMap<&str, &Entry>, description: &Description) -> Result<()> {
    let reached: BTreeSet<&str> =
        table.values().flat_map(|entry| entry.transform.sources()).map(String::as_str).collect();
    let lost: Vec<&str> = description
        .info
        .weights
        .iter()
        .map(|spec| spec.name.as_str())
        .filter(|name| !reached.contains(name))
        .collect();
    match lost.first() {
        None => Ok(()),
        Some(first) => Err(Error::internal(format!(
            "the engine has no place for {} of {} weights, the first is `{first}`",
            lost.len(),
            description.info.weights.len()
        ))
        .with_hint("build it again")),
    }
}

fn check_prototype(entry: &Entry, (code, count): (i32, i64)) -> Result<()> {
    if Some(code) == data_type(entry.dtype) && u64::try_from(count) == Ok(entry.count) {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::DataLoss,
        format!(
            "the engine's weight `{}` has {count} elements of type {code}, its refit table says {} of {}",
            entry.name, entry.count, entry.dtype
        ),
    )
    .with_hint("build it again"))
}

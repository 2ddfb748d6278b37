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

/// Maximum bytes of computed values in memory at once. Weights that are unchanged in a file are mapped and do not count.
pub(crate) const CHUNK: u64 = 1 << 30;

/// Sets the weights of the engine that depend on those in `changed`, plus those that the library requires along with them.
/// `None` sets all of them, and also works for an engine that has none yet.
///
/// Keeps little more than `chunk` bytes of values in memory, and refits in several steps if they do not fit. If a later
/// step fails, the engine has some of the new weights, and [`Failure::half_done`] is set. After the first step,
/// cancellation is therefore ignored, unless there are no previous weights.
///
/// Checks completeness from both sides: every weight the library takes is in the table, every weight of the graph
/// reaches one, and none is missing at the end.
pub(crate) fn apply(
    engine: &Engine,
    stream: &Stream,
    description: &Description,
    changed: Option<&[&str]>,
    source: &dyn WeightSource,
    chunk: u64,
    host: &dyn Host,
) -> Result<RefitReport, Failure> {
    let specs = description.info.weights.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let mut refitter = engine.refitter(host)?;
    let table = known(&refitter.all()?, description)?;
    check_coverage(&table, description)?;
    for entry in table.values() {
        check_prototype(entry, refitter.prototype(&entry.name)?)?;
    }
    drop(refitter);
    let changed: Option<BTreeSet<&str>> = changed.map(|names| names.iter().copied().collect());
    let touched = |entry: &&&Entry| match &changed {
        None => true,
        Some(changed) => entry.transform.sources().iter().any(|source| changed.contains(source.as_str())),
    };
    let left: BTreeMap<&str, &Entry> =
        table.values().filter(touched).map(|entry| (entry.name.as_str(), *entry)).collect();
    let total = left.len() as u64;
    let mut refit = Refit {
        engine,
        stream,
        table: &table,
        specs,
        source,
        host,
        left,
        total,
        all: changed.is_none(),
        report: RefitReport::new(WeightUpdate::InPlace, 0, 0),
    };
    let mut written = false;
    loop {
        refit.step(chunk, written).map_err(|f| Failure { half_done: f.half_done || written, ..f })?;
        if refit.left.is_empty() {
            return Ok(refit.report);
        }
        written = true;
    }
}

/// A refit in progress.
struct Refit<'a> {
    engine: &'a Engine,
    stream: &'a Stream,
    table: &'a BTreeMap<&'a str, &'a Entry>,
    specs: BTreeMap<&'a str, &'a WeightSpec>,
    source: &'a dyn WeightSource,
    host: &'a dyn Host,
    /// The entries that remain to be written, and how many there were.
    left: BTreeMap<&'a str, &'a Entry>,
    total: u64,
    /// Whether all weights of the engine are set, so that no previous weight has to be kept.
    all: bool,
    report: RefitReport,
}

impl Refit<'_> {
    /// Writes entries until their values reach `chunk` bytes. `written` says whether an earlier step wrote some.
    fn step(&mut self, chunk: u64, written: bool) -> Result<(), Failure> {
        let (engine, host, source, table) = (self.engine, self.host, self.source, self.table);
        let tell = |name: &str, step, total| match phase(host, name, step, total) {
            Err(_) if written && !self.all => Ok(()),
            result => result,
        };
        // Declared before the refitter, which borrows from them.
        let (mut values, mut held): (Vec<(&Entry, Values<'_>)>, u64) = (Vec::new(), 0);
        let mut zeros = Vec::new();
        while held < chunk
            && let Some((_, entry)) = self.left.pop_first()
        {
            let index = self.total - self.left.len() as u64 - 1;
            if index.is_multiple_of(16) {
                tell("weights", index, self.total)?;
            }
            let computed = entry.values(&self.specs, source)?;
            held += computed.held();
            values.push((entry, computed));
        }
        if self.all && !written {
            // The library does not refit an engine that lacks weights, so weights of later steps are zeros for now. Zeroed
            // memory that is only read stays uncommitted.
            zeros = vec![0; self.left.values().map(|entry| entry.bytes()).max().unwrap_or(0)];
        }
        // The library reports further required weights only after these are set, hence up to two rounds.
        loop {
            let mut refitter = engine.refitter(host)?;
            let mut set: BTreeSet<&str> = BTreeSet::new();
            for (entry, values) in &values {
                refitter.set(&entry.name, entry.dtype, entry.count, values.bytes(), host)?;
                set.insert(&entry.name);
            }
            for entry in self.left.values().filter(|_| !zeros.is_empty()) {
                refitter.set(&entry.name, entry.dtype, entry.count, &zeros[..entry.bytes()], host)?;
            }
            let missing = refitter.missing()?;
            if missing.is_empty() {
                tell("refit", 0, 1)?;
                refitter.refit(self.stream, host).map_err(|error| Failure { error, half_done: true })?;
                let _ = phase(host, "refit", 1, 1);
                break;
            }
            drop(refitter);
            for name in missing {
                let Some(entry) = table.get(&*name).filter(|entry| !set.contains(entry.name.as_str())) else {
                    return Err(Error::internal(format!(
                        "TensorRT-RTX still lacks the weight `{name}` although it was set"
                    ))
                    .into());
                };
                self.left.remove(entry.name.as_str());
                values.push((entry, entry.values(&self.specs, source)?));
            }
        }
        self.report.tensors += values.len();
        self.report.bytes += values.iter().map(|(_, values)| values.bytes().len() as u64).sum::<u64>();
        Ok(())
    }
}

/// The table's entries for the weights that the engine expects.
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

/// Checks that every weight of the graph reaches a weight of the engine, because the library does not always report
/// missing ones.
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

//! Finds an adapter's modules in a component.

use super::{
    Adapter, Delta, DoraRule, Kind, Target,
    delta::is_per_output,
    key::{Path, Place},
    module::{Change, Fault, Module},
    target::{Found, Run, Site},
};
use sdrun_abi::{Error, Result};
use serde::Serialize;
use std::{collections::BTreeMap, fmt, sync::Arc};

/// How an adapter changes a component.
#[derive(Clone, Debug, Default)]
pub struct Resolution {
    /// The changes of each tensor, in the order they apply.
    pub deltas: BTreeMap<String, Vec<Delta>>,
    /// Reports on each module.
    pub report: Report,
}

/// Reports how the modules of an adapter were resolved.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Modules that change tensors.
    pub applied: Vec<Applied>,
    /// Modules that do not.
    pub skipped: Vec<Skipped>,
    /// Keys that change no weight, see [`Adapter::dead_keys`].
    pub dead_keys: Vec<String>,
}

/// A module that is applied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Applied {
    /// Its name in the file.
    pub module: String,
    /// The kind of its change; [`Kind::Diff`] if it has only a bias.
    pub kind: Kind,
    /// The rule for DoRA, if it has magnitudes.
    pub dora: Option<DoraRule>,
    /// The tensors it changes.
    pub tensors: Vec<String>,
}

/// A module that is not applied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skipped {
    /// Its name in the file.
    pub module: String,
    /// The reason.
    pub reason: Reason,
}

/// Why a module is not applied.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It belongs to another component, which is not a fault.
    OtherComponent,
    /// The component has no module of this name.
    UnknownModule,
    /// Two modules of the component match this name.
    AmbiguousName,
    /// It was made for a tensor of another shape.
    Shape {
        /// The tensor.
        tensor: String,
        /// The shape it was made for; 0 for unknown sizes.
        adapter: Vec<usize>,
        /// The tensor's shape.
        target: Vec<usize>,
    },
    /// It changes a bias, and the module has none.
    NoBias,
    /// The named part of it is missing.
    Incomplete(String),
    /// A tensor of it has no values.
    Empty(String),
    /// Its kind is known but not supported.
    Unsupported(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::OtherComponent => f.write_str("for another component"),
            Reason::UnknownModule => f.write_str("unknown module"),
            Reason::AmbiguousName => f.write_str("the name fits two modules"),
            Reason::Shape { tensor, adapter, target } => {
                write!(f, "made for shape {adapter:?}, but {tensor:?} has {target:?}")
            }
            Reason::NoBias => f.write_str("the module has no bias"),
            Reason::Incomplete(what) => write!(f, "incomplete: {what}"),
            Reason::Empty(what) => write!(f, "empty: {what}"),
            Reason::Unsupported(what) => write!(f, "unsupported: {what}"),
        }
    }
}

pub(super) fn resolve(adapter: &Adapter, target: &Target, dora: Option<DoraRule>) -> Resolution {
    let mut resolution = Resolution::default();
    resolution.report.dead_keys = adapter.dead_keys().to_vec();
    for module in &adapter.modules {
        match sites(module, target) {
            Ok(sites) => {
                let mut tensors = Vec::new();
                for (site, of_bias) in sites {
                    for part in &site.parts {
                        let (name, _) = &target.tensors()[part.tensor];
                        let (source, module) = (Arc::clone(&adapter.source), Arc::clone(module));
                        let delta = Delta { source, module, of_bias, rows: part.rows.clone(), dora };
                        resolution.deltas.entry(name.clone()).or_default().push(delta);
                        tensors.push(name.clone());
                    }
                }
                resolution.report.applied.push(Applied {
                    module: module.name.clone(),
                    kind: module.weight.first().map_or(Kind::Diff, Change::kind),
                    dora: module.magnitude.as_ref().map(|(_, spelling)| dora.unwrap_or(*spelling)),
                    tensors,
                });
            }
            Err(reason) => resolution.report.skipped.push(Skipped { module: module.name.clone(), reason }),
        }
    }
    resolution
}

/// The tensors a module changes, and whether each is a bias, if the module fits all of them.
fn sites<'t>(module: &Module, target: &'t Target) -> Result<Vec<(&'t Site, bool)>, Reason> {
    if !target.is_place(module.place) {
        return Err(Reason::OtherComponent);
    }
    let Found { weight, bias } = match target.find(&module.path) {
        Ok(Some(found)) => found,
        Ok(None) if module.place == Place::Unsaid && is_elsewhere(&module.path, target) => {
            return Err(Reason::OtherComponent);
        }
        Ok(None) => return Err(Reason::UnknownModule),
        Err(()) => return Err(Reason::AmbiguousName),
    };
    match module.fault.clone() {
        Some(Fault::Incomplete(what)) => return Err(Reason::Incomplete(what)),
        Some(Fault::Empty(what)) => return Err(Reason::Empty(what)),
        Some(Fault::Unsupported(what)) => return Err(Reason::Unsupported(what)),
        None => {}
    }
    let mut sites = Vec::new();
    if !module.weight.is_empty() {
        let site = weight.as_ref().ok_or(Reason::UnknownModule)?;
        fits_weight(module, site, target)?;
        sites.push((site, false));
    }
    if !module.bias.is_empty() {
        let site = bias.as_ref().ok_or(Reason::NoBias)?;
        for (values, _) in &module.bias {
            if !site.accepts(&known(&values.shape)) {
                return Err(shape(target, site, &known(&values.shape)));
            }
        }
        sites.push((site, true));
    }
    Ok(sites)
}

/// Whether a name without a place belongs to another component.
fn is_elsewhere(path: &Path, target: &Target) -> bool {
    let path = path.as_str();
    let is_text = ["text_model", "text_encoder", "te_"].iter().any(|prefix| path.starts_with(prefix));
    is_text || !matches!(target.component(), crate::Component::Denoiser)
}

fn fits_weight(module: &Module, site: &Site, target: &Target) -> Result<(), Reason> {
    if site.transposed {
        return Err(Reason::Unsupported("a weight that is stored as its transpose".into()));
    }
    let rows = site.shape.first().copied().unwrap_or(1);
    let is_whole = matches!(&*site.parts, [part] if *part.rows == [Run { from: 0, to: 0, len: rows }]);
    let split = |what: &str| Reason::Unsupported(format!("{what} of a weight that is split"));
    for change in &module.weight {
        let wanted = change.shape();
        if !site.accepts(&wanted) {
            return Err(shape(target, site, &wanted));
        }
        if let Change::Glora { a1, a2, first, .. } = change {
            let (one, two) = if *first { (a2, a1) } else { (a1, a2) };
            let inputs = site.shape.get(1).copied().unwrap_or(1);
            if one.rows() != inputs || two.columns() != inputs {
                return Err(shape(target, site, &known(&[one.rows(), two.columns()])));
            }
        }
        if !change.is_row_local() && !is_whole {
            return Err(split("OFT"));
        }
    }
    if let Some((magnitude, spelling)) = &module.magnitude {
        let inputs = site.shape.get(1).copied().unwrap_or(1);
        if is_per_output(magnitude, *spelling, Some(rows)) {
            if magnitude.elements() != rows {
                return Err(shape(target, site, &known(&magnitude.shape)));
            }
        } else if magnitude.elements() != inputs {
            return Err(shape(target, site, &known(&magnitude.shape)));
        } else if !is_whole {
            return Err(split("DoRA along the inputs"));
        }
    }
    Ok(())
}

fn known(shape: &[usize]) -> Vec<Option<usize>> {
    shape.iter().copied().map(Some).collect()
}

fn shape(target: &Target, site: &Site, adapter: &[Option<usize>]) -> Reason {
    let name = |part: &super::target::Part| target.tensors()[part.tensor].0.clone();
    Reason::Shape {
        tensor: site.parts.first().map(name).unwrap_or_default(),
        adapter: adapter.iter().map(|size| size.unwrap_or(0)).collect(),
        target: site.shape.clone(),
    }
}

/// Modules that messages name before they count the rest.
const NAMED: usize = 3;

/// Checks an adapter that was resolved against the components of a pipeline. `InvalidArgument` if no module applies. Also,
/// unless `lenient`, if a module fails for any reason other than that its component is not among these.
pub fn check(adapter: &Adapter, resolved: &[(&Target, &Resolution)], lenient: bool) -> Result<()> {
    let applied: usize = resolved.iter().map(|(_, r)| r.report.applied.len()).sum();
    let faults: Vec<&Skipped> = resolved
        .iter()
        .flat_map(|(_, r)| &r.report.skipped)
        .filter(|skipped| skipped.reason != Reason::OtherComponent)
        .collect();
    if applied > 0 && (lenient || faults.is_empty()) {
        return Ok(());
    }
    let path = adapter.path().display();
    let engine = resolved.iter().find_map(|(target, _)| target.family());
    let (message, hint) = match (adapter.family_guess(), engine) {
        (Some(made_for), Some(engine)) if made_for != engine => {
            let message = format!("{path} is made for {made_for}, but the engine is {engine}");
            (message, format!("use an adapter for {engine}"))
        }
        _ if faults.is_empty() => {
            let message = format!("nothing of {path} applies: its modules are for other components");
            (message, "refit those components with it".into())
        }
        _ => {
            let count = faults.len();
            let what = if applied == 0 { "nothing of" } else { "not all of" };
            let mut message = format!("{what} {path} applies: {count} modules do not");
            for skipped in faults.iter().take(NAMED) {
                message += &format!("; {}: {}", skipped.module, skipped.reason);
            }
            if count > NAMED {
                message += &format!("; and {} more", count - NAMED);
            }
            let hint =
                if applied == 0 { "use an adapter for this model" } else { "apply the rest leniently" };
            (message, hint.into())
        }
    };
    Err(Error::invalid(message).with_hint(hint).with_file(adapter.path()))
}

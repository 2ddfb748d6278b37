//! Adapters: LoRA and its relatives, from safetensors files to changed weights.
//!
//! ```text
//! file ── key ──> modules ── target ──> deltas of tensors ── merge ──> changed weights
//! ```
//!
//! 1. [`Adapter::open`] parses the file's keys (kohya, LyCORIS, PEFT, diffusers old and new, XLabs, OneTrainer, ComfyUI)
//!    and assembles the tensors of each module into typed changes.
//! 2. [`Adapter::resolve`] finds the modules in a [`Target`], the tensors of one component of a pipeline, and reports on
//!    each module ([`Report`]).
//! 3. [`Merge`] computes the changed tensors from pristine ones: any rows, between any float types, in one pass, in f32.
//!
//! Formulas follow LyCORIS and PEFT. [`Kind`], [`Merge`] and the code that computes them state them.

mod assemble;
mod delta;
mod dora;
mod family;
mod key;
mod merge;
mod metadata;
mod module;
mod oft;
mod op;
mod peft;
mod resolve;
mod target;

pub use crate::convert::largest;
pub use delta::Delta;
pub use dora::DoraRule;
pub use key::Place;
pub use merge::Merge;
pub use module::Kind;
pub(crate) use module::values;
pub use resolve::{Applied, Reason, Report, Resolution, Skipped, check};
pub use target::Target;

use crate::{SafetensorsWeights, checkpoint::Family, unique};
use assemble::Slots;
use half::{bf16, f16};
use key::{Path as ModulePath, Slot};
use metadata::Hints;
use module::{Factor, Module};
use rayon::prelude::*;
use sdrun_abi::{DType, Error, ErrorCode, Result, WeightSource};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// An adapter file.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Unique among all opened adapters.
    id: u64,
    path: PathBuf,
    source: Arc<SafetensorsWeights>,
    /// Sorted by place and name.
    modules: Vec<Arc<Module>>,
    dead_keys: Vec<String>,
}

impl Adapter {
    /// Opens a safetensors file, or a folder that PEFT or diffusers saved. PEFT's `adapter_config.json` beside the file gives
    /// its scale factors.
    ///
    /// Errors: those of [`SafetensorsWeights::open`] (pickles are refused); `InvalidArgument` where no key is an
    /// adapter's, or two keys contradict each other; `DataLoss` where a tensor has a NaN or an infinity;
    /// `Unimplemented` where PEFT's configuration has a type or option that cannot be applied.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (path, config) = metadata::locate(path.as_ref())?;
        let source = SafetensorsWeights::open(&[&path])?;
        let hints = Hints::new(source.metadata(), config.as_deref())
            .map_err(|error| if error.file.is_some() { error } else { error.with_file(&path) })?;
        Self::from_weights(source, &path, &hints).map_err(|error| error.with_file(&path))
    }

    fn from_weights(source: SafetensorsWeights, path: &Path, hints: &Hints) -> Result<Self> {
        check_finite(&source)?;
        let mut groups: BTreeMap<(Place, ModulePath), (String, Slots)> = BTreeMap::new();
        let (mut dead_keys, mut strays) = (Vec::new(), Vec::new());
        for key in source.names() {
            let Some(parsed) = key::parse(key) else {
                match key::stray(key) {
                    Some((place, path)) => strays.push(Module::stray(key, place, path)),
                    None => dead_keys.push(key.to_owned()),
                }
                continue;
            };
            let (dtype, shape) = source.describe(key)?;
            let name = key.get(..parsed.name_len).unwrap_or(key);
            let (_, slots) =
                groups.entry((parsed.place, parsed.path)).or_insert_with(|| (name.to_owned(), Slots::new()));
            match slots.get(&parsed.slot) {
                None => {
                    slots.insert(parsed.slot, Factor { key: key.to_owned(), dtype, shape });
                }
                Some(other) if is_equal(&source, &other.key, key)? => dead_keys.push(key.to_owned()),
                Some(_) if matches!(parsed.slot, Slot::Unsupported(_)) => {}
                Some(other) => {
                    let message =
                        format!("{:?} and {key:?} of {} are the same factor", other.key, path.display());
                    return Err(
                        Error::invalid(message).with_hint("it has several adapters: give one of them")
                    );
                }
            }
        }
        let mut modules = groups
            .into_iter()
            .map(|((place, module), (name, slots))| {
                assemble::assemble(name, place, module, slots, hints, &source).map(Arc::new)
            })
            .collect::<Result<Vec<_>>>()?;
        if modules.is_empty() {
            let (count, path) = (dead_keys.len() + strays.len(), path.display());
            return Err(Error::invalid(format!("{path} is no adapter: none of its {count} keys is one's"))
                .with_hint("checkpoints and embeddings are given in their own way"));
        }
        modules.extend(strays.into_iter().map(Arc::new));
        Ok(Adapter { id: unique::id(), path: path.to_owned(), source: Arc::new(source), modules, dead_keys })
    }

    /// A unique number; clones share it.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }

    /// How many modules it has.
    pub fn len(&self) -> usize {
        self.modules.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.modules.is_empty()
    }

    /// Counts its modules by place.
    pub fn places(&self) -> BTreeMap<Place, usize> {
        let mut places = BTreeMap::new();
        for module in &self.modules {
            *places.entry(module.place).or_insert(0) += 1;
        }
        places
    }

    /// Counts its modules by kind.
    pub fn kinds(&self) -> BTreeMap<Kind, usize> {
        let mut kinds = BTreeMap::new();
        for change in self.modules.iter().flat_map(|module| &module.weight) {
            *kinds.entry(change.kind()).or_insert(0) += 1;
        }
        kinds
    }

    /// Keys that change no weight: duplicates, and keys known not to matter (embeddings bundled with an adapter, CLIP's
    /// `position_ids` and `logit_scale`). All other keys belong to modules.
    pub fn dead_keys(&self) -> &[String] {
        &self.dead_keys
    }

    /// The architecture it was made for, by names and widths, or else by its trainer's metadata.
    pub fn family_guess(&self) -> Option<Family> {
        let modules = self.modules.iter().map(|module| {
            let width = module.weight.first().and_then(|c| c.shape().get(1).copied().flatten());
            let is_text = matches!(module.place, Place::TextEncoder(_) | Place::T5);
            (module.path.as_str(), width, is_text)
        });
        family::guess(modules).or_else(|| family::of_metadata(self.metadata()))
    }

    /// Finds every module in a component's tensors. The file's spelling selects the rule for DoRA.
    pub fn resolve(&self, target: &Target) -> Resolution {
        self.resolve_with(target, None)
    }

    /// Like [`resolve`](Self::resolve), with this rule for DoRA.
    pub fn resolve_with(&self, target: &Target, dora: Option<DoraRule>) -> Resolution {
        resolve::resolve(self, target, dora)
    }
}

fn is_equal(source: &SafetensorsWeights, one: &str, other: &str) -> Result<bool> {
    let (one, other) = (source.get(one)?, source.get(other)?);
    Ok(one.dtype == other.dtype && one.shape == other.shape && one.data() == other.data())
}

/// Returns `DataLoss` that names the first tensor with a value that is not finite: one such value makes every image black.
pub(crate) fn check_finite(source: &SafetensorsWeights) -> Result<()> {
    source.names().into_par_iter().try_for_each(|name| {
        // An unsupported type matters only where the tensor is used.
        let Ok(weight) = source.get(name) else { return Ok(()) };
        let data = weight.data();
        let finite = match weight.dtype {
            DType::F16 => data.as_chunks().0.iter().fold(true, |f, b| f & f16::from_le_bytes(*b).is_finite()),
            DType::BF16 => {
                data.as_chunks().0.iter().fold(true, |f, b| f & bf16::from_le_bytes(*b).is_finite())
            }
            DType::F32 => data.as_chunks().0.iter().fold(true, |f, b| f & f32::from_le_bytes(*b).is_finite()),
            DType::F64 => data.as_chunks().0.iter().fold(true, |f, b| f & f64::from_le_bytes(*b).is_finite()),
            _ => true,
        };
        if finite {
            return Ok(());
        }
        let message = format!("tensor {name:?} has values that are not finite");
        Err(Error::new(ErrorCode::DataLoss, message)
            .with_hint("its training failed: use another version of it"))
    })
}

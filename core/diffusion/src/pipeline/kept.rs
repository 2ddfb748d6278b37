//! Loaded networks and encoded prompts that later requests use again.

use super::network::InputShapes;
use crate::text::encode::States;
use sdrun::{Provider, Session, WeightFiles, abi::Precision, weights::WeightStack};
use sha2::{Digest, Sha256};
use std::{
    collections::VecDeque,
    fmt, fs,
    path::Path,
    sync::{Mutex, PoisonError},
    time::SystemTime,
};

/// Networks stay loaded after a request, and the states of its prompts are kept. A later request with the same engines gets a network
/// as it is, or after a refit if its weights differ, and encodes only new prompts. The networks that were used least recently leave when
/// another does not fit into memory.
#[derive(Default)]
pub struct Kept {
    networks: Mutex<VecDeque<(NetworkKey, Loaded)>>,
    prompts: Mutex<VecDeque<(PromptKey, States)>>,
}

/// The most prompts to keep. The states of a prompt take up to 8 MB (T5-XXL).
const PROMPTS: usize = 64;

/// A session with what is known about it.
pub(super) struct Loaded {
    pub(super) session: Session,
    pub(super) weights: Opened,
    pub(super) precision: Precision,
    pub(super) provider: Provider,
    pub(super) device: String,
}

/// What two requests must share to use the same session.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NetworkKey {
    /// The model's file or its built-in name, and the file's state.
    pub(super) model: (String, Option<Stamp>),
    /// The name of the piece, if the model is divided.
    pub(super) piece: Option<String>,
    pub(super) shapes: InputShapes,
}

/// Weights of a session.
#[derive(Clone)]
pub(super) struct Opened {
    pub(super) files: WeightFiles,
    pub(super) stack: WeightStack,
    stamps: Vec<Stamp>,
}

/// Size and time of a file, which tell whether it has changed.
pub(super) type Stamp = (u64, Option<SystemTime>);

/// A digest of a prompt and of all that its states depend on.
pub(super) type PromptKey = [u8; 32];

impl Opened {
    pub(super) fn new(files: WeightFiles, stack: WeightStack) -> Self {
        Opened { stamps: stamps(&files), files, stack }
    }

    /// Whether `files` are the same, unchanged.
    pub(super) fn is(&self, files: &WeightFiles) -> bool {
        let same = self.has_base(files);
        same && self.files.adapters == files.adapters && self.files.embeddings == files.embeddings
    }

    /// Whether `files` differ in adapters and embeddings at most. All their files are unchanged.
    pub(super) fn has_base(&self, files: &WeightFiles) -> bool {
        let same = self.files.base == files.base
            && self.files.component == files.component
            && (self.files.ema, self.files.lenient, self.files.dora)
                == (files.ema, files.lenient, files.dora);
        same && self.stamps == stamps(&self.files)
    }
}

impl Kept {
    /// Takes a network out: one with these weights, or else one that a refit gives them.
    pub(super) fn take(&self, key: &NetworkKey, weights: &WeightFiles) -> Option<Loaded> {
        let mut networks = locked(&self.networks);
        // A provider's process may have died, or been killed because it did not stop when a user cancelled.
        networks.retain(|(_, loaded)| !loaded.provider.has_ended());
        let exact = networks.iter().position(|(known, loaded)| known == key && loaded.weights.is(weights));
        let any = || networks.iter().rposition(|(known, _)| known == key);
        let found = exact.or_else(any)?;
        networks.remove(found).map(|(_, loaded)| loaded)
    }

    /// Keeps a network.
    pub(super) fn put(&self, key: NetworkKey, loaded: Loaded) {
        locked(&self.networks).push_back((key, loaded));
    }

    /// Drops the network that was used least recently. Returns whether there was one.
    pub(super) fn drop_oldest(&self) -> bool {
        let oldest = locked(&self.networks).pop_front();
        oldest.is_some()
    }

    /// Whether no network is kept.
    pub(super) fn is_empty(&self) -> bool {
        locked(&self.networks).is_empty()
    }

    /// The states of a prompt.
    pub(super) fn prompt(&self, key: &PromptKey) -> Option<States> {
        let mut prompts = locked(&self.prompts);
        let found = prompts.iter().position(|(known, _)| known == key)?;
        let entry = prompts.remove(found)?;
        let states = entry.1.clone();
        prompts.push_back(entry);
        Some(states)
    }

    /// Keeps the states of a prompt.
    pub(super) fn put_prompt(&self, key: PromptKey, states: &States) {
        let mut prompts = locked(&self.prompts);
        if prompts.len() >= PROMPTS {
            prompts.pop_front();
        }
        prompts.push_back((key, states.clone()));
    }

    /// Drops everything.
    pub fn clear(&self) {
        locked(&self.networks).clear();
        locked(&self.prompts).clear();
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (networks, prompts) = (locked(&self.networks).len(), locked(&self.prompts).len());
        write!(out, "Kept {{ networks: {networks}, prompts: {prompts} }}")
    }
}

/// Makes the keys of prompts for one text encoder.
pub(super) struct PromptKeys(Sha256);

impl PromptKeys {
    /// `how` stands for the layer and the rules.
    pub(super) fn new(model: &str, weights: &WeightFiles, how: &dyn fmt::Debug) -> Self {
        let encoder = format!("{model}\n{weights:?}\n{:?}\n{how:?}\n", stamps(weights));
        PromptKeys(Sha256::new_with_prefix(encoder))
    }

    /// `text` stands for the prompt's tokens and their weights.
    pub(super) fn of(&self, text: &dyn fmt::Debug) -> PromptKey {
        self.0.clone().chain_update(format!("{text:?}")).finalize().into()
    }
}

fn locked<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Each change of the queues is complete, so a panic elsewhere leaves them whole.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of a file; `None` if there is none.
pub(super) fn stamp(file: &Path) -> Option<Stamp> {
    let found = fs::metadata(file).ok()?;
    Some((found.len(), found.modified().ok()))
}

/// The states of all files of weights, in folders too.
fn stamps(weights: &WeightFiles) -> Vec<Stamp> {
    let adapters = weights.adapters.iter().map(|adapter| &adapter.file);
    let embeddings = weights.embeddings.iter().map(|embedding| &embedding.file);
    let mut found = Vec::new();
    for path in weights.base.iter().chain(adapters).chain(embeddings) {
        collect(path, &mut found, 3);
    }
    found
}

fn collect(path: &Path, found: &mut Vec<Stamp>, depth: usize) {
    found.extend(stamp(path));
    let Ok(entries) = fs::read_dir(path) else { return };
    let mut entries: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for entry in entries.iter().filter(|_| depth > 0) {
        collect(entry, found, depth - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states(value: f32) -> States {
        States { hidden: vec![value], places: 1, pooled: Vec::new() }
    }

    #[test]
    fn prompts_are_kept_by_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.safetensors");
        fs::write(&file, "1").unwrap();
        let weights = WeightFiles::of(&file);
        let key = |text: &str| PromptKeys::new("sd15/text-encoder", &weights, &1).of(&text);
        let kept = Kept::default();
        kept.put_prompt(key("a"), &states(1.0));
        assert_eq!(kept.prompt(&key("a")), Some(states(1.0)));
        assert_eq!(kept.prompt(&key("b")), None);
        let with_lora = PromptKeys::new("sd15/text-encoder", &weights.clone().adapter("x", 1.0), &1).of(&"a");
        assert_eq!(kept.prompt(&with_lora), None);
        let before = key("a");
        fs::write(&file, "22").unwrap();
        assert_ne!(key("a"), before, "the file has changed");
    }

    #[test]
    fn the_oldest_prompt_leaves_first() {
        let kept = Kept::default();
        let key = |number: usize| PromptKeys::new("", &WeightFiles::default(), &1).of(&number);
        for number in 0..PROMPTS {
            kept.put_prompt(key(number), &states(number as f32));
        }
        assert!(kept.prompt(&key(0)).is_some());
        kept.put_prompt(key(PROMPTS), &states(0.0));
        assert!(kept.prompt(&key(0)).is_some(), "it was used last");
        assert!(kept.prompt(&key(1)).is_none());
    }
}

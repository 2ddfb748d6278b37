//! The files that a drawing needs: a model, its adapters and its helpers.

use super::{Files, Named, Parts, Result, Upscaler, Word, tagged, words};
use crate::{
    demo,
    metadata::{ControlNet, Lora, ModelFile, Record, Upscale, hash::HashCache},
};
use sdrun::{
    Paths,
    abi::{self, ErrorCode, Flow, Host, LogLevel},
};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{Scope, ScopedJoinHandle},
};

/// The files of a model, its adapters and helpers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recipe {
    /// The model.
    pub files: Files,
    /// Adapters. Prompts may name more.
    pub loras: Vec<Named>,
    /// Folders of adapters that prompts name as `<lora:NAME:STRENGTH>`.
    pub lora_folders: Vec<PathBuf>,
    /// Folders of embeddings that prompts name by their file's name.
    pub embedding_folders: Vec<PathBuf>,
    /// The model of the last steps.
    pub refiner: Option<PathBuf>,
    /// ControlNets.
    pub control_nets: Vec<PathBuf>,
    /// An ESRGAN.
    pub upscaler: Option<PathBuf>,
}

/// A recipe whose files are open.
pub struct Opened {
    /// The networks.
    pub parts: Parts,
    /// The prompt without tags.
    pub prompt: String,
    loras: Vec<Named>,
}

impl Recipe {
    /// Replaces names of the demo model's files by their paths, where no file has such a name. Prompts for the demo model may name its
    /// adapters.
    ///
    /// # Errors
    /// Errors of writing the demo model's files into the cache.
    pub fn find_demo(&mut self, paths: &Paths) -> sdrun::Result<()> {
        let files = self.files.model.iter_mut().chain(&mut self.control_nets);
        for file in files.chain(self.loras.iter_mut().map(|lora| &mut lora.file)) {
            if file.exists() {
                continue;
            }
            if let Some(found) = demo::find(&file.to_string_lossy(), paths)? {
                *file = found;
            }
        }
        let model = self.files.model.as_deref().filter(|model| demo::is_model(model, paths));
        if let Some(folder) = model.and_then(Path::parent) {
            self.lora_folders.push(folder.into());
            self.embedding_folders.push(folder.into());
        }
        Ok(())
    }

    /// Fails if the prompt names an adapter that is not there.
    ///
    /// # Errors
    /// As [`tagged`].
    pub fn check_tags(&self, prompt: &str) -> Result<()> {
        tagged(prompt, &self.lora_folders).map(drop)
    }

    /// Opens everything that pictures of these prompts need. Reads no weights yet.
    ///
    /// # Errors
    /// Files that are missing, damaged, of another kind or for another family.
    pub fn open(&self, prompt: &str, negative: &str, paths: &Paths, host: &dyn Host) -> Result<Opened> {
        let (prompt, tagged) = tagged(prompt, &self.lora_folders)?;
        let mut parts = Parts::open(&self.files, paths, host)?;
        let loras: Vec<Named> = self.loras.iter().cloned().chain(tagged).collect();
        for Named { file, strength, text_encoder_strength } in &loras {
            parts.add_adapter(file, *strength, *text_encoder_strength)?;
        }
        for folder in &self.embedding_folders {
            parts.words.extend(words(&[&prompt, negative], folder)?);
        }
        if let Some(file) = &self.refiner {
            parts.add_refiner(file, paths, host)?;
        }
        for file in &self.control_nets {
            parts.add_control(file, paths, host)?;
        }
        if let Some(file) = &self.upscaler {
            parts.upscaler = Some(Upscaler::open(file, paths, host)?);
        }
        Ok(Opened { parts, prompt: prompt.trim().into(), loras })
    }

    /// Names and hashes of the files, for a picture's metadata. Hashing a large file takes seconds, but only once. A file that cannot
    /// be hashed has no hash.
    pub fn record(&self, opened: &Opened, paths: &Paths, host: &dyn Host) -> Record {
        let hashes = HashCache::of_user(paths);
        let model = |file: &Path| {
            let hash = if file.is_file() { known(hashes.model(file, host)) } else { None };
            ModelFile::new(&file.to_string_lossy(), hash)
        };
        let lora = |Named { file, strength, text_encoder_strength }: &Named| {
            let hash = known(hashes.adapter(file, host));
            Lora::new(&file.to_string_lossy(), hash, *strength, *text_encoder_strength)
        };
        let word = |Word { name, file, .. }: &Word| ModelFile {
            name: name.clone(),
            hash: known(hashes.embedding(file, host)),
        };
        let net = |file: &PathBuf| {
            let ModelFile { name, hash } = model(file);
            ControlNet { name, hash, ..ControlNet::default() }
        };
        let upscale = |(file, upscaler): (&PathBuf, &Upscaler)| {
            let ModelFile { name, hash } = model(file);
            Upscale { name, hash, factor: upscaler.factor(1) }
        };
        let Files { model: whole, denoiser, clip_l, clip_g, t5, llm, autoencoder, .. } = &self.files;
        let main = denoiser.as_deref().or(whole.as_deref()).unwrap_or(Path::new(""));
        Record {
            model: Some(model(main)),
            vae: autoencoder.as_deref().map(model),
            refiner: self.refiner.as_deref().map(model),
            text_encoders: [clip_l, clip_g, t5, llm].into_iter().flatten().map(|file| model(file)).collect(),
            loras: opened.loras.iter().map(lora).collect(),
            embeddings: opened.parts.words.iter().map(word).collect(),
            controlnets: self.control_nets.iter().map(net).collect(),
            upscale: self.upscaler.as_ref().zip(opened.parts.upscaler.as_ref()).map(upscale),
            ..Record::of_sdrun()
        }
    }
}

/// The record of a recipe's files, made in a thread while the pictures are drawn: hashing a large file takes seconds, once. Dropping
/// this stops the thread.
pub struct Recording<'s> {
    /// The thread that makes it, until it is done.
    thread: Option<ScopedJoinHandle<'s, Record>>,
    found: Record,
    stop: Arc<AtomicBool>,
}

impl<'s> Recording<'s> {
    /// Starts the thread. It passes the finished record to `then`. It ends early if `host` cancels, and reports no progress, because
    /// the drawing does.
    pub fn start(
        scope: &'s Scope<'s, '_>,
        recipe: &'s Recipe,
        opened: &'s Opened,
        paths: &'s Paths,
        host: &'s dyn Host,
        then: impl FnOnce(&Record) + Send + 's,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let host = Quiet { host, stop: stop.clone() };
        let thread = scope.spawn(move || {
            let found = recipe.record(opened, paths, &host);
            then(&found);
            found
        });
        Recording { thread: Some(thread), found: Record::of_sdrun(), stop }
    }

    /// Whether [`Self::found`] has to wait.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Waits for the record. After a cancel, names without hashes remain.
    pub fn found(&mut self) -> &Record {
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has found nothing.
            self.found = thread.join().unwrap_or_else(|_| Record::of_sdrun());
        }
        &self.found
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// The host of a thread that works beside another one.
struct Quiet<'a> {
    host: &'a dyn Host,
    stop: Arc<AtomicBool>,
}

impl Host for Quiet<'_> {
    fn log(&self, level: LogLevel, target: &str, message: &str) {
        self.host.log(level, target, message);
    }

    fn progress(&self, _: &str, _: u64, _: u64) -> Flow {
        if self.cancelled() { Flow::Cancel } else { Flow::Continue }
    }

    fn cancelled(&self) -> bool {
        self.stop.load(Relaxed) || self.host.cancelled()
    }
}

/// A hash, if there is one. Says why not, except after a cancel.
fn known(hash: Result<String, abi::Error>) -> Option<String> {
    let fault = |error: &abi::Error| {
        if error.code != ErrorCode::Cancelled {
            tracing::warn!("the picture's metadata lack a hash: {error}");
        }
    };
    hash.inspect_err(fault).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun::abi::NoHost;
    use std::{fs::File, sync::Mutex};

    #[test]
    fn a_dropped_recording_stops() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::for_user(Some(dir.path()), Some(dir.path())).unwrap();
        let mut recipe = Recipe::default();
        recipe.files.model = Some(demo::NAME.into());
        recipe.find_demo(&paths).unwrap();
        let opened = recipe.open("a red circle", "", &paths, &NoHost).unwrap();

        // Zeros that take no space on the disk, and a minute to hash.
        let large = dir.path().join("large.safetensors");
        File::create(&large).unwrap().set_len(100 << 30).unwrap();
        let recipe = Recipe { refiner: Some(large), ..recipe };
        let found = Mutex::new(None);
        std::thread::scope(|scope| {
            let keep = |record: &Record| *found.lock().unwrap() = Some(record.clone());
            drop(Recording::start(scope, &recipe, &opened, &paths, &NoHost, keep));
        });
        let refiner = found.into_inner().unwrap().unwrap().refiner.unwrap();
        assert_eq!((refiner.name.as_str(), refiner.hash), ("large", None));
    }
}

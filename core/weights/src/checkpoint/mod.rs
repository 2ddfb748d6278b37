//! Model files of any layout, read as the state dicts of diffusers and transformers.
//!
//! [`Checkpoint::open`] takes a safetensors file (a whole model in the original layout, or one or some of its
//! components, under the original's or diffusers' names), a folder of diffusers (a pipeline or one component, sharded
//! or not), or a GGUF file. The keys are sorted into components by prefix and structure. A component is a [`StateDict`]:
//! its tensors are made from the file's on demand, and borrowed where the bytes are equal.

mod container;
mod ema;
mod f8;
mod family;
mod folder;
mod foreign;
mod gguf;
mod harmless;
mod layout;
mod prediction;
mod spelling;
mod state_dict;
mod summary;
mod unread;
mod vocabulary;

pub use family::{Family, identify};
pub use gguf::dequantize;
pub use prediction::{Edm, Parameterisation, Prediction};
pub use summary::{ComponentSummary, Facts, Format, Summary};
pub use unread::Unread;
pub use vocabulary::Vocabulary;

use crate::{Binding, Component, SafetensorsWeights, StateDict};
use container::Container;
use layout::{Layout, Part, is_text};
use sdrun_abi::{Error, Result};
use state_dict::{ComponentWeights, first_few};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// An opened model. Files are mapped, tensors are read on demand.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    sources: Vec<Source>,
    /// The configuration of a pipeline's scheduler, empty without one.
    scheduler: BTreeMap<String, serde_json::Value>,
}

/// A file, or the shards of one.
#[derive(Debug)]
struct Source {
    container: Arc<dyn Container>,
    layout: Layout,
}

impl Source {
    fn new(container: Arc<dyn Container>, hint: Option<Component>) -> Source {
        let shapes = |key: &str| container.stored(key).map(|(_, shape)| shape);
        let layout = Layout::new(&container.keys(), &shapes, hint);
        Source { layout, container }
    }
}

impl Checkpoint {
    /// Opens a file or a folder; one shard of several opens them all.
    ///
    /// Errors name the file: `NotFound` and the like where it cannot be read, `DataLoss` where it is damaged,
    /// `Unimplemented` for pickled checkpoints, `InvalidArgument` for a file that is something else (an adapter, a
    /// textual inversion) or whose keys are of no known layout.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = path.metadata().map_err(|error| Error::io("open", path, &error))?;
        let (format, sources, scheduler) = if metadata.is_dir() {
            let found = folder::Folder::find(path)?;
            let mut sources = Vec::new();
            for folder::ComponentFiles { files, component, averaged } in &found.weights {
                let mut source = Source::new(open_files(files)?, *component);
                let denoisers = |part: &&mut Part| part.component == Component::Denoiser;
                source.layout.parts.iter_mut().filter(denoisers).for_each(|part| part.ema |= averaged);
                sources.push(source);
            }
            if let Some(files) = &found.averaged {
                add_averaged(&mut sources, Source::new(open_files(files)?, Some(Component::Denoiser)));
            }
            (Format::Folder, sources, found.scheduler)
        } else if gguf::is_gguf(path)? {
            let source = Source::new(f8::widen(Arc::new(gguf::GgufWeights::open(path)?))?, None);
            (Format::Gguf, vec![source], BTreeMap::new())
        } else {
            let source = Source::new(open_files(&folder::shards(path)?)?, None);
            (Format::Safetensors, vec![source], BTreeMap::new())
        };
        let checkpoint = Checkpoint { path: path.to_owned(), format, sources, scheduler };
        checkpoint.refuse_what_is_no_model()?;
        Ok(checkpoint)
    }

    /// The same checkpoint with the averaged (EMA) weights of its denoiser instead of the trained ones.
    ///
    /// `NotFound` where it has none.
    pub fn with_ema(mut self) -> Result<Self> {
        let mut found = false;
        for source in &mut self.sources {
            found |= source.layout.use_averaged();
        }
        if !found {
            let message = format!("{} has no averaged (EMA) weights", self.path.display());
            return Err(Error::not_found(message)
                .with_file(&self.path)
                .with_hint("use its trained weights, which are the only ones it has"));
        }
        // Averaged weights in a file of their own replace the trained ones of another file.
        let averaged = |source: &Source| source.layout.parts.iter().any(|part| part.ema);
        if self.sources.iter().any(averaged) {
            for source in &mut self.sources {
                source.layout.parts.retain(|part| part.ema || part.component != Component::Denoiser);
            }
        }
        Ok(self)
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its components, in the order of [`Component::ALL`]. A lone T5 counts as the third text encoder.
    pub fn components(&self) -> Vec<Component> {
        let mut components: Vec<Component> = self.parts().map(|(_, part)| part.component).collect();
        components.sort_unstable();
        components.dedup();
        components
    }

    /// The tensors of a component under the names of diffusers.
    ///
    /// A file that holds only one text encoder serves as any of them, since it does not tell its place in a pipeline.
    /// `NotFound` for an absent component; the error lists those there are.
    pub fn component(&self, component: Component) -> Result<Box<dyn StateDict>> {
        let (source, part) = self.find(component)?;
        Ok(Box::new(ComponentWeights::new(source.container.clone(), part)))
    }

    /// The tensors of a component that a graph does not read. Errors as [`component`](Checkpoint::component).
    pub fn unread(&self, component: Component, binding: &Binding) -> Result<Unread> {
        let (source, part) = self.find(component)?;
        Ok(Unread::new(part, &ComponentWeights::new(source.container.clone(), part), binding))
    }

    /// The files' own metadata (`__metadata__`, keys of GGUF).
    pub fn metadata(&self) -> BTreeMap<&str, &str> {
        let mut all = BTreeMap::new();
        for (key, value) in self.sources.iter().flat_map(|source| source.container.metadata()) {
            all.entry(&**key).or_insert(&**value);
        }
        all
    }

    /// Summarises the contents, for people and programs.
    pub fn summary(&self) -> Summary {
        Summary::new(self)
    }

    fn parts(&self) -> impl Iterator<Item = (&Source, &Part)> {
        self.sources.iter().flat_map(|source| source.layout.parts.iter().map(move |part| (source, part)))
    }

    fn find(&self, component: Component) -> Result<(&Source, &Part)> {
        let mut parts: Vec<_> = self.parts().collect();
        if let Some(index) = parts.iter().position(|(_, part)| part.component == component) {
            return Ok(parts.swap_remove(index));
        }
        match parts[..] {
            [lone] if is_text(component) && is_text(lone.1.component) => Ok(lone),
            _ => {
                let there: Vec<&str> = parts.iter().map(|(_, part)| part.component.name()).collect();
                let foreign = self
                    .foreign()
                    .map_or_else(String::new, |title| format!(", and {title}, which sdrun does not read"));
                let message = format!(
                    "{} has no {component}; it has {}{foreign}",
                    self.path.display(),
                    there.join(", ")
                );
                Err(Error::not_found(message).with_file(&self.path))
            }
        }
    }

    /// A recognised network that sdrun does not read.
    fn foreign(&self) -> Option<&'static str> {
        self.sources.iter().find_map(|source| source.layout.foreign.first().copied())
    }

    fn refuse_what_is_no_model(&self) -> Result<()> {
        let keys: Vec<&str> = self.sources.iter().flat_map(|source| source.container.keys()).collect();
        let shapes = |key: &str| {
            let found = self.sources.iter().find_map(|source| source.container.stored(key));
            found.map(|(_, shape)| shape)
        };
        foreign::refuse(&self.path, &keys, &shapes)?;
        if self.parts().next().is_none() {
            if let Some(title) = self.foreign() {
                let message = format!("{} is {title}, which sdrun does not read", self.path.display());
                return Err(Error::unsupported(message).with_file(&self.path).with_hint(MODELS));
            }
            let keys: Vec<String> = keys.into_iter().map(str::to_string).collect();
            let message = if keys.is_empty() {
                format!("{} holds no tensors", self.path.display())
            } else {
                format!("the keys of {} have no known layout: {}", self.path.display(), first_few(&keys))
            };
            return Err(Error::invalid(message).with_file(&self.path).with_hint(MODELS));
        }
        Ok(())
    }
}

/// The models that sdrun reads, for hints.
const MODELS: &str = "sdrun reads Stable Diffusion 1, 2, XL, 3 and 3.5, Flux, Chroma, PixArt and Sana, the autoencoders, \
                      CLIP, T5 and Gemma 2 text encoders, the ControlNets of Stable Diffusion and the upscalers of ESRGAN, in the \
                      layouts of the original implementations, of diffusers and of ComfyUI";

/// Adds a file of averaged weights to the others.
fn add_averaged(sources: &mut Vec<Source>, mut source: Source) {
    let trained =
        |source: &Source| source.layout.parts.iter().any(|part| part.component == Component::Denoiser);
    for part in &mut source.layout.parts {
        part.ema = true;
    }
    if sources.iter().any(trained) {
        source.layout.averaged = source.layout.parts.pop();
    }
    sources.push(source);
}

fn open_files(paths: &[PathBuf]) -> Result<Arc<dyn Container>> {
    f8::widen(Arc::new(SafetensorsWeights::open(paths)?))
}

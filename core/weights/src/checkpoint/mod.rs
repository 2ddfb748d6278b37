//! Model files of any layout, read as the state dicts of diffusers and transformers.
//!
//! [`Checkpoint::open`] takes a safetensors file (a whole model in the original layout, or one or some of its
//! components, under the original's or diffusers' names), a folder of diffusers (a pipeline or one component, sharded
//! or not), or a GGUF file. The keys are sorted into components by prefix and structure; a component is then a
//! [`StateDict`] whose tensors are made from the file's when they are asked for, borrowed where the bytes are the
//! same.

mod container;
mod ema;
mod f8;
mod family;
mod folder;
mod foreign;
mod gguf;
mod layout;
mod spelling;
mod state_dict;
mod summary;

pub use family::{Family, identify};
pub use summary::{ComponentSummary, Facts, Format, Summary};

use crate::{Component, SafetensorsWeights, StateDict};
use container::Container;
use layout::{Layout, Part, is_text};
use sdrun_abi::{Error, Result};
use state_dict::{ComponentWeights, first_few};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A model, opened. Files are mapped; tensors are read when they are asked for.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    sources: Vec<Source>,
    /// Of a pipeline's scheduler, where there is one.
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
            for (files, hint) in &found.weights {
                sources.push(Source::new(open_files(files)?, *hint));
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

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The components there are, in the order of [`Component::ALL`]. A lone T5 passes for the third text encoder.
    pub fn components(&self) -> Vec<Component> {
        let mut components: Vec<Component> = self.parts().map(|(_, part)| part.component).collect();
        components.sort_unstable();
        components.dedup();
        components
    }

    /// The tensors of a component under the names of diffusers.
    ///
    /// A file that holds nothing but one text encoder is given for whichever text encoder is asked for, as nothing
    /// in it tells its place in a pipeline. `NotFound`, with those there are, for a component that is absent.
    pub fn component(&self, component: Component) -> Result<Box<dyn StateDict>> {
        let (source, part) = self.find(component)?;
        Ok(Box::new(ComponentWeights::new(source.container.clone(), part)))
    }

    /// What the files say about themselves (`__metadata__`, keys of GGUF).
    pub fn metadata(&self) -> BTreeMap<&str, &str> {
        let mut all = BTreeMap::new();
        for (key, value) in self.sources.iter().flat_map(|source| source.container.metadata()) {
            all.entry(&**key).or_insert(&**value);
        }
        all
    }

    /// What was found, for people and programs.
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
                let message =
                    format!("{} has no {component}; it has {}", self.path.display(), there.join(", "));
                Err(Error::not_found(message).with_file(&self.path))
            }
        }
    }

    fn refuse_what_is_no_model(&self) -> Result<()> {
        let keys: Vec<&str> = self.sources.iter().flat_map(|source| source.container.keys()).collect();
        let shapes = |key: &str| {
            let found = self.sources.iter().find_map(|source| source.container.stored(key));
            found.map(|(_, shape)| shape)
        };
        foreign::refuse(&self.path, &keys, &shapes)?;
        if self.parts().next().is_none() {
            let keys: Vec<String> = keys.into_iter().map(str::to_string).collect();
            let message = if keys.is_empty() {
                format!("{} holds no tensors", self.path.display())
            } else {
                format!("the keys of {} are of no layout we know: {}", self.path.display(), first_few(&keys))
            };
            return Err(Error::invalid(message).with_file(&self.path).with_hint(
                "we read Stable Diffusion 1, 2, XL, 3 and 3.5, Flux and Chroma, their autoencoders, text encoders \
                 and ControlNets, in the layouts of the original implementations, of diffusers and of ComfyUI",
            ));
        }
        Ok(())
    }
}

fn open_files(paths: &[PathBuf]) -> Result<Arc<dyn Container>> {
    f8::widen(Arc::new(SafetensorsWeights::open(paths)?))
}

//! Settings that the clients of A1111's API share.

use crate::{
    fault::Fault,
    library::{Library, find},
    order::format,
};
use sdrun_diffusion::{file::Format, noise::Rng, pipeline::named};
use serde_json::{Map, Value};

/// The settings. Those that sdrun does not know are kept for the clients that set them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings(Map<String, Value>);

const MODEL: &str = "sd_model_checkpoint";
const VAE: &str = "sd_vae";
const MODULES: &str = "forge_additional_modules";
const CLIP_SKIP: &str = "CLIP_stop_at_last_layers";
const FORMAT: &str = "samples_format";
const NOISE: &str = "randn_source";
const QUALITY: &str = "jpeg_quality";
const PREVIEWS: &str = "live_previews_enable";

/// The most settings to keep, so that a client cannot fill the memory.
const MOST: usize = 1000;

impl Settings {
    /// All settings.
    pub(crate) fn all(&self) -> Map<String, Value> {
        let usual = [
            (VAE, Value::from("Automatic")),
            (MODULES, Value::Array(Vec::new())),
            (CLIP_SKIP, 1.into()),
            (FORMAT, "png".into()),
            (NOISE, "NV".into()),
            (QUALITY, 90.into()),
            (PREVIEWS, true.into()),
            ("show_progress_every_n_steps", 1.into()),
        ];
        let mut all: Map<String, Value> =
            usual.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        all.extend(self.0.clone());
        all
    }

    /// These settings with others changed. Null changes nothing.
    ///
    /// # Errors
    /// Names that the library does not have, and values of the wrong kind.
    pub(crate) fn with(&self, changes: &Map<String, Value>, library: &Library) -> Result<Self, Fault> {
        let mut settings = self.clone();
        for (name, value) in changes {
            if value.is_null() {
                continue;
            }
            // Some clients send an empty name when they have none.
            if name == MODEL && value == "" {
                continue;
            }
            if settings.0.len() >= MOST && !settings.0.contains_key(name) {
                return Err(Fault::invalid(format!("there are {MOST} settings already")));
            }
            settings.0.insert(name.clone(), value.clone());
        }
        if let Some(model) = settings.text(MODEL)? {
            settings.set_model(&library.model(&model)?.title);
        }
        library.files(
            settings.model().unwrap_or("demo"),
            settings.vae(library)?.as_deref(),
            &settings.modules()?,
        )?;
        settings.clip_skip()?;
        settings.format()?;
        settings.rng()?;
        Ok(settings)
    }

    /// The model that is chosen.
    pub(crate) fn model(&self) -> Option<&str> {
        self.0.get(MODEL).and_then(Value::as_str)
    }

    pub(crate) fn set_model(&mut self, title: &str) {
        self.0.insert(MODEL.into(), title.into());
    }

    /// Another autoencoder.
    pub(crate) fn vae(&self, library: &Library) -> Result<Option<String>, Fault> {
        let name = self.text(VAE)?.filter(|name| !["", "Automatic", "None"].contains(&name.as_str()));
        name.map(|name| Ok(find(&library.listing().vaes, "autoencoder", &name)?.title)).transpose()
    }

    /// Autoencoders and text encoders.
    pub(crate) fn modules(&self) -> Result<Vec<String>, Fault> {
        match self.0.get(MODULES) {
            None => Ok(Vec::new()),
            Some(Value::Array(names)) => names.iter().map(|name| wanted(MODULES, name.as_str())).collect(),
            Some(_) => Err(wrong(MODULES, "a list of names")),
        }
    }

    pub(crate) fn clip_skip(&self) -> Result<Option<usize>, Fault> {
        let Some(value) = self.0.get(CLIP_SKIP) else { return Ok(None) };
        let layers = value.as_u64().ok_or_else(|| wrong(CLIP_SKIP, "a number"))?;
        Ok(Some(layers as usize).filter(|layers| *layers > 1))
    }

    pub(crate) fn format(&self) -> Result<Format, Fault> {
        self.text(FORMAT)?.map_or(Ok(Format::Png), |name| format(&name))
    }

    pub(crate) fn rng(&self) -> Result<Rng, Fault> {
        self.text(NOISE)?.map_or(Ok(Rng::Nv), |name| Ok(named::rng(&name)?))
    }

    pub(crate) fn quality(&self) -> u8 {
        self.0.get(QUALITY).and_then(Value::as_u64).map_or(90, |quality| quality.clamp(1, 100) as u8)
    }

    fn text(&self, name: &str) -> Result<Option<String>, Fault> {
        self.0.get(name).map(|value| wanted(name, value.as_str())).transpose()
    }
}

fn wanted(name: &str, text: Option<&str>) -> Result<String, Fault> {
    text.map(str::to_string).ok_or_else(|| wrong(name, "a name"))
}

fn wrong(name: &str, kind: &str) -> Fault {
    Fault::invalid(format!("the setting {name} is not {kind}"))
}

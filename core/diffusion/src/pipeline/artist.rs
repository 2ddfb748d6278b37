//! A model that stays open, for hosts.

use super::{
    Engines, Error, Event, Kept, Picture, Recipe, Recording, Resolved, Result, Wanted, generate, groups,
    warnings,
};
use crate::{family::Family, file};
use sdrun::{
    BuildOptions, Provider, Registry, Wishes,
    abi::{Device, ErrorCode, Host},
};
use std::{
    sync::{Mutex, PoisonError},
    thread,
};

/// A model that draws. Its networks stay loaded between pictures. Calls from several threads wait for each other.
pub struct Artist {
    registry: Registry,
    recipe: Recipe,
    family: &'static Family,
    lane: Lane,
    kept: Mutex<Kept>,
}

/// Where an [`Artist`] works.
pub struct Lane {
    /// The provider and device to use; `None` chooses the best for each network, by `wishes`.
    pub only: Option<(Provider, Device)>,
    /// Preferred providers, the device, and where providers run.
    pub wishes: Wishes,
    /// How to build for a device.
    pub options: Box<dyn Fn(Device) -> BuildOptions + Send + Sync>,
}

impl Default for Lane {
    /// The best provider and device for each network.
    fn default() -> Self {
        Lane { only: None, wishes: Wishes::new(), options: Box::new(BuildOptions::new) }
    }
}

/// What an [`Artist`] reports while it draws.
pub enum Told<'a> {
    /// Warnings about the request, one sentence each.
    Warnings(Vec<String>),
    /// Progress of the pipeline.
    Event(&'a Event<'a>),
    /// A picture is done.
    Picture(Finished),
}

/// A picture with its settings.
pub struct Finished {
    /// The picture.
    pub picture: Picture,
    /// Its texts for a file ([`file::encode`]): A1111's parameters and sdrun's record, by their keys.
    pub texts: [(&'static str, String); 2],
}

impl Artist {
    /// Opens a model; without any file, the demo model. Mistakes in the files are reported now rather than at the first picture.
    ///
    /// # Errors
    /// Files that are missing, damaged, of another kind or for another family.
    pub fn open(registry: Registry, mut recipe: Recipe, lane: Lane, host: &dyn Host) -> Result<Self> {
        if recipe.files == super::Files::default() {
            recipe.files.model = Some(crate::demo::NAME.into());
        }
        recipe.find_demo(registry.paths())?;
        let family = recipe.open("", "", registry.paths(), host)?.parts.family;
        Ok(Artist { registry, recipe, family, lane, kept: Mutex::default() })
    }

    /// The model's family.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// Draws the pictures that `wanted` describes and passes each to `listen` as soon as it is finished, even if a later one fails.
    ///
    /// # Errors
    /// Numbers out of range, prompts with mistakes, failures of networks, `Cancelled`.
    pub fn draw(&self, wanted: &Wanted, host: &dyn Host, listen: &mut dyn FnMut(Told<'_>)) -> Result<()> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut engines = Engines::new(&self.lane.options);
        (engines.only, engines.wishes) = (self.lane.only.clone(), self.lane.wishes.clone());
        engines.kept = Some(std::mem::take(&mut *kept));
        let done = self.groups(wanted, &engines, host, listen);
        // A network may be in any state after a failure, and its memory is needed if it ran out.
        let harmless = |e: &Error| matches!(e.code(), ErrorCode::InvalidArgument | ErrorCode::Cancelled);
        if done.as_ref().err().is_none_or(harmless) {
            *kept = engines.kept.take().unwrap_or_default();
        }
        done
    }

    fn groups(
        &self,
        wanted: &Wanted,
        engines: &Engines<'_>,
        host: &dyn Host,
        listen: &mut dyn FnMut(Told<'_>),
    ) -> Result<()> {
        let paths = self.registry.paths();
        let (first, others) = groups(&wanted.request, [true; 2], None)?;
        for group in std::iter::once(&first).chain(&others) {
            let opened = self.recipe.open(&group.prompt, &group.negative, paths, host)?;
            let request = wanted.request(&opened.parts)?;
            let resolved: Resolved = group.resolve(&request, &opened)?;
            let unusual = warnings(&resolved, &opened.parts);
            if !unusual.is_empty() {
                listen(Told::Warnings(unusual));
            }
            thread::scope(|scope| {
                let mut files = Recording::start(scope, &self.recipe, &opened, paths, host, |_| ());
                let mut hear = |event: Event<'_>| match event {
                    Event::Picture(picture) => {
                        let record = resolved.record(files.found(), picture.seed, picture.variation);
                        listen(Told::Picture(Finished { picture, texts: file::texts(&record) }));
                    }
                    event => listen(Told::Event(&event)),
                };
                generate(&self.registry, &opened.parts, &resolved, engines, host, &mut hear)
            })?;
        }
        Ok(())
    }
}

//! Arguments that name a model and its shapes.

use crate::{context::Context, parse::ShapeArg};
use clap::Args;
use sdrun::{
    Model, Shapes,
    abi::{Error, OpenShapes},
    graph::{OpenOptions, WeightsPolicy},
};
use std::path::Path;

#[derive(Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Shape of an input (repeatable). Building and running need a size for every open dimension. `build` takes several shapes, as
    /// in sample=1,4,64,64:1,4,96,96, for an engine that serves them all
    #[arg(long = "shape", value_name = "NAME=DIMS[:DIMS…]")]
    pub(crate) shapes: Vec<ShapeArg>,

    /// Follow symbolic and hard links to external weight files, even outside the model's folder
    #[arg(long)]
    pub(crate) allow_links: bool,
}

impl ModelArgs {
    /// Opens a file or a built-in model.
    pub(crate) fn open(
        &self,
        what: &str,
        weights: WeightsPolicy,
        context: &Context,
    ) -> anyhow::Result<Model> {
        open_model(what, &OpenOptions { allow_links: self.allow_links, weights }, context)
    }

    /// The given shapes. Several shapes for one input are an error.
    pub(crate) fn shapes(&self) -> anyhow::Result<Shapes> {
        let (shapes, open) = self.shapes_and_lists()?;
        match open.keys().next() {
            None => Ok(shapes),
            Some(name) => Err(Error::invalid(format!("--shape gives input {name:?} several shapes"))
                .with_hint("only `sdrun build` takes several; `sdrun run ENGINE` then runs each of them")
                .into()),
        }
    }

    /// The shapes of inputs that have one, and of inputs that have several.
    pub(crate) fn shapes_and_lists(&self) -> anyhow::Result<(Shapes, OpenShapes)> {
        let (mut single, mut several) = (Shapes::new(), OpenShapes::new());
        for ShapeArg { name, shapes } in &self.shapes {
            if single.contains_key(name) || several.contains_key(name) {
                return Err(Error::invalid(format!("--shape gives input {name:?} twice")).into());
            }
            match &**shapes {
                [shape] => drop(single.insert(name.clone(), shape.clone())),
                shapes => drop(several.insert(name.clone(), shapes.to_vec())),
            }
        }
        Ok((single, several))
    }
}

/// Opens a file or a built-in model. Generates a built-in model that is not in the cache.
pub(crate) fn open_model(what: &str, options: &OpenOptions, context: &Context) -> anyhow::Result<Model> {
    let task = context.task(&format!("opening {what}"));
    Ok(Model::find(what, &context.paths()?, options, &task.host(context.cancel_flag()))?)
}

/// Whether a path ends in `.ending`, ignoring case.
pub(crate) fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending))
}

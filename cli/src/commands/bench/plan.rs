//! Which cases a benchmark measures.

use super::Suite;
use crate::{
    context::Context,
    model::{self, ModelArgs},
};
use sdrun::{
    Model, Shapes, WeightFiles,
    abi::{Error, Precision},
    bench::{self, Case, PrecisionChoice},
    graph::OpenOptions,
    weights::WeightStack,
};
use std::collections::BTreeSet;

/// A model, its shapes, and the precisions to measure it in.
pub(super) struct Plan {
    pub(super) model: Model,
    pub(super) shapes: Shapes,
    pub(super) precisions: Vec<PrecisionChoice>,
}

impl Plan {
    /// The cases of all plans, with these weights instead of the models' own.
    pub(super) fn cases<'p>(plans: &'p [Plan], weights: Option<&'p WeightStack>) -> Vec<Case<'p>> {
        let of = |plan: &'p Plan| {
            plan.precisions.iter().map(move |precision| Case {
                model: &plan.model,
                shapes: plan.shapes.clone(),
                precision: *precision,
                weights,
            })
        };
        plans.iter().flat_map(of).collect()
    }
}

/// The cases of these models, or of a suite if none is named. `asked` are the precisions that the user wants.
pub(super) fn plan(
    models: &[String],
    suite: Suite,
    asked: &[PrecisionChoice],
    shapes: &ModelArgs,
    files: &WeightFiles,
    context: &Context,
) -> anyhow::Result<Vec<Plan>> {
    let or = |default: &[PrecisionChoice]| if asked.is_empty() { default } else { asked }.to_vec();
    let given = shapes.shapes()?;
    let invalid = |message: &str, hint: &str| Err(Error::invalid(message).with_hint(hint).into());
    match models {
        [] if !given.is_empty() => {
            invalid("--shape applies to a model, but none is named", "`sdrun bench MODEL --shape …`")
        }
        [] if files.is_given() => invalid(
            "--weights, --lora and --embedding belong to a model, and none is named",
            "`sdrun bench MODEL --weights …`",
        ),
        [_, _, ..] if files.is_given() => invalid(
            "--weights, --lora and --embedding belong to one model, and several are named",
            "run `sdrun bench` once for each model",
        ),
        [] => {
            let models = match suite {
                Suite::Quick => bench::QUICK,
                Suite::Full => bench::FULL,
                // It draws with whole models.
                Suite::Pipeline => &[],
            };
            models
                .iter()
                .map(|bench::Member { model, shapes }| {
                    let model = model::open_model(model, &OpenOptions::default(), context)?;
                    let shapes =
                        shapes.iter().map(|(name, dims)| (name.to_string(), dims.to_vec())).collect();
                    let precisions = or(&[PrecisionChoice::Fixed(Precision::Fp32), PrecisionChoice::BestLow]);
                    Ok(Plan { model, shapes, precisions })
                })
                .collect()
        }
        models => {
            let mut unused: BTreeSet<&String> = given.keys().collect();
            let mut plans = Vec::new();
            for what in models {
                let model = shapes.open(what, files.policy(), context)?;
                // Each model takes the shapes of the inputs it has; one alone takes all, so that a wrong name is its error.
                let inputs: Vec<String> = model.inputs().into_iter().map(|(spec, _)| spec.name).collect();
                let mut own = given.clone();
                own.retain(|name, _| models.len() == 1 || inputs.contains(name));
                unused.retain(|name| !own.contains_key(*name));
                let precisions = or(&[PrecisionChoice::Fixed(Precision::Fp32)]);
                plans.push(Plan { model, shapes: own, precisions });
            }
            match unused.first() {
                None => Ok(plans),
                Some(name) => invalid(
                    &format!("--shape names {name:?}, which is not an input of any of the models"),
                    "`sdrun inspect MODEL` lists the inputs",
                ),
            }
        }
    }
}

//! Checks that a checkpoint fits a graph: component, model, shapes, and tensors that the graph does not read.

use crate::{
    Binding, BoundTensor, Checkpoint, Component, StateDict, builtin,
    checkpoint::{Family, Unread, identify},
    keys::{Table, identify_network},
    layout::same_but_for_ones,
};
use sdrun_abi::{Error, Hint, Result};
use std::collections::{HashMap, HashSet};

/// The component of a graph: that of its binding, or else the only one of the checkpoint that has all its tensors.
pub(crate) fn component_of(binding: &Binding, checkpoint: &Checkpoint) -> Result<Component> {
    if let Some(component) = binding.component {
        return Ok(component);
    }
    let mut found = Vec::new();
    for component in checkpoint.components() {
        if has_all(binding, &*checkpoint.component(component)?) {
            found.push(component);
        }
    }
    match *found {
        [component] => Ok(component),
        _ => Err(Error::not_found(format!(
            "{} has {} part with the weights of this model",
            checkpoint.path().display(),
            if found.is_empty() { "no" } else { "more than one" },
        ))
        .with_file(checkpoint.path())
        .with_hint(match found.is_empty() {
            true => Hint::Inspect,
            false => Hint::NamePart,
        })),
    }
}

/// Checks a component of a checkpoint against a graph, and returns the tensors that the graph does not read.
///
/// `InvalidArgument` if the checkpoint belongs to another model, if shapes differ, and, unless `lenient`, if the
/// graph does not read tensors that change the result. The hint names the built-in models that fit. Tensors
/// that are missing or cannot be read are reported when the weight is read.
pub(crate) fn check(
    binding: &Binding,
    component: Component,
    weights: &dyn StateDict,
    checkpoint: &Checkpoint,
    lenient: bool,
) -> Result<Unread> {
    let path = checkpoint.path();
    let refuse = |message: String, others: Vec<Hint>| {
        let models = fitting_models(component, weights, checkpoint);
        let hint = match &*models {
            [] => Hint::All(
                [Hint::from("no built-in model fits this checkpoint")].into_iter().chain(others).collect(),
            ),
            models => {
                let plural =
                    if models.len() > 1 { "one of the built-in models" } else { "the built-in model" };
                let model = Hint::Text(format!("use {plural} {}", models.join(", ")));
                Hint::AnyOf([model].into_iter().chain(others).collect())
            }
        };
        Err(Error::invalid(message).with_file(path).with_hint(hint))
    };
    if component == Component::Denoiser
        && let Some((wanted, found)) = other_family(binding, weights)
    {
        let message = format!("{} is {found}, but the model is {wanted}", path.display());
        return refuse(message, vec![Hint::Text(format!("give a checkpoint of {wanted}"))]);
    }
    let wrong: Vec<String> = binding.tensors.iter().filter_map(|bound| other_shape(bound, weights)).collect();
    if let [first, rest @ ..] = &*wrong {
        let more = if rest.is_empty() { String::new() } else { format!(", and {} more differ", rest.len()) };
        return refuse(format!("{} does not fit the model: {first}{more}", path.display()), vec![]);
    }
    let unread = checkpoint.unread(component, binding)?;
    if !unread.left_out.is_empty() && !lenient {
        let message = format!(
            "{} has {} that the model does not read and that change the result: {}",
            path.display(),
            match unread.left_out.len() {
                1 => "a tensor".to_string(),
                count => format!("{count} tensors"),
            },
            unread.description()
        );
        let mut hints = vec![Hint::Lenient];
        if lacks_parts(binding, &unread) {
            let import = "import the model with the checkpoint it was exported from as reference, if it has these \
                          weights under other names";
            hints.push(Hint::from(import));
        }
        return refuse(message, hints);
    }
    Ok(unread)
}

/// Whether the structure of the graph's network includes some of these tensors. The graph then probably reads them, and the
/// binding did not recognise them.
fn lacks_parts(binding: &Binding, unread: &Unread) -> bool {
    let names = || binding.tensors.iter().flat_map(|tensor| &tensor.sources).map(String::as_str);
    let Some((network, naming)) = identify_network(names()) else { return false };
    let missing: HashSet<String> = Table::new(network, naming, names()).missing.into_iter().collect();
    unread.left_out.iter().any(|name| missing.contains(name))
}

/// How the shape of a tensor differs from the graph's.
fn other_shape(bound: &BoundTensor, weights: &dyn StateDict) -> Option<String> {
    let [name] = &*bound.sources else { return None };
    let (_, shape) = weights.describe(name).ok()?;
    (!same_but_for_ones(&shape, &bound.source_shape)).then(|| {
        let takes = &bound.source_shape;
        let channels = match (name.as_str(), &*shape, &**takes) {
            ("conv_in.weight" | "x_embedder.weight" | "conv_first.weight", [_, has, ..], [_, wants, ..])
                if has != wants =>
            {
                format!(" ({has} input channels instead of {wants})")
            }
            _ => String::new(),
        };
        format!("{name} has shape {shape:?} and the model takes {takes:?}{channels}")
    })
}

/// Whether a state dict has all tensors of a graph.
fn has_all(binding: &Binding, weights: &dyn StateDict) -> bool {
    let has = |bound: &BoundTensor| match &*bound.sources {
        [name] => {
            weights.describe(name).is_ok_and(|(_, shape)| same_but_for_ones(&shape, &bound.source_shape))
        }
        names => names.iter().all(|name| weights.describe(name).is_ok()),
    };
    binding.tensors.iter().all(has)
}

/// The families of the graph and of the state dict, if they are known to differ.
fn other_family(binding: &Binding, weights: &dyn StateDict) -> Option<(Family, Family)> {
    let graph =
        binding.tensors.iter().flat_map(|t| t.sources.iter().map(|name| (name.as_str(), &*t.source_shape)));
    let names = weights.names();
    let shapes: Vec<(&str, Vec<usize>)> =
        names.into_iter().filter_map(|name| Some((name, weights.describe(name).ok()?.1))).collect();
    let found = identify(shapes.iter().map(|(name, shape)| (*name, &**shape)));
    let (wanted, found) = (identify(graph)?.0, found?.0);
    (wanted != found).then_some((wanted, found))
}

/// The built-in models whose weights this component has, and that read all its tensors that change the result.
fn fitting_models(
    component: Component,
    weights: &dyn StateDict,
    checkpoint: &Checkpoint,
) -> Vec<&'static str> {
    let mut known = HashMap::new();
    let mut fits = |model: &builtin::Builtin| {
        *known.entry(model.file).or_insert_with(|| {
            let Ok(map) = model.weight_map() else { return false };
            let binding = Binding::from_map(&map);
            binding.component.is_none_or(|own| own == component)
                && has_all(&binding, weights)
                && checkpoint.unread(component, &binding).is_ok_and(|unread| unread.left_out.is_empty())
        })
    };
    builtin::list().iter().filter(|model| fits(model)).map(|model| model.name).collect()
}

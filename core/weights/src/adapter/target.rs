//! The tensors of one pipeline component, which adapters are resolved against.

use super::{
    family,
    key::{Path, Place},
    module::product,
};
use crate::{
    Component,
    checkpoint::Family,
    keys::{Fusion, KeyPair},
};
use std::collections::HashMap;

/// The weights of one component, under every name that adapters have for their modules.
///
/// Underscored names are ambiguous (`_` separates the parts of a path and also occurs within them), so they are never
/// parsed: known names are flattened and looked up.
#[derive(Clone, Debug)]
pub struct Target {
    component: Component,
    tensors: Vec<(String, Vec<usize>)>,
    modules: Vec<Found>,
    dotted: HashMap<String, usize>,
    /// `None` if two different modules share the name.
    flat: HashMap<String, Option<usize>>,
    is_t5: bool,
}

/// A module of the network: its weight and its bias.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Found {
    pub(super) weight: Option<Site>,
    pub(super) bias: Option<Site>,
}

/// Maps the rows of a module's tensor to the component's tensors.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Site {
    /// Shape of the module's tensor.
    pub(super) shape: Vec<usize>,
    pub(super) parts: Vec<Part>,
    /// Whether it is stored transposed.
    pub(super) transposed: bool,
}

/// A tensor of the component and the rows of the module's tensor that make it up.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    /// Index of the tensor.
    pub(super) tensor: usize,
    pub(super) rows: Vec<Run>,
}

/// `len` rows, from row `from` of the module's tensor to row `to` of the component's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) len: usize,
}

/// Whether a module's tensor is its weight or its bias.
enum Role {
    Weight,
    Bias,
}

fn split(name: &str) -> (String, Role) {
    match name.rsplit_once('.') {
        Some((module, "weight" | "scale")) => (module.into(), Role::Weight),
        Some((module, "bias")) => (module.into(), Role::Bias),
        _ => match (name.strip_suffix("_weight"), name.strip_suffix("_bias")) {
            // OpenCLIP's in_proj_weight
            (Some(module), _) => (module.into(), Role::Weight),
            (_, Some(module)) => (module.into(), Role::Bias),
            _ => (name.into(), Role::Weight),
        },
    }
}

impl Target {
    /// The component with these tensors (names of the diffusers or transformers state dict, shapes) and, for
    /// adapters in the spelling of the original implementation, the names there.
    pub fn new(
        component: Component,
        tensors: impl IntoIterator<Item = (String, Vec<usize>)>,
        pairs: &[KeyPair],
    ) -> Self {
        let tensors: Vec<(String, Vec<usize>)> = tensors.into_iter().collect();
        let mut target = Target {
            component,
            is_t5: tensors.iter().any(|(name, _)| name.contains(".SelfAttention.")),
            tensors: Vec::new(),
            modules: Vec::new(),
            dotted: HashMap::new(),
            flat: HashMap::new(),
        };
        for (number, (name, shape)) in tensors.iter().enumerate() {
            let rows = shape.first().copied().unwrap_or(1);
            let part = Part { tensor: number, rows: vec![Run { from: 0, to: 0, len: rows }] };
            target.insert(name, Site { shape: shape.clone(), parts: vec![part], transposed: false });
        }
        let numbers: HashMap<&str, usize> =
            tensors.iter().enumerate().map(|(number, (name, _))| (name.as_str(), number)).collect();
        for pair in pairs {
            if let Some(site) = site(pair, &tensors, &numbers) {
                if let Some(block) = pair.original.strip_suffix(".linear1.weight")
                    && let [q, k, v, _] = &*site.parts
                {
                    // XLabs' `qkv_lora` of a single block: all of linear1 but the MLP.
                    let parts = vec![q.clone(), k.clone(), v.clone()];
                    let rows = parts.iter().flat_map(|p| &p.rows).map(|run| run.len).sum();
                    let mut shape = site.shape.clone();
                    shape[0] = rows;
                    let name = format!("{block}.linear1.qkv.weight");
                    target.insert(&name, Site { shape, parts, transposed: false });
                }
                target.insert(&pair.original, site);
            }
        }
        target.tensors = tensors;
        target.add_aliases();
        target
    }

    /// Which part of its pipeline the component is.
    pub fn component(&self) -> Component {
        self.component
    }

    /// Names and shapes.
    pub fn tensors(&self) -> &[(String, Vec<usize>)] {
        &self.tensors
    }

    /// The architecture, if names and widths determine it.
    pub fn family(&self) -> Option<Family> {
        if self.component != Component::Denoiser {
            // SD 1, SDXL, SD 3 and Flux share a text encoder.
            return None;
        }
        family::guess(
            self.tensors.iter().filter_map(|(name, shape)| {
                Some((name.strip_suffix(".weight")?, shape.get(1).copied(), false))
            }),
        )
    }

    fn insert(&mut self, name: &str, site: Site) {
        let (module, role) = split(name);
        let number = *self.dotted.entry(module).or_insert_with(|| {
            self.modules.push(Found::default());
            self.modules.len() - 1
        });
        let found = &mut self.modules[number];
        let place = match role {
            Role::Weight => &mut found.weight,
            Role::Bias => &mut found.bias,
        };
        // The first wins: diffusers' name over the same name in the original.
        place.get_or_insert(site);
    }

    /// Adds other names of the modules, and all names flattened.
    fn add_aliases(&mut self) {
        let is_text = self.is_text_encoder();
        let aliases: Vec<(String, usize)> = self
            .dotted
            .iter()
            .flat_map(|(name, number)| {
                let output = name.strip_suffix(".to_out.0").map(|rest| format!("{rest}.to_out"));
                // transformers 4 puts `text_model.` before a CLIP encoder's names, transformers 5 does not.
                let text = is_text.then(|| match name.strip_prefix("text_model.") {
                    Some(short) => short.to_owned(),
                    None => format!("text_model.{name}"),
                });
                output.into_iter().chain(text).map(|alias| (alias, *number))
            })
            .collect();
        for (alias, number) in aliases {
            self.dotted.entry(alias).or_insert(number);
        }
        for (name, number) in &self.dotted {
            let flat = name.replace('.', "_");
            let known = self.flat.entry(flat).or_insert(Some(*number));
            if known.is_some_and(|other| self.modules[other] != self.modules[*number]) {
                *known = None;
            }
        }
    }

    fn is_text_encoder(&self) -> bool {
        use Component::*;
        matches!(self.component, TextEncoder | TextEncoder2 | TextEncoder3)
    }

    /// Whether modules of this place may belong here.
    pub(super) fn is_place(&self, place: Place) -> bool {
        use Component::*;
        match (place, self.component) {
            (Place::Denoiser, Denoiser) | (Place::Unsaid, Denoiser | TextEncoder) => true,
            (Place::TextEncoder(1), TextEncoder) | (Place::TextEncoder(2), TextEncoder2) => true,
            // kohya numbers T5 as 3 in Flux too, although it is the second text encoder there.
            (Place::TextEncoder(3), TextEncoder2) => self.is_t5,
            (Place::TextEncoder(3), TextEncoder3) => true,
            (Place::T5, TextEncoder2 | TextEncoder3) => self.is_t5,
            _ => false,
        }
    }

    /// The module of this name; `Err` if two match.
    pub(super) fn find(&self, path: &Path) -> Result<Option<&Found>, ()> {
        let exact = match path {
            Path::Dotted(name) => self.dotted.get(name).copied(),
            Path::Flat(_) => None,
        };
        let number = match exact {
            Some(number) => Some(number),
            None => match self.flat.get(&path.flat()) {
                Some(None) => return Err(()),
                found => found.copied().flatten(),
            },
        };
        Ok(number.and_then(|number| self.modules.get(number)))
    }
}

/// Maps an original tensor's rows to the component, if it has any of them.
fn site(pair: &KeyPair, tensors: &[(String, Vec<usize>)], numbers: &HashMap<&str, usize>) -> Option<Site> {
    let known: Vec<Option<usize>> = pair.diffusers.iter().map(|n| numbers.get(n.as_str()).copied()).collect();
    let (_, model) = known.iter().flatten().next().and_then(|n| tensors.get(*n))?;
    let rows_of = |number: usize| tensors[number].1.first().copied().unwrap_or(1);
    let mut shape = model.clone();
    let mut parts = Vec::new();
    match pair.fusion {
        Fusion::Same | Fusion::Conv1x1 | Fusion::Transposed | Fusion::SwappedHalves => {
            let (number, half) = (known[0]?, model.first()? / 2);
            let rows = match pair.fusion {
                Fusion::SwappedHalves if model[0].is_multiple_of(2) => {
                    vec![Run { from: half, to: 0, len: half }, Run { from: 0, to: half, len: half }]
                }
                Fusion::SwappedHalves => return None,
                _ => vec![Run { from: 0, to: 0, len: model[0] }],
            };
            parts.push(Part { tensor: number, rows });
        }
        Fusion::Rows => {
            let rows = pair.row_ranges(|name| numbers.get(name).map(|number| rows_of(*number)))?;
            *shape.first_mut()? = rows.last()?.end;
            for (number, rows) in known.iter().zip(rows) {
                if let Some(tensor) = *number {
                    parts.push(Part { tensor, rows: vec![Run { from: rows.start, to: 0, len: rows.len() }] });
                }
            }
        }
    }
    let transposed = pair.fusion == Fusion::Transposed;
    Some(Site { shape, parts, transposed })
}

impl Site {
    /// Whether a change for a weight of `shape` fits. Unknown sizes are `None`. Trailing ones do not count (a 1x1 convolution
    /// is a linear layer), and a matrix may be a flattened convolution.
    pub(super) fn accepts(&self, shape: &[Option<usize>]) -> bool {
        let own = squeezed(&self.shape);
        let Some(known) = shape.iter().copied().collect::<Option<Vec<usize>>>() else {
            let columns = self.shape.get(1).copied();
            return [self.shape.first().copied(), columns]
                .iter()
                .zip(shape)
                .all(|(own, wanted)| wanted.is_none() || own == wanted);
        };
        let known = squeezed(&known);
        known == own
            || (known.len() == 2 && own.len() > 2 && known[0] == own[0] && known[1] == product(&own[1..]))
    }
}

fn squeezed(shape: &[usize]) -> &[usize] {
    match shape {
        [rest @ .., 1] if !rest.is_empty() => squeezed(rest),
        _ => shape,
    }
}

//! Names of weights: the layout of the original implementations (LDM, OpenCLIP, SAI, BFL) against that of diffusers and
//! transformers.
//!
//! Each component has one table of [`KeyPair`]s, built from the structure of the given network (blocks, layers, levels with
//! attention), so it covers pruned, widened and distilled variants. It serves both ways: checkpoints are read by the original key ([`Table::new`]), adapters are resolved from the graph's own modules
//! ([`pairs`], [`modules`]).

mod builder;
mod detect;
mod linear;
pub(crate) mod names;
mod renamed;
mod text;
mod transformer;
mod unet;
mod upscaler;
mod vae;

pub(crate) use detect::foreign_network;
pub use detect::identify_network;
use names::Names;
pub(crate) use renamed::{T5_TOKENS, modern_vae_attention};
use serde::{Deserialize, Serialize};
use std::{collections::HashSet, ops::Range};

/// How to compute a tensor of the original layout from tensors of the diffusers layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// The same tensor.
    Same,
    /// A linear weight `[o, i]` as a 1x1 convolution `[o, i, 1, 1]`.
    Conv1x1,
    /// The transpose of a matrix.
    Transposed,
    /// Concatenated along the first dimension (q, k, v, or q, k, v, mlp).
    Rows,
    /// The two halves along the first dimension swapped (scale and shift).
    SwappedHalves,
}

/// A tensor of the original layout and its tensors of the diffusers layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPair {
    /// Key in the original layout, without the prefix of its component (`input_blocks.1.0.in_layers.2.weight`).
    pub original: String,
    /// Names in the diffusers state dict, in order; one except for [`Fusion::Rows`].
    pub diffusers: Vec<String>,
    /// How to compute the original tensor from them.
    pub fusion: Fusion,
}

impl KeyPair {
    /// The rows of the original tensor that belong to each of `diffusers`, given the number of rows (first dimension) of each.
    /// A projection that `rows` does not know (graphs drop unused ones) is as large as its siblings: q, k and v are equal in
    /// all of these networks. `None` if that does not decide.
    pub fn row_ranges(&self, rows: impl Fn(&str) -> Option<usize>) -> Option<Vec<Range<usize>>> {
        let known: Vec<Option<usize>> = self.diffusers.iter().map(|name| rows(name)).collect();
        let projection = known.iter().take(3).flatten().next().copied();
        let mut start = 0usize;
        let sizes = known.iter().enumerate();
        sizes
            .map(|(part, size)| {
                let size = size.or(if part < 3 { projection } else { None })?;
                let range = start..start.checked_add(size)?;
                start = range.end;
                Some(range)
            })
            .collect()
    }
}

/// Divides `total` rows among `parts` fused tensors: equally among q, k and v. With a fourth part (Flux's `linear1`), q, k and
/// v have `hidden` rows each (the model's width, the columns of the weight) and the fourth has the rest.
pub(crate) fn split_rows(parts: usize, total: usize, hidden: Option<usize>) -> Option<Vec<Range<usize>>> {
    let size = if parts > 3 { hidden? } else { total / parts.max(1) };
    let bounds: Vec<usize> = (0..parts).map(|part| part.checked_mul(size)).collect::<Option<_>>()?;
    let last = *bounds.last()?;
    if last >= total || (parts <= 3 && parts * size != total) {
        return None;
    }
    let ends = bounds.iter().skip(1).copied().chain([total]);
    Some(bounds.iter().zip(ends).map(|(start, end)| *start..end).collect())
}

/// A network with a key table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// The UNet of SD 1.x, 2.x and XL, and of models pruned from them.
    #[serde(rename = "unet")]
    UNet,
    /// A ControlNet for one of those.
    #[serde(rename = "controlnet")]
    ControlNet,
    /// `AutoencoderKL`, whole or one half.
    Vae,
    /// `AutoencoderDC`, the deep compression autoencoder of Sana, whole or one half.
    DeepVae,
    /// A tiny autoencoder (TAESD, TAESDXL, TAESD3, TAEF1, TAEF2), whole or one half.
    TinyVae,
    /// The transformer of SD 3 and 3.5.
    Sd3,
    /// The transformer of Flux.
    Flux,
    /// The transformer of Chroma.
    Chroma,
    /// The transformer of PixArt (alpha and Sigma).
    #[serde(rename = "pixart")]
    PixArt,
    /// The transformer of Sana.
    Sana,
    /// A CLIP text encoder; its original names are those of transformers.
    Clip,
    /// A CLIP text encoder whose original names are those of OpenCLIP.
    OpenClip,
    /// The encoder of T5.
    T5,
    /// The language model Gemma 2.
    Gemma2,
    /// The upscaler of ESRGAN and Real-ESRGAN (`RRDBNet`). The names of Real-ESRGAN take the place of diffusers'.
    Esrgan,
}

/// The naming of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Naming {
    /// diffusers and transformers.
    Diffusers,
    /// The original implementation.
    Original,
}

/// The key table of a network, and how the names that it was built from differ from it.
#[derive(Clone, Debug)]
pub struct Table {
    /// Pairs that contain at least one of the given names.
    pub pairs: Vec<KeyPair>,
    /// Names (in the given naming) of such a network that were not given.
    pub missing: Vec<String>,
    /// Given names that do not belong to the network.
    pub extra: Vec<String>,
}

impl Table {
    /// The table of the network these names belong to. Original names come without the prefix of their component.
    pub fn new<'a>(network: Network, naming: Naming, names: impl IntoIterator<Item = &'a str>) -> Table {
        let names = Names::from_iter(names);
        let mut builder = builder::Builder::new(naming, &names);
        match network {
            Network::UNet => unet::unet(&mut builder),
            Network::ControlNet => unet::controlnet(&mut builder),
            Network::Vae => vae::kl(&mut builder),
            Network::DeepVae => vae::deep(&mut builder),
            Network::TinyVae => vae::tiny(&mut builder),
            Network::Sd3 => transformer::sd3(&mut builder),
            Network::Flux => transformer::flux(&mut builder),
            Network::Chroma => transformer::chroma(&mut builder),
            Network::PixArt => linear::pixart(&mut builder),
            Network::Sana => linear::sana(&mut builder),
            Network::Clip => text::clip(&mut builder),
            Network::OpenClip => text::open_clip(&mut builder),
            Network::T5 => text::t5(&mut builder),
            Network::Gemma2 => text::gemma2(&mut builder),
            Network::Esrgan => upscaler::esrgan(&mut builder),
        }
        let (mut pairs, mut missing) = (builder.finish(), Vec::new());
        let mut known = HashSet::new();
        pairs.retain(|pair| {
            let mut present = false;
            let spelt: &[String] = match naming {
                Naming::Original => std::slice::from_ref(&pair.original),
                Naming::Diffusers => &pair.diffusers,
            };
            for name in spelt {
                if names.has(name) {
                    present = true;
                    known.insert(name.clone());
                } else {
                    missing.push(name.clone());
                }
            }
            present
        });
        let extra = names.iter().filter(|name| !known.contains(*name)).map(str::to_string).collect();
        Table { pairs, missing, extra }
    }
}

/// The original key of each tensor of a diffusers state dict (text encoders: names of transformers 4, with
/// `text_model.`). The names may be a part of a state dict, such as those of a graph that holds the decoder of an
/// autoencoder; names outside the network are skipped.
///
/// [`identify_network`] tells the network; it returns [`Network::Clip`] for every CLIP, because the names do not tell
/// whether checkpoints of the model use OpenCLIP's.
pub fn pairs<'a>(network: Network, diffusers: impl IntoIterator<Item = &'a str>) -> Vec<KeyPair> {
    Table::new(network, Naming::Diffusers, diffusers).pairs
}

/// A module of the original layout and its modules in diffusers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModulePair {
    /// Path in the original layout (`double_blocks.0.img_attn.qkv`).
    pub original: String,
    /// Paths in diffusers, in the order of their rows.
    pub diffusers: Vec<String>,
    /// How to compute the original's `weight` from theirs.
    pub fusion: Fusion,
}

/// The modules with a `weight` among these pairs. OpenCLIP's `in_proj_weight` and `text_projection` are parameters,
/// not modules, and have no entry.
pub fn modules(pairs: &[KeyPair]) -> Vec<ModulePair> {
    let module = |name: &String| name.strip_suffix(".weight").map(str::to_string);
    let pair_of = |pair: &KeyPair| {
        Some(ModulePair {
            original: module(&pair.original)?,
            diffusers: pair.diffusers.iter().map(module).collect::<Option<_>>()?,
            fusion: pair.fusion,
        })
    };
    pairs.iter().filter_map(pair_of).collect()
}

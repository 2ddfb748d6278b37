//! Tensors of checkpoints that have no effect, each with the reason.
//!
//! Any other tensor that a graph does not read changes the result. So a rule must hold for every model it applies to.

use crate::keys::Network;

/// Which keys a rule applies to.
enum Keys {
    /// These whole keys.
    Whole(&'static [&'static str]),
    /// Keys whose last part is one of these.
    Last(&'static [&'static str]),
    /// Keys that have one of these among their parts.
    Part(&'static [&'static str]),
}

/// Keys that no network of a pipeline uses, under any prefix.
///
/// Sources: LDM's `ddpm.py` (`register_schedule`) and `lpips`/`contperceptual.py`, `lightning` checkpoints, ComfyUI's
/// `supported_models.py` (markers), OpenAI's and OpenCLIP's `model.py`.
const ANYWHERE: &[(Keys, &str)] = &[
    (
        Keys::Whole(&[
            "alphas_cumprod",
            "alphas_cumprod_prev",
            "betas",
            "sqrt_alphas_cumprod",
            "sqrt_one_minus_alphas_cumprod",
            "log_one_minus_alphas_cumprod",
            "sqrt_recip_alphas_cumprod",
            "sqrt_recipm1_alphas_cumprod",
            "posterior_variance",
            "posterior_log_variance_clipped",
            "posterior_mean_coef1",
            "posterior_mean_coef2",
            "lvlb_weights",
            "model_lvlb_weights",
            "logvar",
            "scale_factor",
            "denoiser.sigmas",
        ]),
        "the noise schedule, which the sampler computes",
    ),
    (
        Keys::Whole(&[
            "v_pred",
            "ztsnr",
            "edm_mean",
            "edm_std",
            "edm_vpred.sigma_max",
            "edm_vpred.sigma_min",
        ]),
        "a marker of what the network predicts, which the sampler uses",
    ),
    (Keys::Whole(&["vae_scale", "vae_shift"]), "the scale of the latents, which the pipeline applies"),
    (Keys::Whole(&["global_step", "epoch"]), "the state of a training run"),
    (Keys::Part(&["loss", "discriminator", "embedding_manager", "optimizer"]), "the state of a training run"),
    (Keys::Last(&["num_batches_tracked"]), "the state of a training run"),
    (Keys::Last(&["position_ids"]), "a table of the numbers 0, 1, 2, …"),
    (Keys::Last(&["attn_mask"]), "a causal mask, which the graph has"),
    (Keys::Last(&["spiece_model", "tokenizer_json"]), "the vocabulary of the tokenizer"),
    (Keys::Last(&["logit_scale"]), "CLIP's temperature, which only its training uses"),
    (Keys::Part(&["vision_model", "visual", "visual_projection"]), "CLIP's image half"),
];

/// Why no network of a pipeline uses a key.
pub(super) fn anywhere(key: &str) -> Option<&'static str> {
    let applies = |keys: &Keys| match keys {
        Keys::Whole(list) => list.contains(&key),
        Keys::Last(list) => key.rsplit('.').next().is_some_and(|last| list.contains(&last)),
        Keys::Part(list) => key.split('.').any(|part| list.contains(&part)),
    };
    ANYWHERE.iter().find(|(keys, _)| applies(keys)).map(|(_, reason)| *reason)
}

/// A condition on what the graph reads.
enum When {
    Always,
    /// It reads no tensor with these prefixes.
    ReadsNone(&'static str),
    /// It reads some of the blocks with these names, and this tensor's block comes after them.
    AfterTheLastRead(&'static str),
    /// The tensor belongs to the network's last block.
    InTheLastBlock(&'static str),
}

struct Rule {
    networks: &'static [Network],
    /// Prefixes of names if they end in a dot or are empty, else whole names; counted from after the block's number for the
    /// last two conditions.
    names: &'static [&'static str],
    when: When,
    reason: &'static str,
}

const LAYERS: &str = "text_model.encoder.layers";
const CLIP: &[Network] = &[Network::Clip, Network::OpenClip];
const VAE: &[Network] = &[Network::Vae, Network::DeepVae, Network::TinyVae];
const LINEAR: &[Network] = &[Network::PixArt, Network::Sana];

/// Parts of networks that a graph may leave out, by the names of diffusers (names outside the table as in the file).
const PARTS: &[Rule] = &[
    Rule {
        networks: VAE,
        names: &["encoder.", "quant_conv."],
        when: When::ReadsNone("encoder."),
        reason: "the encoder; the model is a decoder",
    },
    Rule {
        networks: VAE,
        names: &["decoder.", "post_quant_conv."],
        when: When::ReadsNone("decoder."),
        reason: "the decoder; the model is an encoder",
    },
    Rule {
        networks: CLIP,
        names: &["text_projection."],
        when: When::Always,
        reason: "the projection of the pooled text; the model does not return it",
    },
    Rule {
        networks: CLIP,
        names: &[""],
        when: When::AfterTheLastRead(LAYERS),
        reason: "layers after the one that the model returns (clip skip)",
    },
    Rule {
        networks: CLIP,
        names: &["text_model.final_layer_norm."],
        when: When::Always,
        reason: "the last norm; the model returns what is before it (clip skip)",
    },
    Rule {
        networks: &[Network::T5],
        names: &["decoder.", "lm_head."],
        when: When::Always,
        reason: "T5's decoder; the model is its encoder",
    },
    Rule {
        networks: &[Network::Gemma2],
        names: &["lm_head."],
        when: When::Always,
        reason: "the prediction of words; the model is a text encoder",
    },
    Rule {
        networks: &[Network::Sd3],
        names: &["attn.add_q_proj.", "attn.norm_added_q."],
        when: When::InTheLastBlock("transformer_blocks"),
        reason: "queries of the text in the last block, whose text output nothing uses",
    },
    Rule {
        networks: &[Network::Sd3],
        names: &["pos_embed.pos_embed"],
        when: When::Always,
        reason: "a table of positions made by a formula, which the model has",
    },
    Rule {
        networks: LINEAR,
        names: &["pos_embed", "pos_embed.pos_embed"],
        when: When::Always,
        reason: "a table of positions made by a formula, which the model has",
    },
    Rule {
        networks: LINEAR,
        names: &["y_embedder.y_embedding", "caption_projection.y_embedding"],
        when: When::Always,
        reason: "the caption that training used for none; pipelines encode an empty text",
    },
    Rule {
        networks: LINEAR,
        names: &["logvar_linear."],
        when: When::Always,
        reason: "the weight of the loss in training",
    },
];

/// The rules that apply to one network, given what a graph reads of it.
pub(super) struct Rules(Vec<(&'static Rule, Where)>);

/// Where in a name a rule's names apply.
enum Where {
    /// At its beginning.
    Everywhere,
    /// After the number of these blocks, from this number on.
    Blocks(&'static str, usize),
}

impl Rules {
    /// `read`: the names in the state dict that the graph reads; `all`: all names of the state dict.
    pub(super) fn new<'n>(
        network: Network,
        read: impl Iterator<Item = &'n str> + Clone,
        all: impl Iterator<Item = &'n str> + Clone,
    ) -> Rules {
        let found = PARTS.iter().filter(|rule| rule.networks.contains(&network)).filter_map(|rule| {
            let place = match rule.when {
                When::Always => Where::Everywhere,
                When::ReadsNone(start) => {
                    let mut reads = read.clone().peekable();
                    let other = reads.peek().is_some() && !reads.any(|name| name.starts_with(start));
                    other.then_some(Where::Everywhere)?
                }
                When::AfterTheLastRead(path) => Where::Blocks(path, last_block(read.clone(), path)? + 1),
                When::InTheLastBlock(path) => Where::Blocks(path, last_block(all.clone(), path)?),
            };
            Some((rule, place))
        });
        Rules(found.collect())
    }

    /// Why a tensor that the graph does not read has no effect.
    pub(super) fn harmless(&self, name: &str) -> Option<&'static str> {
        let applies = |(rule, place): &&(&'static Rule, Where)| {
            let fits = |name: &str| {
                rule.names.iter().any(|rule| match rule.is_empty() || rule.ends_with('.') {
                    true => name.starts_with(rule),
                    false => name == *rule,
                })
            };
            match place {
                Where::Everywhere => fits(name),
                Where::Blocks(path, from) => {
                    block_of(name, path).is_some_and(|(number, rest)| number >= *from && fits(rest))
                }
            }
        };
        self.0.iter().find(applies).map(|(rule, _)| rule.reason).or_else(|| anywhere(name))
    }
}

/// `layers.7.a.b` as (7, `a.b`), where `path` is `layers`.
fn block_of<'n>(name: &'n str, path: &str) -> Option<(usize, &'n str)> {
    let (number, rest) = name.strip_prefix(path)?.strip_prefix('.')?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

fn last_block<'n>(names: impl Iterator<Item = &'n str>, path: &str) -> Option<usize> {
    names.filter_map(|name| block_of(name, path)).map(|(number, _)| number).max()
}

/// Parts of networks by name, for messages. The first match in a name counts.
const KNOWN: &[(&str, &str)] = &[
    ("time_text_embed.guidance_embedder.", "the guidance embedding of Flux dev"),
    ("time_embed.guidance_embedder.", "the guidance embedding of Sana Sprint"),
    ("time_embedding.cond_proj.", "the guidance embedding of a latent consistency model"),
    ("distilled_guidance_layer.", "Chroma's guidance network"),
    ("add_embedding.", "the conditioning on sizes and pooled text of SD XL"),
    ("adaln_single.emb.", "the conditioning on resolution and aspect ratio of PixArt alpha"),
    ("encoder_hid_proj.", "the projection of another text encoder (Kolors, IP-Adapter)"),
    ("control_add_embedding.", "the choice of control of a ControlNet Union"),
    ("task_embedding", "the choice of control of a ControlNet Union"),
    ("motion_modules.", "motion modules (AnimateDiff)"),
    ("class_embedding.", "a class embedding"),
    ("label_emb.", "a class embedding"),
    (".attn2.", "further attentions"),
    ("norm_q.", "norms of queries and keys"),
    ("norm_k.", "norms of queries and keys"),
    ("norm_added_", "norms of queries and keys"),
    ("q_norm.", "norms of queries and keys"),
    ("k_norm.", "norms of queries and keys"),
];

/// The part of a network that a tensor belongs to, for messages.
pub(super) fn describe(name: &str) -> &'static str {
    KNOWN
        .iter()
        .find(|(part, _)| name.contains(part))
        .map_or("parts that the model does not have", |(_, is)| is)
}

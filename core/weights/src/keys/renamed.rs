//! Names that diffusers and transformers changed, or use twice.

/// The name of T5's token table in a state dict, and the name it is tied to. Files and graphs have either or both.
pub(crate) const T5_TOKENS: [&str; 2] = ["shared.weight", "encoder.embed_tokens.weight"];

/// The current name of a tensor of an autoencoder's attention, given its name in diffusers' older `AttentionBlock`. diffusers still converts these when it loads a model (`ModelMixin._convert_deprecated_attention_blocks`).
pub(crate) fn modern_vae_attention(name: &str) -> Option<String> {
    let (path, leaf) = name.rsplit_once('.')?;
    let (block, projection) = path.rsplit_once('.')?;
    let new = match projection {
        "query" => "to_q",
        "key" => "to_k",
        "value" => "to_v",
        "proj_attn" => "to_out.0",
        _ => return None,
    };
    block.split('.').any(|part| part == "attentions").then(|| format!("{block}.{new}.{leaf}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_attentions_are_renamed() {
        for (old, new) in [
            (
                "decoder.mid_block.attentions.0.proj_attn.bias",
                Some("decoder.mid_block.attentions.0.to_out.0.bias"),
            ),
            ("attentions.0.query.weight", Some("attentions.0.to_q.weight")),
            ("decoder.mid_block.attentions.0.group_norm.bias", None),
            ("decoder.mid_block.resnets.0.key.bias", None),
            ("key", None),
        ] {
            assert_eq!(modern_vae_attention(old).as_deref(), new, "{old}");
        }
    }
}

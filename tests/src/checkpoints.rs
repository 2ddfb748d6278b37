//! Checkpoints and adapters of full size in layouts found in the wild, with weights by the synthetic rule, for measuring.

use anyhow::{Context, Result};
use sdrun::{
    abi::DType,
    weights::{
        Binding, builtin,
        keys::{self, Network},
        synthetic,
    },
};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

/// A tensor of a file: its key there, its shape, and the name that the rule makes its values from.
type Entry = (String, Vec<usize>, String);

/// Rank of [`lora`].
pub const RANK: usize = 16;

/// Networks of a checkpoint: what each is, its built-in graphs, and the prefix of its keys in files of the original layout.
pub type Networks<'a> = &'a [(Network, &'a [&'a str], &'a str)];

/// Stable Diffusion 1.5.
pub const SD15: Networks<'static> = &[
    (Network::UNet, &["sd15/unet"], "model.diffusion_model."),
    (Network::Vae, &["sd15/vae-decoder", "sd15/vae-encoder"], "first_stage_model."),
    (Network::Clip, &["sd15/text-encoder"], "cond_stage_model.transformer."),
];

/// Stable Diffusion XL.
pub const SDXL: Networks<'static> = &[
    (Network::UNet, &["sdxl/unet"], "model.diffusion_model."),
    (Network::Vae, &["sdxl/vae-decoder", "sdxl/vae-encoder"], "first_stage_model."),
    (Network::Clip, &["sdxl/text-encoder"], "conditioner.embedders.0.transformer."),
    (Network::OpenClip, &["sdxl/text-encoder-2"], "conditioner.embedders.1.model."),
];

/// Stable Diffusion 3.5 medium without T5, in ComfyUI's layout.
pub const SD35: Networks<'static> = &[
    (Network::Sd3, &["sd35/medium"], "model.diffusion_model."),
    (Network::Vae, &["sd3/vae-decoder", "sd3/vae-encoder"], "first_stage_model."),
    (Network::Clip, &["sd3/text-encoder"], "text_encoders.clip_l.transformer."),
    (Network::Clip, &["sdxl/text-encoder-2"], "text_encoders.clip_g.transformer."),
];

/// FLUX.1 schnell with its text encoders, in ComfyUI's layout.
pub const FLUX_SCHNELL: Networks<'static> = &[
    (Network::Flux, &["flux/schnell"], "model.diffusion_model."),
    (Network::Vae, &["flux/vae-decoder", "flux/vae-encoder"], "vae."),
    (Network::Clip, &["sd15/text-encoder"], "text_encoders.clip_l.transformer."),
    (Network::T5, &["t5-xxl"], "text_encoders.t5xxl.transformer."),
];

/// Writes a checkpoint in the original layout of single files, in f16, unless it is there.
pub fn checkpoint(path: &Path, networks: Networks<'_>, tag: &str) -> Result<()> {
    let mut entries = Vec::new();
    for (network, graphs, prefix) in networks {
        let mut shapes = BTreeMap::new();
        for graph in *graphs {
            let builtin = builtin::find(graph).with_context(|| format!("there is no {graph}"))?;
            for tensor in Binding::from_map(&builtin.weight_map()?).tensors {
                let name = tensor.sources.first().context("a weight of no tensor")?.clone();
                shapes.insert(name, tensor.source_shape);
            }
        }
        for pair in keys::pairs(*network, shapes.keys().map(String::as_str)) {
            // Fused tensors have the rows of all of theirs.
            let parts = pair.diffusers.iter().map(|name| shapes.get(name).context("a pair of no tensor"));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let mut shape = parts.first().context("a pair without tensors")?.to_vec();
            if let Some(rows) = shape.first_mut() {
                *rows = parts.iter().filter_map(|part| part.first()).sum();
            }
            entries.push((format!("{prefix}{}", pair.original), shape, pair.diffusers[0].clone()));
        }
    }
    write(path, &entries, tag)
}

/// Writes a LoRA in kohya's form for every linear layer and convolution of the attentions of a network, unless it is there.
pub fn lora(path: &Path, binding: &Binding) -> Result<()> {
    let mut entries = Vec::new();
    for tensor in binding.tensors.iter().filter(|t| t.source_shape.len() > 1) {
        let module = tensor.sources[0].strip_suffix(".weight").filter(|m| m.contains("attentions"));
        let Some(module) = module else { continue };
        let name = format!("lora_unet_{}", module.replace('.', "_"));
        let (rows, rest) = (tensor.source_shape[0], &tensor.source_shape[1..]);
        let down = [&[RANK], rest].concat();
        let up = [&[rows, RANK][..], &vec![1; rest.len() - 1]].concat();
        for (end, shape) in [("lora_down", down), ("lora_up", up)] {
            let key = format!("{name}.{end}.weight");
            entries.push((key.clone(), shape, key));
        }
    }
    write(path, &entries, "lora")
}

/// Writes a safetensors file, tensor by tensor.
fn write(path: &Path, entries: &[Entry], tag: &str) -> Result<()> {
    let mut offset = 0;
    let mut header = Map::new();
    for (key, shape, _) in entries {
        let bytes = shape.iter().product::<usize>() * 2;
        let entry = json!({ "dtype": "F16", "shape": shape, "data_offsets": [offset, offset + bytes] });
        header.insert(key.clone(), entry);
        offset += bytes;
    }
    let header = Value::Object(header).to_string();
    let size = 8 + header.len() as u64 + offset as u64;
    if path.metadata().is_ok_and(|meta| meta.len() == size) {
        return Ok(());
    }
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut buffer = Vec::new();
    for (_, shape, source) in entries {
        buffer.resize(shape.iter().product::<usize>() * 2, 0);
        synthetic::fill(tag, source, shape, DType::F16, &mut buffer)?;
        file.write_all(&buffer)?;
    }
    Ok(file.flush()?)
}

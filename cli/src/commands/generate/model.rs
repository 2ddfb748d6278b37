//! The model, its parts and its adapters.

use crate::{context::Context, parse::LoraArg};
use clap::Args;
use sdrun::{Paths, abi};
use sdrun_diffusion::{
    demo,
    metadata::Record,
    pipeline::{Files, Named, Recipe},
};
use std::path::PathBuf;

#[derive(Args, Clone)]
#[command(next_help_heading = "Model")]
pub(super) struct ModelArgs {
    /// A checkpoint, a diffusers folder, or a folder of ONNX models [default: demo, a small built-in model of coloured shapes]
    #[arg(short, long, value_name = "MODEL")]
    pub(super) model: Option<PathBuf>,

    /// The denoiser alone (UNet or transformer); other parts come from the options below or from MODEL
    #[arg(long, value_name = "FILE")]
    diffusion_model: Option<PathBuf>,

    /// CLIP ViT-L alone
    #[arg(long, alias = "clip_l", value_name = "FILE")]
    clip_l: Option<PathBuf>,

    /// OpenCLIP ViT-bigG (ViT-H for SD 2) alone
    #[arg(long, alias = "clip_g", value_name = "FILE")]
    clip_g: Option<PathBuf>,

    /// T5 alone
    #[arg(long, value_name = "FILE")]
    t5xxl: Option<PathBuf>,

    /// T5's vocabulary, spiece.model or tokenizer.json [default: in T5's file, or a file of that name beside it]
    #[arg(long, value_name = "FILE")]
    t5_vocabulary: Option<PathBuf>,

    /// The language model that is Sana's text encoder, Gemma 2, alone
    #[arg(long, value_name = "FILE")]
    llm: Option<PathBuf>,

    /// Its vocabulary, tokenizer.json [default: a file of that name beside it]
    #[arg(long, value_name = "FILE")]
    llm_vocabulary: Option<PathBuf>,

    /// Another autoencoder
    #[arg(long, value_name = "FILE")]
    vae: Option<PathBuf>,

    /// Apply an adapter (LoRA and its relatives) with this strength, or with TEXT to text encoders [default: 1] (repeatable)
    #[arg(long = "lora", value_name = "FILE[:STRENGTH[:TEXT]]")]
    loras: Vec<LoraArg>,

    /// Folder of adapters that prompts name as <lora:NAME:STRENGTH>
    #[arg(long, alias = "lora-model-dir", value_name = "FOLDER")]
    lora_dir: Option<PathBuf>,

    /// Folder of embeddings (textual inversion) that prompts name by their file's name
    #[arg(long, alias = "embd-dir", value_name = "FOLDER")]
    embedding_dir: Option<PathBuf>,

    /// Draw the last steps with this model: the refiner of SDXL, or another model with the same latents
    #[arg(long, value_name = "FILE")]
    refiner: Option<PathBuf>,

    /// Follow a ControlNet; --control-image gives its picture (repeatable)
    #[arg(long = "control-net", value_name = "FILE")]
    pub(super) control_nets: Vec<PathBuf>,

    /// Enlarge finished pictures with this file of ESRGAN or Real-ESRGAN
    #[arg(long, value_name = "FILE")]
    pub(super) upscale_model: Option<PathBuf>,
}

impl ModelArgs {
    /// The files that the options name. If no model is given, it is the demo model, unless the picture `from` was made with another.
    pub(super) fn recipe(
        &self,
        from: Option<&Record>,
        context: &Context,
        paths: &Paths,
    ) -> anyhow::Result<Recipe> {
        let mut files = Files {
            model: self.model.clone(),
            denoiser: self.diffusion_model.clone(),
            clip_l: self.clip_l.clone(),
            clip_g: self.clip_g.clone(),
            t5: self.t5xxl.clone(),
            t5_vocabulary: self.t5_vocabulary.clone(),
            llm: self.llm.clone(),
            llm_vocabulary: self.llm_vocabulary.clone(),
            autoencoder: self.vae.clone(),
        };
        let vocabularies = Files {
            t5_vocabulary: self.t5_vocabulary.clone(),
            llm_vocabulary: self.llm_vocabulary.clone(),
            ..Files::default()
        };
        if files == vocabularies {
            if let Some(other) = from.and_then(|from| from.model.as_ref()).filter(|it| it.name != demo::NAME)
            {
                let message =
                    format!("the picture was made with the model {}: give its file with --model", other.name);
                return Err(abi::Error::invalid(message).into());
            }
            context.note(
                "no --model: drawing with the demo model, which knows only coloured shapes such as \"a red circle left of a blue square\"",
            );
            files.model = Some(demo::NAME.into());
        }
        let lora = |lora: &LoraArg| Named {
            file: lora.file.clone(),
            strength: lora.strength,
            text_encoder_strength: lora.text_encoder_strength,
        };
        let mut recipe = Recipe {
            files,
            loras: self.loras.iter().map(lora).collect(),
            lora_folders: self.lora_dir.iter().cloned().collect(),
            embedding_folders: self.embedding_dir.iter().cloned().collect(),
            refiner: self.refiner.clone(),
            control_nets: self.control_nets.clone(),
            upscaler: self.upscale_model.clone(),
        };
        recipe.find_demo(paths)?;
        Ok(recipe)
    }
}

//! The model, its parts and its adapters.

use crate::{context::Context, parse::LoraArg};
use clap::Args;
use sdrun::{
    Paths,
    abi::{self, ErrorCode, Host},
};
use sdrun_diffusion::{
    demo,
    metadata::{ControlNet, Lora, ModelFile, Record, Upscale, hash::HashCache},
    pipeline::{self, Files, Named, Parts, Upscaler, Word},
};
use std::path::{Path, PathBuf};

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

/// What the model's options and the prompts name.
pub(super) struct Opened {
    pub(super) parts: Parts,
    /// The prompt without tags.
    pub(super) prompt: String,
    loras: Vec<Named>,
}

impl ModelArgs {
    /// The arguments with paths for the names of the demo model's files. If no model is given, it is the demo model, unless the
    /// picture `from` was made with another. The demo model's adapters can be named in prompts.
    pub(super) fn settled(
        &self,
        from: Option<&Record>,
        context: &Context,
        paths: &Paths,
    ) -> anyhow::Result<Self> {
        let mut args = self.clone();
        let parts = [&self.diffusion_model, &self.clip_l, &self.clip_g, &self.t5xxl, &self.vae];
        if self.model.is_none() && parts.iter().all(|part| part.is_none()) {
            if let Some(other) = from.and_then(|from| from.model.as_ref()).filter(|it| it.name != demo::NAME)
            {
                let message =
                    format!("the picture was made with the model {}: give its file with --model", other.name);
                return Err(abi::Error::invalid(message).into());
            }
            context.note(
                "no --model: drawing with the demo model, which knows only coloured shapes such as \"a red circle left of a blue square\"",
            );
            args.model = Some(demo::NAME.into());
        }
        let files = args.model.iter_mut().chain(&mut args.control_nets);
        for file in files.chain(args.loras.iter_mut().map(|lora| &mut lora.file)) {
            if file.exists() {
                continue;
            }
            if let Some(found) = demo::find(&file.to_string_lossy(), paths)? {
                *file = found;
            }
        }
        let demo_model = args.model.as_deref().filter(|model| demo::is_model(model, paths));
        if let Some(folder) = demo_model.and_then(Path::parent).map(Path::to_path_buf) {
            args.lora_dir.get_or_insert(folder.clone());
            args.embedding_dir.get_or_insert(folder);
        }
        Ok(args)
    }

    /// The file with the denoiser.
    fn file(&self) -> &Path {
        self.diffusion_model.as_deref().or(self.model.as_deref()).unwrap_or(Path::new(""))
    }

    /// Fails if the prompt names an adapter that is not there.
    pub(super) fn check_tags(&self, prompt: &str) -> pipeline::Result<()> {
        pipeline::tagged(prompt, self.lora_dir.as_deref()).map(drop)
    }

    /// Opens everything.
    pub(super) fn open(
        &self,
        prompt: &str,
        negative: &str,
        paths: &Paths,
        host: &dyn Host,
    ) -> anyhow::Result<Opened> {
        let (prompt, tagged) = pipeline::tagged(prompt, self.lora_dir.as_deref())?;
        let files = Files {
            model: self.model.clone(),
            denoiser: self.diffusion_model.clone(),
            clip_l: self.clip_l.clone(),
            clip_g: self.clip_g.clone(),
            t5: self.t5xxl.clone(),
            t5_vocabulary: self.t5_vocabulary.clone(),
            autoencoder: self.vae.clone(),
        };
        let mut parts = Parts::open(&files, paths, host)?;
        let given = self.loras.iter().map(|lora| Named {
            file: lora.file.clone(),
            strength: lora.strength,
            text_encoder_strength: lora.text_encoder_strength,
        });
        let loras: Vec<Named> = given.chain(tagged).collect();
        for Named { file, strength, text_encoder_strength } in &loras {
            parts.add_adapter(file, *strength, *text_encoder_strength)?;
        }
        if let Some(folder) = &self.embedding_dir {
            parts.words = pipeline::words(&[&prompt, negative], folder)?;
        }
        if let Some(file) = &self.refiner {
            parts.add_refiner(file, paths, host)?;
        }
        for file in &self.control_nets {
            parts.add_control(file, paths, host)?;
        }
        if let Some(file) = &self.upscale_model {
            parts.upscaler = Some(Upscaler::open(file, paths, host)?);
        }
        Ok(Opened { parts, prompt: prompt.trim().into(), loras })
    }

    /// Names and hashes of the files, for a picture's metadata. Hashing a large file takes seconds, but only once. A file that cannot
    /// be hashed has no hash.
    pub(super) fn record(&self, opened: &Opened, paths: &Paths, host: &dyn Host) -> Record {
        let hashes = HashCache::of_user(paths);
        let model = |file: &Path| {
            let hash = if file.is_file() { known(hashes.model(file, host)) } else { None };
            ModelFile::new(&file.to_string_lossy(), hash)
        };
        let lora = |Named { file, strength, text_encoder_strength }: &Named| {
            let hash = known(hashes.adapter(file, host));
            Lora::new(&file.to_string_lossy(), hash, *strength, *text_encoder_strength)
        };
        let word = |Word { name, file, .. }: &Word| ModelFile {
            name: name.clone(),
            hash: known(hashes.embedding(file, host)),
        };
        let net = |file: &PathBuf| {
            let ModelFile { name, hash } = model(file);
            ControlNet { name, hash, ..ControlNet::default() }
        };
        let upscale = |(file, upscaler): (&PathBuf, &Upscaler)| {
            let ModelFile { name, hash } = model(file);
            Upscale { name, hash, factor: upscaler.factor(1) }
        };
        Record {
            model: Some(model(self.file())),
            vae: self.vae.as_deref().map(model),
            refiner: self.refiner.as_deref().map(model),
            text_encoders: [&self.clip_l, &self.clip_g, &self.t5xxl]
                .into_iter()
                .flatten()
                .map(|f| model(f))
                .collect(),
            loras: opened.loras.iter().map(lora).collect(),
            embeddings: opened.parts.words.iter().map(word).collect(),
            controlnets: self.control_nets.iter().map(net).collect(),
            upscale: self.upscale_model.as_ref().zip(opened.parts.upscaler.as_ref()).map(upscale),
            ..Record::of_sdrun()
        }
    }
}

/// A hash, if there is one. Says why not, except after a cancel.
fn known(hash: Result<String, abi::Error>) -> Option<String> {
    let fault = |error: &abi::Error| {
        if error.code != ErrorCode::Cancelled {
            tracing::warn!("the picture's metadata lack a hash: {error}");
        }
    };
    hash.inspect_err(fault).ok()
}

//! Checkpoints with real names and shapes on the built-in graphs. Complete ones fit. If something that changes the
//! result would be left out, that is reported.

#![cfg(unix)] // Files of real sizes need a file system with holes.
#![allow(clippy::unwrap_used)]

mod common;

use common::{
    sparse::Sparse,
    tables::{Entry, table},
};
use sdrun_abi::{Error, ErrorCode, WeightSource};
use sdrun_weights::{
    Binding, Checkpoint, Component, WeightStack, builtin,
    checkpoint::Unread,
    keys::{self, Fusion, Naming, Network, Table},
};

fn binding(model: &str) -> Binding {
    Binding::from_map(&builtin::find(model).unwrap().weight_map().unwrap())
}

fn stack(model: &str, file: &Sparse) -> Result<WeightStack, Error> {
    let (_folder, path) = file.file();
    WeightStack::of_checkpoint(
        binding(model),
        &Checkpoint::open(&path).unwrap_or_else(|e| panic!("{model}: {e}")),
    )
}

fn unread(model: &str, file: &Sparse) -> Unread {
    let stack = stack(model, file).unwrap_or_else(|error| panic!("{model}: {error} {:?}", error.hint));
    assert!(stack.unread().left_out.is_empty());
    stack.unread().clone()
}

fn refusal(model: &str, file: &Sparse) -> (String, String) {
    let error = stack(model, file).err().unwrap_or_else(|| panic!("{model} takes it"));
    assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
    assert!(error.file.is_some());
    (error.message.clone(), error.hint.unwrap().to_string())
}

/// Every recorded table of a whole model, in both layouts, on every graph of that model.
#[test]
fn whole_checkpoints_fit_without_a_false_alarm() {
    for (name, models) in [
        ("sd15_unet", &["sd15/unet", "sd15/unet-fp16", "sd15/unet-controlnet"][..]),
        ("sd15_controlnet", &["sd15/controlnet"]),
        (
            "sd15_vae",
            &[
                "sd15/vae-decoder",
                "sd15/vae-encoder",
                "sd15/vae-decoder-dynamo18",
                "sd15/vae-decoder-dynamo23",
                "sdxl/vae-decoder",
                "sdxl/vae-encoder",
            ],
        ),
        ("sd15_text_encoder", &["sd15/text-encoder", "sd15/text-encoder-tf5", "sd15/text-encoder-dynamo23"]),
        ("sdxl_text_encoder", &["sdxl/text-encoder"]),
        ("sdxl_text_encoder_2", &["sdxl/text-encoder-2"]),
        ("sdxl_unet", &["sdxl/unet", "sdxl/unet-controlnet"]),
        ("sd3_medium", &["sd3/medium"]),
        ("sd35_large", &["sd35/large"]),
        ("flux_dev", &["flux/dev"]),
        ("t5xxl", &["t5-xxl", "t5-xxl-masked"]),
    ] {
        let entry = table(name);
        for file in [Sparse::original(&entry, entry.prefix), Sparse::diffusers(&entry)] {
            for model in models {
                let unread = unread(model, &file);
                let expected = match *model {
                    model if model.contains("vae-decoder") => vec!["the encoder; the model is a decoder"],
                    model if model.contains("vae-encoder") => vec!["the decoder; the model is an encoder"],
                    _ => vec![],
                };
                assert_eq!(
                    unread.harmless.keys().copied().collect::<Vec<_>>(),
                    expected,
                    "{model} {unread:?}"
                );
            }
        }
    }
}

/// The state dict of a built-in model under the original implementation's names, from the key table.
fn original_of(model: &str, network: Network) -> Sparse {
    let binding = binding(model);
    let shape = |name: &str| {
        binding
            .tensors
            .iter()
            .find(|t| t.sources == [name])
            .unwrap_or_else(|| panic!("{name}"))
            .source_shape
            .clone()
    };
    let pairs = keys::pairs(network, binding.tensors.iter().map(|tensor| tensor.sources[0].as_str()));
    Sparse::new(pairs.iter().map(|pair| {
        let mut whole = shape(&pair.diffusers[0]);
        if pair.fusion == Fusion::Rows {
            whole[0] = pair.diffusers.iter().map(|name| shape(name)[0]).sum();
        }
        (pair.original.clone(), whole)
    }))
}

/// SD 3 conditions on the projection of its CLIP ViT-L. SD XL's file lacks that projection.
#[test]
fn the_first_text_encoder_of_sd3_has_its_projection() {
    let entry = table("sdxl_text_encoder");
    let prefix = "text_encoders.clip_l.transformer.";
    let tensors = binding("sd3/text-encoder").tensors;
    let bound = tensors.iter().find(|bound| bound.sources == ["text_projection.weight"]).unwrap();
    for (file, projection) in [(Sparse::original(&entry, prefix), prefix), (Sparse::diffusers(&entry), "")] {
        let (_folder, path) = file.file();
        let lacking =
            WeightStack::of_checkpoint(binding("sd3/text-encoder"), &Checkpoint::open(&path).unwrap());
        let error = lacking.unwrap().get(&bound.name).unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound, "{error}");

        let (_folder, path) = file.with(&format!("{projection}text_projection.weight"), &[768, 768]).file();
        let checkpoint = Checkpoint::open(&path).unwrap();
        for model in ["sd3/text-encoder", "sdxl/text-encoder"] {
            let stack = WeightStack::of_checkpoint(binding(model), &checkpoint).unwrap();
            for bound in binding(model).tensors {
                let (_, shape) = stack.describe(&bound.name).unwrap();
                assert_eq!(shape, bound.shape, "{model} {}", bound.name);
            }
            assert_eq!(stack.unread().len(), usize::from(model == "sdxl/text-encoder"), "{model}");
        }
    }
}

/// PixArt and Sana under the names of diffusers' converters, with the extra tensors of the original files.
#[test]
fn pixart_and_sana_fit_in_both_layouts() {
    for (model, network, family, blocks) in
        [("pixart/sigma", Network::PixArt, "pixart", 28), ("sana/1600m", Network::Sana, "sana", 20)]
    {
        let binding = binding(model);
        let diffusers =
            Sparse::new(binding.tensors.iter().map(|t| (t.sources[0].clone(), t.source_shape.clone())));
        assert!(unread(model, &diffusers).is_empty());
        let original = original_of(model, network)
            .with("y_embedder.y_embedding", &[300, 4096])
            .with("pos_embed", &[1, 4096, 1152]);
        let names: Vec<&str> = original.tensors.iter().map(|(name, _)| name.as_str()).collect();
        for name in [
            "x_embedder.proj.weight",
            "y_embedder.y_proj.fc2.bias",
            "t_embedder.mlp.2.weight",
            "t_block.1.bias",
            "final_layer.linear.weight",
            "final_layer.scale_shift_table",
        ] {
            assert!(names.contains(&name), "{model} {name}");
        }
        for part in [
            "scale_shift_table",
            "attn.qkv.weight",
            "attn.proj.bias",
            "cross_attn.q_linear.bias",
            "cross_attn.kv_linear.weight",
        ] {
            assert!(names.contains(&&*format!("blocks.{}.{part}", blocks - 1)), "{model} {part}");
        }
        assert_eq!(keys::identify_network(names.iter().copied()), Some((network, Naming::Original)));
        let table = Table::new(network, Naming::Original, names.iter().copied());
        assert_eq!((table.missing.len(), table.extra.len()), (0, 2), "{:?}", table.missing);
        assert_eq!(unread(model, &original).len(), 2);
        let (_folder, path) = original.file();
        let summary = Checkpoint::open(&path).unwrap().summary();
        assert_eq!(serde_json::to_value(summary.family).unwrap(), family);
        assert_eq!(summary.components[0].missing, [""; 0]);
    }
    // The part that Sigma lacks: the conditioning of PixArt alpha.
    let alpha = original_of("pixart/sigma", Network::PixArt)
        .with("csize_embedder.mlp.0.weight", &[384, 256])
        .with("csize_embedder.mlp.0.bias", &[384]);
    let (message, hint) = refusal("pixart/sigma", &alpha);
    assert!(message.contains("resolution and aspect ratio of PixArt alpha"), "{message}");
    assert!(hint.starts_with("no built-in model fits"), "{hint}");
}

/// The language model as text encoder and whole, and both halves of the autoencoder.
#[test]
fn the_other_networks_of_sana_fit() {
    let sources = |models: &[&str]| -> Vec<(String, Vec<usize>)> {
        let tensors = models.iter().flat_map(|model| binding(model).tensors);
        tensors.map(|t| (t.sources[0].clone(), t.source_shape)).collect()
    };
    let gemma = sources(&["gemma2-2b"]);
    assert!(unread("gemma2-2b", &Sparse::new(gemma.clone())).is_empty());
    let whole = Sparse::new(gemma.into_iter().map(|(name, shape)| (format!("model.{name}"), shape)))
        .with("lm_head.weight", &[256_000, 2304]);
    assert_eq!(unread("gemma2-2b", &whole).len(), 1);
    let vae = Sparse::new(sources(&["sana/vae-encoder", "sana/vae-decoder"]));
    for (model, reason) in [
        ("sana/vae-decoder", "the encoder; the model is a decoder"),
        ("sana/vae-encoder", "the decoder; the model is an encoder"),
    ] {
        assert_eq!(unread(model, &vae).harmless.keys().copied().collect::<Vec<_>>(), [reason]);
    }
    for (file, network, component) in
        [(&whole, Network::Gemma2, Component::TextEncoder), (&vae, Network::DeepVae, Component::Vae)]
    {
        let (_folder, path) = file.file();
        let summary = Checkpoint::open(&path).unwrap().summary();
        let part = &summary.components[0];
        assert_eq!((part.network, part.component, summary.components.len()), (network, component, 1));
        assert!(part.missing.is_empty(), "{:?}", part.missing);
    }
}

fn flux(guidance: bool) -> Sparse {
    Sparse::original(&table("flux_dev"), "").without(|name| !guidance && name.starts_with("guidance_in"))
}

#[test]
fn guidance_embeddings_are_not_dropped() {
    let (message, hint) = refusal("flux/schnell", &flux(true));
    assert!(
        message.contains("4 tensors") && message.contains("the guidance embedding of Flux dev"),
        "{message}"
    );
    assert!(message.contains("time_text_embed.guidance_embedder.linear_1.weight"), "{message}");
    assert_eq!(hint, "use the built-in model flux/dev, or leave out what does not fit");
    assert!(unread("flux/schnell", &flux(false)).is_empty());

    let lcm = Sparse::original(&table("sd15_unet"), "model.diffusion_model.")
        .with("model.diffusion_model.time_embed.cond_proj.weight", &[320, 256]);
    let (message, hint) = refusal("sd15/unet", &lcm);
    assert!(message.contains("a tensor that") && message.contains("latent consistency model"), "{message}");
    assert_eq!(hint, "use the built-in model sd15/unet-lcm, or leave out what does not fit");

    // The caller accepts the loss.
    let (_folder, path) = lcm.file();
    let stack =
        WeightStack::of_checkpoint_lenient(binding("sd15/unet"), &Checkpoint::open(&path).unwrap()).unwrap();
    assert_eq!(stack.unread().left_out, ["time_embedding.cond_proj.weight"]);
    assert!(stack.clone().pristine().unread().len() == 1);
}

#[test]
fn other_input_channels_are_named() {
    let nine = Sparse::original(&table("sd15_unet"), "").shape("input_blocks.0.0.weight", &[320, 9, 3, 3]);
    let (message, hint) = refusal("sd15/unet", &nine);
    assert!(message.contains("9 input channels instead of 4"), "{message}");
    assert_eq!(hint, "use the built-in model sd15/unet-inpainting");
    assert!(unread("sd15/unet-inpainting", &nine).is_empty());
    let (message, _) = refusal("sd15/unet-inpainting", &Sparse::original(&table("sd15_unet"), ""));
    assert!(message.contains("4 input channels instead of 9"), "{message}");
    // A completely different model.
    let (message, hint) = refusal("sd15/unet", &flux(true));
    assert!(message.contains("is Flux, but the model is SD 1.5"), "{message}");
    assert_eq!(hint, "use the built-in model flux/dev, or give a checkpoint of SD 1.5");
}

#[test]
fn further_embeddings_norms_and_blocks_are_named() {
    let unet = || Sparse::original(&table("sd15_unet"), "");
    for (file, model, what) in [
        (unet().with("label_emb.0.0.weight", &[1280, 2816]), "sd15/unet", "sizes and pooled text"),
        (
            unet().with("input_blocks.1.1.transformer_blocks.0.attn1.to_q.bias", &[320]),
            "sd15/unet",
            "does not have",
        ),
        (unet().with("a.new.part", &[1]), "sd15/unet", "a.new.part"),
        (
            Sparse::diffusers(&table("sdxl_unet")).with("encoder_hid_proj.weight", &[2048, 4096]),
            "sdxl/unet",
            "another text encoder",
        ),
        (
            Sparse::diffusers(&table("sd15_controlnet")).with("task_embedding", &[6, 320]),
            "sd15/controlnet",
            "ControlNet Union",
        ),
        // A graph with the first blocks of a model, and the whole model as checkpoint.
        (flux(true), "flux/dev-2x2-layers", "does not have"),
        (
            Sparse::diffusers(&table("t5xxl")),
            "t5-xxl-2-layers",
            "encoder.block.10.layer.0.SelfAttention.k.weight",
        ),
        (
            Sparse::diffusers(&table("sd3_medium")),
            "sd3/medium-4-layers",
            "transformer_blocks.3.norm1_context.",
        ),
    ] {
        let (message, _) = refusal(model, &file);
        assert!(message.contains(what), "{model}: {message}");
    }
    // SD 3.5 medium's second attentions on the graph of SD 3.5 large, which has the same width.
    let mut medium = Sparse::diffusers(&table("sd35_large"));
    for part in ["to_q", "to_k", "to_v", "to_out.0"] {
        let module = format!("transformer_blocks.0.attn2.{part}");
        medium =
            medium.with(&format!("{module}.weight"), &[2432, 2432]).with(&format!("{module}.bias"), &[2432]);
    }
    let (message, _) = refusal("sd35/large", &medium);
    assert!(message.contains("8 tensors") && message.contains("further attentions"), "{message}");
}

/// Files that differ from a recorded one in a few tensors: each fits its own graph, and the graph of the other says so.
#[test]
fn variants_of_a_model_fit_their_own_graphs() {
    let unet = |name| Sparse::original(&table(name), "model.diffusion_model.");
    let nine = |file: Sparse| file.shape("model.diffusion_model.input_blocks.0.0.weight", &[320, 9, 3, 3]);
    let lcm = |file: Sparse| file.with("model.diffusion_model.time_embed.cond_proj.weight", &[320, 256]);
    let flux = |channels| flux(true).shape("img_in.weight", &[3072, channels]);
    let sd2 = |model| original_of(model, Network::UNet);
    for (model, other, file, family, channels, said) in [
        ("sd15/unet-lcm", "sd15/unet", lcm(unet("sd15_unet")), "sd1", 4, "distilled_guidance"),
        ("sdxl/unet-lcm", "sdxl/unet", lcm(unet("sdxl_unet")), "sdxl", 4, "distilled_guidance"),
        ("flux/fill", "flux/dev", flux(384), "flux", 384, "inpainting"),
        ("flux/canny-depth", "flux/dev", flux(128), "flux", 128, "control"),
        ("sdxl/unet-inpainting", "sdxl/unet", nine(unet("sdxl_unet")), "sdxl", 9, "inpainting"),
        ("sd21/unet-inpainting", "sd21/unet", sd2("sd21/unet-inpainting"), "sd2", 9, "inpainting"),
        ("sd21/unet-depth", "sd21/unet", sd2("sd21/unet-depth"), "sd2", 5, "control"),
    ] {
        assert!(unread(model, &file).is_empty(), "{model}");
        let (message, hint) = refusal(other, &file);
        assert!(hint.starts_with(&format!("use the built-in model {model}")), "{model}: {message} {hint}");
        if said != "distilled_guidance" {
            assert!(message.contains(&format!("({channels} input channels instead of")), "{message}");
        }
        let (_folder, path) = file.file();
        let summary = serde_json::to_value(Checkpoint::open(&path).unwrap().summary()).unwrap();
        assert_eq!(
            (&summary["family"], &summary["facts"]["in_channels"]),
            (&family.into(), &channels.into())
        );
        for fact in ["inpainting", "control", "distilled_guidance"] {
            let expected = fact == said || (family == "flux" && fact == "distilled_guidance");
            assert_eq!(summary["facts"][fact], expected, "{model} {fact}");
        }
    }
}

/// Names and shapes of `sd_xl_refiner_1.0.safetensors` and `sd3.5_medium.safetensors`.
#[test]
fn the_refiner_and_sd35_medium_fit() {
    for (model, network, family, keys) in [
        (
            "sdxl/refiner",
            Network::UNet,
            "sdxl_refiner",
            &[
                ("input_blocks.0.0.weight", &[384, 4, 3, 3][..]),
                ("label_emb.0.0.weight", &[1536, 2560]),
                ("input_blocks.4.1.transformer_blocks.3.attn2.to_k.weight", &[768, 1280]),
                ("input_blocks.11.0.in_layers.2.weight", &[1536, 1536, 3, 3]),
                ("middle_block.1.transformer_blocks.3.norm3.bias", &[1536]),
                ("output_blocks.2.1.conv.weight", &[1536, 1536, 3, 3]),
                ("output_blocks.8.2.conv.weight", &[768, 768, 3, 3]),
                ("output_blocks.11.0.skip_connection.weight", &[384, 768, 1, 1]),
            ][..],
        ),
        (
            "sd35/medium",
            Network::Sd3,
            "sd35",
            &[
                ("pos_embed", &[1, 147_456, 1536]),
                ("joint_blocks.0.x_block.adaLN_modulation.1.weight", &[13824, 1536]),
                ("joint_blocks.12.x_block.attn2.qkv.weight", &[4608, 1536]),
                ("joint_blocks.12.x_block.attn2.ln_k.weight", &[64]),
                ("joint_blocks.13.x_block.adaLN_modulation.1.weight", &[9216, 1536]),
                ("joint_blocks.23.context_block.adaLN_modulation.1.weight", &[3072, 1536]),
                ("final_layer.adaLN_modulation.1.bias", &[3072]),
            ],
        ),
    ] {
        let mut file = original_of(model, network);
        for (name, shape) in keys {
            let found = file.tensors.iter().find(|(key, _)| key == name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(found.1, *shape, "{name}");
        }
        for (name, _) in &mut file.tensors {
            name.insert_str(0, "model.diffusion_model.");
        }
        assert!(unread(model, &file).is_empty(), "{model}");
        let (_folder, path) = file.file();
        let summary = Checkpoint::open(&path).unwrap().summary();
        assert_eq!(serde_json::to_value(summary.family).unwrap(), family);
        assert!(summary.components[0].missing.is_empty() && summary.components[0].extra.is_empty());
    }
    let (message, hint) = refusal("sdxl/unet", &original_of("sdxl/refiner", Network::UNet));
    assert!(message.contains("is SDXL refiner, but the model is SDXL"), "{message}");
    assert!(hint.starts_with("use the built-in model sdxl/refiner"), "{hint}");
    let (message, hint) = refusal("sd3/medium", &original_of("sd35/medium", Network::Sd3));
    assert!(message.contains("is SD 3.5, but the model is SD 3"), "{message}");
    assert!(hint.starts_with("use the built-in model sd35/medium"), "{hint}");
}

/// An ESRGAN under the names of Real-ESRGAN.
fn esrgan(blocks: usize, channels: usize) -> Sparse {
    let mut modules = vec![("conv_first".to_string(), 64, channels), ("conv_body".into(), 64, 64)];
    for block in 0..blocks {
        for dense in 1..=3 {
            modules.extend((1..=5).map(|conv| {
                let out = if conv == 5 { 64 } else { 32 };
                (format!("body.{block}.rdb{dense}.conv{conv}"), out, 32 + 32 * conv)
            }));
        }
    }
    modules.extend(["conv_up1", "conv_up2", "conv_hr"].map(|name| (name.into(), 64, 64)));
    modules.push(("conv_last".into(), 3, 64));
    Sparse::new(modules.into_iter().flat_map(|(name, out, inputs)| {
        [(format!("{name}.weight"), vec![out, inputs, 3, 3]), (format!("{name}.bias"), vec![out])]
    }))
}

/// The same file under the names of ESRGAN's first release and of its second, which BSRGAN has too.
fn esrgan_as(renamed: &str, blocks: usize, file: &Sparse) -> Sparse {
    let old = |name: &str| {
        let (module, part) = name.rsplit_once('.').unwrap();
        let number = match module {
            "conv_first" => "0".into(),
            "conv_body" => format!("1.sub.{blocks}"),
            "conv_up1" => "3".into(),
            "conv_up2" => "6".into(),
            "conv_hr" => "8".into(),
            "conv_last" => "10".into(),
            block => format!("{}.0", block.replace("body", "1.sub").replace("rdb", "RDB")),
        };
        format!("model.{number}.{part}")
    };
    let trunk = |name: &str| {
        let new = name.replace("body.", "RRDB_trunk.").replace("conv_RRDB_trunk", "trunk_conv");
        let new = new.replace("rdb", "RDB").replace("conv_up", "upconv").replace("conv_hr", "HRconv");
        assert_eq!(name.contains("conv_last") || name.contains("conv_first"), new == name);
        new
    };
    let tensors = file
        .tensors
        .iter()
        .map(|(name, shape)| (if renamed == "old" { old(name) } else { trunk(name) }, shape.clone()));
    Sparse::new(tensors.collect::<Vec<_>>())
}

#[test]
fn upscalers_fit_under_every_name() {
    for (model, blocks, channels) in
        [("esrgan/x4", 23, 3), ("esrgan/x4-6-blocks", 6, 3), ("esrgan/x2", 23, 12)]
    {
        let file = esrgan(blocks, channels);
        for file in [esrgan_as("old", blocks, &file), esrgan_as("trunk", blocks, &file), file] {
            assert!(unread(model, &file).is_empty(), "{model}");
            let (_folder, path) = file.file();
            let checkpoint = Checkpoint::open(&path).unwrap();
            let stack = WeightStack::of_checkpoint(binding(model), &checkpoint).unwrap();
            for bound in binding(model).tensors {
                assert_eq!(stack.describe(&bound.name).unwrap().1, bound.shape, "{model} {}", bound.name);
            }
            let summary = checkpoint.summary();
            assert_eq!(summary.family.unwrap().to_string(), "ESRGAN");
            let part = &summary.components[0];
            assert_eq!((part.component, part.network), (Component::Upscaler, Network::Esrgan));
            assert_eq!((part.missing.len(), part.extra.len()), (0, 0), "{part:?}");
        }
    }
    let (message, hint) = refusal("esrgan/x4", &esrgan(23, 12));
    assert!(message.contains("12 input channels instead of 3"), "{message}");
    assert_eq!(hint, "use the built-in model esrgan/x2");
    let (_, hint) = refusal("esrgan/x4-6-blocks", &esrgan(23, 3));
    assert!(hint.starts_with("use the built-in model esrgan/x4"), "{hint}");
}

fn without(mut binding: Binding, unwanted: impl Fn(&str) -> bool) -> Binding {
    binding.tensors.retain(|tensor| !tensor.sources.iter().any(|name| unwanted(name)));
    binding
}

/// Parts that graphs leave out on purpose.
#[test]
fn parts_that_change_nothing_are_told_by_their_reason() {
    let reasons = |binding: Binding, file: &Sparse| -> Vec<(&'static str, usize)> {
        let (_folder, path) = file.file();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let stack = WeightStack::of_checkpoint(binding, &checkpoint).unwrap();
        stack.unread().harmless.iter().map(|(reason, names)| (*reason, names.len())).collect()
    };
    // Clip skip: the graph lacks the last layer and the final norm. Another export has the projection.
    let clip = Sparse::diffusers(&table("sd15_text_encoder")).with("text_projection.weight", &[768, 768]);
    let skipping = |name: &str| name.contains("layers.11.") || name.contains("final_layer_norm");
    let found = reasons(without(binding("sd15/text-encoder"), skipping), &clip);
    let counts: Vec<usize> = found.iter().map(|(_, count)| *count).collect();
    assert_eq!(counts, [16, 2, 1], "{found:?}");
    // Leaving out a layer in the middle is not a clip skip.
    let (_folder, path) = clip.file();
    let broken = without(binding("sd15/text-encoder"), |name| name.contains("layers.5."));
    let error = WeightStack::of_checkpoint(broken, &Checkpoint::open(&path).unwrap()).err().unwrap();
    assert!(error.message.contains("16 tensors"), "{error}");
    // A weight that the import did not recognise looks the same.
    assert!(error.hint.unwrap().to_string().contains("import the model"));

    // A complete T5, and a CLIP with its image half and training state.
    let t5 = Sparse::diffusers(&table("t5xxl"))
        .with("lm_head.weight", &[32128, 4096])
        .with("decoder.block.0.layer.1.EncDecAttention.q.weight", &[4096, 4096]);
    assert_eq!(reasons(binding("t5-xxl"), &t5), [("T5's decoder; the model is its encoder", 2)]);
    let clip = Sparse::diffusers(&table("sd15_text_encoder"))
        .with("text_model.embeddings.position_ids", &[1, 77])
        .with("vision_model.x.weight", &[1])
        .with("logit_scale", &[1]);
    assert_eq!(reasons(binding("sd15/text-encoder"), &clip), []);

    // A graph may leave out a whole half of the autoencoder, but not a part of one half.
    let vae = Sparse::diffusers(&table("sd15_vae"));
    let (_folder, path) = vae.file();
    let broken = without(binding("sd15/vae-decoder"), |name| name.starts_with("decoder.conv_out"));
    let error = WeightStack::of_checkpoint(broken, &Checkpoint::open(&path).unwrap()).err().unwrap();
    assert!(error.message.contains("decoder.conv_out.bias"), "{error}");
    // Only the last block of SD 3 has unused queries.
    let sd3 = Sparse::diffusers(&table("sd3_medium"));
    let last = |name: &str| name.starts_with("transformer_blocks.23.attn.add_q_proj.");
    let reason = "queries of the text in the last block, whose text output nothing uses";
    assert_eq!(reasons(without(binding("sd3/medium"), last), &sd3), [(reason, 2)]);
    let (_folder, path) = sd3.file();
    let broken =
        without(binding("sd3/medium"), |name| name.starts_with("transformer_blocks.7.attn.add_q_proj."));
    let error = WeightStack::of_checkpoint(broken, &Checkpoint::open(&path).unwrap()).err().unwrap();
    assert!(error.message.contains("transformer_blocks.7.attn.add_q_proj.bias"), "{error}");
}

/// A single file of a whole pipeline, with everything that trainers leave in it.
#[test]
fn state_of_training_and_markers_are_ignored() {
    let (unet, vae): (Entry, Entry) = (table("sd15_unet"), table("sd15_vae"));
    let mut file = Sparse::original(&unet, unet.prefix);
    file.tensors.extend(Sparse::original(&vae, vae.prefix).tensors);
    for name in [
        "alphas_cumprod",
        "v_pred",
        "ztsnr",
        "model_ema.decay",
        "first_stage_model.loss.discriminator.main.0.weight",
        "first_stage_model.discriminator.bn.num_batches_tracked",
        "optimizer.state.0",
        "cond_stage_model.transformer.text_model.embeddings.position_ids",
    ] {
        file = file.with(name, &[1]);
    }
    assert!(unread("sd15/unet", &file).is_empty());
    assert_eq!(unread("sd15/vae-decoder", &file).harmless.len(), 1);
}

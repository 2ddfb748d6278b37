//! ComfyUI's graph of nodes in its API format.
//!
//! A graph can compute anything. This reads the common form: one sampler, whose inputs lead to a checkpoint, two prompts and an
//! empty latent. It skips other nodes on the way and notes them.

mod graph;

use super::{ControlNet, Error, Lora, ModelFile, Reading, Record, Rng};
use crate::{names, prediction::Prediction, program::Program};
use graph::{Graph, MOST_LINKS, Node};
use serde_json::Value;

/// Reads a graph. `None` if it is not one.
pub(super) fn read(json: &Value) -> Option<Result<Reading, Error>> {
    let graph = Graph::new(json)?;
    let record = Record {
        program: "ComfyUI".into(),
        seed_like: Some(Program::ComfyUi),
        rng: Some(Rng::Cpu),
        ..Record::default()
    };
    Some(Reader { graph, record, unread: Vec::new() }.read())
}

struct Reader<'a> {
    graph: Graph<'a>,
    record: Record,
    unread: Vec<String>,
}

const LATENTS: &[&str] = &["samples", "latent", "latent_image"];

impl<'a> Reader<'a> {
    fn read(mut self) -> Result<Reading, Error> {
        let graph = self.graph;
        let sampler = self.sampler()?;
        let record = &mut self.record;
        record.seed = graph.whole(sampler, "seed").or_else(|| graph.whole(sampler, "noise_seed"));
        record.steps = graph.whole(sampler, "steps").and_then(|steps| usize::try_from(steps).ok());
        record.cfg_scale = graph.real(sampler, "cfg");
        record.denoising_strength = graph.real(sampler, "denoise").filter(|&strength| strength < 1.0);
        self.record.sampler = self.name(sampler, "sampler_name", names::sampler).map(|(sampler, _)| sampler);
        self.record.schedule = self.name(sampler, "scheduler", names::schedule);
        if graph.whole(sampler, "start_at_step").is_some_and(|start| start > 0) {
            self.pass(sampler, "does only the last steps");
        }
        self.model(sampler);
        self.record.prompt = self.prompt(sampler, "positive");
        self.record.negative = self.prompt(sampler, "negative");
        self.latent(sampler);
        if let [vae] = *graph.all(|node| node.class == "VAELoader") {
            self.record.vae = self.file(vae, "vae_name");
        }
        // They were met from the sampler on, which is the last to use them.
        self.record.loras.reverse();
        self.record.controlnets.reverse();
        Ok(Reading { record: self.record, unread: self.unread })
    }

    /// The sampler of the first pass.
    fn sampler(&mut self) -> Result<Node<'a>, Error> {
        let is_sampler = |node: &Node<'a>| ["KSampler", "KSamplerAdvanced"].contains(&node.class);
        let all = self.graph.all(is_sampler);
        let first: Vec<Node<'a>> = match all.len() {
            1 => all.clone(),
            _ => all.iter().copied().filter(|&node| self.starts_empty(node, is_sampler)).collect(),
        };
        let [sampler] = *first else {
            let why = match all.len() {
                0 => "its graph has no node KSampler or KSamplerAdvanced".into(),
                count => format!("its graph has {count} samplers, and none is clearly the first"),
            };
            return Err(Error::Unreadable { program: "ComfyUI", why });
        };
        for other in all.into_iter().filter(|node| node.id != sampler.id) {
            self.pass(other, "is a further pass, which is not supported");
        }
        Ok(sampler)
    }

    /// Whether a sampler's latent leads to an empty one without another sampler on the way.
    fn starts_empty(&self, sampler: Node<'a>, is_sampler: impl Fn(&Node<'a>) -> bool) -> bool {
        let mut chain = std::iter::successors(self.graph.link(sampler, LATENTS), |(node, _)| {
            self.graph.link(*node, LATENTS)
        });
        let end = chain
            .by_ref()
            .take(MOST_LINKS)
            .find(|(node, _)| node.class.starts_with("Empty") || is_sampler(node));
        end.is_some_and(|(node, _)| !is_sampler(&node))
    }

    /// Notes a node that is skipped.
    fn pass(&mut self, node: Node<'a>, what: &str) {
        let sentence = format!("the node {} ({}) {what}", node.class, node.id);
        if !self.unread.contains(&sentence) {
            self.unread.push(sentence);
        }
    }

    fn unknown(&mut self, node: Node<'a>) {
        self.pass(node, "is unknown");
    }

    /// A name that sdrun knows too.
    fn name<T>(&mut self, node: Node<'a>, input: &str, find: impl Fn(&str) -> Option<T>) -> Option<T> {
        let name = self.graph.text(node, input)?;
        let found = find(name);
        if found.is_none() {
            self.pass(node, &format!("has the {input} `{name}`, which sdrun does not have"));
        }
        found
    }

    fn file(&mut self, node: Node<'a>, input: &str) -> Option<ModelFile> {
        Some(ModelFile::new(self.graph.text(node, input)?, None))
    }

    /// Follows the model from the sampler to the checkpoint.
    fn model(&mut self, sampler: Node<'a>) {
        let graph = self.graph;
        let mut next = graph.link(sampler, &["model"]);
        for _ in 0..MOST_LINKS {
            let Some((node, _)) = next else { break };
            match node.class {
                "CheckpointLoaderSimple" => self.record.model = self.file(node, "ckpt_name"),
                "UNETLoader" | "UnetLoaderGGUF" => self.record.model = self.file(node, "unet_name"),
                "LoraLoader" | "LoraLoaderModelOnly" => self.lora(node),
                "RescaleCFG" => self.record.cfg_rescale = graph.real(node, "multiplier"),
                "ModelSamplingDiscrete" => {
                    let prediction = |name: &str| match name {
                        "eps" => Some(Prediction::Noise),
                        "v_prediction" => Some(Prediction::Velocity),
                        _ => None,
                    };
                    self.record.prediction = self.name(node, "sampling", prediction);
                }
                _ => self.unknown(node),
            }
            next = graph.link(node, &["model"]);
        }
        if self.record.model.is_none() {
            self.pass(sampler, "does not lead to a checkpoint");
        }
    }

    fn lora(&mut self, node: Node<'a>) {
        let (Some(file), Some(strength)) =
            (self.file(node, "lora_name"), self.graph.real(node, "strength_model"))
        else {
            return self.unknown(node);
        };
        let text = self.graph.real(node, "strength_clip").unwrap_or_default();
        self.record.loras.push(Lora::new(&file.name, None, strength as f32, text as f32));
    }

    /// Follows the conditioning of a sampler to the prompt.
    fn prompt(&mut self, sampler: Node<'a>, input: &str) -> String {
        let graph = self.graph;
        let mut next = graph.link(sampler, &[input]);
        for _ in 0..MOST_LINKS {
            let Some((node, output)) = next else { break };
            // Nodes for both conditionings have the negative one second.
            let side = if output == 1 { "negative" } else { "positive" };
            match node.class {
                "CLIPTextEncode" => return self.encoded(node, &["text"], input),
                "CLIPTextEncodeSDXL" => return self.encoded(node, &["text_g", "text_l"], input),
                "CLIPTextEncodeSD3" => return self.encoded(node, &["t5xxl", "clip_g", "clip_l"], input),
                "CLIPTextEncodeFlux" => {
                    self.record.guidance = graph.real(node, "guidance").or(self.record.guidance);
                    return self.encoded(node, &["t5xxl", "clip_l"], input);
                }
                "ConditioningZeroOut" => return String::new(),
                "FluxGuidance" => {
                    self.record.guidance = graph.real(node, "guidance").or(self.record.guidance)
                }
                "ControlNetApply" | "ControlNetApplyAdvanced" | "ControlNetApplySD3"
                    if input == "positive" =>
                {
                    self.controlnet(node)
                }
                "ControlNetApply" | "ControlNetApplyAdvanced" | "ControlNetApplySD3" => {}
                _ => self.unknown(node),
            }
            next = graph.link(node, &["conditioning", side, "conditioning_1", "conditioning_to"]);
        }
        self.pass(sampler, &format!("has no {input} prompt that sdrun finds"));
        String::new()
    }

    /// The text of a node that encodes it.
    fn encoded(&mut self, node: Node<'a>, inputs: &[&str], side: &str) -> String {
        let texts: Vec<&str> = inputs.iter().filter_map(|input| self.graph.text(node, input)).collect();
        if texts.len() < inputs.len() {
            self.pass(node, "gets its text from a node that is unknown");
        } else if texts.iter().any(|text| *text != texts[0]) {
            self.pass(node, "has a different text for each text encoder, and only the first is used");
        }
        if side == "positive" {
            self.text_encoders(node);
        }
        texts.first().copied().unwrap_or_default().into()
    }

    fn text_encoders(&mut self, encode: Node<'a>) {
        let mut next = self.graph.link(encode, &["clip"]);
        for _ in 0..MOST_LINKS {
            let Some((node, _)) = next else { return };
            match node.class {
                "CLIPSetLastLayer" => {
                    let layer = self
                        .graph
                        .real(node, "stop_at_clip_layer")
                        .filter(|layer| (-99.0..=-1.0).contains(layer));
                    self.record.clip_skip = layer.map(|layer| -layer as usize);
                }
                // Adapters were met on the way of the model.
                "CheckpointLoaderSimple" | "LoraLoader" => {}
                "CLIPLoader" | "CLIPLoaderGGUF" | "DualCLIPLoader" | "DualCLIPLoaderGGUF"
                | "TripleCLIPLoader" => {
                    for input in ["clip_name", "clip_name1", "clip_name2", "clip_name3"] {
                        let file = self.file(node, input);
                        self.record.text_encoders.extend(file);
                    }
                }
                _ => self.unknown(node),
            }
            next = self.graph.link(node, &["clip"]);
        }
    }

    fn controlnet(&mut self, node: Node<'a>) {
        let loader = self.graph.link(node, &["control_net"]);
        let Some(file) = loader.and_then(|(loader, _)| self.file(loader, "control_net_name")) else {
            return self.unknown(node);
        };
        let number = |input: &str, usual: f64| self.graph.real(node, input).unwrap_or(usual);
        let (strength, start, end) =
            (number("strength", 1.0), number("start_percent", 0.0), number("end_percent", 1.0));
        self.record.controlnets.push(ControlNet { name: file.name, hash: None, strength, start, end });
    }

    /// Follows the latent from the sampler to an empty one.
    fn latent(&mut self, sampler: Node<'a>) {
        let mut next = self.graph.link(sampler, LATENTS);
        for _ in 0..MOST_LINKS {
            let Some((node, _)) = next else { break };
            if node.class.starts_with("Empty") {
                let size =
                    |input: &str| self.graph.whole(node, input).and_then(|size| usize::try_from(size).ok());
                (self.record.width, self.record.height) = (size("width"), size("height"));
                if self.graph.whole(node, "batch_size").is_some_and(|count| count > 1) {
                    self.pass(
                        node,
                        "makes a batch, whose pictures after the first have no seed of their own",
                    );
                }
                return;
            }
            if node.class.starts_with("VAEEncode") {
                return self.pass(node, "starts from a picture, which the metadata does not hold");
            }
            self.unknown(node);
            next = self.graph.link(node, LATENTS);
        }
        self.pass(sampler, "does not lead to an empty latent, so that the size is unknown");
    }
}

//! What clients of A1111's API ask for.

use super::Settings;
use crate::api::controlnet::module;
use crate::{
    fault::Fault,
    library::Library,
    order::{any_seed, between, recipe},
    pictures,
    task::{Draw, Output},
};
use sdrun_diffusion::{
    noise::Variation,
    picture::{Fit, Mask},
    pipeline::{Content, HintPicture, Inpaint, Recipe, Request, Second, Size, Start, Wanted, named},
    program::Program,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Settings of `txt2img` and `img2img`. Null and absent mean the usual value; settings that are not listed have no effect.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(in crate::api) struct Wish {
    prompt: Option<String>,
    negative_prompt: Option<String>,
    seed: Option<i64>,
    subseed: Option<i64>,
    subseed_strength: Option<f64>,
    batch_size: Option<usize>,
    n_iter: Option<usize>,
    steps: Option<usize>,
    cfg_scale: Option<f64>,
    distilled_cfg_scale: Option<f64>,
    width: Option<usize>,
    height: Option<usize>,
    sampler_name: Option<String>,
    sampler_index: Option<String>,
    scheduler: Option<String>,
    #[schema(value_type = Option<Object>)]
    pub(super) override_settings: Map<String, Value>,
    override_settings_restore_afterwards: Option<bool>,
    pub(super) send_images: Option<bool>,
    pub(super) force_task_id: Option<String>,
    restore_faces: Option<bool>,
    tiling: Option<bool>,
    script_name: Option<String>,
    #[schema(value_type = Option<Object>)]
    alwayson_scripts: Map<String, Value>,
    refiner_checkpoint: Option<String>,
    refiner_switch_at: Option<f64>,
    enable_hr: Option<bool>,
    hr_scale: Option<f64>,
    hr_upscaler: Option<String>,
    hr_second_pass_steps: Option<usize>,
    hr_resize_x: Option<usize>,
    hr_resize_y: Option<usize>,
    denoising_strength: Option<f64>,
    init_images: Vec<String>,
    ref_images: Vec<String>,
    mask: Option<String>,
    mask_blur: Option<f32>,
    mask_blur_x: Option<f32>,
    inpainting_fill: Option<i64>,
    #[schema(value_type = Option<bool>)]
    inpaint_full_res: Value,
    inpaint_full_res_padding: Option<u32>,
    #[schema(value_type = Option<bool>)]
    inpainting_mask_invert: Value,
    resize_mode: Option<i64>,
}

/// A picture for a ControlNet.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Unit {
    enabled: Option<bool>,
    image: Value,
    input_image: Value,
    module: Option<String>,
    model: Option<String>,
    weight: Option<f64>,
    resize_mode: Value,
    guidance_start: Option<f64>,
    guidance_end: Option<f64>,
    threshold_a: Option<f64>,
    threshold_b: Option<f64>,
}

impl Wish {
    /// Reads the settings. Null is as good as absent.
    pub(super) fn read(sent: &Map<String, Value>) -> Result<Self, Fault> {
        let given = sent.iter().filter(|(_, value)| !value.is_null());
        let given: Map<String, Value> = given.map(|(name, value)| (name.clone(), value.clone())).collect();
        serde_json::from_value(Value::Object(given))
            .map_err(|why| Fault::invalid(format!("the settings of the request cannot be read: {why}")))
    }

    /// Whether the settings that it overrides stay so.
    pub(super) fn keeps_settings(&self) -> bool {
        self.override_settings_restore_afterwards == Some(false)
    }

    /// The task for it.
    pub(super) fn draw(
        &self,
        library: &Library,
        settings: &Settings,
        from_picture: bool,
    ) -> Result<Draw, Fault> {
        self.refuse_what_is_missing()?;
        let mut recipe =
            recipe(library, settings.model(), settings.vae(library)?.as_deref(), &settings.modules()?)?;
        let named =
            |name: &Option<String>| name.clone().filter(|name| !["", "None"].contains(&name.as_str()));
        if let Some(name) = named(&self.refiner_checkpoint) {
            recipe.refiner = Some(library.model(&name)?.path);
        }
        let hints = self.controls(library, &mut recipe)?;
        let name = named(&self.sampler_name).or(named(&self.sampler_index));
        let (sampler, usual) = name.as_deref().map(named::sampler).transpose()?.unzip();
        let plain = |name: &String| !["automatic", "n/a"].contains(&name.to_lowercase().as_str());
        let chosen = named(&self.scheduler).filter(plain);
        let chosen = chosen.as_deref().map(named::schedule).transpose()?;
        let seed = |number: Option<i64>| number.and_then(|n| u64::try_from(n).ok()).unwrap_or_else(any_seed);
        let strength = self.subseed_strength.filter(|strength| *strength != 0.0);
        let many = |number: Option<usize>| number.unwrap_or(1).max(1);
        let start = if from_picture { Some(self.begin()?) } else { None };
        let request = Request {
            prompt: self.prompt.clone().unwrap_or_default(),
            negative: self.negative_prompt.clone().unwrap_or_default(),
            width: self.width,
            height: self.height,
            steps: self.steps,
            scale: self.cfg_scale,
            distilled_guidance: self.distilled_cfg_scale,
            sampler,
            schedule: chosen.or(usual.flatten()),
            seed: seed(self.seed),
            variation: strength.map(|strength| Variation { seed: seed(self.subseed), strength }),
            count: many(self.batch_size).saturating_mul(many(self.n_iter)),
            clip_skip: settings.clip_skip()?,
            refiner_start: recipe.refiner.as_ref().and(self.refiner_switch_at),
            references: pictures::rgb_all("ref_images", &self.ref_images)?,
            // Who speaks A1111's language expects its pictures.
            like: Some(Program::A1111),
            rng: Some(settings.rng()?),
            start,
            ..Request::default()
        };
        let second = match self.enable_hr {
            Some(true) if !from_picture => Some(self.second(&mut recipe, library)?),
            _ => None,
        };
        let output = Output { format: settings.format()?, quality: settings.quality(), previews: true };
        let wanted = Wanted { request, edit: None, hints, second, repeats: None };
        let draw = Draw { recipe, wanted, output };
        draw.check()?;
        Ok(draw)
    }

    /// What A1111 and its extensions do and sdrun does not would be missing silently.
    fn refuse_what_is_missing(&self) -> Result<(), Fault> {
        if self.restore_faces == Some(true) {
            return Err(Fault::unsupported("sdrun cannot restore faces: turn `restore_faces` off"));
        }
        if self.tiling == Some(true) {
            return Err(Fault::unsupported("sdrun cannot draw textures that tile: turn `tiling` off"));
        }
        if let Some(name) = self.script_name.as_ref().filter(|name| !["", "None"].contains(&name.as_str())) {
            return Err(Fault::unsupported(format!("there is no script {name:?}")));
        }
        let other = self.alwayson_scripts.iter().find(|(name, script)| {
            let used = script.get("args").and_then(Value::as_array).is_none_or(|args| !args.is_empty());
            !name.eq_ignore_ascii_case("controlnet") && used
        });
        match other {
            Some((name, _)) => Err(Fault::unsupported(format!("there is no script {name:?}"))),
            None => Ok(()),
        }
    }

    fn begin(&self) -> Result<Start, Fault> {
        let [picture] = &self.init_images[..] else {
            let message = format!("init_images has {} pictures: send one", self.init_images.len());
            return Err(Fault::invalid(message));
        };
        let read = pictures::decode("init_images", picture)?;
        let mask = match self.mask.as_deref().filter(|mask| !mask.is_empty()) {
            Some(mask) => {
                let mask = Mask::new(pictures::decode("mask", mask)?.mask());
                // A1111 takes masks of another size.
                let (width, height) = (read.image().width(), read.image().height());
                Some(
                    Fit::Stretch
                        .mask(&mask, width, height)
                        .map_err(sdrun_diffusion::pipeline::Error::from)?,
                )
            }
            None => read.erased().map(Mask::new),
        };
        let mask =
            mask.map(|mask| if is_true(&self.inpainting_mask_invert) { mask.inverted() } else { mask });
        let content = match self.inpainting_fill.unwrap_or(1) {
            0 => Content::Surroundings,
            2 => Content::Noise,
            3 => Content::Nothing,
            _ => Content::Original,
        };
        let fit = match self.resize_mode.unwrap_or(0) {
            1 => Fit::Crop,
            2 => Fit::Fill,
            _ => Fit::Stretch,
        };
        let full = is_true(&self.inpaint_full_res);
        let only_masked = full.then(|| self.inpaint_full_res_padding.unwrap_or(0));
        let blur = self.mask_blur.or(self.mask_blur_x).unwrap_or(4.0);
        let inpaint = mask.map(|mask| Inpaint { mask, blur, content, only_masked });
        Ok(Start { picture: read.rgb(), fit, strength: self.denoising_strength.unwrap_or(0.75), inpaint })
    }

    fn second(&self, recipe: &mut Recipe, library: &Library) -> Result<Second, Fault> {
        let upscale = between(recipe, library, self.hr_upscaler.as_deref().unwrap_or("Latent"))?;
        let size = match (self.hr_resize_x.unwrap_or(0), self.hr_resize_y.unwrap_or(0)) {
            (0, 0) => Size::Factor(self.hr_scale.unwrap_or(2.0)),
            (width, height) if width > 0 && height > 0 => Size::Pixels(width, height),
            _ => return Err(Fault::invalid("hr_resize_x and hr_resize_y go together: send both")),
        };
        let steps = self.hr_second_pass_steps.filter(|steps| *steps > 0);
        Ok(Second { size, steps, strength: self.denoising_strength.unwrap_or(0.7), upscale })
    }

    fn controls(&self, library: &Library, recipe: &mut Recipe) -> Result<Vec<HintPicture>, Fault> {
        let script = self.alwayson_scripts.iter().find(|(name, _)| name.eq_ignore_ascii_case("controlnet"));
        let args =
            script.and_then(|(_, script)| script.get("args")).cloned().unwrap_or(Value::Array(Vec::new()));
        let units: Vec<Map<String, Value>> = serde_json::from_value(args)
            .map_err(|why| Fault::invalid(format!("the arguments of ControlNet are not units: {why}")))?;
        let mut controls = Vec::new();
        for mut unit in units {
            unit.retain(|_, value| !value.is_null());
            let unit: Unit = serde_json::from_value(Value::Object(unit))
                .map_err(|why| Fault::invalid(format!("a unit of ControlNet is wrong: {why}")))?;
            // Clients name a model in each unit that they mean, and most leave `enabled` out.
            let model = unit.model.as_deref().filter(|name| !["", "None"].contains(name));
            let Some(model) = model.filter(|_| unit.enabled != Some(false)) else { continue };
            recipe.control_nets.push(library.control_net(model)?.path);
            controls.push(unit.hinted(self.init_images.first())?);
        }
        Ok(controls)
    }
}

impl Unit {
    /// `other` is used if the unit has no picture.
    fn hinted(&self, other: Option<&String>) -> Result<HintPicture, Fault> {
        let text = [&self.image, &self.input_image].into_iter().find_map(|value| match value {
            Value::String(text) if !text.is_empty() => Some(text.as_str()),
            Value::Object(pair) => pair.get("image")?.as_str(),
            Value::Array(pair) => pair.first()?.as_str(),
            _ => None,
        });
        let text = text
            .or(other.map(String::as_str))
            .ok_or_else(|| Fault::invalid("a unit of ControlNet has no image: send `image` in base64"))?;
        let name = self.module.as_deref().filter(|name| !name.is_empty()).unwrap_or("none");
        let fit = match &self.resize_mode {
            Value::String(name) if name.contains("Just") => Fit::Stretch,
            Value::String(name) if name.contains("Fill") || name.contains("Outer Fit") => Fit::Fill,
            Value::Number(number) if number.as_u64() == Some(0) => Fit::Stretch,
            Value::Number(number) if number.as_u64() == Some(2) => Fit::Fill,
            _ => Fit::Crop,
        };
        Ok(HintPicture {
            picture: pictures::decode("the image of ControlNet", text)?.rgb(),
            hint: module(name, self.threshold_a, self.threshold_b)?,
            fit,
            strength: self.weight.unwrap_or(1.0),
            interval: (self.guidance_start.unwrap_or(0.0), self.guidance_end.unwrap_or(1.0)),
        })
    }
}

/// Whether a flag is set, which clients send as a truth value or a number.
fn is_true(value: &Value) -> bool {
    value.as_bool().unwrap_or(value.as_i64().is_some_and(|number| number != 0))
}

//! Pictures as inputs: to start from, masks, hints of ControlNets; and the second pass.

use crate::files::picture;
use clap::{Args, ValueEnum};
use image::RgbImage;
use sdrun::abi::Error;
use sdrun_diffusion::{
    family::Family,
    guidance::is_range,
    picture::{Fit, Hint, Mask, Sides, outpaint},
    pipeline::{self, Content, HintPicture, Inpaint, Second, Size, Start, Upscale},
};
use std::path::PathBuf;

#[derive(Args)]
#[command(next_help_heading = "Pictures")]
pub(super) struct InputArgs {
    /// Start from this picture
    #[arg(short, long, alias = "init-img", value_name = "FILE")]
    init_image: Option<PathBuf>,

    /// How much to change it: 1 draws all anew, small values keep most of it
    #[arg(long, value_name = "0..1", default_value_t = 0.75)]
    strength: f64,

    /// Change only what is white in this picture; without it, what is transparent in the first picture
    #[arg(long, value_name = "FILE", requires = "init_image")]
    mask: Option<PathBuf>,

    /// How soft the mask's edge is, in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 4.0)]
    mask_blur: f32,

    /// What is under the mask at the start
    #[arg(long, value_enum, default_value_t = Fill::Original)]
    mask_content: Fill,

    /// Draw only the masked part and this many pixels around it, at full size
    #[arg(long, value_name = "PIXELS", num_args = 0..=1, default_missing_value = "32")]
    only_masked: Option<u32>,

    /// Extend the picture by this many pixels to the left, top, right and bottom
    #[arg(long, value_name = "L,T,R,B", value_delimiter = ',', num_args = 1.., requires = "init_image", conflicts_with = "mask")]
    outpaint: Vec<u32>,

    /// Edit this picture as the prompt says, or put several together (FLUX.1 Kontext; repeatable)
    #[arg(short, long = "ref-image", value_name = "FILE", conflicts_with = "init_image")]
    ref_images: Vec<PathBuf>,

    /// How a picture of another size is fitted
    #[arg(long, value_enum, default_value_t = Resize::Crop)]
    resize: Resize,

    /// The picture that a ControlNet follows, one for each --control-net (repeatable), or that FLUX.1 Canny, FLUX.1 Depth or SD 2 depth
    /// draws after
    #[arg(long = "control-image", value_name = "FILE")]
    control_images: Vec<PathBuf>,

    /// What to make of it first: none, canny, invert, scribble, threshold or tile (repeatable)
    #[arg(long = "control-hint", value_name = "NAME", value_parser = hint)]
    control_hints: Vec<Hint>,

    /// How strongly to follow it (repeatable) [default: 1]
    #[arg(long = "control-strength", value_name = "STRENGTH")]
    control_strengths: Vec<f64>,

    /// In which part of the steps to follow it, such as 0,0.7 (repeatable) [default: 0,1]
    #[arg(long = "control-interval", value_name = "FROM,TO", value_parser = interval)]
    control_intervals: Vec<(f64, f64)>,

    /// Enlarge the picture by this factor and draw a second pass over it
    #[arg(long, alias = "hires-scale", value_name = "FACTOR")]
    hires: Option<f64>,

    /// How much the second pass changes
    #[arg(long, alias = "hires-denoising-strength", value_name = "0..1", default_value_t = 0.5)]
    hires_strength: f64,

    /// Steps of the second pass [default: as many as in the first]
    #[arg(long, value_name = "N")]
    hires_steps: Option<usize>,

    /// How the picture is enlarged for the second pass
    #[arg(long, value_enum, default_value_t = Upscaler::Lanczos)]
    hires_upscaler: Upscaler,

    /// How often --upscale-model enlarges the finished pictures [default: 1, or 0 if it is the --hires-upscaler]
    #[arg(long, value_name = "N", requires = "upscale_model")]
    pub(super) upscale_repeats: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Fill {
    /// The picture
    Original,
    /// Blurred surroundings
    Surroundings,
    /// Noise
    Noise,
    /// Nothing
    Nothing,
}

#[derive(Clone, Copy, ValueEnum)]
enum Resize {
    /// Cut off what does not fit
    Crop,
    /// Fill borders with the edges of the picture
    Fill,
    /// Distort the picture
    Stretch,
}

#[derive(Clone, Copy, ValueEnum)]
enum Upscaler {
    /// The picture, by Lanczos' filter
    Lanczos,
    /// The latents: blurs, so it needs a strength of 0.5 or more
    Latent,
    /// The picture, with --upscale-model
    Model,
}

fn hint(name: &str) -> Result<Hint, String> {
    Hint::named(name).ok_or_else(|| super::unknown("hint", name, Hint::names()))
}

/// Two numbers from 0 to 1, such as `0,0.8`.
pub(super) fn interval(text: &str) -> Result<(f64, f64), String> {
    let numbers = text.split_once(',').and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    numbers
        .filter(|interval| is_range(*interval))
        .ok_or_else(|| format!("`{text}` is not a range in 0 to 1, such as 0,0.8"))
}

impl InputArgs {
    /// The picture to start from.
    pub(super) fn start(&self) -> anyhow::Result<Option<Start>> {
        let Some(file) = &self.init_image else { return Ok(None) };
        let sides = self.sides()?;
        let read = picture::read(file)?;
        let mut start =
            Start { picture: read.rgb(), fit: self.fit(), strength: self.strength, inpaint: None };
        let mask = match (&self.mask, sides) {
            (Some(mask), _) => Some(Mask::new(picture::read(mask)?.mask())),
            (None, Some(sides)) => {
                let (picture, mask) =
                    outpaint(&start.picture, sides, FEATHER).map_err(pipeline::Error::from)?;
                start.picture = picture;
                Some(mask)
            }
            (None, None) => read.erased().map(Mask::new),
        };
        let content = match self.mask_content {
            Fill::Original => Content::Original,
            Fill::Surroundings => Content::Surroundings,
            Fill::Noise => Content::Noise,
            Fill::Nothing => Content::Nothing,
        };
        start.inpaint =
            mask.map(|mask| Inpaint { mask, blur: self.mask_blur, content, only_masked: self.only_masked });
        Ok(Some(start))
    }

    /// The pictures to edit.
    pub(super) fn references(&self) -> anyhow::Result<Vec<RgbImage>> {
        self.ref_images.iter().map(|file| Ok(picture::read(file)?.rgb())).collect()
    }

    fn fit(&self) -> Fit {
        match self.resize {
            Resize::Crop => Fit::Crop,
            Resize::Fill => Fit::Fill,
            Resize::Stretch => Fit::Stretch,
        }
    }

    fn sides(&self) -> Result<Option<Sides>, Error> {
        match self.outpaint[..] {
            [] => Ok(None),
            [left, top, right, bottom] => Ok(Some(Sides { left, top, right, bottom })),
            _ => Err(Error::invalid(
                "--outpaint takes four numbers: left, top, right and bottom, such as 128,0,128,0",
            )),
        }
    }

    /// The pictures of ControlNets. There is one for each of `nets` networks, and one for a model that itself draws after a picture.
    pub(super) fn hints(&self, nets: usize, family: &Family) -> anyhow::Result<Vec<HintPicture>> {
        let given = self.control_images.len();
        if family.beside.is_hint() && given != nets + 1 {
            let message = format!(
                "{} draws after one picture, and {given} were given: give one --control-image",
                family.title
            );
            return Err(Error::invalid(message).into());
        }
        if !family.beside.is_hint() && given != nets {
            let message = format!(
                "there are {nets} ControlNets and {given} pictures for them: give one --control-image for each --control-net"
            );
            return Err(Error::invalid(message).into());
        }
        let hint = |(number, file): (usize, &PathBuf)| {
            Ok(HintPicture {
                picture: picture::read(file)?.rgb(),
                hint: self.control_hints.get(number).copied().unwrap_or(Hint::None),
                fit: self.fit(),
                strength: self.control_strengths.get(number).copied().unwrap_or(1.0),
                interval: self.control_intervals.get(number).copied().unwrap_or((0.0, 1.0)),
            })
        };
        self.control_images.iter().enumerate().map(hint).collect()
    }

    /// The second pass. `has_upscaler` says whether there is an upscaler's file.
    pub(super) fn second(&self, has_upscaler: bool) -> Result<Option<Second>, Error> {
        let Some(factor) = self.hires else { return Ok(None) };
        let upscale = match self.hires_upscaler {
            Upscaler::Lanczos => Upscale::Lanczos,
            Upscaler::Latent => Upscale::Latent,
            Upscaler::Model if has_upscaler => Upscale::Model,
            Upscaler::Model => {
                return Err(Error::invalid(
                    "--hires-upscaler model needs an upscaler: give its file with --upscale-model",
                ));
            }
        };
        let (steps, strength) = (self.hires_steps, self.hires_strength);
        Ok(Some(Second { size: Size::Factor(factor), steps, strength, upscale }))
    }
}

/// How far the border of an outpainted picture fades into the new part, in pixels (ComfyUI's default).
const FEATHER: u32 = 40;

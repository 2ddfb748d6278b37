//! Enlarging pictures with ESRGAN and Real-ESRGAN.
//!
//! A large picture runs in overlapping tiles of one size, so that one engine suffices. Weights from [`Checkpoint`] decide which
//! built-in graph fits.

use super::{
    Error, Event, Result,
    network::{Engines, Network, Opener},
    parts::Part,
};
use crate::{
    latent::planes,
    picture::{Layout, MAX_SIDE, Tiles},
};
use image::{RgbImage, imageops::crop_imm};
use sdrun::{
    Paths, Registry, Shapes, WeightFiles,
    abi::{self, Host},
    weights::{Checkpoint, Component, StateDict},
};
use std::{
    cell::{Cell, RefCell},
    path::Path,
};

/// A network that enlarges pictures.
///
/// Its graph has the input `image`, `[1, 3, height, width]`, and one output, `[1, 3, scale · height, scale · width]`, both with
/// values from 0 to 1. Height and width must be multiples of `4 / scale`, because ESRGAN folds squares of that side into
/// channels first (arXiv:2107.10833, section 3.3).
pub struct Upscaler {
    /// The network.
    pub part: Part,
    /// How many times wider and higher a picture becomes.
    pub scale: usize,
    /// The longest side of a tile, in squares of `4 / scale` pixels. A larger tile takes more memory, a smaller one more time,
    /// because neighbours overlap by a quarter.
    pub tile: usize,
}

/// Takes 1.2 GB with 23 blocks (ggml, fp32), and covers the usual sizes with few tiles: 512 pixels with two in a row, 768 with three,
/// 1024 with four.
const TILE: usize = 320;
/// What the edge of a tile changes is lost in so much overlap.
const OVERLAP: f64 = 0.25;
/// The most pixels of a result: what `sdrun` reads again.
const MOST_PIXELS: u64 = 1 << 27;

/// The sizes of ESRGAN that have a graph: its name, scale and number of blocks.
const GRAPHS: [(&str, usize, usize); 3] =
    [("esrgan/x4", 4, 23), ("esrgan/x4-6-blocks", 4, 6), ("esrgan/x2", 2, 23)];
/// Channels that blocks pass on, and that a convolution in them adds.
const CHANNELS: (usize, usize) = (64, 32);

impl Upscaler {
    /// Opens a file of ESRGAN or Real-ESRGAN, under any of their namings. Reads no weights yet.
    ///
    /// # Errors
    /// `InvalidArgument` for a file that is something else, `Unimplemented` for an ESRGAN of a size without a graph, and errors
    /// of reading the file.
    pub fn open(file: &Path, paths: &Paths, host: &dyn Host) -> Result<Self> {
        let checkpoint = Checkpoint::open(file)?;
        let summary = checkpoint.summary();
        let found = summary.components.iter().find(|part| part.component == Component::Upscaler);
        let Some(found) = found else {
            let message = format!("{} is no upscaler of ESRGAN or Real-ESRGAN", file.display());
            return Err(abi::Error::invalid(message).with_file(file).into());
        };
        let unfit = |what: String| {
            let message = format!(
                "{} is an ESRGAN {what}, and sdrun has graphs for 23 or 6 blocks of 64 channels with scale 4, and for 23 with scale 2",
                file.display()
            );
            Error::from(abi::Error::unsupported(message).with_file(file))
        };
        if let Some(missing) = found.missing.first() {
            return Err(unfit(format!("without `{missing}`")));
        }
        let Size { scale, blocks, channels } = Size::of(&*checkpoint.component(Component::Upscaler)?)?;
        let graph = GRAPHS.iter().find(|graph| (graph.1, graph.2, CHANNELS) == (scale, blocks, channels));
        let Some((graph, ..)) = graph else {
            let (features, growth) = channels;
            return Err(unfit(format!(
                "of {blocks} blocks of {features} channels that add {growth} each time, with scale {scale}"
            )));
        };
        let weights = WeightFiles { component: Some(Component::Upscaler), ..WeightFiles::of(file) };
        Ok(Upscaler { part: Part::of_builtin("upscaler", graph, weights, paths, host)?, scale, tile: TILE })
    }

    /// How often it enlarges until a picture is at least `factor` times as wide, but at least once.
    pub fn repeats(&self, factor: f64) -> usize {
        let reaches = |repeats: &usize| self.factor(*repeats) >= factor;
        // After 16 times, any picture is too large.
        (1..16).find(reaches).unwrap_or(16)
    }

    /// How many times as wide a picture is after `repeats` repeats.
    pub fn factor(&self, repeats: usize) -> f64 {
        (self.scale as f64).powi(repeats.try_into().unwrap_or(i32::MAX))
    }

    /// Fails if the result of `repeats` repeats has too many pixels.
    pub(super) fn check(&self, (width, height): (u32, u32), repeats: usize) -> Result<()> {
        let factor = (self.scale as u64).saturating_pow(repeats.try_into().unwrap_or(u32::MAX));
        let [wide, high] = [width, height].map(|side| u64::from(side).saturating_mul(factor));
        let fits = |side: u64| (1..=u64::from(MAX_SIDE)).contains(&side);
        if fits(wide) && fits(high) && wide * high <= MOST_PIXELS {
            return Ok(());
        }
        let most = MOST_PIXELS >> 20;
        Err(Error::invalid(format!(
            "a picture of {width} x {height} pixels enlarged {factor} times has no pixels or too many: sdrun makes at most {most} million, and {MAX_SIDE} in a row"
        )))
    }

    /// Pixels in a row of the squares that become channels.
    fn fold(&self) -> usize {
        (4 / self.scale.max(1)).max(1)
    }

    /// Height and width in pixels of the tiles of a picture of this size.
    pub(super) fn tile(&self, [width, height]: [usize; 2]) -> Result<[usize; 2]> {
        Ok(self.plan(width, height)?.tile().map(|side| side * self.fold()))
    }

    /// The tiles of a picture of this size.
    fn plan(&self, width: usize, height: usize) -> Result<Tiles> {
        let squares = [height, width].map(|side| side.div_ceil(self.fold()));
        Ok(Tiles::new(squares, [self.tile; 2], OVERLAP)?)
    }
}

/// What tells files of ESRGAN apart.
#[derive(Debug, PartialEq)]
struct Size {
    scale: usize,
    blocks: usize,
    channels: (usize, usize),
}

impl Size {
    fn of(weights: &dyn StateDict) -> Result<Self> {
        let shape = |name: &str| -> Result<[usize; 2]> {
            let shape = weights.describe(name)?.1;
            Ok([0, 1].map(|axis| shape.get(axis).copied().unwrap_or_default()))
        };
        let [features, inputs] = shape("conv_first.weight")?;
        let [growth, _] = shape("body.0.rdb1.conv1.weight")?;
        let number = |name: &str| name.strip_prefix("body.")?.split('.').next()?.parse::<usize>().ok();
        let blocks = weights.names().into_iter().filter_map(number).max().map_or(0, |last| last + 1);
        let scale = match inputs {
            12 => 2,
            48 => 1,
            _ => 4,
        };
        Ok(Size { scale, blocks, channels: (features, growth) })
    }
}

/// Enlarges a picture `repeats` times; 0 returns it as it is. `event` receives progress. `host` receives logs and can cancel.
///
/// # Errors
/// The first error of a network, and `InvalidArgument` if the result would have too many pixels.
pub fn upscale(
    registry: &Registry,
    upscaler: &Upscaler,
    picture: RgbImage,
    repeats: usize,
    engines: &Engines<'_>,
    host: &dyn Host,
    event: &mut dyn FnMut(Event<'_>),
) -> Result<RgbImage> {
    let event = RefCell::new(event);
    let tell = |happened: Event<'_>| (event.borrow_mut())(happened);
    let open = Opener { registry, engines, host, tell: &tell, tile: None, running: Cell::default() };
    Enlarger::new(&open, upscaler).enlarge(picture, repeats, 0)
}

/// An upscaler on an engine.
pub(super) struct Enlarger<'a> {
    open: &'a Opener<'a>,
    upscaler: &'a Upscaler,
    /// Height and width of a tile, and the network for them.
    loaded: Option<([usize; 2], Network<'a>)>,
}

impl<'a> Enlarger<'a> {
    /// Loads nothing yet.
    pub(super) fn new(open: &'a Opener<'a>, upscaler: &'a Upscaler) -> Self {
        Enlarger { open, upscaler, loaded: None }
    }

    /// Enlarges picture number `number` as often as `repeats` says.
    pub(super) fn enlarge(&mut self, picture: RgbImage, repeats: usize, number: usize) -> Result<RgbImage> {
        let upscaler = self.upscaler;
        upscaler.check(picture.dimensions(), repeats)?;
        let sides = picture.dimensions();
        let plan = |repeat: u32| {
            let [width, height] = [sides.0, sides.1].map(|side| side as usize * upscaler.scale.pow(repeat));
            upscaler.plan(width, height)
        };
        let plans = (0..repeats as u32).map(plan).collect::<Result<Vec<_>>>()?;
        let tiles = plans.iter().map(|plan| plan.starts().len()).sum();
        let mut done = 0;
        plans.iter().try_fold(picture, |picture, plan| {
            self.once(&picture, plan, &mut |open| {
                open.tell(Event::Tile { picture: number, tile: done, tiles });
                done += 1;
            })
        })
    }

    fn once(
        &mut self,
        picture: &RgbImage,
        plan: &Tiles,
        done: &mut dyn FnMut(&Opener<'_>),
    ) -> Result<RgbImage> {
        let (open, scale, fold) = (self.open, self.upscaler.scale, self.upscaler.fold());
        let whole = filled(picture, fold);
        let values: Vec<f32> = planes(&whole).map(|byte| f32::from(byte) / 255.0).collect();
        let network = self.network(plan.tile().map(|side| side * fold))?;
        let (from, to) = (Layout { channels: 3, scale: fold }, Layout { channels: 3, scale: fold * scale });
        let values = plan.run(&values, from, to, |tile| {
            let larger = network.run_one(&[("image", &tile)])?;
            done(open);
            Ok::<_, Error>(larger)
        })?;
        let [wide, width, height] = [whole.width(), picture.width(), picture.height()];
        let scale = scale as u32;
        let larger =
            super::draw::rgb(bytes(&values), (wide * scale) as usize, (whole.height() * scale) as usize)?;
        if whole.dimensions() == picture.dimensions() {
            return Ok(larger);
        }
        Ok(crop_imm(&larger, 0, 0, width * scale, height * scale).to_image())
    }

    /// The network for tiles of `[height, width]`.
    fn network(&mut self, tile: [usize; 2]) -> Result<&mut Network<'a>> {
        let network = match self.loaded.take() {
            Some((loaded, network)) if loaded == tile => network,
            other => {
                // Frees its memory before the next one needs it.
                drop(other);
                let [height, width] = tile;
                let shapes = Shapes::from([("image".into(), vec![1, 3, height, width])]);
                self.open.network(&self.upscaler.part, shapes)?
            }
        };
        Ok(&mut self.loaded.insert((tile, network)).1)
    }
}

/// The picture with sides that are multiples of `fold`. What is new repeats the right and the lower edge.
fn filled(picture: &RgbImage, fold: usize) -> RgbImage {
    let (width, height) = picture.dimensions();
    let [wide, high] = [width, height].map(|side| side.next_multiple_of(fold as u32));
    if (wide, high) == (width, height) {
        return picture.clone();
    }
    RgbImage::from_fn(wide, high, |x, y| *picture.get_pixel(x.min(width - 1), y.min(height - 1)))
}

/// Values `[3, height, width]` from 0 to 1 as bytes `[height, width, 3]`. Values outside are clamped.
fn bytes(values: &[f32]) -> Vec<u8> {
    let pixels = values.len() / 3;
    let byte = |value: f32| (value.clamp(0.0, 1.0) * 255.0).round_ties_even() as u8;
    (0..pixels).flat_map(|i| [0, 1, 2].map(|channel| byte(values[channel * pixels + i]))).collect()
}

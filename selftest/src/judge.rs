//! Reads scenes of coloured shapes back from pictures, by the rules of tools/train/scenes.py: the background is the median of the rim,
//! regions that differ from it are objects, an object's shape is the one whose drawing overlaps it best.

use image::RgbImage;
use serde::Deserialize;

const COLOURS: [(&str, [f32; 3]); 6] = [
    ("red", [222.0, 42.0, 46.0]),
    ("green", [44.0, 160.0, 72.0]),
    ("blue", [48.0, 88.0, 222.0]),
    ("yellow", [246.0, 208.0, 40.0]),
    ("purple", [150.0, 58.0, 178.0]),
    ("orange", [242.0, 128.0, 28.0]),
];
const BACKGROUNDS: [(&str, [f32; 3]); 4] = [
    ("white", [246.0, 246.0, 246.0]),
    ("gray", [140.0, 144.0, 150.0]),
    ("black", [24.0, 24.0, 30.0]),
    ("pink", [248.0, 200.0, 214.0]),
];
const SHAPES: [&str; 4] = ["circle", "square", "triangle", "star"];

/// What a prompt asks for.
#[derive(Clone, Debug, Deserialize)]
pub struct Prompt {
    /// The prompt.
    pub caption: String,
    /// Colour and shape of each object.
    pub objects: Vec<(String, String)>,
    /// How the first object stands to the second.
    pub relation: Option<Relation>,
    /// Colour of the background.
    pub background: String,
}

/// How an object stands to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Relation {
    /// Left of it.
    #[serde(rename = "left of")]
    LeftOf,
    /// Right of it.
    #[serde(rename = "right of")]
    RightOf,
    /// Above it.
    Above,
    /// Below it.
    Below,
}

/// 128 prompts that the demo model was not trained with.
pub fn prompts() -> Vec<Prompt> {
    serde_json::from_str(include_str!("prompts.json")).unwrap_or_default()
}

/// An object in a picture. Lengths are in units of the picture's side.
#[derive(Clone, Debug)]
pub struct Item {
    /// Name of its colour.
    pub colour: &'static str,
    /// Name of its shape.
    pub shape: &'static str,
    /// Its middle, from the left.
    pub x: f32,
    /// Its middle, from the top.
    pub y: f32,
    /// The radius of a disk with its area.
    pub radius: f32,
}

/// What a picture gets right. `relation` is `None` for prompts without one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Marks {
    /// The colours of the objects.
    pub colour: bool,
    /// Their shapes.
    pub shape: bool,
    /// How many there are.
    pub count: bool,
    /// The colour of the background.
    pub background: bool,
    /// How they stand to each other.
    pub relation: Option<bool>,
}

impl Marks {
    /// Whether nothing is wrong.
    pub fn all(&self) -> bool {
        self.colour && self.shape && self.count && self.background && self.relation != Some(false)
    }
}

/// Checks a picture against its prompt.
pub fn judge(prompt: &Prompt, picture: &RgbImage) -> Marks {
    let (ground, items) = read(picture);
    let sorted = |mut names: Vec<&str>| {
        names.sort_unstable();
        names.join(" ")
    };
    let wanted = &prompt.objects;
    let related = |relation: Relation| {
        let pairs = items.iter().flat_map(|first| items.iter().map(move |second| (first, second)));
        pairs.filter(|(first, second)| !std::ptr::eq(*first, *second)).any(|(first, second)| {
            let found = [first, second].map(|item| (item.colour.to_string(), item.shape.to_string()));
            found[..] == wanted[..] && stands(relation, first, second)
        })
    };
    Marks {
        colour: sorted(items.iter().map(|item| item.colour).collect())
            == sorted(wanted.iter().map(|(colour, _)| &**colour).collect()),
        shape: sorted(items.iter().map(|item| item.shape).collect())
            == sorted(wanted.iter().map(|(_, shape)| &**shape).collect()),
        count: items.len() == wanted.len(),
        background: ground == prompt.background,
        relation: prompt.relation.map(related),
    }
}

fn stands(relation: Relation, first: &Item, second: &Item) -> bool {
    let (dx, dy) = match relation {
        Relation::LeftOf => (-1.0, 0.0),
        Relation::RightOf => (1.0, 0.0),
        Relation::Above => (0.0, -1.0),
        Relation::Below => (0.0, 1.0),
    };
    (first.x - second.x) * dx + (first.y - second.y) * dy > 0.1
}

/// The background's name, and the objects. Of a picture that is not square, only the square at its left or top.
pub fn read(picture: &RgbImage) -> (&'static str, Vec<Item>) {
    let side = picture.width().min(picture.height()) as usize;
    let pixel = |x: usize, y: usize| picture.get_pixel(x as u32, y as u32).0.map(f32::from);
    let mut rim = Vec::new();
    for far in 0..side {
        for near in [0, 1] {
            rim.extend([pixel(far, near), pixel(far, side - 2 + near), pixel(near, far)]);
        }
    }
    let ground = median(rim);
    let differs = |at: usize| {
        let found = pixel(at % side, at / side);
        (0..3).any(|channel| (found[channel] - ground[channel]).abs() > 45.0)
    };
    let mut free: Vec<bool> = (0..side * side).map(differs).collect();
    let mut items = Vec::new();
    for start in 0..free.len() {
        let region = grow(&mut free, start, side);
        let area = region.len() as f32 / (side * side) as f32;
        if area >= 0.008 {
            let colour =
                nearest(median(region.iter().map(|at| pixel(at % side, at / side)).collect()), &COLOURS);
            items.push(fit(&region, side, colour));
        }
    }
    (nearest(ground, &BACKGROUNDS), items)
}

/// Takes the connected region around `start` out of `free`.
fn grow(free: &mut [bool], start: usize, side: usize) -> Vec<usize> {
    let mut region = Vec::new();
    let mut next = vec![start];
    while let Some(at) = next.pop() {
        if !std::mem::take(&mut free[at]) {
            continue;
        }
        region.push(at);
        let (x, y) = (at % side, at / side);
        next.extend((x > 0).then(|| at - 1));
        next.extend((x + 1 < side).then_some(at + 1));
        next.extend((y > 0).then(|| at - side));
        next.extend((y + 1 < side).then_some(at + side));
    }
    region
}

/// The median of each channel.
fn median(pixels: Vec<[f32; 3]>) -> [f32; 3] {
    std::array::from_fn(|channel| {
        let mut values: Vec<f32> = pixels.iter().map(|pixel| pixel[channel]).collect();
        values.sort_by(f32::total_cmp);
        let middle = values.len() / 2;
        if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
    })
}

fn nearest(colour: [f32; 3], palette: &[(&'static str, [f32; 3])]) -> &'static str {
    let distance = |other: [f32; 3]| -> f32 { colour.iter().zip(other).map(|(a, b)| (a - b).abs()).sum() };
    palette.iter().min_by(|a, b| distance(a.1).total_cmp(&distance(b.1))).map_or("", |(name, _)| name)
}

/// The shape whose drawing overlaps a region best.
fn fit(region: &[usize], side: usize, colour: &'static str) -> Item {
    let whole = side as f32;
    let mut inside = vec![false; side * side];
    region.iter().for_each(|at| inside[*at] = true);
    let (x, y) = middle(region, side);
    let radius = (region.len() as f32 / (whole * whole) / std::f32::consts::PI).sqrt();
    let trials = SHAPES.map(|shape| {
        let trial = covered(&Item { colour, shape, x: 0.5, y: 0.5, radius }, side);
        let (cx, cy) = middle(&trial, side);
        let radius = radius * (region.len() as f32 / trial.len() as f32).sqrt();
        let item = Item { colour, shape, x: x + 0.5 - cx, y: y + 0.5 - cy, radius };
        let cover = covered(&item, side);
        let both = cover.iter().filter(|at| inside[**at]).count();
        (both as f32 / (cover.len() + region.len() - both) as f32, item)
    });
    let [first, others @ ..] = trials;
    // Of equal ones the first.
    others.into_iter().fold(first, |best, trial| if trial.0 > best.0 { trial } else { best }).1
}

/// The middle of pixels.
fn middle(pixels: &[usize], side: usize) -> (f32, f32) {
    let of = |axis: fn(usize, usize) -> usize| {
        let sum: usize = pixels.iter().map(|at| axis(*at, side)).sum();
        (sum as f32 / pixels.len() as f32 + 0.5) / side as f32
    };
    (of(|at, side| at % side), of(|at, side| at / side))
}

/// The pixels that an object covers by more than half.
fn covered(item: &Item, side: usize) -> Vec<usize> {
    let at = |index: usize| (index as f32 + 0.5) / side as f32;
    let covers = |index: &usize| {
        let (x, y) = (at(index % side) - item.x, at(index / side) - item.y);
        distance(item.shape, x, y, item.radius) < 0.0
    };
    (0..side * side).filter(covers).collect()
}

/// Signed distance to the outline of a shape around the origin, negative inside.
fn distance(shape: &str, x: f32, y: f32, radius: f32) -> f32 {
    match shape {
        "circle" => x.hypot(y) - radius,
        "square" => x.abs().max(y.abs()) - 0.89 * radius,
        "triangle" => {
            let inner = 0.72 * radius;
            let y = y - 0.22 * radius;
            (0.866_025_4 * x.abs() - 0.5 * y - inner).max(y - inner)
        }
        _ => {
            let (outer, inner, half) = (1.28 * radius, 0.62 * radius, std::f32::consts::PI / 5.0);
            let angle = ((x.atan2(-y) + half).rem_euclid(2.0 * half) - half).abs();
            let length = x.hypot(y);
            let (px, py) = (length * angle.cos(), length * angle.sin());
            let (ex, ey) = (inner * half.cos() - outer, inner * half.sin());
            ((px - outer) * ey - py * ex) / ex.hypot(ey)
        }
    }
}

//! Samples images at given positions.

use super::call::{Call, Fault, Outputs};
use super::gather::position;
use super::number::{Num, load, load_as_f64, store, with_float, with_number};
use rayon::prelude::*;

#[derive(Clone, Copy)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

/// How one axis is sampled.
struct Axis {
    n: usize,
    align_corners: bool,
    padding: Padding,
}

impl Axis {
    /// The edges at which coordinates are reflected.
    fn edges(&self) -> (f64, f64) {
        if self.align_corners { (0.0, self.n as f64 - 1.0) } else { (-0.5, self.n as f64 - 0.5) }
    }
    fn reflect(&self, x: f64) -> f64 {
        let (low, high) = self.edges();
        let range = high - low;
        if range <= 0.0 {
            return low;
        }
        let folded = (x - low).rem_euclid(2.0 * range);
        low + if folded > range { 2.0 * range - folded } else { folded }
    }
    /// Converts a coordinate in [-1, 1] to elements, and moves it inside if the padding mode says so.
    fn coordinate(&self, v: f64, nearest: bool) -> f64 {
        let n = self.n as f64;
        let x = if self.align_corners { (v + 1.0) / 2.0 * (n - 1.0) } else { ((v + 1.0) * n - 1.0) / 2.0 };
        let x = if nearest { x.round_ties_even() } else { x };
        let (low, high) = self.edges();
        // Clamp far outside values, so that they fit the integers below.
        match self.padding {
            _ if (low..=high).contains(&x) => x,
            Padding::Border => x.clamp(0.0, n - 1.0),
            Padding::Reflection => self.reflect(x),
            Padding::Zeros => x.clamp(-1e9, 1e9),
        }
    }
    /// The element at integer position `i`; `None` means zero.
    fn element(&self, i: i64) -> Option<usize> {
        let last = self.n as i64 - 1;
        match self.padding {
            Padding::Zeros => (0..=last).contains(&i).then_some(i as usize),
            Padding::Border => Some(i.clamp(0, last) as usize),
            Padding::Reflection if (0..=last).contains(&i) => Some(i as usize),
            Padding::Reflection => Some((self.reflect(i as f64) as i64).clamp(0, last) as usize),
        }
    }
}

/// Weights of the elements from `floor(x) + first` on, for a sample at `floor(x) + t`.
fn weights(mode: &str, t: f64) -> Result<(i64, Vec<f64>), Fault> {
    const A: f64 = -0.75;
    // Keys' cubic convolution at distances up to one, and between one and two.
    let near = |d: f64| ((A + 2.0) * d - (A + 3.0)) * d * d + 1.0;
    let far = |d: f64| ((A * d - 5.0 * A) * d + 8.0 * A) * d - 4.0 * A;
    match mode {
        "nearest" => Ok((0, vec![1.0])),
        "linear" | "bilinear" => Ok((0, vec![1.0 - t, t])),
        "cubic" | "bicubic" => Ok((-1, vec![far(1.0 + t), near(t), near(1.0 - t), far(2.0 - t)])),
        other => Err(format!("mode {other:?} is not defined").into()),
    }
}

pub(super) fn grid_sample(c: &Call) -> Outputs {
    let (x, grid, shape) = (c.input(0)?, c.input(1)?, c.out_shape(0)?);
    let spatial = &x.shape()[2..];
    let (batch, channels, rank) = (shape[0], shape[1], spatial.len());
    let mode = c.mode("mode", if c.opset() < 20 { "bilinear" } else { "linear" });
    let padding = match c.mode("padding_mode", "zeros") {
        "zeros" => Padding::Zeros,
        "border" => Padding::Border,
        "reflection" => Padding::Reflection,
        other => return Err(format!("padding_mode {other:?} is not defined").into()),
    };
    let align_corners = c.node().int_or("align_corners", 0) != 0;
    let axes: Vec<Axis> = spatial.iter().map(|n| Axis { n: *n, align_corners, padding }).collect();
    weights(mode, 0.0)?;
    if spatial.contains(&0) {
        return Err("an empty image cannot be sampled".into());
    }
    let positions = load_as_f64(grid)?;
    let (plane, points) = (spatial.iter().product::<usize>(), shape[2..].iter().product::<usize>());
    // Elements and weights of each sample; they are the same for all channels.
    let taps = |sample: usize| -> Vec<(usize, f64)> {
        let mut taps = vec![(0, 1.0)];
        for (i, axis) in axes.iter().enumerate() {
            // Grids list the innermost axis first.
            let v = axis.coordinate(positions[sample * rank + rank - 1 - i], mode == "nearest");
            let Ok((first, weights)) = weights(mode, v - v.floor()) else { return vec![] };
            let elements = weights
                .iter()
                .enumerate()
                .filter_map(|(k, w)| Some((axis.element(v.floor() as i64 + first + k as i64)?, *w)));
            let elements: Vec<(usize, f64)> = elements.collect();
            let combine = |(at, w): (usize, f64)| elements.iter().map(move |(e, u)| (at * axis.n + e, w * u));
            taps = taps.into_iter().flat_map(combine).collect();
        }
        taps
    };
    let taps: Vec<Vec<(usize, f64)>> = (0..batch * points).into_par_iter().map(taps).collect();
    with_number!(x.dtype(), T => {
        let values = load::<T>(x)?;
        let sample = |i: usize| {
            let (image, point) = (i / points.max(1), i % points.max(1));
            let taps = &taps[image / channels * points + point];
            T::from_f64(taps.iter().fold(0.0, |sum, (at, w)| sum + w * values[image * plane + at].to_f64()))
        };
        let y: Vec<T> = (0..batch * channels * points).into_par_iter().map(sample).collect();
        Ok(vec![store(x.dtype(), shape, &y)?])
    })
}

/// The grid that samples an affinely transformed image.
pub(super) fn affine_grid(c: &Call) -> Outputs {
    let (theta, shape) = (c.input(0)?, c.out_shape(0)?);
    let sizes = &shape[1..shape.len() - 1];
    let rank = sizes.len();
    let align_corners = c.node().int_or("align_corners", 0) != 0;
    let coordinate = |i: usize, n: usize| match align_corners {
        true if n == 1 => 0.0,
        true => 2.0 * i as f64 / (n as f64 - 1.0) - 1.0,
        false => (2.0 * i as f64 + 1.0) / n as f64 - 1.0,
    };
    with_float!(theta.dtype(), T => {
        let theta_values = load::<T>(theta)?;
        let points: usize = sizes.iter().product();
        let mut grid = Vec::with_capacity(shape.iter().product());
        for matrix in theta_values.chunks_exact(rank * (rank + 1)) {
            for p in 0..points {
                // Innermost axis first, as in the grid.
                let (mut left, mut at) = (p, Vec::with_capacity(rank + 1));
                for n in sizes.iter().rev() {
                    at.push(coordinate(left % n, *n));
                    left /= n;
                }
                at.push(1.0);
                let dot = |row: &[T]| T::from_f64(row.iter().zip(&at).map(|(a, b)| a.to_f64() * b).sum());
                grid.extend(matrix.chunks_exact(rank + 1).map(dot));
            }
        }
        Ok(vec![store(theta.dtype(), shape, &grid)?])
    })
}

/// Maximum number of samples along one side of an output element of `RoiAlign`.
const MOST_SAMPLES: f64 = 4096.0;

/// The four elements around a point of an image, with their bilinear weights; `None` outside the image.
fn corners(y: f64, x: f64, height: usize, width: usize) -> Option<[(usize, f64); 4]> {
    if !(-1.0..=height as f64).contains(&y) || !(-1.0..=width as f64).contains(&x) {
        return None;
    }
    let along = |v: f64, n: usize| {
        let v = v.clamp(0.0, n as f64 - 1.0);
        let low = v as usize;
        (low, (low + 1).min(n - 1), v - v.floor())
    };
    let ((y0, y1, v), (x0, x1, u)) = (along(y, height), along(x, width));
    Some([
        (y0 * width + x0, (1.0 - v) * (1.0 - u)),
        (y0 * width + x1, (1.0 - v) * u),
        (y1 * width + x0, v * (1.0 - u)),
        (y1 * width + x1, v * u),
    ])
}

pub(super) fn roi_align(c: &Call) -> Outputs {
    let (x, shape) = (c.input(0)?, c.out_shape(0)?);
    let [batch, channels, height, width] = [0, 1, 2, 3].map(|i| x.shape()[i]);
    let [regions, _, rows, columns] = [0, 1, 2, 3].map(|i| shape[i]);
    let scale = f64::from(c.node().float("spatial_scale").unwrap_or(1.0));
    let half_pixel =
        c.opset() >= 16 && c.mode("coordinate_transformation_mode", "half_pixel") == "half_pixel";
    let take_max = match c.mode("mode", "avg") {
        "avg" => false,
        "max" => true,
        other => return Err(format!("mode {other:?} is not defined").into()),
    };
    let ratio = c.node().int_or("sampling_ratio", 0);
    let images: Vec<usize> = c.ints(2)?.into_iter().map(|i| position(i, batch)).collect::<Result<_, _>>()?;
    if height == 0 || width == 0 {
        return Err("an empty image cannot be sampled".into());
    }
    with_float!(x.dtype(), T => {
        let (values, boxes) = (load::<T>(x)?, load::<T>(c.input(1)?)?);
        let mut out = Vec::with_capacity(shape.iter().product());
        for r in 0..regions {
            let edge = |i: usize| boxes[4 * r + i].to_f64() * scale - if half_pixel { 0.5 } else { 0.0 };
            // Without the half-pixel shift, a region is at least one element wide.
            let extent = |a: f64, b: f64| if half_pixel { b - a } else { (b - a).max(1.0) };
            let cell = (extent(edge(1), edge(3)) / rows as f64, extent(edge(0), edge(2)) / columns as f64);
            let samples = |cell: f64| -> Result<usize, Fault> {
                let n = if ratio > 0 { ratio as f64 } else { cell.ceil() };
                if n <= MOST_SAMPLES { Ok(n.max(0.0) as usize) } else { Err("a region is too large to sample".into()) }
            };
            let (down, across) = (samples(cell.0)?, samples(cell.1)?);
            for channel in 0..channels {
                let image = &values[(images[r] * channels + channel) * height * width..][..height * width];
                for i in 0..rows * columns {
                    let (row, column) = ((i / columns) as f64, (i % columns) as f64);
                    let (mut sum, mut max) = (0.0, f64::NEG_INFINITY);
                    for s in 0..down * across {
                        let (sy, sx) = ((s / across) as f64 + 0.5, (s % across) as f64 + 0.5);
                        let y = edge(1) + (row + sy / down as f64) * cell.0;
                        let x = edge(0) + (column + sx / across as f64) * cell.1;
                        let Some(corners) = corners(y, x, height, width) else {
                            max = max.max(0.0);
                            continue;
                        };
                        for (at, w) in corners {
                            sum += w * image[at].to_f64();
                            max = max.max(w * image[at].to_f64());
                        }
                    }
                    let mean = sum / (down * across).max(1) as f64;
                    out.push(T::from_f64(if !take_max { mean } else if max.is_finite() { max } else { 0.0 }));
                }
            }
        }
        Ok(vec![store(x.dtype(), shape, &out)?])
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Op, assert_close, f32s, i64s};

    #[test]
    fn sampling_between_and_outside_elements() {
        let x = f32s(&[1, 1, 1, 2], &[1.0, 3.0]);
        // The centre, the right element and, with aligned corners, a point twice as far out.
        let grid = f32s(&[1, 1, 3, 2], &[0.0, 0.0, 1.0, 0.0, 3.0, 0.0]);
        let op = || Op::new("GridSample").int("align_corners", 1);
        assert_close(&op().run(&[&x, &grid]), &f32s(&[1, 1, 1, 3], &[2.0, 3.0, 0.0]));
        assert_close(
            &op().str("padding_mode", "border").run(&[&x, &grid]),
            &f32s(&[1, 1, 1, 3], &[2.0, 3.0, 3.0]),
        );
        let reflected = op().str("padding_mode", "reflection").run(&[&x, &grid]);
        assert_close(&reflected, &f32s(&[1, 1, 1, 3], &[2.0, 3.0, 1.0]));
        let nearest = op().str("mode", "nearest").run(&[&x, &grid]);
        assert_close(&nearest, &f32s(&[1, 1, 1, 3], &[1.0, 3.0, 0.0]));
    }

    #[test]
    fn the_identity_grid_lists_pixel_centres() {
        let theta = f32s(&[1, 2, 3], &[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
        let y = Op::new("AffineGrid").run(&[&theta, &i64s(&[4], &[1, 1, 1, 2])]);
        assert_close(&y, &f32s(&[1, 1, 2, 2], &[-0.5, 0.0, 0.5, 0.0]));
    }

    #[test]
    fn a_region_is_averaged() {
        let x = f32s(&[1, 1, 2, 2], &[0.0, 1.0, 2.0, 3.0]);
        let region = f32s(&[1, 4], &[0.5, 0.5, 1.5, 1.5]);
        let y = Op::new("RoiAlign").int("sampling_ratio", 1).run(&[&x, &region, &i64s(&[1], &[0])]);
        assert_close(&y, &f32s(&[1, 1, 1, 1], &[1.5]));
    }
}

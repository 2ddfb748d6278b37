//! The linear transforms of Winograd's convolution algorithm F(4x4, 3x3). It computes 4 x 4 outputs with 36 multiplications of
//! transformed input and filter instead of 144
//! (A. Lavin, S. Gray: Fast Algorithms for Convolutional Neural Networks, <https://arxiv.org/abs/1509.09308>).
//!
//! The interpolation points are 0, ±√½, ±√2 and ∞. With the usual 0, ±1, ±2 and ∞ the error is twice as large: for 512 channels
//! 4.5e-6 of the result (root mean square) instead of 2.1e-6. The sum alone has 1.2e-6.

use super::{
    level::Level,
    vector::{Vector, Work, dispatch},
};
use std::f32::consts::{FRAC_1_SQRT_2, SQRT_2};

/// Rows and columns of a tile's outputs.
pub(crate) const OUTPUTS: usize = 4;
/// Rows and columns of the inputs of a tile, and of its products.
pub(crate) const INPUTS: usize = 6;
/// Products of a tile.
pub(crate) const PRODUCTS: usize = INPUTS * INPUTS;
/// Elements past the requested ones that a transform may read and write.
pub(crate) const SLACK: usize = 15;

/// A transform from one square of planes to another. Planes are in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transform {
    /// From [`INPUTS`]² planes to [`INPUTS`]².
    Input,
    /// From 3 x 3 planes to [`INPUTS`]².
    Filter,
    /// From [`INPUTS`]² planes to [`OUTPUTS`]².
    Output,
}

/// The layout of planes, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    /// From one plane to the next.
    pub(crate) step: usize,
    /// From one run to the next.
    pub(crate) next: usize,
}

impl Transform {
    /// Transforms `runs` runs of `len` elements of each plane. Also reads and writes up to [`SLACK`] elements after each run, so
    /// later runs must lie behind earlier ones.
    pub(crate) fn apply(
        self,
        level: Level,
        [runs, len]: [usize; 2],
        (from, source): (&[f32], Planes),
        (to, target): (&mut [f32], Planes),
    ) {
        if runs == 0 || len == 0 {
            return;
        }
        let (rows, outputs) = match self {
            Transform::Input => (INPUTS, INPUTS),
            Transform::Filter => (3, INPUTS),
            Transform::Output => (INPUTS, OUTPUTS),
        };
        let end =
            |planes: usize, at: Planes| (planes * planes - 1) * at.step + (runs - 1) * at.next + len + SLACK;
        assert!(end(rows, source) <= from.len() && end(outputs, target) <= to.len(), "planes outside");
        let work =
            Squares { transform: self, runs, len, from: from.as_ptr(), source, to: to.as_mut_ptr(), target };
        // SAFETY: all reads and writes are inside the slices.
        unsafe { dispatch(level, &work) }
    }
}

/// Splits a row of the input into what neighbouring tiles see of it: [`INPUTS`] planes, `step` elements apart, each of `count`
/// elements taken from `row` at a distance of [`OUTPUTS`]. Also writes up to [`SLACK`] elements after each plane, and reads as
/// many more tiles from `row`.
pub(crate) fn spread(level: Level, row: &[f32], count: usize, planes: &mut [f32], step: usize) {
    let whole = count + SLACK;
    assert!(
        whole * OUTPUTS + OUTPUTS <= row.len() && (INPUTS - 1) * step + whole <= planes.len(),
        "tiles outside"
    );
    let work = Row { row: row.as_ptr(), count, planes: planes.as_mut_ptr(), step };
    // SAFETY: all reads and writes are inside the slices.
    unsafe { dispatch(level, &work) }
}

/// √½ and √2, each with its square and cube.
const NEAR: [f32; 3] = [FRAC_1_SQRT_2, 0.5, 0.5 * FRAC_1_SQRT_2];
const FAR: [f32; 3] = [SQRT_2, 2.0, 2.0 * SQRT_2];

/// A transform along one dimension.
trait Line<const FROM: usize, const TO: usize> {
    /// # Safety
    /// The processor has the register.
    unsafe fn of<V: Vector>(line: [V; FROM]) -> [V; TO];
}

/// The transform of the input.
struct OfInput;

impl Line<INPUTS, INPUTS> for OfInput {
    #[inline(always)]
    unsafe fn of<V: Vector>(d: [V; INPUTS]) -> [V; INPUTS] {
        // SAFETY: the processor has the features. The same holds below.
        unsafe {
            let near = [d[2].scale_add(-FAR[1], d[4]), d[1].scale_add(-FAR[1], d[3])];
            let far = [d[2].scale_add(-NEAR[1], d[4]), d[1].scale_add(-NEAR[1], d[3])];
            [
                d[2].scale_add(-(NEAR[1] + FAR[1]), d[0].add(d[4])),
                near[1].scale_add(NEAR[0], near[0]),
                near[1].scale_add(-NEAR[0], near[0]),
                far[1].scale_add(FAR[0], far[0]),
                far[1].scale_add(-FAR[0], far[0]),
                d[3].scale_add(-(NEAR[1] + FAR[1]), d[1].add(d[5])),
            ]
        }
    }
}

/// The transform of the filter: its polynomial at each point, divided by the product of that point's distances from the others.
struct OfFilter;

impl Line<3, INPUTS> for OfFilter {
    #[inline(always)]
    unsafe fn of<V: Vector>(g: [V; 3]) -> [V; INPUTS] {
        const NEAR_SCALE: f32 = 1.0 / (2.0 * NEAR[1] * (NEAR[1] - FAR[1]));
        const FAR_SCALE: f32 = 1.0 / (2.0 * FAR[1] * (FAR[1] - NEAR[1]));
        // SAFETY: as above.
        unsafe {
            let near = [
                g[2].scale_add(NEAR[1] * NEAR_SCALE, g[0].scale(NEAR_SCALE)),
                g[1].scale(NEAR[0] * NEAR_SCALE),
            ];
            let far =
                [g[2].scale_add(FAR[1] * FAR_SCALE, g[0].scale(FAR_SCALE)), g[1].scale(FAR[0] * FAR_SCALE)];
            [g[0], near[0].add(near[1]), near[0].sub(near[1]), far[0].add(far[1]), far[0].sub(far[1]), g[2]]
        }
    }
}

/// The transform of the products to outputs.
struct OfOutput;

impl Line<INPUTS, OUTPUTS> for OfOutput {
    #[inline(always)]
    unsafe fn of<V: Vector>(m: [V; INPUTS]) -> [V; OUTPUTS] {
        // SAFETY: as above.
        unsafe {
            let near = [m[1].add(m[2]), m[1].sub(m[2])];
            let far = [m[3].add(m[4]), m[3].sub(m[4])];
            [
                m[0].add(near[0]).add(far[0]),
                far[1].scale_add(FAR[0], near[1].scale(NEAR[0])),
                far[0].scale_add(FAR[1], near[0].scale(NEAR[1])),
                far[1].scale_add(FAR[2], near[1].scale_add(NEAR[2], m[5])),
            ]
        }
    }
}

/// The work of [`spread`].
struct Row {
    row: *const f32,
    count: usize,
    planes: *mut f32,
    step: usize,
}

impl Work for Row {
    #[inline(always)]
    unsafe fn run<V: Vector>(&self) {
        let mut at = 0;
        while at < self.count {
            // SAFETY: a register that begins before the end of the elements ends within the slack.
            unsafe {
                let row = self.row.add(at * OUTPUTS);
                let ([a, b, c, d], [e, f, ..]) = (V::fourths(row), V::fourths(row.add(OUTPUTS)));
                let planes = self.planes.add(at);
                a.store(planes);
                b.store(planes.add(self.step));
                c.store(planes.add(2 * self.step));
                d.store(planes.add(3 * self.step));
                e.store(planes.add(4 * self.step));
                f.store(planes.add(5 * self.step));
            }
            at += V::LANES;
        }
    }
}

/// The work of [`Transform::apply`].
struct Squares {
    transform: Transform,
    runs: usize,
    len: usize,
    from: *const f32,
    source: Planes,
    to: *mut f32,
    target: Planes,
}

impl Work for Squares {
    #[inline(always)]
    unsafe fn run<V: Vector>(&self) {
        // SAFETY: by the trait's contract.
        unsafe {
            match self.transform {
                Transform::Input => self.lines::<V, OfInput, INPUTS, INPUTS>(),
                Transform::Filter => self.lines::<V, OfFilter, 3, INPUTS>(),
                Transform::Output => self.lines::<V, OfOutput, INPUTS, OUTPUTS>(),
            }
        }
    }
}

impl Squares {
    /// Transforms the rows of the squares, then their columns.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    // Loops over indices, because iterators are not inlined into code for wider registers.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn lines<V: Vector, L: Line<FROM, TO>, const FROM: usize, const TO: usize>(&self) {
        for run in 0..self.runs {
            let mut at = 0;
            while at < self.len {
                // SAFETY: a register that begins inside a run ends within its slack.
                unsafe {
                    let from = self.from.add(run * self.source.next + at);
                    let to = self.to.add(run * self.target.next + at);
                    let zero = V::splat(0.0);
                    let mut rows = [[zero; TO]; FROM];
                    for i in 0..FROM {
                        let mut line = [zero; FROM];
                        for k in 0..FROM {
                            line[k] = V::load(from.add((i * FROM + k) * self.source.step));
                        }
                        rows[i] = L::of(line);
                    }
                    for k in 0..TO {
                        let mut line = [zero; FROM];
                        for i in 0..FROM {
                            line[i] = rows[i][k];
                        }
                        let line = L::of(line);
                        for i in 0..TO {
                            line[i].store(to.add((i * TO + k) * self.target.step));
                        }
                    }
                }
                at += V::LANES;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_what_the_filter_sees() {
        let noise = |i: usize, of: usize| (i * i % of) as f32 / of as f32 - 0.5;
        let (input, filter): (Vec<f32>, Vec<f32>) =
            ((0..36).map(|i| noise(i + 3, 101)).collect(), (0..9).map(|i| noise(i + 2, 53)).collect());
        let planes = |values: &[f32]| -> Vec<f32> {
            let of_plane = |x: &f32| [*x; 1 + SLACK];
            values.iter().flat_map(of_plane).collect()
        };
        let at = Planes { step: 1 + SLACK, next: 1 };
        for level in Level::usable() {
            let apply = |transform: Transform, from: &[f32], to: usize| {
                let mut out = vec![f32::NAN; to * (1 + SLACK)];
                transform.apply(level, [1, 1], (from, at), (&mut out, at));
                out
            };
            let [x, w] = [
                apply(Transform::Input, &planes(&input), PRODUCTS),
                apply(Transform::Filter, &planes(&filter), PRODUCTS),
            ];
            let products: Vec<f32> = x.iter().zip(&w).map(|(x, w)| x * w).collect();
            let found = apply(Transform::Output, &products, OUTPUTS * OUTPUTS);
            for i in 0..OUTPUTS * OUTPUTS {
                let (y, x) = (i / OUTPUTS, i % OUTPUTS);
                let tap =
                    |k: usize| f64::from(filter[k]) * f64::from(input[(y + k / 3) * INPUTS + x + k % 3]);
                let expected: f64 = (0..9).map(tap).sum();
                let found = f64::from(found[i * (1 + SLACK)]);
                assert!((found - expected).abs() <= 1e-6, "{level:?}, output {i}: {found}, not {expected}");
            }
        }
    }

    #[test]
    fn tiles_see_six_of_a_row() {
        let row: Vec<f32> = (0..200).map(|i| i as f32).collect();
        for level in Level::usable() {
            for count in [1, 3, 16, 29] {
                let step = count + SLACK;
                let mut planes = vec![f32::NAN; INPUTS * step];
                spread(level, &row, count, &mut planes, step);
                for (x, plane) in planes.chunks(step).enumerate() {
                    let expected = (0..count).map(|tile| (4 * tile + x) as f32);
                    assert!(plane[..count].iter().copied().eq(expected), "{level:?} {count} {x}: {plane:?}");
                }
            }
        }
    }
}

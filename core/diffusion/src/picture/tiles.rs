//! Runs a network on overlapping tiles, without seams, where the whole picture needs too much memory.
//!
//! Autoencoders normalise over all pixels, so the colours of tiles still differ a little from those of the whole. Prefer the whole
//! where it fits.

/// Overlaps that hide seams without doing most of the work twice or more.
const OVERLAPS: std::ops::RangeInclusive<f64> = 0.25..=0.75;

/// The part of an overlap at a tile's edge that comes from the other tile alone.
const EDGE: f64 = 0.25;
/// What the edge counts nevertheless, for tiles too small to overlap.
const LEAST: f64 = 1e-6;

/// Tiles that cover a picture or its latents. All have the same size, so that one engine runs them.
///
/// The plan counts in pixels or in latents, whichever side of the network has fewer. So tiles on the other side begin at whole
/// multiples of its scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiles {
    rows: Axis,
    columns: Axis,
}

/// The tensor on one side of a network: `[channels, height · scale, width · scale]` for a plan or tile of `height × width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Channels.
    pub channels: usize,
    /// Values per unit of the plan, in each direction.
    pub scale: usize,
}

/// Why tiles cannot be made or joined.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TileError {
    /// The picture or the tile has no pixels.
    #[error("{size:?} (height, width) cannot be divided into tiles of {tile:?}: take sides of at least 1")]
    Empty {
        /// Height and width of the whole.
        size: [usize; 2],
        /// Height and width of a tile.
        tile: [usize; 2],
    },
    /// The overlap is too small to hide seams, or so large that most work is done many times.
    #[error("tiles cannot overlap by {overlap} of their size: take {} to {}", OVERLAPS.start(), OVERLAPS.end())]
    Overlap {
        /// The requested overlap.
        overlap: f64,
    },
    /// A tensor has another size than the plan says.
    #[error("{what} has {got} values, but {expected} fit the tiles: use the plan that belongs to it")]
    Length {
        /// Which tensor.
        what: &'static str,
        /// Values that the plan needs.
        expected: usize,
        /// Values that it has.
        got: usize,
    },
}

impl Tiles {
    /// Plans tiles of `tile` (height, width) over `size` (height, width). A tile is never larger than the whole. Neighbours
    /// overlap by at least the share `overlap` of their size, from 0.25 to 0.75, but never wholly.
    ///
    /// # Errors
    /// [`TileError::Empty`], [`TileError::Overlap`].
    pub fn new(size: [usize; 2], tile: [usize; 2], overlap: f64) -> Result<Self, TileError> {
        if size.contains(&0) || tile.contains(&0) {
            return Err(TileError::Empty { size, tile });
        }
        if !OVERLAPS.contains(&overlap) {
            return Err(TileError::Overlap { overlap });
        }
        Ok(Self { rows: Axis::new(size[0], tile[0], overlap), columns: Axis::new(size[1], tile[1], overlap) })
    }

    /// Height and width of every tile.
    pub fn tile(&self) -> [usize; 2] {
        [self.rows.tile, self.columns.tile]
    }

    /// The first row and column of each tile, in the order in which they run.
    pub fn starts(&self) -> Vec<[usize; 2]> {
        self.rows.starts.iter().flat_map(|y| self.columns.starts.iter().map(move |x| [*y, *x])).collect()
    }

    /// Runs a network on the tiles of `input` and joins what it returns. `run` gets each tile in the layout `from` and returns
    /// it in the layout `to`.
    ///
    /// Where tiles overlap, each fades out linearly, and shares add up to 1. The outer quarter of an overlap comes from the other
    /// tile alone, because a network pads there. The borders of the whole are the same for a tile, so nothing fades out there.
    ///
    /// # Errors
    /// The first error of `run`, and [`TileError::Length`].
    pub fn run<E: From<TileError>>(
        &self,
        input: &[f32],
        from: Layout,
        to: Layout,
        mut run: impl FnMut(Vec<f32>) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<f32>, E> {
        let size = [self.rows.length, self.columns.length];
        check("the input", input.len(), from.values(size))?;
        let mut out = vec![0.0; to.values(size)];
        let (row_shares, column_shares) = (self.rows.shares(to.scale), self.columns.shares(to.scale));
        for (y, row_shares) in self.rows.starts.iter().zip(&row_shares) {
            for (x, column_shares) in self.columns.starts.iter().zip(&column_shares) {
                let tile = run(self.cut(input, from, [*y, *x]))?;
                check("the output of a tile", tile.len(), to.values(self.tile()))?;
                for (index, row) in tile.chunks_exact(column_shares.len()).enumerate() {
                    let row_share = row_shares[index % row_shares.len()];
                    let start = self.place(to, [*y, *x], index);
                    for ((out, value), share) in out[start..].iter_mut().zip(row).zip(column_shares) {
                        *out += value * (row_share * share);
                    }
                }
            }
        }
        Ok(out)
    }

    /// One tile of a tensor.
    fn cut(&self, data: &[f32], layout: Layout, start: [usize; 2]) -> Vec<f32> {
        let (rows, width) =
            (layout.channels * self.rows.tile * layout.scale, self.columns.tile * layout.scale);
        let row = |index| {
            let start = self.place(layout, start, index);
            &data[start..start + width]
        };
        (0..rows).flat_map(row).copied().collect()
    }

    /// Where row `index` of a tile begins in the whole tensor. Rows of all channels are counted on.
    fn place(&self, layout: Layout, [y, x]: [usize; 2], index: usize) -> usize {
        let rows = self.rows.tile * layout.scale;
        let (channel, row) = (index / rows, index % rows);
        ((channel * self.rows.length + y) * layout.scale + row) * self.columns.length * layout.scale
            + x * layout.scale
    }
}

impl Layout {
    fn values(self, [height, width]: [usize; 2]) -> usize {
        [height, self.scale, width, self.scale].into_iter().fold(self.channels, usize::saturating_mul)
    }
}

fn check(what: &'static str, got: usize, expected: usize) -> Result<(), TileError> {
    if got == expected { Ok(()) } else { Err(TileError::Length { what, expected, got }) }
}

/// The tiles along one direction.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Axis {
    length: usize,
    tile: usize,
    /// Length over which a tile fades out.
    feather: usize,
    starts: Vec<usize>,
}

impl Axis {
    /// As few tiles as overlap enough, spread evenly from border to border.
    fn new(length: usize, tile: usize, overlap: f64) -> Self {
        let tile = tile.min(length);
        let feather = ((tile as f64 * overlap).ceil() as usize).clamp(1, (tile - 1).max(1));
        let step = (tile - feather).max(1);
        let gaps = (length - tile).div_ceil(step);
        let starts = (0..=gaps).map(|index| (length - tile) * index / gaps.max(1)).collect();
        Self { length, tile, feather, starts }
    }

    /// The share of each tile at each of its places. At every place of the whole, they add up to 1.
    fn shares(&self, scale: usize) -> Vec<Vec<f32>> {
        let (places, feather) = (self.tile * scale, (self.feather * scale) as f64);
        let (edge, ramp) = (feather * EDGE, feather * (1.0 - 2.0 * EDGE));
        let rise = |place: usize| ((place as f64 + 0.5 - edge) / ramp).clamp(LEAST, 1.0);
        let weight = |start: usize, place: usize| {
            let from_start = if start == 0 { 1.0 } else { rise(place) };
            let from_end = if start + self.tile == self.length { 1.0 } else { rise(places - 1 - place) };
            f64::min(from_start, from_end)
        };
        let mut sums = vec![0.0; self.length * scale];
        for start in &self.starts {
            (0..places).for_each(|place| sums[start * scale + place] += weight(*start, place));
        }
        let share = |start: usize, place: usize| (weight(start, place) / sums[start * scale + place]) as f32;
        self.starts.iter().map(|start| (0..places).map(|place| share(*start, place)).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn plans() {
        let tiles = Tiles::new([64, 100], [64, 64], 0.25).unwrap();
        assert_eq!(tiles.starts(), [[0, 0], [0, 36]]);
        // 128 + 96 + 96 < 321.
        assert_eq!(Tiles::new([320, 321], [128, 128], 0.25).unwrap().starts().len(), 3 * 4);
        assert_eq!(Tiles::new([8, 8], [64, 64], 0.25).unwrap().tile(), [8, 8]);
    }

    #[test]
    fn impossible_plans_are_errors() {
        let error = Tiles::new([8, 8], [4, 4], 0.1).unwrap_err().to_string();
        assert_eq!(error, "tiles cannot overlap by 0.1 of their size: take 0.25 to 0.75");
        assert!(Tiles::new([8, 8], [4, 4], f64::NAN).is_err());
        assert_eq!(Tiles::new([8, 0], [4, 4], 0.5), Err(TileError::Empty { size: [8, 0], tile: [4, 4] }));
        let tiles = Tiles::new([8, 8], [4, 4], 0.5).unwrap();
        let layout = Layout { channels: 1, scale: 1 };
        assert_eq!(
            tiles.run(&[0.0; 63], layout, layout, Ok),
            Err(TileError::Length { what: "the input", expected: 64, got: 63 })
        );
        let error = tiles.run(&[0.0; 64], layout, layout, |_| Ok::<_, TileError>(vec![0.0])).unwrap_err();
        assert_eq!(error, TileError::Length { what: "the output of a tile", expected: 16, got: 1 });
    }

    #[test]
    fn shares_fall_linearly_between_edges() {
        let axis = Axis::new(12, 8, 0.5);
        assert_eq!(axis.starts, [0, 4]);
        let least = LEAST as f32;
        let first = [1.0, 1.0, 1.0, 1.0, 1.0 - least, 0.75, 0.25, least];
        let second: Vec<f32> = first.iter().rev().copied().collect();
        for (found, expected) in axis.shares(1).iter().zip([&first[..], &second]) {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-7), "{found:?}");
        }
    }

    /// A network whose results are wrong near the edges of its input, but for the borders of the whole.
    #[test]
    fn edges_of_tiles_do_not_count() {
        let (length, layout) = (50, Layout { channels: 1, scale: 2 });
        let tiles = Tiles::new([1, length], [1, 16], 0.25).unwrap();
        let mut starts = tiles.starts().into_iter();
        let run = |mut tile: Vec<f32>| {
            let [_, start] = starts.next().unwrap();
            for row in tile.chunks_mut(32) {
                if start > 0 {
                    row[..2].fill(99.0);
                }
                if start + 16 < length {
                    row[30..].fill(99.0);
                }
            }
            Ok::<_, TileError>(tile)
        };
        let out = tiles.run(&vec![0.5; 2 * 2 * length], layout, layout, run).unwrap();
        assert!(out.iter().all(|value| (value - 0.5).abs() < 1e-3), "{out:?}");
    }

    fn plans_of_any_size() -> impl Strategy<Value = Tiles> {
        (1usize..40, 1usize..40, 1usize..20, 1usize..20, 0.25f64..=0.75)
            .prop_map(|(height, width, y, x, overlap)| Tiles::new([height, width], [y, x], overlap).unwrap())
    }

    proptest! {
        #[test]
        fn tiles_overlap_enough_and_reach_both_borders(length in 1usize..3000, tile in 1usize..600, overlap in 0.25f64..=0.75) {
            let axis = Axis::new(length, tile, overlap);
            prop_assert_eq!((axis.starts[0], axis.starts.last().unwrap() + axis.tile), (0, length));
            let least = ((axis.tile as f64 * overlap).ceil() as usize).min(axis.tile - 1);
            for pair in axis.starts.windows(2) {
                prop_assert!(pair[0] < pair[1] && pair[1] + least <= pair[0] + axis.tile);
            }
        }

        #[test]
        fn a_constant_stays(tiles in plans_of_any_size(), value in -9.0f32..9.0, from in 1usize..4, to in 1usize..4) {
            let [from, to] = [from, to].map(|scale| Layout { channels: 2, scale });
            let size = [tiles.rows.length, tiles.columns.length];
            let run = |tile: Vec<f32>| {
                assert!(tile.iter().all(|v| *v == value));
                Ok::<_, TileError>(vec![value; to.values(tiles.tile())])
            };
            let out = tiles.run(&vec![value; from.values(size)], from, to, run).unwrap();
            prop_assert!(out.iter().all(|v| (v - value).abs() <= 1e-5));
        }

        /// Each value becomes a square of values that depend on their place in it, in two channels.
        #[test]
        fn a_local_network_gives_the_same_in_tiles(tiles in plans_of_any_size(), from in 1usize..3, grow in 1usize..4) {
            let input = Layout { channels: 1, scale: from };
            let output = Layout { channels: 2, scale: from * grow };
            let network = |data: &[f32], width: usize| {
                let mut out = Vec::new();
                for (channel, row) in (0..2).flat_map(|channel| data.chunks(width * from).map(move |row| (channel, row))) {
                    for dy in 0..grow {
                        let squares = row.iter().flat_map(|value| (0..grow).map(move |dx| (value, dx)));
                        out.extend(squares.map(|(v, dx)| (v * 0.7).sin() + (channel * 9 + dy * 3 + dx) as f32));
                    }
                }
                out
            };
            let size = [tiles.rows.length, tiles.columns.length];
            let data: Vec<f32> = (0..input.values(size)).map(|i| (i * i % 101) as f32).collect();
            let whole = network(&data, size[1]);
            let tiled = tiles.run(&data, input, output, |tile| Ok::<_, TileError>(network(&tile, tiles.tile()[1]))).unwrap();
            prop_assert_eq!(whole.len(), tiled.len());
            for (a, b) in whole.iter().zip(&tiled) {
                prop_assert!((a - b).abs() <= 1e-4, "{} is not {}", b, a);
            }
        }
    }
}

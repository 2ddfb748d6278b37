use super::{
    Panels,
    activation::exp,
    panels::{Layout, Order},
};
use crate::{
    ffi::{Grid, Inputs, Kernel, Tile, Type},
    simd::{
        Level, Vectorized, Words, as_bytes, as_floats, as_words,
        lines::Lines,
        product::{Block, Product, Scales, Start, Taps},
        softmax,
        transpose::{SQUARE, Squares, transpose},
        vectorize,
    },
};
use std::{cell::RefCell, ops::Range};

/// The layout of a stack of matrices, one for each head of each batch.
#[derive(Clone, Debug)]
pub(crate) struct Heads {
    /// The strides of batch and head.
    pub(crate) strides: [isize; 2],
    /// The layout of one head's matrix.
    pub(crate) layout: Layout,
}

/// `softmax(scale * Q K' + mask) V` for every head. It goes through the keys in blocks, with a running maximum and sum, so it never
/// stores all scores. Queries are the lanes: a block of scores is a panel of keys times a few queries.
///
/// Inputs:
/// * queries: f32, read with strides;
/// * keys: in [`Panels`] of the level's rows (rows = keys, depth = size);
/// * values: in [`Panels`] of the level's rows (rows = size of a value, depth = keys);
/// * an optional mask, read with strides (rows = queries, depth = keys): f32 is added, bool says which keys are visible.
///
/// Keys and values have one group for each batch and head.
pub(crate) struct Attention {
    pub(crate) level: Level,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    /// The number of query heads that share a head of keys and values.
    pub(crate) sharing: usize,
    pub(crate) queries: usize,
    pub(crate) scale: f32,
    pub(crate) q: Heads,
    pub(crate) keys: Panels,
    pub(crate) values: Panels,
    pub(crate) mask: Option<Heads>,
    /// Whether query `i` attends only to keys up to `i`.
    pub(crate) causal: bool,
    /// Whether the output is `[batch, queries, heads, size]` rather than `[batch, heads, queries, size]`.
    pub(crate) heads_inside: bool,
    pub(crate) taps: Taps,
}

/// The approximate number of keys in a block. The exact number is a multiple of the level's rows and of two.
const KEYS: usize = 336;
/// The same for levels with tiles.
const KEYS_OF_TILES: usize = 256;
/// Queries of a tile, which read keys and values together.
const QUERIES: usize = 64;
/// The same for levels with tiles, which are so fast that they wait for keys and values from the L2 cache.
const QUERIES_OF_TILES: usize = 256;

#[derive(Default)]
struct Scratch {
    q: Lines<u32>,
    scores: Lines<f32>,
    weights: Lines<u32>,
    sums: Lines<f32>,
    state: Vec<f32>,
    /// Sums of a panel, one row for each query.
    turned: Lines<u32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Kernel for Attention {
    fn grid(&self, _: usize) -> Grid {
        let (rows, size) = (self.queries, self.values.rows);
        let (planes, cols) = match self.heads_inside {
            true => (self.batch, self.heads * size),
            false => (self.batch * self.heads, size),
        };
        let queries = match self.keys.order {
            Order::Columns => QUERIES,
            Order::Sixteens | Order::Tiles => QUERIES_OF_TILES,
        };
        Grid { together: 1, planes, rows, cols, tile_rows: queries.min(rows), tile_cols: size }
    }

    fn multiplications(&self) -> usize {
        self.batch * self.heads * self.queries * self.keys.rows * (self.keys.depth + self.values.rows)
    }

    fn words(&self) -> Words {
        self.keys.words
    }

    fn tile(&self, inputs: &Inputs<'_>, mut tile: Tile<'_>) -> Result<(), String> {
        SCRATCH.with_borrow_mut(|scratch| self.attend(inputs, &mut tile, scratch));
        Ok(())
    }
}

impl Attention {
    /// The number of keys in a block: whole panels and whole pairs.
    fn keys_of_a_block(level: Level, keys: &Panels) -> usize {
        match keys.order {
            Order::Columns => KEYS.next_multiple_of(level.block(keys.words).0),
            Order::Sixteens | Order::Tiles => KEYS_OF_TILES,
        }
    }

    /// The taps of both products, for keys in these panels.
    pub(crate) fn taps(level: Level, keys: &Panels) -> Taps {
        let most = keys.steps().max(Self::keys_of_a_block(level, keys));
        Taps::dense(most, level.block(keys.words).1)
    }

    fn attend(&self, inputs: &Inputs<'_>, tile: &mut Tile<'_>, scratch: &mut Scratch) {
        let (height, width) = self.level.block(self.keys.words);
        let (most, unit) = (Self::keys_of_a_block(self.level, &self.keys), self.values.unit());
        let size = self.values.rows;
        let (batch, head) = match self.heads_inside {
            true => (tile.plane, tile.cols.start / size),
            false => (tile.plane / self.heads, tile.plane % self.heads),
        };
        let group = batch * (self.heads / self.sharing) + head / self.sharing;
        let rows = tile.rows.clone();
        let panels = rows.len().div_ceil(width);
        let lanes = panels * width;
        let steps = self.keys.steps();
        let Scratch { q, scores, weights, sums, state, turned } = scratch;
        q.resize(steps * lanes);
        self.pack_queries(inputs.f32(0), self.q.layout_of(batch, head), rows.clone(), q);
        scores.resize(most * width);
        weights.resize(most * width);
        // Sums are transposed in squares, which may end after the last ones.
        sums.resize(size * lanes + SQUARE * width + SQUARE);
        let pitch = size.next_multiple_of(SQUARE);
        turned.resize(width.next_multiple_of(SQUARE) * pitch);
        state.resize(2 * lanes, 0.0);
        let (maxima, totals) = state.split_at_mut(lanes);
        // Half of the least number, so that its difference from a score stays finite.
        maxima.fill(f32::MIN / 2.0);
        totals.fill(0.0);

        let all = self.keys.rows;
        // With a causal mask, no query of the tile attends to a key beyond its last query.
        let seen = if self.causal { all.min(rows.end) } else { all };
        let (keys, values) = (inputs.words(1), inputs.words(2));
        let (key_panels, value_panels) = (self.keys.per_group(), self.values.per_group());
        let value_words = self.values.words.elements();
        for start in (0..seen).step_by(most) {
            let block = start..(start + most).min(seen);
            let pairs = block.len().div_ceil(value_words);
            let depth = pairs.next_multiple_of(unit);
            for panel in 0..panels {
                let lane = panel * width;
                for key in block.clone().step_by(height) {
                    let a = (group * key_panels + key / height) * self.keys.panel_len();
                    let high = height.min(block.end - key);
                    let next = if key + height < block.end { a + self.keys.panel_len() } else { keys.len() };
                    let out = &mut scores[(key - block.start) * width..];
                    let product = Product {
                        level: self.level,
                        words: self.keys.words,
                        left: self.keys.as_left(),
                        depth: steps,
                        a: &keys[a..a + self.keys.panel_len()],
                        b: &q[panel * steps * width..][..steps * width],
                        taps: &self.taps,
                        scales: Scales::default(),
                        start: Start::Zero,
                        ahead: as_bytes(&keys[next..keys.len().min(next + self.keys.panel_len())]),
                        clip: None,
                    };
                    product.into(Block::new(out, width, high, width));
                }
                let scores = &mut scores[..block.len() * width];
                self.hide(inputs, batch, head, rows.start + lane..rows.end, block.clone(), scores);
                let maxima = &mut maxima[lane..lane + width];
                let totals = &mut totals[lane..lane + width];
                let sums_before =
                    if start > 0 { panel * size * width..(panel + 1) * size * width } else { 0..0 };
                let sums = &mut sums[..];
                weights[pairs * width..depth * width].fill(0);
                let halves = if value_words == 2 { &mut weights[..pairs * width] } else { &mut [][..] };
                self.soften(scores, maxima, totals, &mut sums[sums_before], halves);
                let b = if value_words == 2 { &weights[..] } else { as_words(scores) };
                for row in (0..size).step_by(height) {
                    let a = (group * value_panels + row / height) * self.values.panel_len();
                    let first = start / value_words * height;
                    let high = height.min(size - row);
                    let next = if row + height < size { a + self.values.panel_len() + first } else { 0 };
                    let out = &mut sums[(panel * size + row) * width..];
                    let product = Product {
                        level: self.level,
                        words: self.values.words,
                        left: self.values.as_left(),
                        depth,
                        a: &values[a + first..a + first + depth * height],
                        b: &b[..depth * width],
                        taps: &self.taps,
                        scales: Scales::default(),
                        start: if start > 0 { Start::Output } else { Start::Zero },
                        ahead: as_bytes(&values[next..][..if next > 0 { depth * height } else { 0 }]),
                        clip: None,
                    };
                    product.into(Block::new(out, width, high, width));
                }
            }
        }
        // A query without visible keys yields zeros.
        totals.iter_mut().for_each(|total| *total = if *total == 0.0 { 0.0 } else { 1.0 / *total });
        let [of_sums, of_rows] =
            [(SQUARE, width), (SQUARE * pitch, pitch)].map(|(step, row)| Squares { step, row });
        for panel in 0..panels {
            let lane = panel * width;
            for first in (0..size).step_by(SQUARE) {
                let source = as_words(&sums[(panel * size + first) * width..]);
                transpose(width.div_ceil(SQUARE), (source, of_sums), (&mut turned[first..], of_rows));
            }
            let factors = &totals[lane..lane + width];
            for (row, (factor, turned)) in
                (rows.start + lane..rows.end).zip(factors.iter().zip(turned.chunks_exact(pitch)))
            {
                let out = tile.row(row).iter_mut().zip(as_floats(turned));
                out.for_each(|(out, x)| *out = x * factor);
            }
        }
    }

    /// Takes a step of the softmax for a panel of scores.
    fn soften(
        &self,
        scores: &mut [f32],
        maxima: &mut [f32],
        totals: &mut [f32],
        sums: &mut [f32],
        pairs: &mut [u32],
    ) {
        let width = self.level.block(self.keys.words).1;
        if width == softmax::LANES
            && let (Some(maxima), Some(totals)) = (maxima.first_chunk_mut(), totals.first_chunk_mut())
        {
            let (scores, sums) = (scores.as_chunks_mut().0, sums.as_chunks_mut().0);
            let pairs = pairs.as_chunks_mut().0;
            if (softmax::Step { scores, maxima, totals, sums, pairs }).take(self.level) {
                return;
            }
        }
        vectorize(Soften { width, scores, maxima, totals, sums });
    }

    /// Packs scaled queries into panels, one query per lane.
    fn pack_queries(&self, values: &[f32], layout: Layout, rows: Range<usize>, q: &mut [u32]) {
        let Panels { depth, words, .. } = self.keys;
        let (_, width) = self.level.block(words);
        let layout = Layout { start: layout.start + rows.start * layout.row_step, ..layout };
        let panels = Panels::columns([1, rows.len(), depth], width);
        let mut panel = vec![0u32; panels.panel_len()];
        for (index, out) in q.chunks_exact_mut(self.keys.steps() * width).enumerate() {
            panels.fill(values, layout, index, &mut panel);
            vectorize(Scale { scale: self.scale, width, words, from: &mut panel, out });
        }
    }

    /// Applies the masks to a panel of scores, whose rows are keys. Masked scores become minus infinity.
    fn hide(
        &self,
        inputs: &Inputs<'_>,
        batch: usize,
        head: usize,
        queries: Range<usize>,
        keys: Range<usize>,
        scores: &mut [f32],
    ) {
        let (_, width) = self.level.block(self.keys.words);
        if let Some(mask) = &self.mask {
            let layout = mask.layout_of(batch, head);
            let of_row = |query: usize| layout.start + query * layout.row_step;
            let whole = match inputs.type_of(3) {
                Type::F32 if layout.depth_step == 1 && queries.len() >= width => {
                    let mask = &inputs.f32(3)[of_row(queries.start) + keys.start..];
                    add_squares(mask, layout.row_step, width, scores)
                }
                _ => 0,
            };
            let (keys, scores) = (keys.start + whole..keys.end, &mut scores[whole * width..]);
            for (lane, query) in queries.clone().take(width).enumerate() {
                let lane = scores.iter_mut().skip(lane).step_by(width).zip(keys.clone());
                if inputs.type_of(3) == Type::F32 {
                    let row = &inputs.f32(3)[of_row(query)..];
                    lane.for_each(|(score, key)| *score += row[key * layout.depth_step]);
                } else {
                    let row = &inputs.bytes(3)[of_row(query)..];
                    let hidden = lane.filter(|(_, key)| row[key * layout.depth_step] == 0);
                    hidden.for_each(|(score, _)| *score = f32::NEG_INFINITY);
                }
            }
        }
        if self.causal && keys.end > queries.start {
            for (i, key) in keys.enumerate() {
                for (lane, query) in queries.clone().take(width).enumerate() {
                    if key > query {
                        scores[i * width + lane] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

impl Heads {
    fn layout_of(&self, batch: usize, head: usize) -> Layout {
        let offset = batch as isize * self.strides[0] + head as isize * self.strides[1];
        Layout { start: self.layout.start.wrapping_add_signed(offset), ..self.layout }
    }
}

/// Adds a mask with a row for each lane to scores with a row of lanes for each key, as many whole squares as there are. Returns how many
/// keys that are.
fn add_squares(mask: &[f32], row_step: usize, width: usize, scores: &mut [f32]) -> usize {
    if !width.is_multiple_of(SQUARE) {
        return 0;
    }
    let [of_mask, of_scores] =
        [(SQUARE * row_step, row_step), (SQUARE, width)].map(|(step, row)| Squares { step, row });
    let mut turned = vec![0u32; SQUARE * width];
    let (squares, _) = scores.as_chunks_mut::<SQUARE>();
    let mut whole = 0;
    for scores in squares.chunks_exact_mut(width) {
        // The last rows of the mask may end before a square does.
        if (width - 1) * row_step + whole + SQUARE > mask.len() {
            break;
        }
        transpose(width / SQUARE, (as_words(&mask[whole..]), of_mask), (&mut turned, of_scores));
        let sums = scores.as_flattened_mut().iter_mut().zip(as_floats(&turned));
        sums.for_each(|(score, mask)| *score += mask);
        whole += SQUARE;
    }
    whole
}

/// Multiplies panels of f32 by a factor and converts them to words.
struct Scale<'a> {
    scale: f32,
    width: usize,
    words: Words,
    from: &'a mut [u32],
    out: &'a mut [u32],
}

impl Vectorized for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Scale { scale, width, words, from, out } = self;
        from.iter_mut().for_each(|word| *word = (f32::from_bits(*word) * scale).to_bits());
        match words {
            Words::Bf16 => {
                let pairs = from.len().div_ceil(2 * width);
                out[pairs * width..].fill(0);
                for (out, pair) in out.chunks_exact_mut(width).zip(from.chunks(2 * width)) {
                    let (low, high) = pair.split_at(width);
                    for (i, out) in out.iter_mut().enumerate() {
                        let high = high.get(i).map_or(0.0, |bits| f32::from_bits(*bits));
                        *out = super::panels::pair(f32::from_bits(low[i]), high);
                    }
                }
            }
            _ => out.copy_from_slice(from),
        }
    }
}

/// A step of the softmax for any number of lanes; see [`softmax::Step`].
struct Soften<'a> {
    width: usize,
    /// Rows of `width` lanes.
    scores: &'a mut [f32],
    maxima: &'a mut [f32],
    totals: &'a mut [f32],
    sums: &'a mut [f32],
}

impl Vectorized for Soften<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        match self.width {
            32 => self.lanes::<32, FMA>(),
            16 => self.lanes::<16, FMA>(),
            12 => self.lanes::<12, FMA>(),
            _ => self.lanes::<8, FMA>(),
        }
    }
}

impl Soften<'_> {
    #[inline(always)]
    fn lanes<const LANES: usize, const FMA: bool>(self) {
        let (scores, _) = self.scores.as_chunks_mut::<LANES>();
        let (Some(maxima), Some(totals)) =
            (self.maxima.first_chunk_mut::<LANES>(), self.totals.first_chunk_mut::<LANES>())
        else {
            return;
        };
        let mut largest = *maxima;
        for row in scores.iter() {
            for (largest, x) in largest.iter_mut().zip(row) {
                *largest = if *x > *largest { *x } else { *largest };
            }
        }
        let mut factor = [0f32; LANES];
        for i in 0..LANES {
            factor[i] = exp::<FMA>(maxima[i] - largest[i]);
        }
        *maxima = largest;
        let mut sum = [0f32; LANES];
        for row in scores.iter_mut() {
            for i in 0..LANES {
                let weight = exp::<FMA>(row[i] - largest[i]);
                row[i] = weight;
                sum[i] += weight;
            }
        }
        for i in 0..LANES {
            totals[i] = totals[i] * factor[i] + sum[i];
        }
        for row in self.sums.as_chunks_mut::<LANES>().0 {
            row.iter_mut().zip(factor).for_each(|(x, factor)| *x *= factor);
        }
    }
}

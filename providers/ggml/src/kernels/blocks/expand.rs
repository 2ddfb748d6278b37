//! Expands blocks to the words that products multiply.

use super::{Blocks, GROUP, MAX_ROWS, MAX_SPAN, Plan, STEPS};
use crate::{
    kernels::{panels::interleave, quads::TURN},
    simd::{Vectorized, mul_add},
    storage::f16_to_f32,
};
use std::ops::Range;

/// Numbers in f16.
#[inline(always)]
fn halves(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|half| f16_to_f32(u16::from_le_bytes(*half)))
}

pub(super) struct Expand<'a> {
    pub(super) plan: Plan,
    pub(super) bytes: &'a [u8],
    pub(super) steps: Range<usize>,
    pub(super) words: &'a mut [u32],
}

/// The scale and the offset of each row of a block.
#[inline(always)]
fn factors(plan: &Plan, bytes: &[u8], block: usize) -> [[f32; MAX_ROWS]; 2] {
    let (rows, at) = (plan.rows, plan.scales(block));
    let (mut scales, mut offsets) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
    match plan.blocks {
        Blocks::Q8_0 => {
            scales.iter_mut().zip(halves(&bytes[at..][..2 * rows])).for_each(|(scale, half)| *scale = half);
        }
        Blocks::Q4K => {
            let factors = &bytes[plan.factors(block / GROUP)..][..4 * rows];
            for (i, out) in [&mut scales, &mut offsets].into_iter().enumerate() {
                let parts = bytes[at + i * rows..][..rows].iter().zip(halves(&factors[2 * i * rows..]));
                out.iter_mut().zip(parts).for_each(|(out, (part, factor))| *out = factor * f32::from(*part));
            }
        }
    }
    [scales, offsets]
}

/// Those factors, repeated for each step of a run.
struct Scales {
    scale: [f32; MAX_SPAN],
    offset: [f32; MAX_SPAN],
}

impl Scales {
    #[inline(always)]
    fn read(&mut self, plan: &Plan, bytes: &[u8], block: usize) {
        let rows = plan.rows;
        let [scales, offsets] = factors(plan, bytes, block);
        for step in 0..STEPS {
            let to = step * rows..(step + 1) * rows;
            self.scale[to.clone()].copy_from_slice(&scales[..rows]);
            self.offset[to].copy_from_slice(&offsets[..rows]);
        }
    }
}

/// Reads the factors of bytes: for each block its scales, then its offsets.
pub(super) struct ReadScales<'a> {
    pub(super) plan: Plan,
    pub(super) bytes: &'a [u8],
    pub(super) steps: Range<usize>,
    pub(super) out: &'a mut [f32],
}

impl Vectorized for ReadScales<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let ReadScales { plan, bytes, steps, out } = self;
        let rows = plan.rows;
        let blocks = steps.start / STEPS..steps.end.div_ceil(STEPS);
        for (block, out) in blocks.zip(out.chunks_exact_mut(2 * rows)) {
            let [scales, mut offsets] = factors(&plan, bytes, block);
            if plan.blocks == Blocks::Q8_0 {
                for row in 0..rows {
                    offsets[row] = f32::from(TURN) * scales[row];
                }
            }
            out[..rows].copy_from_slice(&scales[..rows]);
            out[rows..].copy_from_slice(&offsets[..rows]);
        }
    }
}

impl Vectorized for Expand<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Expand { plan, bytes, steps, words } = self;
        if plan.elements == 4 {
            assert_eq!(plan.blocks, Blocks::Q4K, "these bytes are words already");
            return unpack_nibbles(&plan, bytes, steps, words);
        }
        let (rows, span) = (plan.rows, plan.span());
        let mut scales = Scales { scale: [0.0; MAX_SPAN], offset: [0.0; MAX_SPAN] };
        let (mut low, mut high) = ([0f32; MAX_SPAN], [0f32; MAX_SPAN]);
        let mut part = [0; MAX_SPAN];
        let mut block = None;
        for run in steps.start / STEPS..steps.end.div_ceil(STEPS) {
            let current = run / plan.runs_of_block();
            if block != Some(current) {
                block = Some(current);
                scales.read(&plan, bytes, current);
            }
            let first = run * STEPS;
            let (from, to) = (steps.start.max(first) - first, steps.end.min(first + STEPS) - first);
            let out = &mut words[(first + from - steps.start) * rows..][..(to - from) * rows];
            let whole = out.len() == span;
            let target = if whole { &mut *out } else { &mut part[..span] };
            let integers = &bytes[run * plan.run_bytes()..][..plan.run_bytes()];
            let (low, high) = (&mut low[..span], &mut high[..span]);
            match (plan.blocks, plan.elements) {
                (Blocks::Q8_0, 1) => scale_bytes(integers, &scales.scale, low),
                (Blocks::Q8_0, _) => {
                    scale_bytes(&integers[..span], &scales.scale, low);
                    scale_bytes(&integers[span..], &scales.scale, high);
                }
                (Blocks::Q4K, 1) => {
                    let (first, second) = low.split_at_mut(span / 2);
                    scale_nibbles::<FMA>(integers, &scales, first, second);
                }
                (Blocks::Q4K, _) => scale_nibbles::<FMA>(integers, &scales, low, high),
            }
            match plan.elements {
                1 => target.iter_mut().zip(&*low).for_each(|(word, x)| *word = x.to_bits()),
                _ => interleave(low, high, target),
            }
            if !whole {
                out.copy_from_slice(&part[from * rows..to * rows]);
            }
        }
    }
}

/// Unpacks nibbles to bytes. The lower nibbles are the first half of a run. The steps are whole runs.
#[inline(always)]
fn unpack_nibbles(plan: &Plan, bytes: &[u8], steps: Range<usize>, words: &mut [u32]) {
    const EACH: u32 = 0x0f0f_0f0f;
    let runs = steps.start / STEPS..steps.end.div_ceil(STEPS);
    for (run, words) in runs.zip(words.chunks_exact_mut(plan.span())) {
        let from = bytes[run * plan.run_bytes()..][..plan.run_bytes()].as_chunks::<4>().0;
        let (low, high) = words.split_at_mut(from.len());
        for i in 0..from.len() {
            let both = u32::from_le_bytes(from[i]);
            (low[i], high[i]) = (both & EACH, both >> 4 & EACH);
        }
    }
}

#[inline(always)]
fn scale_bytes(integers: &[u8], scale: &[f32; MAX_SPAN], out: &mut [f32]) {
    let count = out.len();
    let (integers, scale) = (&integers[..count], &scale[..count]);
    for i in 0..count {
        out[i] = f32::from(integers[i].cast_signed()) * scale[i];
    }
}

/// Expands nibbles. Scales repeat with the rows, so the low and high nibbles share them.
#[inline(always)]
fn scale_nibbles<const FMA: bool>(integers: &[u8], scales: &Scales, low: &mut [f32], high: &mut [f32]) {
    let count = low.len();
    let (integers, high) = (&integers[..count], &mut high[..count]);
    let (scale, offset) = (&scales.scale[..count], &scales.offset[..count]);
    for i in 0..count {
        low[i] = mul_add::<FMA>(f32::from(integers[i] & 15), scale[i], -offset[i]);
        high[i] = mul_add::<FMA>(f32::from(integers[i] >> 4), scale[i], -offset[i]);
    }
}

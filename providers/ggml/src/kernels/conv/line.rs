use crate::{
    kernels::panels::{interleave, pair},
    simd::{Vectorized, Words, as_words},
};

/// Copies a row of a plane: columns `first`, `first + stride`, … of an input row whose elements are each repeated `repeat` times.
/// Columns outside the row are zero.
pub(super) struct Line<'a> {
    pub(super) low: &'a [f32],
    /// The second row of bf16 pairs.
    pub(super) high: Option<&'a [f32]>,
    pub(super) words: Words,
    pub(super) first: isize,
    pub(super) stride: usize,
    pub(super) repeat: usize,
    pub(super) out: &'a mut [u32],
}

impl Vectorized for Line<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Line { low, high, words, first, stride, repeat, out } = self;
        let width = low.len() * repeat;
        // Outputs `from..to` lie inside the row.
        let from = first.min(0).unsigned_abs().div_ceil(stride).min(out.len());
        let to = (width as isize - first).max(0).cast_unsigned().div_ceil(stride).clamp(from, out.len());
        out[..from].fill(0);
        out[to..].fill(0);
        if from == to {
            return;
        }
        let start = first.wrapping_add((from * stride) as isize).cast_unsigned();
        let out = &mut out[from..to];
        if stride == 1 && repeat == 1 {
            let low = &low[start..start + out.len()];
            match (words, high) {
                (Words::Bf16, Some(high)) => interleave(low, &high[start..start + out.len()], out),
                (Words::Bf16, None) => out.iter_mut().zip(low).for_each(|(out, x)| *out = pair(*x, 0.0)),
                _ => out.copy_from_slice(as_words(low)),
            }
            return;
        }
        let word = |at: usize| match words {
            Words::Bf16 => pair(low[at], high.map_or(0.0, |high| high[at])),
            _ => low[at].to_bits(),
        };
        if stride == 1 {
            let head = ((repeat - start % repeat) % repeat).min(out.len());
            let (first, rest) = out.split_at_mut(head);
            first.fill(word(start / repeat));
            let next = (start + head) / repeat;
            rest.chunks_mut(repeat).enumerate().for_each(|(i, run)| run.fill(word(next + i)));
        } else if repeat == 1 {
            out.iter_mut().enumerate().for_each(|(i, out)| *out = word(start + i * stride));
        } else {
            out.iter_mut().enumerate().for_each(|(i, out)| *out = word((start + i * stride) / repeat));
        }
    }
}

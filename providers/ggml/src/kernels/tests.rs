//! Products, convolutions and attention against f64, for every instruction set, with sizes that are no multiples of blocks.

use super::{
    Activation, Attention, Blocks, Conv, DepthwiseNchw, DepthwiseNhwc, Gemm, Heads, Layout, PackPanels,
    Panels, Patches, Window,
};
use crate::{
    ffi::{Kernel, run_kernel},
    simd::{
        Level, Words, as_words,
        product::{DEPTH, Taps},
    },
};

/// Pseudo-random numbers in [-1, 1).
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn floats(words: Vec<u32>) -> Vec<f32> {
    words.into_iter().map(f32::from_bits).collect()
}

/// Every level, with the words that it multiplies.
fn variants() -> Vec<(Level, Words)> {
    let f32s = Level::usable().into_iter().map(|level| (level, Words::F32));
    let pairs = Level::usable().into_iter().filter(|level| level.multiplies_bf16());
    f32s.chain(pairs.map(|level| (level, Words::Bf16))).collect()
}

/// Checks that the largest difference over the largest value is below 1e-5 in f32 and 1e-2 in bf16.
fn check(what: &str, words: Words, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    let limit = largest * if words == Words::Bf16 { 1e-2 } else { 1e-5 };
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*f) - e).abs() <= limit, "{what}, element {i}: {f}, not {e}");
    }
}

/// Runs a kernel on one thread and on several, which must give the same bits.
fn run(what: &str, kernel: &dyn Kernel, inputs: &[&[u32]]) -> Vec<f32> {
    let first = run_kernel(kernel, inputs, 1);
    for workers in [2, 3, 7] {
        assert!(run_kernel(kernel, inputs, workers) == first, "{what}: other bits on {workers} threads");
    }
    floats(first)
}

#[test]
fn products() {
    for (level, words) in variants() {
        for (batch, rows, cols, depth) in [(1, 1, 1, 1), (1, 77, 65, 40), (3, 15, 33, 601), (1, 260, 31, 513)]
        {
            let what = format!("{level:?} {words:?} {batch} x {rows} x {cols} x {depth}");
            let (a, b) = (noise(batch * rows * depth, 1), noise(batch * cols * depth, 2));
            let (bias, addend) = (noise(cols, 3), noise(batch * rows * cols, 4));
            let panels = Panels::right(level, words, [batch, cols, depth]);
            let packed = panels.packed(&b, true);
            let kernel = Gemm {
                bias: true,
                addend: true,
                activation: Some(Activation::Clip(-2.0, f32::INFINITY)),
                ..Gemm::dense(level, batch, rows, panels)
            };
            let found = run(&what, &kernel, &[as_words(&a), &packed, as_words(&bias), as_words(&addend)]);
            let expected: Vec<f64> = (0..batch * rows * cols)
                .map(|i| {
                    let (plane, row, col) = (i / (rows * cols), i / cols % rows, i % cols);
                    let product = |k: usize| {
                        let a = a[(plane * rows + row) * depth + k];
                        f64::from(a) * f64::from(b[(plane * depth + k) * cols + col])
                    };
                    let sum: f64 = (0..depth).map(product).sum();
                    (sum + f64::from(bias[col]) + f64::from(addend[i])).max(-2.0)
                })
                .collect();
            check(&what, words, &found, &expected);
        }
    }
}

/// Numbers as bytes with a scale for every 32, by the definition.
fn in_bytes(values: &[f32]) -> Vec<f64> {
    let block = |values: &[f32]| {
        let largest = values.iter().fold(0f32, |most, x| most.max(x.abs()));
        let scale = largest / 127.0;
        let number = |x: &f32| f64::from((x * (1.0 / scale)).round_ties_even()) * f64::from(scale);
        values.iter().map(number).collect::<Vec<_>>()
    };
    values.chunks(32).flat_map(block).collect()
}

/// Products of weights in blocks with rows in bytes.
#[test]
fn products_of_bytes() {
    let levels = Level::usable().into_iter();
    let cases = levels.flat_map(|level| [Blocks::Q8_0, Blocks::Q4K].map(|b| (level, b)));
    for (level, blocks) in cases.filter(|(level, blocks)| level.multiplies_bytes(blocks.largest())) {
        for (batch, rows, cols, depth) in
            [(1, 1, 1, 1), (2, 77, 65, 40), (1, 15, 33, 2599), (1, 260, 31, 1312), (1, 8, 97, 32)]
        {
            let what = format!("{level:?} {blocks:?} {batch} x {rows} x {cols} x {depth}");
            let (mut a, mut b) = (noise(batch * rows * depth, 1), noise(cols * depth, 2));
            // The integers are the largest ones.
            if cols == 97 {
                a.fill(1.0);
                b.fill(1.0);
            }
            let (bias, addend) = (noise(cols, 3), noise(batch * rows * cols, 4));
            let panels = Panels::right(level, Words::Bytes, [1, cols, depth]);
            let pack = |panels: &Panels| {
                let mut packed = vec![0u8; blocks.bytes(panels)];
                let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&b[start..][..to.len()]);
                blocks.pack(panels, true, read, |start, panel| {
                    packed[start..][..panel.len()].copy_from_slice(panel)
                });
                packed
            };
            // The same numbers, as f32.
            let plain = Panels::columns([1, cols, depth], 8);
            let (in_f32, mut words) = (pack(&plain), vec![0; depth * 8]);
            let mut columns = vec![0f64; cols.next_multiple_of(8) * depth];
            for (index, panel) in in_f32.chunks(blocks.panel_bytes(&plain)).enumerate() {
                blocks.expand(&plain, panel, 0..depth, &mut words);
                for (i, word) in words.iter().enumerate() {
                    columns[(index * 8 + i % 8) * depth + i / 8] = f64::from(f32::from_bits(*word));
                }
            }
            let kernel = Gemm {
                blocks: Some(blocks),
                bias: true,
                addend: true,
                activation: Some(Activation::Clip(-2.0, f32::INFINITY)),
                ..Gemm::dense(level, batch, rows, panels)
            };
            let packed: Vec<u32> =
                pack(&panels).as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            let inputs = [as_words(&a), &packed, as_words(&bias), as_words(&addend)];
            let found = run(&what, &kernel, &inputs);
            let left: Vec<Vec<f64>> = a.chunks(depth).map(in_bytes).collect();
            let expected: Vec<f64> = (0..batch * rows * cols)
                .map(|i| {
                    let (row, col) = (i / cols, i % cols);
                    let pairs = left[row].iter().zip(&columns[col * depth..]);
                    let sum: f64 = pairs.map(|(a, b)| a * b).sum();
                    (sum + f64::from(bias[col]) + f64::from(addend[i])).max(-2.0)
                })
                .collect();
            check(&what, Words::F32, &found, &expected);
        }
    }
}

/// Groups, channels and filters of a group, upscaling of the input, and the window.
type Case = (usize, usize, usize, usize, Window);

fn window(
    input: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    pad: [usize; 2],
) -> Window {
    let output = |i: usize| (input[i] + 2 * pad[i] - (kernel[i] - 1) * dilation[i] - 1) / stride[i] + 1;
    Window { input, output: [output(0), output(1)], kernel, stride, dilation, pad }
}

#[test]
fn convolutions() {
    let cases: [Case; 12] = [
        (1, 5, 17, 1, window([9, 11], [1, 1], [1, 1], [1, 1], [0, 0])),
        (1, 3, 15, 1, window([7, 300], [3, 3], [1, 1], [1, 1], [1, 1])),
        (1, 40, 30, 1, window([16, 16], [3, 3], [1, 1], [1, 1], [1, 1])),
        (2, 3, 5, 1, window([13, 10], [3, 2], [2, 3], [1, 1], [1, 0])),
        (1, 4, 6, 1, window([12, 40], [3, 3], [2, 2], [1, 1], [1, 1])),
        (1, 7, 3, 1, window([20, 33], [3, 5], [1, 2], [2, 3], [2, 4])),
        (1, 6, 20, 2, window([8, 14], [3, 3], [1, 1], [1, 1], [1, 1])),
        (1, 2, 3, 1, window([2, 600], [1, 3], [1, 1], [1, 1], [0, 0])),
        (1, 2, 1, 1, window([40, 3], [7, 3], [3, 1], [1, 1], [3, 1])),
        (2, 25, 31, 1, window([21, 35], [3, 3], [1, 1], [1, 1], [1, 1])),
        (1, 70, 61, 2, window([26, 38], [3, 3], [1, 1], [1, 1], [0, 2])),
        (1, 66, 24, 1, window([6, 270], [3, 3], [1, 1], [1, 1], [2, 0])),
    ];
    for (level, words) in variants() {
        for (case, (groups, channels, filters, repeat, window)) in cases.iter().cloned().enumerate() {
            let what = format!("{level:?} {words:?} case {case}");
            let taps = window.kernel[0] * window.kernel[1];
            let depth = channels * taps;
            let panels = Panels::filters(level, words, [groups, filters, depth], taps);
            let weights = noise(groups * filters * depth, 1);
            let packed = panels.packed(&weights, false);
            // Small images are multiplied together, if their number permits.
            let (batch, pixels) = (2 + case % 3, window.input[0] * window.input[1] / (repeat * repeat));
            let outputs = window.output[0] * window.output[1];
            let x = noise(batch * groups * channels * pixels, 2);
            let (bias, shift) = (noise(groups * filters, 3), noise(batch * groups * filters, 4));
            let addend = noise(batch * groups * filters * outputs, 5);
            let kernel = || {
                let mut kernel = Conv::new(level, batch, panels, window.clone(), repeat);
                (kernel.bias, kernel.shift, kernel.addend) = (true, true, true);
                kernel.activation = Some(Activation::Clip(-1.0, 9.0));
                kernel
            };
            let inputs = [as_words(&x), &packed, as_words(&bias), as_words(&shift), as_words(&addend)];
            let found = run(&what, &kernel(), &inputs);
            let product = |plane: usize, filter: usize, at: usize| {
                let (oy, ox) = (at / window.output[1], at % window.output[1]);
                let mut sum = 0.0;
                for k in 0..depth {
                    let (channel, ky, kx) = (k / taps, k % taps / window.kernel[1], k % window.kernel[1]);
                    let (Some(iy), Some(ix)) = (window.source(0, oy, ky), window.source(1, ox, kx)) else {
                        continue;
                    };
                    let width = window.input[1] / repeat;
                    let from = (plane * channels + channel) * pixels + iy / repeat * width + ix / repeat;
                    let weight = weights[(plane % groups * filters + filter) * depth + k];
                    sum += f64::from(x[from]) * f64::from(weight);
                }
                sum + f64::from(bias[plane % groups * filters + filter])
            };
            let element = |i: usize| {
                let (plane, filter, at) = (i / (filters * outputs), i / outputs % filters, i % outputs);
                let more = shift[plane * filters + filter] + addend[i];
                (product(plane, filter, at) + f64::from(more)).clamp(-1.0, 9.0)
            };
            let expected: Vec<f64> = (0..found.len()).map(element).collect();
            check(&what, words, &found, &expected);
            if let Some(kernel) = kernel().by_winograd() {
                let what = format!("{what}, by Winograd");
                check(&what, words, &run(&what, &kernel, &inputs), &expected);
            }

            if (groups, repeat) != (1, 1) {
                continue;
            }
            let panels = Panels::right(level, words, [1, filters, depth]);
            let steps = [pixels, window.input[1], 1];
            let kernel = Gemm {
                level,
                batch,
                rows: outputs,
                dims: vec![batch],
                strides: vec![(channels * pixels) as isize],
                layout: Layout { start: 0, row_step: 0, depth_step: 0 },
                patches: Some(Patches::new(window.clone(), channels, steps)),
                panels,
                blocks: None,
                bias: true,
                addend: false,
                activation: Some(Activation::Clip(-1.0, 9.0)),
                taps: Taps::dense(DEPTH, panels.block),
            };
            let what = format!("{what}, channels last");
            let found =
                run(&what, &kernel, &[as_words(&x), &panels.packed(&weights, false), as_words(&bias)]);
            let at = |i: usize| (i / (filters * outputs), i % filters, i / filters % outputs);
            let element = |i: usize| {
                let (plane, filter, at) = at(i);
                product(plane, filter, at).clamp(-1.0, 9.0)
            };
            let expected: Vec<f64> = (0..found.len()).map(element).collect();
            check(&what, words, &found, &expected);
        }
    }
}

#[test]
fn depthwise_convolutions() {
    for window in [
        window([9, 11], [3, 3], [1, 1], [1, 1], [1, 1]),
        window([14, 14], [3, 3], [2, 2], [1, 1], [1, 1]),
        window([7, 2100], [5, 3], [1, 1], [2, 3], [4, 3]),
        window([61, 70], [3, 5], [2, 3], [1, 1], [0, 2]),
        window([300, 40], [3, 3], [2, 2], [1, 1], [1, 0]),
        window([5, 9], [1, 1], [1, 1], [1, 1], [0, 0]),
        window([6, 6], [5, 5], [1, 1], [1, 1], [4, 4]),
    ] {
        let (batch, channels, taps) = (2, 37, window.kernel[0] * window.kernel[1]);
        let [pixels, outputs] = [window.input, window.output].map(|size| size[0] * size[1]);
        let (x, weights) = (noise(batch * channels * pixels, 1), noise(channels * taps, 2));
        let bias = noise(channels, 3);
        let clip = Some(Activation::Clip(-0.5, 6.0));
        let kernel = DepthwiseNchw::new(batch, channels, window.clone(), true, clip);
        let what = format!("{window:?}");
        let found = run(&what, &kernel, &[as_words(&x), as_words(&weights), as_words(&bias)]);
        let element = |i: usize| {
            let (plane, oy, ox) = (i / outputs, i % outputs / window.output[1], i % window.output[1]);
            let mut sum = f64::from(bias[plane % channels]);
            for k in 0..taps {
                let (ky, kx) = (k / window.kernel[1], k % window.kernel[1]);
                let (Some(iy), Some(ix)) = (window.source(0, oy, ky), window.source(1, ox, kx)) else {
                    continue;
                };
                let weight = weights[plane % channels * taps + k];
                sum += f64::from(x[plane * pixels + iy * window.input[1] + ix]) * f64::from(weight);
            }
            sum.clamp(-0.5, 6.0)
        };
        let expected: Vec<f64> = (0..found.len()).map(element).collect();
        check(&what, Words::F32, &found, &expected);

        let kernel = DepthwiseNhwc { batch, channels, window: window.clone(), bias: true, activation: clip };
        let packed = DepthwiseNhwc::panels(channels, taps).packed(&weights, false);
        let last = |from: &[f32], pixels: usize| -> Vec<f32> {
            let at = |i: usize| {
                (i / (pixels * channels) * channels + i % channels) * pixels + i / channels % pixels
            };
            (0..from.len()).map(|i| from[at(i)]).collect()
        };
        let found = run(&what, &kernel, &[as_words(&last(&x, pixels)), &packed, as_words(&bias)]);
        let expected = last(&expected.iter().map(|x| *x as f32).collect::<Vec<_>>(), outputs);
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        check(&format!("{what}, channels last"), Words::F32, &found, &expected);
    }
}

/// Matrices in blocks, as a tensor, and the words that the blocks stand for.
fn in_blocks(blocks: Blocks, panels: &Panels, values: &[f32], transposed: bool) -> [Vec<u32>; 2] {
    let (mut bytes, mut words) = (Vec::new(), Vec::new());
    let read = |start: usize, to: &mut [f32]| to.copy_from_slice(&values[start..][..to.len()]);
    blocks.pack(panels, transposed, read, |start, panel| {
        assert_eq!(start, bytes.len());
        bytes.extend_from_slice(panel);
        let mut all = vec![0; panels.panel_len()];
        blocks.expand(panels, panel, 0..panels.steps(), &mut all);
        words.extend(all);
    });
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    [bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect(), words]
}

#[test]
fn blocks_are_multiplied_as_the_words_they_stand_for() {
    for (level, words) in variants() {
        for blocks in [Blocks::Q8_0, Blocks::Q4K] {
            let (rows, cols, depth) = (115, 70, 601);
            let panels = Panels::right(level, words, [1, cols, depth]);
            let [kept, plain] = in_blocks(blocks, &panels, &noise(cols * depth, 1), true);
            let x = noise(rows * depth, 2);
            let kernel = |blocks| Gemm {
                level,
                batch: 1,
                rows,
                dims: vec![1],
                strides: vec![0],
                layout: Layout { start: 0, row_step: depth, depth_step: 1 },
                patches: None,
                panels,
                blocks,
                bias: false,
                addend: false,
                activation: None,
                taps: Taps::dense(DEPTH, panels.block),
            };
            let what = format!("{level:?} {words:?} {blocks:?}");
            let found = run(&what, &kernel(Some(blocks)), &[as_words(&x), &kept]);
            assert!(found == run(&what, &kernel(None), &[as_words(&x), &plain]), "{what}: product");

            let strips = window([9, 30], [5, 3], [1, 2], [1, 1], [2, 1]);
            let winograd = window([9, 30], [3, 3], [1, 1], [1, 1], [1, 1]);
            for window in [strips, winograd] {
                let (channels, filters, taps) = (37, 17, window.kernel[0] * window.kernel[1]);
                let depth = channels * taps;
                let panels = Panels::filters(level, words, [1, filters, depth], taps);
                let [kept, plain] = in_blocks(blocks, &panels, &noise(filters * depth, 3), false);
                let x = noise(channels * 270, 4);
                let conv = || Conv::new(level, 1, panels, window.clone(), 1);
                for mut kernel in [Some(conv()), conv().by_winograd()].into_iter().flatten() {
                    let expected = run(&what, &kernel, &[as_words(&x), &plain]);
                    kernel.blocks = Some(blocks);
                    assert!(run(&what, &kernel, &[as_words(&x), &kept]) == expected, "{what}: convolution");
                }
            }
        }
    }
}

#[test]
fn attention() {
    // Batch, heads, query heads that share a head, queries, keys, size, size of values, causal, mask.
    let cases = [
        (1, 2, 1, 70, 77, 40, 40, false, false),
        (2, 4, 2, 33, 701, 9, 17, false, true),
        (1, 3, 1, 100, 100, 16, 16, true, false),
        (1, 1, 1, 1, 1, 1, 1, false, true),
        (1, 2, 1, 300, 300, 8, 8, true, false),
    ];
    for (level, words) in variants() {
        for (case, (batch, heads, sharing, queries, length, size, width, causal, masked)) in
            cases.into_iter().enumerate()
        {
            let what = format!("{level:?} {words:?} case {case}");
            let kv = heads / sharing;
            // Lengths outside heads, as linear layers store them.
            let q = noise(batch * queries * heads * size, 1);
            let (k, v) = (noise(batch * length * kv * size, 2), noise(batch * length * kv * width, 3));
            let mut mask = noise(queries * length, 4);
            mask.iter_mut().step_by(3).for_each(|x| *x = f32::NEG_INFINITY);
            mask.iter_mut().step_by(length).for_each(|x| *x = 0.5);
            let pack = |x: &[f32], panels: Panels, wide: usize, layout: Layout| {
                let strides = vec![(length * kv * wide) as isize, wide as isize];
                let kernel = PackPanels { panels, dims: vec![batch, kv], strides, layout };
                run_kernel(&kernel, &[as_words(x)], 1)
            };
            let groups = batch * kv;
            let keys = Panels::left(level, words, [groups, length, size]);
            let values = Panels::left(level, words, [groups, width, length]);
            let packed_k = pack(&k, keys, size, Layout { start: 0, row_step: kv * size, depth_step: 1 });
            let packed_v = pack(&v, values, width, Layout { start: 0, row_step: 1, depth_step: kv * width });
            let heads_of = |strides: [usize; 4]| Heads {
                strides: [strides[0] as isize, strides[1] as isize],
                layout: Layout { start: 0, row_step: strides[2], depth_step: strides[3] },
            };
            let kernel = Attention {
                level,
                batch,
                heads,
                sharing,
                queries,
                scale: 0.7,
                q: heads_of([queries * heads * size, size, heads * size, 1]),
                keys,
                values,
                mask: masked.then(|| heads_of([0, 0, length, 1])),
                causal,
                heads_inside: true,
                taps: Attention::taps(level, &keys),
            };
            let mut inputs: Vec<&[u32]> = vec![as_words(&q), &packed_k, &packed_v];
            inputs.extend(masked.then_some(as_words(&mask)));
            let found = run(&what, &kernel, &inputs);
            let mut expected = Vec::new();
            for i in 0..batch * queries * heads {
                let (b, query, head) = (i / (queries * heads), i / heads % queries, i % heads);
                let row = |key: usize| (b * length + key) * kv + head / sharing;
                let score = |key: usize| {
                    let dot: f64 = (0..size)
                        .map(|d| f64::from(q[i * size + d]) * f64::from(k[row(key) * size + d]))
                        .sum();
                    let mask = if masked { f64::from(mask[query * length + key]) } else { 0.0 };
                    let hidden = if causal && key > query { f64::NEG_INFINITY } else { 0.0 };
                    dot * f64::from(0.7f32) + mask + hidden
                };
                let scores: Vec<f64> = (0..length).map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                for d in 0..width {
                    let sum: f64 = scores
                        .iter()
                        .enumerate()
                        .map(|(key, s)| (s - largest).exp() / total * f64::from(v[row(key) * width + d]))
                        .sum();
                    expected.push(sum);
                }
            }
            check(&what, words, &found, &expected);
        }
    }
}

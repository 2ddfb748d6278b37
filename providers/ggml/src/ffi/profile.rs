//! Where the time of a run goes, operator by operator.

use crate::simd::{
    Level, Words,
    product::{Block, Left, Product, ROW_STRIDE, SCALES, STEPS, Scales, Start, Taps},
};
use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::Mutex,
    time::{Duration, Instant},
};

/// Environment variable that turns profiling on. `operators` prints a line for each operator, `nodes` a line for each node.
const VARIABLE: &str = "SDRUN_GGML_PROFILE";

/// The kinds of words that products multiply, in the order of the type.
const WORDS: [Words; 3] = [Words::F32, Words::Bf16, Words::Bytes];

/// Properties of a node that are known before it runs.
#[derive(Clone)]
pub(super) struct Note {
    /// `operator Conv of node "/conv_in/Conv"`, or ggml's name for its operation.
    pub(super) name: String,
    pub(super) multiplications: usize,
    pub(super) words: Words,
}

/// Records the time at the end of each node.
pub(crate) struct Profile {
    by_node: bool,
    threads: usize,
    /// GFLOP/s of the inner loop of matrix products on all threads, for each kind of [`WORDS`] (0 without a loop for it).
    peak: [f64; 3],
    nodes: Vec<Note>,
    started: Instant,
    ends: Mutex<Vec<Duration>>,
}

impl Profile {
    /// A profile of these nodes, if the environment variable is set.
    pub(super) fn wanted(threads: usize, nodes: impl FnOnce() -> Vec<Note>) -> Option<Self> {
        let by_node = match std::env::var(VARIABLE).ok()?.as_str() {
            "nodes" => true,
            "" | "0" => return None,
            _ => false,
        };
        let peak = WORDS.map(|words| speed(words) * threads as f64);
        let (started, ends) = (Instant::now(), Mutex::default());
        Some(Profile { by_node, threads, peak, nodes: nodes(), started, ends })
    }
    pub(super) fn start(&mut self) {
        self.started = Instant::now();
        self.ends.lock().unwrap_or_else(|p| p.into_inner()).clear();
    }
    /// Records the end of a node.
    pub(super) fn mark(&self) {
        let now = self.started.elapsed();
        self.ends.lock().unwrap_or_else(|p| p.into_inner()).push(now);
    }

    /// A table of the last run, the slowest first.
    pub(super) fn table(&self) -> String {
        #[derive(Default)]
        struct Row {
            nodes: usize,
            time: Duration,
            flops: [f64; 3],
        }
        let ends = self.ends.lock().unwrap_or_else(|p| p.into_inner());
        let (mut rows, mut before) = (BTreeMap::<&str, Row>::new(), Duration::ZERO);
        for (note, end) in self.nodes.iter().zip(ends.iter()) {
            let name = match note.name.strip_prefix("operator ") {
                Some(rest) if !self.by_node => rest.split(' ').next().unwrap_or(rest),
                _ => &note.name,
            };
            let row = rows.entry(name).or_default();
            row.nodes += 1;
            row.time += *end - before;
            row.flops[note.words as usize] += 2.0 * note.multiplications as f64;
            before = *end;
        }
        let mut rows: Vec<_> = rows.into_iter().collect();
        rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.time));
        let total = before.as_secs_f64().max(1e-9);
        let mut text = format!(
            "{} nodes in {:.3} ms on {} threads; peak {:.0} GFLOP/s f32, {:.0} bf16, {:.0} bytes\n\
             operator                 nodes         ms  share   GFLOP/s  of peak\n",
            ends.len(),
            total * 1e3,
            self.threads,
            self.peak[0],
            self.peak[1],
            self.peak[2],
        );
        for (name, row) in rows {
            let seconds = row.time.as_secs_f64().max(1e-9);
            let ideal: f64 = row.flops.iter().zip(self.peak).map(|(flops, peak)| flops / peak.max(1.0)).sum();
            let _ = writeln!(
                text,
                "{name:<24} {:>5} {:>10.3} {:>5.1}% {:>9.1} {:>7.1}%",
                row.nodes,
                seconds * 1e3,
                100.0 * seconds / total,
                row.flops.iter().sum::<f64>() / 1e9 / seconds,
                100.0 * ideal / 1e9 / seconds,
            );
        }
        text
    }
}

/// GFLOP/s of one core in the inner loop with operands in the L1 cache, or 0 without such a loop.
fn speed(words: Words) -> f64 {
    let level = Level::detect();
    let multiplies = match words {
        Words::F32 => true,
        Words::Bf16 => level.multiplies_bf16(),
        Words::Bytes => level.multiplies_bytes(0),
    };
    if !multiplies {
        return 0.0;
    }
    let ((rows, cols), depth) = (level.block(words), 64);
    let left = match words {
        Words::Bytes => Left::Rows,
        _ if level.has_tiles(words) => Left::Tiles,
        _ => Left::Columns(rows),
    };
    let (a, b) = (vec![0u32; rows * ROW_STRIDE], vec![0u32; cols * depth]);
    let scales = (vec![[0f32; 2]; rows * SCALES], vec![0f32; 2 * cols * depth / STEPS]);
    let (taps, mut out) = (Taps::dense(depth, cols), vec![0f32; rows * cols]);
    let product = Product {
        level,
        words,
        left,
        depth,
        a: &a,
        b: &b,
        taps: &taps,
        scales: Scales { rows: &scales.0, cols: &scales.1 },
        start: Start::Output,
        ahead: &[],
        clip: None,
    };
    let per_word = 2 * words.elements();
    let mut best = 0f64;
    for _ in 0..20 {
        let (started, times) = (Instant::now(), 2000);
        for _ in 0..times {
            product.into(Block::new(std::hint::black_box(&mut out), cols, rows, cols));
        }
        let flops = (times * rows * cols * depth * per_word) as f64;
        best = best.max(flops / 1e9 / started.elapsed().as_secs_f64());
    }
    best
}

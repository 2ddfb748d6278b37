//! How well the built-in models use many cores. `simulated_time` lets threads take tiles as in a real run. It counts what each tile
//! computes and packs, and what it costs to start a node. It leaves out memory bandwidth, caches, and ggml's own operations, which are a
//! few additions.

use super::{bank, cpu, models::opened};
use crate::{ffi::simulated_time, optimize::optimize, translate::translate};
use sdrun_abi::Precision;
use sdrun_graph::{OpenDims, simplify};
use sdrun_weights::builtin;

/// The lowest efficiency allowed with 16 threads, with 32 threads, and with 8 threads at full speed and 8 at half speed.
const FLOORS: [f64; 3] = [0.85, 0.75, 0.7];
/// Lower limits for networks with too little work to share: text encoders have 77 tokens, ESRGAN's layers few filters. On ARM,
/// sd21/text-encoder keeps 72 % of 32 threads busy, on x86 at least 75 %.
const OTHERS: &[(&str, [f64; 3])] = &[
    ("sd21/text-encoder", [0.8, 0.7, 0.55]),
    ("sdxl/text-encoder-2", [0.8, 0.7, 0.55]),
    ("esrgan/x4", [0.95, 0.45, 0.65]),
    ("esrgan/x4-6-blocks", [0.95, 0.5, 0.65]),
    ("esrgan/x2", [0.95, 0.45, 0.65]),
];
/// Networks with fewer multiplications are only printed. They take a few hundredths of a second on two cores, much of it waiting between
/// nodes.
const LEAST: f64 = 10e9;

#[test]
fn work_divides_among_many_cores() {
    let mixed: Vec<f64> = (0..16).map(|i| if i % 2 == 0 { 1.0 } else { 0.5 }).collect();
    let mut failed = Vec::new();
    for model in builtin::list() {
        let (mut graph, shapes) = opened(model);
        simplify(&mut graph, &shapes, OpenDims::Refuse).unwrap();
        optimize(&mut graph, false).unwrap();
        let mut bank = bank(&graph);
        let builder = translate(&graph, Precision::Fp32, cpu(), &mut bank).unwrap().builder;
        let alone = simulated_time(&builder, &[1.0]);
        let efficiency =
            |speeds: &[f64]| alone / simulated_time(&builder, speeds) / speeds.iter().sum::<f64>();
        let equal = [2, 4, 8, 16, 32, 64].map(|threads| efficiency(&vec![1.0; threads]));
        let found = [equal[3], equal[4], efficiency(&mixed)];
        println!("{}: {:.1} G multiplications; {equal:.2?}, mixed {:.2}", model.name, alone / 1e9, found[2]);
        let floors =
            OTHERS.iter().find(|(name, _)| *name == model.name).map_or(FLOORS, |(_, floors)| *floors);
        if alone >= LEAST && found.iter().zip(floors).any(|(found, floor)| *found < floor) {
            failed.push((model.name, found));
        }
    }
    assert!(failed.is_empty(), "{failed:.2?}");
}

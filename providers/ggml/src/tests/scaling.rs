//! How well the work of the built-in models divides among many cores. `simulated_time` follows threads that take tiles by the rules of a
//! real run. It knows what tiles compute and pack again, and what a node costs to start. It does not know the speed of the memory, ggml's
//! own operations (a few additions), and how large the caches are.

use super::{bank, cpu};
use crate::{ffi::simulated_time, optimize::optimize, translate::translate};
use sdrun_abi::Precision;
use sdrun_graph::{ExternalBase, Graph, OpenDims, simplify};
use sdrun_weights::builtin;

/// The efficiency that must be reached with 16 equal threads, 32 equal threads, and 16 threads of which half are half as fast.
const FLOORS: [f64; 3] = [0.85, 0.75, 0.7];
/// Networks that miss them: text encoders have 77 tokens for all threads, and ESRGAN's layers have few filters.
const OTHERS: &[(&str, [f64; 3])] = &[
    ("sd21/text-encoder", [0.8, 0.75, 0.55]),
    ("sdxl/text-encoder-2", [0.8, 0.7, 0.55]),
    ("esrgan/x4", [0.95, 0.45, 0.65]),
    ("esrgan/x4-6-blocks", [0.95, 0.5, 0.65]),
    ("esrgan/x2", [0.95, 0.45, 0.65]),
];
/// Multiplications of the smallest network that counts. Smaller ones take some hundredths of a second on two cores, and much of that is
/// waiting from node to node.
const LEAST: f64 = 10e9;

#[test]
fn work_divides_among_many_cores() {
    let mixed: Vec<f64> = (0..16).map(|i| if i % 2 == 0 { 1.0 } else { 0.5 }).collect();
    let mut failed = Vec::new();
    for model in builtin::list() {
        let bytes = model.graph_bytes().unwrap();
        let mut graph = Graph::from_bytes(bytes.into(), model.name, ExternalBase::Stripped).unwrap();
        let shapes =
            model.inputs.iter().map(|input| (input.name.to_string(), input.shape.to_vec())).collect();
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

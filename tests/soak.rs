//! Long use: refits a session and runs it many times, and starts and ends many workers. Memory, open files, threads and temporary files
//! must not grow, and equal weights must give equal bits.
//!
//! `SDRUN_SOAK` sets the number of refits (default: 400). The number of workers is a tenth of that.

#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Model, Tensors,
    abi::{DType, NoHost, Result, Weight, WeightSource},
};
use sdrun_tests::{
    lab::{ALL, Lab, device_of},
    memory,
    spec::small_model,
};
use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

/// The memory that a process may gain meanwhile, in bytes. Allocators and thread pools settle late. A leak of a kilobyte in each refit is
/// twice as much in ten thousand.
const GROWTH: u64 = 5 << 20;

/// The weights of the small model, all of this value.
struct Filled(f32);

impl WeightSource for Filled {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let shape: &[usize] = if name == "w" { &[4, 3] } else { &[3] };
        let bytes = (0..shape.iter().product()).flat_map(|_: usize| self.0.to_le_bytes()).collect::<Vec<_>>();
        Weight::new(DType::F32, shape.to_vec(), bytes)
    }

    fn version(&self, _: &str) -> Option<u128> {
        Some(self.0.to_bits().into())
    }
}

fn count() -> usize {
    std::env::var("SDRUN_SOAK").map_or(400, |text| text.parse().unwrap())
}

/// Open files, threads, and names in the folders of temporary files.
fn held(processes: &[&str], cache: &Path) -> Vec<usize> {
    let entries = |folder: &Path| fs::read_dir(folder).map_or(0, Iterator::count);
    let of =
        |process: &&str| ["fd", "task"].map(|what| entries(Path::new(&format!("/proc/{process}/{what}"))));
    let mut held: Vec<usize> = processes.iter().flat_map(of).collect();
    held.push(entries(&cache.join("tmp")));
    held
}

fn inputs() -> Tensors {
    let ones =
        |shape: [usize; 2]| HostTensor::from_f32(shape.to_vec(), &vec![1.0; shape[0] * shape[1]]).unwrap();
    Tensors::from([("x".to_string(), ones([2, 4])), ("r".to_string(), ones([2, 3]))])
}

fn bits(outputs: Tensors) -> Vec<Vec<u8>> {
    outputs.values().map(|tensor| tensor.bytes().to_vec()).collect()
}

/// One test, because it counts what its own process holds.
#[test]
fn long_use_needs_nothing_new() {
    refits_and_runs();
    workers();
}

fn refits_and_runs() {
    let (lab, folder) = (Lab::default(), tempfile::tempdir().unwrap());
    let file = folder.path().join("small.onnx");
    fs::write(&file, small_model()).unwrap();
    let model = Model::open(&file).unwrap();
    for id in ALL.iter().copied() {
        let provider = lab.open(id).unwrap();
        let pid = provider.worker().unwrap().pid().to_string();
        let options = BuildOptions::new(device_of(&provider).unwrap()).cache(CachePolicy::Off);
        let engine = provider.build(&model, &options, &NoHost).unwrap();
        let sets = [0.25, -0.5, 1.0].map(Filled);
        let mut session = engine.session(&sets[0], &NoHost).unwrap();
        let expected = [0, 1, 2].map(|at| {
            session.refit(&sets[at], &NoHost).unwrap();
            bits(session.run(&inputs(), &NoHost).unwrap())
        });
        let state = || (held(&["self", &pid], lab.paths.cache.as_path()), memory::own(), memory::of(&pid));
        let mut settled = None;
        for cycle in 0..count() {
            let at = cycle % sets.len();
            session.refit(&sets[at], &NoHost).unwrap();
            let outputs = bits(session.run(&inputs(), &NoHost).unwrap());
            assert!(outputs == expected[at], "{id}, refit {cycle}: other bits for the same weights");
            if cycle == count() / 4 {
                settled = Some(state());
            }
        }
        let (before, after) = (settled.unwrap(), state());
        println!("{id}: {} refits; before {before:?}, after {after:?}", count());
        assert_eq!(after.0, before.0, "{id}: open files, threads, temporary files");
        assert!(after.1 < before.1 + GROWTH, "{id}: the host grew from {} to {}", before.1, after.1);
        assert!(after.2 < before.2 + GROWTH, "{id}: the worker grew from {} to {}", before.2, after.2);
    }
}

/// Workers that start and end leave nothing.
fn workers() {
    let lab = Lab::default();
    for id in ALL.iter().copied() {
        let state = || (held(&["self"], &lab.paths.cache), memory::own());
        let mut settled = None;
        for cycle in 0..count() / 10 {
            let provider = lab.open(id).unwrap();
            assert!(!provider.devices().unwrap().is_empty());
            drop(provider);
            if cycle == count() / 40 {
                settled = Some(state());
            }
        }
        let before = settled.unwrap();
        let mut after = state();
        // The threads that read what a worker prints end a moment after it.
        let deadline = Instant::now() + Duration::from_secs(5);
        let grew = |held: &[usize]| before.0.iter().zip(held).any(|(before, after)| after > before);
        while grew(&after.0) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
            after = state();
        }
        println!("{id}: {} workers; before {before:?}, after {after:?}", count() / 10);
        assert!(!grew(&after.0), "{id}: {:?}, {:?}", before.0, after.0);
        assert!(after.1 < before.1 + GROWTH, "{id}: the host grew from {} to {}", before.1, after.1);
    }
}

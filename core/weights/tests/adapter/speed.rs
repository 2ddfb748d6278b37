//! Measures the speed of merging against the machine's memory bandwidth and arithmetic. Prints the results and
//! asserts nothing: `cargo test --release -p sdrun-weights --test adapter -- --ignored --nocapture speed`.

use crate::fixtures::{File, Random, bytes, target};
use ndarray::Array2;
use sdrun_abi::DType;
use sdrun_weights::{
    Component,
    adapter::{Delta, Merge},
};
use std::time::Instant;

/// CPU time of this thread in seconds (Linux), so that other processes do not affect the result.
fn clock() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(text.split(' ').next()?.parse::<u64>().ok()? as f64 / 1e9)
}

/// Seconds per run: the best of several measurements of many runs each, because the clock ticks in milliseconds.
fn best(mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    run();
    let runs = (0.03 / start.elapsed().as_secs_f64().max(1e-9)).ceil() as usize;
    let mut time = || {
        let (cpu, wall) = (clock(), Instant::now());
        (0..runs).for_each(|_| run());
        let wall = wall.elapsed().as_secs_f64();
        clock().zip(cpu).map_or(wall, |(now, then)| now - then) / runs as f64
    };
    (0..5).map(|_| time()).fold(f64::INFINITY, f64::min)
}

#[test]
#[ignore = "measures"]
fn speed_of_merging() {
    // Uses one core, so that the cost of each part does not depend on other load.
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(measure);
}

fn measure() {
    let n = 512;
    let (a, b) = (Array2::from_elem((n, n), 0.5f32), Array2::from_elem((n, n), 0.25f32));
    let peak = 2.0 * (n * n * n) as f64 / best(|| drop(std::hint::black_box(a.dot(&b)))) / 1e9;
    let source = vec![1u8; 1 << 26];
    let mut sink = vec![0u8; 1 << 26];
    let memcpy = (1 << 26) as f64 / best(|| sink.copy_from_slice(std::hint::black_box(&source))) / 1e9;
    println!("one core: {peak:.0} GFLOP/s of f32 GEMM, memcpy {memcpy:.1} GB/s copied");

    for (rows, columns) in [(1280, 10240), (10240, 1280), (320, 320), (640, 5760)] {
        let shape = [rows, columns];
        let elements = rows * columns;
        let target = target(Component::Denoiser, &[("m.weight", &shape)], &[]);
        let mut random = Random::new(1);
        let values: Vec<f64> = (0..elements).map(|_| random.next()).collect();
        for (from, to) in [
            (DType::F16, DType::F16),
            (DType::F16, DType::F32),
            (DType::F32, DType::F32),
            (DType::BF16, DType::F16),
        ] {
            let base = bytes(from, &values);
            let mut out = vec![0u8; elements * to.size()];
            let plain = Merge::new(&shape, &[]).unwrap();
            let seconds = best(|| plain.tensor((from, &base), (to, &mut out)).unwrap());
            let bytes = (elements * (from.size() + to.size())) as f64;
            print!(
                "{rows}x{columns} {from} -> {to}: plain {:.1} GB/s read and written",
                bytes / seconds / 1e9
            );
            for rank in [4, 16, 32, 128] {
                let file = File::default()
                    .random("lora_unet_m.lora_down.weight", &[rank, columns])
                    .random("lora_unet_m.lora_up.weight", &[rows, rank]);
                let resolution = file.open().unwrap().resolve(&target);
                let deltas: Vec<(&Delta, f32)> =
                    resolution.deltas["m.weight"].iter().map(|d| (d, 0.7)).collect();
                let prepare = best(|| drop(Merge::new(&shape, &deltas).unwrap()));
                let merge = Merge::new(&shape, &deltas).unwrap();
                let seconds = best(|| merge.tensor((from, &base), (to, &mut out)).unwrap());
                let flops = 2.0 * (elements * rank) as f64 / seconds / 1e9;
                print!(
                    "; rank {rank}: {:.2} ms (+ {:.2} of factors), {:.1} GB/s, {flops:.0} GFLOP/s",
                    seconds * 1e3,
                    prepare * 1e3,
                    bytes / seconds / 1e9
                );
            }
            println!();
        }
    }
}

/// All linear and convolution weights of the SD 1.5 UNet (shapes from `tests/data`), each with a LoRA of rank 16,
/// from f16 to f16.
#[test]
#[ignore = "measures"]
fn speed_of_a_whole_unet() {
    let table = crate::common::tables::unpacked("kohya_sd15_unet.tsv.gz");
    let shapes: Vec<Vec<usize>> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split('\t').nth(3))
        .map(|shape| shape.split('x').map(|n| n.parse().unwrap()).collect())
        .collect();
    let largest = shapes.iter().map(|shape| shape.iter().product::<usize>()).max().unwrap();
    let (base, mut out) = (vec![0x11u8; 2 * largest], vec![0u8; 2 * largest]);
    let (mut parameters, mut seconds) = (0, 0.0);
    for shape in &shapes {
        let down: Vec<usize> = [&[16], &shape[1..]].concat();
        let file = File::default()
            .random("lora_unet_m.lora_down.weight", &down)
            .random("lora_unet_m.lora_up.weight", &[shape[0], 16]);
        let target = target(Component::Denoiser, &[("m.weight", shape)], &[]);
        let resolution = file.open().unwrap().resolve(&target);
        let count = shape.iter().product::<usize>();
        let start = Instant::now();
        let merge = Merge::new(shape, &[(&resolution.deltas["m.weight"][0], 0.7)]).unwrap();
        merge.tensor((DType::F16, &base[..2 * count]), (DType::F16, &mut out[..2 * count])).unwrap();
        seconds += start.elapsed().as_secs_f64();
        parameters += count;
    }
    let threads = rayon::current_num_threads();
    println!("{parameters} parameters in {} tensors: {seconds:.2} s on {threads} threads", shapes.len());
}

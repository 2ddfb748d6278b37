//! Measures how fast weights are computed and loaded into engines, for `cargo xtask bench refit`: an SD 1.5 UNet checkpoint of
//! 860 M parameters in f16 and a LoRA of rank 16. Both follow the synthetic rule and have layouts found in the wild. Prints JSON.
//!
//! `refit_speed FOLDER [PART…]` keeps its files in FOLDER. It runs the named parts of `keys`, `weights`, `ggml` and `sdxl`, or
//! all. `sdxl` does what `ggml` does, with the UNet of SDXL (2.6 thousand million parameters).

use anyhow::{Context, Result};
use ndarray::Array2;
use sdrun::{
    BuildOptions, CachePolicy, Isolation, Model,
    abi::{NoHost, Precision, Weight, WeightSource},
    graph::{OpenOptions, WeightsPolicy},
    weights::{Adapter, AdapterUse, Binding, BoundTensor, Checkpoint, Component, WeightStack, builtin},
};
use sdrun_tests::{checkpoints, lab::Lab, memory};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

/// A UNet to measure.
struct Subject {
    model: &'static str,
    networks: checkpoints::Networks<'static>,
    /// Names its values.
    tag: &'static str,
    /// Names of its files.
    checkpoint: &'static str,
    lora: &'static str,
}

const SD15: Subject = Subject {
    model: "sd15/unet-fp16",
    networks: checkpoints::SD15,
    tag: "sd15-unet/B",
    checkpoint: "sd15_unet_B",
    lora: "lora_r16",
};
const SDXL: Subject = Subject {
    model: "sdxl/unet",
    networks: checkpoints::SDXL,
    tag: "sdxl-unet/B",
    checkpoint: "sdxl_unet_B",
    lora: "sdxl_lora_r16",
};
const ROUNDS: usize = 5;

/// A subject's files.
struct Files {
    model: &'static str,
    checkpoint: PathBuf,
    lora: PathBuf,
    binding: Binding,
}

impl Subject {
    /// Writes the checkpoint and the LoRA into `folder`, unless they are there.
    fn files(&self, folder: &Path) -> Result<Files> {
        let builtin = builtin::find(self.model).with_context(|| format!("there is no {}", self.model))?;
        let binding = Binding::from_map(&builtin.weight_map()?);
        let [checkpoint, lora] =
            [self.checkpoint, self.lora].map(|name| folder.join(name).with_extension("safetensors"));
        checkpoints::checkpoint(&checkpoint, &self.networks[..1], self.tag)?;
        checkpoints::lora(&lora, &binding)?;
        Ok(Files { model: self.model, checkpoint, lora, binding })
    }
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).context("give a folder for the checkpoint and the adapter")?;
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    let wanted: Vec<String> = std::env::args().skip(2).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    let mut measured = json!({"threads": std::thread::available_parallelism()?.get()});
    type Part = fn(&Files) -> Result<Value>;
    let parts = [
        ("keys", keys_of as Part, SD15),
        ("weights", weights, SD15),
        ("ggml", ggml, SD15),
        ("sdxl", ggml, SDXL),
    ];
    for (name, part, subject) in parts.into_iter().filter(|(name, ..)| wants(name)) {
        measured[name] = part(&subject.files(folder)?)?;
    }
    println!("{measured}");
    Ok(())
}

fn seconds<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let started = Instant::now();
    let value = work()?;
    Ok((started.elapsed().as_secs_f64(), value))
}

/// Milliseconds from files to a stack with all keys resolved.
fn keys_of(Files { checkpoint, lora, binding, .. }: &Files) -> Result<Value> {
    let (mut opened, mut adapted) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (s, stack) =
            seconds(|| Ok(WeightStack::of_checkpoint(binding.clone(), &Checkpoint::open(checkpoint)?)?))?;
        opened.push(s * 1e3);
        let (s, _) = seconds(|| Ok(stack.with_adapter(&Adapter::open(lora)?, AdapterUse::at(0.8))?))?;
        adapted.push(s * 1e3);
    }
    Ok(json!({"tensors": binding.tensors.len(), "checkpoint_ms": opened, "adapter_ms": adapted}))
}

/// Computing weights, compared with copying those of the file.
fn weights(Files { checkpoint, lora, binding, .. }: &Files) -> Result<Value> {
    let file = Checkpoint::open(checkpoint)?;
    // Count only anonymous memory: mapped pages belong to the page cache.
    let before = memory::own();
    let base = WeightStack::of_checkpoint(binding.clone(), &file)?;
    let stack = base.clone().with_adapter(&Adapter::open(lora)?, AdapterUse::at(0.8))?;
    let mut peak = before;
    for tensor in &binding.tensors {
        let weight = stack.get(&tensor.name)?;
        peak = peak.max(memory::own());
        drop(weight);
    }
    let stored = file.component(Component::Denoiser)?;
    let longest = binding.tensors.iter().filter_map(|t| t.dtype.bytes_of(&t.shape)).max().unwrap_or(0);
    let mut sink = vec![0u8; longest];
    let is_changed = |tensor: &BoundTensor| stack.version(&tensor.name) != base.version(&tensor.name);
    let (changed, unchanged): (Vec<_>, Vec<_>) =
        binding.tensors.iter().partition(|tensor| is_changed(tensor));
    let all: Vec<&BoundTensor> = binding.tensors.iter().collect();
    // Seconds and bytes to compute each weight and, as in a provider, to copy it into allocated memory.
    let mut pass = |tensors: &[&BoundTensor], copy: bool, get: &Get<'_>| -> Result<(f64, u64)> {
        let (mut bytes, started) = (0, Instant::now());
        for tensor in tensors {
            let weight = get(tensor)?;
            if copy {
                sink[..weight.data().len()].copy_from_slice(weight.data());
            }
            bytes += weight.data().len() as u64;
        }
        Ok((started.elapsed().as_secs_f64(), bytes))
    };
    // For comparison: memcpy of the same bytes of the file.
    let of_file = |tensor: &BoundTensor| stored.get(&tensor.sources[0]);
    let of_base = |tensor: &BoundTensor| base.get(&tensor.name);
    let of_stack = |tensor: &BoundTensor| stack.get(&tensor.name);
    // Fills the page cache and maps the pages.
    let first = pass(&all, true, &of_base)?;
    let mut passes: BTreeMap<&str, Vec<(f64, u64)>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let mut add = |name, pass| passes.entry(name).or_default().push(pass);
        add("memcpy_unchanged", pass(&unchanged, true, &of_file)?);
        add("unchanged", pass(&unchanged, true, &of_base)?);
        add("memcpy_changed", pass(&changed, true, &of_file)?);
        add("changed", pass(&changed, false, &of_stack)?);
        add("changed_and_copied", pass(&changed, true, &of_stack)?);
        add("all", pass(&all, true, &of_stack)?);
    }
    let flops: u64 = binding
        .tensors
        .iter()
        .filter(|t| is_changed(t))
        .map(|t| 2 * checkpoints::RANK as u64 * t.shape.iter().product::<usize>() as u64)
        .sum();
    Ok(json!({
        "first": first, "passes": passes, "changed_flops": flops, "changed_tensors": stack.changed(),
        "memory_bytes": peak.saturating_sub(before), "gemm_flops_per_s": gemm_peak(),
    }))
}

/// Returns the weight for a tensor.
type Get<'a> = dyn Fn(&BoundTensor) -> sdrun::abi::Result<Weight<'a>> + 'a;

/// FLOP/s of all cores together in large f32 matrix products.
fn gemm_peak() -> f64 {
    const N: usize = 1024;
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let best = (0..ROUNDS).map(|_| {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let (a, b) = (Array2::<f32>::ones((N, N)), Array2::<f32>::ones((N, N)));
                    std::hint::black_box(a.dot(&b));
                });
            }
        });
        started.elapsed().as_secs_f64()
    });
    (2 * threads * N * N * N) as f64 / best.fold(f64::INFINITY, f64::min)
}

/// In each precision: builds with a load, loads of a built engine, and refits with the LoRA.
fn ggml(Files { model, checkpoint, lora, binding }: &Files) -> Result<Value> {
    let lab = Lab::default();
    let provider = lab.registry.open("ggml", &Isolation::default())?;
    let options = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..OpenOptions::default() };
    let model = Model::find(model, &lab.paths, &options, &NoHost)?;
    let base = WeightStack::of_checkpoint(binding.clone(), &Checkpoint::open(checkpoint)?)?;
    let stack = base.clone().with_adapter(&Adapter::open(lora)?, AdapterUse::at(0.8))?;
    let mut measured = Value::default();
    for precision in [Precision::Fp32, Precision::Q8_0] {
        let mut build = BuildOptions::new(provider.device(None)?);
        (build.cache, build.precision) = (CachePolicy::Off, precision);
        let (mut scratch, mut loads, mut refits) = (Vec::new(), Vec::new(), Vec::new());
        let mut report = None;
        for _ in 0..ROUNDS {
            let (built, engine) = seconds(|| Ok(provider.build(&model, &build, &NoHost)?))?;
            let (merged, session) = seconds(|| Ok(engine.session(&stack, &NoHost)?))?;
            // The next session gets the same memory, so that a slow system call for new memory does not count.
            drop(session);
            let (load, mut session) = seconds(|| Ok(engine.session(&base, &NoHost)?))?;
            let (refit, done) = seconds(|| Ok(session.refit(&stack, &NoHost)?))?;
            scratch.push(built + merged);
            loads.push(load);
            refits.push(refit);
            report = Some(done);
        }
        measured[precision.to_string()] =
            json!({"build_s": scratch, "load_s": loads, "refit_s": refits, "report": report});
    }
    Ok(measured)
}

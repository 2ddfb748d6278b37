//! Load, refit and run on a test double of the GPU side.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod double;
mod figures;
mod gpu;
mod library;

#[path = "../../../common/testing.rs"]
mod testing;

use crate::{
    TensorRtRtx,
    payload::{self, Description, Requirements},
    table::{Entry, Transform},
};
use double::Double;
use sdrun_abi::{
    BuildSpec, DType, EngineInfo, Error, InitConfig, NoHost, Precision, Provider, Result, Session,
    TensorSpec, TensorView, VecSink, Weight, WeightSource, WeightSpec,
};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// The provider on the test double.
fn provider() -> (MutexGuard<'static, ()>, &'static Double, TensorRtRtx) {
    let (guard, double) = Double::lock();
    let cache_dir = double.dir.join("kernels");
    std::fs::create_dir_all(&cache_dir).unwrap();
    let config = InitConfig {
        runtime_dir: Some(double.dir.clone()),
        cache_dir: Some(cache_dir),
        temp_dir: double.dir.clone(),
        options: BTreeMap::from([("driver".to_string(), double.library.display().to_string())]),
        ..InitConfig::default()
    };
    let info = TensorRtRtx.init(&config, &NoHost).unwrap();
    assert_eq!(info.version, "1.7.1.116");
    (guard, double, TensorRtRtx)
}

const GPU: &str = "0000:01:00.0";

fn spec(device: &str) -> BuildSpec {
    BuildSpec::new(device, Precision::Fp32)
}

/// Weights `a` (5 numbers) and `b` (3), `b` coupled to `a`, and a constant `c`.
const PLAN: &str =
    "plan of the test double\ninput x\noutput y\nweight a 5\nweight b 3\nweight c 1\ncoupled a b\n";

fn description() -> Description {
    let tensor = |name: &str| TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![None, Some(4)] };
    let weight = |name: &str, n| WeightSpec { name: name.into(), dtype: DType::F32, shape: vec![n] };
    let entry =
        |name: &str, count, transform| Entry { name: name.into(), dtype: DType::F32, count, transform };
    let identity = |name: &str| Transform::Identity { source: name.into() };
    let requirements = Requirements { tensorrt_rtx: "1.7.1.116".into(), target: "sm89".into(), refit: true };
    Description {
        info: EngineInfo {
            inputs: vec![tensor("x")],
            outputs: vec![tensor("y")],
            weights: vec![weight("a", 5), weight("b", 3)],
            compatibility: requirements.text().unwrap(),
        },
        table: vec![
            entry("a", 5, identity("a")),
            entry("b", 3, identity("b")),
            entry("c", 1, Transform::Constant { hex: "0000003f".into() }),
            // An entry that the builder dropped is not an error.
            entry("dropped", 1, Transform::Constant { hex: "0000003f".into() }),
        ],
        checks: sdrun_provider_common::checks::Checks::default(),
        plan_bytes: PLAN.len() as u64,
    }
}

fn payload_of(description: &Description, plan: &str) -> Vec<u8> {
    let description = Description { plan_bytes: plan.len() as u64, ..description.clone() };
    payload::write(&description, plan.as_bytes()).unwrap()
}

/// Weights that count their reads.
struct Source {
    a: Vec<f32>,
    b: Vec<f32>,
    asked: AtomicUsize,
    absent: Mutex<Option<&'static str>>,
}

impl Source {
    fn new(a: f32, b: f32) -> Self {
        let numbers = |from: f32, n: usize| (0..n).map(|i| from + 0.1 * i as f32).collect();
        Source { a: numbers(a, 5), b: numbers(b, 3), asked: AtomicUsize::new(0), absent: Mutex::new(None) }
    }

    /// The double's result for one number.
    fn factor(&self) -> f32 {
        let mut f = 1f32;
        for numbers in [&self.a[..], &self.b, &[0.5]] {
            for (j, number) in numbers.iter().enumerate() {
                f += number * (j % 7 + 1) as f32;
            }
        }
        f
    }
}

impl WeightSource for Source {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.asked.fetch_add(1, Relaxed);
        let numbers = match name {
            "a" => &self.a,
            "b" => &self.b,
            _ => panic!("{name} is no weight"),
        };
        if *self.absent.lock().unwrap() == Some(name) {
            return Err(Error::not_found(format!("there is no weight `{name}`")));
        }
        let bytes: Vec<u8> = numbers.iter().flat_map(|v| v.to_le_bytes()).collect();
        Weight::new(DType::F32, vec![numbers.len()], bytes)
    }
}

fn run(session: &mut dyn Session, rows: usize) -> Result<Vec<f32>> {
    let data = bytes_of(&given(rows));
    let mut sink = VecSink::default();
    session.run(&[TensorView { dtype: DType::F32, shape: &[rows, 4], data: &data }], &mut sink, &NoHost)?;
    let output = sink.get(0).unwrap();
    assert_eq!(output.shape, [rows, 4]);
    Ok(output.data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

/// The result of a run with these weights.
fn expected(source: &Source, rows: usize) -> Vec<f32> {
    given(rows).iter().map(|x| x * source.factor()).collect()
}

/// The input that [`run`] passes.
fn given(rows: usize) -> Vec<f32> {
    (0..rows * 4).map(|i| i as f32 - 1.5).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

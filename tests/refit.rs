//! Checkpoints and adapters put into engines, on every provider, against outputs of PyTorch with diffusers and PEFT:
//! `FAMILY/onnx/COMPONENT/model.onnx` holds weights A; checkpoints of A and B and adapters lie beside it in the layouts
//! found in the wild. fp32: max |error| ≤ 1e-3 · max |reference| and cosine ≥ 0.99999.

#![allow(clippy::unwrap_used)]

use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Model, Provider, Session, Shapes, Tensors,
    abi::{DType, NoHost, WeightSource},
    verify::{self, Tolerance},
    weights::{Adapter, AdapterUse, Binding, Checkpoint, Component, SafetensorsWeights, WeightStack},
};
use sdrun_tests::{
    lab::{ALL, Lab, device_of, folder},
    place::Place,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A component of a tiny pipeline.
struct Part {
    /// `sd/unet`.
    name: String,
    family: PathBuf,
    component: String,
    model: Model,
    inputs: Tensors,
    /// Outputs by what was put in: `A`, `B`.
    outputs: BTreeMap<String, Tensors>,
}

/// A tensor of a safetensors file.
fn tensor(file: &SafetensorsWeights, key: &str) -> HostTensor {
    let weight = file.get(key).unwrap();
    HostTensor::from_bytes(weight.dtype, weight.shape.clone(), weight.data()).unwrap()
}

/// The components whose inputs and outputs are all there.
fn parts() -> Vec<Part> {
    let pattern = folder("SDRUN_TINY_DIR").join("*/onnx/*/model.onnx");
    let mut parts = Vec::new();
    for path in glob::glob(&pattern.display().to_string()).unwrap().flatten() {
        let component = path.parent().unwrap().file_name().unwrap().to_str().unwrap().to_string();
        let family = path.ancestors().nth(3).unwrap().to_path_buf();
        let Ok(oracle) = SafetensorsWeights::open(&[family.join(format!("oracle/{component}.safetensors"))])
        else {
            continue;
        };
        let (mut inputs, mut outputs) = (Tensors::new(), BTreeMap::<String, Tensors>::new());
        for key in oracle.names() {
            if let Some(name) = key.strip_prefix("in.") {
                inputs.insert(name.into(), tensor(&oracle, key));
            } else if let Some((which, name)) = key.strip_prefix("out.").and_then(|rest| rest.split_once('.'))
                && !name.contains(".every")
                && tensor(&oracle, key).dtype() == DType::F32
            {
                outputs.entry(which.into()).or_default().insert(name.into(), tensor(&oracle, key));
            }
        }
        if inputs.keys().any(|name| name.ends_with(".first16")) {
            continue;
        }
        let name = format!("{}/{component}", family.file_name().unwrap().display());
        parts.push(Part { name, family, component, model: Model::open(&path).unwrap(), inputs, outputs });
    }
    assert!(parts.len() >= 15, "only {} components were found", parts.len());
    parts
}

impl Part {
    /// An engine on `provider` with weights A.
    fn session(&self, provider: &Provider, options: &[(&str, &str)]) -> Session {
        let mut build = BuildOptions::new(device_of(provider).unwrap());
        build.cache = CachePolicy::Off;
        build.options = options.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        build.shapes = self.inputs.iter().map(|(n, t)| (n.clone(), t.shape().to_vec())).collect::<Shapes>();
        let engine =
            provider.build(&self.model, &build, &NoHost).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        engine.session(&self.own(), &NoHost).unwrap()
    }

    /// Weights A, as the model file has them.
    fn own(&self) -> WeightStack {
        WeightStack::of_model(self.binding(), self.model.weights())
    }

    /// The table of the model. Text encoders of a tiny pipeline all have one width, so that nothing in the graph tells
    /// which one it is.
    fn binding(&self) -> Binding {
        let mut binding = self.model.binding().unwrap();
        if binding.component.is_none() {
            binding.component = self.component.parse().ok();
        }
        binding
    }

    fn of(&self, checkpoint: &Path) -> WeightStack {
        let checkpoint = Checkpoint::open(checkpoint).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        WeightStack::of_checkpoint(self.binding(), &checkpoint)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn run(&self, session: &mut Session) -> Tensors {
        session.run(&self.inputs, &NoHost).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    fn adapter(&self, name: &str) -> Adapter {
        let file = self.family.join(format!("lora/{name}.safetensors"));
        Adapter::open(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
    }
}

/// What is too far from `expected`; of outputs that are not in it nothing is said.
fn faults(got: &Tensors, expected: &Tensors) -> Vec<String> {
    let copy = |t: &HostTensor| HostTensor::from_bytes(t.dtype(), t.shape().to_vec(), t.bytes()).unwrap();
    let got: Tensors = expected.keys().filter_map(|n| Some((n.clone(), copy(got.get(n)?)))).collect();
    let compared = verify::compare(&got, expected).unwrap();
    let wrong = |c: &verify::Comparison| !Tolerance::of(sdrun::abi::Precision::Fp32).accepts(c);
    compared.into_iter().filter(wrong).map(|c| format!("{c:?}")).collect()
}

/// One provider after the other; a worker is not started for every component.
fn on_every_provider(lab: &Lab, work: impl FnMut(&Provider, &str, &mut Vec<String>)) {
    on_providers(lab, &ALL, work);
}

fn on_providers(lab: &Lab, ids: &[&str], mut work: impl FnMut(&Provider, &str, &mut Vec<String>)) {
    let mut problems = Vec::new();
    for id in ids.iter().copied() {
        work(&lab.open(id).unwrap(), id, &mut problems);
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
#[ignore = "needs SDRUN_TINY_DIR: these models are not in this repository"]
fn tiny_checkpoints_of_every_layout_go_into_engines() {
    let (lab, parts) = (Lab::default(), parts());
    let mut compared = 0;
    on_every_provider(&lab, |provider, id, problems| {
        for part in &parts {
            let mut session = part.session(provider, &[]);
            let before = part.run(&mut session);
            for (layout, which) in [
                (format!("single_file/tiny_{}_B_fp16.safetensors", short(part)), "B"),
                (format!("single_file/tiny_{}_A_fp32.safetensors", short(part)), "A"),
                ("diffusers_B_fp16".into(), "B"),
            ] {
                let file = part.family.join(&layout);
                if !file.exists() || (layout.contains("tiny_flux") && part.component != "transformer") {
                    continue;
                }
                if part.component == "controlnet" {
                    // No checkpoint beside it has one.
                    continue;
                }
                // Large outputs are kept as samples only.
                let Some(expected) = part.outputs.get(which) else { continue };
                let stack = part.of(&file);
                if let Err(e) = session.refit(&stack, &NoHost) {
                    problems.push(format!("{} on {id} with {layout}: {e}", part.name));
                    continue;
                }
                let got = part.run(&mut session);
                for fault in faults(&got, expected) {
                    problems.push(format!("{} on {id} with {layout}: {fault}", part.name));
                }
                compared += 1;
            }
            session.refit(&part.own(), &NoHost).unwrap();
            if part.run(&mut session) != before {
                problems.push(format!("{} on {id}: back at A the bits differ", part.name));
            }
        }
    });
    assert!(compared >= 14 * ALL.len(), "only {compared} refits were compared");
}

fn short(part: &Part) -> String {
    part.family.file_name().unwrap().display().to_string()
}

/// `out.A@0.7.unet.out_sample` of an adapter's oracle.
struct Expected {
    base: String,
    strength: f32,
    component: String,
    output: String,
    value: HostTensor,
}

fn expected_of(oracle: &SafetensorsWeights) -> Vec<Expected> {
    let parse = |key: &str| {
        let (base, rest) = key.strip_prefix("out.")?.split_once('@')?;
        // The strength may hold a dot itself.
        let (strength, rest) =
            ["0.7.", "1."].iter().find_map(|s| Some((s.strip_suffix('.')?, rest.strip_prefix(s)?)))?;
        let (component, output) = rest.split_once('.')?;
        (base.len() == 1).then(|| Expected {
            base: base.into(),
            strength: strength.parse().unwrap(),
            component: component.into(),
            output: output.into(),
            value: tensor(oracle, key),
        })
    };
    oracle.names().into_iter().filter_map(parse).collect()
}

#[test]
#[ignore = "needs SDRUN_TINY_DIR: these models are not in this repository"]
fn tiny_adapters_of_every_kind_change_engines() {
    let (lab, parts) = (Lab::default(), parts());
    let mut compared = 0;
    on_every_provider(&lab, |provider, id, problems| {
        for part in &parts {
            let pattern = part.family.join("lora/*.oracle.safetensors").display().to_string();
            let mut session = None;
            for file in glob::glob(&pattern).unwrap().flatten() {
                let name =
                    file.file_name().unwrap().to_str().unwrap().trim_end_matches(".oracle.safetensors");
                let oracle = SafetensorsWeights::open(&[&file]).unwrap();
                let expected: Vec<Expected> =
                    expected_of(&oracle).into_iter().filter(|e| e.component == part.component).collect();
                if expected.is_empty() {
                    continue;
                }
                let session = session.get_or_insert_with(|| part.session(provider, &[]));
                let adapter = part.adapter(name);
                for Expected { base, strength, output, value, .. } in expected {
                    let what = format!("{} on {id}: {base} with {name} at {strength}", part.name);
                    if base == "B" && short(part) == "flux" {
                        // There is no file with B.
                        continue;
                    }
                    let stack = match &*base {
                        "A" => part.own(),
                        _ => part.of(&part
                            .family
                            .join(format!("single_file/tiny_{}_B_fp16.safetensors", short(part)))),
                    };
                    let stack = stack
                        .with_adapter(&adapter, AdapterUse::at(strength))
                        .unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert!(stack.changed() > 0, "{what} changes nothing");
                    session.refit(&stack, &NoHost).unwrap_or_else(|e| panic!("{what}: {e}"));
                    let got = part.run(session);
                    for fault in faults(&got, &Tensors::from([(output, value)])) {
                        problems.push(format!("{what}: {fault}"));
                    }
                    compared += 1;
                }
            }
        }
    });
    assert!(compared >= 33 * ALL.len(), "only {compared} outputs were compared");
}

/// Strengths, stacks, and the way back, where no oracle is needed: the outputs of the first session.
#[test]
#[ignore = "needs SDRUN_TINY_DIR: these models are not in this repository"]
fn tiny_stacks_are_reversible_and_start_from_the_base() {
    let (lab, parts) = (Lab::default(), parts());
    let unet = parts.iter().find(|part| part.name == "sd/unet").unwrap();
    let (a, b) = (unet.adapter("kohya"), unet.adapter("loha"));
    let at = |stack: WeightStack, adapter: &Adapter, strength: f32| {
        stack.with_adapter(adapter, AdapterUse::at(strength)).unwrap()
    };
    let mut by_provider: Vec<(String, Vec<Tensors>)> = Vec::new();
    let mut ids = ALL.clone();
    ids.extend((!ids.contains(&lab.reference())).then(|| lab.reference()));
    on_providers(&lab, &ids, |provider, id, problems| {
        let mut session = unet.session(provider, &[]);
        let base = unet.own();
        let mut run = |stack: &WeightStack| {
            let report = session.refit(stack, &NoHost).unwrap();
            (unet.run(&mut session), report)
        };
        let (pristine, _) = run(&base);
        let (zero, _) = run(&at(base.clone(), &a, 0.0));
        if zero != pristine {
            problems.push(format!("{id}: strength 0 is not the base"));
        }
        let (with_a, changed) = run(&at(base.clone(), &a, 0.7));
        if changed.tensors >= base_tensors(unet) && id == "ggml" {
            problems.push(format!("{id}: {} tensors were uploaded for one adapter", changed.tensors));
        }
        let (both, _) = run(&at(at(base.clone(), &a, 0.7), &b, -0.5));
        let (negative, _) = run(&at(base.clone(), &b, -0.5));
        let (again, _) = run(&at(base.clone(), &a, 0.7));
        if again != with_a {
            problems.push(format!("{id}: A, B, A is not A"));
        }
        let (back, _) = run(&base);
        if back != pristine {
            problems.push(format!("{id}: back at the base the bits differ"));
        }
        if with_a == pristine || both == with_a || negative == pristine {
            problems.push(format!("{id}: an adapter changes nothing"));
        }
        by_provider.push((id.to_string(), vec![with_a, both, negative]));
    });
    let (_, reference) = by_provider.iter().find(|(id, _)| id == lab.reference()).unwrap();
    for (id, outputs) in &by_provider {
        for (got, expected) in outputs.iter().zip(reference) {
            assert_eq!(faults(got, expected), Vec::<String>::new(), "{id}");
        }
    }
}

fn base_tensors(part: &Part) -> usize {
    part.model.graph().weights().count()
}

/// OpenVINO with its weights as inputs: the same numbers, without compiling again.
#[test]
#[ignore = "needs SDRUN_TINY_DIR: these models are not in this repository"]
fn tiny_weights_as_inputs_of_openvino() {
    let (lab, parts) = (Lab::default(), parts());
    let unet = parts.iter().find(|part| part.name == "sd/unet").unwrap();
    let provider = lab.open("openvino").unwrap();
    let mut session = unet.session(&provider, &[("weights", "inputs")]);
    let before = unet.run(&mut session);
    assert_eq!(faults(&before, &unet.outputs["A"]), Vec::<String>::new());
    let report = session.refit(&unet.of(&unet.family.join("diffusers_B_fp16")), &NoHost).unwrap();
    assert_eq!(report.method, sdrun::abi::WeightUpdate::AsInputs);
    assert_eq!(faults(&unet.run(&mut session), &unet.outputs["B"]), Vec::<String>::new());
    session.refit(&unet.own(), &NoHost).unwrap();
    assert_eq!(unet.run(&mut session), before);
}

/// An adapter of another architecture is called that, and nothing changes.
#[test]
#[ignore = "needs SDRUN_TINY_DIR: these models are not in this repository"]
fn tiny_adapters_of_other_architectures_are_refused() {
    let parts = parts();
    let find = |name: &str| parts.iter().find(|part| part.name == name).unwrap();
    for (target, source, adapter) in [
        ("sd/unet", "flux/transformer", "peft"),
        ("flux/transformer", "sd/unet", "kohya"),
        ("sd3/transformer", "sd/unet", "peft"),
    ] {
        let (target, source) = (find(target), find(source));
        let file = source.family.join(format!("lora/{adapter}.safetensors"));
        let adapter = Adapter::open(&file).unwrap();
        let error = target.own().with_adapter(&adapter, AdapterUse::at(1.0)).err().unwrap();
        assert!(error.message.contains(&file.display().to_string()), "{error}");
        assert!(error.hint.is_some(), "{error}");
    }
    // So is a checkpoint.
    let checkpoint = find("sd3/transformer").family.join("single_file/tiny_sd3_B_fp16.safetensors");
    let unet = find("sd/unet");
    let error =
        WeightStack::of_checkpoint(unet.binding(), &Checkpoint::open(&checkpoint).unwrap()).err().unwrap();
    assert!(error.message.contains("is SD 3, but the model is SD 1.5"), "{error}");
    let text = find("sd/text_encoder");
    assert_eq!(text.binding().component, Some(Component::TextEncoder));
    let only_unet = find("sd/unet").adapter("loha");
    let error = text.own().with_adapter(&only_unet, AdapterUse::at(1.0)).err().unwrap();
    assert!(error.message.contains("other components"), "{error}");
}

/// The command line from a checkpoint and an adapter to outputs, as a user would go.
#[test]
#[ignore = "needs SDRUN_TINY_DIR: these models are not in this repository"]
fn tiny_commands_go_from_a_checkpoint_to_outputs() {
    let parts = parts();
    let unet = parts.iter().find(|part| part.name == "sd/unet").unwrap();
    let work = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| -> Output {
        Command::new(Place::Dist.find().unwrap().join("sdrun"))
            .args(arguments)
            .current_dir(work.path())
            .env("SDRUN_DATA_DIR", Place::Data.find().unwrap())
            .env("SDRUN_CACHE_DIR", work.path().join("cache"))
            .output()
            .unwrap()
    };
    let sdrun = |arguments: &[&str]| -> Value {
        let output = run(&[arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let text = |path: PathBuf| path.display().to_string();
    let file = |name: &str| text(unet.family.join(name));
    let checkpoint = file("single_file/tiny_sd_B_fp16.safetensors");
    let lora = format!("{}:0.7", file("lora/kohya.safetensors"));

    let seen = sdrun(&["inspect", &checkpoint]);
    assert_eq!((&seen["kind"], &seen["family"]), (&"checkpoint".into(), &"sd1".into()), "{seen}");
    assert!(seen["components"].as_array().unwrap().len() >= 3, "{seen}");
    assert_eq!(sdrun(&["inspect", &file("diffusers_B_fp16")])["kind"], "checkpoint");
    let seen = sdrun(&["inspect", &file("lora/kohya.safetensors")]);
    assert_eq!(seen["kind"], "adapter", "{seen}");

    // The model alone, in a folder of its own, so that the table is written there.
    let model = work.path().join("model.onnx");
    fs::copy(unet.family.join("onnx/unet/model.onnx"), &model).unwrap();
    let reference = file("single_file/tiny_sd_A_fp32.safetensors");
    let found = sdrun(&["import", "model.onnx", "--reference", &reference]);
    assert_eq!(
        (&found["component"], found["unbound"].as_array().unwrap().len()),
        (&"denoiser".into(), 0),
        "{found}"
    );
    assert_eq!(found["confirmed"], found["bound"], "{found}");
    assert!(work.path().join("model.binding.json").is_file());

    for (name, tensor) in &unet.inputs {
        write_npy(&work.path().join(format!("{name}.npy")), tensor);
    }
    let inputs: Vec<String> =
        unet.inputs.keys().flat_map(|n| ["-i".into(), format!("{n}={n}.npy")]).collect();
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let shapes: Vec<String> =
        unet.inputs.iter().map(|(n, t)| format!("--shape={n}={}", dims(t.shape()))).collect();
    let shapes: Vec<&str> = shapes.iter().map(String::as_str).collect();
    let oracle = SafetensorsWeights::open(&[unet.family.join("lora/kohya.oracle.safetensors")]).unwrap();
    let expected = Tensors::from([("out_sample".to_string(), tensor(&oracle, "out.B@0.7.unet.out_sample"))]);
    for provider in ALL.iter().copied() {
        let build = ["build", "model.onnx", "-p", provider, "-o", "unet.sdengine", "--weights", &checkpoint];
        sdrun(&[&build[..], &shapes].concat());
        let with = ["--weights", &checkpoint, "--lora", &lora];
        let report = sdrun(&[&["refit", "unet.sdengine"][..], &with].concat());
        assert!(report["refit"]["tensors"].as_u64().unwrap() > 0, "{report}");
        assert!(report["weights"]["changed"].as_u64().unwrap() > 0, "{report}");
        sdrun(&[&["run", "unet.sdengine", "--output", "out_sample=out.npy"][..], &with, &inputs].concat());
        let got = Tensors::from([(
            "out_sample".to_string(),
            read_npy(&work.path().join("out.npy"), &expected["out_sample"]),
        )]);
        assert_eq!(faults(&got, &expected), Vec::<String>::new(), "{provider}");
    }
    // With the weights inside.
    let build = ["build", "model.onnx", "-p", "openvino", "-o", "unet.sdengine"];
    sdrun(&[&build[..], &shapes].concat());
    sdrun(&["refit", "unet.sdengine", "--weights", &checkpoint, "--lora", &lora, "-o", "baked.sdengine"]);
    sdrun(&[&["run", "baked.sdengine", "--output", "out_sample=out.npy"][..], &inputs].concat());
    let got = Tensors::from([(
        "out_sample".to_string(),
        read_npy(&work.path().join("out.npy"), &expected["out_sample"]),
    )]);
    assert_eq!(faults(&got, &expected), Vec::<String>::new(), "baked");

    // What cannot be, told in one sentence and with the right code.
    for (arguments, code, words) in [
        (vec!["run", "baked.sdengine", "--weights", &*checkpoint], 4, "baked in"),
        (vec!["run", "unet.sdengine", "--weights", &*file("lora/kohya.safetensors")], 4, "--lora"),
        (vec!["refit", "unet.sdengine"], 4, "--weights"),
        (
            vec!["run", "unet.sdengine", "--weights", &*checkpoint, "--lora", "nowhere.safetensors"],
            3,
            "nowhere.safetensors",
        ),
    ] {
        let output = run(&arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
}

fn dims(shape: &[usize]) -> String {
    shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// NumPy's format 1.0: a header of text, padded to 64 bytes, then the elements.
fn write_npy(path: &Path, tensor: &HostTensor) {
    let descr = match tensor.dtype() {
        DType::F32 => "<f4",
        DType::I64 => "<i8",
        other => panic!("{other}"),
    };
    let shape: String = tensor.shape().iter().map(|d| format!("{d},")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    header += &" ".repeat(63 - (10 + header.len()) % 64);
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(tensor.bytes());
    fs::write(path, bytes).unwrap();
}

/// A tensor that sdrun wrote, of the type and shape of `like`.
fn read_npy(path: &Path, like: &HostTensor) -> HostTensor {
    let bytes = fs::read(path).unwrap();
    let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    HostTensor::from_bytes(like.dtype(), like.shape().to_vec(), &bytes[10 + header..]).unwrap()
}

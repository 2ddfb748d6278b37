//! Loads checkpoints and adapters into engines on every provider, and compares with outputs of PyTorch with diffusers and PEFT
//! ([`sdrun_tests::pipelines`]). An export holds weights A. Beside it are checkpoints of A and B and adapters, in the layouts
//! found in the wild. fp32: max |error| ≤ 1e-3 · max |reference| and cosine ≥ 0.99999.

#![allow(clippy::unwrap_used)]

use sdrun::{
    HostTensor, Provider, Session, Tensors,
    abi::NoHost,
    weights::{
        Adapter, AdapterUse, Checkpoint, Component, SafetensorsWeights, WeightStack, adapter::DoraRule,
    },
};
use sdrun_tests::{
    lab::{ALL, Lab},
    npy,
    pipelines::{Part, faults, part, parts, tensor},
    place::Place,
};
use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

/// Runs one provider after the other. All components share its worker.
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

fn session_of(part: &Part, provider: &Provider) -> Session {
    part.session(provider, &[]).unwrap_or_else(|e| panic!("{}: {e}", part.name))
}

#[test]
fn tiny_checkpoints_of_every_layout_load_into_engines() {
    let (lab, parts) = (Lab::default(), parts());
    let mut compared = 0;
    on_every_provider(&lab, |provider, id, problems| {
        for part in &parts {
            let mut session = session_of(part, provider);
            let before = part.run(&mut session);
            for (layout, which) in [
                (format!("single_file/tiny_{}_B_fp16.safetensors", part.pipeline), "B"),
                (format!("single_file/tiny_{}_A_fp32.safetensors", part.pipeline), "A"),
                ("diffusers_B_fp16".into(), "B"),
            ] {
                let file = part.folder.join(&layout);
                if !file.exists() || (layout.contains("tiny_flux") && part.component != "transformer") {
                    continue;
                }
                if part.component == "controlnet" {
                    // No checkpoint beside it has this part.
                    continue;
                }
                let expected = &part.outputs[which];
                let stack = part.of(&layout);
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
    assert_eq!(compared, 24 * ALL.len(), "refits that were compared");
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
        // The strength may contain a dot.
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
fn tiny_adapters_of_every_kind_change_engines() {
    let (lab, parts) = (Lab::default(), parts());
    let mut compared = 0;
    on_every_provider(&lab, |provider, id, problems| {
        for part in &parts {
            let pattern = part.folder.join("lora/*.oracle.safetensors").display().to_string();
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
                let session = session.get_or_insert_with(|| session_of(part, provider));
                let adapter = part.adapter(name);
                for Expected { base, strength, output, value, .. } in expected {
                    let what = format!("{} on {id}: {base} with {name} at {strength}", part.name);
                    if base == "B" && part.pipeline == "flux" {
                        // There is no file with weights B.
                        continue;
                    }
                    let stack = match &*base {
                        "A" => part.own(),
                        _ => part.of(&format!("single_file/tiny_{}_B_fp16.safetensors", part.pipeline)),
                    };
                    // The oracles follow PEFT's rule, even for DoRA in kohya's spelling.
                    let how = AdapterUse { dora: Some(DoraRule::Peft), ..AdapterUse::at(strength) };
                    let stack = stack.with_adapter(&adapter, how).unwrap_or_else(|e| panic!("{what}: {e}"));
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

/// Strengths, stacks and the way back. The reference is the first session's outputs, so no oracle is needed.
#[test]
fn tiny_stacks_are_reversible_and_start_from_the_base() {
    let (lab, unet) = (Lab::default(), part("sd/unet"));
    let (a, b) = (unet.adapter("kohya"), unet.adapter("loha"));
    let at = |stack: WeightStack, adapter: &Adapter, strength: f32| {
        stack.with_adapter(adapter, AdapterUse::at(strength)).unwrap()
    };
    let mut by_provider: Vec<(String, Vec<Tensors>)> = Vec::new();
    let mut ids = ALL.clone();
    ids.extend((!ids.contains(&lab.reference())).then(|| lab.reference()));
    on_providers(&lab, &ids, |provider, id, problems| {
        let mut session = session_of(&unet, provider);
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
        if changed.tensors >= base_tensors(&unet) && id == "ggml" {
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

/// OpenVINO with weights as inputs gives the same outputs without compiling again.
#[test]
fn tiny_weights_as_inputs_of_openvino() {
    let (lab, unet) = (Lab::default(), part("sd/unet"));
    let provider = lab.open("openvino").unwrap();
    let mut session = unet.session(&provider, &[("weights", "inputs")]).unwrap();
    let before = unet.run(&mut session);
    assert_eq!(faults(&before, &unet.outputs["A"]), Vec::<String>::new());
    let report = session.refit(&unet.of("diffusers_B_fp16"), &NoHost).unwrap();
    assert_eq!(report.method, sdrun::abi::WeightUpdate::AsInputs);
    assert_eq!(faults(&unet.run(&mut session), &unet.outputs["B"]), Vec::<String>::new());
    session.refit(&unet.own(), &NoHost).unwrap();
    assert_eq!(unet.run(&mut session), before);
}

/// An adapter of another architecture is refused as such, and nothing changes.
#[test]
fn tiny_adapters_of_other_architectures_are_refused() {
    for (target, source, adapter) in [
        ("sd/unet", "flux/transformer", "peft"),
        ("flux/transformer", "sd/unet", "kohya"),
        ("sd3/transformer", "sd/unet", "peft"),
    ] {
        let (target, source) = (part(target), part(source));
        let file = source.folder.join(format!("lora/{adapter}.safetensors"));
        let adapter = Adapter::open(&file).unwrap();
        let error = target.own().with_adapter(&adapter, AdapterUse::at(1.0)).err().unwrap();
        assert!(error.message.contains(&file.display().to_string()), "{error}");
        assert!(error.hint.is_some(), "{error}");
    }
    // The same holds for a checkpoint.
    let checkpoint = part("sd3/transformer").folder.join("single_file/tiny_sd3_B_fp16.safetensors");
    let unet = part("sd/unet");
    let error =
        WeightStack::of_checkpoint(unet.binding(), &Checkpoint::open(&checkpoint).unwrap()).err().unwrap();
    assert!(error.message.contains("is SD 3, but the model is SD 1.5"), "{error}");
    let text = part("sd/text_encoder");
    assert_eq!(text.binding().component, Some(Component::TextEncoder));
    let only_unet = part("sd/unet").adapter("loha");
    let error = text.own().with_adapter(&only_unet, AdapterUse::at(1.0)).err().unwrap();
    assert!(error.message.contains("other components"), "{error}");
}

/// The command line, from a checkpoint and an adapter to outputs.
#[test]
fn tiny_commands_go_from_a_checkpoint_to_outputs() {
    let unet = part("sd/unet");
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
    let file = |name: &str| text(unet.folder.join(name));
    let checkpoint = file("single_file/tiny_sd_B_fp16.safetensors");
    let lora = format!("{}:0.7", file("lora/kohya.safetensors"));

    let seen = sdrun(&["inspect", &checkpoint]);
    assert_eq!((&seen["kind"], &seen["family"]), (&"checkpoint".into(), &"sd1".into()), "{seen}");
    assert!(seen["components"].as_array().unwrap().len() >= 3, "{seen}");
    assert_eq!(sdrun(&["inspect", &file("diffusers_B_fp16")])["kind"], "checkpoint");
    let seen = sdrun(&["inspect", &file("lora/kohya.safetensors")]);
    assert_eq!(seen["kind"], "adapter", "{seen}");

    // A copy of the model in a separate folder, because the table is written beside it.
    let model = work.path().join("model.onnx");
    fs::copy(unet.folder.join("onnx/unet/model.onnx"), &model).unwrap();
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
        npy::write(&work.path().join(format!("{name}.npy")), tensor).unwrap();
    }
    let inputs: Vec<String> =
        unet.inputs.keys().flat_map(|n| ["-i".into(), format!("{n}={n}.npy")]).collect();
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let shapes: Vec<String> =
        unet.inputs.iter().map(|(n, t)| format!("--shape={n}={}", dims(t.shape()))).collect();
    let shapes: Vec<&str> = shapes.iter().map(String::as_str).collect();
    let oracle = SafetensorsWeights::open(&[unet.folder.join("lora/kohya.oracle.safetensors")]).unwrap();
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
            npy::read(&work.path().join("out.npy"), &expected["out_sample"]).unwrap(),
        )]);
        assert_eq!(faults(&got, &expected), Vec::<String>::new(), "{provider}");
    }
    // An engine with the weights inside.
    let build = ["build", "model.onnx", "-p", "openvino", "-o", "unet.sdengine"];
    sdrun(&[&build[..], &shapes].concat());
    sdrun(&["refit", "unet.sdengine", "--weights", &checkpoint, "--lora", &lora, "-o", "baked.sdengine"]);
    sdrun(&[&["run", "baked.sdengine", "--output", "out_sample=out.npy"][..], &inputs].concat());
    let got = Tensors::from([(
        "out_sample".to_string(),
        npy::read(&work.path().join("out.npy"), &expected["out_sample"]).unwrap(),
    )]);
    assert_eq!(faults(&got, &expected), Vec::<String>::new(), "baked");

    // Impossible requests fail with one sentence and the right code.
    for (arguments, code, words) in [
        (vec!["run", "baked.sdengine", "--weights", &*checkpoint], 4, "baked in"),
        (vec!["run", "unet.sdengine", "--weights", &*file("lora/kohya.safetensors")], 4, "--lora"),
        (vec!["refit", "unet.sdengine"], 3, "--weights"),
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

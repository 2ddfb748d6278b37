//! MIGraphX's target `gpu`, compiled by the real compiler for an AMD GPU that this machine lacks. The stand-in for the HIP runtime
//! (`tests/fake-hip`) is preloaded, so device memory is host memory, and kernels are counted and not run. Outputs mean nothing
//! here. The tests cover build, store, load, weights, run and refit, and the number of kernels per run.
//!
//! Needs an installed ROCm with MIGraphX (`SDRUN_MIGRAPHX_DIR`), `LD_PRELOAD=…/libsdrun_fake_hip.so` and
//! `FAKE_HIP_COUNTS`, the path of a file; see providers/migraphx/README.md.

#![allow(clippy::unwrap_used)]

use sdrun::{
    BuildOptions, CachePolicy, Engine, Model, Shapes, Tensors,
    abi::{DeviceKind, NoHost, WeightUpdate},
    inputs,
};
use sdrun_tests::{
    kernels::{self, Kernels},
    lab::Lab,
};

/// The kernels that a run launches. Checks that every run launches the same.
fn run(engine: &Engine, model: &Model, given: &Tensors) -> Kernels {
    let mut session = engine.session(&model.weights(), &NoHost).unwrap();
    let kernels = kernels::of_a_run(&mut session, given).unwrap().expect("FAKE_HIP_COUNTS is set");
    let memory = session.memory().unwrap();
    assert!(memory.device.unwrap() >= memory.weights.unwrap());
    let takes_weights = !engine.info().weights.is_empty();
    assert_eq!(memory.weights.unwrap() > 0, takes_weights);
    if takes_weights {
        let report = session.refit(&model.weights(), &NoHost);
        // No weight has changed, so nothing is copied.
        assert_eq!(report.unwrap().method, WeightUpdate::AsInputs);
    }
    session.run(given, &NoHost).unwrap();
    assert_eq!(kernels::launched().unwrap(), kernels, "every run launches the same");
    kernels
}

/// Weights as parameters take at most 5 % more kernels than weights inside.
fn costs_little(name: &str, model: &Model, sizes: &[(&str, &[usize])]) {
    let lab = Lab::default();
    let shapes: Shapes = sizes.iter().map(|(input, shape)| (input.to_string(), shape.to_vec())).collect();
    let given = inputs::seeded(model, &model.bound(&shapes).unwrap(), 0).unwrap();
    // Debian's build checks itself and takes 15 minutes to compile a program with weights inside.
    let provider = lab.open_for("migraphx", 60).unwrap();
    let device = provider.device(None).unwrap();
    assert_eq!((device.kind, device.class.as_str()), (DeviceKind::Gpu, "gfx1100"));
    let mut options = BuildOptions::new(device.clone());
    options.cache = CachePolicy::Off;
    options.shapes = shapes;
    let dir = tempfile::tempdir().unwrap();
    let [parameters, inside] = [false, true].map(|bake| {
        options.bake = bake;
        let engine = provider.build(model, &options, &NoHost).unwrap();
        let kernels = run(&engine, model, &given);
        let file = dir.path().join(format!("{bake}.sdengine"));
        let bytes = engine.save(&file).unwrap();
        println!(
            "{name}, weights inside: {bake}: {} kernels, {bytes} bytes, built in {:.1} s",
            kernels.values().sum::<usize>(),
            engine.seconds()
        );
        drop(engine);
        let loaded = provider.load(&file, &device, None, &NoHost).unwrap();
        assert_eq!(run(&loaded, model, &given), kernels, "loaded");
        kernels
    });
    let count = |kernels: &Kernels| kernels.values().sum::<usize>();
    assert!(count(&inside) > 0);
    assert!(
        count(&parameters) as f64 <= 1.05 * count(&inside) as f64,
        "{name}: {} kernels, {} with the weights inside: {parameters:#?} {inside:#?}",
        count(&parameters),
        count(&inside)
    );
}

#[test]
#[ignore = "needs ROCm's compiler and the stand-in for HIP"]
fn taef2_decoder() {
    costs_little("taef2/decoder", &Lab::default().model("taef2/decoder"), &[("latent", &[1, 32, 2, 2])]);
}

/// One program per set of shapes. Programs share the weights that both use.
#[test]
#[ignore = "needs ROCm's compiler and the stand-in for HIP"]
fn one_engine_serves_several_shapes() {
    let (lab, sizes) = (Lab::default(), [vec![1, 32, 2, 2], vec![1, 32, 3, 2]]);
    let model = lab.model("taef2/decoder");
    let provider = lab.open_for("migraphx", 60).unwrap();
    let mut options = BuildOptions::new(provider.device(None).unwrap());
    options.cache = CachePolicy::Off;
    let mut built = |sizes: &[Vec<usize>]| {
        options.open_shapes = [("latent".to_string(), sizes.to_vec())].into();
        provider.build(&model, &options, &NoHost).unwrap()
    };
    let bytes =
        |engine: &Engine| engine.session(&model.weights(), &NoHost).unwrap().memory().unwrap().weights;
    let [one, both] = [built(&sizes[..1]), built(&sizes)];
    assert_eq!(bytes(&one), bytes(&both));
    for (size, engines) in sizes.iter().zip([vec![&one, &both], vec![&both]]) {
        let shapes = Shapes::from([("latent".to_string(), size.clone())]);
        let given = inputs::seeded(&model, &model.bound(&shapes).unwrap(), 0).unwrap();
        let kernels: Vec<Kernels> = engines.into_iter().map(|engine| run(engine, &model, &given)).collect();
        assert!(kernels[0].values().sum::<usize>() > 50, "{size:?}");
        assert!(kernels.iter().all(|other| *other == kernels[0]), "{size:?}: {kernels:?}");
    }
}

#[test]
#[ignore = "needs ROCm's compiler and the stand-in for HIP"]
fn text_encoder() {
    costs_little("sd15/text-encoder", &Lab::default().model("sd15/text-encoder"), &[("input_ids", &[1, 77])]);
}

#[test]
#[ignore = "needs ROCm's compiler and the stand-in for HIP"]
fn vae_decoder() {
    let sizes: &[(&str, &[usize])] = &[("latent_sample", &[1, 4, 16, 16])];
    costs_little("sd15/vae-decoder", &Lab::default().model("sd15/vae-decoder"), sizes);
}

#[test]
#[ignore = "needs ROCm's compiler and the stand-in for HIP"]
fn tiny_unet() {
    let sizes: &[(&str, &[usize])] =
        &[("sample", &[1, 4, 8, 8]), ("timestep", &[]), ("encoder_hidden_states", &[1, 8, 32])];
    let file = sdrun_tiny::folder().join("sd/onnx/unet/model.onnx");
    costs_little("tiny UNet", &Model::open(file).unwrap(), sizes);
}

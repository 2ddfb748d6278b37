//! Upscalers: compared with PyTorch (esrgan.safetensors, made by tools/diffusion/upscale.py), in tiles, as a part of the
//! pipeline, and on the command line.

use super::*;
use sdrun::abi::ErrorCode;
use sdrun_diffusion::{
    metadata::{self, Record, SDRUN},
    pipeline::{Upscaler, upscale},
};
use std::path::PathBuf;

fn stored(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("generate").join(name)
}

/// A small network of tools/diffusion/upscale.py.
fn small(scale: usize) -> Upscaler {
    let model = Model::open(stored(&format!("esrgan_x{scale}.onnx"))).unwrap();
    let part = Part { name: "upscaler".into(), model, weights: WeightFiles::default() };
    Upscaler { part, scale, tile: 320 }
}

/// An enlarged picture, and the number of tiles.
fn larger(upscaler: &Upscaler, picture: &RgbImage, repeats: usize, provider: &str) -> (RgbImage, usize) {
    let (lab, mut count) = (Lab::default(), 0);
    let mut hear = |event: Event<'_>| match event {
        Event::Tile { picture, tile, tiles } => {
            assert_eq!((picture, tile), (0, count));
            count += 1;
            assert!(count <= tiles);
        }
        Event::Loading { part } => assert_eq!(part, "upscaler"),
        Event::Loaded(network) => assert_eq!((&*network.part, &*network.provider), ("upscaler", provider)),
        _ => panic!("{event:?}"),
    };
    let engines = engines(provider);
    let picture = picture.clone();
    let result = upscale(&lab.registry, upscaler, picture, repeats, &engines, &NoHost, &mut hear);
    (result.unwrap(), count)
}

/// The largest difference, and the mean.
fn off(found: &[u8], expected: &[u8]) -> (u8, f64) {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(a, b)| a.abs_diff(*b));
    let sum: f64 = differences.clone().map(f64::from).sum();
    (differences.max().unwrap(), sum / found.len() as f64)
}

#[test]
fn enlarged_pictures_are_those_of_pytorch() {
    let expected = SafetensorsWeights::open(&[stored("esrgan.safetensors")]).unwrap();
    let picture = |name: &str| {
        let tensor = tensor(&expected, name);
        let [height, width, 3] = *tensor.shape() else { panic!("{:?}", tensor.shape()) };
        RgbImage::from_raw(width as u32, height as u32, tensor.bytes().to_vec()).unwrap()
    };
    for provider in ALL.iter() {
        for scale in [4, 2] {
            let (found, tiles) = larger(&small(scale), &picture("picture"), 1, provider);
            let expected = picture(&format!("x{scale}"));
            assert_eq!((found.dimensions(), tiles), (expected.dimensions(), 1));
            // A value that is nearly halfway between two bytes may round either way.
            let (most, mean) = off(&found, &expected);
            println!("{provider} x{scale}: {most}, {mean:e}");
            assert!(most <= 1 && mean < 1e-3, "{provider} x{scale}: {most}, {mean}");
        }
    }
}

#[test]
fn tiles_are_like_the_whole() {
    let waves = |x: u32, y: u32, by: f32| ((x * y + x) as f32 / by).sin() * 127.0 + 128.0;
    let picture =
        RgbImage::from_fn(171, 130, |x, y| Rgb([90.0, 200.0, 400.0].map(|by| waves(x, y, by) as u8)));
    for provider in ALL.iter() {
        for scale in [4, 2] {
            let (whole, _) = larger(&small(scale), &picture, 1, provider);
            assert_eq!(whole.dimensions(), (171 * scale as u32, 130 * scale as u32));
            // In pixels, tiles are as large for both scales.
            let (tiled, tiles) =
                larger(&Upscaler { tile: 24 * scale, ..small(scale) }, &picture, 1, provider);
            let (most, mean) = off(&tiled, &whole);
            println!("{provider} x{scale}: {tiles} tiles, {most}, {mean:e}");
            assert_eq!(tiles, 3 * 2, "{provider} x{scale}");
            assert!(most <= 2 && mean < 0.02, "{provider} x{scale}: {most}, {mean}");
        }
    }
    // A second time, with the sizes of both times.
    let (once, _) = larger(&small(2), &picture, 1, "ggml");
    let (twice, tiles) = larger(&small(2), &picture, 2, "ggml");
    assert_eq!((&twice, tiles), (&larger(&small(2), &once, 1, "ggml").0, 2));
    assert_eq!(larger(&small(2), &picture, 0, "ggml"), (picture, 0));
}

#[test]
fn the_pipeline_enlarges_at_the_end_and_between_passes() {
    let mut parts = parts();
    let drawn = |parts: &Parts, change: &dyn Fn(&mut Request)| {
        let mut request = Request { steps: Some(2), ..request() };
        change(&mut request);
        draw(parts, &request.resolve(parts).unwrap(), "ggml").0
    };
    let image = |picture: &Picture| {
        RgbImage::from_raw(picture.width as u32, picture.height as u32, picture.bytes.clone()).unwrap()
    };
    let plain = drawn(&parts, &|r| r.count = 2);
    parts.upscaler = Some(small(2));
    // Only if the request says so.
    assert_eq!(drawn(&parts, &|r| r.count = 2), plain);
    let large = drawn(&parts, &|r| (r.count, r.upscale_repeats) = (2, 2));
    for (large, plain) in large.iter().zip(&plain) {
        assert_eq!(image(large), larger(&small(2), &image(plain), 2, "ggml").0);
        assert_eq!(large.seed, plain.seed);
    }

    // The second pass starts from the enlarged picture at its exact size.
    let hires = Hires { width: 64, height: 128, steps: Some(3), strength: 0.5, upscale: Upscale::Model };
    let second = drawn(&parts, &|r| r.hires = Some(hires));
    let middle = larger(&small(2), &image(&plain[0]), 1, "ggml").0;
    let start = Start {
        picture: Fit::Stretch.picture(&middle, 64, 128).unwrap(),
        fit: Fit::Stretch,
        strength: 0.5,
        inpaint: None,
    };
    let same = drawn(&parts, &|r| {
        (r.start, r.steps, r.height) = (Some(start.clone()), Some(3), Some(128));
    });
    // Only finished pictures are rounded down.
    let (_, near) = off(&second[0].bytes, &same[0].bytes);
    let lanczos = drawn(&parts, &|r| r.hires = Some(Hires { upscale: Upscale::Lanczos, ..hires }));
    let (_, far) = off(&second[0].bytes, &lanczos[0].bytes);
    assert!(near < 1.0 && far > 5.0, "{near}, {far}");

    // Its settings say so.
    let files =
        Record { upscale: Some(metadata::Upscale::new("4x-Sharp.pth", None, 2.0)), ..Record::of_sdrun() };
    let of = |hires, upscale_repeats| {
        let request = Request { hires, upscale_repeats, ..request() }.resolve(&parts).unwrap();
        request.record(&files, 5, None)
    };
    assert_eq!(of(None, 0).upscale, None);
    assert_eq!(of(None, 3).upscale, Some(metadata::Upscale::new("4x-Sharp", None, 8.0)));
    let record = of(Some(hires), 0);
    assert_eq!(record.hires.as_ref().unwrap().upscaler.as_deref(), Some("4x-Sharp"));
    assert_eq!(Request::of_record(&record).hires, Some(hires));
    assert_eq!([0.5, 2.0, 3.0, 4.0].map(|factor| small(2).repeats(factor)), [1, 1, 2, 2]);

    let refused = |parts: &Parts, change: &dyn Fn(&mut Request)| {
        let mut request = request();
        change(&mut request);
        request.resolve(parts).unwrap_err().to_string()
    };
    assert!(refused(&parts, &|r| r.upscale_repeats = 8).contains("enlarged 256 times"));
    parts.upscaler = None;
    assert!(refused(&parts, &|r| r.upscale_repeats = 1).contains("none was given"));
    assert!(refused(&parts, &|r| r.hires = Some(hires)).contains("none was given"));
}

/// Tensors of an ESRGAN under the names of Real-ESRGAN.
fn esrgan(blocks: usize, features: usize, inputs: usize) -> Vec<(String, Vec<usize>)> {
    let growth = features / 2;
    let mut modules = vec![("conv_first".to_string(), features, inputs)];
    for block in (0..blocks).flat_map(|block| (1..=3).map(move |dense| format!("body.{block}.rdb{dense}"))) {
        for conv in 1..=5 {
            let out = if conv == 5 { features } else { growth };
            modules.push((format!("{block}.conv{conv}"), out, features + (conv - 1) * growth));
        }
    }
    let rest = ["conv_body", "conv_up1", "conv_up2", "conv_hr"];
    modules.extend(rest.map(|name| (name.into(), features, features)));
    modules.push(("conv_last".into(), 3, features));
    let tensors = |(name, out, inputs): (String, usize, usize)| {
        [(format!("{name}.weight"), vec![out, inputs, 3, 3]), (format!("{name}.bias"), vec![out])]
    };
    modules.into_iter().flat_map(tensors).collect()
}

/// Writes a file of random weights that keep the variance.
fn write_esrgan(file: &Path, tensors: &[(String, Vec<usize>)]) {
    let (mut header, mut bytes, mut state) = (serde_json::Map::new(), Vec::<u8>::new(), 1u64);
    for (name, shape) in tensors {
        let start = bytes.len();
        let bound = (3.0 / shape[1..].iter().product::<usize>() as f32).sqrt();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            bytes.extend((unit * bound.min(0.5)).to_le_bytes());
        }
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, bytes.len()]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::from(header).to_string();
    fs::write(file, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes].concat()).unwrap();
}

#[test]
fn files_of_upscalers_are_told_apart() {
    let (dir, lab) = (tempfile::tempdir().unwrap(), Lab::default());
    let file = dir.path().join("a.safetensors");
    let open = |tensors: &[(String, Vec<usize>)]| {
        write_esrgan(&file, tensors);
        Upscaler::open(&file, &lab.paths, &NoHost)
    };
    let opened = open(&esrgan(6, 64, 3)).unwrap();
    assert_eq!((opened.scale, &*opened.part.name), (4, "upscaler"));
    let refuses = |tensors: &[(String, Vec<usize>)], code, words: &str| {
        let error = open(tensors).err().unwrap();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    refuses(
        &esrgan(2, 64, 3),
        ErrorCode::Unimplemented,
        "2 blocks of 64 channels that add 32 each time, with scale 4",
    );
    refuses(
        &esrgan(6, 64, 12),
        ErrorCode::Unimplemented,
        "6 blocks of 64 channels that add 32 each time, with scale 2",
    );
    refuses(&esrgan(6, 32, 3), ErrorCode::Unimplemented, "6 blocks of 32 channels that add 16");
    let mut cut = esrgan(6, 64, 3);
    cut.retain(|(name, _)| !name.starts_with("conv_up2"));
    refuses(&cut, ErrorCode::Unimplemented, "without `conv_up2");
    let vae = sdrun_tiny::folder().join("sd/single_file/tiny_sd_B_fp16.safetensors");
    let error = Upscaler::open(&vae, &lab.paths, &NoHost).err().unwrap();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    assert!(error.to_string().contains("is no upscaler"), "{error}");
}

#[test]
fn the_command_line_upscales() {
    let machine = Machine::new();
    let model = machine.dir.path().join("model/4x-Small.safetensors");
    write_esrgan(&model, &esrgan(6, 64, 3));
    let with = ["--upscale-model", "model/4x-Small.safetensors"];
    let draw = |arguments: &[&str]| {
        machine.draws(&[&["-p", "ggml", "-o", "other.png"], arguments].concat());
        machine.bytes("other.png")
    };
    let pixels = |bytes: &[u8]| image::load_from_memory(bytes).unwrap().to_rgb8();
    let texts = |bytes: &[u8]| -> Vec<(String, String)> {
        let reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let texts = reader.info().uncompressed_latin1_text.iter();
        texts.map(|chunk| (chunk.keyword.clone(), chunk.text.clone())).collect()
    };
    machine.draws(&["-s", "5", "-p", "ggml"]);
    let large = draw(&[&["-s", "5"][..], &with].concat());
    assert_eq!(pixels(&large).dimensions(), (256, 256));
    let read = Infotext::parse(&texts(&large)[0].1);
    assert_eq!(read.get("Postprocess upscale by"), Some("4"));
    assert_eq!(read.get("Postprocess upscaler"), Some("4x-Small"));

    // The picture says how it was enlarged. Without the file, the rest is drawn.
    fs::write(machine.dir.path().join("large.png"), &large).unwrap();
    assert_eq!(draw(&[&["--from", "large.png"][..], &with].concat()), large);
    assert_eq!(pixels(&draw(&["--from", "large.png"])), pixels(&machine.bytes("picture.png")));

    // The command for a finished picture does the same, and keeps its texts.
    let upscale = |arguments: &[&str]| {
        let model = ["picture.png", "-m", "model/4x-Small.safetensors", "-p", "ggml"];
        machine.program("upscale").args(model).args(arguments).output().unwrap()
    };
    let output = upscale(&["-o", "command.png"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("command.png  256 x 256, "));
    let command = machine.bytes("command.png");
    assert_eq!(pixels(&command), pixels(&large));
    let mut expected = texts(&machine.bytes("picture.png"));
    assert!(expected.iter().any(|(key, _)| key == SDRUN));
    let done = "Postprocess upscale by: 4, Postprocess upscaler: 4x-Small";
    expected.push(("postprocessing".into(), done.into()));
    assert_eq!(texts(&command), expected);

    // Between two passes, it is not used again at the end.
    let hires = ["-s", "5", "--hires", "2", "--hires-steps", "1"];
    let second = draw(&[&hires[..], &with, &["--hires-upscaler", "model"]].concat());
    assert_eq!(pixels(&second).dimensions(), (128, 128));
    assert_eq!(Infotext::parse(&texts(&second)[0].1).get("Hires upscaler"), Some("4x-Small"));
    assert_ne!(pixels(&second), pixels(&draw(&hires)));
    fs::write(machine.dir.path().join("second.png"), &second).unwrap();
    assert_eq!(draw(&[&["--from", "second.png"][..], &with].concat()), second);

    let refuses = |code: i32, words: &str, arguments: &[&str]| {
        let output = machine.program("upscale").args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    };
    let model = "model/4x-Small.safetensors";
    let other = sdrun_tiny::folder().join("sd/single_file/tiny_sd_B_fp16.safetensors").display().to_string();
    refuses(4, "is no upscaler", &["picture.png", "-m", &other, "-o", "x.png"]);
    refuses(3, "nowhere.safetensors", &["picture.png", "-m", "nowhere.safetensors", "-o", "x.png"]);
    refuses(3, "nowhere.png", &["nowhere.png", "-m", model, "-o", "x.png"]);
    refuses(10, "is not a PNG", &[model, "-m", model, "-o", "x.png"]);
    refuses(4, "input of this command", &["picture.png", "-m", model, "-o", "picture.png"]);
    refuses(4, "enlarged 256 times", &["picture.png", "-m", model, "-o", "x.png", "--repeats", "4"]);
    refuses(2, "invalid value '0'", &["picture.png", "-m", model, "-o", "x.png", "--repeats", "0"]);
    machine.pictures();
    machine.refuses(2, &["--upscale-model"], &["--upscale-repeats", "2"]);
    machine.refuses(
        4,
        &["give its file with --upscale-model"],
        &["--hires", "2", "--hires-upscaler", "model"],
    );
    machine.refuses(4, &["enlarged 1024 times"], &[&with[..], &["--upscale-repeats", "5"]].concat());
    machine.refuses(3, &["nowhere.safetensors"], &["--upscale-model", "nowhere.safetensors"]);
}

//! Weights from files and from memory give the same results.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{DType, NoHost, Precision, Provider};
use sdrun_provider_onnxruntime::OnnxRuntime;
use std::{fs, io::Write, path::Path};
use testing::*;

const N: usize = 300;

fn model() -> Vec<u8> {
    Model::default()
        .input("x", DType::F32, &[1, N as i64])
        .output("y", DType::F32, &[1, N as i64])
        .weight("w", DType::F32, &[N, N])
        .weight("b", DType::F32, &[N])
        .node("MatMul", &["x", "w"], &["h"])
        .node("Add", &["h", "b"], &["y"])
        .bytes()
}

fn weights(seed: u32) -> Source {
    Source::default().with("w", &[N, N], &noise(seed, N * N)).with("b", &[N], &noise(seed + 1, N))
}

/// Writes the weights with these names to `file` after an odd number of other bytes, and spoils their copies in
/// memory. So only the file has the right values.
fn in_file(source: &Source, names: &[&str], file: &Path) -> Source {
    let mut source = source.clone();
    let mut out = fs::File::create(file).unwrap();
    let mut offset = 13u64;
    out.write_all(&[0xee; 13]).unwrap();
    for name in names {
        let stored = source.0.get_mut(*name).unwrap();
        out.write_all(&stored.data).unwrap();
        stored.file = Some((file.to_path_buf(), offset));
        offset += stored.data.len() as u64;
        stored.data.fill(0x42);
    }
    source
}

#[test]
fn weights_in_memory_and_in_files_are_the_same() {
    let runtime = runtime_dir("SDRUN_ONNXRUNTIME_DIR");
    OnnxRuntime.init(&config(Some(&runtime), &std::env::temp_dir()), &NoHost).unwrap();
    let engine = OnnxRuntime.build(&model(), &spec(Precision::Fp32), &Source::default(), &NoHost).unwrap();
    let x = noise(3, N);
    let memory = weights(1);
    let mut session = engine.session(&memory, &NoHost).unwrap();
    let expected = run(&mut *session, &[1, N], &x).unwrap();
    let reference = affine(&widen(&x), &floats(&memory.0["w"].data), &floats(&memory.0["b"].data), N);
    assert!(error_of(&expected, &reference) < 1e-6);

    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let odd = dir.path().join("odd ü 漢.bin");
    for names in [&["w", "b"][..], &["w"], &["b"]] {
        let source = in_file(&memory, names, &odd);
        let mut session = engine.session(&source, &NoHost).unwrap();
        assert_eq!(run(&mut *session, &[1, N], &x).unwrap(), expected, "{names:?}");
    }
    #[cfg(unix)]
    {
        let mut source = in_file(&memory, &["w", "b"], &odd);
        let link = other.path().join("link");
        std::os::unix::fs::symlink(&odd, &link).unwrap();
        source.0.values_mut().for_each(|s| s.file.as_mut().unwrap().0 = link.clone());
        let mut session = engine.session(&source, &NoHost).unwrap();
        assert_eq!(run(&mut *session, &[1, N], &x).unwrap(), expected);
    }

    // Refits from a file, and back from memory. A session keeps its files mapped, so each session has its own.
    let second = weights(7);
    let reference = affine(&widen(&x), &floats(&second.0["w"].data), &floats(&second.0["b"].data), N);
    let source = in_file(&second, &["w", "b"], &dir.path().join("second.bin"));
    session.refit(&["w", "b"], &source, &NoHost).unwrap();
    assert!(error_of(&run(&mut *session, &[1, N], &x).unwrap(), &reference) < 1e-6);

    // A file that is too short for its weights is an error, not a crash, and changes nothing.
    let short = dir.path().join("short.bin");
    let source = in_file(&memory, &["w", "b"], &short);
    fs::OpenOptions::new().write(true).open(&short).unwrap().set_len(1000).unwrap();
    let error = failure(session.refit(&["w", "b"], &source, &NoHost));
    assert!(error.message.contains("has only 1000"), "{error}");
    assert!(error_of(&run(&mut *session, &[1, N], &x).unwrap(), &reference) < 1e-6);
    session.refit(&["w", "b"], &memory, &NoHost).unwrap();
    assert_eq!(run(&mut *session, &[1, N], &x).unwrap(), expected);
}

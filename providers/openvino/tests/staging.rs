//! How weights reach OpenVINO, and that no files are left behind. This is a single test because it inspects a shared
//! folder.
#![allow(clippy::unwrap_used)]

#[path = "../../common/testing.rs"]
mod testing;

use sdrun_abi::{DType, NoHost, Precision, Provider};
use sdrun_provider_openvino::OpenVino;
use std::{fs, io::Write, path::Path};
use testing::*;

/// Large enough that the weights are linked, not copied.
const N: usize = 1200;

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

/// The weights, stored in `file` after an odd number of other bytes.
fn in_file(source: &Source, file: &Path) -> Source {
    let mut source = source.clone();
    let mut out = fs::File::create(file).unwrap();
    let mut offset = 13u64;
    out.write_all(&[0xee; 13]).unwrap();
    for stored in source.0.values_mut() {
        out.write_all(&stored.data).unwrap();
        stored.file = Some((file.to_path_buf(), offset));
        offset += stored.data.len() as u64;
    }
    source
}

#[test]
fn weights_in_memory_and_in_files_are_the_same_and_nothing_stays() {
    let temp = tempfile::tempdir().unwrap();
    let files = tempfile::tempdir().unwrap();
    // A folder that a killed process left behind.
    let stale = temp.path().join("openvino-stale");
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join("lock"), b"").unwrap();
    let runtime = runtime_dir("SDRUN_OPENVINO_DIR");
    OpenVino.init(&config(Some(&runtime), temp.path()), &NoHost).unwrap();
    assert!(!stale.exists());
    let empty = || fs::read_dir(temp.path()).unwrap().next().is_none();

    let memory = Source::default().with("w", &[N, N], &noise(1, N * N)).with("b", &[N], &noise(2, N));
    let x = noise(3, N);
    let engine = OpenVino.build(&model(), &spec(Precision::Fp32), &Source::default(), &NoHost).unwrap();
    assert!(empty());
    let mut sessions = vec![engine.session(&memory, &NoHost).unwrap()];
    assert!(empty());
    let reference = affine(&widen(&x), &floats(&memory.0["w"].data), &floats(&memory.0["b"].data), N);
    let expected = run(&mut *sessions[0], &[1, N], &x).unwrap();
    assert!(error_of(&expected, &reference) < 2e-6);

    let file = files.path().join("odd ü 漢.bin");
    let linked = in_file(&memory, &file);
    let mut places = vec![linked];
    #[cfg(unix)]
    {
        let link = files.path().join("symlink");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let mut soft = places[0].clone();
        soft.0.values_mut().for_each(|s| s.file.as_mut().unwrap().0 = link.clone());
        places.push(soft);
    }
    // Memory-backed, so another file system than the one for temporary files, where there is one.
    let shm = Path::new("/dev/shm");
    let elsewhere = shm.is_dir().then(|| tempfile::tempdir_in(shm).unwrap());
    if let Some(dir) = &elsewhere {
        places.push(in_file(&memory, &dir.path().join("w.bin")));
    }
    for source in &places {
        let mut session = engine.session(source, &NoHost).unwrap();
        assert!(empty());
        assert_eq!(run(&mut *session, &[1, N], &x).unwrap(), expected);
        sessions.push(session);
    }
    #[cfg(unix)]
    assert_eq!(std::os::unix::fs::MetadataExt::nlink(&fs::metadata(&file).unwrap()), 1);

    // Refitting from a file, after which the first session still has its own weights.
    let other = Source::default().with("w", &[N, N], &noise(7, N * N)).with("b", &[N], &noise(8, N));
    let other = in_file(&other, &files.path().join("other.bin"));
    sessions[1].refit(&["w", "b"], &other, &NoHost).unwrap();
    assert!(empty());
    let reference = affine(&widen(&x), &floats(&other.0["w"].data), &floats(&other.0["b"].data), N);
    assert!(error_of(&run(&mut *sessions[1], &[1, N], &x).unwrap(), &reference) < 2e-6);
    assert_eq!(run(&mut *sessions[0], &[1, N], &x).unwrap(), expected);

    // A file that is shorter than its weights.
    let short = files.path().join("short.bin");
    let source = in_file(&memory, &short);
    fs::OpenOptions::new().write(true).open(&short).unwrap().set_len(1000).unwrap();
    let error = failure(sessions[1].refit(&["w", "b"], &source, &NoHost));
    assert!(error.message.contains("has only 1000"), "{error}");
    assert!(empty());

    // Failures leave nothing either.
    for phase in ["stage weights", "read", "compile"] {
        assert!(engine.session(&memory, &Stop(phase)).is_err());
        assert!(empty());
    }
    let baked = sdrun_abi::BuildSpec { bake: true, ..spec(Precision::Fp32) };
    let engine = OpenVino.build(&model(), &baked, &memory, &NoHost).unwrap();
    assert!(engine.serialize().unwrap().len() > N * N * 4);
    assert!(empty());
}

//! Nothing grows between runs and nothing is left behind. A single test in its own process: it counts open files,
//! mappings and threads.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "worker/support.rs"]
mod support;

use sdrun_abi::{DType, Provider, TensorView, VecSink};
use support::*;

/// Numbers of open files, mappings and threads of a process.
fn held(pid: &str) -> (usize, usize, usize) {
    let count = |dir: &str| std::fs::read_dir(format!("/proc/{pid}/{dir}")).unwrap().count();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let regions = maps.lines().filter(|line| line.contains("/sdrun-worker-")).count();
    (count("fd"), regions, count("task"))
}

#[test]
fn nothing_grows_and_nothing_is_left() {
    let model = Model { input: vec![300_000], outputs: vec![vec![300_000]], ..Model::small() };
    let weights = Weights::filled(&model, 1.0);
    let x = vec![0.5; 300_000];
    let (data, expected) = (bytes(&x), model.expected(&x, 2.0, 7.0));
    let input = TensorView { dtype: DType::F32, shape: &model.input, data: &data };
    mock();
    let before = held("self");

    let isolated = worker("good");
    let pid = isolated.pid();
    let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
    let mut session = engine.session(&weights, &Quiet).unwrap();
    let mut sink = VecSink::default();
    session.run(&[input], &mut sink, &Quiet).unwrap();
    let warm = (held("self"), held(&pid.to_string()));
    assert_eq!((warm.0.1, warm.1.1), (2, 2), "an input and an output region on each side");
    let folder = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        .find(|file| file.to_string_lossy().contains("/sdrun-worker-"))
        .unwrap();
    let folder = folder.parent().unwrap();
    let names: Vec<_> =
        std::fs::read_dir(folder.join("files")).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(names, [""; 0], "mapped regions have no name");

    for _ in 0..1000 {
        session.run(&[input], &mut sink, &Quiet).unwrap();
    }
    assert!(floats(sink.get(0).unwrap().data) == expected[0]);
    for _ in 0..20 {
        let engine = isolated.build(&model.json(), &spec(), &weights, &Quiet).unwrap();
        let mut session = engine.session(&weights, &Quiet).unwrap();
        session.refit(&["b"], &weights, &Quiet).unwrap();
        engine.serialize().unwrap();
        session.run(&[input], &mut sink, &Quiet).unwrap();
    }
    assert_eq!((held("self"), held(&pid.to_string())), warm);

    drop((isolated, engine));
    assert!(is_alive(pid), "a session keeps its worker");
    drop(session);
    assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap(), "killed and reaped");
    assert!(!folder.exists());
    for _ in 0..10 {
        worker("good").close();
        assert!(started(patient()).load(b"junk", &spec(), &Quiet).is_err());
    }
    eventually("the end of all threads", || held("self") == before);
}

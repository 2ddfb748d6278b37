//! A confined worker reaches what it needs and nothing else.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "worker/support.rs"]
mod support;

use sdrun::worker::{Confinement, Sandbox, WorkerConfig, WorkerProvider};
use sdrun_abi::{InitConfig, Provider};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    net::TcpListener,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
};
use support::*;

/// What a worker needs, among the attempts of the mock.
const NEEDED: [&str; 5] = ["read-model", "write-temp", "link-model", "read-link", "move-to-links"];

fn started_with(sandbox: Option<Sandbox>, scratch: &Path) -> WorkerProvider {
    WorkerProvider::start(WorkerConfig { sandbox, scratch: scratch.into(), ..config(patient()) }).unwrap()
}

fn sandbox(readable: &Path) -> Sandbox {
    let readable = vec![fs::canonicalize(readable).unwrap()];
    Sandbox { readable, memory: Some(1 << 30), ..Sandbox::default() }
}

/// Lets the mock try to escape. Returns what it reached, and how far the sandbox held.
fn reached(confined: bool) -> (Vec<String>, Confinement) {
    let target = tempfile::tempdir_in(folder()).unwrap();
    let scratch = tempfile::tempdir_in(folder()).unwrap();
    let at = |name: &str| -> PathBuf { target.path().join(name) };
    for name in ["secret", "removable"] {
        fs::write(at(name), "x").unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    fs::write(at("model"), listener.local_addr().unwrap().port().to_string()).unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    let worker = started_with(confined.then(|| sandbox(&at("model"))), scratch.path());
    let confinement = worker.confinement();
    let options = BTreeMap::from([("escape".to_string(), target.path().to_str().unwrap().to_string())]);
    let config = InitConfig { temp_dir: scratch.path().into(), options, ..init_config("good") };
    let info = worker.init(&config, &Quiet).unwrap();
    let reached = info.version.split(' ').map(String::from).collect();
    drop(worker);
    if confined {
        let left: Vec<_> = fs::read_dir(scratch.path()).unwrap().collect();
        assert!(left.is_empty(), "its folder outlives the worker: {left:?}");
        assert_eq!(fs::read(at("secret")).unwrap(), b"x");
    }
    (reached, confinement)
}

#[test]
fn a_confined_worker_reaches_only_what_it_needs() {
    match reached(true) {
        (reached, Confinement::Full) => assert_eq!(reached, NEEDED),
        // Seccomp and limits need no Landlock.
        (reached, confinement) => {
            eprintln!("this kernel cannot limit the access to files: {confinement:?}");
            for barred in ["execute", "allocate", "connect", "listen", "udp", "unix-socket"] {
                assert!(!reached.iter().any(|name| name == barred), "{barred}");
            }
        }
    }
}

/// Otherwise the test above would show nothing.
#[test]
fn without_a_sandbox_every_attempt_succeeds() {
    let (reached, _) = reached(false);
    assert_eq!(reached.len(), 24, "{reached:?}");
}

/// Weights in files that the worker may not read arrive all the same.
#[test]
fn weights_of_any_file_reach_a_confined_worker() {
    let scratch = tempfile::tempdir_in(folder()).unwrap();
    let model = Model::small();
    let mut in_file = Weights::ramp(&model, 0.5);
    let (path, mut content, mut offsets) = (scratch.path().join("weights"), Vec::new(), HashMap::new());
    for (name, (_, values)) in &in_file.tensors {
        offsets.insert(name.clone(), content.len() as u64);
        content.extend(bytes(values));
    }
    fs::write(&path, content).unwrap();
    in_file.file = Some((path, offsets));
    let expected = model.expected(&[1.0; 5], 2.0, in_file.sum(&model));
    let other = tempfile::NamedTempFile::new_in(folder()).unwrap();
    for readable in [scratch.path(), other.path()] {
        let worker = started_with(Some(sandbox(readable)), scratch.path());
        worker.init(&init_config("good"), &Quiet).unwrap();
        let engine = worker.build(&model.json(), &spec(), &in_file, &Quiet).unwrap();
        let mut session = engine.session(&in_file, &Quiet).unwrap();
        assert_eq!(run(session.as_mut(), &model, &[1.0; 5]).unwrap(), expected);
    }
}

//! `sdrun selftest` on the providers for CPUs, on one that computes nonsense, and on one that dies.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use sdrun::abi::Precision;
use sdrun_selftest::{Report, State};
use sdrun_tests::{lab::ALL, place::Place};
use serde_json::json;
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn place(place: Place) -> PathBuf {
    place.find().unwrap_or_else(|why| panic!("{why}"))
}

/// Runs it as a user called Ada, whose files lie in `home`.
fn selftest(home: &Path, arguments: &[&str]) -> Output {
    let to: &[&str] = if arguments.contains(&"-o") { &[] } else { &["-o", "report.html"] };
    Command::new(place(Place::Dist).join("sdrun"))
        .args(["selftest", "--json"])
        .args(to)
        .args(arguments)
        .current_dir(home)
        .env("HOME", home)
        .env("USER", "ada")
        .env("SDRUN_DATA_DIR", place(Place::Data))
        .env("SDRUN_CACHE_DIR", home.join("cache"))
        .output()
        .unwrap()
}

fn report(output: &Output) -> Report {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Errors of a provider that docs/status.md knows, on processors of another kind.
fn is_known(provider: &str, model: &str, precision: Precision) -> bool {
    let large = ["t5-xxl-2-layers", "flux/dev-2x2-layers"].contains(&model);
    provider == "openvino" && large && matches!(precision, Precision::Bf16 | Precision::Fp16)
}

/// All at the same time, because each takes all of its time.
#[test]
fn providers_for_cpus_pass() {
    std::thread::scope(|scope| {
        for provider in ALL.iter().filter(|provider| **provider != "onnxruntime") {
            scope.spawn(|| passes(provider));
        }
    });
}

/// Every check and the first networks of a provider pass. The other networks need more time; so does the reference provider, which CI
/// checks out of a kit.
fn passes(provider: &str) {
    let home = tempfile::Builder::new().prefix("home-of-ada-").tempdir().unwrap();
    let output = selftest(home.path(), &["-p", provider, "--time", "150s"]);
    let report = report(&output);
    let [subject] = &report.subjects[..] else { panic!("{provider}: {:?}", report.absent) };
    for check in &subject.checks {
        println!("{provider}: {}: {:?}: {}", check.name, check.state, check.detail);
        let offers = match check.name.as_str() {
            "budget of device memory" => subject.capabilities.streaming,
            "tensors that stay on the device" => subject.capabilities.device_tensors,
            "several shapes in one engine" => subject.capabilities.dynamic_shapes,
            _ => true,
        };
        let wanted = if offers { State::Passed } else { State::NotOffered };
        assert_eq!(check.state, wanted, "{provider}: {check:?}");
    }
    assert_eq!(subject.checks.len(), 10 + usize::from(subject.capabilities.precisions.len() > 1));
    let wrong = |network: &&sdrun_selftest::Network| {
        network.state == State::Failed && !is_known(provider, &network.model, network.precision)
    };
    assert!(!subject.networks.iter().any(|network| wrong(&network)), "{provider}: {:?}", subject.networks);
    for model in ["mobilenet-v2", "taesd/decoder", "sd15/text-encoder"] {
        let found: Vec<_> = subject.networks.iter().filter(|network| network.model == model).collect();
        assert_eq!(found.len(), 2 * subject.capabilities.precisions.len());
        assert!(found.iter().all(|network| network.state == State::Passed), "{provider}: {found:?}");
    }
    assert!(
        subject.pictures.len() >= 16 && subject.pictures.iter().filter(|sample| sample.right).count() >= 14
    );

    // One file, without the user's name and folders.
    let page = fs::read_to_string(home.path().join("report.html")).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    for text in [page.as_str(), &*said] {
        for private in [home.path().to_str().unwrap(), "home-of-ada", place(Place::Data).to_str().unwrap()] {
            assert!(!text.contains(private), "{provider}: the report names {private}");
        }
    }
    assert!(
        page.starts_with("<!doctype html>") && page.contains("✓ passed") && page.contains("data:image/png")
    );
    let embedded = page.split_once("id=\"report\">").unwrap().1.split_once("</script>").unwrap().0;
    let again: Report = serde_json::from_str(&embedded.replace("<\\/", "</")).unwrap();
    assert_eq!(again.subjects[0].checks.len(), subject.checks.len());
    let left: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "cache" || name == "report.html"), "{left:?}");
}

/// A manifest for the mock in `folder`.
fn mock(folder: &Path) -> PathBuf {
    let built = place(Place::Dist).join("../debug/libsdrun_mock_plugin.so");
    let library = folder.join("libmock.so");
    fs::copy(&built, &library).unwrap_or_else(|e| panic!("{}: {e}", built.display()));
    fs::set_permissions(&library, PermissionsExt::from_mode(0o755)).unwrap();
    fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    let manifest = json!({
        "file_format_version": "1.0.0",
        "provider": {
            "id": "mock", "summary": "", "vendor": "sdrun", "version": env!("CARGO_PKG_VERSION"), "build_id": "mock-build",
            "library": { "path": "libmock.so", "sha256": "", "target": "", "abi_major": 1 },
        },
    });
    let file = folder.join("sdrun-provider-mock.json");
    fs::write(&file, manifest.to_string()).unwrap();
    file
}

#[test]
fn a_provider_that_computes_nonsense_fails() {
    let home = tempfile::tempdir().unwrap();
    let manifest = mock(home.path());
    let output = selftest(
        home.path(),
        &["-p", "mock", "--provider-path", manifest.to_str().unwrap(), "--time", "1min"],
    );
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let report = report(&output);
    let subject = &report.subjects[0];
    let network = subject.networks.iter().find(|network| network.model == "mobilenet-v2").unwrap();
    assert_eq!(network.state, State::Failed, "{network:?}");
    assert!(network.reason.as_ref().unwrap().contains("is wrong"), "{network:?}");
    let pictures = subject.checks.iter().find(|check| check.name.starts_with("pictures")).unwrap();
    assert_ne!(pictures.state, State::Passed, "{pictures:?}");
    assert!(fs::read_to_string(home.path().join("report.html")).unwrap().contains("✗ failed"));
}

#[test]
fn what_cannot_be_checked_is_one_sentence() {
    let home = tempfile::tempdir().unwrap();
    let manifest = mock(home.path());
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let unknown = selftest(home.path(), &["-p", "acme"]);
    assert_eq!(unknown.status.code(), Some(3), "{}", said(&unknown));
    let nowhere = selftest(home.path(), &["-p", "ggml", "--device", "gpu:9"]);
    assert_eq!(nowhere.status.code(), Some(5), "{}", said(&nowhere));
    assert!(said(&nowhere).contains("no device to check: ggml: has no device `gpu:9`"), "{}", said(&nowhere));
    let folder = selftest(home.path(), &["-p", "ggml", "-o", "no/such/folder/report.html"]);
    assert_ne!(folder.status.code(), Some(0));
    assert!(said(&folder).contains("no/such/folder"), "{}", said(&folder));
    let dies = Command::new(place(Place::Dist).join("sdrun"))
        .args(["selftest", "-p", "mock", "--provider-path", manifest.to_str().unwrap()])
        .current_dir(home.path())
        .env("SDRUN_MOCK_QUERY", "abort")
        .env("SDRUN_DATA_DIR", home.path().join("data"))
        .env("SDRUN_CACHE_DIR", home.path().join("cache"))
        .output()
        .unwrap();
    assert!(said(&dies).contains("SIGABRT"), "{}", said(&dies));
    assert!(!home.path().join("report.html").exists());
    assert!(!home.path().join("sdrun-selftest.html").exists());
}

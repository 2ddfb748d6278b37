//! A host reads what it can from a plugin of a later ABI version, in this process and in a worker.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "../../../tests/mock/c_plugins.rs"]
mod c_plugins;

use c_plugins::{Version, compile};
use sdrun::worker::{Limits, WorkerConfig, WorkerProvider};
use sdrun_abi::{
    BuildSpec, CancelSupport, Compatibility, DType, DeviceKind, ErrorCode, Hint, InitConfig, NoHost,
    NoWeights, Precision, Provider, WeightUpdate,
};

fn speaks_of_the_future(provider: &dyn Provider) {
    provider.init(&InitConfig::default(), &NoHost).unwrap();
    let device = provider.devices().unwrap().remove(0);
    assert_eq!((device.id.as_str(), device.kind, device.index), ("cpu", DeviceKind::Other, 0));
    let can = provider.capabilities("cpu").unwrap();
    assert_eq!((can.precisions, can.io_dtypes), (vec![Precision::Fp32], vec![DType::F32]));
    assert_eq!(
        (can.weight_update, can.cancel, can.bake),
        (WeightUpdate::InPlace, CancelSupport::None, false)
    );
    assert_eq!(
        provider.check("something else", "cpu").unwrap(),
        Compatibility::Unsupported("the provider reports `needs_translation`: from another dialect".into())
    );
    let mut spec = BuildSpec::new("cpu", Precision::Fp32);
    spec.options.insert("no-such-option".into(), "1".into());
    let error = provider.build(b"", &spec, &NoWeights, &NoHost).err().unwrap();
    assert_eq!((error.code, error.hint), (ErrorCode::InvalidArgument, Some("ask an oracle".into())));
    // A known kind of hint is read as usual.
    let error = provider.capabilities("gpu").unwrap_err();
    assert_eq!((error.code, error.hint), (ErrorCode::NotFound, Some(Hint::UseDevice(vec!["cpu".into()]))));
}

#[test]
#[allow(unsafe_code)]
fn a_newer_plugin_is_understood() {
    let dir = tempfile::tempdir().unwrap();
    let (library, _) = compile(Version::Newer, dir.path());
    // SAFETY: the plugin was just compiled from this repository.
    let direct = unsafe { sdrun::load_plugin(&library) }.unwrap();
    assert_eq!(direct.identity().abi, (1, 7));
    speaks_of_the_future(&direct);
    let isolated = WorkerProvider::start(WorkerConfig {
        worker: env!("CARGO_BIN_EXE_sdrun-worker").into(),
        loader: Vec::new(),
        env: Vec::new(),
        plugin: library,
        limits: Limits::default(),
        scratch: dir.path().into(),
        sandbox: None,
    });
    speaks_of_the_future(&isolated.unwrap());
}

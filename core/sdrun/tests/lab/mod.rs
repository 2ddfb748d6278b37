//! A user with providers of their own, and a small model.
#![allow(dead_code, reason = "each test target uses a part")]
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use crate::support;
use prost::Message;
use sdrun::{
    Cache, Discovery, HostTensor, Isolation, Model, Paths, Provider, Registry, Tensors, abi::DType,
    graph::proto,
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A user with the mock provider.
pub(crate) struct Lab {
    dir: tempfile::TempDir,
    pub(crate) registry: Registry,
}

impl Lab {
    pub(crate) fn new() -> Self {
        Self::with(json!({}), &[], &[])
    }

    /// The mock, with these fields in its manifest; other manifests; the order that the user prefers.
    pub(crate) fn with(mock: Value, others: &[PathBuf], order: &[&str]) -> Self {
        // With permissions that sdrun trusts, whatever the umask.
        #[cfg(unix)]
        let allow = |path: &Path| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(path, mode).unwrap();
        };
        #[cfg(not(unix))]
        let allow = |_: &Path| {};
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("plugin");
        fs::create_dir(&folder).unwrap();
        allow(&folder);
        let library = folder.join("libmock.so");
        fs::copy(support::mock(), &library).unwrap();
        allow(&library);
        let identity = support::uninitialised_plugin().identity().clone();
        let mut manifest = json!({
            "file_format_version": "1.0.0",
            "provider": {
                "id": identity.id, "summary": "", "vendor": "sdrun", "version": identity.version,
                "build_id": identity.build_id,
                "library": { "path": "libmock.so", "sha256": "", "target": "", "abi_major": 1 },
            },
        });
        for (field, value) in mock.as_object().unwrap() {
            manifest["provider"][field] = value.clone();
        }
        let manifest_file = folder.join(format!("sdrun-provider-{}.json", identity.id));
        fs::write(&manifest_file, manifest.to_string()).unwrap();
        let paths = Paths { data: dir.path().join("data"), cache: dir.path().join("cache") };
        let discovery = Discovery {
            provider_paths: [&[manifest_file], others].concat(),
            paths: Some(paths),
            order: order.iter().map(ToString::to_string).collect(),
            ..Discovery::default()
        };
        Lab { dir, registry: Registry::discover_with(&discovery).unwrap() }
    }

    pub(crate) fn provider(&self) -> Provider {
        self.registry.open("mock", &Isolation::default()).unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a model.
    pub(crate) fn write(&self, name: &str, model: &proto::ModelProto) {
        fs::write(self.path(name), model.encode_to_vec()).unwrap();
    }

    /// Writes a model and opens it.
    pub(crate) fn model(&self, name: &str, model: &proto::ModelProto) -> Model {
        self.write(name, model);
        Model::open(self.path(name)).unwrap()
    }

    pub(crate) fn cache(&self) -> Cache {
        Cache::at(self.path("cache/engines"))
    }
}

pub(crate) fn value(name: &str) -> proto::ValueInfoProto {
    let dimension = proto::Dimension { dim_value: Some(2), ..Default::default() };
    let tensor = proto::TensorTypeProto {
        elem_type: Some(DType::F32 as i32),
        shape: Some(proto::TensorShapeProto { dim: vec![dimension] }),
    };
    proto::ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(proto::TypeProto { tensor_type: Some(tensor), ..Default::default() }),
        ..Default::default()
    }
}

pub(crate) fn node(name: &str, op: &str, inputs: [&str; 2], output: &str) -> proto::NodeProto {
    proto::NodeProto {
        name: Some(name.into()),
        op_type: Some(op.into()),
        input: inputs.map(String::from).to_vec(),
        output: vec![output.into()],
        ..Default::default()
    }
}

pub(crate) fn weight(name: &str, values: [f32; 2]) -> proto::TensorProto {
    proto::TensorProto {
        name: Some(name.into()),
        data_type: Some(DType::F32 as i32),
        dims: vec![2],
        raw_data: Some(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into()),
        ..Default::default()
    }
}

/// `y = (x + a) + b`.
pub(crate) fn sum() -> proto::ModelProto {
    proto::ModelProto {
        ir_version: Some(8),
        opset_import: vec![proto::OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(proto::GraphProto {
            name: Some("sum".into()),
            node: vec![node("/one", "Add", ["x", "a"], "t"), node("/two", "Add", ["t", "b"], "y")],
            initializer: vec![weight("a", [1.0, 2.0]), weight("b", [3.0, 4.0])],
            input: vec![value("x")],
            output: vec![value("y")],
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub(crate) fn input(values: [f32; 2]) -> Tensors {
    Tensors::from([("x".into(), HostTensor::from_f32(vec![2], &values).unwrap())])
}

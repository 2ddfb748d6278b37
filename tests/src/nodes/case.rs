//! Finds a node test, reads its data and runs it.

use super::{Failure, Stage, compare, snapshot};
use prost::Message;
use sdrun::{
    BuildOptions, CachePolicy, HostTensor, Model, Provider, Tensors,
    graph::proto::{GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto},
};
use sdrun_abi::{DType, Device, NoHost};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// A folder with `model.onnx` and its data sets.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the folder.
    pub name: String,
    dir: PathBuf,
}

/// All tests in a folder, sorted by name.
pub fn find(dir: &Path) -> io::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.join("model.onnx").is_file()
            && let Some(name) = path.file_name().and_then(|n| n.to_str())
        {
            cases.push(Case { name: name.to_string(), dir: path });
        }
    }
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(cases)
}

impl Case {
    /// The model, and the names of its inputs and outputs, which must be tensors.
    fn decoded(&self) -> Result<(ModelProto, [Vec<String>; 2]), Failure> {
        let broken = |detail: String| Failure::new(Stage::Test, "broken", detail);
        let bytes = fs::read(self.model()).map_err(|e| broken(format!("cannot read model.onnx: {e}")))?;
        let model =
            ModelProto::decode(&*bytes).map_err(|e| broken(format!("cannot decode model.onnx: {e}")))?;
        let values = |of: fn(&GraphProto) -> &Vec<ValueInfoProto>| {
            model.graph.as_ref().map_or(&[][..], |graph| of(graph))
        };
        let sides = [("input", values(|graph| &graph.input)), ("output", values(|graph| &graph.output))];
        let [inputs, outputs] = sides.map(|(side, values)| {
            let name = |value: &ValueInfoProto| match not_a_tensor(value.r#type.as_ref()) {
                Some(kind) => {
                    let detail = format!("{side} of type {kind}: only tensors are supported");
                    Err(Failure::new(Stage::Test, "not-tensors", detail))
                }
                None => Ok(value.name().to_string()),
            };
            values.iter().map(name).collect::<Result<Vec<_>, _>>()
        });
        let names = [inputs?, outputs?];
        Ok((model, names))
    }

    /// The model and the inputs of the first data set, if all are tensors of types that sdrun knows.
    pub fn read(&self) -> Option<(ModelProto, Tensors)> {
        let (model, [inputs, _]) = self.decoded().ok()?;
        let inputs = tensors(&self.dir.join("test_data_set_0"), "input", &inputs).ok()?;
        Some((model, inputs))
    }

    fn model(&self) -> PathBuf {
        self.dir.join("model.onnx")
    }

    /// Builds and runs every data set on a provider and compares the outputs.
    pub(super) fn run(&self, provider: &Provider, device: &Device, baked: bool) -> Result<(), Failure> {
        let (_, [inputs, outputs]) = self.decoded()?;
        let model = Model::open(self.model()).map_err(|e| self.failure(Stage::Open, &e))?;
        let mut options = BuildOptions::new(device.clone());
        options.cache = CachePolicy::Off;
        options.threads = Some(1);
        for number in 0.. {
            let data = self.dir.join(format!("test_data_set_{number}"));
            if !data.is_dir() {
                return match number {
                    0 => Err(Failure::new(Stage::Test, "broken", "it has no data")),
                    _ => Ok(()),
                };
            }
            let given = tensors(&data, "input", &inputs)?;
            let expected = tensors(&data, "output", &outputs)?;
            options.shapes = given.iter().map(|(name, t)| (name.clone(), t.shape().to_vec())).collect();
            let outcome = self.run_set(provider, &options, baked, &model, &given, &expected);
            outcome.map_err(|failure| match &*failure.class {
                "outputs/wrong-values" if model.graph().is_random() => failure.kind("random"),
                _ => failure,
            })?;
        }
        Ok(())
    }

    fn run_set(
        &self,
        provider: &Provider,
        options: &BuildOptions,
        baked: bool,
        model: &Model,
        given: &Tensors,
        expected: &Tensors,
    ) -> Result<(), Failure> {
        let at = |stage: Stage| move |e: sdrun::Error| self.failure(stage, &e);
        let mut engine = provider.build(model, options, &NoHost).map_err(at(Stage::Build))?;
        if baked {
            engine = engine.bake(&model.weights(), &NoHost).map_err(at(Stage::Session))?;
            let folder = tempfile::tempdir().map_err(|e| Failure::new(Stage::Test, "io", e.to_string()))?;
            let file = folder.path().join("baked.engine");
            engine.save(&file).map_err(at(Stage::Session))?;
            engine = provider
                .load(&file, &options.device, options.threads, &NoHost)
                .map_err(at(Stage::Session))?;
        }
        let session = engine.session(&model.weights(), &NoHost).map_err(at(Stage::Session))?;
        // Some tests expect NaN or infinity.
        let mut session = session.allow_non_finite();
        let outputs = session.run(given, &NoHost).map_err(at(Stage::Run))?;
        for (name, want) in expected {
            let got = outputs.get(name).ok_or_else(|| {
                Failure::new(Stage::Outputs, "missing", format!("there is no output {name:?}"))
            })?;
            compare::same(got, want).map_err(|(what, detail)| {
                let reason = format!("{} in output {name:?}", what.replace('-', " "));
                Failure {
                    detail: format!("{reason}: {detail}"),
                    ..Failure::new(Stage::Outputs, what, reason)
                }
            })?;
        }
        Ok(())
    }

    /// The failure for an error. Its reason does not contain the test's folder.
    fn failure(&self, stage: Stage, error: &sdrun::Error) -> Failure {
        let mut failure = Failure::of(stage, error);
        let folder = format!("{}/", self.dir.display());
        failure.reason = snapshot::shorten(&failure.detail.replace(&folder, ""));
        failure
    }
}

/// The kind of a value that is not a tensor.
fn not_a_tensor(r#type: Option<&TypeProto>) -> Option<&'static str> {
    let r#type = r#type?;
    if r#type.sequence_type.is_some() {
        Some("sequence")
    } else if r#type.optional_type.is_some() {
        Some("optional")
    } else if r#type.map_type.is_some() {
        Some("map")
    } else if r#type.sparse_tensor_type.is_some() {
        Some("sparse tensor")
    } else {
        None
    }
}

/// The tensors `SIDE_0.pb`, `SIDE_1.pb`, … of a data set, under the names of the graph.
fn tensors(data: &Path, side: &str, names: &[String]) -> Result<Tensors, Failure> {
    let mut tensors = Tensors::new();
    for (index, name) in names.iter().enumerate() {
        let path = data.join(format!("{side}_{index}.pb"));
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            // Trailing optional inputs and outputs may be missing.
            Err(e) if e.kind() == io::ErrorKind::NotFound => break,
            Err(e) => {
                let detail = format!("cannot read {side}_{index}.pb: {e}");
                return Err(Failure::new(Stage::Test, "broken", detail));
            }
        };
        let tensor = read(&bytes)
            .map_err(|why| Failure::new(Stage::Test, "element-type", format!("{side} {name:?}: {why}")))?;
        tensors.insert(name.clone(), tensor);
    }
    Ok(tensors)
}

/// Reads a `TensorProto` whose elements are in `raw_data`, where numpy puts them, or in a typed field.
fn read(bytes: &[u8]) -> Result<HostTensor, String> {
    let proto = TensorProto::decode(bytes).map_err(|e| format!("cannot decode: {e}"))?;
    let code = proto.data_type.unwrap_or(0);
    let dtype =
        DType::from_onnx(code).ok_or_else(|| format!("elements of ONNX type {code} are not supported"))?;
    let shape: Vec<usize> = proto.dims.iter().map(|d| *d as usize).collect();
    let typed: Vec<u8>;
    let data: &[u8] = match &proto.raw_data {
        Some(raw) if !raw.is_empty() => raw,
        _ => {
            typed = match dtype {
                DType::F32 => proto.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
                DType::F64 => proto.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
                DType::I64 => proto.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
                DType::U32 | DType::U64 => proto
                    .uint64_data
                    .iter()
                    .flat_map(|v| v.to_le_bytes().into_iter().take(dtype.size()))
                    .collect(),
                // Narrow types are in the low bytes of an int32.
                _ => proto
                    .int32_data
                    .iter()
                    .flat_map(|v| v.to_le_bytes().into_iter().take(dtype.size()))
                    .collect(),
            };
            &typed
        }
    };
    HostTensor::from_bytes(dtype, shape, data).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_raw_and_typed_tensors() {
        let raw = TensorProto {
            dims: vec![2],
            data_type: Some(DType::I16 as i32),
            raw_data: Some(vec![1, 0, 255, 255].into()),
            ..Default::default()
        };
        let typed = TensorProto {
            dims: vec![2],
            data_type: Some(DType::I16 as i32),
            int32_data: vec![1, -1],
            ..Default::default()
        };
        for proto in [raw, typed] {
            let tensor = read(&proto.encode_to_vec()).unwrap();
            assert_eq!(
                (tensor.dtype(), tensor.shape(), tensor.bytes()),
                (DType::I16, &[2][..], &[1, 0, 255, 255][..])
            );
        }
        let string = TensorProto { data_type: Some(8), ..Default::default() };
        assert!(read(&string.encode_to_vec()).unwrap_err().contains("type 8"));
        let short =
            TensorProto { dims: vec![3], data_type: Some(1), float_data: vec![1.0], ..Default::default() };
        assert!(read(&short.encode_to_vec()).is_err());
    }

    #[test]
    fn finds_folders_with_a_model() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["test_b", "test_a", "other"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("test_a/model.onnx"), b"").unwrap();
        fs::write(dir.path().join("test_b/model.onnx"), b"").unwrap();
        let names: Vec<String> = find(dir.path()).unwrap().into_iter().map(|c| c.name).collect();
        assert_eq!(names, ["test_a", "test_b"]);
        assert!(find(&dir.path().join("missing")).is_err());
    }
}

use crate::behaviour::driver;
use prost::Message;
use sdrun_abi::{BuildSpec, DType, EngineInfo, Error, Result, TensorSpec, WeightSpec};
use sdrun_graph::proto::{ModelProto, TensorProto, ValueInfoProto};
use serde::{Deserialize, Serialize};

/// The description of an engine, which is also the payload of the engine file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<Tensor>,
    #[serde(default)]
    pub(crate) weights: Vec<Tensor>,
    #[serde(default = "one")]
    pub(crate) scale: f32,
    /// Sum of the weights, if they are baked in.
    #[serde(default)]
    pub(crate) baked: Option<f32>,
    /// The driver that it was built for.
    #[serde(default)]
    pub(crate) driver: String,
}

/// A named `f32` tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

/// The value of [`EngineInfo::compatibility`] of engines for this driver.
pub(crate) fn compatibility(driver: &str) -> String {
    if driver.is_empty() { "mock-1".into() } else { format!("mock-1, driver {driver}") }
}

fn one() -> f32 {
    1.0
}

const MAGIC: &[u8] = b"sdrun mock engine\n";
/// `TensorProto.DataLocation.EXTERNAL`.
const EXTERNAL: i32 = 1;

impl Description {
    pub(crate) fn of_model(model: &[u8], spec: &BuildSpec) -> Result<Self> {
        let mut description = if model.first() == Some(&b'{') {
            serde_json::from_slice(model)
                .map_err(|e| Error::invalid(format!("the description is not valid: {e}")))?
        } else {
            Self::of_onnx(model)?
        };
        description.driver = driver();
        for (key, value) in &spec.options {
            match (key.as_str(), value.parse()) {
                ("scale", Ok(scale)) => description.scale = scale,
                ("scale", Err(_)) => return Err(Error::invalid(format!("scale `{value}` is not a number"))),
                _ => return Err(Error::invalid(format!("the mock provider has no option `{key}`"))),
            }
        }
        if description.inputs.is_empty() {
            return Err(Error::unsupported("the mock provider needs an input"));
        }
        Ok(description)
    }

    fn of_onnx(model: &[u8]) -> Result<Self> {
        let model = ModelProto::decode(model)
            .map_err(|e| Error::invalid(format!("this is not an ONNX model: {e}")))?;
        let graph = model.graph.ok_or_else(|| Error::invalid("the ONNX model has no graph"))?;
        let is_initializer = |v: &&ValueInfoProto| graph.initializer.iter().any(|i| i.name == v.name);
        let weights = graph.initializer.iter().filter(|i| i.data_location == Some(EXTERNAL));
        Ok(Description {
            inputs: graph.input.iter().filter(|v| !is_initializer(v)).map(value).collect::<Result<_>>()?,
            outputs: graph.output.iter().map(value).collect::<Result<_>>()?,
            weights: weights.map(weight).collect::<Result<_>>()?,
            scale: 1.0,
            baked: None,
            driver: String::new(),
        })
    }

    pub(crate) fn info(&self) -> EngineInfo {
        let spec = |t: &Tensor| TensorSpec {
            name: t.name.clone(),
            dtype: DType::F32,
            shape: t.shape.iter().copied().map(Some).collect(),
        };
        let weight =
            |t: &Tensor| WeightSpec { name: t.name.clone(), dtype: DType::F32, shape: t.shape.clone() };
        EngineInfo {
            inputs: self.inputs.iter().map(spec).collect(),
            outputs: self.outputs.iter().map(spec).collect(),
            weights: if self.baked.is_some() {
                Vec::new()
            } else {
                self.weights.iter().map(weight).collect()
            },
            compatibility: compatibility(&self.driver),
        }
    }

    pub(crate) fn to_payload(&self) -> Result<Vec<u8>> {
        let json =
            serde_json::to_vec(self).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))?;
        Ok([MAGIC, &json].concat())
    }

    pub(crate) fn of_payload(payload: &[u8]) -> Result<Self> {
        let corrupt =
            |why: String| Error::new(sdrun_abi::ErrorCode::DataLoss, format!("the engine is corrupt: {why}"));
        let json = payload.strip_prefix(MAGIC).ok_or_else(|| corrupt("it has no magic".into()))?;
        serde_json::from_slice(json).map_err(|e| corrupt(e.to_string()))
    }
}

fn f32_only(name: &str, dtype: Option<i32>) -> Result<()> {
    match dtype.and_then(DType::from_onnx) {
        Some(DType::F32) => Ok(()),
        _ => Err(Error::unsupported(format!(
            "`{name}` is not f32, the only type that the mock provider supports"
        ))),
    }
}

fn size(name: &str, dim: Option<i64>) -> Result<usize> {
    dim.and_then(|d| usize::try_from(d).ok()).ok_or_else(|| {
        Error::unsupported(format!(
            "`{name}` has an open dimension, which the mock provider does not support"
        ))
    })
}

fn value(value: &ValueInfoProto) -> Result<Tensor> {
    let name = value.name.clone().unwrap_or_default();
    let tensor = value.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    f32_only(&name, tensor.and_then(|t| t.elem_type))?;
    let dims = tensor.and_then(|t| t.shape.as_ref()).map(|s| s.dim.as_slice()).unwrap_or_default();
    let shape = dims.iter().map(|d| size(&name, d.dim_value)).collect::<Result<_>>()?;
    Ok(Tensor { name, shape })
}

fn weight(tensor: &TensorProto) -> Result<Tensor> {
    let name = tensor.name.clone().unwrap_or_default();
    f32_only(&name, tensor.data_type)?;
    let shape = tensor.dims.iter().map(|d| size(&name, Some(*d))).collect::<Result<_>>()?;
    Ok(Tensor { name, shape })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_graph::proto::{Dimension, GraphProto, TensorShapeProto, TensorTypeProto, TypeProto};

    fn spec(options: &[(&str, &str)]) -> BuildSpec {
        let options = options.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        BuildSpec { options, ..BuildSpec::new("mock0", sdrun_abi::Precision::Fp32) }
    }

    fn named(name: &str, elem_type: i32, dims: &[Option<i64>]) -> ValueInfoProto {
        let dim = dims.iter().map(|d| Dimension { dim_value: *d, ..Dimension::default() }).collect();
        let tensor = TensorTypeProto { elem_type: Some(elem_type), shape: Some(TensorShapeProto { dim }) };
        let r#type = Some(TypeProto { tensor_type: Some(tensor), ..TypeProto::default() });
        ValueInfoProto { name: Some(name.into()), r#type, ..ValueInfoProto::default() }
    }

    fn onnx(input: ValueInfoProto) -> Vec<u8> {
        let initializer = |name: &str, data_location| TensorProto {
            name: Some(name.into()),
            dims: vec![2, 3],
            data_type: Some(1),
            data_location,
            ..TensorProto::default()
        };
        let graph = GraphProto {
            // Before IR version 4 initializers were inputs too.
            input: vec![input, named("w", 1, &[Some(2), Some(3)])],
            output: vec![named("y", 1, &[Some(4)])],
            initializer: vec![initializer("w", Some(EXTERNAL)), initializer("constant", None)],
            ..GraphProto::default()
        };
        ModelProto { graph: Some(graph), ..ModelProto::default() }.encode_to_vec()
    }

    #[test]
    fn reads_onnx() {
        let model = onnx(named("x", 1, &[Some(1), Some(5)]));
        let info = Description::of_model(&model, &spec(&[])).unwrap().info();
        assert_eq!(info.inputs.len(), 1);
        assert_eq!((info.inputs[0].name.as_str(), &*info.inputs[0].shape), ("x", &[Some(1), Some(5)][..]));
        assert_eq!(info.outputs[0].shape, [Some(4)]);
        assert_eq!(info.weights.len(), 1, "inline tensors are not weights");
        assert_eq!((info.weights[0].name.as_str(), &*info.weights[0].shape), ("w", &[2, 3][..]));
    }

    #[test]
    fn refuses_unsupported_models_and_options() {
        let error = |model: &[u8], options: &[(&str, &str)]| {
            Description::of_model(model, &spec(options)).unwrap_err().message
        };
        let good = onnx(named("x", 1, &[Some(5)]));
        assert!(error(&onnx(named("x", 1, &[None])), &[]).contains("open dimension"));
        assert!(error(&onnx(named("x", 7, &[Some(1)])), &[]).contains("not f32"));
        assert!(error(b"\xff\xff", &[]).contains("not an ONNX model"));
        assert!(error(&good, &[("speed", "1")]).contains("no option `speed`"));
        assert!(error(&good, &[("scale", "big")]).contains("not a number"));
    }

    #[test]
    fn payloads_survive_a_round_trip() {
        let made =
            Description::of_model(&onnx(named("x", 1, &[Some(5)])), &spec(&[("scale", "2.5")])).unwrap();
        let payload = made.to_payload().unwrap();
        let read = Description::of_payload(&payload).unwrap();
        assert_eq!((read.scale, read.info()), (2.5, made.info()));
        assert!(Description::of_payload(&payload[..payload.len() - 1]).is_err());
        assert!(Description::of_payload(&payload[1..]).is_err());
    }
}

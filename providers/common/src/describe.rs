use bytes::Bytes;
use sdrun_abi::{EngineInfo, Error, Result, TensorSpec, WeightSpec};
use sdrun_graph::{
    Dim, ExternalBase, Graph, GraphError, Initializer, Tensor, ValueId, WeightData, WeightRef,
};

/// Reads the model that a host passes to [`Provider::build`](sdrun_abi::Provider::build). Every external
/// tensor is a weight, with any text as its location. Every inline tensor is part of the graph.
pub fn read_graph(model: &Bytes) -> Result<Graph> {
    let mut graph =
        Graph::from_bytes(model.clone(), "the model", ExternalBase::Stripped).map_err(graph_error)?;
    for initializer in graph.initializers.values_mut() {
        if let Initializer::Weight(WeightRef { dtype, shape, data: WeightData::Inline(data) }) = initializer {
            let tensor = Tensor::new(*dtype, shape.clone(), data.clone()).map_err(graph_error)?;
            *initializer = Initializer::Constant(tensor);
        }
    }
    Ok(graph)
}

/// Converts a graph error to an error of the ABI.
pub fn graph_error(error: GraphError) -> Error {
    match error {
        GraphError::Unsupported { .. } | GraphError::UnsupportedModel { .. } => {
            Error::unsupported(error.to_string())
        }
        _ => Error::invalid(error.to_string()),
    }
}

/// Inputs, outputs and weights of a graph. `InvalidArgument` if the type or the rank of an input or output is
/// unknown even after shape inference.
pub fn describe(graph: &Graph, compatibility: String) -> Result<EngineInfo> {
    let specs = |what: &str, ids: &[ValueId]| -> Result<Vec<TensorSpec>> {
        ids.iter()
            .map(|id| {
                let value = graph.value(*id);
                let name = value.name.clone();
                match (value.dtype, &value.shape) {
                    (Some(dtype), Some(shape)) => {
                        Ok(TensorSpec { name, dtype, shape: shape.iter().map(Dim::known).collect() })
                    }
                    (None, _) => {
                        Err(Error::invalid(format!("the element type of {what} `{name}` is not known")))
                    }
                    (_, None) => Err(Error::invalid(format!("the rank of {what} `{name}` is not known"))),
                }
            })
            .collect()
    };
    Ok(EngineInfo {
        inputs: specs("input", &graph.inputs)?,
        outputs: specs("output", &graph.outputs)?,
        weights: graph
            .weights()
            .map(|(name, w)| WeightSpec { name: name.to_string(), dtype: w.dtype, shape: w.shape.clone() })
            .collect(),
        compatibility,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::DType;
    use sdrun_graph::Value;

    #[test]
    fn a_graph_is_described() {
        let mut graph = Graph::default();
        let value = |name: &str, dtype, shape| Value { name: name.into(), dtype, shape };
        let x = graph.add_value(value(
            "x",
            Some(DType::F32),
            Some(vec![Dim::Known(2), Dim::Symbol("n".into()), Dim::Unknown]),
        ));
        let y = graph.add_value(value("y", Some(DType::I64), Some(vec![])));
        let w = graph.add_value(value("w", Some(DType::F16), Some(vec![Dim::Known(4)])));
        let data = WeightData::Absent { location: "w".into(), offset: 0 };
        let weight = WeightRef { dtype: DType::F16, shape: vec![4], data };
        graph.initializers.insert(w, Initializer::Weight(weight));
        graph.inputs.push(x);
        graph.outputs.push(y);
        let info = describe(&graph, "c".into()).unwrap();
        assert_eq!(info.inputs[0].shape, [Some(2), None, None]);
        assert_eq!((info.outputs[0].dtype, info.outputs[0].shape.len()), (DType::I64, 0));
        assert_eq!((info.weights[0].name.as_str(), info.weights[0].dtype), ("w", DType::F16));

        graph.value_mut(y).shape = None;
        assert!(describe(&graph, String::new()).unwrap_err().message.contains("rank of output `y`"));
        graph.value_mut(x).dtype = None;
        assert!(describe(&graph, String::new()).unwrap_err().message.contains("type of input `x`"));
    }
}

//! `convert_precision MODEL.onnx fp16|bf16|fp32 OUT.onnx`: converts a model and its weights to another precision.

use sdrun_abi::{DType, Precision};
use sdrun_graph::{
    Graph, GraphError, OpenDims, OpenOptions, Placement, Tensor, WeightData, passes::convert_precision,
    simplify,
};
use std::{collections::BTreeMap, error::Error, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, precision, out] = &arguments[..] else {
        return Err("usage: convert_precision MODEL.onnx fp16|bf16|fp32 OUT.onnx".into());
    };
    let to = precision
        .parse::<Precision>()?
        .float_type()
        .ok_or("this example does not quantize; choose fp16, bf16 or fp32")?;
    let mut graph = Graph::open(Path::new(model), &OpenOptions::default())?;
    simplify(&mut graph, &BTreeMap::new(), OpenDims::Allow)?;
    let stored: BTreeMap<String, (DType, WeightData)> =
        graph.weights().map(|(name, w)| (name.to_string(), (w.dtype, w.data.clone()))).collect();
    let report = convert_precision(&mut graph, to);
    let bytes = graph.to_onnx(|name, weight| {
        let missing = || GraphError::Invalid(format!("weight {name} has no values"));
        let (dtype, data) = stored.get(name).cloned().ok_or_else(missing)?;
        let source = sdrun_graph::WeightRef { dtype, data, shape: weight.shape.clone() };
        let tensor = Tensor::new(dtype, weight.shape.clone(), source.read(name)?)?;
        Ok(Placement::Inline(tensor.to_float_type(weight.dtype).ok_or_else(missing)?.data().clone()))
    })?;
    std::fs::write(out, bytes)?;
    println!("{report:?}");
    Ok(())
}

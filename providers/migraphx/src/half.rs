//! Converts graphs to half precision. MIGraphX's own `quantize_fp16` needs the values of weights, and it also
//! converts norms and softmax.

use bytes::Bytes;
use sdrun_abi::{DType, Error, Result, Weight, WeightSource, WeightSpec};
use sdrun_graph::{infer::infer_shapes, passes::convert_precision};
use sdrun_provider_common::{converted, describe, graph_error, read_graph, weight};
use std::collections::BTreeMap;

/// A model in half precision, with its weights. Inputs and outputs keep their types.
pub(crate) struct Half<'a> {
    pub(crate) model: Bytes,
    source: &'a dyn WeightSource,
    /// The host's weights, with the types they are converted to.
    weights: BTreeMap<String, (WeightSpec, DType)>,
}

impl<'a> Half<'a> {
    /// Converts a model. `source` delivers the weights in the types that the model states.
    pub(crate) fn of(model: &Bytes, source: &'a dyn WeightSource) -> Result<Self> {
        let mut graph = read_graph(model)?;
        let given = describe(&graph, String::new())?.weights;
        infer_shapes(&mut graph).map_err(graph_error)?;
        convert_precision(&mut graph, DType::F16);
        let now: BTreeMap<&str, DType> = graph.weights().map(|(name, w)| (name, w.dtype)).collect();
        let weights = given.into_iter().filter_map(|spec| {
            let dtype = *now.get(spec.name.as_str())?;
            Some((spec.name.clone(), (spec, dtype)))
        });
        let weights = weights.collect();
        Ok(Half { model: graph.to_onnx_stripped().map_err(graph_error)?.into(), source, weights })
    }
}

impl WeightSource for Half<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let (spec, dtype) = self
            .weights
            .get(name)
            .ok_or_else(|| Error::not_found(format!("the model has no weight `{name}`")))?;
        converted(weight(self.source, spec)?, name, *dtype)
    }
}

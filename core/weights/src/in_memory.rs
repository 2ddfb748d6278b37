use sdrun_abi::{DType, Error, Result, Weight, WeightSource};
use sdrun_graph::Tensor;
use std::collections::BTreeMap;

/// Tensors in memory, by name.
#[derive(Clone, Debug, Default)]
pub struct InMemoryWeights(pub BTreeMap<String, Tensor>);

impl InMemoryWeights {
    fn find(&self, name: &str) -> Result<&Tensor> {
        self.0.get(name).ok_or_else(|| Error::not_found(format!("there is no tensor {name:?}")))
    }
}

impl FromIterator<(String, Tensor)> for InMemoryWeights {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(tensors: I) -> Self {
        InMemoryWeights(tensors.into_iter().collect())
    }
}

impl WeightSource for InMemoryWeights {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let tensor = self.find(name)?;
        Weight::new(tensor.dtype(), tensor.shape().to_vec(), &tensor.data()[..])
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let tensor = self.find(name)?;
        Ok((tensor.dtype(), tensor.shape().to_vec()))
    }
}

use sdrun_abi::{DType, Error, ErrorCode, Result, Weight, WeightSource};
use sdrun_graph::Tensor;
use std::collections::BTreeMap;

/// Tensors in memory, by name.
#[derive(Clone, Debug, Default)]
pub struct MapSource(pub BTreeMap<String, Tensor>);

impl MapSource {
    fn find(&self, name: &str) -> Result<&Tensor> {
        self.0.get(name).ok_or_else(|| Error::not_found(format!("there is no tensor {name:?}")))
    }
}

impl FromIterator<(String, Tensor)> for MapSource {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(tensors: I) -> Self {
        MapSource(tensors.into_iter().collect())
    }
}

impl WeightSource for MapSource {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let tensor = self.find(name)?;
        Weight::new(tensor.dtype(), tensor.shape().to_vec(), &tensor.data()[..])
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let tensor = self.find(name)?;
        Ok((tensor.dtype(), tensor.shape().to_vec()))
    }
}

/// Several sources as one: a weight comes from the first that has it. An error other than `NotFound` of a
/// source in front is passed on, never covered by one behind it.
#[derive(Clone)]
pub struct Layered<'a>(Vec<&'a dyn WeightSource>);

impl<'a> Layered<'a> {
    /// Layers, the one that wins first.
    pub fn new(sources: impl IntoIterator<Item = &'a dyn WeightSource>) -> Self {
        Layered(sources.into_iter().collect())
    }

    /// The answer of the first source that has `name`. Where none has it: the error of the last, which is the
    /// most basic one and knows best what is missing.
    fn first<'s, T>(&'s self, name: &str, ask: impl Fn(&'s dyn WeightSource) -> Result<T>) -> Result<T> {
        let mut missing = Error::not_found(format!("no source has weight {name:?}"));
        for source in &self.0 {
            match ask(*source) {
                Err(error) if error.code == ErrorCode::NotFound => missing = error,
                answer => return answer,
            }
        }
        Err(missing)
    }
}

impl WeightSource for Layered<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        self.first(name, |source| source.get(name))
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        self.first(name, |source| source.describe(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(names: &[&str], value: u8) -> MapSource {
        names
            .iter()
            .map(|name| (name.to_string(), Tensor::from_elements(vec![1], &[value]).unwrap()))
            .collect()
    }

    /// Knows every name and can deliver none.
    struct Broken;
    impl WeightSource for Broken {
        fn get(&self, _: &str) -> Result<Weight<'_>> {
            Err(Error::new(ErrorCode::DataLoss, "broken"))
        }
    }

    #[test]
    fn the_first_source_that_has_it_wins() {
        let (front, back) = (source(&["a", "b"], 1), source(&["b", "c"], 2));
        let layers = Layered::new([&front as &dyn WeightSource, &back]);
        for (name, value) in [("a", 1), ("b", 1), ("c", 2)] {
            assert_eq!(layers.get(name).unwrap().data(), [value], "{name}");
        }
        assert_eq!(layers.describe("c").unwrap(), (DType::U8, vec![1]));
        for error in [layers.get("d").unwrap_err(), Layered::new([]).get("d").unwrap_err()] {
            assert_eq!(error.code, ErrorCode::NotFound);
            assert!(error.message.contains("\"d\""), "{error}");
        }
    }

    #[test]
    fn an_error_in_front_is_not_covered() {
        let (front, back) = (source(&["a"], 1), source(&["b"], 2));
        let layers = Layered::new([&front as &dyn WeightSource, &Broken, &back]);
        assert!(layers.get("a").is_ok());
        assert_eq!(layers.get("b").unwrap_err().code, ErrorCode::DataLoss);
        assert_eq!(layers.describe("b").unwrap_err().code, ErrorCode::DataLoss);
    }
}

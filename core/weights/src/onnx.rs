use sdrun_abi::{DType, Error, ErrorCode, Result, Weight, WeightSource};
use sdrun_files::{Links, Map};
use sdrun_graph::{Graph, WeightData, WeightRef};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The weights stored with an ONNX model: inline, or in external data files that are mapped on first use. Nothing is copied.
pub struct OnnxWeights {
    weights: HashMap<String, WeightRef>,
    files: HashMap<PathBuf, OnceLock<Result<Map>>>,
}

impl OnnxWeights {
    /// The weights of `graph`, by initializer name. Opens no file.
    pub fn new(graph: &Graph) -> Self {
        let weights: HashMap<_, _> =
            graph.weights().map(|(name, weight)| (name.to_owned(), weight.clone())).collect();
        let files = weights
            .values()
            .filter_map(|weight| match &weight.data {
                WeightData::External { file, .. } => Some((file.to_path_buf(), OnceLock::new())),
                _ => None,
            })
            .collect();
        OnnxWeights { weights, files }
    }

    fn find(&self, name: &str) -> Result<&WeightRef> {
        self.weights.get(name).ok_or_else(|| Error::not_found(format!("the model has no weight {name:?}")))
    }

    fn mapping(&self, file: &Path) -> Result<&Map> {
        let mapping =
            self.files.get(file).ok_or_else(|| Error::internal("external data file is not known"))?;
        mapping.get_or_init(|| Map::open(file, Links::Follow)).as_ref().map_err(Clone::clone)
    }
}

/// The graph has the weight, but the model came without its values.
fn absent(name: &str, location: &str) -> Error {
    Error::not_found(format!("the model has no values for weight {name:?}: its file {location:?} is absent"))
        .with_hint("give a checkpoint that has them, or put the file beside the model")
}

impl WeightSource for OnnxWeights {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let WeightRef { dtype, shape, data } = self.find(name)?;
        match data {
            WeightData::Inline(bytes) => Weight::new(*dtype, shape.clone(), &bytes[..]),
            WeightData::External { file, offset } => {
                let mapping = self.mapping(file)?;
                // Checked when the model was opened; the file may have changed since.
                let data = dtype
                    .bytes_of(shape)
                    .zip(usize::try_from(*offset).ok())
                    .and_then(|(length, start)| mapping.part(start..start.checked_add(length)?));
                let data = data.ok_or_else(|| {
                    let size = mapping.len();
                    let message = format!(
                        "weight {name:?} ({dtype} {shape:?} at byte {offset}) ends past the {size} bytes of {}",
                        file.display()
                    );
                    Error::new(ErrorCode::DataLoss, message)
                        .with_file(&**file)
                        .with_hint("the file is truncated: copy or download it again")
                })?;
                Ok(Weight::new(*dtype, shape.clone(), data)?.in_file(file.to_path_buf(), *offset))
            }
            WeightData::Absent { location, .. } => Err(absent(name, location)),
        }
    }

    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let weight = self.find(name)?;
        match &weight.data {
            WeightData::Absent { location, .. } => Err(absent(name, location)),
            _ => Ok((weight.dtype, weight.shape.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use sdrun_graph::{Initializer, Value};
    use std::sync::Arc;

    fn graph(weights: Vec<(&str, Vec<usize>, WeightData)>) -> Graph {
        let mut graph = Graph::default();
        for (name, shape, data) in weights {
            let id = graph.add_value(Value { name: name.into(), dtype: Some(DType::F16), shape: None });
            graph.initializers.insert(id, Initializer::Weight(WeightRef { dtype: DType::F16, shape, data }));
        }
        graph
    }
    fn external(file: &Path, offset: u64) -> WeightData {
        WeightData::External { file: Arc::new(file.to_path_buf()), offset }
    }

    #[test]
    fn inline_and_external_are_delivered_without_a_copy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.weights");
        std::fs::write(&file, (0..64).collect::<Vec<u8>>()).unwrap();
        let inline = Bytes::from(vec![7; 4]);
        let graph = graph(vec![
            ("in", vec![2], WeightData::Inline(inline.clone())),
            ("first", vec![2, 3], external(&file, 0)),
            ("last", vec![2], external(&file, 60)),
        ]);
        let source = OnnxWeights::new(&graph);
        assert_eq!(source.get("in").unwrap().data().as_ptr(), inline.as_ptr());
        let (first, last) = (source.get("first").unwrap(), source.get("last").unwrap());
        assert_eq!((first.data(), &*first.shape), (&(0..12).collect::<Vec<u8>>()[..], &[2, 3][..]));
        assert_eq!(first.data().as_ptr().wrapping_add(60), last.data().as_ptr());
        assert_eq!(last.file, Some((file, 60)));
        assert_eq!(source.describe("last").unwrap(), (DType::F16, vec![2]));
    }

    #[test]
    fn what_is_not_there_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.weights");
        std::fs::write(&file, [0; 10]).unwrap();
        let gone = folder.path().join("gone");
        let graph = graph(vec![
            ("short", vec![6], external(&file, 0)),
            ("far", vec![1], external(&file, u64::MAX - 1)),
            ("gone", vec![1], external(&gone, 0)),
            ("none", vec![1], WeightData::Absent { location: "w.bin".into(), offset: 0 }),
        ]);
        let source = OnnxWeights::new(&graph);
        for (name, code, words) in [
            ("short", ErrorCode::DataLoss, "ends past the 10 bytes"),
            ("far", ErrorCode::DataLoss, "ends past the 10 bytes"),
            ("gone", ErrorCode::NotFound, "gone"),
            ("none", ErrorCode::NotFound, "\"w.bin\" is absent"),
            ("other", ErrorCode::NotFound, "no weight \"other\""),
        ] {
            let error = source.get(name).unwrap_err();
            assert_eq!(error.code, code, "{error}");
            assert!(error.message.contains(words), "{error}");
        }
        assert!(source.describe("none").unwrap_err().hint.unwrap().to_string().contains("checkpoint"));
    }
}

use crate::graph_error;
use bytes::Bytes;
use sdrun_abi::{
    DType, EngineInfo, Error, ErrorCode, RefitReport, Result, Weight, WeightSource, WeightSpec, WeightUpdate,
};
use sdrun_graph::Tensor;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// The weight that `spec` describes. `NotFound` if the source has none of that name; `InvalidArgument` if its type or
/// shape differs.
pub fn weight<'a>(source: &'a dyn WeightSource, spec: &WeightSpec) -> Result<Weight<'a>> {
    let weight = source.get(&spec.name)?;
    if weight.dtype != spec.dtype || weight.shape != spec.shape {
        return Err(Error::invalid(format!(
            "weight `{}` must be {} {:?}, but its source delivers {} {:?}",
            spec.name, spec.dtype, spec.shape, weight.dtype, weight.shape
        )));
    }
    Ok(weight)
}

/// A weight in the floating-point type that the graph was converted to; unchanged if it already has that type.
pub fn converted<'a>(weight: Weight<'a>, name: &str, dtype: DType) -> Result<Weight<'a>> {
    if weight.dtype == dtype {
        return Ok(weight);
    }
    let data = Bytes::copy_from_slice(weight.data());
    let tensor = Tensor::new(weight.dtype, weight.shape, data).map_err(graph_error)?.to_float_type(dtype);
    let tensor = tensor.ok_or_else(|| Error::internal(format!("weight `{name}` cannot become {dtype}")))?;
    Weight::new(dtype, tensor.shape().to_vec(), tensor.data().clone())
}

/// The report of a refit that created the session again, with all weights of the engine.
pub fn rebuilt(info: &EngineInfo) -> RefitReport {
    let bytes = info.weights.iter().filter_map(|w| w.dtype.bytes_of(&w.shape)).map(|n| n as u64).sum();
    RefitReport::new(WeightUpdate::Rebuild, info.weights.len(), bytes)
}

/// The files that hold weights, for runtimes that read weights from files. Each file is checked once.
#[derive(Debug, Default)]
pub struct WeightFiles(HashMap<PathBuf, Option<(PathBuf, u64)>>);

impl WeightFiles {
    /// The path without links and the offset of a weight that is stored unchanged in a regular file; `None` if it must be
    /// read from memory. `DataLoss` if the file ends before the weight does: vendors map files, so the process would
    /// crash.
    pub fn place<'s>(&'s mut self, name: &str, weight: &Weight<'_>) -> Result<Option<(&'s Path, u64)>> {
        let Some((path, offset)) = &weight.file else { return Ok(None) };
        if !self.0.contains_key(path) {
            self.0.insert(path.clone(), regular_file(path));
        }
        let Some(Some((real, length))) = self.0.get(path) else { return Ok(None) };
        let bytes = weight.dtype.bytes_of(&weight.shape).unwrap_or(usize::MAX) as u64;
        if offset.checked_add(bytes).is_none_or(|end| end > *length) {
            return Err(Error::new(
                ErrorCode::DataLoss,
                format!(
                    "weight `{name}` should be the {bytes} bytes at {offset} of {}, which has only {length}",
                    path.display()
                ),
            )
            .with_file(path)
            .with_hint("the file was changed or truncated since it was opened; fetch it again"));
        }
        Ok(Some((real, *offset)))
    }
}

fn regular_file(path: &Path) -> Option<(PathBuf, u64)> {
    let real = dunce::canonicalize(path).ok()?;
    let metadata = real.metadata().ok().filter(|m| m.is_file())?;
    Some((real, metadata.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::DType;

    struct One(Vec<f32>);

    impl WeightSource for One {
        fn get(&self, name: &str) -> Result<Weight<'_>> {
            if name != "w" {
                return Err(Error::not_found(format!("no weight `{name}`")));
            }
            let bytes: Vec<u8> = self.0.iter().flat_map(|v| v.to_le_bytes()).collect();
            Weight::new(DType::F32, vec![self.0.len()], bytes)
        }
    }

    #[test]
    fn weights_are_checked() {
        let source = One(vec![1.0, 2.0, 3.0]);
        let spec =
            |name: &str, dtype, shape: &[usize]| WeightSpec { name: name.into(), dtype, shape: shape.into() };
        assert_eq!(weight(&source, &spec("w", DType::F32, &[3])).unwrap().data().len(), 12);
        assert_eq!(weight(&source, &spec("v", DType::F32, &[3])).unwrap_err().code, ErrorCode::NotFound);
        for spec in [spec("w", DType::F16, &[3]), spec("w", DType::F32, &[4]), spec("w", DType::F32, &[3, 1])]
        {
            let error = weight(&source, &spec).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert!(error.message.contains("`w`") && error.message.contains("f32 [3]"), "{error}");
        }
    }

    #[test]
    fn files_are_checked_for_their_length() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.bin");
        std::fs::write(&file, [0u8; 20]).unwrap();
        let mut files = WeightFiles::default();
        let weight = |path: &Path, offset| {
            Weight::new(DType::F32, vec![3], vec![0u8; 12]).unwrap().in_file(path.to_path_buf(), offset)
        };
        let real = dunce::canonicalize(&file).unwrap();
        assert_eq!(files.place("w", &weight(&file, 8)).unwrap(), Some((&*real, 8)));
        for offset in [9, 20, u64::MAX] {
            let error = files.place("w", &weight(&file, offset)).unwrap_err();
            assert_eq!(error.code, ErrorCode::DataLoss);
            assert!(error.message.contains("`w`") && error.message.contains("only 20"), "{error}");
        }
        assert_eq!(files.place("w", &weight(&dir.path().join("gone"), 0)).unwrap(), None);
        assert_eq!(files.place("w", &weight(dir.path(), 0)).unwrap(), None);
        let memory = Weight::new(DType::F32, vec![3], vec![0u8; 12]).unwrap();
        assert_eq!(files.place("w", &memory).unwrap(), None);
    }
}

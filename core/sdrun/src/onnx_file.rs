//! ONNX files with weights, for other programs.

use crate::{Error, Result};
use sdrun_abi::{Error as AbiError, WeightSource, WeightSpec};
use sdrun_graph::{Graph, Placement};
use sdrun_weights::Cast;
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

/// ONNX Runtime and others map external data, which pages limit.
const ALIGNMENT: u64 = 4096;

/// Writes a graph to `file` and its weights to a file beside it, `FILE.data`, so that the whole may exceed 2 GB.
///
/// # Errors
/// Weights that `weights` lacks or that do not fit, and what the system says about the files.
pub fn write(graph: &Graph, weights: &dyn WeightSource, file: &Path) -> Result<()> {
    let name = format!("{}.data", file.file_name().unwrap_or_default().to_string_lossy());
    let data = file.with_file_name(&name);
    let specs: Vec<WeightSpec> = graph
        .weights()
        .map(|(name, weight)| WeightSpec {
            name: name.to_string(),
            dtype: weight.dtype,
            shape: weight.shape.clone(),
        })
        .collect();
    let cast = Cast::new(weights, &specs);
    let io = |e: std::io::Error| Error::io("write", &data, &e);
    let mut out = BufWriter::new(File::create(&data).map_err(io)?);
    let mut places = std::collections::HashMap::new();
    let mut end = 0u64;
    for spec in &specs {
        let weight = cast.get(&spec.name)?;
        let start = end.next_multiple_of(ALIGNMENT);
        out.write_all(&vec![0; (start - end) as usize])
            .and_then(|()| out.write_all(weight.data()))
            .map_err(io)?;
        end = start + weight.data().len() as u64;
        places.insert(spec.name.clone(), (start, weight.data().len() as u64));
    }
    out.flush().map_err(io)?;
    let bytes = graph.to_onnx(|weight, _| {
        let (offset, length) = places
            .get(weight)
            .copied()
            .ok_or_else(|| AbiError::internal(format!("weight {weight:?} has no place")))?;
        Ok(Placement::External { location: name.clone(), offset, length })
    })?;
    std::fs::write(file, bytes).map_err(|e| Error::io("write", file, &e))
}

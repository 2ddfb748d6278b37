//! ONNX files with weights, for other programs.

use crate::Result;
use sdrun_abi::{Error as AbiError, WeightSource, WeightSpec};
use sdrun_files::Existing;
use sdrun_graph::{Graph, Placement};
use sdrun_weights::Cast;
use std::{collections::HashMap, io, path::Path};

/// ONNX Runtime and others map external data, which pages limit.
const ALIGNMENT: u64 = 4096;

/// Writes a graph to `file` and its weights to a file beside it, `FILE.data`, so that the whole may exceed 2 GB. Each file is written
/// completely or not at all, as [`sdrun_files::write()`] does.
///
/// # Errors
/// Weights that `weights` lacks or that do not fit, and errors of writing the files.
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
    let mut places = HashMap::new();
    let mut unread = None;
    let written = sdrun_files::write(&data, Existing::OfUser, |out| {
        let mut end = 0u64;
        for spec in &specs {
            let weight = cast.get(&spec.name).map_err(|error| {
                unread = Some(error);
                io::Error::other("a weight cannot be read")
            })?;
            let start = end.next_multiple_of(ALIGNMENT);
            out.write_all(&vec![0; (start - end) as usize])?;
            out.write_all(weight.data())?;
            end = start + weight.data().len() as u64;
            places.insert(spec.name.clone(), (start, weight.data().len() as u64));
        }
        Ok(())
    });
    if let Some(error) = unread {
        return Err(error.into());
    }
    written?;
    let bytes = graph.to_onnx(|weight, _| {
        let (offset, length) = places
            .get(weight)
            .copied()
            .ok_or_else(|| AbiError::internal(format!("weight {weight:?} has no place")))?;
        Ok(Placement::External { location: name.clone(), offset, length })
    })?;
    Ok(sdrun_files::write(file, Existing::OfUser, |out| out.write_all(&bytes))?)
}

//! Creates checkpoints from the recorded key tables and the synthetic weight rule alone, so that the correct value of
//! every tensor is known.

use super::tables::Entry;
use sdrun_abi::DType;
use sdrun_weights::{Checkpoint, Component, StateDict, checkpoint::Summary, keys::Fusion, synthetic};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// A tensor to write to a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Made {
    pub(crate) name: String,
    /// The type's name in safetensors.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

impl Made {
    pub(crate) fn new(name: &str, dtype: &str, shape: &[usize], data: Vec<u8>) -> Made {
        Made { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), data }
    }
    pub(crate) fn renamed(mut self, name: impl Fn(&str) -> String) -> Made {
        self.name = name(&self.name);
        self
    }
}

/// Writes a safetensors file.
pub(crate) fn write_safetensors(path: &Path, metadata: &[(&str, &str)], tensors: &[Made]) {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert(
            "__metadata__".into(),
            metadata
                .iter()
                .copied()
                .collect::<BTreeMap<_, _>>()
                .into_iter()
                .map(|(k, v)| (k.to_string(), json!(v)))
                .collect(),
        );
    }
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.data.len();
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]});
        assert!(header.insert(tensor.name.clone(), entry).is_none(), "{} twice", tensor.name);
        start = end;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    for tensor in tensors {
        bytes.extend_from_slice(&tensor.data);
    }
    fs::write(path, bytes).unwrap();
}

fn code(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        other => panic!("{other}"),
    }
}

/// The component's tensors under diffusers' names.
pub(crate) fn diffusers(entry: &Entry, dtype: DType) -> Vec<Made> {
    let named =
        entry.pairs.iter().zip(&entry.shapes).flat_map(|(pair, shapes)| pair.diffusers.iter().zip(shapes));
    named
        .map(|(name, shape)| {
            let shape: Vec<usize> = shape.iter().map(|d| (d / entry.divisor).max(1)).collect();
            let mut data = vec![0; dtype.bytes_of(&shape).unwrap()];
            synthetic::fill(&entry.tag, name, &shape, dtype, &mut data).unwrap();
            Made::new(name, code(dtype), &shape, data)
        })
        .collect()
}

/// The component's tensors under the original keys.
pub(crate) fn original(entry: &Entry, prefix: &str, dtype: DType) -> Vec<Made> {
    let parts: BTreeMap<String, Made> =
        diffusers(entry, dtype).into_iter().map(|made| (made.name.clone(), made)).collect();
    let size = dtype.size();
    entry
        .pairs
        .iter()
        .map(|pair| {
            let first = &parts[&pair.diffusers[0]];
            let (mut shape, mut data) = (first.shape.clone(), first.data.clone());
            match pair.fusion {
                Fusion::Same => {}
                Fusion::Conv1x1 => shape.extend([1, 1]),
                Fusion::Transposed => {
                    let (rows, columns) = (shape[0], shape[1]);
                    for row in 0..rows {
                        for column in 0..columns {
                            let (from, to) = ((row * columns + column) * size, (column * rows + row) * size);
                            data[to..to + size].copy_from_slice(&first.data[from..from + size]);
                        }
                    }
                    shape.reverse();
                }
                Fusion::Rows => {
                    for other in &pair.diffusers[1..] {
                        shape[0] += parts[other].shape[0];
                        data.extend_from_slice(&parts[other].data);
                    }
                }
                Fusion::SwappedHalves => {
                    let half = data.len() / 2;
                    data.rotate_left(half);
                }
            }
            Made::new(&format!("{prefix}{}", pair.original), code(dtype), &shape, data)
        })
        .collect()
}

/// Checks that the state dict has every tensor of the table, and that every tensor matches the rule.
pub(crate) fn check(state: &dyn StateDict, entry: &Entry, dtype: DType) {
    let mut expected = diffusers(entry, dtype);
    expected.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<&str> = expected.iter().map(|made| &*made.name).collect();
    assert_eq!(state.names(), names, "{}", entry.name);
    for made in &expected {
        let (name, at) = (&*made.name, &entry.name);
        assert_eq!(state.describe(name).unwrap(), (dtype, made.shape.clone()), "{at} {name}");
        let weight = state.get(name).unwrap_or_else(|error| panic!("{at} {name}: {error}"));
        assert_eq!((weight.dtype, &weight.shape), (dtype, &made.shape), "{at} {name}");
        assert!(weight.data() == made.data, "{at} {name} has other values");
        if let Some((path, offset)) = &weight.file {
            let file = fs::read(path).unwrap();
            let there = &file[*offset as usize..][..made.data.len()];
            assert!(there == made.data, "{at} {name} does not lie at {offset}");
        }
    }
}

/// Counts the tensors that are delivered without a copy.
pub(crate) fn borrowed(state: &dyn StateDict) -> usize {
    state.names().into_iter().filter(|name| state.get(name).unwrap().file.is_some()).count()
}

/// Writes a file into its own folder.
pub(crate) fn file(name: &str, metadata: &[(&str, &str)], tensors: &[Made]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    write_safetensors(&path, metadata, tensors);
    (folder, path)
}
/// Checks that a component matches the rule.
pub(crate) fn component(checkpoint: &Checkpoint, component: Component, entry: &Entry, dtype: DType) {
    check(&*checkpoint.component(component).unwrap(), entry, dtype);
}
/// A tensor that no component uses.
pub(crate) fn junk(name: &str) -> Made {
    Made::new(name, "F32", &[1], vec![0; 4])
}
/// Checks that nothing is missing and nothing is left over.
pub(crate) fn complete(summary: &Summary) {
    for part in &summary.components {
        assert!(part.missing.is_empty() && part.extra.is_empty(), "{part:?}");
    }
    assert!(summary.unrecognised.is_empty(), "{:?}", summary.unrecognised);
}

/// Writes a file into a folder, which is created.
pub(crate) fn write_folder(folder: &Path, name: &str, tensors: &[Made]) {
    fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
    write_safetensors(&folder.join(name), &[("format", "pt")], tensors);
}

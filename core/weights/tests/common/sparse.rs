//! Full-size safetensors files with names, types and shapes. Only some tensors have values. The rest are holes, which
//! take no disk space if the file system supports sparse files.

use super::tables::Entry;
use sdrun_weights::keys::Fusion;
use serde_json::json;
use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// A file under construction: names, shapes and the values of some tensors.
#[derive(Default)]
pub(crate) struct Sparse {
    pub(crate) tensors: Vec<(String, Vec<usize>)>,
    pub(crate) values: Vec<(String, Vec<f32>)>,
    pub(crate) metadata: Vec<(&'static str, &'static str)>,
}

impl Sparse {
    pub(crate) fn new<N: Into<String>>(tensors: impl IntoIterator<Item = (N, Vec<usize>)>) -> Self {
        let tensors = tensors.into_iter().map(|(name, shape)| (name.into(), shape)).collect();
        Sparse { tensors, ..Sparse::default() }
    }

    /// A component under its original keys.
    pub(crate) fn original(entry: &Entry, prefix: &str) -> Self {
        let tensors = entry.pairs.iter().zip(&entry.shapes).map(|(pair, shapes)| {
            let mut shape = shapes[0].clone();
            match pair.fusion {
                Fusion::Same | Fusion::SwappedHalves => {}
                Fusion::Conv1x1 => shape.extend([1, 1]),
                Fusion::Transposed => shape.reverse(),
                Fusion::Rows => shape[0] = shapes.iter().map(|shape| shape[0]).sum(),
            }
            (format!("{prefix}{}", pair.original), shape)
        });
        Sparse::new(tensors.collect::<Vec<_>>())
    }

    /// A component under diffusers' names.
    pub(crate) fn diffusers(entry: &Entry) -> Self {
        let named = entry
            .pairs
            .iter()
            .zip(&entry.shapes)
            .flat_map(|(pair, shapes)| pair.diffusers.iter().zip(shapes));
        Sparse::new(named.map(|(name, shape)| (name.clone(), shape.clone())))
    }

    pub(crate) fn with(mut self, name: &str, shape: &[usize]) -> Self {
        self.tensors.push((name.into(), shape.to_vec()));
        self
    }

    /// Adds a small tensor with values.
    pub(crate) fn with_values(mut self, name: &str, values: &[f32]) -> Self {
        self.tensors.retain(|(other, _)| other != name);
        self.tensors.push((name.into(), vec![values.len()]));
        self.values.push((name.into(), values.to_vec()));
        self
    }

    pub(crate) fn shape(mut self, name: &str, shape: &[usize]) -> Self {
        let tensor = self.tensors.iter_mut().find(|(other, _)| other == name).unwrap();
        tensor.1 = shape.to_vec();
        self
    }

    pub(crate) fn without(mut self, unwanted: impl Fn(&str) -> bool) -> Self {
        self.tensors.retain(|(name, _)| !unwanted(name));
        self
    }

    /// Writes the file in f32.
    pub(crate) fn write(&self, path: &Path) {
        let (mut header, mut places, mut start) = (serde_json::Map::new(), Vec::new(), 0usize);
        if !self.metadata.is_empty() {
            let metadata = self.metadata.iter().map(|(key, value)| (key.to_string(), json!(value))).collect();
            header.insert("__metadata__".into(), metadata);
        }
        for (name, shape) in &self.tensors {
            let end = start + 4 * shape.iter().product::<usize>();
            let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
            assert!(header.insert(name.clone(), entry).is_none(), "{name} twice");
            places.push((name, start));
            start = end;
        }
        let header = serde_json::Value::Object(header).to_string();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut file = File::create(path).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        let data = 8 + header.len() as u64;
        file.set_len(data + start as u64).unwrap();
        for (name, values) in &self.values {
            let place = places.iter().find(|(other, _)| *other == name).unwrap().1;
            file.seek(SeekFrom::Start(data + place as u64)).unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            file.write_all(&bytes).unwrap();
        }
    }

    /// Writes a file into its own folder.
    pub(crate) fn file(&self) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        self.write(&path);
        (folder, path)
    }
}

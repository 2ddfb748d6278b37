//! Adapter files that the tests create.

use half::{bf16, f16};
use sdrun_abi::DType;
use sdrun_weights::{
    Component,
    adapter::{Adapter, Delta, Merge, Target},
    keys::{Fusion, KeyPair},
};
use std::{collections::BTreeMap, path::PathBuf};

/// A tensor of a file. Its values are rounded to its type.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f64>,
}

pub(crate) fn round(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        DType::F32 => f64::from(value as f32),
        _ => value,
    }
}

pub(crate) fn bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let one = |v: &f64| match dtype {
        DType::F16 => f16::from_f64(*v).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(*v).to_le_bytes().to_vec(),
        DType::F32 => (*v as f32).to_le_bytes().to_vec(),
        DType::F64 => v.to_le_bytes().to_vec(),
        DType::I64 => (*v as i64).to_le_bytes().to_vec(),
        _ => panic!("no test needs {dtype}"),
    };
    values.iter().flat_map(one).collect()
}

pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        _ => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
    }
}

/// Random numbers in [-1, 1).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    pub(crate) fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
    pub(crate) fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let values = (0..shape.iter().product()).map(|_| round(dtype, self.next())).collect();
        Tensor { dtype, shape: shape.to_vec(), values }
    }
    pub(crate) fn f32s(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next() as f32).collect()
    }
}

/// An adapter file under construction.
#[derive(Clone, Default)]
pub(crate) struct File {
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl File {
    pub(crate) fn add(mut self, key: &str, tensor: Tensor) -> Self {
        self.tensors.insert(key.into(), tensor);
        self
    }
    pub(crate) fn random(self, key: &str, shape: &[usize]) -> Self {
        let seed = key.bytes().fold(7, |n: u64, b| n.wrapping_mul(31).wrapping_add(b.into()));
        self.add(key, Random::new(seed).tensor(DType::F16, shape))
    }
    pub(crate) fn number(self, key: &str, value: f64) -> Self {
        self.add(key, Tensor { dtype: DType::F32, shape: vec![], values: vec![value] })
    }
    pub(crate) fn say(mut self, key: &str, text: &str) -> Self {
        self.metadata.insert(key.into(), text.into());
        self
    }
    pub(crate) fn values(&self, key: &str) -> &[f64] {
        &self.tensors[key].values
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        if !self.metadata.is_empty() {
            entries.push(format!("\"__metadata__\":{}", serde_json::to_string(&self.metadata).unwrap()));
        }
        for (key, tensor) in &self.tensors {
            let start = data.len();
            data.extend(bytes(tensor.dtype, &tensor.values));
            let (dtype, shape) = (tensor.dtype.to_string().to_uppercase(), &tensor.shape);
            let key = serde_json::to_string(key).unwrap();
            let end = data.len();
            entries.push(format!(
                "{key}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"
            ));
        }
        let header = format!("{{{}}}", entries.join(","));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    }

    pub(crate) fn write(&self, folder: &tempfile::TempDir, name: &str) -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, self.to_bytes()).unwrap();
        path
    }

    pub(crate) fn open(&self) -> sdrun_abi::Result<Adapter> {
        let folder = tempfile::tempdir().unwrap();
        Adapter::open(self.write(&folder, "adapter.safetensors"))
    }
}

/// Creates a component with these tensors.
pub(crate) fn target(component: Component, tensors: &[(&str, &[usize])], pairs: &[KeyPair]) -> Target {
    Target::new(component, tensors.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())), pairs)
}

pub(crate) fn pair(original: &str, diffusers: &[&str], fusion: Fusion) -> KeyPair {
    let diffusers = diffusers.iter().map(|name| name.to_string()).collect();
    KeyPair { original: original.into(), diffusers, fusion }
}

/// Merges f32 weights to f32 in one piece. Also checks that the transposed tensor gets the same values.
pub(crate) fn merged(base: &[f32], shape: &[usize], deltas: &[(&Delta, f32)]) -> Vec<f32> {
    let base: Vec<u8> = base.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut out = vec![0u8; base.len()];
    let merge = Merge::new(shape, deltas).unwrap();
    merge.tensor((DType::F32, &base), (DType::F32, &mut out)).unwrap();
    let mut turned = vec![0u8; base.len()];
    merge.transposed((DType::F32, &base), (DType::F32, &mut turned)).unwrap();
    let values = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let (out, turned) = (values(&out), values(&turned));
    let rows = shape.first().copied().unwrap_or(1);
    let columns = out.len() / rows;
    for (place, value) in out.iter().enumerate() {
        let same = turned[place % columns * rows + place / columns].to_bits() == value.to_bits();
        assert!(same, "the transpose is merged differently at {place}");
    }
    out
}

//! The weight map of a stripped graph: how to make each of its weights. The JSON format is described in
//! `models/README.md` of this crate.

use crate::synthetic::{Generator, Order};
use sdrun_abi::{DType, Error, ErrorCode, Flow, Result, Weight, WeightSource};
use serde::{Deserialize, Serialize};
use std::{collections::HashMap, io, path::Path};

/// Largest rank of a mapped tensor.
const MAX_RANK: usize = 8;

/// How a tensor of the graph is made from one of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transform {
    /// Unchanged.
    Identity,
    /// The same bytes under another shape.
    Reshape,
    /// The transpose of a matrix.
    Transpose,
}

impl Transform {
    /// Whether it makes a tensor of shape `to` from one of shape `from`.
    pub(crate) fn fits(self, from: &[usize], to: &[usize]) -> bool {
        let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        match self {
            Transform::Identity => to == from,
            Transform::Reshape => elements(from).is_some() && elements(from) == elements(to),
            Transform::Transpose => matches!((to, from), ([a, b], [c, d]) if (a, b) == (d, c)),
        }
    }
}

/// One weight of a stripped graph.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappedTensor {
    /// Initializer name in the graph.
    #[serde(rename = "init")]
    pub name: String,
    /// Name in the checkpoint; the rule's `name`.
    #[serde(rename = "src")]
    pub source: String,
    /// From the checkpoint's tensor to the graph's.
    #[serde(rename = "op")]
    pub transform: Transform,
    /// Shape in the checkpoint; the rule's shape.
    #[serde(rename = "src_shape")]
    pub source_shape: Vec<usize>,
    /// Shape in the graph.
    pub shape: Vec<usize>,
    /// Element type in the graph.
    #[serde(deserialize_with = "numpy_dtype")]
    pub dtype: DType,
    /// Offset in the weights file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Factor on the rule's values.
    #[serde(default = "one")]
    pub gain: f32,
}

/// All weights of a stripped graph, sorted by offset in the weights file.
#[derive(Clone, Debug)]
pub struct WeightMap {
    /// Name of the file the graph's external data points to.
    pub weights_file: String,
    /// Its size.
    pub weights_bytes: u64,
    /// The checkpoint the rule names, for example `sd15-unet/A`.
    pub tag: String,
    /// The weights.
    pub tensors: Vec<MappedTensor>,
    by_name: HashMap<String, usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "graph")]
    _graph: String,
    weights_file: String,
    weights_bytes: u64,
    tag: String,
    tensors: Vec<MappedTensor>,
}

fn one() -> f32 {
    1.0
}

fn numpy_dtype<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        other => Err(serde::de::Error::custom(format!("unknown dtype {other:?}"))),
    }
}

impl MappedTensor {
    fn check(&self) -> Result<(), String> {
        if self.shape.len() > MAX_RANK || self.source_shape.len() > MAX_RANK {
            return Err(format!("has more than {MAX_RANK} dimensions"));
        }
        if self.dtype.bytes_of(&self.shape).map(|n| n as u64) != Some(self.length) {
            return Err(format!(
                "has {} bytes, which do not make {} {:?}",
                self.length, self.dtype, self.shape
            ));
        }
        if !self.transform.fits(&self.source_shape, &self.shape) {
            let (from, to) = (&self.source_shape, &self.shape);
            return Err(format!("cannot become {to:?} from {from:?} by {:?}", self.transform));
        }
        if !self.gain.is_finite() {
            return Err(format!("has gain {}", self.gain));
        }
        Ok(())
    }

    /// Fills `out` with the elements of checkpoint `tag` from number `start` on, in the graph's order.
    fn fill(&self, tag: &str, start: u64, out: &mut [u8]) {
        let order = match (self.transform, &*self.shape) {
            (Transform::Transpose, [rows, columns]) => {
                Order::Transposed { rows: *rows as u64, columns: *columns as u64 }
            }
            _ => Order::RowMajor,
        };
        let generator = Generator::new(tag, &self.source, &self.source_shape).with_gain(self.gain);
        generator.fill(self.dtype, start, order, out);
    }
}

impl WeightMap {
    /// Reads a map. `DataLoss` if it is not JSON of this format; if the tensors' types, shapes, offsets and lengths
    /// contradict one another or the file's size; if tensors overlap; or if two have the same name.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let damaged =
            |why: String| Error::new(ErrorCode::DataLoss, format!("the weight map is damaged: {why}"));
        let file: File = serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))?;
        // Neither the graph's external data nor the map may name another folder.
        let mut parts = Path::new(&file.weights_file).components();
        let plain = matches!((parts.next(), parts.next()), (Some(std::path::Component::Normal(_)), None));
        if !plain || file.weights_file.contains(['/', '\\', '\0', ':']) {
            return Err(damaged(format!("{:?} is not a plain file name", file.weights_file)));
        }
        let mut by_name = HashMap::with_capacity(file.tensors.len());
        let mut end = 0u64;
        for (index, tensor) in file.tensors.iter().enumerate() {
            let wrong = |why: String| damaged(format!("tensor {:?} {why}", tensor.name));
            tensor.check().map_err(wrong)?;
            if tensor.offset < end {
                return Err(wrong(format!("at byte {} overlaps the one before it", tensor.offset)));
            }
            end = match tensor.offset.checked_add(tensor.length) {
                Some(end) if end <= file.weights_bytes => end,
                _ => return Err(wrong(format!("ends past the {} bytes of the file", file.weights_bytes))),
            };
            if by_name.insert(tensor.name.clone(), index).is_some() {
                return Err(wrong("appears twice".into()));
            }
        }
        let File { _graph, weights_file, weights_bytes, tag, tensors } = file;
        Ok(WeightMap { weights_file, weights_bytes, tag, tensors, by_name })
    }

    /// The weight of this initializer.
    pub fn get(&self, name: &str) -> Option<&MappedTensor> {
        self.by_name.get(name).map(|index| &self.tensors[*index])
    }

    /// Writes the weights file for checkpoint `tag`, a few MiB at a time. `progress` receives the bytes done and the
    /// total. If it cancels, the error is of the kind `Interrupted`.
    pub(crate) fn write(
        &self,
        tag: &str,
        out: &mut impl io::Write,
        progress: &dyn Fn(u64, u64) -> Flow,
    ) -> io::Result<()> {
        const CHUNK: u64 = 8 << 20;
        let mut buffer = Vec::new();
        let largest = self.tensors.iter().map(|tensor| tensor.length).max().unwrap_or(0);
        buffer.try_reserve_exact(largest.min(CHUNK) as usize)?;
        let mut position = 0;
        for tensor in &self.tensors {
            io::copy(&mut io::Read::take(io::repeat(0), tensor.offset - position), out)?;
            position = tensor.offset;
            let end = tensor.offset + tensor.length;
            while position < end {
                buffer.resize((end - position).min(CHUNK) as usize, 0);
                let start = (position - tensor.offset) / tensor.dtype.size() as u64;
                tensor.fill(tag, start, &mut buffer);
                out.write_all(&buffer)?;
                position += buffer.len() as u64;
                if progress(position, self.weights_bytes) == Flow::Cancel {
                    return Err(io::ErrorKind::Interrupted.into());
                }
            }
        }
        io::copy(&mut io::Read::take(io::repeat(0), self.weights_bytes - position), out)?;
        // Nothing is left to cancel.
        let _ = progress(self.weights_bytes, self.weights_bytes);
        Ok(())
    }
}

/// The weights of a stripped graph, computed on demand without a file. Only delivered tensors take memory.
#[derive(Clone, Debug)]
pub struct SyntheticWeights {
    map: WeightMap,
    tag: String,
}

impl SyntheticWeights {
    /// The weights of the checkpoint the map names.
    pub fn new(map: WeightMap) -> Self {
        let tag = map.tag.clone();
        SyntheticWeights { map, tag }
    }
    /// The weights of another checkpoint, for example `sd15-unet/B`.
    pub fn with_tag(self, tag: impl Into<String>) -> Self {
        SyntheticWeights { tag: tag.into(), ..self }
    }
    /// The checkpoint.
    pub fn tag(&self) -> &str {
        &self.tag
    }
    fn find(&self, name: &str) -> Result<&MappedTensor> {
        self.map
            .get(name)
            .ok_or_else(|| Error::not_found(format!("checkpoint {} has no weight {name:?}", self.tag)))
    }
}

impl WeightSource for SyntheticWeights {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let tensor = self.find(name)?;
        let mut data = Vec::new();
        data.try_reserve_exact(tensor.length as usize).map_err(|_| {
            let message = format!("no memory for the {} bytes of weight {name:?}", tensor.length);
            Error::new(ErrorCode::ResourceExhausted, message)
        })?;
        data.resize(tensor.length as usize, 0);
        tensor.fill(&self.tag, 0, &mut data);
        Weight::new(tensor.dtype, tensor.shape.clone(), data)
    }
    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let tensor = self.find(name)?;
        Ok((tensor.dtype, tensor.shape.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    /// 3 x 5 f16 at 64, its transpose source, a gain, a gap before and after.
    fn sample() -> serde_json::Value {
        serde_json::json!({
            "graph": "m.graph.onnx", "weights_file": "m.weights", "weights_bytes": 256, "tag": "m/A",
            "tensors": [
                {"init": "a", "src": "a.weight", "op": "identity", "src_shape": [4], "shape": [4],
                 "dtype": "float32", "offset": 0, "length": 16},
                {"init": "onnx::MatMul_1", "src": "b.weight", "op": "transpose", "src_shape": [5, 3],
                 "shape": [3, 5], "dtype": "float16", "offset": 64, "length": 30, "gain": 2.0},
                {"init": "c", "src": "c.weight", "op": "reshape", "src_shape": [4], "shape": [4, 1, 1],
                 "dtype": "bfloat16", "offset": 128, "length": 8},
            ],
        })
    }
    fn parse(value: &serde_json::Value) -> Result<WeightMap> {
        WeightMap::parse(value.to_string().as_bytes())
    }

    #[test]
    fn the_file_holds_what_the_source_delivers() {
        let map = parse(&sample()).unwrap();
        let (mut file, last) = (Vec::new(), Cell::new((0, 0)));
        map.write("m/B", &mut file, &|done, total| {
            last.set((done, total));
            Flow::Continue
        })
        .unwrap();
        assert_eq!(file.len(), 256);
        assert_eq!(last.get(), (256, 256));
        let source = SyntheticWeights::new(map.clone()).with_tag("m/B");
        for tensor in &map.tensors {
            let weight = source.get(&tensor.name).unwrap();
            assert_eq!(
                weight.data(),
                &file[tensor.offset as usize..][..tensor.length as usize],
                "{}",
                tensor.name
            );
            assert_eq!(source.describe(&tensor.name).unwrap(), (weight.dtype, weight.shape));
        }
        assert!(file[16..64].iter().chain(&file[94..128]).chain(&file[136..]).all(|byte| *byte == 0));
    }

    #[test]
    fn values_follow_the_rule_through_transform_and_gain() {
        let source = SyntheticWeights::new(parse(&sample()).unwrap());
        let mut rule = vec![0; 60];
        crate::synthetic::fill("m/A", "b.weight", &[5, 3], DType::F32, &mut rule).unwrap();
        let rule: Vec<f32> = rule.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let weight = source.get("onnx::MatMul_1").unwrap();
        for row in 0..3 {
            for column in 0..5 {
                let bytes = weight.data().as_chunks::<2>().0[row * 5 + column];
                let expected = half::f16::from_f32(rule[column * 3 + row] * 2.0);
                assert_eq!(half::f16::from_le_bytes(bytes), expected);
            }
        }
        let mut rule = vec![0; 8];
        crate::synthetic::fill("m/A", "c.weight", &[4], DType::BF16, &mut rule).unwrap();
        assert_eq!(source.get("c").unwrap().data(), rule);
        let error = source.get("d").unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound);
    }

    #[test]
    fn contradictions_are_errors() {
        let cases: [(&str, serde_json::Value, &str); 13] = [
            ("/tensors/1/offset", 8.into(), "overlaps"),
            ("/tensors/2/offset", 250.into(), "ends past"),
            ("/tensors/2/offset", u64::MAX.into(), "ends past"),
            ("/tensors/2/length", 9.into(), "do not make"),
            ("/tensors/1/init", "a".into(), "twice"),
            ("/tensors/1/src_shape", vec![3, 5].into(), "by Transpose"),
            ("/tensors/2/src_shape", vec![5].into(), "by Reshape"),
            ("/tensors/2/src_shape", vec![u64::MAX, 2].into(), "by Reshape"),
            ("/tensors/0/shape", vec![1; 9].into(), "dimensions"),
            ("/tensors/0/dtype", "int8".into(), "int8"),
            ("/tensors/1/gain", serde_json::Value::Null, "null"),
            ("/weights_file", "../m.weights".into(), "plain file name"),
            ("/weights_file", "..".into(), "plain file name"),
        ];
        for (place, value, expected) in cases {
            let mut map = sample();
            *map.pointer_mut(place).unwrap() = value;
            let error = parse(&map).unwrap_err();
            assert_eq!(error.code, ErrorCode::DataLoss);
            assert!(error.message.contains(expected), "{place}: {error}");
        }
        assert!(WeightMap::parse(b"[").is_err());
    }

    #[test]
    fn a_failed_write_is_passed_on() {
        struct Full(usize);
        impl io::Write for Full {
            fn write(&mut self, data: &[u8]) -> io::Result<usize> {
                self.0 = self.0.checked_sub(data.len()).ok_or(io::ErrorKind::StorageFull)?;
                Ok(data.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let map = parse(&sample()).unwrap();
        for room in [0, 20, 70, 140] {
            let error = map.write("m/A", &mut Full(room), &|_, _| Flow::Continue).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
    }

    proptest! {
        /// Any number or string anywhere gives an error or a map whose tensors are inside the file, never a panic.
        #[test]
        fn mutated_maps_never_panic(
            tensor in 0usize..3,
            field in prop::sample::select(vec!["src_shape", "shape", "offset", "length", "gain", "dtype", "op"]),
            numbers in prop::collection::vec(prop_oneof![any::<u64>(), 0u64..300], 0..10),
            scalar in any::<bool>(),
        ) {
            let mut map = sample();
            map["tensors"][tensor][field] =
                if scalar { numbers.first().copied().into() } else { numbers.into() };
            if let Ok(map) = parse(&map) {
                for tensor in &map.tensors {
                    prop_assert!(tensor.offset + tensor.length <= map.weights_bytes);
                }
                let mut file = Vec::new();
                map.write("m/A", &mut file, &|_, _| Flow::Continue).unwrap();
                prop_assert_eq!(file.len(), 256);
            }
        }

        #[test]
        fn mutated_bytes_never_panic(place in 0usize..600, byte in any::<u8>()) {
            let mut json = sample().to_string().into_bytes();
            let place = place % json.len();
            json[place] = byte;
            let _ = WeightMap::parse(&json);
        }
    }
}

//! Built-in models: graphs of real architectures with synthetic weights.
//!
//! The graphs and weight maps are in `models/` (its README states their origin) and are part of the binary. A
//! built-in model is used in one of two ways. [`Builtin::materialise`] writes it as files that are opened like
//! any other model. Or its graph ([`Builtin::graph_bytes`]) is used without files, with weights generated on demand
//! ([`Builtin::weights`]).

mod input;
mod materialise;
mod table;

pub use input::{Input, InputKind};

use crate::{SyntheticWeights, WeightMap};
use lzma_rust2::XzReader;
use sdrun_abi::{Error, ErrorCode, Flow, Result};
use std::{
    io::{Cursor, Read},
    path::{Path, PathBuf},
};

/// Limits on unpacked sizes, far above those of any built-in model.
const MAX_GRAPH_BYTES: u64 = 64 << 20;
const MAX_MAP_BYTES: u64 = 16 << 20;

/// A model that comes with the library.
#[derive(Debug)]
pub struct Builtin {
    /// Its name wherever a model path is accepted.
    pub name: &'static str,
    /// A one-line description.
    pub summary: &'static str,
    /// Its files in `models/` are `FILE.graph.onnx.xz` and `FILE.map.json.xz`.
    pub file: &'static str,
    /// Its inputs in the graph's order, with the shapes used for measuring.
    pub inputs: &'static [Input],
    graph_xz: &'static [u8],
    map_xz: &'static [u8],
}

/// All built-in models.
pub fn list() -> &'static [Builtin] {
    table::MODELS
}

/// The built-in model of this name; `_` may stand for `-`.
pub fn find(name: &str) -> Option<&'static Builtin> {
    let name = name.replace('_', "-");
    list().iter().find(|model| model.name == name)
}

impl Builtin {
    /// The graph: an ONNX `ModelProto` whose weights are external data in a file that does not exist.
    pub fn graph_bytes(&self) -> Result<Vec<u8>> {
        unpack(self.graph_xz, MAX_GRAPH_BYTES).map_err(|why| self.damaged("graph", &why))
    }

    /// How each weight is made.
    pub fn weight_map(&self) -> Result<WeightMap> {
        let json = unpack(self.map_xz, MAX_MAP_BYTES).map_err(|why| self.damaged("weight map", &why))?;
        WeightMap::parse(&json).map_err(|error| self.damaged("weight map", &error.message))
    }

    /// The weights, made on demand, without a file.
    pub fn weights(&self) -> Result<SyntheticWeights> {
        Ok(SyntheticWeights::new(self.weight_map()?))
    }

    /// Writes the model to `models_dir/NAME/`, unless it already exists, and returns the path of its
    /// ONNX file. The weights are in a file next to it. `progress` receives the bytes of weights done and in
    /// total. If it cancels, the error is `Cancelled` and nothing is left.
    ///
    /// Several processes may do this at once: one writes, the others wait. The result is complete or absent.
    /// `ResourceExhausted`, with the number of bytes needed, if the disk has no room.
    pub fn materialise(&self, models_dir: &Path, progress: &dyn Fn(u64, u64) -> Flow) -> Result<PathBuf> {
        materialise::materialise(self, models_dir, progress)
    }

    /// Size of [`graph_bytes`](Builtin::graph_bytes), from the index of the packed one; `None` if that is damaged.
    fn graph_len(&self) -> Option<u64> {
        lzma_rust2::xz_uncompressed_size(Cursor::new(self.graph_xz)).ok()
    }

    fn damaged(&self, part: &str, why: &str) -> Error {
        Error::new(
            ErrorCode::DataLoss,
            format!("the {part} of built-in model {} is damaged: {why}", self.name),
        )
    }
}

/// Unpacks xz data of at most `limit` bytes.
fn unpack(data: &[u8], limit: u64) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    let read = XzReader::new(data, false).take(limit + 1).read_to_end(&mut out);
    match read {
        Ok(size) if size as u64 <= limit => Ok(out),
        Ok(_) => Err(format!("it is larger than {limit} bytes")),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use lzma_rust2::{XzOptions, XzWriter};
    use prost::Message;
    use sdrun_abi::{DType, WeightSource};
    use sdrun_graph::proto;
    use sha2::{Digest, Sha256};
    use std::{
        cell::Cell,
        collections::BTreeSet,
        fs, io,
        sync::atomic::{AtomicUsize, Ordering},
    };

    fn ignore(_: u64, _: u64) -> Flow {
        Flow::Continue
    }

    fn parse(model: &Builtin) -> proto::GraphProto {
        proto::ModelProto::decode(&*model.graph_bytes().unwrap()).unwrap().graph.unwrap()
    }

    #[test]
    fn names_are_unique_and_found() {
        let names: BTreeSet<&str> = list().iter().map(|model| model.name).collect();
        assert_eq!(names.len(), list().len());
        assert!(names.iter().all(|name| find(name).is_some_and(|model| model.name == *name)));
        assert!(find("sd15/unet").is_some() && find("sd15").is_none());
    }

    #[test]
    fn the_table_agrees_with_the_graphs() {
        for model in list() {
            assert_eq!(model.graph_len(), Some(model.graph_bytes().unwrap().len() as u64));
            let graph = parse(model);
            let name = model.name;
            assert_eq!(graph.input.len(), model.inputs.len(), "{name}");
            for (value, input) in graph.input.iter().zip(model.inputs) {
                assert_eq!(value.name(), input.name, "{name}");
                let tensor = value.r#type.as_ref().unwrap().tensor_type.as_ref().unwrap();
                assert_eq!(tensor.elem_type(), input.dtype as i32, "{name} {}", input.name);
                let dims = &tensor.shape.as_ref().unwrap().dim;
                assert_eq!(dims.len(), input.shape.len(), "{name} {}", input.name);
                for (dim, expected) in dims.iter().zip(input.shape) {
                    assert!(
                        dim.dim_value.is_none_or(|size| size == *expected as i64),
                        "{name} {}",
                        input.name
                    );
                }
                let made = input.tensor(name, input.shape).unwrap();
                assert_eq!((made.dtype(), made.shape()), (input.dtype, input.shape));
            }
        }
    }

    #[test]
    fn the_maps_agree_with_the_graphs() {
        for model in list() {
            let (map, graph) = (model.weight_map().unwrap(), parse(model));
            let external: Vec<_> = graph.initializer.iter().filter(|t| !t.external_data.is_empty()).collect();
            assert_eq!(external.len(), map.tensors.len(), "{}", model.name);
            for tensor in external {
                let mapped = map.get(tensor.name()).unwrap();
                let dims: Vec<usize> = tensor.dims.iter().map(|d| *d as usize).collect();
                assert_eq!(
                    (DType::from_onnx(tensor.data_type()), &dims),
                    (Some(mapped.dtype), &mapped.shape)
                );
                let entries = [
                    ("location", map.weights_file.clone()),
                    ("offset", mapped.offset.to_string()),
                    ("length", mapped.length.to_string()),
                ];
                for (key, value) in entries {
                    let entry = tensor.external_data.iter().find(|entry| entry.key() == key).unwrap();
                    assert_eq!(entry.value(), value, "{} {}", model.name, tensor.name());
                }
            }
        }
    }

    /// Whole weight files against the sums of those the numpy implementation writes. The first has reshaped and
    /// transposed f32 tensors, the second is f16.
    #[test]
    fn weight_files_equal_the_reference() {
        struct Hasher(Sha256, usize);
        impl io::Write for Hasher {
            fn write(&mut self, data: &[u8]) -> io::Result<usize> {
                self.0.update(data);
                self.1 += data.len();
                Ok(data.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        for (name, sum) in [
            ("sd15/vae-decoder", "689dec3ac1313606f2110e5e9513dbcab5e26d33e6c5276001dbdfbc6a58869d"),
            ("sdxl/text-encoder", "d3091190b0396ee133c797e40b52bef0a0b54e21d6719b9ed03beb7c3627c46d"),
            ("mobilenet-v2", "9478063bc6b9d06217248e1dd7dbc7c0629680f8577ab2ab85e33f9ddada2605"),
        ] {
            let map = find(name).unwrap().weight_map().unwrap();
            let mut hasher = Hasher(Sha256::new(), 0);
            map.write(&map.tag, &mut hasher, &ignore).unwrap();
            assert_eq!(hasher.1 as u64, map.weights_bytes);
            let hex: String = hasher.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, sum, "{name}");
        }
    }

    #[test]
    fn a_model_is_written_once_and_repaired_when_damaged() {
        let cache = tempfile::tempdir().unwrap();
        let model = find("mobilenet-v2").unwrap();
        let map = model.weight_map().unwrap();
        let made = || {
            let reports = Cell::new(Vec::new());
            let path = model.materialise(&cache.path().join("models"), &|done, total| {
                let mut list = reports.take();
                list.push((done, total));
                reports.set(list);
                Flow::Continue
            });
            (path.unwrap(), reports.take())
        };
        let (graph, reports) = made();
        assert_eq!(graph, cache.path().join("models/mobilenet-v2/model.onnx"));
        assert_eq!(fs::read(&graph).unwrap(), model.graph_bytes().unwrap());
        assert_eq!(reports.last(), Some(&(map.weights_bytes, map.weights_bytes)));
        assert!(reports.is_sorted());

        let weights = graph.with_file_name(&map.weights_file);
        let whole = fs::read(&weights).unwrap();
        let source = model.weights().unwrap();
        let last = map.tensors.last().unwrap();
        assert_eq!(&whole[last.offset as usize..], source.get(&last.name).unwrap().data());
        assert_eq!(made(), (graph.clone(), vec![]), "nothing is written again");

        let damages: [&dyn Fn(); 4] = [
            &|| fs::write(&weights, &whole[1..]).unwrap(),
            &|| fs::remove_file(&weights).unwrap(),
            &|| fs::write(&graph, b"").unwrap(),
            &|| fs::write(graph.with_file_name("complete"), b"older version").unwrap(),
        ];
        for damage in damages {
            damage();
            assert!(!made().1.is_empty());
            assert_eq!(fs::read(&weights).unwrap(), whole);
            assert!(made().1.is_empty());
        }
        let mut names: Vec<_> =
            fs::read_dir(graph.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["complete", "lock", "mobilenet_v2.weights", "model.onnx"]);
    }

    #[test]
    fn two_at_once_write_once() {
        let cache = tempfile::tempdir().unwrap();
        let model = find("taef2/encoder").unwrap();
        let writers = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let first = Cell::new(true);
                    let path = model.materialise(&cache.path().join("models"), &|_, _| {
                        if first.replace(false) {
                            writers.fetch_add(1, Ordering::Relaxed);
                        }
                        Flow::Continue
                    });
                    let map = model.weight_map().unwrap();
                    let weights = fs::metadata(path.unwrap().with_file_name(map.weights_file)).unwrap();
                    assert_eq!(weights.len(), map.weights_bytes);
                });
            }
        });
        assert_eq!(writers.into_inner(), 1);
    }

    /// A model of one weight with this many elements.
    fn model_of_size(elements: u64) -> Builtin {
        use std::io::Write;
        let pack = |data: &[u8]| -> &'static [u8] {
            let mut encoder = XzWriter::new(Vec::new(), XzOptions::with_preset(0)).unwrap();
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap().leak()
        };
        let bytes = 4 * elements;
        let map = format!(
            r#"{{"graph":"g","weights_file":"w","weights_bytes":{bytes},"tag":"t","tensors":[{{"init":"a","src":"a",
            "op":"identity","src_shape":[{elements}],"shape":[{elements}],"dtype":"float32","offset":0,"length":{bytes}}}]}}"#
        );
        let graph_xz = pack(b"graph");
        Builtin {
            name: "test",
            summary: "",
            file: "test",
            inputs: &[],
            graph_xz,
            map_xz: pack(map.as_bytes()),
        }
    }

    #[test]
    fn a_full_disk_is_told_before_anything_is_written() {
        let cache = tempfile::tempdir().unwrap();
        let error = model_of_size(1 << 60).materialise(&cache.path().join("models"), &ignore).unwrap_err();
        assert_eq!(error.code, ErrorCode::ResourceExhausted);
        assert!(error.message.contains("needs 4611686018427387909 bytes on the disk of"), "{error}");
        let left: Vec<_> = fs::read_dir(cache.path().join("models/test")).unwrap().flatten().collect();
        assert!(left.iter().all(|entry| entry.metadata().unwrap().len() == 0), "{left:?}");
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("models/test");
        // While the weights are written a folder takes their name, so that they cannot get it.
        let occupy = |_, _| {
            fs::create_dir_all(folder.join("w/x")).unwrap();
            Flow::Continue
        };
        let error = model_of_size(10).materialise(&cache.path().join("models"), &occupy).unwrap_err();
        assert!(error.message.starts_with("cannot write") && error.message.contains("test"), "{error}");
        fs::remove_dir_all(folder.join("w")).unwrap();
        assert!(fs::read_dir(&folder).unwrap().all(|entry| entry.unwrap().file_name() == "lock"));
        model_of_size(10).materialise(&cache.path().join("models"), &ignore).unwrap();
        assert_eq!(fs::metadata(folder.join("w")).unwrap().len(), 40);

        fs::remove_file(folder.join("w")).unwrap();
        let error =
            model_of_size(10).materialise(&cache.path().join("models"), &|_, _| Flow::Cancel).unwrap_err();
        assert_eq!(error.code, ErrorCode::Cancelled);
        assert!(fs::read_dir(&folder).unwrap().all(|entry| entry.unwrap().file_name() == "lock"));

        let file = tempfile::NamedTempFile::new().unwrap();
        let error = model_of_size(10).materialise(file.path(), &ignore).unwrap_err();
        assert!(error.message.starts_with("cannot create"), "{error}");
    }

    #[test]
    fn damaged_data_is_an_error() {
        let model = model_of_size(10);
        for cut in 0..model.map_xz.len() {
            let cut =
                Builtin { map_xz: &model.map_xz[..cut], graph_xz: &model.graph_xz[..8], ..model_of_size(10) };
            assert_eq!(cut.weight_map().unwrap_err().code, ErrorCode::DataLoss);
            assert!(cut.graph_bytes().unwrap_err().message.contains("built-in model test is damaged"));
        }
        assert!(unpack(model.graph_xz, 4).is_err());
        assert_eq!(unpack(model.graph_xz, 5).unwrap(), b"graph");
    }

    #[test]
    fn another_checkpoint_has_other_values() {
        let model = find("sd15/vae-decoder").unwrap();
        let name = "post_quant_conv.weight";
        let b = model.weights().unwrap().with_tag("sd15-vae/B");
        let mut expected = vec![0; 64];
        synthetic::fill("sd15-vae/B", name, &[4, 4, 1, 1], DType::F32, &mut expected).unwrap();
        assert_eq!(b.get(name).unwrap().data(), expected);
        assert_ne!(model.weights().unwrap().get(name).unwrap().data(), expected);
    }
}

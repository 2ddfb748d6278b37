//! The recorded key tables (`tests/data/key_tables`): each single-file key, its source among diffusers' tensors, and
//! the shapes.

use sdrun_weights::keys::{Fusion, KeyPair};
use serde_json::Value;
use std::{fs, io::Read, path::Path};

/// The recorded table of one component.
pub(crate) struct Entry {
    /// File and component: `sd15_unet`, `tiny_sd3/text_encoder_2`.
    pub(crate) name: String,
    /// The tag for the synthetic rule, without the checkpoint's letter.
    pub(crate) tag: String,
    /// Prefix of the original keys in the file.
    pub(crate) prefix: &'static str,
    /// In the table's order.
    pub(crate) pairs: Vec<KeyPair>,
    /// Shapes of each pair's diffusers tensors; empty if the table has none.
    pub(crate) shapes: Vec<Vec<Vec<usize>>>,
    /// Divides the dimensions to make a small network of the same proportions.
    pub(crate) divisor: usize,
}

impl Entry {
    pub(crate) fn diffusers_names(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().flat_map(|pair| pair.diffusers.iter().map(String::as_str))
    }
    /// Keeps only the pairs whose original key is wanted.
    pub(crate) fn only(mut self, wanted: impl Fn(&str) -> bool) -> Entry {
        let kept: Vec<_> =
            self.pairs.into_iter().zip(self.shapes).filter(|(pair, _)| wanted(&pair.original)).collect();
        (self.pairs, self.shapes) = kept.into_iter().unzip();
        self
    }
    pub(crate) fn original_names(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|pair| &*pair.original)
    }
}

const PREFIXES: [&str; 10] = [
    "model.diffusion_model.",
    "first_stage_model.",
    "control_model.",
    "cond_stage_model.transformer.",
    "conditioner.embedders.0.transformer.",
    "conditioner.embedders.1.model.",
    "text_encoders.clip_l.transformer.",
    "text_encoders.clip_g.transformer.",
    "text_encoders.t5xxl.transformer.",
    "",
];

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_string()).collect()
}
fn shapes(value: &Value) -> Vec<Vec<usize>> {
    let shape = |v: &Value| v.as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect();
    value.as_array().map(|list| list.iter().map(shape).collect()).unwrap_or_default()
}

fn entry(name: String, tag: &str, table: &Value) -> Entry {
    let table = table.as_object().unwrap();
    let first = table.keys().next().unwrap();
    let prefix = *PREFIXES.iter().find(|prefix| first.starts_with(**prefix)).unwrap();
    let pair = |(key, value): (&String, &Value)| KeyPair {
        original: key.strip_prefix(prefix).unwrap().to_string(),
        diffusers: strings(&value["src"]),
        fusion: match value["op"].as_str().unwrap() {
            "id" => Fusion::Same,
            "conv1x1" => Fusion::Conv1x1,
            "t" => Fusion::Transposed,
            "cat0" => Fusion::Rows,
            "swap" => Fusion::SwappedHalves,
            other => panic!("{other}"),
        },
    };
    let shapes = table.values().map(|value| shapes(&value["src_shapes"])).collect();
    Entry { name, tag: tag.to_string(), prefix, pairs: table.iter().map(pair).collect(), shapes, divisor: 64 }
}

/// Reads and unpacks a file of `tests/data`.
pub(crate) fn unpacked(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let mut text = String::new();
    flate2::read::GzDecoder::new(fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    text
}

/// All recorded tables.
pub(crate) fn table_files() -> Vec<Entry> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/key_tables");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut entries = Vec::new();
    for path in paths {
        let file = path.file_name().unwrap().to_str().unwrap();
        let json: Value = serde_json::from_str(&unpacked(&format!("key_tables/{file}"))).unwrap();
        let name = file.strip_suffix(".json.gz").unwrap();
        if let Some(table) = json.get("tensors") {
            entries.push(entry(name.to_string(), json["tag"].as_str().unwrap(), table));
        } else {
            for (component, value) in json.as_object().unwrap() {
                let tag = format!("{}-{component}", name.replace('_', "-"));
                entries.push(entry(format!("{name}/{component}"), &tag, &value["table"]));
            }
        }
    }
    entries
}

/// The table with this name.
pub(crate) fn table(name: &str) -> Entry {
    table_files().into_iter().find(|entry| entry.name == name).unwrap()
}

//! `sdrun inspect`

mod graph;
mod weights;

use crate::{
    complete,
    context::Context,
    format,
    model::{ModelArgs, has_ending},
};
use sdrun::{
    EngineFile, EngineManifest,
    abi::{DType, Error},
    files::{Links, open_regular},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

/// Show the contents of a model, an engine, a checkpoint or an adapter
///
/// Takes an .onnx file, the name of a built-in model, an .sdengine file, a checkpoint (.safetensors, .gguf, a diffusers
/// folder), an adapter or an embedding. For a checkpoint, shows the architecture, the parts, and missing and unused tensors.
/// Needs no provider and builds nothing.
///
/// The topology hash identifies the graph, whatever its weights are. Engines have the hash of the graph with bound shapes; give
/// --shape to compare with them.
///
/// Example: sdrun inspect unet/model.onnx --shape sample=1,4,64,64 --passes
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A file or the name of a built-in model
    #[arg(value_name = "FILE", add = complete::models())]
    what: String,

    /// Show what each pass over the graph removes and fuses
    #[arg(long)]
    passes: bool,

    /// List every weight
    #[arg(long)]
    weights: bool,

    #[command(flatten)]
    model: ModelArgs,
}

pub(crate) fn run(args: &Args, context: &Context) -> anyhow::Result<ExitCode> {
    let what = &args.what;
    let path = Path::new(what);
    let onnx_only = args.passes || !args.model.shapes.is_empty();
    if is_engine(path) {
        refuse(onnx_only || args.weights, "an engine")?;
        engine(path, context)?;
    } else if path.is_dir() || ["safetensors", "gguf"].iter().any(|ending| has_ending(path, ending)) {
        refuse(onnx_only, "a file of weights")?;
        weights::run(path, args.weights, context)?;
    } else {
        graph::run(what, args, context)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a file is an engine, by its name or its first bytes.
pub(crate) fn is_engine(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 8];
    has_ending(path, "sdengine")
        || open_regular(path, Links::Follow)
            .is_ok_and(|mut file| file.read_exact(&mut magic).is_ok() && &magic == b"SDRUNENG")
}

fn refuse(given: bool, what: &str) -> Result<(), Error> {
    if given {
        return Err(Error::invalid(format!(
            "this is {what}: --passes, --shape and --weights do not apply to it"
        )));
    }
    Ok(())
}

#[derive(Serialize)]
struct EngineReport<'a> {
    kind: &'static str,
    path: &'a Path,
    payload_bytes: usize,
    #[serde(flatten)]
    manifest: &'a EngineManifest,
}

fn engine(path: &Path, context: &Context) -> anyhow::Result<()> {
    let file = EngineFile::open(path)?;
    let (m, payload_bytes) = (&file.manifest, file.payload().len());
    context.present(&EngineReport { kind: "engine", path, payload_bytes, manifest: m }, |out| {
        writeln!(out, "engine       {}", path.display())?;
        writeln!(out, "model        {}", m.model)?;
        writeln!(out, "provider     {} (build {})", m.provider, m.build_id)?;
        writeln!(out, "runtime      {} {}", m.runtime.0, m.runtime.1)?;
        writeln!(out, "device class {}", m.device_class)?;
        writeln!(out, "precision    {}", m.spec.precision)?;
        writeln!(out, "topology     {}", m.topology)?;
        writeln!(out, "payload      {}", format::bytes(payload_bytes as u64))?;
        match &m.baked {
            Some(hash) => writeln!(out, "weights      baked in ({hash})")?,
            None => {
                let bytes: usize = m.info.weights.iter().filter_map(|w| w.dtype.bytes_of(&w.shape)).sum();
                let size = format::bytes(bytes as u64);
                writeln!(
                    out,
                    "weights      {} tensors, {size}, supplied when it is loaded",
                    m.info.weights.len()
                )?;
            }
        }
        for (title, specs) in [("inputs", &m.info.inputs), ("outputs", &m.info.outputs)] {
            writeln!(out, "{title}")?;
            for s in specs {
                writeln!(out, "  {} {} {}", s.name, s.dtype, format::dims(&s.shape))?;
            }
        }
        Ok(())
    })
}

/// Number and bytes of tensors.
#[derive(Clone, Copy, Default, Serialize)]
struct Amount {
    tensors: usize,
    bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: usize) {
        self.tensors += 1;
        self.bytes += bytes as u64;
    }
}

#[derive(Serialize)]
struct WeightRow {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
}

/// A summary of the weights in a file.
#[derive(Default, Serialize)]
struct Weights {
    #[serde(flatten)]
    total: Amount,
    by_dtype: BTreeMap<DType, Amount>,
    /// With `--weights`.
    #[serde(skip_serializing_if = "Option::is_none")]
    list: Option<Vec<WeightRow>>,
}

impl Weights {
    fn add(&mut self, name: &str, dtype: DType, shape: &[usize]) {
        let bytes = dtype.bytes_of(shape).unwrap_or_default();
        self.total.add(bytes);
        self.by_dtype.entry(dtype).or_default().add(bytes);
        if let Some(list) = &mut self.list {
            list.push(WeightRow { name: name.to_string(), dtype, shape: shape.to_vec() });
        }
    }

    fn show(&self, out: &mut dyn Write) -> io::Result<()> {
        let types = self
            .by_dtype
            .iter()
            .map(|(dtype, a)| format!("{dtype}: {} in {}", format::bytes(a.bytes), a.tensors));
        let (tensors, bytes) = (self.total.tensors, format::bytes(self.total.bytes));
        writeln!(out, "weights    {tensors} tensors, {bytes} ({})", format::list(types))?;
        for w in self.list.iter().flatten() {
            writeln!(out, "  {} {} {:?}", w.name, w.dtype, w.shape)?;
        }
        Ok(())
    }
}

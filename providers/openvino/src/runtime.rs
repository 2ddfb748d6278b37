//! The loaded OpenVINO.

use crate::{
    cache::{self, Cache},
    devices::Target,
    ffi::{self, CompiledModel, Core, Model},
    staging,
};
use sdrun_abi::{AlignedBuffer, BuildSpec, DType, Error, Host, InitConfig, Precision, Result, RuntimeInfo};
use sdrun_graph::{Dim, Graph, Node, Value};
use sdrun_provider_common::{Loaded, locate, refuse_options, runtime_spec};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{OnceLock, PoisonError, RwLock},
};

/// OpenVINO as loaded by [`init`]. Lives as long as the process.
pub(crate) struct Runtime {
    pub(crate) core: Core,
    pub(crate) version: String,
    pub(crate) temp_dir: PathBuf,
    /// The only folder where it can link files, in a sandbox.
    pub(crate) links_dir: Option<PathBuf>,
    /// `None` if the host provides no cache folder.
    cache: Option<Cache>,
    library: PathBuf,
    /// Locked for writing while an import sets properties on a device. Everything that would inherit those properties
    /// locks it for reading.
    device_properties: RwLock<()>,
    cpu_isa: OnceLock<String>,
}

static RUNTIME: Loaded<Runtime> = Loaded::new("OpenVINO");

/// Loads OpenVINO from the folder that the host found.
pub(crate) fn init(config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
    refuse_options("openvino", &config.options)?;
    let library = locate(&runtime_spec(crate::MANIFEST)?, config.runtime_dir.as_deref())?;
    let runtime = RUNTIME.load(&library, |library| {
        check_neighbours(library)?;
        let version = ffi::load(library)?;
        let build = format!("{}-{version}", env!("SDRUN_BUILD_ID")).replace(['/', '\\'], "_");
        Ok(Runtime {
            core: Core::new()?,
            version,
            cache: config.cache_dir.as_ref().and_then(|dir| Cache::open(dir, &build, host)),
            temp_dir: config.temp_dir.clone(),
            links_dir: config.links_dir.clone(),
            library: library.to_path_buf(),
            device_properties: RwLock::new(()),
            cpu_isa: OnceLock::new(),
        })
    })?;
    staging::remove_stale(&runtime.temp_dir, host);
    Ok(RuntimeInfo::new("openvino", runtime.version.clone(), Some(runtime.library.clone())))
}

/// Checks the libraries that OpenVINO loads by itself, some of them much later. A truncated one would end the
/// process.
fn check_neighbours(library: &std::path::Path) -> Result<()> {
    let Some(dir) = library.parent() else { return Ok(()) };
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io("read the folder", dir, &e))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let is_library = name.contains(".so") || name.ends_with(".dll") || name.ends_with(".dylib");
        if is_library && (name.contains("openvino") || name.contains("tbb")) {
            sdrun_provider_common::check_image(&path)?;
        }
    }
    Ok(())
}

/// The loaded OpenVINO; `FailedPrecondition` before [`init`] has succeeded.
pub(crate) fn get() -> Result<&'static Runtime> {
    RUNTIME.get()
}

impl Runtime {
    /// Compiles a model. Sets the precision and the performance hint explicitly instead of relying on the library's
    /// defaults. `cached` is the size of the weights in bytes; the model may then be loaded from the cache, and is
    /// stored there. `None` bypasses the cache, and so does the CPU.
    pub(crate) fn compile(
        &self,
        model: &Model,
        target: &Target,
        spec: &BuildSpec,
        cached: Option<u64>,
    ) -> Result<CompiledModel> {
        let _inherited = self.device_properties.read().unwrap_or_else(PoisonError::into_inner);
        let mut properties = properties(spec, target);
        let worthwhile = |bytes| cache::is_worthwhile(&target.openvino_name, bytes);
        let cache = self.cache.as_ref().filter(|_| cached.is_some_and(worthwhile));
        let cache = cache.and_then(Cache::enter);
        if let Some(dir) = cache.as_ref().and_then(|cache| cache.dir()) {
            properties.0.push(("CACHE_DIR", dir.to_string()));
        }
        let compiled = self.core.compile(model, &target.openvino_name, &properties.pairs())?;
        self.verify_precision(&compiled, spec)?;
        Ok(compiled)
    }

    /// Imports a blob. The C API takes no properties for an import and would use the library's defaults (bf16 on many
    /// CPUs), so they are set on the device during the call.
    pub(crate) fn import(&self, blob: &[u8], target: &Target, spec: &BuildSpec) -> Result<CompiledModel> {
        let _alone = self.device_properties.write().unwrap_or_else(PoisonError::into_inner);
        let device = &target.openvino_name;
        self.core.set_properties(device, &properties(spec, target).pairs())?;
        let imported = self.core.import(AlignedBuffer::copy_of(blob)?, device);
        if spec.threads.is_some() {
            // 0 restores the library's default.
            self.core.set_properties(device, &[("INFERENCE_NUM_THREADS", "0")])?;
        }
        let compiled = imported?;
        self.verify_precision(&compiled, spec)?;
        Ok(compiled)
    }

    /// Checks the precision in use. A library may accept a precision hint and still compute in another precision.
    fn verify_precision(&self, compiled: &CompiledModel, spec: &BuildSpec) -> Result<()> {
        let used = compiled.property("INFERENCE_PRECISION_HINT")?;
        if used != hint(spec.precision) {
            return Err(Error::unsupported(format!(
                "OpenVINO computes in {used} on {} although the build asks for {}",
                spec.device, spec.precision
            )));
        }
        Ok(())
    }

    /// Instruction set that the CPU plugin compiles for, as its blobs state it in their requirements.
    pub(crate) fn cpu_isa(&self) -> Result<&str> {
        if let Some(isa) = self.cpu_isa.get() {
            return Ok(isa);
        }
        // The plugin reports it only for a compiled model.
        let onnx =
            relu().to_onnx(|name, _| Err(sdrun_graph::GraphError::Invalid(format!("no weight {name}"))));
        let onnx = onnx.map_err(|e| Error::internal(e.to_string()))?;
        let compiled = self.core.compile(
            &self.core.read_bytes(&onnx)?,
            "CPU",
            &[("INFERENCE_PRECISION_HINT", "f32")],
        )?;
        let isa = match compiled.property("RUNTIME_REQUIREMENTS") {
            Ok(text) => text.split(';').find_map(|part| part.strip_prefix("isa=")).map(str::to_string),
            Err(_) => None,
        };
        let isa = match isa {
            Some(isa) => isa,
            // Plugins without the property, such as Arm's, have a single instruction set per architecture.
            None => self.core.property("CPU", "DEVICE_ARCHITECTURE")?,
        };
        Ok(self.cpu_isa.get_or_init(|| isa))
    }
}

/// A graph with one operator on one number.
fn relu() -> Graph {
    let mut graph = Graph { name: "probe".into(), ir_version: 8, ..Default::default() };
    graph.opsets.insert(String::new(), 17);
    let mut value = |name: &str| {
        graph.add_value(Value {
            name: name.into(),
            dtype: Some(DType::F32),
            shape: Some(vec![Dim::Known(1)]),
        })
    };
    let (x, y) = (value("x"), value("y"));
    graph.nodes.push(Node {
        name: String::new(),
        domain: String::new(),
        op_type: "Relu".into(),
        inputs: vec![Some(x)],
        outputs: vec![Some(y)],
        attributes: BTreeMap::new(),
        metadata: BTreeMap::new(),
    });
    graph.inputs.push(x);
    graph.outputs.push(y);
    graph
}

/// A precision as a property value. OpenVINO spells element types as sdrun does.
pub(crate) fn hint(precision: Precision) -> &'static str {
    precision.float_type().map_or("undefined", DType::name)
}

struct PropertyList(Vec<(&'static str, String)>);

impl PropertyList {
    fn pairs(&self) -> Vec<(&str, &str)> {
        self.0.iter().map(|(key, value)| (*key, value.as_str())).collect()
    }
}

fn properties(spec: &BuildSpec, target: &Target) -> PropertyList {
    let mut list = vec![
        ("INFERENCE_PRECISION_HINT", hint(spec.precision).to_string()),
        // Optimise for the latency of a single request.
        ("PERFORMANCE_HINT", "LATENCY".to_string()),
    ];
    if target.openvino_name == "CPU" {
        // On processors with products of bytes, OpenVINO rounds the inputs of matrices with int8 weights to bytes by default.
        list.push(("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0".to_string()));
        list.extend(spec.threads.map(|threads| ("INFERENCE_NUM_THREADS", threads.to_string())));
    }
    PropertyList(list)
}

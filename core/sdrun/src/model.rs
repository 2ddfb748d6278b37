use crate::{Error, Paths, Result, suggest::did_you_mean};
use sdrun_abi::{DType, Error as AbiError, ErrorCode, Hint, Host, OpenShapes, TensorSpec, shape_sets};
use sdrun_files::{Links, read_small};
use sdrun_graph::{Dim, ExternalBase, Graph, GraphError, OpenDims, OpenOptions, WeightsPolicy, simplify};
use sdrun_weights::{Binding, OnnxWeights, builtin};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Maximum size of a binding table. The largest denoiser's takes less than 1 MB.
const MAX_BINDING: u64 = 64 << 20;

/// Input shapes by name.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// An ONNX model: its graph, and the locations of its own weights. Opening maps files and reads no weights.
#[derive(Debug)]
pub struct Model {
    name: String,
    path: PathBuf,
    graph: Graph,
    /// Whether the binding table may be a link.
    links: Links,
    builtin: Option<&'static builtin::Builtin>,
    /// Whether `graph` is that of the file.
    whole: bool,
}

impl Model {
    /// Opens an `.onnx` file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &OpenOptions::default())
    }

    /// Opens an `.onnx` file with options about its external data.
    pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        let path = path.as_ref();
        let graph = Graph::open(path, options)?;
        let links = if options.allow_links { Links::Follow } else { Links::Refuse };
        Ok(Model {
            name: path.display().to_string(),
            path: path.to_path_buf(),
            graph,
            links,
            builtin: None,
            whole: true,
        })
    }

    /// Opens a file, or a built-in model if `what` is the name of one and no file of that name exists. A built-in model's
    /// synthetic weights are generated into the cache folder on first use, unless they may be absent. `host` receives the
    /// bytes done and the total, and can cancel.
    pub fn find(what: &str, paths: &Paths, options: &OpenOptions, host: &dyn Host) -> Result<Self> {
        if Path::new(what).exists() {
            return Self::open_with(what, options);
        }
        let Some(builtin) = builtin::find(what) else {
            if what.ends_with(".onnx") || what.starts_with(['.', '/']) {
                return Self::open_with(what, options);
            }
            let names: Vec<&str> = builtin::list().iter().map(|b| b.name).collect();
            return Err(AbiError::not_found(format!(
                "there is neither a file nor a built-in model called `{what}`{}",
                did_you_mean(what, names.iter().copied())
            ))
            .with_hint(format!("built-in models: {}", names.join(", ")))
            .into());
        };
        if options.weights == WeightsPolicy::MayBeAbsent {
            let bytes = builtin.graph_bytes()?.into();
            let graph = Graph::from_bytes(bytes, builtin.name, ExternalBase::Stripped)?;
            let path = PathBuf::from(builtin.name);
            return Ok(Model {
                name: builtin.name.to_string(),
                path,
                graph,
                links: Links::Refuse,
                builtin: Some(builtin),
                whole: true,
            });
        }
        crate::paths::private_dir(&paths.cache)?;
        let phase = format!("generating {what}");
        let path = builtin.materialise(&paths.models(), &|done, total| host.progress(&phase, done, total))?;
        // These files are our own. A second link is a temporary one that a provider made to read them.
        let graph = Graph::open(&path, &OpenOptions { allow_links: true, ..*options })?;
        Ok(Model {
            name: builtin.name.to_string(),
            path,
            graph,
            links: Links::Refuse,
            builtin: Some(builtin),
            whole: true,
        })
    }

    /// This model with another graph, whose weights have the same names.
    #[must_use]
    pub fn with_graph(&self, graph: Graph) -> Model {
        let Model { name, path, links, builtin, .. } = self;
        let (name, path) = (name.clone(), path.clone());
        Model { name, path, graph, links: *links, builtin: *builtin, whole: false }
    }

    /// File path or built-in name, for messages and reports.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// The `.onnx` file.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The graph as in the file.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }
    /// Details of a built-in model; `None` for others, and with another graph.
    pub fn builtin(&self) -> Option<&'static builtin::Builtin> {
        self.builtin.filter(|_| self.whole)
    }

    /// Maps weights to tensors of a checkpoint: the known binding of a built-in model, else the table that `sdrun
    /// import` wrote beside the file (`NAME.binding.json`), else inferred from the names of weights and nodes.
    ///
    /// Errors: `InvalidArgument` if the table is not a regular file, or is a link and links are not allowed;
    /// `DataLoss` if it is damaged or far too long.
    pub fn binding(&self) -> Result<Binding> {
        if let Some(builtin) = self.builtin {
            return Ok(Binding::from_map(&builtin.weight_map()?));
        }
        let table = Self::binding_file(&self.path);
        match read_small(&table, self.links, MAX_BINDING) {
            Ok(json) => Ok(Binding::parse(&json).map_err(|e| e.with_file(&table))?),
            Err(e) if e.code == ErrorCode::NotFound => Ok(Binding::infer_file(&self.graph, &self.path).0),
            Err(e) => Err(e.into()),
        }
    }

    /// Path of a model's binding table: `NAME.binding.json` beside `NAME.onnx`.
    pub fn binding_file(model: &Path) -> PathBuf {
        model.with_extension("binding.json")
    }

    /// The weights stored with the model; mapped, not read.
    pub fn weights(&self) -> OnnxWeights {
        OnnxWeights::new(&self.graph)
    }

    /// Inputs with the dimensions that the file fixes.
    pub fn inputs(&self) -> Vec<(TensorSpec, Vec<Dim>)> {
        self.graph
            .inputs
            .iter()
            .map(|id| {
                let value = self.graph.value(*id);
                let dims = value.shape.clone().unwrap_or_default();
                let spec = TensorSpec {
                    name: value.name.clone(),
                    dtype: value.dtype.unwrap_or(DType::F32),
                    shape: dims.iter().map(Dim::known).collect(),
                };
                (spec, dims)
            })
            .collect()
    }

    /// Completes the given shapes. An input of a built-in model that is not named gets the size used for its benchmarks,
    /// except for dimensions that it shares with a named input (`batch`). Other models have no shapes of their own, so
    /// theirs are returned unchanged.
    pub fn shapes(&self, given: &Shapes) -> Shapes {
        let mut shapes = given.clone();
        let Some(builtin) = self.builtin() else { return shapes };
        let dims_of = |name: &str| {
            let value = self.graph.inputs.iter().map(|id| self.graph.value(*id)).find(|v| v.name == name);
            value.and_then(|value| value.shape.as_deref()).unwrap_or_default()
        };
        let named: Vec<(&Dim, usize)> = given
            .iter()
            .flat_map(|(name, shape)| dims_of(name).iter().zip(shape.iter().copied()))
            .filter(|(dim, _)| matches!(dim, Dim::Symbol(_)))
            .collect();
        for input in builtin.inputs.iter().filter(|input| !given.contains_key(input.name)) {
            let size = |(at, default): (usize, &usize)| {
                let dim = dims_of(input.name).get(at);
                let shared = dim.and_then(|dim| named.iter().find(|(known, _)| *known == dim));
                shared.map_or(*default, |(_, size)| *size)
            };
            shapes.insert(input.name.to_string(), input.shape.iter().enumerate().map(size).collect());
        }
        shapes
    }

    /// As [`shapes`](Model::shapes), if the inputs in `open` have several shapes each. An input that shares a dimension with
    /// one of them then gets as many shapes.
    pub fn shape_lists(&self, given: &Shapes, open: &OpenShapes) -> (Shapes, OpenShapes) {
        let with = |set: Shapes| self.shapes(&given.clone().into_iter().chain(set).collect());
        let sets: Vec<Shapes> = shape_sets(open).into_iter().map(with).collect();
        let (mut single, mut several) = (Shapes::new(), open.clone());
        for (name, first) in sets.iter().take(1).flatten() {
            // Given in both lists: binding refuses that with the input's name.
            if given.contains_key(name) {
                single.insert(name.clone(), given[name].clone());
                continue;
            }
            if several.contains_key(name) {
                continue;
            }
            let list: Vec<Vec<usize>> = sets.iter().filter_map(|set| set.get(name).cloned()).collect();
            match list.iter().all(|shape| shape == first) {
                true => drop(single.insert(name.clone(), first.clone())),
                false => drop(several.insert(name.clone(), list)),
            }
        }
        (single, several)
    }

    /// Binds the inputs to `shapes`, [completed](Model::shapes), and simplifies the graph: a provider receives the result.
    /// Fails if a dimension is left open; the error names it.
    pub fn bound(&self, shapes: &Shapes) -> Result<Graph> {
        self.bound_for(shapes, &OpenShapes::new())
    }

    /// As [`bound`](Model::bound), but the inputs in `open` keep their open dimensions. Fails if a listed shape does
    /// not match the input, if two lists have different lengths other than 1, or if a set of shapes leaves an input
    /// open.
    pub fn bound_for(&self, shapes: &Shapes, open: &OpenShapes) -> Result<Graph> {
        let (shapes, open) = &self.shape_lists(shapes, open);
        let mut graph = self.graph.clone();
        if open.is_empty() {
            simplify(&mut graph, shapes, OpenDims::Refuse).map_err(|e| self.refused(e))?;
            return Ok(graph);
        }
        if let Some(both) = open.keys().find(|input| shapes.contains_key(*input)) {
            return Err(
                AbiError::invalid(format!("input {both:?} is given both one shape and several")).into()
            );
        }
        let rows = open.values().map(Vec::len).max().unwrap_or(0);
        if let Some((input, list)) = open.iter().find(|(_, list)| ![0, 1, rows].contains(&list.len())) {
            return Err(AbiError::invalid(format!(
                "input {input:?} has {} shapes, but another input has {rows}",
                list.len()
            ))
            .with_hint(
                "list the same number of shapes for each input, or one: the first shapes run together, then the second, and so on",
            )
            .into());
        }
        graph.bind(shapes, OpenDims::Allow).map_err(|e| self.refused(e))?;
        let anything = open.values().any(Vec::is_empty);
        let rest = if anything { OpenDims::Allow } else { OpenDims::Refuse };
        for set in shape_sets(open) {
            graph.clone().bind(&set, rest).map_err(|e| self.refused(e))?;
        }
        simplify(&mut graph, &Shapes::new(), OpenDims::Allow).map_err(|e| self.refused(e))?;
        Ok(graph)
    }

    fn refused(&self, error: GraphError) -> Error {
        match error {
            GraphError::Invalid(why) => {
                let hint = Hint::All(vec![Hint::Inspect, Hint::GiveShape { input: None }]);
                Error::Core(AbiError::invalid(format!("{}: {why}", self.name)).with_hint(hint))
            }
            other => Error::Graph(other),
        }
    }
}

//! A loaded provider, in this process or in a worker.

use crate::{
    Error, Paths, Result, library, memory, paths::private_dir, registry::Confine, runtime,
    suggest::did_you_mean, trust, worker,
};
use sdrun_abi::{
    Capabilities, Device, Error as AbiError, ErrorCode, Hint, Host, InitConfig, Provide, Provider as Driver,
    RuntimeInfo, SandboxSpec,
    ffi::{Plugin, PluginIdentity},
};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// Where a provider's code runs.
#[derive(Clone, Debug, Default)]
pub struct Isolation {
    /// Run it in a worker process even if its manifest does not ask for it.
    pub worker: bool,
    /// The same for a provider with a vendor's runtime, which may crash on a model that is valid.
    pub runtimes_in_worker: bool,
    /// Command prefix that starts the worker, for example another dynamic loader. If it is empty, the loader that the
    /// runtime brings along is used, if any ([`worker::loader_of`]).
    pub loader: Vec<OsString>,
    /// Time limits of calls into the worker.
    pub limits: worker::Limits,
    /// Provider options passed to `init`.
    pub options: BTreeMap<String, String>,
}

impl Isolation {
    /// Runs the provider in a worker process with these limits.
    pub fn worker(limits: worker::Limits) -> Self {
        Isolation { worker: true, limits, ..Self::default() }
    }
}

enum Backend {
    InProcess(Plugin),
    Worker(worker::WorkerProvider),
}

struct Inner {
    provide: Provide,
    runtime: RuntimeInfo,
    backend: Backend,
    init_options: BTreeMap<String, String>,
    paths: Paths,
}

/// A loaded provider. Clones share it. The plugin stays loaded for the lifetime of the process; a worker ends with
/// its last user.
#[derive(Clone)]
pub struct Provider {
    inner: Arc<Inner>,
}

/// A plugin that was initialised in this process, and its arguments.
struct Loaded {
    config: InitConfig,
    plugin: Plugin,
    runtime: RuntimeInfo,
}

/// Keyed by library path: `init` runs once per process.
static LOADED: Mutex<BTreeMap<PathBuf, Loaded>> = Mutex::new(BTreeMap::new());

impl Provider {
    pub(crate) fn open(
        provide: Provide,
        manifest: &Path,
        paths: &Paths,
        isolation: &Isolation,
        confine: &Confine,
        host: &dyn Host,
    ) -> Result<Self> {
        let library = library::path_of(&provide, manifest);
        trust::check_owner(&library).map_err(|why| {
            AbiError::new(ErrorCode::PermissionDenied, format!("will not load {}: {why}", library.display()))
        })?;
        check_hash(&library, &provide.library.sha256)?;
        for (name, expected) in &provide.library.companions {
            check_hash(&library.with_file_name(name), expected)?;
        }
        let runtime_dir = match &provide.runtime {
            None => None,
            Some(spec) => {
                let missing = || Error::Provider { provider: provide.id.clone(), error: absent(spec, paths) };
                let found = runtime::find(spec, paths).ok_or_else(missing)?;
                runtime::check(&found, spec, paths)?;
                Some(found.dir)
            }
        };
        let mut extensions = BTreeMap::new();
        for spec in &provide.extensions {
            if let Some(found) = runtime::find_extension(spec, paths)? {
                runtime::check(&found, spec, paths)?;
                extensions.insert(spec.name.clone(), found.dir);
            }
        }
        let temp_dir = paths.scratch()?;
        let cache_dir = paths.provider_cache(&provide.id);
        let cache_dir = match private_dir(&cache_dir) {
            Ok(()) => Some(cache_dir),
            Err(why) => {
                tracing::warn!("{} caches nothing: {why}", provide.id);
                None
            }
        };
        let config = InitConfig {
            plugin_dir: manifest.parent().unwrap_or(Path::new("/")).to_path_buf(),
            runtime_dir,
            extensions,
            temp_dir,
            links_dir: None,
            cache_dir,
            options: isolation.options.clone(),
        };
        let of = Error::of(&provide.id);
        let (backend, runtime) = if isolation.worker
            || provide.isolate
            || (isolation.runtimes_in_worker && provide.runtime.is_some())
        {
            let loader = match (&isolation.loader[..], &config.runtime_dir) {
                ([], Some(dir)) => worker::loader_of(dir),
                (given, _) => given.to_vec(),
            };
            let sandbox = provide.sandbox.as_ref().filter(|_| !confine.off);
            let worker = worker::WorkerProvider::start(worker::WorkerConfig {
                worker: worker::find_worker()?,
                loader,
                env: Vec::new(),
                plugin: library,
                limits: isolation.limits.clone(),
                scratch: config.temp_dir.clone(),
                sandbox: sandbox.map(|spec| sandbox_of(spec, &config, confine, paths)),
            })
            .map_err(&of)?;
            check_identity(&provide, worker.identity()).map_err(&of)?;
            let runtime = worker.init(&config, host).map_err(&of)?;
            (Backend::Worker(worker), runtime)
        } else {
            let (plugin, runtime) = load_once(&library, &provide, &config, host).map_err(&of)?;
            (Backend::InProcess(plugin), runtime)
        };
        drop(of);
        Ok(Provider {
            inner: Arc::new(Inner {
                provide,
                runtime,
                backend,
                init_options: config.options,
                paths: paths.clone(),
            }),
        })
    }

    /// Id, for example `openvino`.
    pub fn id(&self) -> &str {
        &self.inner.provide.id
    }
    /// Its manifest.
    pub fn manifest(&self) -> &Provide {
        &self.inner.provide
    }
    /// The vendor runtime that was loaded.
    pub fn runtime(&self) -> &RuntimeInfo {
        &self.inner.runtime
    }
    /// The options passed to `init`.
    pub(crate) fn init_options(&self) -> &BTreeMap<String, String> {
        &self.inner.init_options
    }
    /// The user's folders that it was opened with.
    pub fn paths(&self) -> &Paths {
        &self.inner.paths
    }
    /// The worker that it runs in; `None` if it runs in this process.
    pub fn worker(&self) -> Option<&worker::WorkerProvider> {
        match &self.inner.backend {
            Backend::Worker(worker) => Some(worker),
            Backend::InProcess(_) => None,
        }
    }

    /// Whether its worker has ended. All calls of it, its engines and its sessions then fail; open the provider again.
    pub fn has_ended(&self) -> bool {
        self.worker().is_some_and(worker::WorkerProvider::has_ended)
    }

    /// Devices, best first.
    pub fn devices(&self) -> Result<Vec<Device>> {
        self.driver().devices().map_err(Error::of(self.id()))
    }

    /// Finds a device by id, index, or part of its name; `None` is the first device.
    pub fn device(&self, which: Option<&str>) -> Result<Device> {
        let devices = self.devices()?;
        let found = match which {
            None => devices.first(),
            Some(text) => devices
                .iter()
                .find(|d| d.id == text || text.parse() == Ok(d.index))
                .or_else(|| devices.iter().find(|d| d.name.to_lowercase().contains(&text.to_lowercase()))),
        };
        found.cloned().ok_or_else(|| {
            let known: Vec<String> = devices.iter().map(|d| format!("{} ({})", d.id, d.name)).collect();
            let error = match which {
                Some(text) => {
                    let guess = did_you_mean(text, devices.iter().map(|d| d.id.as_str()));
                    let missing = AbiError::not_found(format!(
                        "has no device `{text}` (has: {}){guess}",
                        known.join(", ")
                    ));
                    match self.adds(text) {
                        Some(runtime) => missing.with_hint(Hint::Install { runtime }),
                        None => missing,
                    }
                }
                None => AbiError::not_found("found no device on this machine"),
            };
            Error::of(self.id())(error)
        })
    }

    /// The extension that adds devices like `webgpu:0`: it is called after the first part, like `onnxruntime-webgpu`.
    fn adds(&self, device: &str) -> Option<String> {
        let class = device.split_once(':')?.0;
        let mut names = self.inner.provide.extensions.iter().map(|spec| &spec.name);
        names.find(|name| name.strip_suffix(class).is_some_and(|rest| rest.ends_with('-'))).cloned()
    }

    /// As [`device`](Provider::device), for running: fails if the hardware is not in this machine.
    pub fn present_device(&self, which: Option<&str>) -> Result<Device> {
        let device = self.device(which)?;
        match &device.absent {
            None => Ok(device),
            Some(why) => Err(Error::of(self.id())(
                AbiError::precondition(why.clone())
                    .with_hint("engines can be built here and run where the hardware is"),
            )),
        }
    }

    /// The provider's capabilities on a device.
    pub fn capabilities(&self, device: &Device) -> Result<Capabilities> {
        self.driver().capabilities(&device.id).map_err(Error::of(self.id()))
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        match &self.inner.backend {
            Backend::InProcess(plugin) => plugin,
            Backend::Worker(worker) => worker,
        }
    }
}

impl std::fmt::Debug for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Provider({}, runtime {})", self.id(), self.inner.runtime.version)
    }
}

fn load_once(
    library: &Path,
    provide: &Provide,
    config: &InitConfig,
    host: &dyn Host,
) -> sdrun_abi::Result<(Plugin, RuntimeInfo)> {
    let mut loaded = LOADED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(Loaded { config: first, plugin, runtime }) = loaded.get(library) {
        if first.runtime_dir != config.runtime_dir {
            return Err(AbiError::precondition(format!(
                "this process has loaded the runtime from {} already and cannot load another one from {}",
                show(&first.runtime_dir),
                show(&config.runtime_dir)
            ))
            .with_hint("restart the program, or run the provider isolated"));
        }
        if (&first.options, &first.extensions) != (&config.options, &config.extensions) {
            return Err(AbiError::precondition(format!(
                "this process has initialised the provider with the options {:?} and the extensions {:?} already and cannot \
                 use {:?} and {:?}",
                first.options, first.extensions, config.options, config.extensions
            ))
            .with_hint("use the same ones, restart the program, or run the provider isolated"));
        }
        return Ok((*plugin, runtime.clone()));
    }
    let plugin = library::load(library)?;
    check_identity(provide, &plugin.identity())?;
    let runtime = plugin.init(config, host)?;
    let entry = Loaded { config: config.clone(), plugin, runtime: runtime.clone() };
    loaded.insert(library.to_path_buf(), entry);
    Ok((plugin, runtime))
}

/// A confined worker may read files of at least this size itself.
const SHARED_FROM: u64 = 1 << 20;

/// What a worker may do, given how its provider is initialised.
fn sandbox_of(spec: &SandboxSpec, config: &InitConfig, confine: &Confine, paths: &Paths) -> worker::Sandbox {
    let real = |path: &PathBuf| dunce::canonicalize(path).ok();
    let folders = config.extensions.values().chain(&config.runtime_dir).chain([&config.plugin_dir]);
    let mut readable: Vec<PathBuf> = folders.filter_map(real).collect();
    readable.extend(worker::driver_folders());
    readable.extend(confine.models.iter().chain([&paths.models()]).filter_map(real));
    // Large files that this command has opened. Small ones, which may be settings and keys, come through shared memory.
    let large = |path: &PathBuf| path.metadata().is_ok_and(|meta| meta.len() >= SHARED_FROM);
    readable.extend(sdrun_files::inputs().into_iter().filter(large));
    let devices = spec.devices.iter().filter_map(|pattern| glob::glob(pattern).ok()).flatten().flatten();
    worker::Sandbox {
        readable,
        writable: config.cache_dir.iter().filter_map(real).collect(),
        devices: devices.collect(),
        linkable: None,
        memory: memory::total(),
    }
}

/// Checks that a plugin matches its manifest.
fn check_identity(provide: &Provide, told: &PluginIdentity) -> sdrun_abi::Result<()> {
    let pairs = [
        ("id", &provide.id, &told.id),
        ("version", &provide.version, &told.version),
        ("build id", &provide.build_id, &told.build_id),
    ];
    match pairs.into_iter().find(|(_, manifest, plugin)| manifest != plugin) {
        None => Ok(()),
        Some((what, manifest, plugin)) => Err(AbiError::precondition(format!(
            "the plugin's {what} is {plugin:?}, its manifest says {manifest:?}"
        ))
        .with_hint("plugin and manifest do not belong together: install the plugin again")),
    }
}

fn show(dir: &Option<PathBuf>) -> String {
    dir.as_ref().map_or("nowhere".into(), |d| d.display().to_string())
}

fn absent(spec: &sdrun_abi::RuntimeSpec, paths: &Paths) -> AbiError {
    let looked: Vec<String> = runtime::candidates(spec, paths)
        .iter()
        .map(|c| format!("{} ({})", c.dir.display(), c.origin))
        .collect();
    AbiError::precondition(format!(
        "the {} runtime is not installed (looked in: {})",
        spec.name,
        if looked.is_empty() { "the system's library folders".into() } else { looked.join(", ") }
    ))
    .with_hint(spec.how_to_get())
}

/// Compares a library with the hash in its manifest. Detects damage (a half-copied file), not forgery.
fn check_hash(library: &Path, expected: &str) -> Result<()> {
    if expected.is_empty() {
        return Ok(());
    }
    let found = runtime::sha256(library)?;
    if found == expected {
        return Ok(());
    }
    Err(AbiError::new(
        ErrorCode::DataLoss,
        format!(
            "{} is not the file its manifest describes (SHA-256 {found}, expected {expected})",
            library.display()
        ),
    )
    .with_file(library)
    .with_hint("the plugin is damaged or half updated: install it again")
    .into())
}

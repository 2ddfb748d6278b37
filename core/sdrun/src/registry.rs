//! Finds the available providers: their manifests, in order, with the reason for each skipped one. Loads no code.

use crate::{
    Error, Isolation, Paths, Provider, Result, TracingHost, library, runtime, suggest::did_you_mean, trust,
};
use sdrun_abi::{ABI_MAJOR, ABI_MINOR, Error as AbiError, Hint, Host, Manifest, Provide};
use sdrun_files::{Links, read_small};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// How to look for providers.
#[derive(Clone, Debug, Default)]
pub struct Discovery {
    /// Manifest files, or folders with manifests, that precede everything else.
    pub provider_paths: Vec<PathBuf>,
    /// The user's folders; `None` uses [`Paths::default_for_user`].
    pub paths: Option<Paths>,
    /// Ids of preferred providers, best first; they precede all others.
    pub order: Vec<String>,
    /// What workers may do.
    pub confine: Confine,
}

/// Limits for workers whose runtime works in a sandbox ([`Provide::sandbox`]). On Linux, they reach no network, start no programs, and read
/// only the system's libraries, their own folders and the models.
#[derive(Clone, Debug, Default)]
pub struct Confine {
    /// Files and folders with models and weights. Weights in other files are copied to a worker through shared memory, which takes longer.
    pub models: Vec<PathBuf>,
    /// Give workers all rights of the user, for a driver that does not work otherwise.
    pub off: bool,
}

/// A manifest that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// Id of the provider, or the file's name if the manifest cannot be read.
    pub id: String,
    /// The manifest file.
    pub manifest_path: PathBuf,
    /// What led to it: the program, an environment variable, or a folder.
    pub origin: String,
    /// The content of the manifest, if readable.
    pub provide: Option<Provide>,
    /// Why this one is not used; `None` if it is.
    pub skipped: Option<String>,
}

/// The providers of this machine. Cheap to create; see [`open`](Registry::open) for loading one.
#[derive(Clone, Debug)]
pub struct Registry {
    paths: Paths,
    entries: Vec<Entry>,
    order: Vec<String>,
    confine: Confine,
}

impl Registry {
    /// Finds providers in the default places.
    pub fn discover() -> Result<Self> {
        Self::discover_with(&Discovery::default())
    }

    /// Finds providers. Order: `provider_paths`; then `SDRUN_PROVIDER_FILES`, which replaces the rest; else
    /// `SDRUN_ADD_PROVIDER_FILES`, `providers` beside the executable, the user's data folder, system folders.
    /// The first manifest of an id wins. `SDRUN_PROVIDERS_SELECT` and `SDRUN_PROVIDERS_DISABLE` are lists of
    /// patterns. Environment variables are ignored when the process is elevated; the working directory never counts.
    pub fn discover_with(discovery: &Discovery) -> Result<Self> {
        let paths = match &discovery.paths {
            Some(paths) => paths.clone(),
            None => Paths::default_for_user()?,
        };
        let mut entries: Vec<Entry> = Vec::new();
        for (place, origin) in places(discovery, &paths) {
            for manifest in manifests_in(&place) {
                entries.push(examine(manifest, &origin, &entries));
            }
        }
        let confine = discovery.confine.clone();
        Ok(Registry { paths, entries, order: discovery.order.clone(), confine })
    }

    /// Everything that was found, in order, including skipped manifests.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Usable providers: those of [`Discovery::order`] first, then by priority.
    pub fn usable(&self) -> Vec<&Provide> {
        let mut usable: Vec<&Provide> =
            self.entries.iter().filter(|e| e.skipped.is_none()).filter_map(|e| e.provide.as_ref()).collect();
        let place = |id: &str| self.order.iter().position(|known| known == id).unwrap_or(usize::MAX);
        usable.sort_by_key(|p| (place(&p.id), -p.priority, p.id.clone()));
        usable
    }

    /// The ids of [`Discovery::order`].
    pub(crate) fn order(&self) -> &[String] {
        &self.order
    }

    /// The usable provider whose fp32 results are the reference.
    pub fn reference(&self) -> Option<&Provide> {
        self.usable().into_iter().find(|p| p.reference)
    }

    /// What workers may do.
    pub fn confine(&self) -> &Confine {
        &self.confine
    }

    /// The user's folders.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// The usable entry of `id`; the error lists the available ids.
    pub fn entry(&self, id: &str) -> Result<&Entry> {
        if let Some(entry) = self.entries.iter().find(|e| e.id == id && e.skipped.is_none()) {
            return Ok(entry);
        }
        if let Some(entry) = self.entries.iter().find(|e| e.id == id) {
            let why = entry.skipped.as_deref().unwrap_or_default();
            return Err(AbiError::precondition(format!("provider `{id}` is not usable: {why}"))
                .with_file(&entry.manifest_path)
                .with_hint(Hint::ListProviders)
                .into());
        }
        let known: Vec<&str> = self.usable().iter().map(|p| p.id.as_str()).collect();
        let guess = did_you_mean(id, known.iter().copied());
        Err(AbiError::not_found(format!("there is no provider `{id}` (found: {}){guess}", list(&known)))
            .with_hint(Hint::ListProviders)
            .into())
    }

    /// Loads a provider and its runtime: in this process, or in a worker if `isolation` or the manifest asks for it.
    /// A missing runtime is an immediate error that says how to install it.
    pub fn open(&self, id: &str, isolation: &Isolation) -> Result<Provider> {
        self.open_with(id, isolation, &TracingHost)
    }

    /// As [`open`](Registry::open); `host` receives what the provider logs while it starts.
    pub fn open_with(&self, id: &str, isolation: &Isolation, host: &dyn Host) -> Result<Provider> {
        let entry = self.entry(id)?;
        let provide =
            entry.provide.clone().ok_or_else(|| AbiError::internal("a usable entry has a manifest"))?;
        Provider::open(provide, &entry.manifest_path, &self.paths, isolation, &self.confine, host)
    }
}

fn list(items: &[impl AsRef<str>]) -> String {
    if items.is_empty() {
        "none".into()
    } else {
        items.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
    }
}

/// Files and folders to search, in order, each with its origin.
fn places(discovery: &Discovery, paths: &Paths) -> Vec<(PathBuf, String)> {
    let mut places: Vec<(PathBuf, String)> =
        discovery.provider_paths.iter().map(|p| (p.clone(), "given by the program".to_string())).collect();
    let split = |name: &str| -> Vec<(PathBuf, String)> {
        trust::environment(name)
            .map(|v| std::env::split_paths(&v).map(|p| (p, name.to_string())).collect())
            .unwrap_or_default()
    };
    let only = split("SDRUN_PROVIDER_FILES");
    if !only.is_empty() {
        places.extend(only);
        return places;
    }
    places.extend(split("SDRUN_ADD_PROVIDER_FILES"));
    if let Some(dir) = std::env::current_exe()
        .ok()
        .and_then(|e| Some(dunce::canonicalize(e).ok()?.parent()?.join("providers")))
    {
        places.push((dir, "beside the executable".into()));
    }
    places.push((paths.providers(), "user data folder".into()));
    #[cfg(unix)]
    for dir in ["/usr/local/lib/sdrun/providers", "/usr/lib/sdrun/providers"] {
        places.push((dir.into(), "system folder".into()));
    }
    places
}

/// The manifests at a place: the file itself, or those in the folder and its sub-folders, sorted.
fn manifests_in(place: &Path) -> Vec<PathBuf> {
    if place.is_file() || (!place.exists() && place.extension().is_some()) {
        return vec![place.to_path_buf()];
    }
    let children = |dir: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(dir).map(|d| d.filter_map(|e| Some(e.ok()?.path())).collect()).unwrap_or_default()
    };
    let mut found = Vec::new();
    for child in children(place) {
        if Manifest::is_manifest(&child) {
            found.push(child);
        } else if child.is_dir() {
            found.extend(children(&child).into_iter().filter(|p| Manifest::is_manifest(p)));
        }
    }
    found.sort();
    found
}

/// Reads and checks the manifest of a provider, a regular file of at most 1 MiB.
///
/// # Errors
/// Those of [`sdrun_files::read_small`]. `InvalidArgument` if the text is not a manifest that this version reads.
pub fn read_manifest(file: &Path) -> sdrun_abi::Result<Manifest> {
    let bytes = read_small(file, Links::Follow, 1 << 20)?;
    Manifest::parse(&String::from_utf8_lossy(&bytes))
        .map_err(|why| AbiError::invalid(format!("the manifest {} {why}", file.display())).with_file(file))
}

/// Reads a manifest and decides whether to use it.
fn examine(path: PathBuf, origin: &str, before: &[Entry]) -> Entry {
    let path = std::path::absolute(&path).unwrap_or(path);
    let fallback = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let manifest = trust::check_owner(&path).and_then(|()| read_manifest(&path).map_err(|e| e.to_string()));
    let (provide, skipped) = match manifest {
        Ok(m) => {
            let why = why_not(&m.provider, &path, before);
            (Some(m.provider), why)
        }
        Err(why) => (None, Some(why)),
    };
    let id = provide.as_ref().map_or(fallback, |p| p.id.clone());
    Entry { id, manifest_path: path, origin: origin.to_string(), provide, skipped }
}

fn why_not(provide: &Provide, manifest: &Path, before: &[Entry]) -> Option<String> {
    if let Some(first) = before.iter().find(|e| e.id == provide.id && e.skipped.is_none()) {
        return Some(format!("{} came first", first.manifest_path.display()));
    }
    let matches = |variable: &str| -> Option<bool> {
        let patterns = trust::environment(variable)?.into_string().ok()?;
        Some(
            patterns
                .split(',')
                .filter_map(|p| glob::Pattern::new(p.trim()).ok())
                .any(|p| p.matches(&provide.id)),
        )
    };
    if matches("SDRUN_PROVIDERS_SELECT") == Some(false) {
        return Some("not selected by SDRUN_PROVIDERS_SELECT".into());
    }
    if matches("SDRUN_PROVIDERS_DISABLE") == Some(true) {
        return Some("disabled by SDRUN_PROVIDERS_DISABLE".into());
    }
    let library = &provide.library;
    if library.abi_major != ABI_MAJOR || library.abi_min_minor > ABI_MINOR {
        return Some(format!(
            "needs ABI {}.{}; this sdrun speaks {ABI_MAJOR}.{ABI_MINOR}",
            library.abi_major, library.abi_min_minor
        ));
    }
    if !library.target.is_empty() && library.target != env!("SDRUN_TARGET") {
        return Some(format!("built for {}; this is {}", library.target, env!("SDRUN_TARGET")));
    }
    let file = library::path_of(provide, manifest);
    if !file.is_file() {
        return Some(format!("its library {} is missing", file.display()));
    }
    trust::check_owner(&file).err()
}

/// State of a provider's runtime, without loading anything.
#[derive(Clone, Debug, Serialize)]
pub struct RuntimeStatus {
    /// Runtime name; `None` if the provider brings its own.
    pub name: Option<String>,
    /// Version that the plugin was tested with.
    pub version: Option<String>,
    /// The folder that it would be loaded from.
    pub found: Option<runtime::Candidate>,
}

impl Registry {
    /// Whether the runtime of `provide` is on this machine (found, not yet loaded).
    pub fn runtime_status(&self, provide: &Provide) -> RuntimeStatus {
        match &provide.runtime {
            None => RuntimeStatus { name: None, version: None, found: None },
            Some(spec) => RuntimeStatus {
                name: Some(spec.name.clone()),
                version: Some(spec.version.clone()),
                found: runtime::find(spec, &self.paths),
            },
        }
    }

    /// The runtimes and extensions of all usable providers, and where they would be loaded from.
    pub fn runtimes(&self) -> Vec<(&sdrun_abi::RuntimeSpec, Option<runtime::Candidate>)> {
        let mut all: Vec<(&sdrun_abi::RuntimeSpec, Option<runtime::Candidate>)> = Vec::new();
        for provide in self.usable() {
            let runtimes = provide.runtime.iter().map(|spec| (spec, runtime::find(spec, &self.paths)));
            let extensions = provide.extensions.iter().map(|spec| {
                // A variable that names a wrong folder is an error of those who load the provider.
                (spec, runtime::find_extension(spec, &self.paths).ok().flatten())
            });
            for (spec, found) in runtimes.chain(extensions) {
                if all.iter().all(|(known, _)| known.name != spec.name) {
                    all.push((spec, found));
                }
            }
        }
        all
    }

    /// A runtime or an extension by name, for `runtime install` and `runtime remove`.
    pub fn runtime(&self, name: &str) -> Result<&sdrun_abi::RuntimeSpec> {
        let usable = self.usable().into_iter();
        let all: Vec<&sdrun_abi::RuntimeSpec> =
            usable.flat_map(|provide| provide.runtime.iter().chain(&provide.extensions)).collect();
        all.iter().find(|r| r.name == name).copied().ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|r| r.name.as_str()).collect();
            Error::Core(AbiError::not_found(format!(
                "no provider uses a runtime called `{name}` (known: {}){}",
                list(&known),
                did_you_mean(name, known.iter().copied())
            )))
        })
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_or_an_endless_file_in_place_of_a_manifest_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, long) =
            (dir.path().join("sdrun-provider-a.json"), dir.path().join("sdrun-provider-b.json"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::fs::File::create(&long).unwrap().set_len(2 << 20).unwrap();
        let found = |path: &Path| examine(path.to_path_buf(), "here", &[]).skipped.unwrap();
        assert!(found(&pipe).contains("regular file"), "{}", found(&pipe));
        assert!(found(&long).contains("larger than 1048576 bytes"), "{}", found(&long));
    }
}

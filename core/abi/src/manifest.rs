use crate::{DeviceKind, Hint};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// The JSON file `sdrun-provider-<id>.json` beside a plugin library: everything that a host needs to know before it
/// decides to load code.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this format, `1.x.y`.
    pub file_format_version: String,
    /// The provider.
    pub provider: Provide,
}

/// The provider part of a [`Manifest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provide {
    /// Short name for use on command lines: lower-case letters, digits and `-`.
    pub id: String,
    /// One line for lists.
    pub summary: String,
    /// Who publishes the plugin.
    pub vendor: String,
    /// Version of the plugin.
    pub version: String,
    /// Changes whenever the plugin's code changes; part of every cache key.
    pub build_id: String,
    /// Priority when no provider is named; higher is preferred.
    #[serde(default)]
    pub priority: i32,
    /// Priority on devices of a kind (`cpu`, `gpu`, `npu`), if it differs from `priority`. A host prefers the provider with the
    /// highest one, unless it has measured them or its user wishes otherwise. It ignores kinds that it does not know.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub priorities: BTreeMap<String, i32>,
    /// The plugin library.
    pub library: Library,
    /// The vendor runtime that it drives; absent if the plugin brings its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<RuntimeSpec>,
    /// Further libraries, for more devices. A host passes the folders of those that are installed to `init`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<RuntimeSpec>,
    /// Its fp32 results are the reference for `verify` and `bench`.
    #[serde(default)]
    pub reference: bool,
    /// Always run in a worker process (the runtime is known to abort, or needs another dynamic loader).
    #[serde(default)]
    pub isolate: bool,
    /// What its runtime needs in a sandbox. `None` if nobody has tried the runtime in one; its worker then has all rights of the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSpec>,
}

/// What a runtime uses besides its own libraries, those of the system, models, [`temp_dir`](crate::InitConfig::temp_dir) and
/// [`cache_dir`](crate::InitConfig::cache_dir). It works without a network and starts no programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Paths of device files and of folders of them, with `*` for any run of characters.
    #[serde(default)]
    pub devices: Vec<String>,
}

/// The library of a plugin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Library {
    /// Path relative to the manifest; must stay inside the manifest's folder.
    pub path: PathBuf,
    /// SHA-256 of the file, lower-case hex. Integrity, not authenticity.
    pub sha256: String,
    /// Names of the other libraries that come with the plugin, in the same folder, and their SHA-256.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub companions: BTreeMap<String, String>,
    /// Target triple that it was built for.
    pub target: String,
    /// The [`ABI_MAJOR`](crate::ABI_MAJOR) it implements.
    pub abi_major: u16,
    /// Lowest [`ABI_MINOR`](crate::ABI_MINOR) of a host that it works with.
    #[serde(default)]
    pub abi_min_minor: u16,
}

/// A vendor runtime, or an extension of one, and where to get it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuntimeSpec {
    /// Name, for example `openvino`.
    pub name: String,
    /// The version that this plugin was tested with and installs.
    pub version: String,
    /// Environment variable that names the folder of the runtime's libraries.
    pub env: String,
    /// File name patterns (`*` matches any run of characters). A folder with a matching file holds the runtime.
    pub library_names: Vec<String>,
    /// How to install it with `pip`; absent if that is not possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pip: Option<PipPackage>,
    /// How a user gets it if it cannot be installed that way: sentences for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_hand: Option<String>,
}

impl Provide {
    /// The priority on devices of this kind.
    pub fn priority_on(&self, kind: DeviceKind) -> i32 {
        self.priorities.get(kind.name()).copied().unwrap_or(self.priority)
    }
    /// The highest priority on any kind of device.
    pub fn highest_priority(&self) -> i32 {
        self.priorities.values().copied().chain([self.priority]).max().unwrap_or(self.priority)
    }
}

impl RuntimeSpec {
    /// What to do if the runtime is missing or too old.
    pub fn how_to_get(&self) -> Hint {
        match &self.pip {
            Some(_) => {
                Hint::AnyOf(vec![Hint::Install { runtime: self.name.clone() }, self.own_folder().into()])
            }
            None => self.without_a_package(),
        }
    }

    /// What to do if there is no package of the runtime for this machine.
    pub fn without_a_package(&self) -> Hint {
        let own = self.own_folder();
        Hint::Text(match &self.by_hand {
            Some(words) => format!("{words}; if it is still not found, {own}"),
            None => format!("install it the vendor's way and {own}"),
        })
    }

    fn own_folder(&self) -> String {
        format!("set {} to the folder of its libraries", self.env)
    }
}

/// A runtime that is published as a Python package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipPackage {
    /// Package name.
    pub package: String,
    /// Version of the package, if it is not the version of what it contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Patterns on paths relative to the wheel's root: matching files are kept, all others are deleted.
    pub keep: Vec<String>,
    /// The same, for what only graphics cards need. A user asks for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<String>,
    /// Folder of the libraries inside the installed package.
    pub library_dir: PathBuf,
    /// One entry per platform.
    pub wheels: Vec<Wheel>,
    /// Other packages whose libraries it links. What is kept in their `library_dir` and below is moved to the one of this package, where
    /// the system's loader finds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<PipPackage>,
}

/// One wheel of a [`PipPackage`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wheel {
    /// `std::env::consts::OS` of the host.
    pub os: String,
    /// `std::env::consts::ARCH` of the host.
    pub arch: String,
    /// pip's `--python-version`, without dots.
    pub python: String,
    /// pip's `--platform` tags.
    pub platforms: Vec<String>,
    /// SHA-256 of the wheel, lower-case hex.
    pub sha256: String,
    /// Bytes to download.
    pub download_bytes: u64,
    /// Bytes on disk after installation, kept files only.
    pub installed_bytes: u64,
    /// Further bytes for graphics cards.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpu_bytes: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Manifest {
    /// File name of the manifest of provider `id`.
    pub fn file_name(id: &str) -> String {
        format!("sdrun-provider-{id}.json")
    }

    /// Whether a file has the name of a manifest.
    pub fn is_manifest(path: &Path) -> bool {
        path.file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| n.starts_with("sdrun-provider-") && n.ends_with(".json"))
    }

    /// Parses and checks the text of a manifest: format version, id, library path (relative, inside its folder).
    ///
    /// # Errors
    /// What is wrong, as a sentence without its subject.
    pub fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            file_format_version: String,
        }
        let version: Version = serde_json::from_str(text).map_err(|e| format!("is not a manifest: {e}"))?;
        if version.file_format_version.split('.').next() != Some("1") {
            return Err(format!(
                "has format version {:?}; this sdrun reads version 1",
                version.file_format_version
            ));
        }
        let manifest: Manifest = serde_json::from_str(text).map_err(|e| format!("is not a manifest: {e}"))?;
        let p = &manifest.provider;
        let id_ok = !p.id.is_empty()
            && p.id.len() <= 40
            && p.id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if !id_ok {
            return Err(format!("provider id {:?} must be lower-case letters, digits and `-`", p.id));
        }
        let inside = p
            .library
            .path
            .components()
            .all(|c| matches!(c, std::path::Component::Normal(_) | std::path::Component::CurDir));
        if !inside || p.library.path.as_os_str().is_empty() {
            return Err(format!("library path {:?} must stay inside the manifest's folder", p.library.path));
        }
        if let Some(name) =
            p.library.companions.keys().find(|name| Path::new(name).file_name() != Some(name.as_ref()))
        {
            return Err(format!("the companion {name:?} of the library must be the name of a file"));
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"file_format_version":"1.0.0","provider":{"id":"x","summary":"s","vendor":"v","version":"0.1.0",
        "build_id":"b","library":{"path":"./lib.so","sha256":"","target":"t","abi_major":1},"unknown_field":3}}"#;

    #[test]
    fn accepts_unknown_fields() {
        assert_eq!(Manifest::parse(GOOD).unwrap().provider.id, "x");
    }

    #[test]
    fn priorities_by_kind_are_optional_and_unknown_kinds_do_no_harm() {
        let old =
            Manifest::parse(&GOOD.replace("\"build_id\"", "\"priority\":7,\"build_id\"")).unwrap().provider;
        assert_eq!((old.priority_on(DeviceKind::Cpu), old.priority_on(DeviceKind::Gpu)), (7, 7));
        let new = "\"priority\":7,\"priorities\":{\"gpu\":90,\"quantum\":3},\"build_id\"";
        let new = Manifest::parse(&GOOD.replace("\"build_id\"", new)).unwrap().provider;
        assert_eq!((new.priority_on(DeviceKind::Cpu), new.priority_on(DeviceKind::Gpu)), (7, 90));
        assert_eq!((new.priority_on(DeviceKind::Other), new.highest_priority()), (7, 90));
    }

    #[test]
    fn refuses_invalid_manifests() {
        for (from, to, expect) in [
            ("1.0.0", "2.0.0", "format version"),
            ("./lib.so", "../lib.so", "inside"),
            ("./lib.so", "/lib.so", "inside"),
            ("\"id\":\"x\"", "\"id\":\"X/..\"", "lower-case"),
            ("\"vendor\":\"v\",", "", "vendor"),
            ("\"abi_major\"", "\"companions\":{\"../x.so\":\"\"},\"abi_major\"", "companion"),
        ] {
            let error = Manifest::parse(&GOOD.replace(from, to)).unwrap_err();
            assert!(error.contains(expect), "{error}");
        }
    }
}

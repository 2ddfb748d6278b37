//! Compiles the provider in C (`examples/provider-c`) as plugins of several ABI versions. Included by tests.

use sha2::{Digest, Sha256};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// The header and the table to use.
#[allow(dead_code, reason = "each test uses a part")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Version {
    /// The header in `include/`.
    Current,
    /// The header of version 1.0.
    First,
    /// A version that this host does not know yet.
    Newer,
}

/// Compiles a plugin into `dir` and writes its manifest; returns both.
pub(crate) fn compile(version: Version, dir: &Path) -> (PathBuf, PathBuf) {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|p| p.join("include").is_dir()).unwrap();
    let example = root.join("examples/provider-c");
    let versions = root.join("tests/mock/versions");
    let library = dir.join(format!("libsdrun_provider_c{}", std::env::consts::DLL_SUFFIX));
    let include = match version {
        Version::First => versions.join("1.0"),
        Version::Current | Version::Newer => root.join("include"),
    };
    let cc = || {
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-fvisibility=hidden"]);
        cc.arg("-DPROVIDER_BUILD_ID=\"test\"").arg("-I").arg(&include).arg("-I").arg(&example);
        cc
    };
    let entry = dir.join("provider.o");
    let mut compile = cc();
    if let Version::Newer = version {
        // `newer.c` exports the symbol and calls the example's own entry point under another name.
        compile.arg("-Dsdrun_plugin_query_v1=known_query");
    }
    run(compile.arg("-c").arg(example.join("provider.c")).arg("-o").arg(&entry));
    let mut link = cc();
    link.arg("-shared").arg(entry);
    for source in ["errors.c", "graph.c", "json.c", "run.c", "session.c"] {
        link.arg(example.join(source));
    }
    if let Version::Newer = version {
        link.arg(versions.join("newer.c"));
    }
    run(link.arg("-o").arg(&library));
    let manifest = dir.join("sdrun-provider-c.json");
    let text = std::fs::read_to_string(example.join("manifest.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["provider"]["build_id"] = "test".into();
    json["provider"]["library"]["path"] = library.file_name().unwrap().to_str().into();
    let digest = Sha256::digest(std::fs::read(&library).unwrap());
    json["provider"]["library"]["sha256"] =
        digest.iter().map(|b| format!("{b:02x}")).collect::<String>().into();
    json["provider"]["library"]["target"] = host_triple().into();
    std::fs::write(&manifest, json.to_string()).unwrap();
    (library, manifest)
}

/// The target triple of this machine, as manifests name it.
fn host_triple() -> String {
    let rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .arg("-vV")
        .output()
        .unwrap();
    let text = String::from_utf8(rustc.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_string()
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {words}");
}

/// Compiles the current plugin into a new folder, with permissions that sdrun trusts. Returns the folder and the manifest.
#[allow(dead_code, reason = "not every test target uses it")]
pub(crate) fn installed() -> (tempfile::TempDir, PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (library, manifest) = compile(Version::Current, dir.path());
    for file in [&library, &manifest] {
        std::fs::set_permissions(file, PermissionsExt::from_mode(0o755)).unwrap();
    }
    (dir, manifest)
}

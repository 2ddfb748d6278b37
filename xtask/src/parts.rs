//! What a release is made of, in two files beside the programs: `sdrun.cdx.json`, a bill of materials in CycloneDX's format, and
//! `THIRD-PARTY.txt` with the licences of everything that is not ours.

use crate::workspace::{Workspace, output};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

/// Where ggml's sources come from. Cargo does not compile this package; the provider's build script does.
const SOURCES: &str = "llama-cpp-sys-2";
/// Where this package has the licence of these sources.
const SOURCES_LICENCE: &str = "llama.cpp/LICENSE";
/// How names of files with licences begin.
const LICENCES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
/// Data in the programs that is not ours: what, from where, its licence and its owner.
const DATA: [(&str, &str, &str, &str); 1] = [(
    "the merges of CLIP's tokenizer",
    "https://github.com/openai/CLIP",
    "MIT",
    "Copyright (c) 2021 OpenAI",
)];

/// A package that is part of a release.
struct Part {
    name: String,
    version: String,
    licence: String,
    repository: String,
    sha256: Option<String>,
    /// Texts of its licences, with the names of their files.
    texts: BTreeMap<String, String>,
}

/// Writes both files into a folder.
pub(crate) fn describe(workspace: &Workspace, target: &str, folder: &Path) -> Result<()> {
    let parts = parts(workspace, target)?;
    let bill = serde_json::to_string_pretty(&bill(&parts))? + "\n";
    for (name, text) in [("sdrun.cdx.json", bill), ("THIRD-PARTY.txt", licences(&parts))] {
        let file = folder.join(name);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// The packages that programs and plugins link, without those that only take part in compiling.
fn parts(workspace: &Workspace, target: &str) -> Result<Vec<Part>> {
    let metadata = |more: &[&str]| -> Result<Value> {
        let mut cargo = workspace.cargo();
        cargo.args(["metadata", "--format-version=1", "--locked"]).args(more);
        Ok(serde_json::from_str(&output(&mut cargo)?)?)
    };
    let here = metadata(&["--filter-platform", target])?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages: BTreeMap<String, Value> =
        list(&here["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&here["resolve"]["nodes"]).into_iter().map(|node| (text(&node["id"]), node)).collect();
    let shipped = |name: &str| matches!(name, "sdrun-cli" | "sdrun") || name.starts_with("sdrun-provider-");
    let mut left: Vec<&String> =
        packages.iter().filter(|(_, package)| shipped(&text(&package["name"]))).map(|(id, _)| id).collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = left.pop() {
        if !linked.insert(id) {
            continue;
        }
        for dependency in nodes[id]["deps"].as_array().into_iter().flatten() {
            let links = list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            if let Some((id, package)) = packages.get_key_value(&text(&dependency["pkg"]))
                && links
                && !is_macro(package)
            {
                left.push(id);
            }
        }
    }
    let everywhere = metadata(&[])?;
    let sources = list(&everywhere["packages"]).into_iter().find(|package| package["name"] == SOURCES);
    let sources = sources.with_context(|| format!("Cargo.lock has no {SOURCES}"))?;
    let lock = fs::read_to_string(workspace.root.join("Cargo.lock"))?;
    let foreign = linked.into_iter().map(|id| &packages[id]).filter(|package| !package["source"].is_null());
    let mut parts =
        foreign.chain([&sources]).map(|package| part(package, &lock)).collect::<Result<Vec<Part>>>()?;
    parts.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    ensure!(parts.len() > 50, "only {} packages: cargo metadata was misread", parts.len());
    Ok(parts)
}

/// Whether a package runs while others are compiled.
fn is_macro(package: &Value) -> bool {
    let kinds =
        package["targets"].as_array().into_iter().flatten().flat_map(|target| target["kind"].as_array());
    kinds.flatten().any(|kind| kind == "proc-macro")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

fn part(package: &Value, lock: &str) -> Result<Part> {
    let [name, version, licence, repository, manifest] =
        ["name", "version", "license", "repository", "manifest_path"].map(|key| text(&package[key]));
    let folder = Path::new(&manifest).parent().context("a manifest lies in a folder")?;
    let mut texts = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && LICENCES.iter().any(|start| file.to_uppercase().starts_with(start)) {
            texts.insert(file, String::from_utf8_lossy(&fs::read(&path)?).into_owned());
        }
    }
    if name == SOURCES {
        texts.insert(SOURCES_LICENCE.into(), fs::read_to_string(folder.join(SOURCES_LICENCE))?);
    }
    let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
    let sha256 = lock.split(&entry).nth(1).and_then(|rest| {
        let line = rest.lines().take(2).find_map(|line| line.strip_prefix("checksum = \""))?;
        Some(line.trim_end_matches('"').to_string())
    });
    Ok(Part { name, version, licence, repository, sha256, texts })
}

/// The bill of materials, by <https://cyclonedx.org/docs/1.6/json/>. It has no time and no serial number: two builds are equal.
fn bill(parts: &[Part]) -> Value {
    let purl = |part: &Part| format!("pkg:cargo/{}@{}", part.name, part.version);
    let component = |part: &Part| {
        let mut component = json!({
            "type": "library",
            "bom-ref": purl(part),
            "name": part.name,
            "version": part.version,
            "purl": purl(part),
            "licenses": [{ "expression": part.licence.replace('/', " OR ") }],
        });
        if let Some(sha256) = &part.sha256 {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sha256 }]);
        }
        if !part.repository.is_empty() {
            component["externalReferences"] = json!([{ "type": "vcs", "url": part.repository }]);
        }
        component
    };
    let data = DATA.iter().map(|(what, url, licence, _)| {
        json!({
            "type": "data",
            "name": what,
            "licenses": [{ "expression": licence }],
            "externalReferences": [{ "type": "vcs", "url": url }],
        })
    });
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": { "component": {
            "type": "application",
            "name": "sdrun",
            "version": env!("CARGO_PKG_VERSION"),
            "licenses": [{ "expression": env!("CARGO_PKG_LICENSE") }],
        } },
        "components": parts.iter().map(component).chain(data).collect::<Vec<_>>(),
    })
}

/// Each text once, after the packages that it is of.
fn licences(parts: &[Part]) -> String {
    let mut of: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut all = String::from(
        "sdrun contains the following packages of others. The texts of their licences follow; where a package comes without\n\
         a text, only the name of its licence is here.\n\n",
    );
    for part in parts {
        let _ = writeln!(all, "{} {}: {}", part.name, part.version, part.licence);
        for text in part.texts.values() {
            let text = text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim().to_string();
            of.entry(text).or_default().push(part.name.clone());
        }
    }
    for (what, url, licence, owner) in DATA {
        let _ = writeln!(all, "{what} ({url}): {licence}, {owner}");
    }
    let mut texts: Vec<(Vec<String>, String)> = of.into_iter().map(|(text, names)| (names, text)).collect();
    texts.sort();
    for (mut names, text) in texts {
        names.dedup();
        let _ = write!(all, "\n{}\n{}\n\n{text}\n", "-".repeat(100), names.join(", "));
    }
    all
}

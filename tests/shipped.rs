//! A release must not depend on the machine it was built on.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use object::{
    Object, ObjectSection,
    read::elf::{Dyn, FileHeader},
};
use sdrun_tests::place::Place;
use std::{
    fs,
    path::{Path, PathBuf},
};

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

/// Search paths in an ELF file's dynamic section.
fn search_paths(bytes: &[u8]) -> Vec<String> {
    let header = object::elf::FileHeader64::<object::Endianness>::parse(bytes).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, bytes).unwrap();
    let Some((entries, strings)) = sections.dynamic(endian, bytes).unwrap() else { return Vec::new() };
    let strings = sections.strings(endian, bytes, strings).unwrap();
    let is_path =
        |tag: object::elf::DynamicTag| [object::elf::DT_RPATH, object::elf::DT_RUNPATH].contains(&tag);
    let paths = entries.iter().filter(|entry| is_path(entry.d_tag(endian)));
    paths.map(|entry| String::from_utf8_lossy(entry.string(endian, strings).unwrap()).into_owned()).collect()
}

/// A plugin once searched for its libraries in its build folder. On a user's machine, anybody may own that folder.
#[test]
fn nothing_we_ship_remembers_where_it_was_built() {
    let dist = Place::Dist.find().unwrap();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let places: Vec<Vec<u8>> = [workspace, dist.parent().unwrap()]
        .iter()
        .flat_map(|place| [place.to_path_buf(), fs::canonicalize(place).unwrap()])
        .map(|place| place.into_os_string().into_encoded_bytes())
        .collect();
    let mut checked = 0;
    for path in files(&dist) {
        let bytes = fs::read(&path).unwrap();
        if !bytes.starts_with(b"\x7fELF") {
            continue;
        }
        checked += 1;
        let searched = search_paths(&bytes);
        assert!(
            searched.iter().all(|p| p == "$ORIGIN"),
            "{} is searched by {}",
            searched.join(":"),
            path.display()
        );
        // Debug information is not loaded, and a release has none.
        let file = object::File::parse(&*bytes).unwrap();
        let named = file.sections().map(|section| (section.name().unwrap_or_default().to_string(), section));
        for (name, section) in named.filter(|(name, _)| !name.starts_with(".debug")) {
            let data = section.data().unwrap();
            let found =
                places.iter().find(|place| data.windows(place.len()).any(|window| window == &place[..]));
            assert!(found.is_none(), "{} names its build folder in {name}", path.display());
        }
    }
    assert!(checked >= 10, "only {checked} programs and libraries in {}", dist.display());
}

/// The bill of materials has everything that is linked and nothing that is not, and each licence comes along.
#[test]
fn everything_of_others_is_named_with_its_licence() {
    let dist = Place::Dist.find().unwrap();
    let read = |name: &str| fs::read_to_string(dist.join(name)).unwrap();
    let bill: serde_json::Value = serde_json::from_str(&read("sdrun.cdx.json")).unwrap();
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.6".into()));
    let licences = read("THIRD-PARTY.txt");
    let mut names = Vec::new();
    for component in bill["components"].as_array().unwrap() {
        let name = component["name"].as_str().unwrap();
        assert!(!component["licenses"][0]["expression"].as_str().unwrap().is_empty(), "{name}");
        assert!(licences.contains(name), "{name}");
        if component["type"] == "library" {
            assert_eq!(component["hashes"][0]["content"].as_str().unwrap().len(), 64, "{name}");
        }
        names.push(name);
    }
    for linked in ["prost", "tokenizers", "safetensors", "ort", "llama-cpp-sys-2"] {
        assert!(names.contains(&linked), "{linked} is missing");
    }
    for other in ["proptest", "cbindgen", "cxx-build", "libfuzzer-sys", "serde_derive"] {
        assert!(!names.contains(&other), "{other} is not linked");
    }
    for words in ["The ggml authors", "Apache License", "Copyright (c) 2021 OpenAI"] {
        assert!(licences.contains(words), "{words}");
    }
}

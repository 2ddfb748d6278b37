//! The modules of `simd/` and `ffi/` use each other in one direction only, so that each can be reviewed alone.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The modules of a folder from the bottom up, and the modules of the crate that they may use.
const LAYERS: [(&str, &[&str], &[&str]); 3] = [
    (
        "simd",
        &["cpu"],
        &[
            "words",
            "level",
            "lines",
            "vector",
            "bf16",
            "depthwise_row",
            "int8",
            "product",
            "softmax",
            "transpose",
            "winograd",
        ],
    ),
    ("simd/product", &["cpu"], &["operands", "registers", "bytes", "amx"]),
    (
        "ffi",
        &["cpu", "simd", "memory"],
        &[
            "api",
            "files",
            "library",
            "threads",
            "backends",
            "pages",
            "tensor",
            "room",
            "streams",
            "store",
            "kernel",
            "custom",
            "builder",
            "device_ops",
            "order",
            "profile",
            "program",
            "kept",
            "executor",
            "dequantize",
            "testing",
        ],
    ),
];

#[test]
fn modules_with_unsafe_code_use_those_below_them_only() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (folder, crates, order) in LAYERS {
        let found: BTreeSet<String> = modules(&source.join(folder)).into_keys().collect();
        let known: BTreeSet<String> = order.iter().map(|name| name.to_string()).collect();
        assert_eq!(found, known, "the modules of {folder} and their order in this test");
        for (name, file) in modules(&source.join(folder)) {
            let place = order.iter().position(|known| *known == name).unwrap();
            let text = fs::read_to_string(&file).unwrap();
            for used in uses(&text, "super::") {
                let wrong = order[place..].contains(&&used[..]);
                assert!(!wrong, "{} uses {used}, which is not below it", file.display());
            }
            for used in uses(&text, "crate::") {
                let own = folder.split('/').next() == Some(&used);
                assert!(own || crates.contains(&&used[..]), "{} uses crate::{used}", file.display());
            }
        }
    }
}

/// The modules in a folder, with their files.
fn modules(folder: &Path) -> std::collections::BTreeMap<String, PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let module = |path: PathBuf| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let file = if path.is_dir() { path.join("mod.rs") } else { path };
        (name != "mod").then_some((name, file))
    };
    paths.filter_map(module).collect()
}

/// The first names after `prefix` in the code of a file, also those in braces after it. Comments do not count.
fn uses(text: &str, prefix: &str) -> BTreeSet<String> {
    let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    let name = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices(prefix) {
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.insert(name(rest));
            continue;
        };
        let (mut depth, mut start) = (0, 0);
        for (i, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    found.insert(name(&group[start..i]));
                    start = i + 1;
                    if c == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    found.remove("");
    found
}

#[test]
fn names_are_found_wherever_they_are_used() {
    let text =
        "use super::{a::B, c::{d, e}, f}; // super::no\nlet x = super::g::h(crate::i::J);\nuse super::*;";
    assert_eq!(uses(text, "super::").into_iter().collect::<Vec<_>>(), ["a", "c", "f", "g"]);
    assert_eq!(uses(text, "crate::").into_iter().collect::<Vec<_>>(), ["i"]);
}

//! The functions on the inputs in `seeds/`, without a fuzzer.

#![allow(clippy::unwrap_used)]

use sdrun_fuzz::TARGETS;
use std::{collections::BTreeSet, fs, path::Path};

#[test]
fn known_inputs_do_no_harm() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    for target in TARGETS {
        let folder = seeds.join(target.name);
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            let bytes = fs::read(entry.unwrap().path()).unwrap();
            (target.run)(&bytes);
            // A file that ends early, at every length up to the first hundred bytes, then in steps.
            let mut end = 0;
            while end < bytes.len() {
                (target.run)(&bytes[..end]);
                end += 1 + end / 8;
            }
            count += 1;
        }
        assert!(count > 0, "{} is empty", folder.display());
    }
}

/// Each target has a program for the fuzzer, and each program is of a target.
#[test]
fn programs_and_targets_are_the_same() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("targets");
    let programs: BTreeSet<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_string()).collect();
    assert_eq!(programs, targets);
    for name in programs {
        let text = fs::read_to_string(
            Path::new(env!("CARGO_MANIFEST_DIR")).join("targets").join(&name).with_extension("rs"),
        );
        assert!(text.unwrap().contains(&format!("target({name:?})")), "{name}");
    }
}

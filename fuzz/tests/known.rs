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

/// `cargo xtask fuzz` takes the names of the folders for those of the targets.
#[test]
fn each_folder_is_of_a_target() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    let entries = fs::read_dir(seeds).unwrap();
    let folders: BTreeSet<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let targets: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_string()).collect();
    assert_eq!(folders, targets);
}

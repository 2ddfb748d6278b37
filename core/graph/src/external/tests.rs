use super::*;
use proptest::prelude::*;

fn entries(pairs: &[(&str, &str)]) -> Vec<StringStringEntryProto> {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
        key: Some((*key).into()),
        value: Some((*value).into()),
    };
    pairs.iter().map(entry).collect()
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    fs::write(dir.path().join("w.bin"), [7u8; 100]).unwrap();
    fs::write(dir.path().join("sub/w.bin"), [8u8; 10]).unwrap();
    dir
}

fn find(
    dir: &Path,
    options: OpenOptions,
    pairs: &[(&str, &str)],
    bytes: usize,
) -> Result<WeightData, String> {
    let at = Location::parse(&entries(pairs))?;
    let mut files = ExternalFiles::new(ExternalBase::Folder { dir, options });
    files.weight("w", &at, bytes).map_err(|e| e.to_string())
}

#[test]
fn keys_are_matched_by_name_not_by_position() {
    let dir = folder();
    let pairs = [("length", "4"), ("checksum", "ab"), ("offset", "96"), ("location", "./w.bin")];
    let WeightData::External { file, offset } = find(dir.path(), OpenOptions::default(), &pairs, 4).unwrap()
    else {
        panic!("not external")
    };
    assert!(file.is_absolute() && file.ends_with("w.bin"), "{file:?}");
    assert_eq!(offset, 96);
}

#[test]
fn bad_entries_are_refused() {
    for (pairs, part) in [
        (&[("offset", "1")][..], "no location"),
        (&[("location", "w"), ("offset", "+1")], "+1"),
        (&[("location", "w"), ("offset", "0x10")], "0x10"),
        (&[("location", "w"), ("offset", "-1")], "-1"),
        (&[("location", "w"), ("offset", "")], "offset"),
        (&[("location", "w"), ("length", "18446744073709551616")], "18446744073709551616"),
        (&[("location", "w"), ("location", "v")], "twice"),
        (&[("location", "w"), ("Offset", "1")], "unknown key \"Offset\""),
    ] {
        let error = Location::parse(&entries(pairs)).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn paths_out_of_the_folder_are_refused() {
    let dir = folder();
    let inner = dir.path().join("sub");
    for location in [
        "../w.bin",
        "a/../../w.bin",
        "sub/..",
        "/etc/passwd",
        "C:w.bin",
        "c:/w.bin",
        "..\\w.bin",
        "sub\\w.bin",
        "\\\\host\\w.bin",
        "w.bin\0",
        "",
        ".",
        "./",
        "sub/",
        "sub//w.bin",
    ] {
        for allow_links in [false, true] {
            for weights in [WeightsPolicy::Required, WeightsPolicy::MayBeAbsent] {
                let options = OpenOptions { allow_links, weights };
                let error = find(&inner, options, &[("location", location)], 1).unwrap_err();
                assert!(error.contains("location"), "{location:?}: {error}");
            }
        }
    }
}

#[test]
fn offsets_and_lengths_are_checked_against_the_file() {
    let dir = folder();
    let get = |offset: &str, length: &str, bytes| {
        let pairs = [("location", "w.bin"), ("offset", offset), ("length", length)];
        find(dir.path(), OpenOptions::default(), &pairs, bytes)
    };
    assert!(get("0", "100", 100).is_ok());
    assert!(get("1", "100", 100).unwrap_err().contains("has 100"));
    assert!(get("0", "99", 100).unwrap_err().contains("length is 99"));
    assert!(get("18446744073709551615", "4", 4).unwrap_err().contains("out of range"));
}

#[test]
fn missing_files_are_absent_only_if_allowed() {
    let dir = folder();
    let pairs = [("location", "gone.bin"), ("offset", "8")];
    let error = find(dir.path(), OpenOptions::default(), &pairs, 1).unwrap_err();
    assert!(error.contains("gone.bin") && error.contains("does not exist"), "{error}");
    let lenient = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..Default::default() };
    assert_eq!(
        find(dir.path(), lenient, &pairs, 1).unwrap(),
        WeightData::Absent { location: "gone.bin".into(), offset: 8 }
    );
}

#[test]
fn constants_are_read() {
    let dir = folder();
    let mut files =
        ExternalFiles::new(ExternalBase::Folder { dir: dir.path(), options: OpenOptions::default() });
    let at = Location::parse(&entries(&[("location", "sub/w.bin"), ("offset", "6")])).unwrap();
    assert_eq!(files.constant("c", &at, 4).unwrap(), &[8u8; 4][..]);
    assert!(files.constant("c", &at, 5).is_err());
}

#[cfg(target_os = "linux")]
#[test]
fn links_need_permission_and_devices_are_never_opened() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    std::os::unix::fs::symlink(path("w.bin"), path("soft")).unwrap();
    std::os::unix::fs::symlink(path("sub"), path("softdir")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
    fs::write(path("h.bin"), [9u8; 100]).unwrap();
    fs::hard_link(path("h.bin"), path("hard")).unwrap();
    let pipe = rustix::fs::mknodat(
        rustix::fs::CWD,
        path("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    );
    pipe.unwrap();
    let links = OpenOptions { allow_links: true, ..Default::default() };
    for (location, strict, lenient) in [
        ("soft", Some("symbolic link"), None),
        ("softdir/w.bin", Some("symbolic link"), None),
        ("hard", Some("hard links"), None),
        ("zero", Some("symbolic link"), Some("not a regular file")),
        ("pipe", Some("not a regular file"), Some("not a regular file")),
        ("sub", Some("not a regular file"), Some("not a regular file")),
        ("w.bin", None, None),
    ] {
        for (options, expected) in [(OpenOptions::default(), strict), (links, lenient)] {
            match (find(dir.path(), options, &[("location", location)], 10), expected) {
                (Ok(_), None) => {}
                (Err(error), Some(part)) => assert!(error.contains(part), "{location}: {error}"),
                (found, expected) => {
                    panic!("{location} with {options:?}: {found:?} instead of {expected:?}")
                }
            }
        }
        let walked = open_step_by_step(dir.path(), &location.split('/').collect::<Vec<_>>());
        let expected = strict.filter(|why| *why != "hard links");
        match (walked, expected) {
            (Ok(_), None) => {}
            (Err(Refusal::Because(why)), Some(part)) => assert!(why.contains(part), "{location}: {why}"),
            (walked, expected) => panic!("{location}: opened {} instead of {expected:?}", walked.is_ok()),
        }
    }
}

proptest! {
    #[test]
    fn no_location_escapes(location in r"[./\\a:]{0,12}|\PC{0,20}") {
        let dir = folder();
        let inner = dir.path().join("sub");
        let lenient = OpenOptions { weights: WeightsPolicy::MayBeAbsent, ..Default::default() };
        if let Ok(WeightData::External { file, .. }) = find(&inner, lenient, &[("location", &location)], 0) {
            prop_assert!(file.starts_with(std::path::absolute(&inner).unwrap()), "{file:?}");
            prop_assert!(!file.components().any(|c| c == std::path::Component::ParentDir));
        }
    }
}

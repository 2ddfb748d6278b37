use super::*;
use crate::{Observer, TracingHost, engine_file::tests::manifest};
use sdrun_abi::Precision;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

fn of_key(key: &str) -> EngineManifest {
    EngineManifest { key: key.into(), ..manifest() }
}

#[test]
fn a_corrupt_entry_is_a_miss_and_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path().join("c"));
    let path = cache.put(&manifest(), b"payload").unwrap();
    assert_eq!(cache.get(&manifest()).unwrap().payload(), b"payload");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert!(cache.get(&manifest()).is_none());
    assert!(path.with_extension("corrupt").exists() && !path.exists());
}

/// Swapped entry files are undamaged, but do not match their names.
#[test]
fn an_engine_under_another_key_is_a_miss_and_verify_finds_it() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let exchange = || {
        let (a, b) = (cache.put(&of_key("a"), b"add").unwrap(), cache.put(&of_key("b"), b"sub").unwrap());
        std::fs::rename(&a, dir.path().join("c")).unwrap();
        std::fs::rename(&b, &a).unwrap();
        std::fs::rename(dir.path().join("c"), &b).unwrap();
        (a, b)
    };
    let (a, b) = exchange();
    assert!(cache.get(&of_key("a")).is_none());
    assert!(!a.exists() && a.with_extension("corrupt").exists());
    assert!(cache.get(&of_key("b")).is_none() && !b.exists());

    let (a, b) = exchange();
    assert!(cache.list().unwrap().iter().all(|entry| entry.content.is_err()));
    let found = cache.verify().unwrap();
    let why = found.iter().map(|entry| entry.content.clone().unwrap_err());
    assert_eq!(why.filter(|why| why.contains("another key")).count(), 2);
    assert!(!a.exists() && !b.exists());
    assert_eq!(cache.verify().unwrap().len(), 0);
    assert_eq!(cache.gc(&GcLimits::default(), false).unwrap().len(), 2, "both entries that were set aside");
}

#[test]
fn only_fields_that_decide_the_result_are_compared() {
    type Change = fn(&mut EngineManifest);
    let differing: [(&str, Change); 8] = [
        ("key", |m| m.key = "other".into()),
        ("provider", |m| m.build_id = "other".into()),
        ("runtime", |m| m.runtime.1 = "2".into()),
        ("device class", |m| m.device_class = "gpu".into()),
        ("graph", |m| m.topology = "other".into()),
        ("options", |m| m.spec.precision = Precision::Fp16),
        ("options", |m| m.spec.vram_budget = Some(1)),
        ("weights", |m| m.baked = Some("w".into())),
    ];
    for (what, change) in differing {
        let mut other = manifest();
        change(&mut other);
        assert_eq!(other.differs(&manifest()), Some(what));
    }
    let same: [Change; 4] = [
        |m| m.model = "a copy of the file".into(),
        |m| m.spec.device = "the other one of this class".into(),
        |m| m.spec.threads = Some(3),
        |m| m.info.compatibility = "only known afterwards".into(),
    ];
    for change in same {
        let mut other = manifest();
        change(&mut other);
        assert_eq!(other.differs(&manifest()), None);
    }
}

#[test]
fn listing_reads_no_payload_and_verify_does() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let path = cache.put(&manifest(), &[7; 10_000]).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert!(cache.list().unwrap()[0].content.is_ok());
    assert!(cache.gc(&GcLimits::default(), false).unwrap().is_empty());
    assert!(cache.verify().unwrap()[0].content.as_ref().unwrap_err().contains("payload"));
    assert_eq!(cache.gc(&GcLimits::default(), false).unwrap().len(), 1);
}

#[test]
fn waiting_for_a_lock_is_reported_and_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let held = cache.lock("k", &TracingHost).unwrap().unwrap();
    let cancel = Arc::new(AtomicBool::new(false));
    let reports = AtomicUsize::new(0);
    let host = Observer::new(
        |phase: &str, _, _| {
            assert!(phase.contains("another process"), "{phase}");
            // The third report is the last: then the user cancels.
            if reports.fetch_add(1, Relaxed) == 2 {
                cancel.store(true, Relaxed);
            }
        },
        cancel.clone(),
    );
    let error = cache.lock("k", &host).unwrap_err();
    assert_eq!((error.code(), reports.load(Relaxed)), (ErrorCode::Cancelled, 3));
    assert!(cache.lock("other", &TracingHost).unwrap().is_some(), "another key does not wait");
    drop(held);
    assert!(cache.lock("k", &TracingHost).unwrap().is_some());
}

#[cfg(unix)]
#[test]
fn pipes_in_place_of_entries_and_locks_do_not_block() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    for name in ["k.sdengine", "k.lock"] {
        let made = std::process::Command::new("mkfifo").arg(dir.path().join(name)).status();
        assert!(made.unwrap().success());
    }
    assert!(cache.get(&manifest()).is_none());
    assert!(cache.lock("k", &TracingHost).unwrap().is_none());
    assert!(cache.list().unwrap().is_empty());
}

#[test]
fn gc_deletes_the_least_recently_used_and_no_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    for (key, age) in [("a", 300), ("b", 200), ("c", 100)] {
        let path = cache.put(&of_key(key), &[1; 5000]).unwrap();
        let then = SystemTime::now() - Duration::from_secs(age);
        File::options().append(true).open(path).unwrap().set_modified(then).unwrap();
    }
    let foreign = dir.path().join("my-model.onnx");
    std::fs::write(&foreign, b"precious").unwrap();
    let size = cache.list().unwrap()[0].bytes;
    let limits = GcLimits { max_bytes: Some(size * 2), max_age: None };
    assert_eq!(cache.gc(&limits, true).unwrap().len(), 1);
    assert_eq!(cache.list().unwrap().len(), 3, "a dry run deletes nothing");
    assert!(cache.gc(&limits, false).unwrap()[0].0.ends_with("a.sdengine"));
    let old = GcLimits { max_age: Some(Duration::from_secs(150)), max_bytes: None };
    assert!(cache.gc(&old, false).unwrap()[0].0.ends_with("b.sdengine"));
    assert!(foreign.exists());
}

#[test]
fn an_unwritable_cache_is_not_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a-file");
    std::fs::write(&file, b"").unwrap();
    let cache = Cache::at(file.join("below-a-file"));
    assert!(cache.put(&manifest(), b"x").is_none());
    assert!(cache.get(&manifest()).is_none());
    assert!(cache.lock("k", &TracingHost).unwrap().is_none());
}

#[test]
fn gc_leaves_a_lock_that_is_held_however_old() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(dir.path());
    let age = |name: &str| {
        let file = File::options().append(true).open(dir.path().join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(48 * 3600)).unwrap();
    };
    let held = cache.lock("held", &TracingHost).unwrap().unwrap();
    drop(cache.lock("free", &TracingHost).unwrap().unwrap());
    age("held.lock");
    age("free.lock");
    let gone = |cache: &Cache| -> Vec<PathBuf> {
        cache.gc(&GcLimits::default(), false).unwrap().into_iter().map(|(path, _)| path).collect()
    };
    assert_eq!(gone(&cache), [dir.path().join("free.lock")]);
    drop(held);
    assert_eq!(gone(&cache), [dir.path().join("held.lock")]);
}

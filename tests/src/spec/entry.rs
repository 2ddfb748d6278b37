//! Files, negotiation, `init`, devices.

use super::{Subject, Verdict, raw, require};
use sdrun_abi::{ABI_MAJOR, ABI_MINOR, DType, NoHost, Precision, Provider, RuntimeSpec};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

pub(super) fn manifest_describes_the_library(subject: &Subject) -> Verdict {
    let library = &subject.provide.library;
    require!(subject.library.is_file(), "there is no library at {}", subject.library.display());
    require!(
        library.abi_major == ABI_MAJOR,
        "it names ABI {}; this host speaks {ABI_MAJOR}",
        library.abi_major
    );
    for (field, value) in [
        ("summary", &subject.provide.summary),
        ("vendor", &subject.provide.vendor),
        ("version", &subject.provide.version),
        ("build_id", &subject.provide.build_id),
        ("library.target", &library.target),
    ] {
        require!(!value.trim().is_empty(), "its `{field}` is empty");
    }
    let hash = &library.sha256;
    require!(
        hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)),
        "its `library.sha256` is not 64 lower-case hex digits: {hash:?}"
    );
    if let Some(runtime) = &subject.provide.runtime {
        require!(
            !runtime.library_names.is_empty() && !runtime.env.is_empty(),
            "its manifest does not say how to find its runtime"
        );
    }
    Ok(())
}

pub(super) fn loads_without_its_runtime(subject: &Subject) -> Verdict {
    subject.load().map(drop)
}

pub(super) fn negotiates_the_version(subject: &Subject) -> Verdict {
    let query = raw::query(&subject.library)?;
    let mut tables = BTreeSet::new();
    for max_minor in [0, u32::from(ABI_MINOR), 1000, u32::MAX] {
        let Some((address, major, size)) = raw::negotiate(query, max_minor) else { continue };
        require!(major == ABI_MAJOR, "the symbol ends in v{ABI_MAJOR}, its table says major version {major}");
        require!(size as usize >= 72, "its table claims to be {size} bytes long");
        require!(
            raw::negotiate(query, max_minor).map(|t| t.0) == Some(address),
            "the address of its table changes"
        );
        tables.insert(address);
    }
    require!(!tables.is_empty(), "it offers no table, whatever version the host speaks");
    Ok(())
}

pub(super) fn identity_is_that_of_the_manifest(subject: &Subject) -> Verdict {
    let (identity, provide) = (subject.load()?.identity(), &subject.provide);
    for (field, told, written) in [
        ("id", &identity.id, &provide.id),
        ("version", &identity.version, &provide.version),
        ("build_id", &identity.build_id, &provide.build_id),
    ] {
        require!(told == written, "the library's {field} is {told:?}, but the manifest's is {written:?}");
    }
    Ok(())
}

pub(super) fn short_argument_structs_are_refused(subject: &Subject) -> Verdict {
    let query = raw::query(&subject.library)?;
    for size in [Some(0), Some(8), Some(39), None] {
        let refused = raw::devices_with_size(query, size)?;
        require!(refused, "`devices` accepts an argument struct of {size:?} bytes (None: a null pointer)");
    }
    Ok(())
}

pub(super) fn a_newer_host_is_served(subject: &Subject) -> Verdict {
    // Loads and initialises the plugin.
    let _ready = subject.ready()?;
    let served = raw::devices_for_newer_host(raw::query(&subject.library)?)?;
    require!(served, "`devices` fails with a longer argument struct, or writes past the part that it knows");
    Ok(())
}

pub(super) fn calls_before_init_are_errors(subject: &Subject) -> Verdict {
    let plugin = subject.load()?;
    require!(plugin.capabilities("cpu").is_err(), "`capabilities` succeeds before `init`");
    // Any answer about devices is fine, but a crash is not.
    drop(plugin.devices());
    let init = plugin.init(&subject.config(subject.runtime_dir()?), &NoHost);
    init.map(drop).map_err(|e| format!("`init` fails after an early call: {e}"))
}

/// Runs a check on the runtime that `init` needs. Such checks do not apply to a plugin without one.
fn with_runtime(subject: &Subject, check: impl FnOnce(&RuntimeSpec, PathBuf) -> Verdict) -> Verdict {
    match &subject.provide.runtime {
        None => Ok(()),
        Some(spec) => {
            let dir = subject.scratch.path().join("runtime");
            fs::create_dir(&dir).map_err(|e| format!("cannot make a folder: {e}"))?;
            check(spec, dir)
        }
    }
}

/// `init` must fail with a runtime folder that contains something else, and so must later calls.
fn refuses_runtime(subject: &Subject, dir: &Path) -> Verdict {
    let plugin = subject.load()?;
    let Err(error) = plugin.init(&subject.config(Some(dir.to_path_buf())), &NoHost) else {
        return Err("`init` succeeds".into());
    };
    require!(!error.message.trim().is_empty(), "`init` fails without a message");
    require!(!error.message.contains("panic"), "`init` panics: {}", error.message);
    require!(plugin.devices().is_err(), "`devices` succeeds although `init` failed");
    Ok(())
}

pub(super) fn an_absent_runtime_is_an_error(subject: &Subject) -> Verdict {
    with_runtime(subject, |_, dir| refuses_runtime(subject, &dir))
}

pub(super) fn a_garbage_runtime_is_an_error(subject: &Subject) -> Verdict {
    with_runtime(subject, |spec, dir| {
        for pattern in &spec.library_names {
            let file = dir.join(pattern.replace('*', "1"));
            fs::write(file, b"this is not a library").map_err(|e| format!("cannot write: {e}"))?;
        }
        refuses_runtime(subject, &dir)
    })
}

/// The real library cut in half: its headers are intact, but what they refer to is missing.
pub(super) fn a_truncated_runtime_is_an_error(subject: &Subject) -> Verdict {
    with_runtime(subject, |_, dir| {
        let installed = subject.runtime_dir()?.ok_or("it has a runtime")?;
        let text = |e: std::io::Error| format!("cannot copy the runtime: {e}");
        for entry in fs::read_dir(installed).map_err(text)? {
            let path = entry.map_err(text)?.path();
            if let (true, Some(name)) = (path.is_file(), path.file_name()) {
                let bytes = fs::read(&path).map_err(text)?;
                fs::write(dir.join(name), &bytes[..bytes.len() / 2]).map_err(text)?;
            }
        }
        refuses_runtime(subject, &dir)
    })
}

pub(super) fn init_reports_the_runtime(subject: &Subject) -> Verdict {
    let runtime = subject.ready()?.runtime;
    require!(!runtime.name.is_empty() && !runtime.version.is_empty(), "it reports {runtime:?}");
    let expected = subject.runtime_dir()?;
    if let (Some(dir), Some(library)) = (&expected, &runtime.library) {
        let (dir, library) = (dir.canonicalize(), library.canonicalize());
        let inside = matches!((&dir, &library), (Ok(dir), Ok(library)) if library.starts_with(dir));
        require!(inside, "it was told to load from {dir:?} and loaded {library:?}");
    }
    require!(expected.is_none() || runtime.library.is_some(), "it does not say which library it loaded");
    Ok(())
}

pub(super) fn a_second_init_does_no_harm(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    // It may refuse or give the same answer. Either way, the plugin must keep working.
    drop(ready.plugin.init(&subject.config(subject.runtime_dir()?), &NoHost));
    ready.fixture.check(ready.build()?.as_ref(), &ready.fixture.weights(0))
}

pub(super) fn devices_are_unique_and_stable(subject: &Subject) -> Verdict {
    let plugin = subject.ready()?.plugin;
    let devices = plugin.devices().map_err(|e| e.to_string())?;
    let ids: BTreeSet<&str> = devices.iter().map(|d| d.id.as_str()).collect();
    require!(ids.len() == devices.len(), "two devices have the same id: {devices:?}");
    for (position, device) in devices.iter().enumerate() {
        let words = [&device.id, &device.name, &device.class];
        require!(words.iter().all(|w| !w.trim().is_empty()), "a device lacks id, name or class: {device:?}");
        require!(
            device.index == position,
            "device {} is at position {position} and says {}",
            device.id,
            device.index
        );
        require!(
            device.memory_bytes != Some(0),
            "device {} says it has no memory; unknown is null",
            device.id
        );
    }
    let again = plugin.devices().map_err(|e| e.to_string())?;
    require!(again == devices, "the list changes from call to call: {devices:?}, {again:?}");
    Ok(())
}

pub(super) fn an_unknown_device_is_refused(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let spec = sdrun_abi::BuildSpec { device: "no-such-device".into(), ..ready.spec() };
    require!(
        ready.plugin.capabilities(&spec.device).is_err(),
        "it reports capabilities of a device that it does not have"
    );
    require!(ready.build_with(&spec).is_err(), "it builds for a device that it does not have");
    require!(
        ready.plugin.check("x", &spec.device).is_err(),
        "it judges engines for a device that it does not have"
    );
    Ok(())
}

pub(super) fn capabilities_make_sense(subject: &Subject) -> Verdict {
    let capabilities = subject.ready()?.capabilities;
    let mut precisions: Vec<Precision> = capabilities.precisions.clone();
    require!(!precisions.is_empty(), "it offers no precision");
    precisions.sort();
    precisions.dedup();
    require!(precisions.len() == capabilities.precisions.len(), "it lists a precision twice");
    require!(capabilities.io_dtypes.contains(&DType::F32), "it takes no f32 tensors");
    Ok(())
}

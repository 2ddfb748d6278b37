use sdrun_abi::{Error, Manifest, Provide, Result, RuntimeSpec};
use std::path::{Path, PathBuf};

/// The runtime part of a provider's embedded manifest.
pub fn runtime_spec(manifest: &str) -> Result<RuntimeSpec> {
    provide(manifest)?
        .runtime
        .ok_or_else(|| Error::internal("the manifest this plugin was built with names no runtime"))
}

/// An extension in a provider's embedded manifest.
pub fn extension_spec(manifest: &str, name: &str) -> Result<RuntimeSpec> {
    let found = provide(manifest)?.extensions.into_iter().find(|spec| spec.name == name);
    found.ok_or_else(|| Error::invalid(format!("this plugin has no extension `{name}`")))
}

fn provide(manifest: &str) -> Result<Provide> {
    let manifest = Manifest::parse(manifest);
    let wrong = |why| Error::internal(format!("the manifest this plugin was built with {why}"));
    manifest.map(|manifest| manifest.provider).map_err(wrong)
}

/// The runtime's library in `dir`, as an absolute path without links. `FailedPrecondition` with a hint if there is
/// none. If several files match, the last by name, which is the newest.
pub fn locate(spec: &RuntimeSpec, dir: Option<&Path>) -> Result<PathBuf> {
    let hint = spec.how_to_get();
    let Some(dir) = dir else {
        return Err(
            Error::precondition(format!("the {} runtime is not installed", spec.name)).with_hint(hint)
        );
    };
    let entries =
        std::fs::read_dir(dir).map_err(|e| Error::io("read the folder", dir, &e).with_hint(hint.clone()))?;
    let patterns: Vec<glob::Pattern> =
        spec.library_names.iter().filter_map(|p| glob::Pattern::new(p).ok()).collect();
    let newest = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            patterns.iter().any(|pattern| pattern.matches(name))
        })
        .max();
    let Some(found) = newest else {
        let names = spec.library_names.join(", ");
        return Err(Error::precondition(format!(
            "the folder {} holds no {} library (looked for {names})",
            dir.display(),
            spec.name
        ))
        .with_file(dir)
        .with_hint(hint));
    };
    dunce::canonicalize(&found).map_err(|e| Error::io("resolve", &found, &e).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::ErrorCode;

    fn spec() -> RuntimeSpec {
        RuntimeSpec {
            name: "thing".into(),
            version: "1.2".into(),
            env: "SDRUN_THING_DIR".into(),
            library_names: vec!["libthing.so".into(), "libthing.so.*".into()],
            pip: None,
            by_hand: None,
        }
    }

    #[test]
    fn absence_is_an_error_that_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libthing_extra.so"), b"").unwrap();
        for (dir, part) in [
            (None, "not installed"),
            (Some(dir.path().to_path_buf()), "libthing.so.*"),
            (Some(dir.path().join("gone")), "cannot read the folder"),
        ] {
            let error = locate(&spec(), dir.as_deref()).unwrap_err();
            assert!(error.message.contains(part), "{error}");
            let hint = error.hint.unwrap().to_string();
            assert!(hint.contains("install it") && hint.contains("SDRUN_THING_DIR"), "{hint}");
        }
        assert_eq!(locate(&spec(), None).unwrap_err().code, ErrorCode::FailedPrecondition);
    }

    #[test]
    fn the_newest_name_wins_and_links_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let root = dunce::canonicalize(dir.path()).unwrap();
        std::fs::write(root.join("libthing.so.1"), b"").unwrap();
        std::fs::write(root.join("libthing.so.2"), b"").unwrap();
        assert_eq!(locate(&spec(), Some(&root)).unwrap(), root.join("libthing.so.2"));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("libthing.so.1", root.join("libthing.so.9")).unwrap();
            assert_eq!(locate(&spec(), Some(&root)).unwrap(), root.join("libthing.so.1"));
        }
    }

    #[test]
    fn a_manifest_without_a_runtime_is_refused() {
        let text = r#"{"file_format_version":"1.0.0","provider":{"id":"x","summary":"s","vendor":"v",
            "version":"1","build_id":"","library":{"path":"x.so","sha256":"","target":"","abi_major":1}}}"#;
        assert!(runtime_spec(text).unwrap_err().message.contains("no runtime"));
        assert!(runtime_spec("{}").is_err());
    }
}

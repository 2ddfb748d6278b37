//! Unpacks a wheel, which is a zip archive, without Python.

use super::{
    InstallPlan, Package,
    install::{go_on, patterns},
};
use crate::{Error, Result};
use sdrun_abi::{Error as AbiError, ErrorCode, Host};
use sdrun_files::{Links, open_regular};
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use zip::{ZipArchive, result::ZipError};

/// Bytes to read and write between two checks for cancellation.
const CHUNK: usize = 256 << 10;

/// A wheel with the pinned hash.
pub(super) struct Wheel {
    path: PathBuf,
    file: File,
}

/// Opens the pinned wheel of each package: `from` itself, or the files in it that have the pinned hashes.
pub(super) fn open(plan: &InstallPlan, from: &Path, host: &dyn Host) -> Result<Vec<Wheel>> {
    if from.is_dir() {
        return plan.packages.iter().map(|package| in_folder(package, from, host)).collect();
    }
    let [package] = &plan.packages[..] else {
        let needed = plan.requirements();
        let message = format!("{} is one wheel, and several are needed ({needed})", from.display());
        let hint = "name the folder that holds them";
        return Err(AbiError::invalid(message).with_file(from).with_hint(hint).into());
    };
    let wheel = Wheel::open(from)?;
    let (found, expected) = (wheel.hash(host)?, &package.wheel.sha256);
    if found == *expected {
        return Ok(vec![wheel]);
    }
    let message = format!(
        "{} is not the wheel of {} for this machine (SHA-256 {found}, expected {expected})",
        from.display(),
        package.requirement
    );
    Err(AbiError::invalid(message).with_file(from).into())
}

/// The file in a folder that is the pinned wheel of a package.
fn in_folder(package: &Package, folder: &Path, host: &dyn Host) -> Result<Wheel> {
    let (expected, bytes) = (&package.wheel.sha256, package.wheel.download_bytes);
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("read the folder", folder, &e))?;
    let mut candidates: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    candidates.retain(|path| path.extension().is_some_and(|e| e == "whl") && path.is_file());
    candidates.sort();
    for path in &candidates {
        let wheel = Wheel::open(path)?;
        let size = wheel.file.metadata().map_err(|e| Error::io("read", path, &e))?.len();
        if size == bytes && wheel.hash(host)? == *expected {
            return Ok(wheel);
        }
    }
    let message = format!(
        "{} holds no wheel of {} for this machine (SHA-256 {expected}, {bytes} bytes)",
        folder.display(),
        package.requirement
    );
    Err(AbiError::not_found(message).with_file(folder).into())
}

impl Wheel {
    fn open(path: &Path) -> Result<Self> {
        Ok(Wheel { path: path.to_path_buf(), file: open_regular(path, Links::Follow)? })
    }

    /// SHA-256 of the file, in lower-case hex.
    fn hash(&self, host: &dyn Host) -> Result<String> {
        let failed = |e: io::Error| Error::io("read", &self.path, &e);
        let total = self.file.metadata().map_err(failed)?.len();
        let (mut hash, mut buffer, mut done) = (Sha256::new(), vec![0; CHUNK], 0u64);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        loop {
            go_on(host, "checking the package", done, total)?;
            let read = file.read(&mut buffer).map_err(failed)?;
            if read == 0 {
                return Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect());
            }
            hash.update(&buffer[..read]);
            done += read as u64;
        }
    }

    /// Unpacks the files that match `keep` into the new folder `target`: at most `most` bytes plus a small margin.
    pub(super) fn unpack(&self, keep: &[String], most: u64, target: &Path, host: &dyn Host) -> Result<()> {
        let damaged = |why: &dyn std::fmt::Display| -> Error {
            let message = format!("{} cannot be unpacked: {why}", self.path.display());
            AbiError::new(ErrorCode::DataLoss, message).with_file(&self.path).into()
        };
        let of_zip = |e: ZipError| match e {
            ZipError::Io(e) => Error::io("read", &self.path, &e),
            other => damaged(&other),
        };
        let mut archive = ZipArchive::new(BufReader::new(&self.file)).map_err(of_zip)?;
        let keep = patterns(keep);
        // Manifests give the size of the kept files on disk. Other file systems may round small files differently.
        let room = most.saturating_add(most / 8).saturating_add(1 << 20);
        let mut done = 0u64;
        std::fs::create_dir_all(target).map_err(|e| Error::io("make the folder", target, &e))?;
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).map_err(of_zip)?;
            let name = entry
                .enclosed_name()
                .ok_or_else(|| damaged(&format!("{:?} leads out of it", entry.name())))?;
            if !entry.is_file() || !(keep.is_empty() || keep.iter().any(|k| k.matches_path(&name))) {
                continue;
            }
            let path = target.join(&name);
            let failed = |e: io::Error| Error::io("write", &path, &e);
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(|e| Error::io("make the folder", folder, &e))?;
            }
            let mut out = File::create_new(&path).map_err(failed)?;
            let mut buffer = vec![0; CHUNK];
            loop {
                go_on(host, "unpacking", done, most.max(done))?;
                // `read` also fails if the entry's checksum is wrong.
                let read = entry.read(&mut buffer).map_err(|e| damaged(&e))?;
                if read == 0 {
                    break;
                }
                done += read as u64;
                if done > room {
                    return Err(damaged(&format!("it holds more than the {most} bytes that it should")));
                }
                out.write_all(&buffer[..read]).map_err(failed)?;
            }
            out.sync_all().map_err(failed)?;
            #[cfg(unix)]
            {
                use std::os::unix::fs::PermissionsExt;
                let mode =
                    if entry.unix_mode().is_some_and(|mode| mode & 0o100 != 0) { 0o755 } else { 0o644 };
                std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).map_err(failed)?;
            }
        }
        match done {
            0 => Err(damaged(&"it holds none of the files that the provider needs")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{InstallPlan, find, install_from, plan, tests::paths};
    use super::*;
    use crate::{Observer, Paths};
    use sdrun_abi::{NoHost, PipPackage, RuntimeSpec, Wheel as Pinned};
    use std::sync::{Arc, atomic::AtomicBool};
    use zip::{ZipWriter, write::SimpleFileOptions};

    /// A wheel with these files.
    fn wheel(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut zip = ZipWriter::new(io::Cursor::new(Vec::new()));
        for (name, bytes) in files {
            zip.start_file(*name, SimpleFileOptions::default()).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap().into_inner()
    }

    fn pinned(wheel: &[u8], installed_bytes: u64) -> Pinned {
        let sha256 = Sha256::digest(wheel).iter().map(|b| format!("{b:02x}")).collect();
        Pinned {
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            python: "312".into(),
            platforms: vec!["any".into()],
            sha256,
            download_bytes: wheel.len() as u64,
            installed_bytes,
            gpu_bytes: 0,
        }
    }

    fn spec(wheel: &[u8], installed_bytes: u64) -> RuntimeSpec {
        RuntimeSpec {
            name: "thing".into(),
            version: "1.2".into(),
            env: "SDRUN_TEST_UNSET_VARIABLE".into(),
            library_names: vec!["libthing.so.*".into()],
            pip: Some(PipPackage {
                gpu: Vec::new(),
                package: "thing".into(),
                version: None,
                keep: vec!["thing/libs/libthing.so.*".into(), "thing/LICENSE".into()],
                library_dir: "thing/libs".into(),
                wheels: vec![pinned(wheel, installed_bytes)],
                needs: Vec::new(),
            }),
            by_hand: None,
        }
    }

    const FILES: [(&str, &[u8]); 4] = [
        ("thing/libs/libthing.so.1", b"library"),
        ("thing/LICENSE", b"free"),
        ("thing/__init__.py", b"import os"),
        ("thing-1.2.dist-info/RECORD", b""),
    ];

    fn prepared(root: &Path, bytes: &[u8]) -> (Paths, RuntimeSpec, InstallPlan, PathBuf) {
        let (paths, spec) = (paths(root), spec(bytes, 11));
        let plan = plan(&spec, &paths).unwrap();
        let file = root.join("thing-1.2-cp312.whl");
        std::fs::write(&file, bytes).unwrap();
        (paths, spec, plan, file)
    }

    #[test]
    fn a_wheel_or_the_folder_that_holds_it_becomes_the_runtime() {
        let root = tempfile::tempdir().unwrap();
        let (paths, spec, plan, file) = prepared(root.path(), &wheel(&FILES));
        std::fs::write(root.path().join("another.whl"), b"not this one").unwrap();
        for from in [&*file, root.path()] {
            install_from(&plan, from, &NoHost).unwrap();
            let library = find(&spec, &paths).unwrap().library.unwrap();
            assert_eq!(std::fs::read(library).unwrap(), b"library");
            assert!(plan.dir.join("thing/LICENSE").exists());
            assert!(
                !plan.dir.join("thing/__init__.py").exists()
                    && !plan.dir.join("thing-1.2.dist-info").exists()
            );
        }
        let left: Vec<_> = std::fs::read_dir(paths.runtimes()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn libraries_of_further_packages_join_those_of_the_first() {
        let root = tempfile::tempdir().unwrap();
        let (paths, mut spec, _, file) = prepared(root.path(), &wheel(&FILES));
        let other = wheel(&[("vendor/sub/lib/libother.so.12", b"needed"), ("vendor/LICENSE", b"paid")]);
        let third = wheel(&[("vendor/sub/lib/libthird.so.3", b"too")]);
        let first = spec.pip.as_mut().unwrap();
        let further = |package: &str, bytes: &[u8], installed_bytes| PipPackage {
            package: package.into(),
            version: Some("12.9".into()),
            keep: vec!["vendor/sub/lib/*".into(), "vendor/LICENSE".into()],
            library_dir: "vendor/sub".into(),
            wheels: vec![pinned(bytes, installed_bytes)],
            ..first.clone()
        };
        first.needs = vec![further("other", &other, 10), further("third", &third, 3)];
        let plan = plan(&spec, &paths).unwrap();
        assert_eq!(plan.requirements(), "thing==1.2, other==12.9, third==12.9");
        assert_eq!(plan.installed_bytes(), 24);
        assert_eq!(install_from(&plan, &file, &NoHost).unwrap_err().code(), ErrorCode::InvalidArgument);
        let error = install_from(&plan, root.path(), &NoHost).unwrap_err();
        assert!(error.to_string().contains("holds no wheel of other==12.9"), "{error}");
        assert!(find(&spec, &paths).is_none());
        std::fs::write(root.path().join("other-12.9-py3.whl"), &other).unwrap();
        std::fs::write(root.path().join("third-12.9-py3.whl"), &third).unwrap();
        install_from(&plan, root.path(), &NoHost).unwrap();
        let dir = find(&spec, &paths).unwrap().dir;
        assert_eq!(std::fs::read(dir.join("libother.so.12")).unwrap(), b"needed");
        assert_eq!(std::fs::read(dir.join("libthird.so.3")).unwrap(), b"too");
        assert!(plan.dir.join("vendor/LICENSE").exists() && plan.dir.join("thing/LICENSE").exists());
    }

    #[test]
    fn what_is_not_the_pinned_wheel_is_refused_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (paths, spec, plan, file) = prepared(root.path(), &wheel(&FILES));
        let refused = |from: &Path, host: &dyn Host| {
            let error = install_from(&plan, from, host).unwrap_err();
            assert!(find(&spec, &paths).is_none());
            let left = std::fs::read_dir(paths.runtimes()).map_or(0, |dir| dir.count());
            assert_eq!(left, 0, "{error}");
            error.code()
        };
        let cancel = Observer::new(|_, _, _| {}, Arc::new(AtomicBool::new(true)));
        assert_eq!(refused(&file, &cancel), ErrorCode::Cancelled);
        std::fs::write(&file, b"something else").unwrap();
        assert_eq!(refused(&file, &NoHost), ErrorCode::InvalidArgument);
        assert_eq!(refused(root.path(), &NoHost), ErrorCode::NotFound);
        assert_eq!(refused(&root.path().join("absent.whl"), &NoHost), ErrorCode::NotFound);
    }

    /// The hash is right in each case: a manifest may still pin a bad wheel.
    #[test]
    fn a_pinned_wheel_that_cannot_be_unpacked_leaves_nothing() {
        let cases: [(&str, Vec<u8>); 4] = [
            ("leads out of it", wheel(&[("../thing/LICENSE", b"x")])),
            ("more than", wheel(&[("thing/libs/libthing.so.1", &vec![0; 3 << 20])])),
            ("none of the files", wheel(&[("other/file", b"x")])),
            ("cannot be unpacked", b"no archive".to_vec()),
        ];
        for (words, bytes) in cases {
            let root = tempfile::tempdir().unwrap();
            let (paths, spec, plan, file) = prepared(root.path(), &bytes);
            let error = install_from(&plan, &file, &NoHost).unwrap_err();
            assert_eq!(error.code(), ErrorCode::DataLoss, "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(find(&spec, &paths).is_none() && !root.path().join("data/thing").exists());
            assert_eq!(std::fs::read_dir(paths.runtimes()).unwrap().count(), 0);
        }
    }
}

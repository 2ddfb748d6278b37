//! `cargo xtask archive [TRIPLE]`: a release as one file, with its checksum and its bill of materials.
//!
//! ```text
//! target/archives/sdrun-VERSION-TRIPLE.zip
//! target/archives/sdrun-VERSION-TRIPLE.zip.sha256   for `sha256sum --check`
//! target/archives/sdrun-VERSION-TRIPLE.cdx.json
//! ```
//!
//! A ZIP file opens everywhere without tools, and marks programs and libraries as executable. The same files make the same archive: entries are
//! sorted and have no date.

use crate::{
    dist::{files_below, sha256},
    workspace::{Workspace, step},
};
use anyhow::{Context, Result};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    path::Path,
};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

/// Packs the folder of a release for a target, with our licences, into `target/archives`.
pub(crate) fn pack(workspace: &Workspace, dist: &Path, triple: &str) -> Result<()> {
    step("Packing the archive");
    let folder = workspace.target.join("archives");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let name = format!("sdrun-{}-{triple}", env!("CARGO_PKG_VERSION"));
    let archive = folder.join(format!("{name}.zip"));
    let mut zip = ZipWriter::new(
        File::create(&archive).with_context(|| format!("cannot create {}", archive.display()))?,
    );
    let files = files_below(dist)?;
    let licences = ["LICENSE-APACHE", "LICENSE-MIT"].map(|file| workspace.root.join(file));
    let ours = files.iter().map(|file| (dist, file));
    for (folder, file) in ours.chain(licences.iter().map(|file| (&*workspace.root, file))) {
        let inside = file.strip_prefix(folder)?.iter().map(OsStr::to_string_lossy);
        let inside: Vec<_> = [name.as_str().into()].into_iter().chain(inside).collect();
        let data = licences.contains(file)
            || file.extension().is_some_and(|extension| extension == "json" || extension == "txt");
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .compression_level(Some(9))
            .unix_permissions(if data { 0o644 } else { 0o755 });
        zip.start_file(inside.join("/"), options)?;
        io::copy(
            &mut File::open(file).with_context(|| format!("cannot read {}", file.display()))?,
            &mut zip,
        )?;
    }
    zip.finish()?;
    let sum = format!("{}  {name}.zip\n", sha256(&archive)?);
    fs::write(folder.join(format!("{name}.zip.sha256")), sum)?;
    fs::copy(dist.join("sdrun.cdx.json"), folder.join(format!("{name}.cdx.json")))?;
    println!("   {:>8.2} MB  {}", fs::metadata(&archive)?.len() as f64 / 1e6, archive.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_all_files_and_is_always_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let workspace = Workspace { root: folder.path().into(), target: folder.path().join("target") };
        let dist = folder.path().join("dist");
        fs::create_dir_all(dist.join("providers/x")).unwrap();
        for file in ["sdrun", "sdrun.cdx.json", "providers/x/libx.so", "../LICENSE-MIT", "../LICENSE-APACHE"]
        {
            fs::write(dist.join(file), file).unwrap();
        }
        let packed = || {
            pack(&workspace, &dist, "t").unwrap();
            let name = format!("sdrun-{}-t", env!("CARGO_PKG_VERSION"));
            let archives = workspace.target.join("archives");
            assert!(archives.join(format!("{name}.cdx.json")).is_file());
            let sum = fs::read_to_string(archives.join(format!("{name}.zip.sha256"))).unwrap();
            let archive = archives.join(format!("{name}.zip"));
            assert_eq!(sum, format!("{}  {name}.zip\n", sha256(&archive).unwrap()));
            let mut zip = zip::ZipArchive::new(File::open(archive).unwrap()).unwrap();
            let found = |at| {
                let mut file = zip.by_index(at).unwrap();
                let text = io::read_to_string(&mut file).unwrap();
                let inside = file.name().unwrap().strip_prefix(&format!("{name}/")).unwrap().to_string();
                (inside, file.unix_mode().unwrap() & 0o777, text.len())
            };
            ((0..5).map(found).collect::<Vec<_>>(), sum)
        };
        let (files, sum) = packed();
        let expected = [
            ("providers/x/libx.so", 0o755, 19),
            ("sdrun", 0o755, 5),
            ("sdrun.cdx.json", 0o644, 14),
            ("LICENSE-APACHE", 0o644, 17),
            ("LICENSE-MIT", 0o644, 14),
        ];
        let expected = expected.map(|(name, mode, length)| (name.to_string(), mode, length));
        assert_eq!(files, expected);
        assert_eq!(packed().1, sum);
    }
}

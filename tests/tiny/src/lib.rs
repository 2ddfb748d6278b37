//! Small complete pipelines (SD 1.5, SDXL, SD 3, Flux, Sana) for tests, as written by other programs.
//!
//! `data/` holds the files without their weights: Optimum's ONNX graphs, checkpoints in one file and in diffusers' layout,
//! adapters, and the outputs of PyTorch, diffusers and PEFT (README.md). The weights follow the synthetic weight rule, so
//! [`folder`] regenerates them, bit for bit, in Cargo's target folder.

use anyhow::{Context, Result, bail, ensure};
use sdrun_abi::DType;
use sdrun_weights::synthetic;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
    sync::LazyLock,
};

/// A file of [`folder`].
#[derive(Deserialize)]
struct Entry {
    /// SHA-256 sum of the whole file.
    sha256: String,
    /// Size of the whole file.
    bytes: usize,
    /// The tensors that were cut out, in the order of their offsets.
    holes: Vec<Hole>,
}

/// A tensor that was cut out of a file: offset in the whole file, tag and name of the rule, shape, type, and the part of the tensor
/// that the file holds.
#[derive(Deserialize)]
struct Hole(usize, String, String, Vec<usize>, String, Part);

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    All,
    Transposed,
    /// The first half of the rows.
    First,
    /// The second half of the rows.
    Second,
}

/// The folder with `FAMILY/{onnx,single_file,diffusers_B_fp16,lora,oracle}`. The first call creates it.
///
/// # Panics
///
/// If a file cannot be written or does not match its checksum.
pub fn folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> =
        LazyLock::new(|| made(&data()).unwrap_or_else(|why| panic!("the small pipelines: {why:#}")));
    &FOLDER
}

/// Cargo's target folder. Test programs are in `target/PROFILE/deps`, others in `target/PROFILE`.
pub fn target() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let profile =
        program.parent().map(|dir| if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir });
    let target = profile.and_then(Path::parent).map(Path::to_path_buf);
    target.with_context(|| format!("{} is not in a target folder", program.display()))
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// Creates the folder in the target folder. Its name contains the hash of the index, so other data get another folder.
fn made(data: &Path) -> Result<PathBuf> {
    let index = index(data)?;
    let folder = target()?.join(format!("tiny-pipelines-{}", &sha256(&index)[..16]));
    if !folder.is_dir() {
        let parent = folder.parent().context("the target folder has no parent")?;
        let work = tempfile::Builder::new().prefix("tiny-pipelines-").tempdir_in(parent)?;
        unpack(data, &index, work.path())?;
        // Another process may have been faster. Its folder has the same contents.
        let renamed = fs::rename(work.path(), &folder);
        ensure!(folder.is_dir(), "cannot create {}: {renamed:?}", folder.display());
    }
    Ok(folder)
}

fn index(data: &Path) -> Result<Vec<u8>> {
    unxz(&data.join("index.json.xz"))
}

/// Writes all files below `to`.
fn unpack(data: &Path, index: &[u8], to: &Path) -> Result<()> {
    let entries: BTreeMap<String, Entry> = serde_json::from_slice(index)?;
    for (name, entry) in &entries {
        let rest = unxz(&data.join(format!("{name}.xz")))?;
        let whole = whole(entry, &rest).with_context(|| name.clone())?;
        ensure!(sha256(&whole) == entry.sha256, "{name} does not match its checksum");
        let path = to.join(name);
        fs::create_dir_all(path.parent().context("a file lies in a folder")?)?;
        fs::write(&path, whole).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The whole file: `rest` with the tensors put back in.
fn whole(entry: &Entry, mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut whole = Vec::with_capacity(entry.bytes);
    for Hole(offset, tag, name, shape, dtype, part) in &entry.holes {
        let between = offset.checked_sub(whole.len()).and_then(|n| rest.split_at_checked(n));
        let (between, after) = between.with_context(|| format!("{name} overlaps another tensor"))?;
        whole.extend(between);
        rest = after;
        let dtype = match dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            other => bail!("{name}: {other} is not a type of the rule"),
        };
        let mut tensor = vec![0; dtype.bytes_of(shape).with_context(|| format!("{name} is too large"))?];
        synthetic::fill(tag, name, shape, dtype, &mut tensor)?;
        let rows = shape.first().copied().unwrap_or(1);
        let row = tensor.len() / rows;
        match part {
            Part::All => whole.extend(tensor),
            Part::First => whole.extend(&tensor[..rows / 2 * row]),
            Part::Second => whole.extend(&tensor[rows / 2 * row..]),
            Part::Transposed => {
                for column in (0..row).step_by(dtype.size()) {
                    let column = tensor.chunks_exact(row).map(|row| &row[column..][..dtype.size()]);
                    column.for_each(|element| whole.extend(element));
                }
            }
        }
    }
    whole.extend(rest);
    Ok(whole)
}

fn unxz(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut reader = lzma_rust2::XzReader::new(file, false);
    reader.read_to_end(&mut bytes).with_context(|| format!("cannot unpack {}", path.display()))?;
    Ok(bytes)
}

/// SHA-256 in lower-case hex.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Unpacks into an empty folder, because one from an earlier run would hide a fault.
    #[test]
    fn every_file_has_its_bytes() {
        let (data, to) = (data(), tempfile::tempdir().unwrap());
        let index = index(&data).unwrap();
        unpack(&data, &index, to.path()).unwrap();
        let entries: BTreeMap<String, Entry> = serde_json::from_slice(&index).unwrap();
        let cut: usize = entries.values().map(|entry| entry.holes.len()).sum();
        assert!(entries.len() > 90 && cut > 3500, "{} files, {cut} tensors", entries.len());
        for (name, entry) in &entries {
            assert_eq!(fs::read(to.path().join(name)).unwrap().len(), entry.bytes, "{name}");
        }
    }

    #[test]
    fn a_file_with_other_bytes_is_refused() {
        let to = tempfile::tempdir().unwrap();
        let index = index(&data()).unwrap();
        let name = "sd/single_file/tiny_sd_A_fp32.safetensors";
        let mut entries: serde_json::Value = serde_json::from_slice(&index).unwrap();
        let mut entry = entries[name].take();
        entry["holes"][0][1] = "another tag".into();
        let changed = serde_json::to_vec(&serde_json::json!({ name: entry })).unwrap();
        let error = unpack(&data(), &changed, to.path()).unwrap_err();
        assert_eq!(error.to_string(), format!("{name} does not match its checksum"));
        assert!(!to.path().join(name).exists());
    }
}

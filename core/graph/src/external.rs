//! Tensor data in other files: finds it and checks that it stays inside the model's folder.
//!
//! An ONNX file names other files by relative path. Its author may be hostile, so a name must neither leave the
//! folder nor reach another file through a link, and offsets must lie within the file. The rules follow onnx's
//! `docs/ExternalDataSecurity.md`.

use crate::{GraphError, WeightData, proto::StringStringEntryProto};
use bytes::Bytes;
use sdrun_abi::{Error, ErrorCode};
use sdrun_files::{Links, Map, open_regular, remember_input};
use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What opening a model accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Follow symbolic links and accept hard links of weight files, even out of the model's folder (download caches
    /// consist of links). Only for folders whose owner is trusted.
    pub allow_links: bool,
    /// Whether the weight files must exist.
    pub weights: WeightsPolicy,
}

/// Whether weight files must exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightsPolicy {
    /// A missing file is an error.
    #[default]
    Required,
    /// The weights of a missing file are [`WeightData::Absent`].
    MayBeAbsent,
}

/// How to resolve the external data of a model in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalBase<'a> {
    /// Files in this folder.
    Folder {
        /// The folder.
        dir: &'a Path,
        /// What to accept.
        options: OpenOptions,
    },
    /// There are no files: every external tensor is a weight without values and its location is arbitrary text, as
    /// [`Graph::to_onnx_stripped`](crate::Graph::to_onnx_stripped) writes it.
    Stripped,
}

/// Where a tensor's bytes are, according to the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    location: String,
    offset: u64,
    length: Option<u64>,
}

impl Location {
    /// Parses the key-value pairs of `TensorProto.external_data`.
    pub(crate) fn parse(entries: &[StringStringEntryProto]) -> Result<Self, String> {
        let (mut location, mut offset, mut length) = (None, None, None);
        let mut seen = Vec::new();
        for entry in entries {
            let (key, value) = (entry.key(), entry.value());
            if seen.contains(&key) {
                return Err(format!("key {key:?} occurs twice"));
            }
            match key {
                "location" => location = Some(value.to_owned()),
                "offset" => offset = Some(decimal(key, value)?),
                "length" => length = Some(decimal(key, value)?),
                "checksum" | "basepath" => {}
                _ => return Err(format!("unknown key {key:?}")),
            }
            seen.push(key);
        }
        let location = location.ok_or("it has no location")?;
        Ok(Location { location, offset: offset.unwrap_or(0), length })
    }

    /// End offset of `bytes` bytes in the file. Fails if the stated length differs.
    fn end(&self, bytes: u64) -> Result<u64, String> {
        if let Some(length) = self.length.filter(|n| *n != bytes) {
            return Err(format!("its length is {length} bytes, but its type and shape need {bytes}"));
        }
        self.offset.checked_add(bytes).ok_or_else(|| format!("offset {} is out of range", self.offset))
    }
}

fn decimal(key: &str, value: &str) -> Result<u64, String> {
    // `parse` alone would accept a leading plus sign.
    let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    digits
        .then(|| value.parse().ok())
        .flatten()
        .ok_or_else(|| format!("{key} {value:?} is not a decimal number below 2^64"))
}

/// Splits a relative path into components. Refuses every path whose text could lead out of the folder on any system.
fn parts(location: &str) -> Result<Vec<&str>, String> {
    let refuse = |why: &str| Err(format!("location {location:?} {why}"));
    if location.contains('\0') {
        return refuse("contains a NUL character");
    }
    if location.contains('\\') {
        return refuse("contains a backslash");
    }
    if location.starts_with('/') {
        return refuse("is an absolute path; it must be relative to the model's folder");
    }
    // On Windows, `C:weights` is a path on a drive, and `weights:stream` is an alternate stream of a file.
    let bytes = location.as_bytes();
    if (bytes.len() >= 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':')
        || (cfg!(windows) && location.contains(':'))
    {
        return refuse("begins with a drive letter; it must be relative to the model's folder");
    }
    let parts: Vec<&str> = location.split('/').filter(|part| *part != ".").collect();
    if parts.contains(&"..") {
        return refuse("points outside the model's folder");
    }
    if parts.is_empty() || parts.contains(&"") {
        return refuse("is not a file name");
    }
    Ok(parts)
}

/// A file that passed all checks.
struct Checked {
    path: Arc<PathBuf>,
    len: u64,
    /// Mapped only for data that belongs to the topology.
    map: Option<Bytes>,
}

/// Finds tensors in the files that a model refers to. Each file is checked once; none is read.
pub(crate) struct ExternalFiles<'a> {
    base: ExternalBase<'a>,
    /// Keyed by location; `None` for a file that does not exist.
    files: HashMap<String, Option<Checked>>,
}

impl<'a> ExternalFiles<'a> {
    pub(crate) fn new(base: ExternalBase<'a>) -> Self {
        ExternalFiles { base, files: HashMap::new() }
    }

    /// Whether every external tensor is a weight.
    pub(crate) fn stripped(&self) -> bool {
        self.base == ExternalBase::Stripped
    }

    /// Location of a weight of `bytes` bytes.
    pub(crate) fn weight(
        &mut self,
        tensor: &str,
        at: &Location,
        bytes: usize,
    ) -> Result<WeightData, GraphError> {
        let offset = at.offset;
        let base = self.base;
        match self.find(at, bytes as u64) {
            Ok(Some(file)) => Ok(WeightData::External { file: file.path.clone(), offset }),
            Ok(None) => match base {
                ExternalBase::Folder { dir, options } if options.weights == WeightsPolicy::Required => {
                    let file = dir.join(&at.location);
                    let reason = format!("file {} does not exist; put it beside the model", file.display());
                    Err(GraphError::MissingData { tensor: tensor.to_owned(), reason })
                }
                _ => Ok(WeightData::Absent { location: at.location.clone(), offset }),
            },
            Err(reason) => Err(GraphError::ExternalData { tensor: tensor.to_owned(), reason }),
        }
    }

    /// The `bytes` bytes of a tensor that belongs to the topology. They are mapped, so many tensors that refer to one
    /// large range of a file cost no memory.
    pub(crate) fn constant(
        &mut self,
        tensor: &str,
        at: &Location,
        bytes: usize,
    ) -> Result<Bytes, GraphError> {
        let fail = |reason| GraphError::ExternalData { tensor: tensor.to_owned(), reason };
        let base = self.base;
        let absent = || GraphError::MissingData {
            tensor: tensor.to_owned(),
            reason: format!(
                "file {:?}, which decides the graph's topology, is missing; put it beside the model",
                at.location
            ),
        };
        let file = self.find(at, bytes as u64).map_err(fail)?.ok_or_else(absent)?;
        let map = match (&file.map, base) {
            (Some(map), _) => map,
            (None, ExternalBase::Folder { dir, options }) => {
                let cannot = |e: io::Error| format!("cannot read {}: {e}", file.path.display());
                let opened = open_contained(dir, &at.location, options.allow_links).map_err(fail)?;
                let opened = opened.ok_or_else(absent)?;
                file.map.insert(Bytes::from_owner(Map::of(&opened).map_err(cannot).map_err(fail)?))
            }
            (None, ExternalBase::Stripped) => return Err(absent()),
        };
        let start = at.offset as usize;
        if map.len() < start + bytes {
            return Err(fail(format!("{} shrank while it was opened", file.path.display())));
        }
        Ok(map.slice(start..start + bytes))
    }

    fn find(&mut self, at: &Location, bytes: u64) -> Result<Option<&mut Checked>, String> {
        let end = at.end(bytes)?;
        let ExternalBase::Folder { dir, options } = self.base else { return Ok(None) };
        if !self.files.contains_key(&at.location) {
            let checked = check(dir, &at.location, options.allow_links)?;
            self.files.insert(at.location.clone(), checked);
        }
        let Some(Some(file)) = self.files.get_mut(&at.location) else { return Ok(None) };
        if end > file.len {
            return Err(format!(
                "bytes {} to {end} lie outside {}, which has {} bytes: it is truncated or belongs to another model",
                at.offset,
                file.path.display(),
                file.len
            ));
        }
        Ok(Some(file))
    }
}

fn check(dir: &Path, location: &str, allow_links: bool) -> Result<Option<Checked>, String> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let mut path = std::path::absolute(dir).map_err(|e| format!("cannot resolve {}: {e}", dir.display()))?;
    path.extend(parts(location)?);
    match open_contained(dir, location, allow_links)? {
        Some(file) => {
            remember_input(&path);
            let len = file.metadata().map_err(|e| format!("cannot read {}: {e}", path.display()))?.len();
            Ok(Some(Checked { path: Arc::new(path), len, map: None }))
        }
        None => Ok(None),
    }
}

/// Opens a regular file below `dir`; `None` if it does not exist. Error messages are full sentences.
fn open_contained(dir: &Path, location: &str, allow_links: bool) -> Result<Option<File>, String> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let parts = parts(location)?;
    let opened =
        if allow_links { open(&dir.join(parts.join("/")), Links::Follow) } else { open_beneath(dir, &parts) };
    let file = match opened {
        Ok(file) => file,
        Err(Refusal::Because(why)) => return Err(format!("location {location:?} {why}")),
        Err(Refusal::Missing) => return Ok(None),
        Err(Refusal::Failed(why)) => return Err(why),
        Err(Refusal::Io(e)) => return Err(format!("cannot open {}: {e}", dir.join(location).display())),
    };
    let metadata =
        file.metadata().map_err(|e| format!("cannot read {}: {e}", dir.join(location).display()))?;
    if !metadata.is_file() {
        return Err(format!("location {location:?} {NOT_REGULAR}"));
    }
    #[cfg(unix)]
    if !allow_links {
        let links = std::os::unix::fs::MetadataExt::nlink(&metadata);
        if links > 1 {
            return Err(format!(
                "location {location:?} is one of {links} hard links to a file; copy the file, or allow links if \
                 you trust the folder"
            ));
        }
    }
    Ok(Some(file))
}

const NOT_REGULAR: &str = "is not a regular file";
const SYMLINK: &str =
    "is, or leads through, a symbolic link; copy the file, or allow links if you trust the folder";

/// Why a file was not opened.
enum Refusal {
    /// Completes a sentence that begins with "location … ".
    Because(&'static str),
    Missing,
    Io(io::Error),
    /// A full sentence.
    Failed(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Refusal::Missing,
            _ => Refusal::Io(error),
        }
    }
}

fn open(path: &Path, links: Links) -> Result<File, Refusal> {
    open_regular(path, links).map_err(|Error { code, message, .. }| match code {
        ErrorCode::NotFound => Refusal::Missing,
        ErrorCode::InvalidArgument => Refusal::Because(NOT_REGULAR),
        _ => Refusal::Failed(message),
    })
}

/// The kernel resolves the path in one step, so an attacker cannot swap a component between check and use.
#[cfg(target_os = "linux")]
fn open_beneath(dir: &Path, parts: &[&str]) -> Result<File, Refusal> {
    use rustix::{
        fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2},
        io::Errno,
    };
    let folder = openat(CWD, dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(io::Error::from)?;
    // Without NONBLOCK, opening a pipe would wait for its other end.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(&folder, parts.join("/"), flags, Mode::empty(), resolve) {
        Ok(file) => Ok(file.into()),
        Err(Errno::LOOP) => Err(Refusal::Because(SYMLINK)),
        Err(Errno::XDEV) => Err(Refusal::Because("points outside the model's folder")),
        Err(Errno::NXIO) => Err(Refusal::Because(NOT_REGULAR)),
        // Kernels before 5.6, and sandboxes that forbid unknown system calls.
        Err(Errno::NOSYS | Errno::PERM) => open_step_by_step(dir, parts),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

#[cfg(not(target_os = "linux"))]
use open_step_by_step as open_beneath;

/// Checks each component in turn. Does not notice a link that is created between check and use.
fn open_step_by_step(dir: &Path, parts: &[&str]) -> Result<File, Refusal> {
    let mut path = dir.to_path_buf();
    for part in parts {
        path.push(part);
        if fs::symlink_metadata(&path)?.file_type().is_symlink() {
            return Err(Refusal::Because(SYMLINK));
        }
    }
    open(&path, Links::Refuse)
}

#[cfg(test)]
mod tests;

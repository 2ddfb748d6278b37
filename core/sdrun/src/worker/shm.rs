//! Shared-memory regions: files in a folder that only this user can access, in `/dev/shm` if that is a tmpfs, else in
//! the scratch folder. The host creates a region and names it. The worker maps it and removes the name at once, so
//! nothing is left if either side is killed. The host removes the rest of the folder when it ends, or the next host
//! does.
#![allow(unsafe_code)]

use super::{protocol::RegionRef, sandbox::Sandbox};
use crate::owned_folder::{OwnedFolder, new_file};
use memmap2::MmapMut;
use sdrun_abi::{Error, ErrorCode, Result};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

const PREFIX: &str = "sdrun-worker-";
/// The folder of regions and of the worker's temporary files. The lock beside it is the host's alone.
const FILES: &str = "files";
/// The folder of links to files with weights.
const LINKS: &str = "links";
/// Regions grow in these steps, so that tensors of slowly growing size do not need a new region each time.
const STEP: usize = 64 << 10;

/// Memory that host and worker share. Page aligned.
///
/// Neither side accesses it while the other may write: requests and answers pass it back and forth.
pub(super) struct Region {
    map: MmapMut,
    /// What the host keeps until the region is released; the worker's half has none.
    name: Option<Name>,
}

struct Name {
    file: PathBuf,
    told: bool,
}

impl Region {
    pub(super) fn capacity(&self) -> usize {
        self.map.len()
    }
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map
    }

    /// A reference to the first `len` bytes of this region for the worker. Only the first reference includes the
    /// file.
    pub(super) fn reference(&mut self, slot: usize, len: usize) -> RegionRef {
        let mut file = None;
        if let Some(name) = self.name.as_mut().filter(|name| !name.told) {
            name.told = true;
            file = Some(name.file.clone());
        }
        RegionRef { slot, len, file }
    }

    /// The worker's half: maps the region and removes its name.
    pub(super) fn attach(file: &Path, len: usize) -> Result<Self> {
        let map = || -> io::Result<MmapMut> {
            let opened = OpenOptions::new().read(true).write(true).open(file)?;
            let map = map(&opened)?;
            if map.len() < len {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    format!("it has {} bytes", map.len()),
                ));
            }
            // Windows cannot remove a mapped file; there the host removes the folder.
            #[cfg(unix)]
            fs::remove_file(file)?;
            Ok(map)
        };
        Ok(Region { map: map().map_err(|e| Error::io("map the shared region", file, &e))?, name: None })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Usually gone already: the worker removes it as soon as it has mapped it.
            let _ = fs::remove_file(&name.file);
        }
    }
}

fn map(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the file is in a folder that only this user can access and only host and worker know. Neither truncates
    // it, and they take turns in using its bytes (see `Region`).
    unsafe { MmapMut::map_mut(file) }
}

/// The folders of one host and worker pair. Removed on drop.
pub(super) struct Folders {
    ram: Option<Folder>,
    scratch_base: PathBuf,
    scratch: Option<Folder>,
    regions: u64,
}

impl Folders {
    pub(super) fn open(scratch_base: &Path) -> Result<Self> {
        let scratch_base = std::path::absolute(scratch_base)
            .map_err(|e| Error::io("resolve the scratch folder", scratch_base, &e))?;
        let ram_base = Path::new("/dev/shm");
        let ram = if is_tmpfs(ram_base) { Folder::make(ram_base).ok() } else { None };
        Ok(Folders { ram, scratch_base, scratch: None, regions: 0 })
    }

    /// Adds the folders of this pair to what a worker may use. Returns the folders for its temporary files and for its links.
    pub(super) fn allow(&mut self, sandbox: &mut Sandbox) -> Result<(PathBuf, PathBuf)> {
        let failed = |e| Error::io("make a folder in", &self.scratch_base, &e);
        let folder = match &mut self.scratch {
            Some(folder) => folder,
            none => none.insert(Folder::make(&self.scratch_base).map_err(failed)?),
        };
        let links = folder.path().join(LINKS);
        fs::create_dir(&links).map_err(|e| Error::io("make", &links, &e))?;
        let files = folder.files();
        sandbox.writable.extend(self.ram.as_ref().map(Folder::files));
        sandbox.writable.push(files.clone());
        sandbox.linkable = Some(links.clone());
        Ok((files, links))
    }

    /// A region of at least `len` bytes, all allocated up front: writing to it cannot fail later.
    pub(super) fn region(&mut self, len: usize) -> Result<Region> {
        let capacity = len.max(1).checked_next_multiple_of(STEP).ok_or_else(|| {
            Error::invalid(format!("{len} bytes of shared memory are more than there can be"))
        })?;
        self.regions += 1;
        let mut in_ram = None;
        if let Some(folder) = &self.ram {
            match folder.region(self.regions, capacity) {
                Ok(region) => return Ok(region),
                Err(e) => {
                    tracing::debug!("no {capacity} bytes in {}: {e}; using a file", folder.path().display());
                    in_ram = Some(e);
                }
            }
        }
        let failed = |base: &Path, on_disk: io::Error| {
            let ram = in_ram.as_ref().map(|e| format!("/dev/shm: {e}; ")).unwrap_or_default();
            let message = format!(
                "cannot get {capacity} bytes of memory shared with a worker ({ram}{}: {on_disk})",
                base.display()
            );
            Error::new(ErrorCode::ResourceExhausted, message).with_hint("free memory or disk space")
        };
        let folder = match &mut self.scratch {
            Some(folder) => folder,
            none => none.insert(Folder::make(&self.scratch_base).map_err(|e| failed(&self.scratch_base, e))?),
        };
        folder.region(self.regions, capacity).map_err(|e| failed(&self.scratch_base, e))
    }
}

/// A private folder of regions and other files.
struct Folder(OwnedFolder);

impl Folder {
    fn make(base: &Path) -> io::Result<Self> {
        let folder = Folder(OwnedFolder::make(base, PREFIX)?);
        fs::create_dir(folder.files())?;
        Ok(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn files(&self) -> PathBuf {
        self.path().join(FILES)
    }

    fn region(&self, number: u64, capacity: usize) -> io::Result<Region> {
        let dir = self.files();
        if free_bytes(&dir).is_some_and(|free| free < capacity as u64) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let path = dir.join(number.to_string());
        let mut file = new_file(&path)?;
        match fill(&mut file, capacity).and_then(|()| map(&file)) {
            Ok(map) => Ok(Region { map, name: Some(Name { file: path, told: false }) }),
            Err(e) => {
                let _ = fs::remove_file(&path);
                Err(e)
            }
        }
    }
}

/// Writes `len` zeros. A hole in a mapped file would cause SIGBUS when the disk is full.
fn fill(file: &mut File, len: usize) -> io::Result<()> {
    let zeros = vec![0; len.min(256 << 10)];
    let mut left = len;
    while left > 0 {
        let n = left.min(zeros.len());
        file.write_all(&zeros[..n])?;
        left -= n;
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn is_tmpfs(path: &Path) -> bool {
    // TMPFS_MAGIC of linux/magic.h.
    rustix::fs::statfs(path).is_ok_and(|fs| fs.f_type as u64 == 0x0102_1994)
}

#[cfg(not(target_os = "linux"))]
fn is_tmpfs(_: &Path) -> bool {
    false
}

/// Free bytes on the file system of `path`; `None` if unknown (a tmpfs without limit has no blocks).
fn free_bytes(path: &Path) -> Option<u64> {
    let fs = fs4::statvfs(path).ok()?;
    (fs.total_space() > 0).then(|| fs.available_space())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_disk(base: &Path) -> Folders {
        Folders { ram: None, ..Folders::open(base).unwrap() }
    }

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn both_sides_see_the_same_bytes_and_no_name_is_left() {
        let base = tempfile::tempdir().unwrap();
        let mut folders = on_disk(base.path());
        let mut host = folders.region(100_000).unwrap();
        assert_eq!(host.capacity(), 131_072);
        let first = host.reference(0, 100_000);
        let mut worker = Region::attach(first.file.as_deref().unwrap(), first.len).unwrap();
        assert_eq!(host.reference(5, 7), RegionRef { slot: 5, len: 7, file: None });
        host.bytes_mut()[99_999] = 42;
        worker.bytes_mut()[0] = 43;
        assert_eq!((worker.bytes()[99_999], host.bytes()[0]), (42, 43));
        let folder = folders.scratch.as_ref().unwrap().path().to_path_buf();
        #[cfg(unix)]
        assert_eq!(names(&folder.join(FILES)), [""; 0]);
        if cfg!(unix) {
            drop(folders);
            assert_eq!(host.bytes()[0], 43, "a mapping outlives its name");
        } else {
            drop((host, worker));
            drop(folders);
        }
        assert!(!folder.exists());
    }

    #[cfg(unix)]
    #[test]
    fn only_the_user_has_access() {
        use std::os::unix::fs::PermissionsExt;
        let base = tempfile::tempdir().unwrap();
        let mut folders = on_disk(base.path());
        let file = folders.region(1).unwrap().reference(0, 1).file.unwrap();
        let again = folders.region(1).unwrap();
        let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(file.parent().unwrap().parent().unwrap()), 0o700);
        assert_eq!(mode(&again.name.as_ref().unwrap().file), 0o600);
        assert!(!file.exists(), "a region that is dropped unmapped leaves no file");
    }

    #[test]
    fn regions_that_do_not_fit_are_refused_before_the_disk_is_full() {
        let base = tempfile::tempdir().unwrap();
        let mut folders = on_disk(base.path());
        for len in [1 << 60, usize::MAX - 5] {
            let error = folders.region(len).err().unwrap();
            assert!(
                error.message.contains("shared memory") || error.message.contains("memory shared"),
                "{error}"
            );
        }
        let folder = folders.scratch.as_ref().unwrap().path().to_path_buf();
        assert_eq!(names(&folder.join(FILES)), [""; 0]);
    }

    #[test]
    fn a_region_that_is_too_short_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let file = base.path().join("r");
        fs::write(&file, [0; 10]).unwrap();
        assert!(Region::attach(&file, 11).err().unwrap().message.contains("10 bytes"));
        assert_eq!(Region::attach(&base.path().join("none"), 1).err().unwrap().code, ErrorCode::NotFound);
    }
}

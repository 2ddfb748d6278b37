//! NumPy's files: [`npy`] with one array, [`npz`] with several under their names.

pub mod npy;
pub mod npz;

use sdrun_abi::{Error, Result};
use sdrun_files::{Links, open_regular};
use std::{fs::File, path::Path};

/// A regular file and its size.
fn open(path: &Path) -> Result<(File, u64)> {
    let file = open_regular(path, Links::Follow)?;
    let size = file.metadata().map_err(|e| Error::io("read", path, &e))?.len();
    Ok((file, size))
}

//! NumPy's `.npz` format: a zip archive of `.npy` files, one per array.

use super::{npy, open};
use crate::{HostTensor, Tensors};
use sdrun_abi::{DType, Error};
use sdrun_files::Output;
use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};
use zip::{CompressionMethod, ZipArchive, ZipWriter, result::ZipError, write::SimpleFileOptions};

/// Deflate compresses by at most this factor (zlib's documentation). An entry that claims more is damaged.
const MOST_COMPRESSION: u64 = 1032;

/// The arrays of a file, or the one called `only`. `check` sees the name, type and shape of each before it is read: an archive of a few
/// megabytes can hold gigabytes.
///
/// # Errors
/// As [`npy::read`]; `NotFound` with the names of all arrays if there is no array `only`.
pub fn read(
    path: &Path,
    only: Option<&str>,
    check: impl Fn(&str, DType, &[usize]) -> Result<(), Error>,
) -> Result<Tensors, Error> {
    let (file, size) = open(path)?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| fault(path, e))?;
    let mut tensors = Tensors::new();
    for index in 0..archive.len() {
        let entry_name = match archive.name_for_index(index) {
            Some(Ok(name)) => name.into_owned(),
            _ => return Err(Error::damaged(path, "is not a NumPy archive: a name in it is not text")),
        };
        let name = entry_name.strip_suffix(".npy").unwrap_or(&entry_name);
        if only.is_some_and(|only| only != name) {
            continue;
        }
        if name.len() == entry_name.len() {
            return Err(Error::damaged(
                path,
                format!("is not a NumPy archive: {entry_name:?} in it is not a .npy file"),
            ));
        }
        let fits = |dtype, shape: &[usize]| check(name, dtype, shape);
        tensors.insert(name.to_string(), read_entry(path, &mut archive, index, size, fits)?);
    }
    match only {
        Some(only) if tensors.is_empty() => {
            let names =
                archive.file_names().flatten().map(|n| n.strip_suffix(".npy").unwrap_or(&n).to_string());
            let message = format!(
                "{} has no array {only:?} (it has: {})",
                path.display(),
                names.collect::<Vec<_>>().join(", ")
            );
            Err(Error::not_found(message).with_file(path))
        }
        _ => Ok(tensors),
    }
}

fn read_entry(
    path: &Path,
    archive: &mut ZipArchive<BufReader<File>>,
    index: usize,
    file_size: u64,
    check: impl FnOnce(DType, &[usize]) -> Result<(), Error>,
) -> Result<HostTensor, Error> {
    let mut entry = archive.by_index(index).map_err(|e| fault(path, e))?;
    let (size, packed) = (entry.size(), entry.compressed_size());
    let possible = match entry.compression() {
        CompressionMethod::Stored => size == packed,
        _ => size / MOST_COMPRESSION <= packed,
    };
    if packed > file_size || !possible {
        let name = entry.name();
        return Err(Error::damaged(
            path,
            format!("is damaged: {name:?} claims {size} bytes out of {packed}"),
        ));
    }
    let tensor = npy::read_from(&mut entry, size, check).map_err(|e| e.of(path))?;
    // The reader compares the checksum only at the end of the entry.
    match entry.read(&mut [0]) {
        Ok(0) => Ok(tensor),
        Ok(_) => {
            Err(Error::damaged(path, format!("is damaged: {:?} continues after its array", entry.name())))
        }
        Err(e) => Err(Error::damaged(path, format!("is damaged: {e} in {:?}", entry.name()))),
    }
}

fn fault(path: &Path, error: ZipError) -> Error {
    match error {
        ZipError::Io(e) if e.kind() != io::ErrorKind::UnexpectedEof && e.raw_os_error().is_some() => {
            Error::io("read", path, &e)
        }
        ZipError::UnsupportedArchive(why) => {
            Error::unsupported(format!("cannot read {}: {why}", path.display())).with_file(path)
        }
        e => Error::damaged(path, format!("is not a valid .npz file: {e}")),
    }
}

/// Writes tensors of types that the format has ([`npy::storable`]), uncompressed as `np.savez` does.
///
/// # Errors
/// Errors of writing; `InvalidInput` for another type.
pub fn write_to<'a>(
    out: &mut dyn Output,
    tensors: impl IntoIterator<Item = (&'a str, &'a HostTensor)>,
) -> io::Result<()> {
    let mut archive = ZipWriter::new(out);
    for (name, tensor) in tensors {
        // With the fixed default time, equal results give equal files.
        let options = SimpleFileOptions::DEFAULT
            .compression_method(CompressionMethod::Stored)
            .large_file(tensor.bytes().len() as u64 > u64::from(u32::MAX) - 65_536);
        archive.start_file(format!("{name}.npy"), options)?;
        npy::write_to(&mut archive, tensor)?;
    }
    archive.finish()?.flush()
}

#[cfg(test)]
mod tests {
    use super::{npy::tests::*, *};
    use proptest::prelude::*;
    use sdrun_abi::ErrorCode;
    use std::io::Cursor;

    fn anything(_: &str, _: DType, _: &[usize]) -> Result<(), Error> {
        Ok(())
    }
    fn archive(tensors: &[(&str, &HostTensor)]) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        write_to(&mut bytes, tensors.iter().copied()).unwrap();
        bytes.into_inner()
    }
    fn with_file<T>(bytes: &[u8], look: impl FnOnce(&Path) -> T) -> T {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npz");
        std::fs::write(&path, bytes).unwrap();
        look(&path)
    }

    #[test]
    fn every_type_comes_back_under_its_name() {
        let samples = samples();
        let names: Vec<String> = (0..samples.len()).map(|i| format!("out/{i}:0 ü")).collect();
        let pairs: Vec<(&str, &HostTensor)> = names.iter().map(String::as_str).zip(&samples).collect();
        with_file(&archive(&pairs), |path| {
            let all = read(path, None, anything).unwrap();
            assert_eq!(all.len(), samples.len());
            for (name, sample) in &pairs {
                assert!(same(&all[*name], sample), "{name}");
            }
            let one = read(path, Some(&names[3]), anything).unwrap();
            assert!(one.len() == 1 && same(&one[&names[3]], &samples[3]));
            let error = read(path, Some("absent"), anything).unwrap_err();
            assert_eq!(error.code, ErrorCode::NotFound);
            assert!(error.message.contains(&names[0]), "{error}");
        });
    }

    #[test]
    fn compressed_archives_are_read() {
        let tensor = HostTensor::zeros(DType::F32, vec![1000]).unwrap();
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        zip.start_file("a.npy", SimpleFileOptions::DEFAULT.compression_method(CompressionMethod::Deflated))
            .unwrap();
        npy::write_to(&mut zip, &tensor).unwrap();
        let bytes = zip.finish().unwrap().into_inner();
        assert!(bytes.len() < 1000);
        with_file(&bytes, |path| assert!(same(&read(path, None, anything).unwrap()["a"], &tensor)));
    }

    #[test]
    fn arrays_that_do_not_fit_are_not_read() {
        let good = archive(&[("a", &samples()[0])]);
        let data = good.windows(samples()[0].bytes().len()).position(|w| w == samples()[0].bytes()).unwrap();
        let mut flipped = good;
        flipped[data] ^= 1;
        let refuse = |name: &str, dtype, shape: &[usize]| {
            assert_eq!((name, dtype, shape), ("a", samples()[0].dtype(), samples()[0].shape()));
            Err(Error::invalid("not this one"))
        };
        // Reading the array would find that its checksum is wrong.
        let error = with_file(&flipped, |path| read(path, None, refuse).unwrap_err());
        assert_eq!(error.message, "not this one");
    }

    #[test]
    fn damage_is_reported() {
        let samples = samples();
        let good = archive(&[("a", &samples[0])]);
        let data = good.windows(samples[0].bytes().len()).position(|w| w == samples[0].bytes()).unwrap();
        let mut flipped = good.clone();
        flipped[data] ^= 1;
        let mut foreign = ZipWriter::new(Cursor::new(Vec::new()));
        foreign.start_file("readme.txt", SimpleFileOptions::DEFAULT).unwrap();
        let foreign = foreign.finish().unwrap().into_inner();
        for (bytes, words) in [
            (&good[..good.len() - 3], "valid .npz"),
            (&flipped, "checksum"),
            (b"PK", "valid .npz"),
            (b"", "valid .npz"),
            (&foreign, "readme.txt"),
        ] {
            let error = with_file(bytes, |path| read(path, None, anything).unwrap_err());
            assert_eq!(error.code, ErrorCode::DataLoss, "{error}");
            assert!(error.message.contains(words) && error.message.contains("x.npz"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn changed_files_are_read_without_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let samples = samples();
            let mut bytes = archive(&[("a", &samples[0]), ("b", &samples[9])]);
            for (at, byte) in edits {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            with_file(&bytes, |path| { let _ = read(path, None, anything); });
        }
    }
}

//! Picture files by name.

pub(crate) mod tensor;

use super::is_special;
use image::RgbImage;
use sdrun::{
    abi::Error,
    files::{Links, read_small},
};
use sdrun_diffusion::file::{self, File, Format};
use std::path::Path;

/// The largest file to read, in bytes.
const MOST_BYTES: u64 = 1 << 30;

/// The format to write a file in, by its ending. Pipes and devices get PNG.
///
/// # Errors
/// `InvalidArgument` for other endings.
pub(crate) fn format_of(path: &Path) -> Result<Format, Error> {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    match ending.as_deref().and_then(Format::of_ending) {
        Some(format) => Ok(format),
        None if is_special(path) => Ok(Format::Png),
        None => {
            let message = format!("{} does not end in .png, .jpg, .jpeg or .webp", path.display());
            Err(Error::invalid(message).with_file(path))
        }
    }
}

/// Reads a picture. The file's content tells its format, not its name.
///
/// # Errors
/// `DataLoss` for a file that is not a whole picture, or too large a one, and errors of opening the file.
pub(crate) fn read(path: &Path) -> Result<File, Error> {
    file::decode(&bytes_of(path)?, file::MOST_PIXELS).map_err(|why| Error::damaged(path, why))
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, Error> {
    read_small(path, Links::Follow, MOST_BYTES)
}

/// Pixels as a picture to write: `[height, width, 3]` bytes.
///
/// # Errors
/// `InvalidArgument` if the sizes are too large for a picture file, or are not those of the bytes.
pub(crate) fn rgb(width: usize, height: usize, bytes: Vec<u8>) -> Result<RgbImage, Error> {
    let sizes = u32::try_from(width).ok().zip(u32::try_from(height).ok());
    let image = sizes.and_then(|(width, height)| RgbImage::from_raw(width, height, bytes));
    image.ok_or_else(|| Error::invalid(format!("{width} x {height} pixels do not fit into a picture file")))
}

/// Writes a picture in the format of its ending; see [`file::encode`].
///
/// # Errors
/// As [`format_of`], [`super::write`], and `InvalidArgument` for a picture that is too large for the format.
pub(crate) fn write(
    path: &Path,
    picture: &RgbImage,
    quality: u8,
    texts: &[(&str, &str)],
) -> anyhow::Result<()> {
    let bytes = file::encode(format_of(path)?, picture, quality, texts)
        .map_err(|why| Error::invalid(format!("cannot write {}: {why}", path.display())).with_file(path))?;
    super::write(path, |out| out.write_all(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun::abi::ErrorCode;
    use std::fs;

    #[test]
    fn a_file_without_a_known_ending_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["x", "x.gif", "png"] {
            let error = write(&dir.path().join(name), &RgbImage::new(2, 2), 90, &[]).unwrap_err();
            let error = error.downcast_ref::<Error>().unwrap();
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert!(error.message.ends_with("does not end in .png, .jpg, .jpeg or .webp"), "{error}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(format_of(Path::new("a.b/C.JPG")).unwrap(), Format::Jpeg);
        #[cfg(unix)]
        assert_eq!(format_of(Path::new("/dev/null")).unwrap(), Format::Png);
    }

    #[test]
    fn damage_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.png");
        fs::write(&path, b"GIF89a").unwrap();
        let Err(error) = read(&path) else { panic!("it was read") };
        assert_eq!(error.code, ErrorCode::DataLoss);
        assert!(error.message.ends_with("x.png is not a PNG, JPEG or WebP picture"), "{error}");
    }
}

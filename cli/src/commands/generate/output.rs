//! Files of pictures.

use crate::files::picture;
use sdrun_diffusion::{
    file::{self, JPEG_QUALITY},
    metadata::Record,
    pipeline::Picture,
};
use std::path::{Path, PathBuf};

/// `NAME.png`, `NAME-2.png` and so on.
pub(super) fn numbered(file: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return file.to_path_buf();
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let ending = file.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    file.with_file_name(format!("{stem}-{}{ending}", number + 1))
}

/// Writes a picture with its settings.
pub(super) fn write(file: &Path, picture: Picture, record: Option<&Record>) -> anyhow::Result<()> {
    let image = picture::rgb(picture.width, picture.height, picture.bytes)?;
    let texts = record.map(file::texts);
    let texts: Vec<(&str, &str)> = texts.iter().flatten().map(|(key, text)| (*key, text.as_str())).collect();
    picture::write(file, &image, JPEG_QUALITY, &texts)
}

#[cfg(test)]
mod tests {
    use super::numbered;
    use std::path::Path;

    #[test]
    fn further_pictures_have_a_number() {
        assert_eq!(numbered(Path::new("a/fox.png"), 0), Path::new("a/fox.png"));
        assert_eq!(numbered(Path::new("a/fox.png"), 1), Path::new("a/fox-2.png"));
        assert_eq!(numbered(Path::new("fox"), 2), Path::new("fox-3"));
    }
}

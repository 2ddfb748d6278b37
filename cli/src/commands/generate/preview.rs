//! Rough pictures of what is being drawn.

use super::output::numbered;
use crate::files::{self, picture};
use clap::Args;
use sdrun::abi::Error;
use sdrun_diffusion::{
    family::Family,
    file::JPEG_QUALITY,
    preview::{Pace, enlarged},
};
use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf, absolute},
    time::Instant,
};

#[derive(Args)]
pub(super) struct PreviewArgs {
    /// Show the picture as it is so far in this PNG, JPEG or WebP file, which is replaced while the picture is drawn
    #[arg(long, alias = "preview-path", value_name = "FILE")]
    preview: Option<PathBuf>,

    /// Steps between previews [default: as many as cost one percent of the time]
    #[arg(long, value_name = "N", requires = "preview")]
    preview_interval: Option<NonZeroUsize>,
}

/// The previews of a run.
pub(super) struct Preview {
    file: PathBuf,
    pace: Pace,
}

impl PreviewArgs {
    /// Previews, if the user wants some. They must not replace one of the pictures.
    pub(super) fn open(&self, output: &Path, pictures: usize) -> Result<Option<Preview>, Error> {
        let Some(file) = &self.preview else { return Ok(None) };
        picture::format_of(file)?;
        let place = absolute(file).ok();
        if (0..pictures).any(|number| absolute(numbered(output, number)).ok() == place) {
            let message = format!("{} is a picture too: give --preview another file", file.display());
            return Err(Error::invalid(message).with_file(file));
        }
        files::check_target(file)?;
        let pace = Pace::new(self.preview_interval);
        Ok(Some(Preview { file: file.clone(), pace }))
    }
}

impl Preview {
    /// Shows the state after a step if a preview is due. `clean` is an estimate of the final latents, of the shape
    /// `[channels, height, width]`.
    ///
    /// # Errors
    /// Why there can be no preview.
    pub(super) fn show(
        &mut self,
        family: &Family,
        clean: &[f32],
        shape: [usize; 3],
        step: usize,
    ) -> anyhow::Result<Option<&Path>> {
        let start = Instant::now();
        if !self.pace.is_due(step, start) {
            return Ok(None);
        }
        let Some(picture) = enlarged(family, clean, shape) else {
            anyhow::bail!("there are no previews of {} yet", family.title);
        };
        picture::write(&self.file, &picture, JPEG_QUALITY, &[])?;
        self.pace.took(start, Instant::now());
        Ok(Some(&self.file))
    }
}

#[cfg(test)]
mod tests {
    use super::PreviewArgs;
    use std::path::Path;

    #[test]
    fn a_preview_is_no_picture() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let open = |name: &str| {
            PreviewArgs { preview: Some(at(name)), preview_interval: None }.open(&at("fox.png"), 2)
        };
        assert!(open("preview.png").unwrap().is_some() && open("fox-3.png").unwrap().is_some());
        for name in ["fox.png", "fox-2.png", "preview.gif", "nowhere/preview.png"] {
            assert!(open(name).is_err(), "{name}");
        }
        let none = PreviewArgs { preview: None, preview_interval: None };
        assert!(none.open(Path::new("fox.png"), 2).unwrap().is_none());
    }
}

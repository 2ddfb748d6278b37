//! Pictures as `[1, 3, height, width]` tensors and back.

use super::bytes_of;
use crate::parse::ImageRange;
use image::RgbImage;
use sdrun::{
    HostTensor,
    abi::{DType, Error, TensorSpec},
    check_input,
};
use sdrun_diffusion::file::{FileError, MOST_PIXELS, decode};
use std::path::Path;

/// Reads a picture as a tensor for an input of f32, f16 or bf16: black is `range.low`, white `range.high`. Grey becomes three equal
/// channels. Refuses a picture with transparency, because its background is unknown, and decodes none with more pixels than the input.
pub(crate) fn of_file(path: &Path, spec: &TensorSpec, range: ImageRange) -> Result<HostTensor, Error> {
    let dtype = spec.dtype;
    check_float(path, dtype)?;
    let fits = |width: u32, height: u32| {
        check_input(spec, dtype, &[1, 3, height as usize, width as usize]).map_err(|e| e.with_file(path))
    };
    let most = match spec.shape[..] {
        [_, _, Some(height), Some(width)] => (height as u64).saturating_mul(width as u64).min(MOST_PIXELS),
        _ => MOST_PIXELS,
    };
    let picture = decode(&bytes_of(path)?, most).map_err(|why| {
        let unfit = match why {
            FileError::TooLarge { width, height, .. } => fits(width, height).err(),
            _ => None,
        };
        unfit.unwrap_or_else(|| Error::damaged(path, why))
    })?;
    fits(picture.image().width(), picture.image().height())?;
    if picture.erased().is_some() {
        return Err(Error::unsupported(format!("{} is partly transparent", path.display()))
            .with_file(path)
            .with_hint("flatten it onto a background and save it without an alpha channel"));
    }
    // Samples of 8 bits become multiples of 257, so that the fractions stay the same.
    let image = picture.image().to_rgb16();
    let (width, height) = (image.width() as usize, image.height() as usize);
    let samples = image.into_raw();
    let planes = (0..3).flat_map(|channel| samples.iter().skip(channel).step_by(3));
    let values = planes.map(|&sample| {
        let fraction = f32::from(sample) / f32::from(u16::MAX);
        f64::from(range.low + fraction * (range.high - range.low))
    });
    HostTensor::from_f64(dtype, vec![1, 3, height, width], values).map_err(|e| Error::internal(e.to_string()))
}

fn check_float(what: impl AsRef<Path>, dtype: DType) -> Result<(), Error> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        _ => Err(Error::invalid(format!(
            "{} cannot be a picture: it is {dtype}, and pictures are f32, f16 or bf16",
            what.as_ref().display()
        ))),
    }
}

/// A tensor as an 8-bit picture, and its number of NaN and infinite values. NaN becomes black; values outside the range become
/// black or white.
///
/// # Errors
/// `InvalidArgument` if the tensor is not `[1, 3, height, width]`.
pub(crate) fn to_picture(
    name: &str,
    tensor: &HostTensor,
    range: ImageRange,
) -> Result<(RgbImage, usize), Error> {
    check_float(name, tensor.dtype())?;
    let [1, 3, height @ 1..=usize::MAX, width @ 1..=usize::MAX] = *tensor.shape() else {
        return Err(Error::invalid(format!(
            "{name:?} cannot be a picture: it has shape {:?}, not [1, 3, height, width]",
            tensor.shape()
        ))
        .with_hint("write it as .npy instead"));
    };
    let values = tensor.values().ok_or_else(|| Error::internal("a float tensor has no values"))?;
    let plane = values.len() / 3;
    let (low, high) = (f64::from(range.low), f64::from(range.high));
    let mut bytes = vec![0; values.len()];
    for (i, value) in values.clone().enumerate() {
        // `as` turns NaN into 0 and stays within 0..=255.
        bytes[(i % plane) * 3 + i / plane] = ((value - low) / (high - low) * 255.0).round() as u8;
    }
    let not_finite = values.filter(|v| !v.is_finite()).count();
    Ok((super::rgb(width, height, bytes)?, not_finite))
}

#[cfg(test)]
mod tests {
    use super::*;
    use png::{BitDepth, ColorType};
    use sdrun::abi::ErrorCode;
    use std::{fs, path::PathBuf};

    /// A PNG file of two pixels.
    fn encode_png(dir: &Path, color: ColorType, depth: BitDepth, data: &[u8]) -> PathBuf {
        let path = dir.join("x.png");
        let mut encoder = png::Encoder::new(fs::File::create(&path).unwrap(), 2, 1);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == ColorType::Indexed {
            encoder.set_palette(vec![0, 0, 0, 255, 0, 51]);
        }
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(data).unwrap();
        writer.finish().unwrap();
        path
    }

    fn open(dtype: DType) -> TensorSpec {
        TensorSpec { name: "x".into(), dtype, shape: vec![None; 4] }
    }

    const UNIT: ImageRange = ImageRange { low: 0.0, high: 1.0 };
    const SIGNED: ImageRange = ImageRange { low: -1.0, high: 1.0 };

    #[test]
    fn pictures_become_planes_in_the_range() {
        let dir = tempfile::tempdir().unwrap();
        let rgb = encode_png(dir.path(), ColorType::Rgb, BitDepth::Eight, &[0, 51, 102, 153, 204, 255]);
        let tensor = of_file(&rgb, &open(DType::F32), SIGNED).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, &[1, 3, 1, 2][..]));
        let close = |tensor: &HostTensor, expected: [f64; 6], most: f64| {
            let values = tensor.to_f64().unwrap();
            assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() < most), "{values:?}");
        };
        close(&tensor, [-1.0, 0.2, -0.6, 0.6, -0.2, 1.0], 1e-6);
        close(&of_file(&rgb, &open(DType::F16), UNIT).unwrap(), [0.0, 0.6, 0.2, 0.8, 0.4, 1.0], 1e-3);
        let grey = encode_png(dir.path(), ColorType::Grayscale, BitDepth::Sixteen, &[0, 1, 255, 255]);
        let tiny = 1.0 / 65_535.0;
        close(&of_file(&grey, &open(DType::F32), UNIT).unwrap(), [tiny, 1.0, tiny, 1.0, tiny, 1.0], 1e-8);
        let palette = encode_png(dir.path(), ColorType::Indexed, BitDepth::One, &[0b0100_0000]);
        close(&of_file(&palette, &open(DType::F32), UNIT).unwrap(), [0.0, 1.0, 0.0, 0.0, 0.0, 0.2], 1e-6);
    }

    #[test]
    fn alpha_counts_only_where_it_shows() {
        let dir = tempfile::tempdir().unwrap();
        let with_alpha = |alpha| {
            let pixels = [9, 9, 9, 255, 1, 2, 3, alpha];
            of_file(
                &encode_png(dir.path(), ColorType::Rgba, BitDepth::Eight, &pixels),
                &open(DType::F32),
                UNIT,
            )
        };
        assert_eq!(with_alpha(255).unwrap().shape(), [1, 3, 1, 2]);
        assert_eq!(with_alpha(254).unwrap_err().code, ErrorCode::Unimplemented);
    }

    #[test]
    fn every_8_bit_value_survives_the_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let picture = super::super::rgb(16, 8, (0..=255).chain(0..=127).collect()).unwrap();
        for (range, ending) in [(UNIT, "png"), (SIGNED, "webp")] {
            let path = dir.path().join("x").with_extension(ending);
            super::super::write(&path, &picture, 100, &[]).unwrap();
            for dtype in [DType::F32, DType::F16] {
                let tensor = of_file(&path, &open(dtype), range).unwrap();
                assert_eq!(to_picture("x", &tensor, range).unwrap(), (picture.clone(), 0), "{dtype}");
            }
        }
    }

    #[test]
    fn values_out_of_range_are_clipped_and_nan_is_counted() {
        let tensor =
            HostTensor::from_f32(vec![1, 3, 1, 2], &[-9.0, 9.0, f32::NAN, f32::INFINITY, 0.5, 0.2]).unwrap();
        let (picture, not_finite) = to_picture("x", &tensor, UNIT).unwrap();
        assert_eq!((picture.into_raw(), not_finite), (vec![0, 0, 128, 255, 255, 51], 2));
    }

    #[test]
    fn pictures_of_other_sizes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = encode_png(dir.path(), ColorType::Rgb, BitDepth::Eight, &[7; 6]);
        for (height, width, fits) in [(1, 2, true), (2, 1, false), (1, 1, false), (64, 64, false)] {
            let spec =
                TensorSpec { shape: vec![Some(1), Some(3), Some(height), Some(width)], ..open(DType::F32) };
            let read = of_file(&path, &spec, UNIT);
            assert_eq!(read.is_ok(), fits, "{height}x{width}");
            if let Err(error) = read {
                assert!(error.message.contains("[1, 3, 1, 2]"), "{error}");
            }
        }
    }

    #[test]
    fn tensors_that_are_no_pictures_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = encode_png(dir.path(), ColorType::Rgb, BitDepth::Eight, &[7; 6]);
        assert_eq!(of_file(&path, &open(DType::I64), UNIT).unwrap_err().code, ErrorCode::InvalidArgument);
        for shape in [vec![3, 4, 4], vec![1, 4, 4, 3], vec![2, 3, 4, 2], vec![1, 3, 0, 16]] {
            let tensor = HostTensor::zeros(DType::F32, shape).unwrap();
            assert!(to_picture("x", &tensor, UNIT).is_err());
        }
    }
}

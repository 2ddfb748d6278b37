//! PNG pictures as `[1, 3, height, width]` tensors and back.

use super::{damaged, open};
use crate::parse::ImageRange;
use png::{BitDepth, ColorType, Transformations};
use sdrun::{
    HostTensor,
    abi::{DType, Error},
};
use std::{
    io::{self, BufReader, Write},
    path::Path,
};

/// Bytes the decoder may use beyond the picture itself.
const DECODER_BYTES: usize = 64 << 20;
/// Deflate compresses by at most this factor (zlib's documentation). A header that claims more is wrong.
const MOST_COMPRESSION: u64 = 1032;

/// Reads a picture as a tensor of `dtype` (f32, f16 or bf16): black is `range.low`, white `range.high`. Grey
/// becomes three equal channels. Refuses a picture with transparency, because its background is unknown.
pub(crate) fn read(path: &Path, dtype: DType, range: ImageRange) -> Result<HostTensor, Error> {
    check_float(path, dtype)?;
    let (file, file_size) = open(path)?;
    let invalid = |e: png::DecodingError| match e {
        png::DecodingError::IoError(e) if e.kind() != io::ErrorKind::UnexpectedEof => {
            Error::io("read", path, &e)
        }
        e => damaged(path, format!("is not a valid PNG file: {e}")),
    };
    let limits = png::Limits { bytes: DECODER_BYTES };
    let mut decoder = png::Decoder::new_with_limits(BufReader::new(file), limits);
    decoder.set_transformations(Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(invalid)?;
    let (width, height) = (reader.info().width, reader.info().height);
    // Expanding multiplies the samples of a one-bit palette by 32 (to RGBA bytes).
    let most = file_size.saturating_mul(MOST_COMPRESSION * 32);
    let size = reader.output_buffer_size().filter(|size| *size as u64 <= most).ok_or_else(|| {
        damaged(
            path,
            format!("is not a valid PNG file: its {file_size} bytes cannot hold {width} x {height} pixels"),
        )
    })?;
    let mut samples = vec![0; size];
    let frame = reader.next_frame(&mut samples).map_err(invalid)?;
    reader.finish().map_err(invalid)?;
    samples.truncate(frame.buffer_size());
    let (depth, most) = match frame.bit_depth {
        BitDepth::Sixteen => (2, 65_535.0),
        _ => (1, 255.0),
    };
    let sample = |i: usize| -> f32 {
        match samples.get(i * depth..(i + 1) * depth) {
            Some([high, low]) => f32::from(u16::from_be_bytes([*high, *low])),
            Some([byte]) => f32::from(*byte),
            _ => 0.0,
        }
    };
    let (channels, colour, alpha) = match frame.color_type {
        ColorType::Grayscale => (1, false, false),
        ColorType::GrayscaleAlpha => (2, false, true),
        ColorType::Rgb => (3, true, false),
        ColorType::Rgba => (4, true, true),
        // EXPAND has turned palettes into colours.
        ColorType::Indexed => return Err(Error::internal("a palette was not expanded")),
    };
    let pixels = width as usize * height as usize;
    if alpha && (0..pixels).any(|p| sample(p * channels + channels - 1) != most) {
        return Err(Error::unsupported(format!("{} is partly transparent", path.display()))
            .with_file(path)
            .with_hint("flatten it onto a background and save it without an alpha channel"));
    }
    let mut values = Vec::with_capacity(3 * pixels);
    for channel in 0..3 {
        let offset = if colour { channel } else { 0 };
        values.extend((0..pixels).map(|p| {
            let fraction = sample(p * channels + offset) / most;
            f64::from(range.low + fraction * (range.high - range.low))
        }));
    }
    HostTensor::from_f64(dtype, vec![1, 3, height as usize, width as usize], &values)
        .map_err(|e| Error::internal(e.to_string()))
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

/// A tensor as an 8-bit RGB picture: width, height, bytes, and the number of NaN and infinite values. NaN becomes black; values
/// outside the range become black or white. `InvalidArgument` if the tensor is not `[1, 3, height, width]`.
pub(crate) struct Picture {
    width: u32,
    height: u32,
    rgb: Vec<u8>,
    pub(crate) not_finite: usize,
}

impl Picture {
    pub(crate) fn of(name: &str, tensor: &HostTensor, range: ImageRange) -> Result<Self, Error> {
        check_float(name, tensor.dtype())?;
        let (width, height) = match *tensor.shape() {
            [1, 3, h, w] if h > 0 && w > 0 => (u32::try_from(w), u32::try_from(h)),
            _ => {
                return Err(Error::invalid(format!(
                    "{name:?} cannot be a picture: it has shape {:?}, not [1, 3, height, width]",
                    tensor.shape()
                ))
                .with_hint("write it as .npy instead"));
            }
        };
        let too_large = || Error::invalid(format!("{name:?} is too large for a picture"));
        let (width, height) = (width.map_err(|_| too_large())?, height.map_err(|_| too_large())?);
        let values = tensor.to_f64().ok_or_else(|| Error::internal("a float tensor has no values"))?;
        let plane = values.len() / 3;
        let (low, high) = (f64::from(range.low), f64::from(range.high));
        let mut rgb = vec![0; values.len()];
        for (i, value) in values.iter().enumerate() {
            // `as` turns NaN into 0 and stays within 0..=255.
            rgb[(i % plane) * 3 + i / plane] = ((value - low) / (high - low) * 255.0).round() as u8;
        }
        let not_finite = values.iter().filter(|v| !v.is_finite()).count();
        Ok(Picture { width, height, rgb, not_finite })
    }

    /// A picture of `[height, width, 3]` bytes.
    pub(crate) fn of_bytes(width: u32, height: u32, rgb: Vec<u8>) -> Self {
        Picture { width, height, rgb, not_finite: 0 }
    }

    pub(crate) fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.write_with(out, None)
    }

    /// Writes it with A1111's "parameters": as `tEXt` if it is Latin-1, otherwise as `iTXt`.
    pub(crate) fn write_with(&self, out: &mut dyn Write, parameters: Option<&str>) -> io::Result<()> {
        const KEY: &str = "parameters";
        let mut encoder = png::Encoder::new(out, self.width, self.height);
        encoder.set_color(ColorType::Rgb);
        encoder.set_depth(BitDepth::Eight);
        if let Some(text) = parameters {
            match text.chars().all(|c| u32::from(c) < 256) {
                true => encoder.add_text_chunk(KEY.into(), text.into())?,
                false => encoder.add_itxt_chunk(KEY.into(), text.into())?,
            }
        }
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.rgb)?;
        Ok(writer.finish()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun::abi::ErrorCode;
    use std::path::PathBuf;

    const UNIT: ImageRange = ImageRange { low: 0.0, high: 1.0 };
    const SIGNED: ImageRange = ImageRange { low: -1.0, high: 1.0 };

    fn encode(dir: &Path, color: ColorType, depth: BitDepth, data: &[u8]) -> PathBuf {
        let path = dir.join("x.png");
        let mut encoder = png::Encoder::new(std::fs::File::create(&path).unwrap(), 2, 1);
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

    #[test]
    fn pictures_become_planes_in_the_range() {
        let dir = tempfile::tempdir().unwrap();
        let rgb = encode(dir.path(), ColorType::Rgb, BitDepth::Eight, &[0, 51, 102, 153, 204, 255]);
        let tensor = read(&rgb, DType::F32, SIGNED).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, &[1, 3, 1, 2][..]));
        let close = |tensor: &HostTensor, expected: [f64; 6], most: f64| {
            let values = tensor.to_f64().unwrap();
            assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() < most), "{values:?}");
        };
        close(&tensor, [-1.0, 0.2, -0.6, 0.6, -0.2, 1.0], 1e-6);
        close(&read(&rgb, DType::F16, UNIT).unwrap(), [0.0, 0.6, 0.2, 0.8, 0.4, 1.0], 1e-3);
        let grey = encode(dir.path(), ColorType::Grayscale, BitDepth::Sixteen, &[0, 1, 255, 255]);
        let tiny = 1.0 / 65_535.0;
        close(&read(&grey, DType::F32, UNIT).unwrap(), [tiny, 1.0, tiny, 1.0, tiny, 1.0], 1e-8);
        let palette = encode(dir.path(), ColorType::Indexed, BitDepth::One, &[0b0100_0000]);
        close(&read(&palette, DType::F32, UNIT).unwrap(), [0.0, 1.0, 0.0, 0.0, 0.0, 0.2], 1e-6);
    }

    #[test]
    fn alpha_counts_only_where_it_shows() {
        let dir = tempfile::tempdir().unwrap();
        let opaque = encode(dir.path(), ColorType::Rgba, BitDepth::Eight, &[9, 9, 9, 255, 1, 2, 3, 255]);
        assert_eq!(read(&opaque, DType::F32, UNIT).unwrap().shape(), [1, 3, 1, 2]);
        let clear = encode(dir.path(), ColorType::Rgba, BitDepth::Eight, &[9, 9, 9, 255, 1, 2, 3, 254]);
        assert_eq!(read(&clear, DType::F32, UNIT).unwrap_err().code, ErrorCode::Unimplemented);
    }

    #[test]
    fn every_8_bit_value_survives_the_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.png");
        let bytes: Vec<u8> = (0..=255).chain(0..=127).collect();
        for range in [UNIT, SIGNED] {
            let picture = Picture { width: 16, height: 8, rgb: bytes.clone(), not_finite: 0 };
            picture.write_to(&mut std::fs::File::create(&path).unwrap()).unwrap();
            for dtype in [DType::F32, DType::F16] {
                let tensor = read(&path, dtype, range).unwrap();
                assert_eq!(Picture::of("x", &tensor, range).unwrap().rgb, bytes, "{dtype}");
            }
        }
    }

    #[test]
    fn values_out_of_range_are_clipped_and_nan_is_counted() {
        let tensor =
            HostTensor::from_f32(vec![1, 3, 1, 2], &[-9.0, 9.0, f32::NAN, f32::INFINITY, 0.5, 0.2]).unwrap();
        let picture = Picture::of("x", &tensor, UNIT).unwrap();
        assert_eq!((picture.rgb, picture.not_finite), (vec![0, 0, 128, 255, 255, 51], 2));
    }

    #[test]
    fn invalid_pictures_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.png");
        let good = std::fs::read(encode(dir.path(), ColorType::Rgb, BitDepth::Eight, &[7; 6])).unwrap();
        // The last 12 bytes are the end marker, whose absence loses nothing.
        for cut in (0..good.len() - 12).step_by(5) {
            std::fs::write(&path, &good[..cut]).unwrap();
            assert_eq!(read(&path, DType::F32, UNIT).unwrap_err().code, ErrorCode::DataLoss, "{cut}");
        }
        // A header that claims 2^31 - 1 pixels each way.
        let mut huge = good.clone();
        huge[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
        std::fs::write(&path, &huge).unwrap();
        assert!(read(&path, DType::F32, UNIT).is_err());
        assert_eq!(read(&path, DType::I64, UNIT).unwrap_err().code, ErrorCode::InvalidArgument);
        for shape in [vec![3, 4, 4], vec![1, 4, 4, 3], vec![2, 3, 4, 2], vec![1, 3, 0, 16]] {
            let tensor = HostTensor::zeros(DType::F32, shape).unwrap();
            assert!(Picture::of("x", &tensor, UNIT).is_err());
        }
    }
}

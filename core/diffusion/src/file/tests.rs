use super::{exif, *};
use ::png::{BitDepth, ColorType};
use proptest::prelude::*;
use std::{fs, path::Path};

/// A PNG file of two pixels.
fn png_of(color: ColorType, depth: BitDepth, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = ::png::Encoder::new(&mut bytes, 2, 1);
    encoder.set_color(color);
    encoder.set_depth(depth);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(data).unwrap();
    writer.finish().unwrap();
    bytes
}

/// A picture without two equal pixels side by side.
fn sample(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| image::Rgb([(x * 9) as u8, (y * 11) as u8, (x + y) as u8]))
}

/// Writes a picture and reads it.
fn through(format: Format, picture: &RgbImage, texts: &[(&str, &str)]) -> File {
    read(&encode(format, picture, 95, texts).unwrap()).unwrap()
}

fn read(bytes: &[u8]) -> Result<File, FileError> {
    decode(bytes, MOST_PIXELS)
}

const ALL: [Format; 3] = [Format::Png, Format::Jpeg, Format::WebP];

const PROMPTS: [&str; 5] = [
    "",
    "a cat",
    "ein Bär, \"süß\"\nzweite Zeile: ½",
    "猫 と 🦊, Ω≈ç",
    "Ã¤, which is Latin-1 that looks like UTF-8",
];

#[test]
fn pictures_and_texts_survive() {
    let picture = sample(19, 13);
    for (format, prompt) in ALL.into_iter().flat_map(|format| PROMPTS.map(|p| (format, p))) {
        let read = through(format, &picture, &[("parameters", prompt), ("sdrun", "{\"a\": \"ü\"}")]);
        let mut texts = read.texts.clone();
        texts.sort();
        let expected = [("parameters", prompt), ("sdrun", "{\"a\": \"ü\"}")]
            .map(|(k, t)| (k.to_string(), t.to_string()));
        assert_eq!(texts, expected, "{format:?}");
        let worst = read.rgb().iter().zip(picture.iter()).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(worst <= Some(if format == Format::Jpeg { 20 } else { 0 }), "{format:?}: {worst:?}");
    }
    for format in ALL {
        assert!(through(format, &picture, &[]).texts.is_empty());
    }
}

#[test]
fn what_does_not_fit_into_a_jpeg_file_is_left_out() {
    let long = "x".repeat(20_000);
    let keys = |texts: &[(&str, &str)]| -> Vec<String> {
        through(Format::Jpeg, &sample(2, 2), texts).texts.into_iter().map(|(key, _)| key).collect()
    };
    assert_eq!(keys(&[("parameters", &long), ("sdrun", &long)]), ["sdrun", "parameters"]);
    let longer = "x".repeat(30_000);
    assert_eq!(keys(&[("parameters", &longer), ("sdrun", &longer)]), ["parameters"]);
    assert_eq!(keys(&[("parameters", &"x".repeat(40_000)), ("sdrun", "{}")]), Vec::<String>::new());
    let read = through(Format::WebP, &sample(2, 2), &[("parameters", &"x".repeat(40_000)), ("sdrun", "{}")]);
    assert_eq!(read.texts.len(), 2);
}

#[test]
fn transparency_is_a_background_or_a_mask() {
    let read = |color, depth, data: &[u8]| read(&png_of(color, depth, data)).unwrap();
    let picture = read(ColorType::Rgba, BitDepth::Eight, &[100, 0, 200, 255, 100, 100, 100, 51]);
    assert_eq!(picture.rgb().into_raw(), [100, 0, 200, 224, 224, 224]);
    assert_eq!(picture.mask().into_raw(), [36, 20]);
    assert_eq!(picture.erased().unwrap().into_raw(), [0, 204]);
    let opaque = read(ColorType::GrayscaleAlpha, BitDepth::Eight, &[9, 255, 8, 255]);
    assert!(opaque.erased().is_none());
    assert_eq!((opaque.mask().into_raw(), opaque.rgb().into_raw()), (vec![9, 8], vec![9, 9, 9, 8, 8, 8]));
    let grey = read(ColorType::Grayscale, BitDepth::One, &[0b0100_0000]);
    assert!(grey.erased().is_none());
    assert_eq!(grey.mask().into_raw(), [0, 255]);
}

/// What Pillow and piexif write for an A1111 picture: little-endian TIFF, an orientation, and a comment in big-endian UTF-16.
fn foreign_exif(orientation: u8, comment: &[u8]) -> Vec<u8> {
    let mut tiff = b"II\x2a\0\x08\0\0\0\x02\0".to_vec();
    tiff.extend([0x12, 1, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0]);
    tiff.extend([0x69, 0x87, 4, 0, 1, 0, 0, 0, 38, 0, 0, 0]);
    tiff.extend([0; 4]);
    tiff.extend([1, 0, 0x86, 0x92, 7, 0, comment.len() as u8, 0, 0, 0, 56, 0, 0, 0]);
    tiff.extend([0; 4]);
    tiff.extend(comment);
    tiff
}

#[test]
fn foreign_exif_is_read() {
    let big: Vec<u8> = "Bären".encode_utf16().flat_map(u16::to_be_bytes).collect();
    let little: Vec<u8> = "Bären".encode_utf16().flat_map(u16::to_le_bytes).collect();
    for comment in [
        [b"UNICODE\0", &big[..]].concat(),
        [b"UNICODE\0", &little[..]].concat(),
        [b"UNICODE\0\xff\xfe", &little[..]].concat(),
        [b"\0\0\0\0\0\0\0\0", "Bären".as_bytes()].concat(),
        "Bären".as_bytes().to_vec(),
    ] {
        assert_eq!(
            exif::texts(&foreign_exif(1, &comment)),
            [("parameters".into(), "Bären".into())],
            "{comment:?}"
        );
    }
}

#[test]
fn the_orientation_is_applied() {
    let mut bytes = Vec::new();
    let mut encoder = JpegEncoder::new_with_quality(&mut bytes, 90);
    encoder.set_exif_metadata(foreign_exif(6, b"ASCII\0\0\0a cat\0")).unwrap();
    encoder.write_image(&sample(16, 8), 16, 8, ExtendedColorType::Rgb8).unwrap();
    let picture = read(&bytes).unwrap();
    assert_eq!(picture.rgb().dimensions(), (8, 16));
    assert_eq!(picture.texts, [("parameters".into(), "a cat".into())]);
}

/// Files that Pillow wrote (tools/diffusion/files.py): kinds of PNG, JPEG and WebP that sdrun does not write.
#[test]
fn files_of_pillow_are_read_as_pillow_reads_them() {
    #[derive(serde::Deserialize)]
    struct Expected {
        width: u32,
        height: u32,
        rgba: String,
        text: String,
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/pictures");
    let expected = fs::read(folder.join("pictures.json")).unwrap();
    let expected: std::collections::BTreeMap<String, Expected> = serde_json::from_slice(&expected).unwrap();
    assert_eq!(expected.len(), 8);
    for (name, Expected { width, height, rgba, text }) in expected {
        let picture = read(&fs::read(folder.join(&name)).unwrap()).unwrap();
        let image = picture.image().to_rgba8();
        assert_eq!(image.dimensions(), (width, height), "{name}");
        // Decoders of lossy formats differ in how they enlarge colours; Pillow truncates 16 bits.
        let most = match &*name {
            "lossy.webp" | "sdcpp.webp" | "progressive.jpg" => 8,
            "grey.jpg" | "deep.png" => 1,
            _ => 0,
        };
        let bytes = (0..rgba.len()).step_by(2).map(|at| u8::from_str_radix(&rgba[at..at + 2], 16).unwrap());
        let worst = image.iter().zip(bytes).map(|(a, b)| a.abs_diff(b)).max();
        assert!(worst <= Some(most), "{name}: {worst:?}");
        let texts: Vec<_> = picture.texts.iter().map(|(key, text)| (key.as_str(), text.as_str())).collect();
        let expected: &[_] = if text.is_empty() { &[] } else { &[("parameters", text.as_str())] };
        assert_eq!(texts, expected, "{name}");
    }
}

#[test]
fn texts_of_other_programs_are_read() {
    // stable-diffusion.cpp writes UTF-8 into tEXt chunks, and comments into JPEG files.
    let latin: String = "parameters\0Bär".bytes().map(char::from).collect();
    let (key, text) = latin.split_once('\0').unwrap();
    let mut bytes = Vec::new();
    let mut encoder = ::png::Encoder::new(&mut bytes, 1, 1);
    encoder.add_text_chunk(key.into(), text.into()).unwrap();
    encoder.add_ztxt_chunk("Comment".into(), "{}".repeat(500)).unwrap();
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&[7]).unwrap();
    let chunk = ::png::text_metadata::ITXtChunk::new("late", "猫");
    writer.write_text_chunk(&chunk).unwrap();
    writer.finish().unwrap();
    let pair = |key: &str, text: &str| (key.to_string(), text.to_string());
    assert_eq!(
        read(&bytes).unwrap().texts,
        [pair("parameters", "Bär"), pair("Comment", &"{}".repeat(500)), pair("late", "猫")]
    );

    let mut bytes = encode(Format::Jpeg, &sample(4, 4), 90, &[]).unwrap();
    let comment = [b"\xff\xfe\0\x12", "parameters\0Bär\0".as_bytes()].concat();
    bytes.splice(2..2, comment);
    assert_eq!(read(&bytes).unwrap().texts, [pair("parameters", "Bär")]);
}

#[test]
fn damage_is_reported() {
    let refused = |bytes: &[u8], words: &str| {
        let Err(error) = read(bytes) else { panic!("{words}: it was read") };
        assert!(error.to_string().contains(words), "{error}");
    };
    for (format, words) in [(Format::Png, "PNG"), (Format::Jpeg, "JPEG"), (Format::WebP, "WebP")] {
        let good = encode(format, &sample(64, 64), 90, &[("parameters", "a cat")]).unwrap();
        read(&good).unwrap();
        // PNG's end marker is 12 bytes; without it, nothing is lost.
        let end = if format == Format::Png { 12 } else { 0 };
        for cut in (16..good.len() - end).step_by(97) {
            refused(&good[..cut], words);
        }
    }
    refused(b"", "is not a PNG, JPEG or WebP picture");
    refused(b"GIF89a\x01\0\x01\0\0\0\0;", "is not a PNG, JPEG or WebP picture");
}

#[test]
fn pictures_that_would_fill_the_memory_are_refused() {
    let refused = |bytes: &[u8]| assert!(read(bytes).is_err());
    let mut png = encode(Format::Png, &sample(4, 4), 90, &[]).unwrap();
    png[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
    // The decoder checks the header's checksum, which a bomb would have right.
    let mut sum = flate2::Crc::new();
    sum.update(&png[12..29]);
    png[29..33].copy_from_slice(&sum.sum().to_be_bytes());
    refused(&png);
    let mut jpeg = encode(Format::Jpeg, &sample(4, 4), 90, &[]).unwrap();
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].copy_from_slice(&[0xff; 4]);
    refused(&jpeg);
    // 16384 x 16384 pixels of one colour are a valid WebP file of a few bytes.
    let one = encode(Format::WebP, &RgbImage::new(1, 1), 90, &[]).unwrap();
    let mut webp = one.clone();
    let start = webp.windows(4).position(|word| word == b"VP8L").unwrap() + 8;
    webp[start + 1..start + 5].copy_from_slice(&0x0fff_ffffu32.to_le_bytes());
    refused(&webp);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Texts survive in every format.
    #[test]
    fn any_text_survives(text in "[^\0\u{feff}]{0,40}") {
        for format in ALL {
            let bytes = encode(format, &sample(2, 2), 90, &[("parameters", &text)]).unwrap();
            prop_assert_eq!(&read(&bytes).unwrap().texts[0].1, &text);
        }
    }

    /// Changed files are read or refused.
    #[test]
    fn changed_files_do_not_panic(
        which in 0..ALL.len(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let format = ALL[which];
        let mut bytes = encode(format, &sample(16, 16), 90, &[("parameters", "ä ☂"), ("sdrun", "{}")]).unwrap();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        let _ = read(&bytes);
    }

    /// EXIF data of any kind is read as far as possible.
    #[test]
    fn any_exif_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200), little: bool) {
        exif::texts(&bytes);
        let start: &[u8] = if little { b"II\x2a\0\x08\0\0\0" } else { b"MM\0\x2a\0\0\0\x08" };
        exif::texts(&[start, &bytes].concat());
    }
}

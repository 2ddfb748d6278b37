//! Parsers for values on the command line.

use sdrun_diffusion::file::Format;
use std::{path::PathBuf, str::FromStr, time::Duration};

/// The shape of an input (`name=1,4,64,64`) or several (`name=1,4,64,64:1,4,96,96`).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ShapeArg {
    pub(crate) name: String,
    /// One or more.
    pub(crate) shapes: Vec<Vec<usize>>,
}

impl FromStr for ShapeArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        // Tensor names may contain `=` and `:`; dimensions cannot.
        let (name, shapes) = text
            .rsplit_once('=')
            .filter(|(name, _)| !name.is_empty())
            .ok_or("expected the name of an input, `=`, and dimensions: sample=1,4,64,64")?;
        let dim = |d: &str| match d.trim().parse::<usize>() {
            Ok(0) | Err(_) => Err(format!("dimension `{d}` is not a positive integer")),
            Ok(d) => Ok(d),
        };
        // `name=` is the shape of a scalar.
        let shape = |dims: &str| -> Result<Vec<usize>, String> {
            if dims.is_empty() { Ok(Vec::new()) } else { dims.split([',', 'x']).map(dim).collect() }
        };
        let shapes = shapes.split(':').map(shape).collect::<Result<_, _>>()?;
        Ok(ShapeArg { name: name.to_string(), shapes })
    }
}

/// `key=value`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyValue {
    pub(crate) key: String,
    pub(crate) value: String,
}

impl FromStr for KeyValue {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(KeyValue { key: key.into(), value: value.into() }),
            _ => Err("expected a key, `=`, and a value".into()),
        }
    }
}

/// A tensor file: `name=file` for one tensor, or the file alone for all tensors in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorFile {
    pub(crate) name: Option<String>,
    pub(crate) path: PathBuf,
    pub(crate) format: TensorFormat,
}

/// Derived from the file's extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorFormat {
    Npy,
    Npz,
    Picture,
}

impl FromStr for TensorFile {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) if !name.is_empty() => (Some(name.to_string()), PathBuf::from(path)),
            _ => (None, PathBuf::from(text)),
        };
        let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
        let format = match &*ending {
            "npy" => TensorFormat::Npy,
            "npz" => TensorFormat::Npz,
            ending if Format::of_ending(ending).is_some() => TensorFormat::Picture,
            _ => return Err("the file name must end in .npy, .npz, .png, .jpg or .webp".into()),
        };
        if name.is_none() && format != TensorFormat::Npz {
            return Err("name the tensor: NAME=FILE (only a .npz file needs no name)".into());
        }
        Ok(TensorFile { name, path, format })
    }
}

/// An adapter and its strengths: `FILE`, `FILE:0.8`, `FILE:0.8:0.5`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoraArg {
    pub(crate) file: PathBuf,
    pub(crate) strength: f32,
    pub(crate) text_encoder_strength: f32,
}

impl FromStr for LoraArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        // Split from the right, because a path may contain colons (`C:\\x.safetensors`).
        let number = |text: &str| text.parse::<f32>().ok();
        let mut parts = text.rsplitn(3, ':');
        let (last, before, rest) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
        let (file, strength, text_encoder_strength) =
            match (number(last), before, before.and_then(number), rest) {
                (Some(text), _, Some(strength), Some(file)) => (file, strength, text),
                (Some(strength), Some(_), ..) => (&text[..text.len() - last.len() - 1], strength, strength),
                _ => (text, 1.0, 1.0),
            };
        if file.is_empty() {
            return Err("expected a file: FILE, FILE:0.8 or FILE:0.8:0.5".into());
        }
        if !strength.is_finite() || !text_encoder_strength.is_finite() {
            return Err("a strength must be a finite number".into());
        }
        Ok(LoraArg { file: file.into(), strength, text_encoder_strength })
    }
}

/// An embedding and the token that stands for its first vector: `FILE:49400`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EmbeddingArg {
    pub(crate) file: PathBuf,
    pub(crate) token: usize,
}

impl FromStr for EmbeddingArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (file, token) = text.rsplit_once(':').unwrap_or_default();
        match (file.is_empty(), token.parse()) {
            (false, Ok(token)) => Ok(EmbeddingArg { file: file.into(), token }),
            _ => Err("expected FILE:TOKEN, where TOKEN is the number of the token for the word: \
                      word.safetensors:49400"
                .into()),
        }
    }
}

/// The values of black and white: `0..1`, `-1..1`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ImageRange {
    pub(crate) low: f32,
    pub(crate) high: f32,
}

impl FromStr for ImageRange {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed =
            text.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
        match parsed {
            Some((low, high)) if f32::is_finite(low) && f32::is_finite(high) && low < high => {
                Ok(ImageRange { low, high })
            }
            _ => {
                Err("expected the value of black, `..`, and the larger value of white: 0..1 or -1..1".into())
            }
        }
    }
}

/// A number of bytes: `5GB`, `1.5GiB`, `300 MB`, `4096`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = number_and_unit(text)?;
    let factor = match unit.to_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        "tib" => 1024f64.powi(4),
        _ => return Err(format!("unknown unit `{unit}`: use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")),
    };
    Ok((number * factor) as u64)
}

/// A time: `500ms`, `3s`, `10min`, `12h`, `30d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = number_and_unit(text)?;
    let factor = match unit {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "w" => 604_800.0,
        "" if number == 0.0 => 1.0,
        "" => return Err("a unit is missing: ms, s, min, h, d or w".into()),
        _ => return Err(format!("unknown unit `{unit}`: use ms, s, min, h, d or w")),
    };
    Duration::try_from_secs_f64(number * factor).map_err(|e| e.to_string())
}

fn number_and_unit(text: &str) -> Result<(f64, &str), String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text[..end].parse::<f64>().map_err(|_| format!("`{text}` does not begin with a number"))?;
    Ok((number, text[end..].trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shapes() {
        let shapes = |name: &str, shapes: &[&[usize]]| {
            Ok(ShapeArg { name: name.into(), shapes: shapes.iter().map(|dims| dims.to_vec()).collect() })
        };
        let shape = |name: &str, dims: &[usize]| shapes(name, &[dims]);
        assert_eq!("a=1,4,64".parse(), shape("a", &[1, 4, 64]));
        assert_eq!("x/y:0=1x3".parse(), shape("x/y:0", &[1, 3]));
        assert_eq!("a=b=2".parse(), shape("a=b", &[2]));
        assert_eq!("timestep=".parse(), shape("timestep", &[]));
        assert_eq!("x:0=1,3:2x4:5,6".parse(), shapes("x:0", &[&[1, 3], &[2, 4], &[5, 6]]));
        for bad in ["", "a", "=1", "a=0", "a=1,", "a=1,-2", "a=1.5", "a=99999999999999999999", "a=1,,2"] {
            assert!(bad.parse::<ShapeArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn tensor_files() {
        let file = |text: &str| text.parse::<TensorFile>();
        let named = file("x=a=b.NPY").unwrap();
        assert_eq!((named.name.as_deref(), named.path), (Some("x"), "a=b.NPY".into()));
        assert_eq!(file("all.npz").unwrap().name, None);
        for bad in ["x=file.bin", "file.npy", "file.png", "x=npy", ""] {
            assert!(file(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn embeddings() {
        let embedding = |text: &str| text.parse::<EmbeddingArg>().map(|e| (e.file, e.token));
        assert_eq!(embedding("a.safetensors:49400"), Ok(("a.safetensors".into(), 49400)));
        assert_eq!(embedding("C:\\a.safetensors:0"), Ok(("C:\\a.safetensors".into(), 0)));
        for bad in ["", "a.safetensors", "a.safetensors:", ":1", "a:-1", "a:1.5", "C:\\a.safetensors"] {
            assert!(embedding(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn loras() {
        let lora = |text: &str| {
            let LoraArg { file, strength, text_encoder_strength } = text.parse::<LoraArg>()?;
            Ok::<_, String>((file.display().to_string(), strength, text_encoder_strength))
        };
        assert_eq!(lora("a.safetensors"), Ok(("a.safetensors".into(), 1.0, 1.0)));
        assert_eq!(lora("a.safetensors:-0.5"), Ok(("a.safetensors".into(), -0.5, -0.5)));
        assert_eq!(lora("a:b.safetensors:0.7:0"), Ok(("a:b.safetensors".into(), 0.7, 0.0)));
        assert_eq!(lora("C:\\x.safetensors:2"), Ok(("C:\\x.safetensors".into(), 2.0, 2.0)));
        assert_eq!(lora("C:\\x.safetensors"), Ok(("C:\\x.safetensors".into(), 1.0, 1.0)));
        for bad in ["", ":1", "a:inf", "a:1:NaN"] {
            assert!(lora(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ranges() {
        assert_eq!("-1..1".parse(), Ok(ImageRange { low: -1.0, high: 1.0 }));
        for bad in ["1..0", "0..0", "0", "a..1", "0..inf", "NaN..1", ".."] {
            assert!(bad.parse::<ImageRange>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_and_durations() {
        assert_eq!(size("5GB"), Ok(5_000_000_000));
        assert_eq!(size("1.5 GiB"), Ok(1_610_612_736));
        assert_eq!(size("0"), Ok(0));
        assert_eq!(duration("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        for bad in ["", "GB", "5 parsecs", "-1GB", "1.2.3"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        for bad in ["", "5", "5y", "999999999999999999999d", "-3s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(text in ".{0,40}") {
            let _ = (text.parse::<ShapeArg>(), text.parse::<KeyValue>(), text.parse::<TensorFile>());
            let _ = (text.parse::<ImageRange>(), text.parse::<LoraArg>(), size(&text), duration(&text));
        }

        #[test]
        fn shapes_are_read_as_written(name in "[a-z/:.=]{1,9}", dims in prop::collection::vec(1usize.., 0..6)) {
            let text = dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(format!("{name}={text}").parse(), Ok(ShapeArg { name, shapes: vec![dims] }));
        }
    }
}

//! Provider options: `--option KEY=VALUE`.

use sdrun_abi::{Error, Result};
use std::collections::BTreeMap;

/// What the options of a build say.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    /// `shape.INPUT=MIN:OPT:MAX`: the range of an input with open dimensions.
    pub(crate) shapes: BTreeMap<String, Shapes>,
    /// `tf32=on`: products of f32 matrices may be rounded to 10 bits of mantissa.
    pub(crate) tf32: bool,
    /// `cuda-graph=on`: a run is recorded once and replayed.
    pub(crate) cuda_graph: bool,
    /// `vram-budget=BYTES`: the most GPU memory for weights; what does not fit is streamed from the host.
    pub(crate) vram_budget: Option<u64>,
}

/// Least, usual and greatest shape of an input.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shapes {
    pub(crate) min: Vec<i64>,
    pub(crate) opt: Vec<i64>,
    pub(crate) max: Vec<i64>,
}

const HINT: &str = "tensorrt-rtx takes `shape.INPUT=MIN:OPT:MAX`, `tf32=on|off`, `cuda-graph=on|off`, \
                    `vram-budget=6GB`";

impl Options {
    /// Reads them; an unknown one is an error.
    pub(crate) fn parse(options: &BTreeMap<String, String>) -> Result<Self> {
        let mut parsed = Options::default();
        for (key, value) in options {
            let refuse =
                |why: &str| Err(Error::invalid(format!("the option `{key}={value}` {why}")).with_hint(HINT));
            let switch = |value: &str| match value {
                "on" => Some(true),
                "off" => Some(false),
                _ => None,
            };
            match key.as_str() {
                "tf32" | "cuda-graph" => {
                    let Some(on) = switch(value) else { return refuse("has to be `on` or `off`") };
                    *(if key == "tf32" { &mut parsed.tf32 } else { &mut parsed.cuda_graph }) = on;
                }
                "vram-budget" => match bytes(value) {
                    Some(bytes) => parsed.vram_budget = Some(bytes),
                    None => return refuse("has to be a number of bytes such as `6GB` or `512MiB`"),
                },
                _ => match key.strip_prefix("shape.").filter(|input| !input.is_empty()) {
                    Some(input) => match shapes(value) {
                        Ok(shapes) => drop(parsed.shapes.insert(input.into(), shapes)),
                        Err(why) => return refuse(why),
                    },
                    None => {
                        return Err(
                            Error::invalid(format!("tensorrt-rtx has no option `{key}`")).with_hint(HINT)
                        );
                    }
                },
            }
        }
        Ok(parsed)
    }
}

fn shapes(text: &str) -> Result<Shapes, &'static str> {
    let shape = |text: &str| -> Option<Vec<i64>> {
        text.split('x').map(|d| d.parse::<i64>().ok().filter(|d| *d >= 1)).collect()
    };
    let parts: Option<Vec<Vec<i64>>> = text.split(':').map(shape).collect();
    let Some(Ok([min, opt, max])) = parts.map(<[_; 3]>::try_from) else {
        return Err("has to be three shapes, as in `1x4x32x32:1x4x64x64:2x4x128x128`");
    };
    if min.len() != opt.len() || opt.len() != max.len() || min.len() > 8 {
        return Err("has shapes of different numbers of dimensions, or more than 8");
    }
    if min.iter().zip(&opt).any(|(a, b)| a > b) || opt.iter().zip(&max).any(|(a, b)| a > b) {
        return Err("is no range: the least shape comes first, the greatest last");
    }
    Ok(Shapes { min, opt, max })
}

/// `6GB`, `512MiB`, `1000`.
fn bytes(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..split].parse().ok()?;
    let factor = match text[split..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "mb" => 1e6,
        "gb" => 1e9,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        _ => return None,
    };
    Some((number * factor) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(key: &str, value: &str) -> Result<Options> {
        Options::parse(&BTreeMap::from([(key.to_string(), value.to_string())]))
    }

    #[test]
    fn options_are_read() {
        assert_eq!(Options::parse(&BTreeMap::new()).unwrap(), Options::default());
        assert!(parse("tf32", "on").unwrap().tf32);
        assert!(!parse("cuda-graph", "off").unwrap().cuda_graph);
        assert_eq!(parse("vram-budget", "1.5GiB").unwrap().vram_budget, Some(3 << 29));
        let shapes = &parse("shape.x", "1x4:2x4:3x8").unwrap().shapes["x"];
        assert_eq!((&shapes.min[..], &shapes.max[..]), (&[1, 4][..], &[3, 8][..]));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (key, value, part) in [
            ("speed", "11", "no option `speed`"),
            ("shape.", "1:1:1", "no option"),
            ("tf32", "maybe", "`on` or `off`"),
            ("vram-budget", "lots", "number of bytes"),
            ("vram-budget", "5 parsecs", "number of bytes"),
            ("shape.x", "1x4", "three shapes"),
            ("shape.x", "1:2:3:4", "three shapes"),
            ("shape.x", "0x1:1x1:1x1", "three shapes"),
            ("shape.x", "1x4:1:1x4", "numbers of dimensions"),
            ("shape.x", "2:1:3", "no range"),
        ] {
            let error = parse(key, value).unwrap_err();
            assert!(error.message.contains(part) && error.hint.is_some(), "{key}={value}: {error}");
        }
    }
}

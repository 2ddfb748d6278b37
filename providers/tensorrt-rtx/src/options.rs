//! Provider options and ranges of shapes.

use sdrun_abi::{BuildSpec, Error, OpenShapes, Result};
use std::collections::BTreeMap;

/// The settings of a build.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    /// Ranges of inputs with open dimensions.
    pub(crate) shapes: BTreeMap<String, Shapes>,
    /// `tf32=on`: products of f32 matrices may be rounded to 10 bits of mantissa.
    pub(crate) tf32: bool,
    /// `cuda-graph=on`: a run is recorded once and replayed.
    pub(crate) cuda_graph: bool,
    /// GPU memory limit for weights, in bytes; the rest is streamed from the host.
    pub(crate) vram_budget: Option<u64>,
}

/// Smallest, usual and largest shape of an input.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shapes {
    pub(crate) min: Vec<i64>,
    pub(crate) opt: Vec<i64>,
    pub(crate) max: Vec<i64>,
}

const HINT: &str = "tensorrt-rtx takes `tf32=on|off`, `cuda-graph=on|off`";

impl Options {
    /// Reads the options of a build.
    pub(crate) fn of(spec: &BuildSpec) -> Result<Self> {
        let (shapes, vram_budget) = (ranges(&spec.open_shapes), spec.vram_budget);
        Ok(Options { shapes, vram_budget, ..Self::parse(&spec.options)? })
    }

    /// Applies one option. An unknown one is an error.
    fn parse(options: &BTreeMap<String, String>) -> Result<Self> {
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
                    let Some(on) = switch(value) else { return refuse("must be `on` or `off`") };
                    *(if key == "tf32" { &mut parsed.tf32 } else { &mut parsed.cuda_graph }) = on;
                }
                _ => {
                    return Err(Error::invalid(format!("tensorrt-rtx has no option `{key}`")).with_hint(HINT));
                }
            }
        }
        Ok(parsed)
    }
}

/// Ranges from the smallest to the largest size of each dimension. The shape in the middle of the list is the usual one.
fn ranges(open: &OpenShapes) -> BTreeMap<String, Shapes> {
    let range = |list: &[Vec<usize>]| {
        let usual = list.get(list.len() / 2)?;
        let extreme = |choose: fn(i64, i64) -> i64| {
            let size = |axis: usize| list.iter().filter_map(move |shape| shape.get(axis)).map(|d| *d as i64);
            (0..usual.len()).filter_map(|axis| size(axis).reduce(choose)).collect()
        };
        let opt = usual.iter().map(|d| *d as i64).collect();
        Some(Shapes { min: extreme(i64::min), opt, max: extreme(i64::max) })
    };
    open.iter().filter_map(|(input, list)| Some((input.clone(), range(list)?))).collect()
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
    }

    #[test]
    fn lists_of_shapes_are_ranges() {
        let lists = [("x", vec![vec![1, 8], vec![2, 4], vec![3, 6]]), ("y", vec![vec![5]]), ("z", vec![])];
        let ranges = ranges(&lists.map(|(input, list)| (input.to_string(), list)).into());
        let x = Shapes { min: vec![1, 4], opt: vec![2, 4], max: vec![3, 8] };
        let y = Shapes { min: vec![5], opt: vec![5], max: vec![5] };
        assert_eq!(ranges, [("x".to_string(), x), ("y".to_string(), y)].into());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (key, value, part) in [("speed", "11", "no option `speed`"), ("tf32", "maybe", "`on` or `off`")] {
            let error = parse(key, value).unwrap_err();
            assert!(error.message.contains(part) && error.hint.is_some(), "{key}={value}: {error}");
        }
    }
}

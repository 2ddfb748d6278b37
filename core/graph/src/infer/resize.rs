//! Sizes, scales and regions of `Resize` and `Upsample`.

use super::context::Ctx;
use super::dims;
use crate::Dim;

/// How one axis is resized.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Axis {
    /// Output size, if known.
    pub(crate) output: Dim,
    /// Output size divided by input size before rounding; `None` if not yet known.
    pub(crate) scale: Option<f64>,
    /// Normalised start and end of the region of interest.
    pub(crate) region: (f64, f64),
}

/// A list of numbers: absent, present but computed at run time, or known.
enum Floats {
    Absent,
    Unknown,
    Known(Vec<f64>),
}

/// How each axis of an input of shape `shape` is resized; `None` if unknown.
pub(crate) fn plan(c: &Ctx, shape: &[Dim]) -> Result<Option<Vec<Axis>>, String> {
    let rank = shape.len();
    let floats = |i: usize| match c.opt(i) {
        None => Floats::Absent,
        // Opsets 11 to 13 use an empty tensor for an absent input.
        Some(f) if f.shape.as_deref() == Some(&[Dim::Known(0)]) => Floats::Absent,
        Some(f) => match f.value.as_ref().and_then(|v| v.to_f32s()) {
            Some(v) => Floats::Known(v.into_iter().map(f64::from).collect()),
            None => Floats::Unknown,
        },
    };
    let upsample = c.node.op_type == "Upsample";
    let (scales, region) = match (upsample, c.opset) {
        (true, ..9) => match c.node.floats("scales") {
            Some(s) => (Floats::Known(s.iter().map(|v| f64::from(*v)).collect()), Floats::Absent),
            None => return Err("attribute scales is missing".into()),
        },
        (true, _) | (false, ..11) => (floats(1), Floats::Absent),
        _ => (floats(2), floats(1)),
    };
    let axes = match c.node.ints("axes") {
        Some(a) if c.opset >= 18 => dims::axes(a, rank)?,
        _ => (0..rank).collect(),
    };
    let cropped = c.node.str("coordinate_transformation_mode") == Some("tf_crop_and_resize");
    let regions = match region {
        Floats::Known(r) if cropped => {
            let n = if r.len() == 2 * rank { rank } else { axes.len() };
            if r.len() != 2 * n {
                return Err(format!("roi must have two entries for each of the {} axes", axes.len()));
            }
            Some((0..n).map(|i| (r[i], r[i + n])).collect::<Vec<_>>())
        }
        Floats::Unknown if cropped => return Ok(None),
        _ => None,
    };
    let mut out: Vec<Axis> =
        shape.iter().map(|d| Axis { output: d.clone(), scale: Some(1.0), region: (0.0, 1.0) }).collect();
    if let Some(regions) = regions {
        let every = regions.len() == rank;
        for (i, region) in regions.into_iter().enumerate() {
            out[if every { i } else { axes[i] }].region = region;
        }
    }
    let sizes = if upsample || c.opset < 11 { None } else { c.opt(3) };
    let absent = |f: &super::Fact| f.shape.as_deref() == Some(&[Dim::Known(0)]);
    match (scales, sizes.filter(|f| !absent(f))) {
        (Floats::Absent, None) => return Err("it has neither scales nor sizes".into()),
        (Floats::Absent, Some(_)) => {
            let Some(sizes) = c.partial_vector(3)? else { return Ok(None) };
            by_sizes(c, shape, &axes, sizes.iter().map(Dim::from).collect(), &mut out)?;
        }
        (Floats::Unknown, _) => return Ok(None),
        (Floats::Known(scales), None) => by_scales(shape, &axes, &scales, cropped, &mut out)?,
        (Floats::Known(_), Some(_)) => return Err("it has both scales and sizes".into()),
    }
    Ok(Some(out))
}

fn by_scales(
    shape: &[Dim],
    axes: &[usize],
    scales: &[f64],
    cropped: bool,
    out: &mut [Axis],
) -> Result<(), String> {
    if scales.len() != axes.len() {
        return Err(format!("it has {} scales for {} axes", scales.len(), axes.len()));
    }
    for (&a, &scale) in axes.iter().zip(scales) {
        if !(scale > 0.0 && scale < 1e6) {
            return Err(format!("scale {scale} is out of range"));
        }
        let (start, end) = if cropped { out[a].region } else { (0.0, 1.0) };
        out[a].scale = Some(scale);
        if scale != 1.0 || cropped {
            // floor(size * (end - start) * scale), in f32 like ONNX's own inference and the runtimes.
            let factor = (end - start) as f32 * scale as f32;
            out[a].output = dims::map(&shape[a], |n| Some((n as f32 * factor).floor() as usize));
        }
    }
    Ok(())
}

fn by_sizes(c: &Ctx, shape: &[Dim], axes: &[usize], sizes: Vec<Dim>, out: &mut [Axis]) -> Result<(), String> {
    if sizes.len() != axes.len() {
        return Err(format!("it has {} sizes for {} axes", sizes.len(), axes.len()));
    }
    let ratio = |i: usize| Some(sizes[i].known()? as f64 / shape[axes[i]].known()? as f64);
    let ratios = (0..axes.len()).map(ratio).collect::<Option<Vec<f64>>>();
    let policy = if c.opset >= 18 { c.node.str("keep_aspect_ratio_policy") } else { None };
    let pick: fn(f64, f64) -> f64 = match policy.unwrap_or("stretch") {
        "stretch" => {
            for (i, (&a, size)) in axes.iter().zip(&sizes).enumerate() {
                out[a].scale = ratio(i);
                out[a].output = size.clone();
            }
            return Ok(());
        }
        "not_larger" => f64::min,
        "not_smaller" => f64::max,
        other => return Err(format!("keep_aspect_ratio_policy {other:?} is not defined")),
    };
    let scale = ratios.and_then(|r| r.into_iter().reduce(pick));
    for &a in axes {
        out[a].scale = scale;
        out[a].output = dims::map(&shape[a], |n| Some((scale? * n as f64 + 0.5).floor() as usize));
    }
    Ok(())
}

//! Convolutions, pools, normalisations, resampling.

use super::{Ctx, Fact, Facts, dims, one};
use crate::Dim;
use crate::infer::window::{Axis, Window, kernel_shape};
use crate::infer::{PartialInt, resize as resizing};
use sdrun_abi::DType;

/// Reads a group count that must divide `channels`.
fn group(c: &Ctx, name: &str, channels: &Dim) -> Result<usize, String> {
    let group = c.node.int_or(name, 1);
    let valid = usize::try_from(group).ok().filter(|g| *g > 0 && channels.known().is_none_or(|n| n % g == 0));
    valid.ok_or_else(|| format!("{name} {group} does not divide {channels:?} channels"))
}

/// Output sizes along the spatial axes of `x`. A size that the window preserves keeps its name.
fn spatial(
    x: &[Dim],
    window: &Window,
    axis: impl Fn(usize, usize) -> Result<Axis, String>,
) -> Result<Vec<Dim>, String> {
    let mut out = Vec::with_capacity(x.len());
    for (i, d) in x.iter().enumerate() {
        out.push(match d.known() {
            Some(n) => Dim::Known(axis(i, n)?.output),
            None if preserves_size(window, i, &axis) => d.clone(),
            None => Dim::Unknown,
        });
    }
    Ok(out)
}

/// Whether a window of stride one preserves the size; if so, it does for any size.
fn preserves_size(window: &Window, i: usize, axis: impl Fn(usize, usize) -> Result<Axis, String>) -> bool {
    let probe = usize::try_from(window.extent(i)).unwrap_or(usize::MAX).saturating_mul(2);
    window.strides[i] == 1 && axis(i, probe).is_ok_and(|a| a.output == probe)
}

/// Infers a convolution; `x`, `w` and `bias` are input positions.
fn convolution(c: &Ctx, x: usize, w: usize, bias: usize, dtype: Option<DType>) -> Facts {
    c.need(x)?;
    c.need(w)?;
    let (Some(x), Some(w)) = (c.ranked_at_least(x, 3)?, c.ranked_at_least(w, 3)?) else {
        return one(dtype, c.shape(x).map(|s| dims::unknown(s.len())));
    };
    if x.len() != w.len() {
        return Err(format!("input {} and weights {} differ in rank", dims::text(x), dims::text(w)));
    }
    let group = group(c, "group", &x[1])?;
    dims::same(&dims::map(&x[1], |n| Some(n / group)), &w[1]).map_err(|_| {
        format!("weights {} do not fit input {} in {group} groups", dims::text(w), dims::text(x))
    })?;
    if w[0].known().is_some_and(|m| m % group != 0) {
        return Err(format!("weights {} do not fit {group} groups", dims::text(w)));
    }
    c.vector_of(bias, &w[0])?;
    let declared = kernel_shape(c, x.len() - 2)?;
    let kernel = w[2..].iter().map(Dim::known).collect::<Option<Vec<_>>>();
    if let (Some(d), Some(k)) = (&declared, &kernel)
        && d != k
    {
        return Err(format!("kernel_shape {d:?} contradicts the weights {}", dims::text(w)));
    }
    let mut out = vec![x[0].clone(), w[0].clone()];
    match kernel.or(declared) {
        Some(kernel) => {
            let window = Window::new(c, kernel)?;
            out.extend(spatial(&x[2..], &window, |i, n| window.axis(i, n))?);
        }
        None => out.extend(dims::unknown(x.len() - 2)),
    }
    one(dtype, Some(out))
}

pub(super) fn conv(c: &Ctx) -> Facts {
    convolution(c, 0, 1, 2, c.common_dtype([0, 1, 2])?)
}

pub(super) fn conv_integer(c: &Ctx) -> Facts {
    convolution(c, 0, 1, usize::MAX, Some(DType::I32))
}

pub(super) fn qlinear_conv(c: &Ctx) -> Facts {
    (0..8).try_for_each(|i| c.need(i).map(drop))?;
    convolution(c, 0, 3, 8, c.dtype(7))
}

pub(super) fn conv_transpose(c: &Ctx) -> Facts {
    let dtype = c.common_dtype([0, 1, 2])?;
    c.need(0)?;
    c.need(1)?;
    let (Some(x), Some(w)) = (c.ranked_at_least(0, 3)?, c.ranked_at_least(1, 3)?) else {
        return one(dtype, c.shape(0).map(|s| dims::unknown(s.len())));
    };
    if x.len() != w.len() {
        return Err(format!("input {} and weights {} differ in rank", dims::text(x), dims::text(w)));
    }
    dims::same(&x[1], &w[0])
        .map_err(|_| format!("weights {} do not fit input {}", dims::text(w), dims::text(x)))?;
    let channels = dims::product(&w[1], &Dim::Known(group(c, "group", &x[1])?));
    c.vector_of(2, &channels)?;
    let mut out = vec![x[0].clone(), channels];
    match w[2..].iter().map(Dim::known).collect::<Option<Vec<_>>>() {
        Some(kernel) => {
            let window = Window::new(c, kernel)?;
            out.extend(spatial(&x[2..], &window, |i, n| window.transposed(c, i, n))?);
        }
        None => out.extend(dims::unknown(x.len() - 2)),
    }
    one(dtype, Some(out))
}

pub(super) fn pool(c: &Ctx) -> Facts {
    let dtype = c.need(0)?.dtype;
    let Some(x) = c.ranked_at_least(0, 3)? else {
        return Ok(vec![Fact::new(dtype, None), Fact::new(Some(DType::I64), None)]);
    };
    let kernel = kernel_shape(c, x.len() - 2)?.ok_or("attribute kernel_shape is missing")?;
    let window = Window::new(c, kernel)?;
    let mut out = x[..2].to_vec();
    out.extend(spatial(&x[2..], &window, |i, n| window.axis(i, n))?);
    Ok(vec![Fact::new(dtype, Some(out.clone())), Fact::new(Some(DType::I64), Some(out))])
}

pub(super) fn global_pool(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let shape = c.ranked_at_least(0, 3)?.map(|s| {
        let ones = vec![Dim::Known(1); s.len() - 2];
        [&s[..2], &ones].concat()
    });
    one(x.dtype, shape)
}

pub(super) fn batch_normalization(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let statistics = c.need(3)?.dtype;
    let channels = match x.shape.as_deref() {
        None => Dim::Unknown,
        Some([]) => return Err("the input has no dimensions".into()),
        Some([_]) => Dim::Known(1),
        Some(s) => s[1].clone(),
    };
    for i in 1..5 {
        c.need(i)?;
        c.vector_of(i, &channels)?;
    }
    let mut facts = vec![Fact::new(x.dtype, x.shape.clone())];
    facts.resize(5, Fact::new(statistics, Some(vec![channels])));
    Ok(facts)
}

pub(super) fn instance_normalization(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let dtype = c.common_dtype([0, 1, 2])?;
    let channels = c.ranked_at_least(0, 3)?.map_or(Dim::Unknown, |s| s[1].clone());
    for i in 1..3 {
        c.need(i)?;
        c.vector_of(i, &channels)?;
    }
    one(dtype, x.shape.clone())
}

pub(super) fn group_normalization(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let dtype = c.common_dtype([0, 1, 2])?;
    let groups = c.int("num_groups")?;
    let channels = c.ranked_at_least(0, 3)?.map_or(Dim::Unknown, |s| s[1].clone());
    group(c, "num_groups", &channels)?;
    // One scale per group up to opset 20, one per channel since 21.
    let scales = if c.opset < 21 { Dim::Known(groups as usize) } else { channels };
    for i in 1..3 {
        c.need(i)?;
        c.vector_of(i, &scales)?;
    }
    one(dtype, x.shape.clone())
}

pub(super) fn layer_normalization(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let dtype = c.common_dtype([0, 1, 2])?;
    c.need(1)?;
    let mut saved = None;
    if let Some(s) = &x.shape {
        let axis = dims::axis(c.node.int_or("axis", -1), s.len())?;
        for i in 1..3 {
            dims::broadcast_onto(c.shape(i).unwrap_or_default(), s)?;
        }
        saved = Some(
            s.iter().enumerate().map(|(i, d)| if i < axis { d.clone() } else { Dim::Known(1) }).collect(),
        );
    }
    let stash = i32::try_from(c.node.int_or("stash_type", 1)).ok().and_then(DType::from_onnx);
    Ok(vec![Fact::new(dtype, x.shape.clone()), Fact::new(stash, saved.clone()), Fact::new(stash, saved)])
}

pub(super) fn rms_normalization(c: &Ctx) -> Facts {
    let (x, scale) = (c.need(0)?, c.need(1)?);
    if let Some(s) = &x.shape {
        dims::axis(c.node.int_or("axis", -1), s.len())?;
        dims::broadcast_onto(scale.shape.as_deref().unwrap_or_default(), s)?;
    }
    one(scale.dtype, x.shape.clone())
}

pub(super) fn resize(c: &Ctx) -> Facts {
    let x = c.need(0)?;
    let Some(s) = &x.shape else { return one(x.dtype, None) };
    let shape = match resizing::plan(c, s)? {
        Some(axes) => axes.into_iter().map(|a| a.output).collect(),
        None => dims::unknown(s.len()),
    };
    one(x.dtype, Some(shape))
}

pub(super) fn grid_sample(c: &Ctx) -> Facts {
    let (x, grid) = (c.need(0)?, c.need(1)?);
    let (Some(s), Some(g)) = (&x.shape, &grid.shape) else { return one(x.dtype, None) };
    if s.len() != g.len() || s.len() < 3 {
        return Err(format!("grid {} does not fit input {}", dims::text(g), dims::text(s)));
    }
    let batch = dims::same(&s[0], &g[0])?;
    dims::same(&g[g.len() - 1], &Dim::Known(s.len() - 2))?;
    one(x.dtype, Some([&[batch, s[1].clone()], &g[1..g.len() - 1]].concat()))
}

pub(super) fn affine_grid(c: &Ctx) -> Facts {
    let theta = c.need(0)?;
    c.need(1)?;
    let theta_shape = c.ranked(0, 3)?;
    let Some(size) = c.partial_vector(1)? else { return one(theta.dtype, None) };
    let axes = size.len().checked_sub(2).filter(|n| matches!(n, 2 | 3));
    let axes = axes.ok_or("the size must have 4 or 5 entries")?;
    let size: Vec<Dim> = size.iter().map(|v: &PartialInt| Dim::from(v)).collect();
    if let Some(t) = theta_shape {
        dims::same_shape(t, &[size[0].clone(), Dim::Known(axes), Dim::Known(axes + 1)])?;
    }
    one(theta.dtype, Some([&size[..1], &size[2..], &[Dim::Known(axes)]].concat()))
}

pub(super) fn roi_align(c: &Ctx) -> Facts {
    if let Some(mode) = c.node.str("coordinate_transformation_mode")
        && !["half_pixel", "output_half_pixel"].contains(&mode)
    {
        return Err(format!("its coordinate_transformation_mode must not be {mode:?}"));
    }
    let dtype = c.common_dtype([0, 1])?;
    c.need(0)?;
    c.need(1)?;
    c.need(2)?;
    let channels = c.ranked(0, 4)?.map_or(Dim::Unknown, |s| s[1].clone());
    let regions = c.ranked(1, 2)?;
    if let Some(r) = regions {
        dims::same(&r[1], &Dim::Known(4))?;
    }
    let regions = regions.map_or(Dim::Unknown, |s| s[0].clone());
    c.vector_of(2, &regions)?;
    let size = |name: &str| {
        let v = c.node.int_or(name, 1);
        let valid = usize::try_from(v).ok().filter(|v| (1..=1 << 20).contains(v));
        valid.map(Dim::Known).ok_or_else(|| format!("{name} {v} is out of range"))
    };
    one(dtype, Some(vec![regions, channels, size("output_height")?, size("output_width")?]))
}

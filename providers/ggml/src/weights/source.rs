//! Fetches weights from the host as their files store them, and checks them.

use crate::{
    ffi::Type,
    form::{Form, check_blocks},
    kernels::Encoding,
    shape,
    storage::is_f32,
};
use sdrun_abi::{DType, EncodedWeight, Error, Result, TRANSPOSED, WeightSource, WeightSpec};

/// What a tensor takes of a weight.
#[derive(Clone, Copy)]
pub(super) enum Taken {
    /// Blocks, unchanged.
    Blocks(Encoding),
    /// Plain values of this type, which have this form.
    Values(DType, Form),
}

/// Fetches a weight in blocks that a tensor of this form stores unchanged, if the source has such blocks; else, with `values`, its plain
/// values, if `get` would convert or transpose them first.
pub(super) fn pull_encoded<'a>(
    source: &'a dyn WeightSource,
    spec: &WeightSpec,
    form: Form,
    values: bool,
) -> Result<Option<(Taken, EncodedWeight<'a>)>> {
    let (transposed, encodings) = form.encodings(&spec.shape);
    let suffix = if transposed { TRANSPOSED } else { "" };
    let mut wanted: Vec<(Taken, String)> =
        encodings.map(|e| (Taken::Blocks(e), format!("{}{suffix}", e.name()))).collect();
    if values && is_f32(spec.dtype) {
        let held = [DType::F32, DType::F16, DType::BF16].into_iter().filter(|dtype| spec.dtype.holds(*dtype));
        if let Some(turned) = form.turned(&spec.shape) {
            let turned = |dtype| (Taken::Values(dtype, turned), format!("{dtype}{TRANSPOSED}"));
            wanted.extend(held.clone().map(turned));
        }
        // In its own type and order, `get` delivers it unchanged.
        let others = held.filter(|dtype| *dtype != spec.dtype);
        wanted.extend(others.map(|dtype| (Taken::Values(dtype, form), dtype.to_string())));
    }
    if wanted.is_empty() {
        return Ok(None);
    }
    let names: Vec<&str> = wanted.iter().map(|(_, name)| name.as_str()).collect();
    let Some(weight) = source.encoded(&spec.name, &names)? else { return Ok(None) };
    let taken = wanted.iter().find(|(_, name)| *name == weight.encoding).map(|(taken, _)| *taken);
    let Some(taken) = taken.filter(|_| weight.shape == spec.shape) else {
        return Err(Error::invalid(format!(
            "the source delivers weight {:?} as {} {:?}, but the graph has {:?} and takes {}",
            spec.name,
            weight.encoding,
            weight.shape,
            spec.shape,
            names.join(", ")
        )));
    };
    let (elements, found) = (shape::len(&spec.shape), weight.data().len());
    let checked = match taken {
        Taken::Blocks(encoding) => check_blocks(encoding, weight.data(), elements),
        Taken::Values(dtype, _) if elements * dtype.size() == found => Ok(()),
        Taken::Values(dtype, _) => {
            Err(Error::invalid(format!("{found} bytes of {dtype} for {elements} elements")))
        }
    };
    checked
        .map_err(|error| Error { message: format!("weight {:?}: {}", spec.name, error.message), ..error })?;
    Ok(Some((taken, weight)))
}

/// Fills a tensor of this form a few rows at a time, as the source makes them. False if it does not make them so.
pub(super) fn pull_rows(
    source: &dyn WeightSource,
    spec: &WeightSpec,
    (form, type_): (Form, Type),
    out: &mut [u8],
) -> Result<bool> {
    let Some((transposed, step)) = form.by_rows(&spec.shape) else { return Ok(false) };
    let rows = if transposed { spec.shape.last() } else { spec.shape.first() };
    let (mut taken, name) = (0, &spec.name);
    let delivered = source.rows(name, transposed, step, &mut |first, part| {
        if first != taken {
            return Err(Error::invalid(format!("the source skips from row {taken} to row {first}")));
        }
        taken += form.fill_rows(type_, first, part.dtype, part.data(), out)?;
        Ok(())
    })?;
    if delivered && rows != Some(&taken) {
        return Err(Error::invalid(format!(
            "the source delivers {taken} rows of weight {name:?}, a {:?}",
            spec.shape
        )));
    }
    Ok(delivered)
}

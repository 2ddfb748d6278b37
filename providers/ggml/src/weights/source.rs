//! Fetches weights in blocks from the host and checks them.

use crate::{
    form::{Form, check_blocks},
    kernels::Encoding,
    shape,
};
use sdrun_abi::{EncodedWeight, Error, Result, TRANSPOSED, WeightSource, WeightSpec};

/// Fetches a weight in blocks that a tensor of this form stores unchanged, if the source has such blocks.
pub(super) fn pull_encoded<'a>(
    source: &'a dyn WeightSource,
    spec: &WeightSpec,
    form: Form,
) -> Result<Option<(Encoding, EncodedWeight<'a>)>> {
    let (transposed, encodings) = form.encodings(&spec.shape);
    let suffix = if transposed { TRANSPOSED } else { "" };
    let wanted: Vec<(Encoding, String)> = encodings.map(|e| (e, format!("{}{suffix}", e.name()))).collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    let names: Vec<&str> = wanted.iter().map(|(_, name)| name.as_str()).collect();
    let Some(weight) = source.encoded(&spec.name, &names)? else { return Ok(None) };
    let encoding = wanted.iter().find(|(_, name)| *name == weight.encoding).map(|(encoding, _)| *encoding);
    let Some(encoding) = encoding.filter(|_| weight.shape == spec.shape) else {
        return Err(Error::invalid(format!(
            "the source delivers weight {:?} as {} {:?}, but the graph has {:?} and takes {}",
            spec.name,
            weight.encoding,
            weight.shape,
            spec.shape,
            names.join(", ")
        )));
    };
    check_blocks(encoding, weight.data(), shape::len(&spec.shape))
        .map_err(|error| Error { message: format!("weight {:?}: {}", spec.name, error.message), ..error })?;
    Ok(Some((encoding, weight)))
}

//! Sliding windows of convolutions and pools.

use super::Ctx;

/// Kernel, strides, dilations and padding rule of a sliding-window operator.
pub(crate) struct Window {
    pub(crate) kernel: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dilations: Vec<usize>,
    pads: Pads,
    ceil: bool,
}

enum Pads {
    Explicit { begin: Vec<i64>, end: Vec<i64> },
    SameUpper,
    SameLower,
    Valid,
}

/// Maximum length of an axis; prevents overflow in the arithmetic below.
const LONGEST: usize = 1 << 31;

/// Window positions along one axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Axis {
    pub(crate) pad_begin: i64,
    pub(crate) pad_end: i64,
    pub(crate) output: usize,
}

impl Window {
    /// Reads the attributes of a node over `kernel.len()` spatial axes.
    pub(crate) fn new(c: &Ctx, kernel: Vec<usize>) -> Result<Self, String> {
        let n = kernel.len();
        if kernel.contains(&0) {
            return Err("the kernel is empty".into());
        }
        let positive = |name: &str| -> Result<Vec<usize>, String> {
            let values = list(c, name, n)?.unwrap_or_else(|| vec![1; n]);
            let check = |v: i64| usize::try_from(v).ok().filter(|v| (1..=1 << 30).contains(v));
            let checked = values.iter().map(|v| check(*v)).collect::<Option<_>>();
            checked.ok_or_else(|| format!("{name} {values:?} must be positive"))
        };
        let pads = match c.node.str("auto_pad").unwrap_or("NOTSET") {
            "NOTSET" | "" => {
                let p = list(c, "pads", 2 * n)?.unwrap_or_else(|| vec![0; 2 * n]);
                if p.iter().any(|v| v.unsigned_abs() > 1 << 30) {
                    return Err(format!("pads {p:?} are out of range"));
                }
                Pads::Explicit { begin: p[..n].to_vec(), end: p[n..].to_vec() }
            }
            "SAME_UPPER" => Pads::SameUpper,
            "SAME_LOWER" => Pads::SameLower,
            "VALID" => Pads::Valid,
            other => return Err(format!("auto_pad {other:?} is not defined")),
        };
        let (strides, dilations) = (positive("strides")?, positive("dilations")?);
        Ok(Window { kernel, strides, dilations, pads, ceil: c.node.int_or("ceil_mode", 0) != 0 })
    }

    /// The extent of the dilated kernel along axis `i`.
    pub(crate) fn extent(&self, i: usize) -> i64 {
        ((self.kernel[i] - 1) as i64).saturating_mul(self.dilations[i] as i64).saturating_add(1)
    }

    /// Windows over axis `i`, which has `input` elements.
    pub(crate) fn axis(&self, i: usize, input: usize) -> Result<Axis, String> {
        if input > LONGEST {
            return Err(format!("a spatial axis of {input} elements is too long"));
        }
        let (n, stride, extent) = (input as i64, self.strides[i] as i64, self.extent(i));
        let (pad_begin, pad_end) = match &self.pads {
            Pads::Explicit { begin, end } => (begin[i], end[i]),
            Pads::Valid => (0, 0),
            Pads::SameUpper | Pads::SameLower => {
                let windows = (n + stride - 1) / stride;
                let total = ((windows - 1) * stride + extent - n).max(0);
                let half = total / 2;
                match self.pads {
                    Pads::SameUpper => (half, total - half),
                    _ => (total - half, half),
                }
            }
        };
        let span = n + pad_begin + pad_end - extent;
        if span < 0 {
            return Err(format!(
                "a window of {extent} does not fit in {input} elements with padding {pad_begin}+{pad_end}"
            ));
        }
        let mut output = span / stride + 1;
        // With ceil_mode, the extra last window must start inside the input or its leading padding.
        if self.ceil && span % stride != 0 && output * stride < n + pad_begin {
            output += 1;
        }
        Ok(Axis { pad_begin, pad_end, output: output as usize })
    }

    /// Padding and output size of a transposed convolution along axis `i`, which has `input` elements.
    pub(crate) fn transposed(&self, c: &Ctx, i: usize, input: usize) -> Result<Axis, String> {
        if input > LONGEST {
            return Err(format!("a spatial axis of {input} elements is too long"));
        }
        let n = self.kernel.len();
        let extra = list(c, "output_padding", n)?.map_or(0, |p| p[i]);
        let full = (input as i64 - 1)
            .checked_mul(self.strides[i] as i64)
            .and_then(|v| v.checked_add(extra)?.checked_add(self.extent(i)))
            .ok_or("the output is too large")?;
        let wanted = match (list(c, "output_shape", n)?, &self.pads) {
            (Some(shape), _) => Some(shape[i]),
            (None, Pads::SameUpper | Pads::SameLower) => Some(input as i64 * self.strides[i] as i64),
            _ => None,
        };
        let (pad_begin, pad_end) = match (wanted, &self.pads) {
            (Some(size), pads) => {
                let total = full.saturating_sub(size).max(0);
                let half = total / 2;
                if matches!(pads, Pads::SameUpper) { (half, total - half) } else { (total - half, half) }
            }
            (None, Pads::Explicit { begin, end }) => (begin[i], end[i]),
            (None, _) => (0, 0),
        };
        let size = wanted.unwrap_or(full - pad_begin - pad_end);
        let output = usize::try_from(size)
            .map_err(|_| format!("the output would have {size} elements along spatial axis {i}"))?;
        Ok(Axis { pad_begin, pad_end, output })
    }
}

/// A list attribute with exactly `len` integers.
fn list(c: &Ctx, name: &str, len: usize) -> Result<Option<Vec<i64>>, String> {
    match c.node.ints(name) {
        Some(v) if v.len() != len => Err(format!("{name} {v:?} must have {len} entries")),
        v => Ok(v.map(<[i64]>::to_vec)),
    }
}

/// The attribute `kernel_shape`, checked against the number of spatial axes.
pub(crate) fn kernel_shape(c: &Ctx, spatial: usize) -> Result<Option<Vec<usize>>, String> {
    let Some(values) = list(c, "kernel_shape", spatial)? else { return Ok(None) };
    let kernel = values.iter().map(|v| usize::try_from(*v).ok().filter(|v| (1..=1 << 30).contains(v)));
    let kernel = kernel.collect::<Option<Vec<usize>>>();
    kernel.map(Some).ok_or_else(|| format!("kernel_shape {values:?} must be positive"))
}

//! The change that one module makes to one tensor, and its steps.

use super::{
    DoraRule,
    module::{Change, Factor, Kind, Module, Product, product},
    op::{Extent, LowRank, Op},
    target::Run,
};
use crate::SafetensorsWeights;
use ndarray::{Array2, Array3, ArrayView3, Axis, linalg::general_mat_mul};
use sdrun_abi::{Error, Result};
use std::{iter::repeat_n, sync::Arc};

/// A change of one tensor of a component by one module of an adapter. It is small: its factors stay in the adapter's file.
#[derive(Clone, Debug)]
pub struct Delta {
    pub(super) source: Arc<SafetensorsWeights>,
    pub(super) module: Arc<Module>,
    /// Whether it changes the bias instead of the weight.
    pub(super) of_bias: bool,
    /// The rows of the module's tensor that make up this tensor.
    pub(super) rows: Vec<Run>,
    /// Overrides the rule for DoRA that follows from the module's spelling.
    pub(super) dora: Option<DoraRule>,
}

impl Delta {
    /// The module's name in the file.
    pub fn module(&self) -> &str {
        &self.module.name
    }

    /// Its kind; of several, the first.
    pub fn kind(&self) -> Kind {
        match self.module.weight.first() {
            Some(change) if !self.of_bias => change.kind(),
            _ => Kind::Diff,
        }
    }

    /// Whether it only adds to the weight. Other changes depend on the weight that earlier changes left, so their order
    /// matters.
    pub fn is_additive(&self) -> bool {
        self.of_bias
            || (self.module.magnitude.is_none()
                && self
                    .module
                    .weight
                    .iter()
                    .all(|c| !matches!(c.kind(), Kind::Glora | Kind::Ia3 | Kind::Oft)))
    }

    /// Its steps on a tensor of this shape.
    pub(super) fn ops(&self, shape: &[usize], strength: f32) -> Result<Vec<Op>> {
        let tensor = Tensor::new(self, shape);
        let mut ops = Vec::new();
        if self.of_bias {
            for (bias, scale) in &self.module.bias {
                ops.push(Op::Add { values: tensor.gathered(bias)?, scale: times(strength, *scale) });
            }
            return Ok(ops);
        }
        let rule = self.dora();
        // ComfyUI decomposes the weight with its whole change, then blends the result with the old weight.
        let inner = if rule == Some(DoraRule::ComfyUi) { 1.0 } else { strength };
        for change in &self.module.weight {
            tensor.steps(change, inner, &mut ops)?;
        }
        if let (Some((magnitude, spelling)), Some(rule)) = (&self.module.magnitude, rule) {
            let outputs = self.module.weight.first().and_then(|c| c.shape().first().copied().flatten());
            let per_output = is_per_output(magnitude, *spelling, outputs);
            let mut norms = magnitude.values(&self.source)?;
            if per_output {
                norms = gather(norms, 1, &self.rows);
            }
            let kernel = tensor.kernel;
            match (rule, per_output) {
                (DoraRule::Peft, true) => ops.push(Op::NormalizeRows { norms }),
                (DoraRule::Peft, false) => ops.push(Op::NormalizeInputs { norms, kernel }),
                (DoraRule::ComfyUi, _) => {
                    tensor.check(&ops)?;
                    let changes = std::mem::take(&mut ops);
                    let inputs = (!per_output).then_some(kernel);
                    ops.push(Op::Decompose { changes, norms, inputs, strength });
                }
            }
        }
        tensor.check(&ops)?;
        Ok(ops)
    }

    /// The rule for DoRA's magnitudes, if it has any.
    pub fn dora(&self) -> Option<DoraRule> {
        let (_, spelling) = self.module.magnitude.as_ref().filter(|_| !self.of_bias)?;
        Some(self.dora.unwrap_or(*spelling))
    }
}

/// Whether DoRA's magnitudes are norms of rows. PEFT's always are, even of shape `[1, out, 1, 1]`. LyCORIS stores norms of
/// rows as `[out, 1…]` (`wd_on_out`) and norms over all outputs as `[1, in, 1…]`.
pub(super) fn is_per_output(magnitude: &Factor, spelling: DoraRule, outputs: Option<usize>) -> bool {
    spelling == DoraRule::Peft || (Some(magnitude.rows()) == outputs && outputs == Some(magnitude.elements()))
}

/// The target of a delta, as a matrix.
struct Tensor<'a> {
    delta: &'a Delta,
    rows: usize,
    columns: usize,
    inputs: usize,
    kernel: usize,
}

impl<'a> Tensor<'a> {
    fn new(delta: &'a Delta, shape: &[usize]) -> Self {
        Tensor {
            delta,
            rows: shape.first().copied().unwrap_or(1),
            columns: product(shape.get(1..).unwrap_or_default()),
            inputs: shape.get(1).copied().unwrap_or(1),
            kernel: product(shape.get(2..).unwrap_or_default()),
        }
    }

    fn values(&self, factor: &Factor) -> Result<Vec<f32>> {
        factor.values(&self.delta.source)
    }

    /// A factor `[r, columns]`.
    fn matrix(&self, factor: &Factor) -> Result<Array2<f32>> {
        matrix(self.values(factor)?, factor.rows(), factor.columns())
    }

    /// A factor `[out, …]` of the module: the rows of this tensor.
    fn gathered(&self, factor: &Factor) -> Result<Array2<f32>> {
        let columns = factor.columns();
        matrix(gather(self.values(factor)?, columns, &self.delta.rows), self.rows, columns)
    }

    /// The factors `[rows, r]` and `[r, columns]` of a product of two.
    fn factored(&self, product: &Product) -> Result<LowRank> {
        match product {
            Product::Two(a, b) => LowRank::new(&self.gathered(a)?, &self.matrix(b)?),
            Product::Tucker { core, a, b } => {
                let a = self.matrix(a)?.reversed_axes();
                let values = gather(a.iter().copied().collect(), a.ncols(), &self.delta.rows);
                let up = matrix(values, self.rows, a.ncols())?;
                LowRank::new(&up, &self.contracted(core, b)?)
            }
            Product::Full(_) => Err(Error::internal("LoHa without factors")),
        }
    }

    /// `Σ_j core[i, j, k] · b[j, in]` as `[i, (in, k)]`.
    fn contracted(&self, core: &Factor, b: &Factor) -> Result<Array2<f32>> {
        let (b, values) = (self.matrix(b)?, self.values(core)?);
        let (i, j) = (core.rows(), b.nrows());
        let k = product(core.shape.get(2..).unwrap_or_default());
        let core = ArrayView3::from_shape((i, j, k), &values).map_err(inner)?;
        let mut out = Array3::<f32>::zeros((i, b.ncols(), k));
        for place in 0..k {
            let mut out = out.index_axis_mut(Axis(2), place);
            general_mat_mul(1.0, &core.index_axis(Axis(2), place), &b, 0.0, &mut out);
        }
        matrix(out.into_raw_vec_and_offset().0, i, b.ncols() * k)
    }

    /// The whole of a product, `[rows of its own, the rest]`.
    fn full(&self, product: &Product) -> Result<Array2<f32>> {
        match product {
            Product::Full(factor) => self.matrix(factor),
            Product::Two(a, b) => Ok(self.matrix(a)?.dot(&self.matrix(b)?)),
            Product::Tucker { core, a, b } => Ok(self.matrix(a)?.t().dot(&self.contracted(core, b)?)),
        }
    }

    fn steps(&self, change: &Change, strength: f32, ops: &mut Vec<Op>) -> Result<()> {
        match change {
            Change::Lora { up, down, mid, scale } => {
                let down = match mid {
                    Some(mid) => self.contracted(mid, down)?,
                    None => self.matrix(down)?,
                };
                let product = LowRank::new(&self.gathered(up)?, &down)?;
                ops.push(Op::LowRank { product, scale: times(strength, *scale) });
            }
            Change::Loha { w1, w2, scale } => {
                let (one, two) = (self.factored(w1)?, self.factored(w2)?);
                ops.push(Op::Hadamard { one, two, scale: times(strength, *scale) });
            }
            Change::Lokr { w1, w2, scale } => {
                let (w1, w2) = (self.full(w1)?, self.full(w2)?);
                let mut rows = vec![0; self.rows];
                for run in &self.delta.rows {
                    for (place, source) in rows.iter_mut().skip(run.to).zip(run.from..run.from + run.len) {
                        *place = source;
                    }
                }
                ops.push(Op::Kronecker { w1, w2, rows, scale: times(strength, *scale) });
            }
            Change::Glora { a1, a2, b1, b2, first, scale } => {
                let ((a1, a2), (b1, b2)) = if *first { ((a2, a1), (b2, b1)) } else { ((a1, a2), (b1, b2)) };
                let scale = times(strength, *scale);
                // The product with the weight comes first: it takes the old weight.
                let (a1, a2) = (self.matrix(a1)?, self.matrix(a2)?);
                ops.push(Op::Inputs { a1, a2, kernel: self.kernel, scale });
                let product = LowRank::new(&self.gathered(b1)?, &self.matrix(b2)?)?;
                ops.push(Op::LowRank { product, scale });
            }
            Change::Ia3 { w, on_input } => {
                let mut factors = self.values(w)?;
                factors.iter_mut().for_each(|f| *f = 1.0 + strength * *f);
                ops.push(match on_input {
                    true => Op::ScaleColumns {
                        factors: factors.into_iter().flat_map(|f| repeat_n(f, self.kernel)).collect(),
                    },
                    false => Op::ScaleRows { factors: gather(factors, 1, &self.delta.rows) },
                });
            }
            Change::Oft { blocks, rescale, constraint } => {
                let rotations = super::oft::rotations(
                    &self.values(blocks)?,
                    blocks.rows(),
                    blocks.shape.get(1).copied().unwrap_or(1),
                    *constraint,
                    strength,
                )?;
                ops.push(Op::Rotate { blocks: rotations });
                if let Some(rescale) = rescale {
                    let mut factors = self.values(rescale)?;
                    // Blended by strength, as the rotation is, so that a small strength makes a small change.
                    factors.iter_mut().for_each(|f| *f = 1.0 + strength * (*f - 1.0));
                    ops.push(Op::ScaleRows { factors });
                }
            }
            Change::Diff { values } => {
                let values =
                    matrix(self.gathered(values)?.into_raw_vec_and_offset().0, self.rows, self.columns)?;
                ops.push(Op::Add { values, scale: strength });
            }
        }
        Ok(())
    }

    /// Checks that no step reads or writes outside the tensor, whatever shape the caller named.
    fn check(&self, ops: &[Op]) -> Result<()> {
        let whole = |product: &LowRank| product.rows() == self.rows && product.columns() == self.columns;
        let fits = |op: &Op| match op {
            Op::LowRank { product, .. } => whole(product),
            Op::Hadamard { one, two, .. } => whole(one) && whole(two),
            Op::Kronecker { w1, w2, rows, .. } => {
                rows.iter().all(|row| *row < w1.nrows() * w2.nrows())
                    && w1.ncols() * w2.ncols() == self.columns
            }
            Op::Add { values, .. } => values.dim() == (self.rows, self.columns),
            Op::NormalizeRows { norms: v } | Op::ScaleRows { factors: v } => v.len() == self.rows,
            Op::NormalizeInputs { norms, .. } => norms.len() == self.inputs,
            Op::Decompose { norms, inputs, .. } => {
                norms.len() == if inputs.is_some() { self.inputs } else { self.rows }
            }
            Op::ScaleColumns { factors } => factors.len() == self.columns,
            Op::Inputs { a1, a2, .. } => a1.nrows() == self.inputs && a2.ncols() == self.inputs,
            Op::Rotate { blocks } => blocks.iter().map(Array2::nrows).sum::<usize>() == self.rows,
        };
        let all_rows = matches!(*self.delta.rows, [Run { from: 0, to: 0, len }] if len == self.rows);
        if !ops.iter().all(|op| fits(op) && (all_rows || op.extent() < Extent::Whole)) {
            let (name, rows, columns) = (self.delta.module(), self.rows, self.columns);
            return Err(Error::invalid(format!("{name:?} does not change a tensor of [{rows}, {columns}]")));
        }
        Ok(())
    }
}

/// The rows of `values` (of `columns` each) in the order of the target.
fn gather(values: Vec<f32>, columns: usize, runs: &[Run]) -> Vec<f32> {
    let rows = runs.iter().map(|run| run.to + run.len).max().unwrap_or(0);
    if let [Run { from: 0, to: 0, len }] = runs
        && len * columns == values.len()
    {
        return values;
    }
    let mut out = vec![0f32; rows * columns];
    for run in runs {
        let source = values.chunks_exact(columns.max(1)).skip(run.from);
        let target = out.chunks_exact_mut(columns.max(1)).skip(run.to).take(run.len);
        target.zip(source).for_each(|(t, s)| t.copy_from_slice(s));
    }
    out
}

fn matrix(values: Vec<f32>, rows: usize, columns: usize) -> Result<Array2<f32>> {
    Array2::from_shape_vec((rows, columns), values).map_err(inner)
}

fn inner(error: ndarray::ShapeError) -> Error {
    Error::invalid(format!("the factors of an adapter do not fit the tensor: {error}"))
}

fn times(strength: f32, scale: f64) -> f32 {
    (f64::from(strength) * scale) as f32
}

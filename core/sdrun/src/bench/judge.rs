//! Compares a contender's outputs with the reference.

use super::{Accuracy, Row, Status};
use crate::{
    Result, Tensors,
    verify::{self, Tolerance},
};
use sdrun_abi::Error as AbiError;

/// Score of an output; lower is worse. Non-finite values outweigh any cosine.
fn score(c: &verify::Comparison) -> f64 {
    c.cosine - (c.not_finite + c.reference_not_finite) as f64
}

/// Sets the status, the reason and the accuracy of a row. `reference` has the outputs to compare with and what is allowed.
pub(super) fn judge(
    row: &mut Row,
    outputs: &Tensors,
    reference: Option<(&Tensors, Tolerance)>,
) -> Result<()> {
    let Some((reference, tolerance)) = reference else {
        row.status = Status::Unverified;
        row.reason = Some("there are no reference outputs to compare with".into());
        return Ok(());
    };
    let compared = verify::compare(outputs, reference)?;
    let accepted = compared.iter().all(|c| tolerance.accepts(c));
    let worst = compared
        .into_iter()
        .min_by(|a, b| score(a).total_cmp(&score(b)))
        .ok_or_else(|| AbiError::invalid("the model has no outputs"))?;
    row.status = if accepted { Status::Ok } else { Status::Inaccurate };
    row.reason = (!accepted).then(|| match (worst.not_finite, worst.reference_not_finite) {
        (0, 0) => format!(
            "output {:?} is too far from the reference: relative error {:.2e}, cosine {:.6}",
            worst.output, worst.relative_error, worst.cosine
        ),
        (0, there) => {
            format!("output {:?} has {there} NaN or infinite values in the reference alone", worst.output)
        }
        (here, _) => format!("output {:?} has {here} NaN or infinite values", worst.output),
    });
    row.accuracy = Some(Accuracy { worst, tolerance, accepted });
    Ok(())
}

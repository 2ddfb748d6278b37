use sdrun_abi::{Error, ErrorCode, Result, WeightSource, WeightSpec};

/// Faults that the message names before it counts the rest.
const NAMED: usize = 5;

/// Checks that `source` has every weight of `specs` in its type and shape, without reading or converting values. Returns one
/// error for all faults: `NotFound` where all are missing weights, else `InvalidArgument`.
pub fn check_complete(specs: &[WeightSpec], source: &dyn WeightSource) -> Result<()> {
    let (mut faults, mut missing) = (Vec::new(), 0);
    for WeightSpec { name, dtype, shape } in specs {
        match source.describe(name) {
            Ok((d, s)) if d == *dtype && s == *shape => {}
            Ok((d, s)) => faults.push(format!("{name:?} is {d} {s:?} instead of {dtype} {shape:?}")),
            Err(error) if error.code == ErrorCode::NotFound => {
                missing += 1;
                faults.push(format!("{name:?} is missing"));
            }
            Err(error) => faults.push(error.message),
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    let count = faults.len();
    let code = if missing == count { ErrorCode::NotFound } else { ErrorCode::InvalidArgument };
    let rest = if count > NAMED { format!(", and {} more", count - NAMED) } else { String::new() };
    faults.truncate(NAMED);
    let message =
        format!("{count} of the graph's {} weights cannot be used: {}{rest}", specs.len(), faults.join(", "));
    Err(Error::new(code, message)
        .with_hint("give a checkpoint of this graph's architecture that has them all"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cast, InMemoryWeights};
    use sdrun_abi::DType;
    use sdrun_graph::Tensor;

    fn spec(name: &str, dtype: DType, shape: &[usize]) -> WeightSpec {
        WeightSpec { name: name.into(), dtype, shape: shape.into() }
    }

    #[test]
    fn every_fault_is_counted_and_the_first_are_named() {
        let source: InMemoryWeights = [("a", 1), ("b", 2)]
            .map(|(n, d)| (n.to_string(), Tensor::from_elements(vec![d], &vec![0f32; d]).unwrap()))
            .into_iter()
            .collect();
        let good = [spec("a", DType::F32, &[1]), spec("b", DType::F32, &[2])];
        assert_eq!(check_complete(&good, &source), Ok(()));

        let gone: Vec<WeightSpec> = (0..9).map(|i| spec(&format!("g{i}"), DType::F32, &[1])).collect();
        let error = check_complete(&[&good[..], &gone].concat(), &source).unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound);
        assert!(error.message.starts_with("9 of the graph's 11 weights"), "{error}");
        assert!(
            error.message.contains("\"g4\" is missing") && error.message.ends_with(", and 4 more"),
            "{error}"
        );
        assert!(!error.message.contains("g5"), "{error}");

        let wrong =
            [spec("a", DType::F16, &[1]), spec("b", DType::F32, &[1, 2]), spec("c", DType::F32, &[1])];
        let error = check_complete(&wrong, &source).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        for words in [
            "\"a\" is f32 [1] instead of f16 [1]",
            "\"b\" is f32 [2] instead of f32 [1, 2]",
            "\"c\" is missing",
        ] {
            assert!(error.message.contains(words), "{error}");
        }
        // A cast mends the type, not the shape.
        let error = check_complete(&wrong, &Cast::new(&source, &wrong)).unwrap_err();
        assert!(error.message.starts_with("2 of the graph's 3 weights"), "{error}");
        assert!(error.message.contains("wants [1, 2]"), "{error}");
    }
}

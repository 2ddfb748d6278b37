use crate::{
    convert::{convert_into, is_convertible},
    memory::Buffers,
};
use sdrun_abi::{DType, EncodedWeight, Error, Result, TakeRows, Weight, WeightSource, WeightSpec};
use std::collections::HashMap;

/// Converts a source's weights to the types of a graph: between f32, f16, bf16 and f64, rounding to nearest even once. Weights
/// that already have the type pass through without a copy.
///
/// Errors of its own: `NotFound` for a name the graph does not have; `InvalidArgument` for a shape other than the graph's;
/// `Unimplemented` for any other pair of types; `OutOfRange` where a finite value would become infinite.
pub struct Cast<'a> {
    source: &'a dyn WeightSource,
    wanted: HashMap<&'a str, &'a WeightSpec>,
    buffers: Buffers,
}

impl<'a> Cast<'a> {
    /// `source`, in the types and shapes of `specs`.
    pub fn new(source: &'a dyn WeightSource, specs: &'a [WeightSpec]) -> Self {
        let wanted = specs.iter().map(|spec| (&*spec.name, spec)).collect();
        Cast { source, wanted, buffers: Buffers::default() }
    }

    fn wanted(&self, name: &str) -> Result<&'a WeightSpec> {
        self.wanted
            .get(name)
            .copied()
            .ok_or_else(|| Error::not_found(format!("the graph has no weight {name:?}")))
    }
}

fn check(wanted: &WeightSpec, dtype: DType, shape: &[usize]) -> Result<()> {
    let name = &wanted.name;
    if shape != wanted.shape {
        let message = format!("weight {name:?} has shape {shape:?}, but the graph wants {:?}", wanted.shape);
        return Err(
            Error::invalid(message).with_hint("the weights belong to another architecture or need a mapping")
        );
    }
    if dtype != wanted.dtype && !(is_convertible(dtype) && is_convertible(wanted.dtype)) {
        let message =
            format!("weight {name:?} is {dtype}, which cannot become the {} the graph wants", wanted.dtype);
        return Err(Error::unsupported(message));
    }
    Ok(())
}

impl WeightSource for Cast<'_> {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let wanted = self.wanted(name)?;
        let weight = self.source.get(name)?;
        check(wanted, weight.dtype, &weight.shape)?;
        if weight.dtype == wanted.dtype {
            return Ok(weight);
        }
        let mut data = self.buffers.take(weight.data().len() / weight.dtype.size() * wanted.dtype.size())?;
        convert_into(weight.data(), weight.dtype, wanted.dtype, &mut data).map_err(|error| Error {
            message: format!("weight {name:?} cannot be converted: {}", error.message),
            hint: Some("use a graph of higher precision".into()),
            ..error
        })?;
        Weight::new(wanted.dtype, weight.shape, data)
    }

    fn check(&self, name: &str) -> Result<()> {
        let wanted = self.wanted(name)?;
        let (dtype, shape) = self.source.describe(name)?;
        check(wanted, dtype, &shape)?;
        match wanted.dtype.holds(dtype) {
            true => self.source.check(name),
            false => self.get(name).map(drop),
        }
    }

    /// Blocks pass through, for floating-point weights of the graph only.
    fn encoded(&self, name: &str, encodings: &[&str]) -> Result<Option<EncodedWeight<'_>>> {
        let wanted = self.wanted(name)?;
        if !is_convertible(wanted.dtype) {
            return Ok(None);
        }
        let weight = self.source.encoded(name, encodings)?;
        if let Some(weight) = &weight {
            check(wanted, wanted.dtype, &weight.shape)?;
        }
        Ok(weight)
    }

    /// Rows pass through if they need no conversion.
    fn rows(&self, name: &str, transposed: bool, step: usize, take: TakeRows<'_>) -> Result<bool> {
        let wanted = self.wanted(name)?;
        let (dtype, shape) = self.source.describe(name)?;
        check(wanted, dtype, &shape)?;
        Ok(dtype == wanted.dtype && self.source.rows(name, transposed, step, take)?)
    }

    fn version(&self, name: &str) -> Option<u128> {
        self.source.version(name)
    }

    fn describe(&self, name: &str) -> Result<(DType, Vec<usize>)> {
        let wanted = self.wanted(name)?;
        let (dtype, shape) = self.source.describe(name)?;
        check(wanted, dtype, &shape)?;
        Ok((wanted.dtype, shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InMemoryWeights;
    use half::{bf16, f16};
    use sdrun_abi::ErrorCode;
    use sdrun_graph::Tensor;

    fn spec(name: &str, dtype: DType, shape: &[usize]) -> WeightSpec {
        WeightSpec { name: name.into(), dtype, shape: shape.into() }
    }
    fn source() -> InMemoryWeights {
        let tensor = |elements: &[f32]| Tensor::from_elements(vec![elements.len()], elements).unwrap();
        [
            ("a".to_string(), tensor(&[1.0, 1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11)])),
            ("large".to_string(), tensor(&[1.0, -7e4])),
            ("ids".to_string(), Tensor::from_i64s(&[1, 2])),
        ]
        .into_iter()
        .collect()
    }

    #[test]
    fn types_change_and_equal_ones_are_not_copied() {
        let source = source();
        let specs =
            [spec("a", DType::F16, &[3]), spec("large", DType::F32, &[2]), spec("ids", DType::I64, &[2])];
        let cast = Cast::new(&source, &specs);
        let a = cast.get("a").unwrap();
        let expected = [0x3c00u16, 0x3c00, 0x3c02].map(|bits| f16::from_bits(bits).to_le_bytes()).concat();
        assert_eq!((a.dtype, a.data()), (DType::F16, &*expected));
        for name in ["large", "ids"] {
            assert_eq!(cast.get(name).unwrap().data().as_ptr(), source.0[name].data().as_ptr());
        }
        let specs = [spec("a", DType::BF16, &[3])];
        let cast = Cast::new(&source, &specs);
        assert_eq!(cast.get("a").unwrap().data(), [bf16::ONE.to_le_bytes(); 3].concat());
        assert_eq!(cast.describe("a").unwrap(), (DType::BF16, vec![3]));
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let source = source();
        let specs = [
            spec("a", DType::F32, &[3, 1]),
            spec("large", DType::F16, &[2]),
            spec("ids", DType::F32, &[2]),
            spec("gone", DType::F32, &[2]),
        ];
        let cast = Cast::new(&source, &specs);
        for (name, code, words) in [
            ("a", ErrorCode::InvalidArgument, "[3], but the graph wants [3, 1]"),
            ("large", ErrorCode::OutOfRange, "\"large\" cannot be converted: the value -7e4 is out of f16"),
            ("ids", ErrorCode::Unimplemented, "i64"),
            ("gone", ErrorCode::NotFound, "gone"),
            ("other", ErrorCode::NotFound, "the graph has no weight"),
        ] {
            let error = cast.get(name).unwrap_err();
            assert_eq!(error.code, code, "{error}");
            assert!(error.message.contains(words), "{error}");
            if name != "large" {
                assert_eq!(cast.describe(name).unwrap_err(), error);
            }
        }
    }
}

//! Reads inputs from files, writes outputs to files, and summarises tensors for tables.

use crate::{
    context::Context,
    files::{
        self,
        picture::{self, tensor},
    },
    format,
    parse::{ImageRange, TensorFile, TensorFormat},
};
use clap::Args;
use sdrun::{
    HostTensor, Model, Tensors,
    abi::{DType, Error, TensorSpec},
    check_input, find_input,
    graph::Dim,
    numpy::{npy, npz},
    weights::builtin::{Builtin, InputKind},
};
use sdrun_diffusion::file::JPEG_QUALITY;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(next_help_heading = "Inputs and outputs")]
pub(crate) struct InputArgs {
    /// Read an input from a .npy, .npz, .png, .jpg or .webp file; a .npz file without NAME provides all inputs in it (repeatable)
    #[arg(short, long = "input", value_name = "[NAME=]FILE")]
    inputs: Vec<TensorFile>,

    /// Generate the inputs that are not given, from this seed. Built-in models have suitable ones; other models get noise of unit
    /// variance, and integers 0 and 1
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// Values of black and white in picture tensors, for example 0..1 or -1..1
    #[arg(long, value_name = "LOW..HIGH", allow_hyphen_values = true)]
    image_range: Option<ImageRange>,
}

impl InputArgs {
    /// Reads the input files, each only if its type and shape are those of its input. `specs` are the inputs of the model or engine; `builtin` knows the value range of its pictures.
    pub(crate) fn read(&self, specs: &[TensorSpec], builtin: Option<&Builtin>) -> anyhow::Result<Tensors> {
        let mut tensors = Tensors::new();
        for file in &self.inputs {
            let read: Vec<(String, HostTensor)> = match (&file.name, file.format) {
                (Some(name), TensorFormat::Npy) => {
                    let spec = find_input(specs, name)?;
                    vec![(name.clone(), npy::read(&file.path, |dtype, shape| fits(spec, dtype, shape))?)]
                }
                (Some(name), TensorFormat::Picture) => {
                    let spec = find_input(specs, name)?;
                    let range = self.image_range.or_else(|| picture_range(builtin?, name));
                    let range = range.ok_or_else(|| no_range(name))?;
                    vec![(name.clone(), tensor::of_file(&file.path, spec, range)?)]
                }
                (name, _) => {
                    let check =
                        |name: &str, dtype, shape: &[usize]| fits(find_input(specs, name)?, dtype, shape);
                    npz::read(&file.path, name.as_deref(), check)?.into_iter().collect()
                }
            };
            for (name, tensor) in read {
                let tensor = narrowed(find_input(specs, &name)?, tensor)?;
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(Error::invalid(format!("input {name:?} is given twice")).into());
                }
            }
        }
        Ok(tensors)
    }

    /// The missing inputs. Returns an error if they cannot be generated: without `--seed`, for a model that is not built in.
    pub(crate) fn missing(
        &self,
        specs: &[TensorSpec],
        given: &Tensors,
        model: Option<&Model>,
    ) -> anyhow::Result<Vec<String>> {
        let missing: Vec<&TensorSpec> = specs.iter().filter(|s| !given.contains_key(&s.name)).collect();
        if missing.is_empty() || self.seed.is_some() || model.is_some_and(|model| model.builtin().is_some()) {
            return Ok(missing.into_iter().map(|s| s.name.clone()).collect());
        }
        // The model knows the names of open dimensions.
        let named = model.map(Model::inputs).unwrap_or_default();
        let wanted = missing.iter().map(|spec| {
            let dims =
                named.iter().find(|(input, _)| input.name == spec.name).map(|(_, dims)| dims.as_slice());
            let name = |at: usize| match dims.and_then(|dims| dims.get(at)) {
                Some(Dim::Symbol(name)) => name.clone(),
                _ => "?".into(),
            };
            let dim =
                |(at, dim): (usize, &Option<usize>)| dim.map_or_else(|| name(at), |size| size.to_string());
            let shape: Vec<String> = spec.shape.iter().enumerate().map(dim).collect();
            format!("{} {} [{}]", spec.name, spec.dtype, shape.join(", "))
        });
        let open = missing.iter().any(|spec| spec.shape.contains(&None));
        let shapes = if open { " and `--shape NAME=SIZES`" } else { "" };
        Err(Error::invalid(format!("these inputs are missing: {}", format::list(wanted)))
            .with_hint(format!(
                "give each with `--input NAME=FILE`, or generate them with `--seed N`{shapes}"
            ))
            .into())
    }

    /// The range for an output picture.
    fn output_range(&self, name: &str) -> anyhow::Result<ImageRange> {
        Ok(self.image_range.ok_or_else(|| no_range(name))?)
    }
}

fn picture_range(builtin: &Builtin, name: &str) -> Option<ImageRange> {
    match builtin.inputs.iter().find(|i| i.name == name)?.kind {
        InputKind::Picture { low, high } => Some(ImageRange { low, high }),
        _ => None,
    }
}

fn no_range(name: &str) -> Error {
    Error::invalid(format!("the values of black and white in {name:?} are unknown"))
        .with_hint("add `--image-range 0..1` or `--image-range -1..1`, whichever the model uses")
}

/// Checks the type and shape of an array for an input. NumPy files have no bf16, so f32 arrays may be bf16 inputs.
fn fits(spec: &TensorSpec, dtype: DType, shape: &[usize]) -> Result<(), Error> {
    let dtype = if spec.dtype == DType::BF16 && dtype == DType::F32 { spec.dtype } else { dtype };
    check_input(spec, dtype, shape)
}

/// Rounds the f32 array of a bf16 input to nearest.
fn narrowed(spec: &TensorSpec, tensor: HostTensor) -> anyhow::Result<HostTensor> {
    if (spec.dtype, tensor.dtype()) != (DType::BF16, DType::F32) {
        return Ok(tensor);
    }
    let values = tensor.values().ok_or_else(|| Error::internal("an f32 tensor has no values"))?;
    Ok(HostTensor::from_f64(DType::BF16, tensor.shape().to_vec(), values)?)
}

#[derive(Args)]
#[command(next_help_heading = "Inputs and outputs")]
pub(crate) struct OutputArgs {
    /// Write one output to a .npy, .png, .jpg or .webp file (repeatable)
    #[arg(long = "output", value_name = "NAME=FILE")]
    outputs: Vec<TensorFile>,

    /// Write all outputs to a .npz file
    #[arg(short = 'o', long = "outputs", value_name = "FILE.npz")]
    all: Option<PathBuf>,
}

impl OutputArgs {
    /// Refuses outputs that cannot be written, before work starts. `names` are the model's outputs.
    pub(crate) fn check(&self, names: &[String], inputs: &InputArgs) -> anyhow::Result<()> {
        for file in &self.outputs {
            let Some(name) = &file.name else {
                return Err(Error::invalid("--output needs the name of an output: `--output NAME=FILE`")
                    .with_hint("`-o FILE.npz` writes all outputs")
                    .into());
            };
            if !names.contains(name) {
                let known = format::list(names);
                return Err(Error::invalid(format!("there is no output {name:?} (outputs: {known})")).into());
            }
            match file.format {
                TensorFormat::Npy => {}
                TensorFormat::Picture => drop(inputs.output_range(name)?),
                TensorFormat::Npz => {
                    return Err(Error::invalid(
                        "one output goes to a .npy file or a picture; `-o` takes a .npz file",
                    )
                    .into());
                }
            }
            files::check_target(&file.path)?;
        }
        if let Some(path) = &self.all {
            if !crate::model::has_ending(path, "npz") {
                return Err(Error::invalid(format!("-o takes a .npz file, not {}", path.display())).into());
            }
            files::check_target(path)?;
        }
        Ok(())
    }

    /// Writes the files. If one fails, the files before it stay, complete.
    pub(crate) fn write(
        &self,
        outputs: &Tensors,
        inputs: &InputArgs,
        context: &Context,
    ) -> anyhow::Result<()> {
        for file in &self.outputs {
            let Some((name, tensor)) = file.name.as_ref().and_then(|n| outputs.get_key_value(n)) else {
                continue;
            };
            if file.format == TensorFormat::Picture {
                let (image, not_finite) = tensor::to_picture(name, tensor, inputs.output_range(name)?)?;
                if not_finite > 0 {
                    context.note(&format!("warning: {not_finite} values of {name} are NaN or infinite"));
                }
                picture::write(&file.path, &image, JPEG_QUALITY, &[])?;
            } else {
                let stored = npy::storable(name, tensor)?;
                files::write(&file.path, |out| npy::write_to(out, stored.as_ref().unwrap_or(tensor)))?;
            }
        }
        if let Some(path) = &self.all {
            let stored = outputs
                .iter()
                .map(|(name, tensor)| Ok((name.as_str(), tensor, npy::storable(name, tensor)?)))
                .collect::<anyhow::Result<Vec<_>>>()?;
            let entries =
                stored.iter().map(|(name, tensor, stored)| (*name, stored.as_ref().unwrap_or(tensor)));
            files::write(path, |out| npz::write_to(out, entries))?;
        }
        Ok(())
    }
}

/// A summary of a tensor, for a table.
#[derive(Serialize)]
pub(crate) struct Summary {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Of the finite values; `None` if there are none.
    pub(crate) min: Option<f64>,
    pub(crate) max: Option<f64>,
    pub(crate) mean: Option<f64>,
    pub(crate) stddev: Option<f64>,
    /// NaN and infinite values.
    pub(crate) not_finite: usize,
}

impl Summary {
    pub(crate) fn of(name: &str, tensor: &HostTensor) -> Self {
        let values = || tensor.values().into_iter().flatten();
        let finite = || values().filter(|v| v.is_finite());
        let count = finite().count();
        let n = count as f64;
        let mean = finite().sum::<f64>() / n;
        let variance = finite().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let some = |v: f64| (count > 0).then_some(v);
        Summary {
            name: name.to_string(),
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            min: some(finite().fold(f64::INFINITY, f64::min)),
            max: some(finite().fold(f64::NEG_INFINITY, f64::max)),
            mean: some(mean),
            stddev: some(variance.sqrt()),
            not_finite: values().count() - count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_leave_out_what_is_not_finite() {
        let tensor = HostTensor::from_f32(vec![5], &[1.0, 3.0, f32::NAN, f32::INFINITY, 8.0]).unwrap();
        let s = Summary::of("x", &tensor);
        assert_eq!((s.min, s.max, s.mean, s.not_finite), (Some(1.0), Some(8.0), Some(4.0), 2));
        // ((1-4)² + (3-4)² + (8-4)²) / 3
        assert!((s.stddev.unwrap() - (26.0f64 / 3.0).sqrt()).abs() < 1e-12);
        let empty = Summary::of("x", &HostTensor::zeros(DType::F32, vec![0]).unwrap());
        assert_eq!((empty.min, empty.mean), (None, None));
    }

    #[test]
    fn an_f32_file_stands_for_a_bf16_input_only() {
        let spec = |dtype| TensorSpec { name: "x".into(), dtype, shape: vec![Some(1)] };
        let tensor = || HostTensor::from_f32(vec![1], &[1.003]).unwrap();
        let narrow = narrowed(&spec(DType::BF16), tensor()).unwrap();
        assert_eq!((narrow.dtype(), narrow.to_f64().unwrap()), (DType::BF16, vec![1.0]));
        assert_eq!(narrowed(&spec(DType::F16), tensor()).unwrap().dtype(), DType::F32);
    }
}

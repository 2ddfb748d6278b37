use crate::{as_inputs::AsInputs, devices, engine, runtime};
use bytes::Bytes;
use sdrun_abi::{
    BuildSpec, Capabilities, Compatibility, Device, Engine, Error, Hint, Host, InitConfig, Provider, Result,
    RuntimeInfo, WeightSource,
};

/// The provider. It is stateless, because a process loads only one OpenVINO.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenVino;

impl Provider for OpenVino {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        runtime::init(config, host)
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(devices::all(runtime::get()?)?.into_iter().map(|target| target.device).collect())
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        Ok(devices::find(runtime::get()?, device)?.capabilities())
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let runtime = runtime::get()?;
        let placement = check_spec(spec)?;
        let target = devices::find(runtime, &spec.device)?;
        target.check_precision(spec.precision)?;
        let model = Bytes::copy_from_slice(model);
        match (placement, spec.bake) {
            (Weights::Inputs, true) => {
                Err(Error::invalid("an engine that takes its weights as inputs cannot have them baked in")
                    .with_hint(Hint::AnyOf(vec![
                        Hint::LeaveOut { option: "bake".into() },
                        "use `weights=constants`".into(),
                    ])))
            }
            (Weights::Inputs, false) => AsInputs::compile(runtime, model, spec, target, host),
            (Weights::Constants, false) => engine::Stripped::build(runtime, model, spec, target, host),
            (Weights::Constants, true) => engine::Baked::build(runtime, model, spec, target, weights, host),
        }
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let runtime = runtime::get()?;
        let placement = check_spec(spec)?;
        let target = devices::find(runtime, &spec.device)?;
        target.check_precision(spec.precision)?;
        match (engine::is_baked(payload), placement) {
            (false, Weights::Inputs) => {
                AsInputs::compile(runtime, Bytes::copy_from_slice(payload), spec, target, host)
            }
            (false, Weights::Constants) => {
                engine::Stripped::load(runtime, Bytes::copy_from_slice(payload), spec, target)
            }
            (true, _) => engine::Baked::load(runtime, payload, spec, target, host),
        }
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let runtime = runtime::get()?;
        engine::check(compatibility, runtime, &devices::find(runtime, device)?)
    }
}

/// How the compiled model holds the weights: the option `weights`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    /// As constants; new weights need a new compilation. Fastest to run.
    Constants,
    /// As inputs; new weights are only bound. Fastest to change.
    Inputs,
}

fn check_spec(spec: &BuildSpec) -> Result<Weights> {
    if spec.threads == Some(0) {
        return Err(Error::invalid("the number of threads must be at least 1"));
    }
    let mut weights = Weights::Constants;
    for (key, value) in &spec.options {
        weights = match (key.as_str(), value.as_str()) {
            ("weights", "constants") => Weights::Constants,
            ("weights", "inputs") => Weights::Inputs,
            ("weights", _) => {
                return Err(Error::invalid(format!("openvino does not know weights={value}"))
                    .with_hint("use `weights=constants` (the default) or `weights=inputs`"));
            }
            _ => {
                return Err(Error::invalid(format!("openvino has no option `{key}`"))
                    .with_hint("openvino takes `weights=constants` or `weights=inputs`"));
            }
        };
    }
    Ok(weights)
}

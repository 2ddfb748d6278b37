use crate::{devices, engine, runtime};
use bytes::Bytes;
use sdrun_abi::{
    BuildSpec, Capabilities, Compatibility, Device, Engine, Error, Host, InitConfig, Provider, Result,
    RuntimeInfo, WeightSource,
};
use sdrun_provider_common::refuse_options;

/// The provider. It has no state of its own: a process holds one OpenVINO.
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
        check_spec(spec)?;
        let target = devices::find(runtime, &spec.device)?;
        target.check_precision(spec.precision)?;
        let model = Bytes::copy_from_slice(model);
        match spec.bake {
            false => engine::Stripped::build(runtime, model, spec, target, host),
            true => engine::Baked::build(runtime, model, spec, target, weights, host),
        }
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let runtime = runtime::get()?;
        check_spec(spec)?;
        let target = devices::find(runtime, &spec.device)?;
        target.check_precision(spec.precision)?;
        match engine::is_baked(payload) {
            false => engine::Stripped::load(runtime, Bytes::copy_from_slice(payload), spec, target),
            true => engine::Baked::load(runtime, payload, spec, target, host),
        }
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let runtime = runtime::get()?;
        engine::check(compatibility, runtime, &devices::find(runtime, device)?)
    }
}

fn check_spec(spec: &BuildSpec) -> Result<()> {
    refuse_options("openvino", &spec.options)?;
    match spec.threads {
        Some(0) => Err(Error::invalid("the number of threads must be at least 1")),
        _ => Ok(()),
    }
}

use crate::{
    devices,
    engine::{self, TrtEngine},
    options::Options,
    runtime,
};
use sdrun_abi::{
    BuildSpec, Capabilities, Compatibility, Device, Engine, Error, Host, InitConfig, Provider, Result,
    RuntimeInfo, WeightSource,
};

/// The provider. It is stateless: a process holds one TensorRT-RTX.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorRtRtx;

impl Provider for TensorRtRtx {
    fn init(&self, config: &InitConfig, _: &dyn Host) -> Result<RuntimeInfo> {
        runtime::init(config)
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(devices::all(runtime::get()?)?.into_iter().map(|place| place.device).collect())
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
        let options = read_spec(spec)?;
        let place = devices::find(runtime, &spec.device)?;
        place.target.check_precision(spec.precision)?;
        Ok(Box::new(TrtEngine::build(runtime, model, spec, place, options, weights, host)?))
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, _: &dyn Host) -> Result<Box<dyn Engine>> {
        let runtime = runtime::get()?;
        let options = read_spec(spec)?;
        let place = devices::find(runtime, &spec.device)?;
        Ok(Box::new(TrtEngine::load(runtime, payload, place, options)?))
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let runtime = runtime::get()?;
        engine::check(compatibility, runtime, &devices::find(runtime, device)?)
    }
}

fn read_spec(spec: &BuildSpec) -> Result<Options> {
    if spec.threads == Some(0) {
        return Err(Error::invalid("the number of threads must be at least 1"));
    }
    Options::of(spec)
}

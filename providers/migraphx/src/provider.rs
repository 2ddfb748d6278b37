use crate::{devices, engine, half::Half, options, payload::Requirements, runtime};
use bytes::Bytes;
use sdrun_abi::{
    BuildSpec, Capabilities, Compatibility, Device, Engine, Host, InitConfig, Precision, Provider, Result,
    RuntimeInfo, WeightSource,
};

/// The provider. It is stateless, because a process loads only one MIGraphX.
#[derive(Clone, Copy, Debug, Default)]
pub struct MiGraphX;

impl Provider for MiGraphX {
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
        let target = devices::find(runtime, &spec.device)?;
        devices::check_precision(spec.precision)?;
        let options = options::read(spec, &target)?;
        let model = Bytes::copy_from_slice(model);
        if spec.precision == Precision::Fp32 {
            let baked = spec.bake.then_some(weights);
            return engine::build(runtime, target, model, options, &spec.open_shapes, baked, host);
        }
        let half = Half::of(&model, weights)?;
        let (model, baked) = (half.model.clone(), spec.bake.then_some(&half as &dyn WeightSource));
        engine::build(runtime, target, model, options, &spec.open_shapes, baked, host)
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let runtime = runtime::get()?;
        let target = devices::find(runtime, &spec.device)?;
        devices::check_precision(spec.precision)?;
        let options = options::read(spec, &target)?;
        engine::load(runtime, target, payload, options, host)
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let runtime = runtime::get()?;
        let target = devices::find(runtime, device)?;
        Requirements::read(compatibility)?.judge(runtime, &target)
    }
}

//! The host's side: implements [`Provider`] over a loaded plugin table.

use super::{callbacks::*, prefix, raw::*};
use crate::{
    ABI_MAJOR, ABI_MINOR, Assessment, BuildSpec, Capabilities, Compatibility, Device, Engine, Error, Host,
    InitConfig, Provider, Result, RuntimeInfo, WeightSource,
};
use engine::engine_of;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::ptr;

/// A plugin behind its function table. Plugins are never unloaded, so the table lives as long as the process.
#[derive(Clone, Copy)]
pub struct Plugin {
    raw: &'static Table,
}

/// The functions and extensions of a plugin that this host knows; functions that the plugin lacks are `None`.
struct Table {
    functions: RawPlugin,
    /// Address of the plugin's table. It is the same for every query.
    origin: usize,
    device_tensors: Option<RawDeviceTensors>,
    assess: Option<RawAssess>,
}

impl std::ops::Deref for Table {
    type Target = RawPlugin;
    fn deref(&self) -> &RawPlugin {
        &self.functions
    }
}

/// How a plugin identifies itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct PluginIdentity {
    pub id: String,
    pub vendor: String,
    pub version: String,
    pub build_id: String,
    pub abi: (u16, u16),
}

/// The function at `$field`, or an error that names it.
macro_rules! function {
    ($raw:expr, $field:ident) => {
        $raw.$field.ok_or_else(|| {
            Error::unsupported(concat!("the plugin does not offer `", stringify!($field), "`"))
        })?
    };
}

/// An argument struct with its header and the given fields.
macro_rules! args {
    ($name:ident { $($field:ident $(: $value:expr)?),* $(,)? }) => {
        $name { struct_size: size_of::<$name>() as u32, reserved: 0, $($field $(: $value)?),* }
    };
}

mod engine;
mod session;
mod tensor;

fn text(s: &str) -> RawStr {
    RawStr::new(s.as_bytes())
}

fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("cannot write JSON: {e}")))
}

/// Parses the JSON document that a plugin returned.
fn from_json<T: DeserializeOwned>(what: &str, buffer: &mut RawBuffer) -> Result<T> {
    // SAFETY: an out field: either still empty or filled by the plugin.
    let bytes = unsafe { buffer_from_raw(buffer) };
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::internal(format!("the plugin's {what} is not valid: {e}"))
            .with_hint("the plugin breaks the ABI; install another version of it")
    })
}

/// Names of the required functions that a plugin lacks.
fn missing(functions: &RawPlugin) -> Vec<&'static str> {
    macro_rules! missing {
        ($($field:ident)*) => {
            [$((functions.$field.is_none(), stringify!($field))),*]
                .into_iter()
                .filter_map(|(missing, name)| missing.then_some(name))
                .collect()
        };
    }
    missing! {
        init devices capabilities build engine_load engine_check engine_info engine_serialize engine_destroy
        session_create session_refit session_run session_memory session_destroy
    }
}

impl Plugin {
    /// Calls the query symbol of a library and checks the result.
    ///
    /// # Safety
    /// `query` is the `sdrun_plugin_query_v1` of a library that stays loaded for the lifetime of the process.
    pub unsafe fn query(query: QueryFn) -> Result<Self> {
        // SAFETY: guaranteed by the caller.
        let origin = unsafe { query(u32::from(ABI_MINOR)) };
        // SAFETY: a plugin's table states its size and lives as long as the library.
        let functions = unsafe { prefix::read(origin) }.ok_or_else(|| {
            Error::precondition(format!("the plugin needs a newer host than ABI {ABI_MAJOR}.{ABI_MINOR}"))
                .with_hint("update sdrun, or install the plugin version that belongs to this sdrun")
        })?;
        if functions.abi_major != ABI_MAJOR {
            return Err(Error::precondition(format!(
                "the plugin speaks version {} of the ABI; this host speaks version {ABI_MAJOR}",
                functions.abi_major
            ))
            .with_hint("install the plugin version that belongs to this sdrun"));
        }
        let missing = missing(&functions);
        if !missing.is_empty() {
            return Err(Error::precondition(format!(
                "the plugin's table of {} bytes lacks functions that every plugin has: {}",
                functions.struct_size,
                missing.join(", ")
            ))
            .with_hint("install the plugin version that belongs to this sdrun"));
        }
        // SAFETY: these functions belong to the plugin; an extension's table states its size and lives as long as the
        // library.
        let (device_tensors, assess) = unsafe {
            let extension = |id| functions.get_extension.map_or(ptr::null(), |get| get(text(id)));
            (prefix::read(extension(DEVICE_TENSORS).cast()), prefix::read(extension(ASSESS).cast()))
        };
        let table = Table { functions, origin: origin.addr(), device_tensors, assess };
        Ok(Plugin { raw: Box::leak(Box::new(table)) })
    }

    /// How the plugin identifies itself.
    pub fn identity(&self) -> PluginIdentity {
        // SAFETY: the strings of a table are static.
        unsafe {
            PluginIdentity {
                id: self.raw.id.text(),
                vendor: self.raw.vendor.text(),
                version: self.raw.version.text(),
                build_id: self.raw.build_id.text(),
                abi: (self.raw.abi_major, self.raw.abi_minor),
            }
        }
    }
}

// SAFETY of all calls below: the function belongs to the plugin's table; the argument struct is ours, complete, and
// outlived by everything it points to; and handles are live ones of this plugin.

impl Provider for Plugin {
    fn init(&self, config: &InitConfig, host: &dyn Host) -> Result<RuntimeInfo> {
        let (config, call) = (to_json(config)?, function!(self.raw, init));
        with_host(host, |host| {
            let mut a = args!(InitArgs { config: text(&config), host, runtime: RawBuffer::EMPTY });
            // SAFETY: see above.
            unsafe { error_from_raw(call(&mut a))? };
            from_json("runtime information", &mut a.runtime)
        })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let mut a = args!(DevicesArgs { devices: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, devices)(&mut a))? };
        from_json("device list", &mut a.devices)
    }

    fn capabilities(&self, device: &str) -> Result<Capabilities> {
        let mut a = args!(CapabilitiesArgs { device: text(device), capabilities: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, capabilities)(&mut a))? };
        from_json("capabilities", &mut a.capabilities)
    }

    fn build(
        &self,
        model: &[u8],
        spec: &BuildSpec,
        weights: &dyn WeightSource,
        host: &dyn Host,
    ) -> Result<Box<dyn Engine>> {
        let (spec, call) = (to_json(spec)?, function!(self.raw, build));
        let handle = with_host(host, |host| {
            with_source(weights, |weights| {
                let mut a = args!(BuildArgs {
                    model: RawStr::new(model),
                    spec: text(&spec),
                    weights,
                    host,
                    engine: ptr::null_mut(),
                });
                // SAFETY: see above.
                unsafe { error_from_raw(call(&mut a))? };
                Ok(a.engine)
            })
        })?;
        engine_of(self.raw, handle)
    }

    fn load(&self, payload: &[u8], spec: &BuildSpec, host: &dyn Host) -> Result<Box<dyn Engine>> {
        let (spec, call) = (to_json(spec)?, function!(self.raw, engine_load));
        let handle = with_host(host, |host| {
            let mut a = args!(EngineLoadArgs {
                payload: RawStr::new(payload),
                spec: text(&spec),
                host,
                engine: ptr::null_mut(),
            });
            // SAFETY: see above.
            unsafe { error_from_raw(call(&mut a))? };
            Ok(a.engine)
        })?;
        engine_of(self.raw, handle)
    }

    fn check(&self, compatibility: &str, device: &str) -> Result<Compatibility> {
        let mut a = args!(EngineCheckArgs {
            compatibility: text(compatibility),
            device: text(device),
            verdict: RawBuffer::EMPTY,
        });
        // SAFETY: see above.
        unsafe { error_from_raw(function!(self.raw, engine_check)(&mut a))? };
        from_json("verdict", &mut a.verdict)
    }

    fn assess(&self, model: &[u8], spec: &BuildSpec) -> Result<Assessment> {
        let Some(call) = self.raw.assess.and_then(|table| table.assess) else {
            return Ok(Assessment::default());
        };
        let spec = to_json(spec)?;
        let mut a =
            args!(AssessArgs { model: RawStr::new(model), spec: text(&spec), assessment: RawBuffer::EMPTY });
        // SAFETY: see above.
        unsafe { error_from_raw(call(&mut a))? };
        from_json("assessment", &mut a.assessment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::export::{Export, State, table};
    use std::mem::offset_of;

    struct Plain;

    impl Provider for Plain {
        fn init(&self, _: &InitConfig, _: &dyn Host) -> Result<RuntimeInfo> {
            Ok(RuntimeInfo::new("plain", "1", None))
        }
        fn devices(&self) -> Result<Vec<Device>> {
            Ok(vec![])
        }
        fn capabilities(&self, _: &str) -> Result<Capabilities> {
            Ok(Capabilities::new(vec![], vec![]))
        }
        fn build(
            &self,
            _: &[u8],
            _: &BuildSpec,
            _: &dyn WeightSource,
            _: &dyn Host,
        ) -> Result<Box<dyn Engine>> {
            Err(Error::unsupported("builds nothing"))
        }
        fn load(&self, _: &[u8], _: &BuildSpec, _: &dyn Host) -> Result<Box<dyn Engine>> {
            Err(Error::unsupported("loads nothing"))
        }
        fn check(&self, _: &str, _: &str) -> Result<Compatibility> {
            Ok(Compatibility::Optimal)
        }
        fn assess(&self, _: &[u8], _: &BuildSpec) -> Result<Assessment> {
            Ok(Assessment::unsupported(vec![]))
        }
    }

    struct Exported;

    impl Export for Exported {
        fn state() -> &'static State {
            static STATE: State = State::new(|| Box::new(Plain));
            &STATE
        }
    }

    const WHOLE: RawPlugin = table::<Exported>("plain", "tests", "1", "b");

    extern "C" fn whole(_: u32) -> *const RawPlugin {
        static TABLE: RawPlugin = WHOLE;
        &TABLE
    }

    /// A table that ends before `get_extension`; the memory after it belongs to something else.
    extern "C" fn shorter(_: u32) -> *const RawPlugin {
        static TABLE: RawPlugin =
            RawPlugin { struct_size: offset_of!(RawPlugin, get_extension) as u32, ..WHOLE };
        &TABLE
    }

    extern "C" fn without_functions(_: u32) -> *const RawPlugin {
        static TABLE: RawPlugin = RawPlugin { session_run: None, devices: None, ..WHOLE };
        &TABLE
    }

    #[test]
    fn a_shorter_table_belongs_to_an_older_plugin() {
        let spec = BuildSpec::new("cpu", crate::Precision::Fp32);
        // SAFETY: tables of this program.
        let (whole, older) = unsafe { (Plugin::query(whole).unwrap(), Plugin::query(shorter).unwrap()) };
        for plugin in [&whole, &older] {
            assert_eq!(plugin.init(&InitConfig::default(), &crate::NoHost).unwrap().name, "plain");
            assert_eq!(plugin.identity().id, "plain");
        }
        assert_eq!(whole.assess(b"", &spec).unwrap().unsupported, Some(vec![]));
        assert_eq!(older.assess(b"", &spec).unwrap(), Assessment::default());
    }

    #[test]
    fn missing_functions_are_named() {
        // SAFETY: a table of this program.
        let error = unsafe { Plugin::query(without_functions) }.err().unwrap();
        assert!(
            error.message.ends_with("lacks functions that every plugin has: devices, session_run"),
            "{error}"
        );
    }
}

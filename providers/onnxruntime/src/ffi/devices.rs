use super::{c_string, check, compile, from_ort, handle};
use crate::ep;
use ort::{AsPointer, device::Device, environment::Environment, memory::DeviceType, sys};
use sdrun_abi::{Compatibility, DeviceKind, Error, Result};
use std::{
    ffi::{CStr, c_char, c_int},
    path::Path,
    ptr::{self, NonNull},
};

/// A device of an execution provider.
pub(crate) struct EpDevice {
    route: Route,
    /// The name of the execution provider, for example `WebGpuExecutionProvider`.
    pub(crate) provider: String,
    pub(crate) kind: DeviceKind,
    /// Who made the device, as far as the system tells.
    pub(crate) vendor: String,
    /// What OpenVINO calls the device; empty for others.
    pub(crate) own_name: String,
    /// What the device computes well, as OpenVINO lists it: `FP32 BF16 INT8`; empty for others.
    pub(crate) abilities: String,
}

/// How a session comes to use an execution provider.
enum Route {
    /// By a device in ONNX Runtime's list.
    Device(NonNull<sys::OrtEpDevice>),
    /// By the short name of an execution provider that lists no devices.
    Name(&'static CStr),
}

// SAFETY: ONNX Runtime creates the description when it registers the library, never changes it, and keeps it as long as the library
// is registered, which is for the rest of the process.
unsafe impl Send for EpDevice {}
// SAFETY: as for `Send`.
unsafe impl Sync for EpDevice {}

/// Devices of execution providers that are part of the runtime's library.
pub(crate) fn built_in(environment: &Environment) -> Result<Vec<EpDevice>> {
    let mut found = environment
        .devices()
        .filter_map(|device| describe(&device).transpose())
        .collect::<Result<Vec<_>>>()?;
    if available()?.iter().any(|name| name == ep::COREML) {
        found.push(EpDevice {
            route: Route::Name(c"CoreML"),
            provider: ep::COREML.into(),
            // It divides a graph between the GPU and the neural engine.
            kind: DeviceKind::Gpu,
            vendor: "Apple".into(),
            own_name: String::new(),
            abilities: String::new(),
        });
    }
    Ok(found)
}

/// Registers the execution providers in the library `file` for the rest of the process. Returns the devices that they add.
pub(crate) fn register(environment: &Environment, name: &str, file: &Path) -> Result<Vec<EpDevice>> {
    for companion in ep::companions(file) {
        std::mem::forget(sdrun_provider_common::open(&companion)?);
    }
    if ep::is_bridged(file) {
        sdrun_provider_common::check_image(file)?;
    } else {
        // Tells what is wrong with the file, which ONNX Runtime does not.
        std::mem::forget(sdrun_provider_common::open(file)?);
    }
    let known: Vec<_> = environment.devices().map(|device| device.ptr()).collect();
    environment
        .register_ep_library(name, file)
        .map_err(|e| from_ort(e, &format!("use the extension {name}")).with_file(file))?;
    let added = environment.devices().filter(|device| !known.contains(&device.ptr()));
    added.filter_map(|device| describe(&device).transpose()).collect()
}

/// `None` for the CPU itself, and for devices that stand for others.
fn describe(device: &Device<'_>) -> Result<Option<EpDevice>> {
    let words = |e| from_ort(e, "describe a device");
    let hardware = device.hardware_device();
    let kind = match hardware.ty() {
        DeviceType::CPU => DeviceKind::Cpu,
        DeviceType::GPU => DeviceKind::Gpu,
        DeviceType::NPU => DeviceKind::Npu,
        DeviceType::FPGA => DeviceKind::Other,
    };
    let provider = device.ep().map_err(words)?.to_string();
    // Like `OpenVINOExecutionProvider.AUTO`, which chooses among OpenVINO's devices.
    if provider == ep::CPU || provider.contains('.') {
        return Ok(None);
    }
    Ok(Some(EpDevice {
        kind,
        vendor: hardware.vendor().map_err(words)?.to_string(),
        own_name: property(device, c"ov_device"),
        abilities: property(device, c"OPTIMIZATION_CAPABILITIES"),
        route: Route::Device(handle(device.ptr().cast_mut())?),
        provider,
    }))
}

/// What an execution provider says of its device under this key; empty without an entry.
fn property(device: &Device<'_>, key: &CStr) -> String {
    let api = ort::api();
    // SAFETY: the device, its properties and their texts belong to ONNX Runtime and live on. The text is copied.
    unsafe {
        let properties = (api.EpDevice_EpMetadata)(device.ptr());
        if properties.is_null() {
            return String::new();
        }
        let text = (api.GetKeyValue)(properties, key.as_ptr());
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// Names of the execution providers that are part of the runtime's library.
fn available() -> Result<Vec<String>> {
    let api = ort::api();
    let (mut names, mut count): (*mut *mut c_char, c_int) = (ptr::null_mut(), 0);
    // SAFETY: out pointers are valid. The array has as many C strings as stated; it is released once, after they are copied.
    unsafe {
        check((api.GetAvailableProviders)(&mut names, &mut count), "list its execution providers")?;
        let found = slice(names.cast_const(), count.max(0) as usize)
            .iter()
            .map(|name| CStr::from_ptr(*name).to_string_lossy().into_owned())
            .collect();
        check((api.ReleaseAvailableProviders)(names, count), "list its execution providers")?;
        Ok(found)
    }
}

impl EpDevice {
    /// Where tensors of the device are, if the execution provider lets others use that memory.
    pub(super) fn memory(&self) -> Option<*const sys::OrtMemoryInfo> {
        let Route::Device(device) = self.route else { return None };
        let kind = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_DEFAULT;
        // SAFETY: the device lives on, and so does the description, which belongs to it.
        let memory = unsafe { (ort::api().EpDevice_MemoryInfo)(device.as_ptr(), kind) };
        (!memory.is_null()).then_some(memory)
    }

    /// Whether outputs can stay on the device.
    pub(crate) fn keeps_tensors(&self) -> bool {
        self.memory().is_some()
    }

    /// How well the device can use a compiled model that needs this (from [`compatibility`](super::compatibility)).
    pub(crate) fn fit(&self, needs: &str) -> Result<Compatibility> {
        use sys::OrtCompiledModelCompatibility as Fit;
        const OPTIMAL: i32 = Fit::EP_SUPPORTED_OPTIMAL as i32;
        const BETTER_AGAIN: i32 = Fit::EP_SUPPORTED_PREFER_RECOMPILATION as i32;
        const UNSUPPORTED: i32 = Fit::EP_UNSUPPORTED as i32;
        let Route::Device(device) = self.route else {
            return Err(Error::invalid(format!("{} compiles no models", self.provider)));
        };
        let name = &self.provider;
        Ok(match compile::fit(device, needs)? {
            OPTIMAL => Compatibility::Optimal,
            BETTER_AGAIN => {
                Compatibility::PreferRecompile(format!("{name} would compile it differently for this device"))
            }
            UNSUPPORTED => Compatibility::Unsupported(format!("{name} says that this device cannot use it")),
            _ => Compatibility::Unsupported(format!("{name} does not know what it needs")),
        })
    }

    /// Lets a session use the device with these settings of the execution provider, and record what runs there.
    ///
    /// # Safety
    /// The options are alive and used by nobody else.
    pub(super) unsafe fn append(
        &self,
        options: NonNull<sys::OrtSessionOptions>,
        environment: &Environment,
        settings: &[(&str, String)],
    ) -> Result<()> {
        let api = ort::api();
        let settings = settings
            .iter()
            .map(|(key, value)| Ok((c_string(key)?, c_string(value)?)))
            .collect::<Result<Vec<_>>>()?;
        let (keys, values): (Vec<_>, Vec<_>) =
            settings.iter().map(|(key, value)| (key.as_ptr(), value.as_ptr())).unzip();
        // SAFETY: environment and device live on. The arrays have as many entries as stated, all C strings, which ONNX Runtime copies.
        // The caller guarantees the session options.
        unsafe {
            let status = match self.route {
                Route::Device(device) => {
                    let devices = [device.as_ptr().cast_const()];
                    (api.SessionOptionsAppendExecutionProvider_V2)(
                        options.as_ptr(),
                        environment.ptr().cast_mut(),
                        devices.as_ptr(),
                        devices.len(),
                        keys.as_ptr(),
                        values.as_ptr(),
                        keys.len(),
                    )
                }
                Route::Name(name) => (api.SessionOptionsAppendExecutionProvider)(
                    options.as_ptr(),
                    name.as_ptr(),
                    keys.as_ptr(),
                    values.as_ptr(),
                    keys.len(),
                ),
            };
            check(status, &format!("use {}", self.provider))?;
            let status = (api.AddSessionConfigEntry)(options.as_ptr(), RECORD.as_ptr(), c"1".as_ptr());
            check(status, "record where operators run")
        }
    }
}

/// Key of `onnxruntime_session_options_config_keys.h`: records which execution provider runs which node.
const RECORD: &CStr = c"session.record_ep_graph_assignment_info";

/// A node of the graph as optimised, and the execution provider that runs it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Assigned {
    pub(crate) provider: String,
    pub(crate) name: String,
    pub(crate) op_type: String,
}

/// Where the nodes of a session run, if it recorded that.
pub(super) fn assigned(session: NonNull<sys::OrtSession>) -> Result<Vec<Assigned>> {
    let api = ort::api();
    let doing = "tell where operators run";
    type Read =
        unsafe extern "system" fn(*const sys::OrtEpAssignedNode, *mut *const c_char) -> sys::OrtStatusPtr;
    let text = |read: Read, node| {
        let mut text = ptr::null();
        // SAFETY: the node belongs to the session, and so does the text, which is copied.
        unsafe {
            check(read(node, &mut text), doing)?;
            Ok::<_, Error>(CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let (mut parts, mut count) = (ptr::null(), 0);
    // SAFETY: the session is alive; out pointers are valid.
    let status = unsafe { (api.Session_GetEpGraphAssignmentInfo)(session.as_ptr(), &mut parts, &mut count) };
    check(status, doing)?;
    let mut found = Vec::new();
    for part in slice(parts, count) {
        let mut provider = ptr::null();
        let (mut nodes, mut count) = (ptr::null(), 0);
        // SAFETY: the part belongs to the session; out pointers are valid.
        let provider = unsafe {
            check((api.EpAssignedSubgraph_GetEpName)(*part, &mut provider), doing)?;
            check((api.EpAssignedSubgraph_GetNodes)(*part, &mut nodes, &mut count), doing)?;
            CStr::from_ptr(provider).to_string_lossy().into_owned()
        };
        for node in slice(nodes, count) {
            let name = text(api.EpAssignedNode_GetName, *node)?;
            let op_type = text(api.EpAssignedNode_GetOperatorType, *node)?;
            found.push(Assigned { provider: provider.clone(), name, op_type });
        }
    }
    Ok(found)
}

/// An array of ONNX Runtime's; empty if there is none.
fn slice<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: ONNX Runtime returns arrays with as many entries as it says. The session that owns them outlives their use in
    // `assigned`.
    unsafe { std::slice::from_raw_parts(first, count) }
}

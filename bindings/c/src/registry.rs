//! Providers and devices.

use crate::{
    calls::Calls,
    failure::{Failure, Result, caught, text},
    given::{self, Versioned},
};
use sdrun::{BuildOptions, Discovery, Isolation, Provider, Wishes, abi};
use std::{
    ffi::{CString, c_char},
    ptr,
};

/// Where providers are looked for. All fields may be zero.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RegistryOptions {
    /// `sizeof(sdrun_registry_options)`.
    pub struct_size: usize,
    /// Manifest files, or folders with manifests, that precede `providers` beside the program and those of the user.
    pub provider_paths: *const *const c_char,
    /// Their number.
    pub provider_path_count: usize,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers.
unsafe impl Versioned for RegistryOptions {}

/// The device of a provider. Its texts live as long as the list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceInfo {
    /// `sizeof(sdrun_device_info)`, set by the caller.
    pub struct_size: usize,
    /// Id of the provider.
    pub provider: *const c_char,
    /// Id of the device; null for a provider that cannot be used.
    pub id: *const c_char,
    /// Name of the device; null for a provider that cannot be used.
    pub name: *const c_char,
    /// `cpu`, `gpu` or `npu`; null for a provider that cannot be used.
    pub kind: *const c_char,
    /// Why nothing runs there; null if it works.
    pub why_not: *const c_char,
}

// SAFETY: repr(C), the size comes first, and zeros are null pointers.
unsafe impl Versioned for DeviceInfo {}

/// The providers that were found.
pub struct Registry(pub(crate) sdrun::Registry);

/// Devices of all providers.
pub struct Devices(Vec<[Option<CString>; 5]>);

/// Looks for providers. `options` may be null. Loads nothing yet. Several threads may use the registry at once.
///
/// # Safety
/// Pointers are null or valid; `registry` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_registry_open(
    options: *const RegistryOptions,
    registry: *mut *mut Registry,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (out, provider_paths) = unsafe {
            let out = given::out(registry)?;
            let options = given::options(options)?;
            let paths = given::paths(options.provider_paths, options.provider_path_count)?;
            (out, paths)
        };
        let found = sdrun::Registry::discover_with(&Discovery { provider_paths, ..Discovery::default() })?;
        *out = Box::into_raw(Box::new(Registry(found)));
        Ok(())
    })
}

/// Frees a registry. Null is allowed. Sessions and pipelines that came from it stay valid.
///
/// # Safety
/// `registry` is null or comes from `sdrun_registry_open`, and nobody uses it afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_registry_free(registry: *mut Registry) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(registry) };
}

/// Loads every provider and lists its devices. A provider that cannot be used has one entry with the reason. `calls` may be null.
///
/// # Safety
/// Pointers are null or valid; `devices` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_registry_devices(
    registry: *const Registry,
    calls: *const Calls,
    devices: *mut *mut Devices,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let (out, registry, calls) =
            unsafe { (given::out(devices)?, &given::object(registry)?.0, Calls::read(calls)?) };
        let mut found = Vec::new();
        for provide in registry.usable() {
            let id = || Some(text(&*provide.id));
            let opened = registry.open_with(&provide.id, &Isolation::default(), &calls);
            match opened.and_then(|provider| provider.devices()) {
                Ok(devices) => found.extend(devices.into_iter().map(|device| {
                    let kind = device.kind.name();
                    [
                        id(),
                        Some(text(device.id)),
                        Some(text(device.name)),
                        Some(text(kind)),
                        device.absent.map(text),
                    ]
                })),
                Err(why) => found.push([id(), None, None, None, Some(text(why.to_string()))]),
            }
        }
        *out = Box::into_raw(Box::new(Devices(found)));
        Ok(())
    })
}

/// The number of devices.
///
/// # Safety
/// `devices` is null or comes from `sdrun_registry_devices` and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_devices_count(devices: *const Devices) -> usize {
    // SAFETY: as the function's contract says; null is `None`.
    unsafe { devices.as_ref() }.map_or(0, |devices| devices.0.len())
}

/// The device with this number, from 0.
///
/// # Safety
/// As `sdrun_devices_count`; `info` points to a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_devices_get(
    devices: *const Devices,
    number: usize,
    info: *mut DeviceInfo,
) -> *mut Failure {
    caught(|| {
        // SAFETY: as the function's contract says.
        let devices = unsafe { given::object(devices)? };
        let device = devices.0.get(number).ok_or_else(|| out_of_range("device", number, devices.0.len()))?;
        let [provider, id, name, kind, why_not] =
            device.each_ref().map(|text| text.as_ref().map_or(ptr::null(), |text| text.as_ptr()));
        let value = DeviceInfo { struct_size: 0, provider, id, name, kind, why_not };
        // SAFETY: as the function's contract says.
        unsafe { given::fill(info, &value) }
    })
}

/// Frees a list of devices. Null is allowed.
///
/// # Safety
/// As `sdrun_devices_count`; nobody uses it or its texts afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sdrun_devices_free(devices: *mut Devices) {
    // SAFETY: as the function's contract says.
    unsafe { given::free(devices) };
}

pub(crate) fn out_of_range(what: &str, number: usize, count: usize) -> Failure {
    Failure::new(abi::ErrorCode::OutOfRange, format!("there is no {what} {number}: there are {count}"), None)
}

/// Where networks run. All fields may be zero: the best provider and device that are there, fp32, all cores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Place {
    /// Id of a provider.
    pub provider: *const c_char,
    /// Id of a device, an index, or a part of its name.
    pub device: *const c_char,
    /// `fp32`, `fp16`, `bf16`, `q8_0` or `q4_k`.
    pub precision: *const c_char,
    /// Threads on CPUs.
    pub threads: u32,
    /// 1 to run the provider in a process of its own, so that a crash of it is a failure of the call. 0 does so only for those that
    /// demand it. They need `sdrun-worker` beside the program, or its path in the environment variable `SDRUN_WORKER`.
    pub isolate: u32,
}

/// A place that was read.
pub(crate) struct Placed {
    pub(crate) provider: Option<String>,
    pub(crate) device: Option<String>,
    pub(crate) precision: abi::Precision,
    pub(crate) threads: Option<usize>,
    pub(crate) isolation: Isolation,
}

impl Place {
    /// # Safety
    /// Its texts are null or end with a zero byte.
    pub(crate) unsafe fn read(&self) -> Result<Placed> {
        // SAFETY: as the caller promises.
        let (provider, device, precision) =
            unsafe { (given::text(self.provider)?, given::text(self.device)?, given::text(self.precision)?) };
        let precision = match precision {
            None => abi::Precision::Fp32,
            Some(name) => name.parse().map_err(|why: String| Failure::invalid(why))?,
        };
        Ok(Placed {
            provider: provider.map(String::from),
            device: device.map(String::from),
            precision,
            threads: (self.threads > 0).then_some(self.threads as usize),
            isolation: Isolation { worker: self.isolate != 0, ..Isolation::default() },
        })
    }
}

impl Placed {
    /// The provider and device, if the user names a provider.
    pub(crate) fn only(
        &self,
        registry: &sdrun::Registry,
        calls: &Calls,
    ) -> Result<Option<(Provider, abi::Device)>> {
        let Some(id) = &self.provider else { return Ok(None) };
        let provider = registry.open_with(id, &self.isolation, calls)?;
        let device = provider.present_device(self.device.as_deref())?;
        Ok(Some((provider, device)))
    }

    /// The wishes for a choice.
    pub(crate) fn wishes(&self) -> Wishes {
        let mut wishes = Wishes::new();
        (wishes.device, wishes.isolation) = (self.device.clone(), self.isolation.clone());
        wishes
    }

    /// How to build for a device.
    pub(crate) fn options(&self) -> impl Fn(abi::Device) -> BuildOptions + Send + Sync + use<> {
        let (precision, threads) = (self.precision, self.threads);
        move |device| BuildOptions::new(device).precision(precision).threads(threads)
    }
}

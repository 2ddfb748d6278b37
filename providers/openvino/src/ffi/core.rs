use super::{CompiledModel, Model, c_path, c_string, check, handle, take_string};
use openvino_sys as ov;
use sdrun_abi::{AlignedBuffer, Result};
use sdrun_provider_common::unsupported;
use std::{
    ffi::{CStr, CString, c_char},
    path::Path,
    ptr::{self, NonNull},
};

/// Properties as the C API takes them: keys and values as text.
pub(crate) type Properties<'a> = [(&'a str, &'a str)];

/// `ov::Core`: one OpenVINO with its plugins.
pub(crate) struct Core(NonNull<ov::ov_core_t>);

// SAFETY: any threads may call the methods of `ov::Core` at once (OpenVINO documentation, "ov::Core is thread-safe"),
// and this type has no other state.
unsafe impl Send for Core {}
// SAFETY: as above.
unsafe impl Sync for Core {}

impl Core {
    /// Registers the plugins next to the loaded library. Call after [`super::load`].
    pub(crate) fn new() -> Result<Self> {
        let mut core = ptr::null_mut();
        // SAFETY: the function table is loaded; the out pointer is valid.
        let status = unsafe { ov::ov_core_create(&mut core) };
        check(status, "start")?;
        Ok(Core(handle(core)?))
    }

    /// Names of the devices: `CPU`, `GPU` or `GPU.0`, `GPU.1`, `NPU`.
    pub(crate) fn devices(&self) -> Result<Vec<String>> {
        let mut list = ov::ov_available_devices_t { devices: ptr::null_mut(), size: 0 };
        // SAFETY: the core is alive, the out structure valid.
        let status = unsafe { ov::ov_core_get_available_devices(self.0.as_ptr(), &mut list) };
        check(status, "list devices")?;
        // SAFETY: on success the list holds `size` strings; it is freed once, after they are copied.
        unsafe {
            let names = (0..list.size)
                .map(|i| CStr::from_ptr(*list.devices.add(i)).to_string_lossy().into_owned())
                .collect();
            ov::ov_available_devices_free(&mut list);
            Ok(names)
        }
    }

    /// A device property, as text.
    pub(crate) fn property(&self, device: &str, key: &str) -> Result<String> {
        let (c_device, c_key) = (c_string(device)?, c_string(key)?);
        let mut value: *mut c_char = ptr::null_mut();
        // SAFETY: the core is alive, strings and out pointer are valid.
        let status = unsafe {
            ov::ov_core_get_property(self.0.as_ptr(), c_device.as_ptr(), c_key.as_ptr(), &mut value)
        };
        check(status, &format!("tell {key} of {device}"))?;
        // SAFETY: on success the value is a fresh string.
        Ok(unsafe { take_string(value) }.unwrap_or_default())
    }

    /// Sets default properties of a device, which apply to calls that do not state their own.
    pub(crate) fn set_properties(&self, device: &str, properties: &Properties<'_>) -> Result<()> {
        let c_device = c_string(device)?;
        let owned = OwnedProperties::new(properties)?;
        // SAFETY: the core is alive, and `owned` keeps the strings alive that its array points to.
        let status = unsafe {
            ov::ov_core_set_properties(
                self.0.as_ptr(),
                c_device.as_ptr(),
                owned.array.len(),
                owned.array.as_ptr(),
            )
        };
        check(status, &format!("configure {device}"))
    }

    /// Reads an ONNX file. External data must be in the same folder.
    pub(crate) fn read(&self, file: &Path) -> Result<Model> {
        let path = c_path(file)?;
        let mut model = ptr::null_mut();
        // SAFETY: the core is alive, path and out pointer are valid; the weights path may be null.
        let status =
            unsafe { ov::ov_core_read_model(self.0.as_ptr(), path.as_ptr(), ptr::null(), &mut model) };
        check(status, "read the model").map_err(unsupported)?;
        Ok(Model(handle(model)?))
    }

    /// Reads an ONNX model without external data.
    pub(crate) fn read_bytes(&self, onnx: &[u8]) -> Result<Model> {
        let mut model = ptr::null_mut();
        // SAFETY: the core is alive; pointer and length are those of a live slice, which the call copies.
        let status = unsafe {
            ov::ov_core_read_model_from_memory_buffer(
                self.0.as_ptr(),
                onnx.as_ptr().cast(),
                onnx.len(),
                ptr::null(),
                &mut model,
            )
        };
        check(status, "read the model").map_err(unsupported)?;
        Ok(Model(handle(model)?))
    }

    /// Compiles a model for a device. The result does not depend on the model afterwards.
    pub(crate) fn compile(
        &self,
        model: &Model,
        device: &str,
        properties: &Properties<'_>,
    ) -> Result<CompiledModel> {
        let c_device = c_string(device)?;
        let owned = OwnedProperties::new(properties)?;
        let mut compiled = ptr::null_mut();
        // SAFETY: core and model are alive, and `owned` keeps the strings alive that its array points to.
        let status = unsafe {
            ov::ov_core_compile_model_props(
                self.0.as_ptr(),
                model.0.as_ptr(),
                c_device.as_ptr(),
                owned.array.len(),
                owned.array.as_ptr(),
                &mut compiled,
            )
        };
        check(status, "compile the model").map_err(unsupported)?;
        Ok(CompiledModel { compiled: handle(compiled)?, _blob: AlignedBuffer::default() })
    }

    /// Imports a blob that [`CompiledModel::export`] wrote. The compiled model owns the blob, because it keeps using
    /// the blob's memory. The properties of [`Core::set_properties`] apply.
    pub(crate) fn import(&self, blob: AlignedBuffer, device: &str) -> Result<CompiledModel> {
        let c_device = c_string(device)?;
        let mut compiled = ptr::null_mut();
        // SAFETY: the core is alive. Pointer and length describe the buffer, which does not move and lives as long as
        // the compiled model.
        let status = unsafe {
            ov::ov_core_import_model(
                self.0.as_ptr(),
                blob.as_ptr().cast(),
                blob.len(),
                c_device.as_ptr(),
                &mut compiled,
            )
        };
        check(status, "import the compiled model")?;
        Ok(CompiledModel { compiled: handle(compiled)?, _blob: blob })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: created by `ov_core_create` and freed once.
        unsafe { ov::ov_core_free(self.0.as_ptr()) }
    }
}

/// An array of `ov_property_t`, with the strings that it points to.
struct OwnedProperties {
    _strings: Vec<(CString, CString)>,
    array: Vec<ov::ov_property_t>,
}

impl OwnedProperties {
    fn new(properties: &Properties<'_>) -> Result<Self> {
        let strings: Vec<(CString, CString)> = properties
            .iter()
            .map(|(key, value)| Ok((c_string(key)?, c_string(value)?)))
            .collect::<Result<_>>()?;
        // Moving the vector does not invalidate the pointers, because they point to the strings' own memory.
        let array = strings
            .iter()
            .map(|(key, value)| ov::ov_property_t { key: key.as_ptr(), value: value.as_ptr().cast() })
            .collect();
        Ok(OwnedProperties { _strings: strings, array })
    }
}

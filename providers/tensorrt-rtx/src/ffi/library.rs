use super::{bridge, thrown};
use cxx::UniquePtr;
use once_cell::sync::OnceCell;
use sdrun_abi::{Error, Hint, Result};
use sdrun_provider_common::open;
use std::{
    ffi::c_void,
    path::{Path, PathBuf},
};

/// The releases whose interfaces the shim supports: 1.7.x.
const RELEASES: std::ops::Range<i32> = 10_700..10_800;

/// The loaded TensorRT-RTX. It is never unloaded.
pub(crate) struct Library {
    core: libloading::Library,
    file: PathBuf,
    /// The parser library, loaded by the first build.
    parser: OnceCell<libloading::Library>,
    pub(super) logger: UniquePtr<bridge::ILogger>,
    /// `1.7.1.116`
    pub(crate) version: String,
}

// SAFETY: library handles and a stateless logger, which any thread may use.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Inspects the file, then loads the library. Checks the release before any other call: other releases, and the
    /// TensorRT for data centres, accept the same first call but have different functions behind it.
    pub(crate) fn load(file: &Path) -> Result<Self> {
        let core = open(file)?;
        let number = |symbol: &str| -> Result<i32> {
            let function = symbol_of(&core, file, symbol)?;
            // SAFETY: these four functions of NvInferRuntime.h take nothing and return an int32_t in every release.
            Ok(unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(function)() })
        };
        let version = number("getInferLibVersion")?;
        if !RELEASES.contains(&version) {
            let what = match version {
                80_000.. => format!("TensorRT {}.{}", version / 10_000, version / 100 % 100),
                _ => format!("TensorRT-RTX {}.{}", version / 10_000, version / 100 % 100),
            };
            return Err(Error::precondition(format!(
                "{} is {what}; this plugin needs TensorRT-RTX 1.7",
                file.display()
            ))
            .with_file(file)
            .with_hint(Hint::Install { runtime: "tensorrt-rtx".into() }));
        }
        let build = number("getInferLibBuildVersion")?;
        let version = format!("{}.{}.{}.{build}", version / 10_000, version / 100 % 100, version % 100);
        let logger = bridge::new_logger().map_err(thrown)?;
        Ok(Library { core, file: file.to_path_buf(), parser: OnceCell::new(), logger, version })
    }

    /// The file the library was loaded from.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Address of an entry point of the library.
    pub(super) fn symbol(&self, name: &str) -> Result<usize> {
        Ok(symbol_of(&self.core, &self.file, name)? as usize)
    }

    /// Address of `createNvOnnxParser_INTERNAL` in the parser library, which lies next to the main one.
    pub(super) fn create_parser(&self) -> Result<usize> {
        let name = self.file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let file = self.file.with_file_name(name.replace("tensorrt_rtx", "tensorrt_onnxparser_rtx"));
        let parser = self.parser.get_or_try_init(|| open(&file))?;
        Ok(symbol_of(parser, &file, "createNvOnnxParser_INTERNAL")? as usize)
    }
}

fn symbol_of(library: &libloading::Library, file: &Path, name: &str) -> Result<*mut c_void> {
    // SAFETY: only the address is kept; the caller is responsible for its type.
    let found = unsafe { library.get::<*mut c_void>(name) };
    found.map(|symbol| *symbol).map_err(|_| {
        Error::precondition(format!(
            "{} has no function `{name}`: it is not TensorRT-RTX 1.7",
            file.display()
        ))
        .with_file(file)
        .with_hint(Hint::Install { runtime: "tensorrt-rtx".into() })
    })
}

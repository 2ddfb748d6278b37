//! Builds and controls the test double (double.cpp).
#![allow(unsafe_code)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// The interfaces the double implements in part.
const INTERFACES: [&str; 8] = [
    "HostMemory",
    "Runtime",
    "Refitter",
    "CudaEngine",
    "ExecutionContext",
    "SerializationConfig",
    "RuntimeConfig",
    "RuntimeCache",
];

/// Generates, from the vendor's header, a class for each interface whose functions end the process.
fn unused(header: &str) -> String {
    let code: String =
        header.lines().map(|line| line.split("//").next().unwrap_or("").to_owned() + "\n").collect();
    let class = |name: &str| {
        let start = format!("class V{name} : public VRoot");
        let body = code.split_once(&start).unwrap().1.split_once("\n};").unwrap().0;
        let body = body.split_once("public:").unwrap().1;
        let functions: String = body
            .split(';')
            .filter_map(|declaration| declaration.trim_end().strip_suffix("= 0"))
            .map(|declaration| {
                let declaration = declaration.replace("TRT_NODISCARD", "").replacen("virtual", "", 1);
                let declaration = declaration.split_whitespace().collect::<Vec<_>>().join(" ");
                format!("    {declaration} override {{ unused(__func__); }}\n")
            })
            .collect();
        format!("class Unused{name} : public apiv::V{name}\n{{\npublic:\n{functions}}};\n")
    };
    format!("namespace nvinfer1 {{ namespace {{\n{}}} }}\n", INTERFACES.map(class).concat())
}

/// Compiles the double as a library with this name.
pub(super) fn compile(dir: &Path, name: &str, defines: &[&str]) -> PathBuf {
    let headers: Vec<PathBuf> = env::split_paths(env!("SDRUN_TENSORRT_RTX_HEADERS")).collect();
    let header = fs::read_to_string(headers[0].join("NvInferImpl.h")).unwrap();
    fs::write(dir.join("unused.h"), unused(&header)).unwrap();
    let source = dir.join("double.cpp");
    fs::write(&source, include_str!("double.cpp")).unwrap();
    let library = dir.join(name);
    let mut command = Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.args(["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fvisibility=default"]);
    command.args(defines).arg("-I").arg(dir).arg("-o").arg(&library).arg(&source);
    for folder in headers {
        command.arg("-I").arg(folder);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// The double as runtime and driver of this process.
pub(super) struct Double {
    pub(super) library: PathBuf,
    pub(super) dir: PathBuf,
    set: unsafe extern "C" fn(*const std::ffi::c_char, i64),
    get: unsafe extern "C" fn(*const std::ffi::c_char) -> i64,
}

impl Double {
    /// Locks the double for one test and resets all failures.
    pub(super) fn lock() -> (MutexGuard<'static, ()>, &'static Double) {
        static LOCK: Mutex<()> = Mutex::new(());
        static DOUBLE: OnceLock<Double> = OnceLock::new();
        let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let double = DOUBLE.get_or_init(|| {
            // Lives as long as the process, because the library stays loaded.
            let dir = tempfile::Builder::new().prefix("sdrun-trt-double").tempdir().unwrap().keep();
            let library = compile(&dir, "libtensorrt_rtx.so.1", &[]);
            // SAFETY: the test's own library; the signatures are those in double.cpp.
            unsafe {
                let loaded = libloading::Library::new(&library).unwrap();
                let (set, get) = (*loaded.get("double_set").unwrap(), *loaded.get("double_get").unwrap());
                std::mem::forget(loaded);
                Double { library, dir, set, get }
            }
        });
        for name in [
            "set_fails",
            "refit_fails",
            "context_fails",
            "load_fails",
            "enqueue_fails",
            "alloc_fails",
            "lost_at",
            "diagnostics",
            "busy",
            "streamable",
            "says_nothing_is_missing",
            "runtime_throws",
            "runtime_throws_a_number",
            "refits",
            "largest_refit",
        ] {
            double.set(name, 0);
        }
        double.set("driver_version", 13_000);
        double.set("gpus", 1);
        double.set("capability", 89);
        (guard, double)
    }

    pub(super) fn set(&self, name: &str, value: i64) {
        let name = std::ffi::CString::new(name).unwrap();
        // SAFETY: a function of double.cpp.
        unsafe { (self.set)(name.as_ptr(), value) }
    }

    pub(super) fn get(&self, name: &str) -> i64 {
        let name = std::ffi::CString::new(name).unwrap();
        // SAFETY: a function of double.cpp.
        unsafe { (self.get)(name.as_ptr()) }
    }

    /// Number of live objects of the vendor's interfaces.
    pub(super) fn alive(&self) -> [i64; 4] {
        ["alive", "device_bytes", "pinned", "contexts"].map(|name| self.get(name))
    }
}

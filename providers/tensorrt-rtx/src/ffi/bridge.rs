//! The boundary to the shim (shim/), which calls the vendor's C++ interfaces. cxx generates both sides, checks them against
//! each other and NVIDIA's headers, and turns C++ exceptions into errors.
//!
//! Entry points found at run time and GPU memory cross as addresses, since cxx has no type for them.
#![allow(non_upper_case_globals, unreachable_pub, reason = "the vendor's names; what cxx generates")]

use super::{
    log::receive,
    network::{Findings, Watch},
};

pub(super) use ffi::*;

#[cxx::bridge(namespace = "sdrun")]
pub(crate) mod ffi {
    /// Bytes of an initializer.
    struct WeightBytes<'a> {
        name: &'a str,
        bytes: &'a [u8],
    }

    /// Smallest, usual and largest shape of an input; all three have the same rank.
    struct Range<'a> {
        name: &'a str,
        min: &'a [i64],
        opt: &'a [i64],
        max: &'a [i64],
    }

    /// The input of a build.
    struct Request<'a> {
        /// An ONNX model; the values of external initializers come from `weights`.
        model: &'a [u8],
        /// `nvinfer1::ComputeCapability`; 0 selects the library's portable set.
        capability: i32,
        /// Whether the plan omits its refittable weights.
        strip: bool,
        /// Whether products of f32 matrices may be rounded to TF32.
        tf32: bool,
        /// Whether weights can be streamed from the host while the plan runs.
        streaming: bool,
        /// Bytes of every external initializer.
        weights: &'a [WeightBytes<'a>],
        /// Ranges of the inputs with open dimensions.
        inputs: &'a [Range<'a>],
    }

    /// One weight of the parsed network: `nvonnxparser::RefitRecord`.
    #[derive(Clone, Debug, PartialEq)]
    struct Record {
        /// The weight's name in the plan.
        name: String,
        /// `RefitTransformKind`.
        kind: i32,
        /// ONNX element type of the sources.
        onnx_type: i32,
        /// `nvinfer1::DataType` of the weight.
        data_type: i32,
        /// Number of elements.
        count: u64,
        /// The initializers it is computed from.
        sources: Vec<String>,
        /// The epsilon of a folded batch normalization.
        epsilon: f32,
    }

    /// The stage at which a build ended.
    enum Stage {
        Done,
        Builder,
        Target,
        Load,
        Weight,
        Parse,
        Mark,
        Profile,
        Compile,
    }

    /// The result of a build.
    struct Built {
        /// Null unless `stage` is `Done`.
        plan: UniquePtr<IHostMemory>,
        stage: Stage,
        /// The weight or input at fault.
        subject: String,
    }

    /// An input or output of a plan.
    struct IoTensor {
        name: String,
        data_type: i32,
        /// Whether its values must be in host memory.
        on_host: bool,
    }

    /// Type and number of elements of a refittable weight.
    struct Prototype {
        data_type: i32,
        count: i64,
    }

    /// Whether a plan can be used here.
    struct Validity {
        valid: bool,
        /// Bits of `EngineInvalidityDiagnostics`.
        diagnostics: u64,
    }

    /// The element types that sdrun knows.
    #[namespace = "nvinfer1"]
    #[repr(i32)]
    enum DataType {
        kFLOAT,
        kHALF,
        kINT8,
        kINT32,
        kBOOL,
        kUINT8,
        kFP8,
        kBF16,
        kINT64,
    }

    extern "Rust" {
        fn receive(severity: i32, message: String);

        type Findings<'a>;
        fn record(self: &mut Findings, record: Record) -> bool;
        fn fault(self: &mut Findings, code: i32, op: String, node: String, text: String);

        type Watch<'a>;
        fn progress(self: &Watch, phase: String, step: i32, total: i32) -> bool;
    }

    unsafe extern "C++" {
        include!("shim.h");

        #[namespace = "nvinfer1"]
        type DataType;
        #[namespace = "nvinfer1"]
        type ILogger;
        #[namespace = "nvinfer1"]
        type IHostMemory;
        #[namespace = "nvinfer1"]
        type IRuntime;
        #[namespace = "nvinfer1"]
        type ICudaEngine;
        #[namespace = "nvinfer1"]
        type IRefitter;
        #[namespace = "nvinfer1"]
        type IRuntimeConfig;
        #[namespace = "nvinfer1"]
        type IRuntimeCache;
        #[namespace = "nvinfer1"]
        type IExecutionContext;
        /// What a `cudaStream_t` points to.
        #[namespace = ""]
        type CUstream_st;

        fn new_logger() -> Result<UniquePtr<ILogger>>;
        fn bytes_of(memory: &IHostMemory) -> &[u8];

        /// # Safety
        /// The addresses are those of `createInferBuilder_INTERNAL` and `createNvOnnxParser_INTERNAL`.
        unsafe fn build(
            create_builder: usize,
            create_parser: usize,
            logger: &ILogger,
            request: &Request,
            findings: &mut Findings,
            watch: &Watch,
        ) -> Result<Built>;

        /// # Safety
        /// The address is that of `createInferRuntime_INTERNAL`; `logger` outlives the runtime.
        unsafe fn new_runtime(create: usize, logger: &ILogger) -> Result<UniquePtr<IRuntime>>;
        fn validity_of(runtime: &IRuntime, plan: &[u8]) -> Validity;
        /// # Safety
        /// The runtime outlives the engine.
        unsafe fn load_engine(runtime: Pin<&mut IRuntime>, plan: &[u8]) -> UniquePtr<ICudaEngine>;

        fn io_of(engine: &ICudaEngine) -> Result<Vec<IoTensor>>;
        fn weight_bytes(engine: &ICudaEngine) -> i64;
        #[rust_name = "activation_bytes"]
        fn getDeviceMemorySizeV2(self: &ICudaEngine) -> i64;
        #[rust_name = "streamable_bytes"]
        fn getStreamableWeightsSize(self: &ICudaEngine) -> i64;
        #[rust_name = "set_budget"]
        fn setWeightStreamingBudgetV2(self: Pin<&mut ICudaEngine>, bytes: i64) -> bool;
        fn bake(engine: Pin<&mut ICudaEngine>) -> UniquePtr<IHostMemory>;

        /// # Safety
        /// The address is that of `createInferRefitter_INTERNAL`; engine and logger outlive the refitter, and nothing
        /// else changes the engine meanwhile.
        unsafe fn new_refitter(
            create: usize,
            engine: &ICudaEngine,
            logger: &ILogger,
        ) -> Result<UniquePtr<IRefitter>>;
        fn refittable(refitter: Pin<&mut IRefitter>) -> Result<Vec<String>>;
        fn missing(refitter: Pin<&mut IRefitter>) -> Result<Vec<String>>;
        fn prototype(refitter: &IRefitter, name: &str) -> Result<Prototype>;
        /// # Safety
        /// `values` holds `count` elements and lives until the refit ends.
        unsafe fn set_weight(
            refitter: Pin<&mut IRefitter>,
            name: &str,
            data_type: i32,
            count: i64,
            values: &[u8],
        ) -> Result<bool>;
        /// # Safety
        /// The stream and all values that were set live until the stream is synchronised.
        #[rust_name = "refit"]
        unsafe fn refitCudaEngineAsync(self: Pin<&mut IRefitter>, stream: *mut CUstream_st) -> bool;
        #[rust_name = "release"]
        fn releaseRefitResources(self: Pin<&mut IRefitter>) -> bool;

        /// # Safety
        /// The engine outlives the result; likewise for the next two functions.
        unsafe fn new_config(engine: &ICudaEngine, cuda_graph: bool) -> UniquePtr<IRuntimeConfig>;
        unsafe fn new_cache(config: Pin<&mut IRuntimeConfig>) -> UniquePtr<IRuntimeCache>;
        unsafe fn new_context(
            engine: &ICudaEngine,
            config: Pin<&mut IRuntimeConfig>,
        ) -> UniquePtr<IExecutionContext>;
        fn load_cache(cache: Pin<&mut IRuntimeCache>, bytes: &[u8]) -> bool;
        fn store_cache(cache: &IRuntimeCache) -> UniquePtr<IHostMemory>;

        fn set_shape(context: Pin<&mut IExecutionContext>, name: &str, shape: &[i64]) -> Result<bool>;
        fn shape_of(context: &IExecutionContext, name: &str) -> Result<Vec<i64>>;
        /// # Safety
        /// `address` is memory of the size of the tensor, which lives until another address is set or the context ends.
        unsafe fn set_address(
            context: Pin<&mut IExecutionContext>,
            name: &str,
            address: usize,
        ) -> Result<bool>;
        /// # Safety
        /// All addresses are set; stream and context live until the stream is synchronised.
        #[rust_name = "enqueue"]
        unsafe fn enqueueV3(self: Pin<&mut IExecutionContext>, stream: *mut CUstream_st) -> bool;
    }
}

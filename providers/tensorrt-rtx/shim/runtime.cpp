// From a plan to results: deserializing, refitting, running.

#include "shim.h"

#include <algorithm>

using namespace nvinfer1;

namespace
{
SdDims fromDims(Dims const& dims) noexcept
{
    SdDims out{};
    out.rank = dims.nbDims;
    std::copy(dims.d, dims.d + std::max(0, std::min<int32_t>(dims.nbDims, Dims::MAX_DIMS)), out.d);
    return out;
}
} // namespace

extern "C"
{
IRuntime* sd_runtime_new(void* create, ILogger* logger) noexcept
{
    return static_cast<IRuntime*>(reinterpret_cast<void* (*) (void*, int32_t)>(create)(logger, NV_TENSORRT_VERSION));
}

void sd_runtime_free(IRuntime* runtime) noexcept
{
    delete runtime;
}

//! EngineValidity; `diagnostics` receives the bits of EngineInvalidityDiagnostics.
int32_t sd_runtime_validity(IRuntime const* runtime, void const* plan, size_t size, uint64_t* diagnostics) noexcept
{
    return static_cast<int32_t>(runtime->getEngineValidity(plan, static_cast<int64_t>(size), diagnostics));
}

ICudaEngine* sd_engine_load(IRuntime* runtime, void const* plan, size_t size) noexcept
{
    return runtime->deserializeCudaEngine(plan, size);
}

void sd_engine_free(ICudaEngine* engine) noexcept
{
    delete engine;
}

int32_t sd_engine_io_count(ICudaEngine const* engine) noexcept
{
    return engine->getNbIOTensors();
}

char const* sd_engine_io_name(ICudaEngine const* engine, int32_t index) noexcept
{
    return engine->getIOTensorName(index);
}

//! DataType of an input or output.
int32_t sd_engine_io_type(ICudaEngine const* engine, char const* name) noexcept
{
    return static_cast<int32_t>(engine->getTensorDataType(name));
}

//! Not 0: its values must be in host memory (a shape).
int32_t sd_engine_io_on_host(ICudaEngine const* engine, char const* name) noexcept
{
    return engine->getTensorLocation(name) == TensorLocation::kHOST;
}

//! EngineStat; -1 where the library does not report it.
int64_t sd_engine_stat(ICudaEngine const* engine, int32_t stat) noexcept
{
    return engine->getEngineStat(static_cast<EngineStat>(stat));
}

int64_t sd_engine_activations(ICudaEngine const* engine) noexcept
{
    return engine->getDeviceMemorySizeV2();
}

int64_t sd_engine_streamable(ICudaEngine const* engine) noexcept
{
    return engine->getStreamableWeightsSize();
}

int32_t sd_engine_set_budget(ICudaEngine* engine, int64_t bytes) noexcept
{
    return engine->setWeightStreamingBudgetV2(bytes);
}

//! The plan with its current weights, which become permanent.
IHostMemory* sd_engine_bake(ICudaEngine* engine) noexcept
{
    ISerializationConfig* config = engine->createSerializationConfig();
    if (config == nullptr)
    {
        return nullptr;
    }
    config->clearFlag(SerializationFlag::kEXCLUDE_WEIGHTS);
    config->clearFlag(SerializationFlag::kINCLUDE_REFIT);
    IHostMemory* plan = engine->serializeWithConfig(*config);
    delete config;
    return plan;
}

IRefitter* sd_refitter_new(void* create, ICudaEngine* engine, ILogger* logger) noexcept
{
    return static_cast<IRefitter*>(
        reinterpret_cast<void* (*) (void*, void*, int32_t)>(create)(engine, logger, NV_TENSORRT_VERSION));
}

void sd_refitter_free(IRefitter* refitter) noexcept
{
    delete refitter;
}

//! Returns the number of names; writes at most `size` names.
int32_t sd_refitter_all(IRefitter* refitter, int32_t size, char const** names) noexcept
{
    return refitter->getAllWeights(size, names);
}

//! Returns how many weights must be set before refitting; writes at most `size` names.
int32_t sd_refitter_missing(IRefitter* refitter, int32_t size, char const** names) noexcept
{
    return refitter->getMissingWeights(size, names);
}

SdPrototype sd_refitter_prototype(IRefitter const* refitter, char const* name) noexcept
{
    Weights const weights = refitter->getWeightsPrototype(name);
    return SdPrototype{static_cast<int32_t>(weights.type), weights.count};
}

//! `values` is host memory and must stay valid until the refit ends.
int32_t sd_refitter_set(
    IRefitter* refitter, char const* name, int32_t type, void const* values, int64_t count) noexcept
{
    return refitter->setNamedWeights(name, Weights{static_cast<DataType>(type), values, count}, TensorLocation::kHOST);
}

int32_t sd_refitter_refit(IRefitter* refitter, void* stream) noexcept
{
    return refitter->refitCudaEngineAsync(static_cast<cudaStream_t>(stream));
}

int32_t sd_refitter_release(IRefitter* refitter) noexcept
{
    return refitter->releaseRefitResources();
}

IRuntimeConfig* sd_config_new(ICudaEngine* engine) noexcept
{
    return engine->createRuntimeConfig();
}

void sd_config_free(IRuntimeConfig* config) noexcept
{
    delete config;
}

//! 0: off, 1: the whole graph.
int32_t sd_config_cuda_graph(IRuntimeConfig* config, int32_t strategy) noexcept
{
    return config->setCudaGraphStrategy(static_cast<CudaGraphStrategy>(strategy));
}

//! A cache of compiled kernels that contexts made with `config` use and fill.
IRuntimeCache* sd_cache_new(IRuntimeConfig* config) noexcept
{
    IRuntimeCache* cache = config->createRuntimeCache();
    if (cache != nullptr && !config->setRuntimeCache(*cache))
    {
        delete cache;
        return nullptr;
    }
    return cache;
}

int32_t sd_cache_load(IRuntimeCache* cache, void const* bytes, size_t size) noexcept
{
    return cache->deserialize(bytes, size);
}

IHostMemory* sd_cache_store(IRuntimeCache const* cache) noexcept
{
    return cache->serialize();
}

void sd_cache_free(IRuntimeCache* cache) noexcept
{
    delete cache;
}

IExecutionContext* sd_context_new(ICudaEngine* engine, IRuntimeConfig* config) noexcept
{
    return engine->createExecutionContext(config);
}

void sd_context_free(IExecutionContext* context) noexcept
{
    delete context;
}

int32_t sd_context_set_shape(IExecutionContext* context, char const* name, SdDims const* shape) noexcept
{
    Dims dims{};
    if (shape->rank < 0 || shape->rank > Dims::MAX_DIMS)
    {
        return 0;
    }
    dims.nbDims = shape->rank;
    std::copy(shape->d, shape->d + shape->rank, dims.d);
    return context->setInputShape(name, dims);
}

SdDims sd_context_shape(IExecutionContext const* context, char const* name) noexcept
{
    return fromDims(context->getTensorShape(name));
}

int32_t sd_context_set_address(IExecutionContext* context, char const* name, void* address) noexcept
{
    return context->setTensorAddress(name, address);
}

int32_t sd_context_enqueue(IExecutionContext* context, void* stream) noexcept
{
    return context->enqueueV3(static_cast<cudaStream_t>(stream));
}
}

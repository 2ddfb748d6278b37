// From a plan to results: deserializing, refitting, running.

#include "shim.h"
#include "sdrun-provider-tensorrt-rtx/src/ffi/bridge.rs.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

using namespace nvinfer1;

namespace sdrun
{
namespace
{
//! The library changes engines that Rust shares; Rust sees to it that only one thread does.
ICudaEngine& changeable(ICudaEngine const& engine) noexcept
{
    return const_cast<ICudaEngine&>(engine);
}

void* opaque(ILogger const& logger) noexcept
{
    return const_cast<ILogger*>(&logger);
}

template <typename Function>
Function* entry(size_t address) noexcept
{
    return reinterpret_cast<Function*>(address);
}

//! The names that a function of the refitter lists.
template <typename List>
rust::Vec<rust::String> names(List list)
{
    std::vector<char const*> found(std::max(0, list(0, nullptr)));
    list(static_cast<int32_t>(found.size()), found.data());
    rust::Vec<rust::String> names;
    for (char const* name : found)
    {
        names.push_back(rust::String::lossy(name == nullptr ? "" : name));
    }
    return names;
}
} // namespace

std::string name_of(rust::Str name)
{
    std::string text{name};
    if (text.find('\0') != std::string::npos)
    {
        throw std::invalid_argument("a name holds a 0 character: " + text);
    }
    return text;
}

std::unique_ptr<IRuntime> new_runtime(size_t create, ILogger const& logger)
{
    return std::unique_ptr<IRuntime>{
        static_cast<IRuntime*>(entry<void*(void*, int32_t)>(create)(opaque(logger), NV_TENSORRT_VERSION))};
}

Validity validity_of(IRuntime const& runtime, Bytes plan) noexcept
{
    uint64_t diagnostics{0};
    auto const size = static_cast<int64_t>(plan.size());
    bool const valid = runtime.getEngineValidity(plan.data(), size, &diagnostics) != EngineValidity::kINVALID;
    return Validity{valid, diagnostics};
}

std::unique_ptr<ICudaEngine> load_engine(IRuntime& runtime, Bytes plan) noexcept
{
    return std::unique_ptr<ICudaEngine>{runtime.deserializeCudaEngine(plan.data(), plan.size())};
}

rust::Vec<IoTensor> io_of(ICudaEngine const& engine)
{
    rust::Vec<IoTensor> tensors;
    for (int32_t i = 0; i < engine.getNbIOTensors(); ++i)
    {
        char const* name = engine.getIOTensorName(i);
        auto const type = static_cast<int32_t>(engine.getTensorDataType(name));
        bool const onHost = engine.getTensorLocation(name) == TensorLocation::kHOST;
        tensors.push_back(IoTensor{rust::String::lossy(name), type, onHost});
    }
    return tensors;
}

//! -1 where the library does not report it.
int64_t weight_bytes(ICudaEngine const& engine) noexcept
{
    return engine.getEngineStat(EngineStat::kTOTAL_WEIGHTS_SIZE);
}

//! The plan with its current weights, which become permanent.
std::unique_ptr<IHostMemory> bake(ICudaEngine& engine) noexcept
{
    std::unique_ptr<ISerializationConfig> config{engine.createSerializationConfig()};
    if (!config)
    {
        return nullptr;
    }
    config->clearFlag(SerializationFlag::kEXCLUDE_WEIGHTS);
    config->clearFlag(SerializationFlag::kINCLUDE_REFIT);
    return std::unique_ptr<IHostMemory>{engine.serializeWithConfig(*config)};
}

std::unique_ptr<IRefitter> new_refitter(size_t create, ICudaEngine const& engine, ILogger const& logger)
{
    return std::unique_ptr<IRefitter>{static_cast<IRefitter*>(
        entry<void*(void*, void*, int32_t)>(create)(&changeable(engine), opaque(logger), NV_TENSORRT_VERSION))};
}

rust::Vec<rust::String> refittable(IRefitter& refitter)
{
    return names([&](int32_t size, char const** found) { return refitter.getAllWeights(size, found); });
}

//! Weights that must be set before refitting.
rust::Vec<rust::String> missing(IRefitter& refitter)
{
    return names([&](int32_t size, char const** found) { return refitter.getMissingWeights(size, found); });
}

Prototype prototype(IRefitter const& refitter, rust::Str name)
{
    Weights const weights = refitter.getWeightsPrototype(name_of(name).c_str());
    return Prototype{static_cast<int32_t>(weights.type), weights.count};
}

bool set_weight(IRefitter& refitter, rust::Str name, int32_t type, int64_t count, Bytes values)
{
    Weights const weights{static_cast<DataType>(type), values.data(), count};
    return refitter.setNamedWeights(name_of(name).c_str(), weights, TensorLocation::kHOST);
}

//! Null also where the library cannot record runs.
std::unique_ptr<IRuntimeConfig> new_config(ICudaEngine const& engine, bool cudaGraph) noexcept
{
    std::unique_ptr<IRuntimeConfig> config{changeable(engine).createRuntimeConfig()};
    if (config && cudaGraph && !config->setCudaGraphStrategy(CudaGraphStrategy::kWHOLE_GRAPH_CAPTURE))
    {
        return nullptr;
    }
    return config;
}

//! A cache of compiled kernels that contexts made with `config` use and fill.
std::unique_ptr<IRuntimeCache> new_cache(IRuntimeConfig& config) noexcept
{
    std::unique_ptr<IRuntimeCache> cache{config.createRuntimeCache()};
    if (cache && !config.setRuntimeCache(*cache))
    {
        return nullptr;
    }
    return cache;
}

std::unique_ptr<IExecutionContext> new_context(ICudaEngine const& engine, IRuntimeConfig& config) noexcept
{
    return std::unique_ptr<IExecutionContext>{changeable(engine).createExecutionContext(&config)};
}

bool load_cache(IRuntimeCache& cache, Bytes bytes) noexcept
{
    return cache.deserialize(bytes.data(), bytes.size());
}

std::unique_ptr<IHostMemory> store_cache(IRuntimeCache const& cache) noexcept
{
    return std::unique_ptr<IHostMemory>{cache.serialize()};
}

bool set_shape(IExecutionContext& context, rust::Str name, rust::Slice<int64_t const> shape)
{
    Dims dims{};
    if (shape.size() > static_cast<size_t>(Dims::MAX_DIMS))
    {
        return false;
    }
    dims.nbDims = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), dims.d);
    return context.setInputShape(name_of(name).c_str(), dims);
}

//! -1 for dimensions that depend on values.
rust::Vec<int64_t> shape_of(IExecutionContext const& context, rust::Str name)
{
    Dims const dims = context.getTensorShape(name_of(name).c_str());
    if (dims.nbDims < 0 || dims.nbDims > Dims::MAX_DIMS)
    {
        throw std::runtime_error("the library reports no shape");
    }
    rust::Vec<int64_t> shape;
    std::copy(dims.d, dims.d + dims.nbDims, std::back_inserter(shape));
    return shape;
}

bool set_address(IExecutionContext& context, rust::Str name, size_t address)
{
    return context.setTensorAddress(name_of(name).c_str(), reinterpret_cast<void*>(address));
}
} // namespace sdrun

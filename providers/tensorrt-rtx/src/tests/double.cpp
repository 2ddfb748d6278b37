// A test double of TensorRT-RTX's runtime side and of the CUDA driver, in one library. "GPU memory" is host memory.
// Work runs when a stream is synchronised, so results read too early are wrong.
//
// A plan is text: `input NAME`, `output NAME`, `weight NAME COUNT`, `coupled NAME NAME`. Everything is f32. An engine
// computes, for every output, y[i] = x[i] * f with x the first input and
// f = 1 + sum over all weights w, in the order of their names, of sum over j of w[j] * (j mod 7 + 1), in f32.
// As with the real library, an engine without all its weights runs and returns zeros.

#include <NvInfer.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using namespace nvinfer1;

[[noreturn]] static void unused(char const* function)
{
    std::fprintf(stderr, "the test double has no %s\n", function);
    std::abort();
}

// `class UnusedX : public apiv::VX` for each interface: functions that end the process.
#include "unused.h"

#ifndef DOUBLE_VERSION
#define DOUBLE_VERSION 10701
#endif

namespace
{
std::map<std::string, int64_t> gState{{"gpus", 1}, {"capability", 89}, {"driver_version", 13000}};

int64_t& state(char const* name)
{
    return gState[name];
}

//! Counts down `name`: the call at which it reaches 0 fails.
bool fails(char const* name)
{
    int64_t& left = state(name);
    return left > 0 && --left == 0;
}

//! Once `lost_at` has counted down, every call fails that needs the GPU, as after a reset or when a dock is unplugged.
bool lost()
{
    int64_t& left = state("lost_at");
    if (left > 0 && --left == 0) left = -1;
    return left < 0;
}

struct Alive
{
    Alive() { ++state("alive"); }
    ~Alive() { --state("alive"); }
};

struct Memory final : IHostMemory, UnusedHostMemory, Alive
{
    explicit Memory(std::string text) : bytes(std::move(text)) { mImpl = this; }
    void* data() const noexcept override { return const_cast<char*>(bytes.data()); }
    std::size_t size() const noexcept override { return bytes.size(); }
    std::string bytes;
};

struct Plan
{
    std::vector<std::string> inputs, outputs;
    std::map<std::string, int64_t> weights;
    std::map<std::string, std::string> coupled;
};

bool parse(std::string const& text, Plan& plan, std::map<std::string, std::vector<float>>& values)
{
    std::istringstream lines{text};
    std::string line;
    if (!std::getline(lines, line) || line != "plan of the test double")
    {
        return false;
    }
    while (std::getline(lines, line))
    {
        std::istringstream words{line};
        std::string kind, name, other;
        words >> kind >> name;
        if (kind == "input") plan.inputs.push_back(name);
        if (kind == "output") plan.outputs.push_back(name);
        if (kind == "weight") words >> plan.weights[name];
        if (kind == "coupled" && words >> other) plan.coupled[name] = other;
        if (kind == "value")
        {
            float value;
            while (words >> std::hexfloat >> other)
            {
                value = std::strtof(other.c_str(), nullptr);
                values[name].push_back(value);
            }
        }
    }
    return true;
}

struct Stream : Alive
{
    std::vector<std::function<void()>> queue;
    void drain()
    {
        for (auto& work : queue) work();
        queue.clear();
    }
};

struct Engine;

struct Refitter final : IRefitter, UnusedRefitter, Alive
{
    explicit Refitter(Engine& engine) : engine(engine) { mImpl = this; }
    int32_t getAllWeights(int32_t size, char const** names) noexcept override;
    int32_t getMissingWeights(int32_t size, char const** names) noexcept override;
    Weights getWeightsPrototype(char const* name) const noexcept override;
    bool setNamedWeightsWithLocation(char const* name, Weights weights, TensorLocation) noexcept override;
    bool refitCudaEngineAsync(cudaStream_t stream) noexcept override;
    bool releaseRefitResources() noexcept override
    {
        ++state("released");
        return true;
    }
    Engine& engine;
    std::map<std::string, Weights> given;
};

struct Cache final : IRuntimeCache, UnusedRuntimeCache, Alive
{
    Cache() { mImpl = this; }
    IHostMemory* serialize() const noexcept override
    {
        return new Memory("kernels of the test double " + std::to_string(state("late_kernels")));
    }
    bool deserialize(void const* blob, size_t size) noexcept override
    {
        bool const fits = std::string(static_cast<char const*>(blob), size).rfind("kernels of the test double", 0) == 0;
        state("kernels_used") += fits;
        return fits;
    }
};

struct Config final : IRuntimeConfig, UnusedRuntimeConfig, Alive
{
    Config() { mImpl = this; }
    IRuntimeCache* createRuntimeCache() const noexcept override { return new Cache; }
    bool setRuntimeCache(IRuntimeCache const&) noexcept override { return true; }
    bool setCudaGraphStrategy(CudaGraphStrategy strategy) noexcept override
    {
        state("cuda_graph") = static_cast<int64_t>(strategy);
        return true;
    }
};

struct Serialization final : ISerializationConfig, UnusedSerializationConfig, Alive
{
    Serialization() { mImpl = this; }
    bool clearFlag(SerializationFlag flag) noexcept override { return flags.erase(flag), true; }
    std::set<SerializationFlag> flags{SerializationFlag::kEXCLUDE_WEIGHTS, SerializationFlag::kINCLUDE_REFIT};
};

struct Context final : IExecutionContext, UnusedExecutionContext, Alive
{
    explicit Context(Engine& engine) : engine(engine) { mImpl = this; }
    bool setInputShape(char const* name, Dims const& dims) noexcept override;
    Dims getTensorShape(char const* name) const noexcept override { return shape; }
    bool setTensorAddress(char const* name, void* data) noexcept override { return addresses[name] = data, true; }
    bool enqueueV3(cudaStream_t stream) noexcept override;
    Engine& engine;
    Dims shape{};
    std::map<std::string, void*> addresses;
};

struct Engine final : ICudaEngine, UnusedCudaEngine, Alive
{
    Engine() { mImpl = this; }
    int32_t getNbIOTensors() const noexcept override { return plan.inputs.size() + plan.outputs.size(); }
    char const* getIOTensorName(int32_t i) const noexcept override
    {
        int32_t const inputs = plan.inputs.size();
        return i < inputs ? plan.inputs[i].c_str() : plan.outputs[i - inputs].c_str();
    }
    DataType getTensorDataType(char const*) const noexcept override { return DataType::kFLOAT; }
    TensorLocation getTensorLocation(char const*) const noexcept override { return TensorLocation::kDEVICE; }
    int64_t getEngineStat(EngineStat) const noexcept override
    {
        int64_t bytes = 0;
        for (auto const& [name, count] : plan.weights) bytes += 4 * count;
        return bytes;
    }
    int64_t getDeviceMemorySizeV2() const noexcept override { return 4096; }
    int64_t getStreamableWeightsSize() const noexcept override { return state("streamable"); }
    bool setWeightStreamingBudgetV2(int64_t bytes) noexcept override { return state("budget") = bytes, true; }
    ISerializationConfig* createSerializationConfig() noexcept override { return new Serialization; }
    IHostMemory* serializeWithConfig(ISerializationConfig& config) const noexcept override
    {
        std::string text = "plan of the test double\n";
        for (auto const& name : plan.inputs) text += "input " + name + "\n";
        for (auto const& name : plan.outputs) text += "output " + name + "\n";
        if (!static_cast<Serialization&>(config).flags.empty())
        {
            return new Memory(text); // stripped again
        }
        for (auto const& [name, numbers] : values)
        {
            text += "value " + name;
            for (float number : numbers)
            {
                char buffer[40];
                std::snprintf(buffer, sizeof buffer, " %a", static_cast<double>(number));
                text += buffer;
            }
            text += "\n";
        }
        return new Memory(text);
    }
    IRuntimeConfig* createRuntimeConfig() noexcept override { return new Config; }
    IExecutionContext* createExecutionContextWithRuntimeConfig(IRuntimeConfig*) noexcept override
    {
        return fails("context_fails") ? nullptr : new Context(*this);
    }
    Plan plan;
    std::map<std::string, std::vector<float>> values;
};

int32_t list(std::vector<std::string const*> const& found, int32_t size, char const** names)
{
    for (int32_t i = 0; i < size && i < static_cast<int32_t>(found.size()); ++i) names[i] = found[i]->c_str();
    return found.size();
}

int32_t Refitter::getAllWeights(int32_t size, char const** names) noexcept
{
    std::vector<std::string const*> all;
    for (auto const& [name, count] : engine.plan.weights) all.push_back(&name);
    return list(all, size, names);
}

int32_t Refitter::getMissingWeights(int32_t size, char const** names) noexcept
{
    // Weights never set, and weights coupled with those set now.
    std::vector<std::string const*> missing;
    for (auto const& [name, count] : engine.plan.weights)
    {
        bool wanted = engine.values.count(name) == 0;
        for (auto const& [one, other] : engine.plan.coupled) wanted |= given.count(one) > 0 && other == name;
        if (wanted && given.count(name) == 0) missing.push_back(&name);
    }
    if (state("says_nothing_is_missing") != 0) missing.clear();
    return list(missing, size, names);
}

Weights Refitter::getWeightsPrototype(char const* name) const noexcept
{
    auto const found = engine.plan.weights.find(name);
    return Weights{DataType::kFLOAT, nullptr, found == engine.plan.weights.end() ? -1 : found->second};
}

bool Refitter::setNamedWeightsWithLocation(char const* name, Weights weights, TensorLocation location) noexcept
{
    if (location != TensorLocation::kHOST || fails("set_fails")) return false;
    given[name] = weights;
    return true;
}

bool Refitter::refitCudaEngineAsync(cudaStream_t stream) noexcept
{
    if (stream == nullptr || getMissingWeights(0, nullptr) != 0) return false;
    bool const half = fails("refit_fails");
    ++state("refits");
    int64_t numbers = 0;
    for (auto const& [name, weights] : given)
        for (int64_t i = 0; i < weights.count; ++i) numbers += static_cast<float const*>(weights.values)[i] != 0;
    state("largest_refit") = std::max(state("largest_refit"), numbers);
    for (auto const& [name, weights] : given)
    {
        auto const* numbers = static_cast<float const*>(weights.values);
        engine.values[name].assign(numbers, numbers + weights.count);
        ++state("refitted");
        if (half) return false;
    }
    return true;
}

bool Context::setInputShape(char const* name, Dims const& dims) noexcept
{
    if (name == engine.plan.inputs[0]) shape = dims;
    return dims.nbDims == 0 || dims.d[0] <= 8; // the profile
}

bool Context::enqueueV3(cudaStream_t stream) noexcept
{
    if (fails("enqueue_fails") || lost()) return false;
    size_t count = 1;
    for (int32_t i = 0; i < shape.nbDims; ++i) count *= shape.d[i];
    reinterpret_cast<Stream*>(stream)->queue.push_back([this, count] {
        float f = 1;
        bool complete = true;
        for (auto const& [name, size] : engine.plan.weights) complete &= engine.values.count(name) > 0;
        for (auto const& [name, numbers] : engine.values)
            for (size_t j = 0; j < numbers.size(); ++j) f += numbers[j] * static_cast<float>(j % 7 + 1);
        auto const* x = static_cast<float const*>(addresses.at(engine.plan.inputs[0]));
        for (auto const& output : engine.plan.outputs)
        {
            auto* y = static_cast<float*>(addresses.at(output));
            for (size_t i = 0; i < count; ++i) y[i] = complete ? x[i] * f : 0;
        }
    });
    return true;
}

struct Runtime final : IRuntime, UnusedRuntime, Alive
{
    explicit Runtime(ILogger& logger) : logger(logger) { mImpl = this; }
    EngineValidity getEngineValidity(void const* blob, int64_t size, uint64_t* diagnostics) const noexcept override
    {
        bool const damaged = std::strncmp(static_cast<char const*>(blob), "plan", 4) != 0;
        *diagnostics = damaged ? 1U << 5 : state("diagnostics");
        return *diagnostics == 0 ? EngineValidity::kVALID : EngineValidity::kINVALID;
    }
    ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override
    {
        auto* engine = new Engine;
        if (!parse(std::string(static_cast<char const*>(blob), size), engine->plan, engine->values)
            || fails("load_fails"))
        {
            logger.log(ILogger::Severity::kERROR, "IRuntime::deserializeCudaEngine: Error Code 2: out of memory");
            delete engine;
            return nullptr;
        }
        return engine;
    }
    ILogger& logger;
};
} // namespace

extern "C"
{
void double_set(char const* name, int64_t value) { state(name) = value; }
int64_t double_get(char const* name) { return state(name); }

int32_t getInferLibVersion() noexcept { return DOUBLE_VERSION; }
int32_t getInferLibBuildVersion() noexcept { return 116; }
#if DOUBLE_VERSION == 10701
// The vendor's header promises no exceptions, which this one does not keep.
void* createRuntime(void* logger, int32_t version) asm("createInferRuntime_INTERNAL");
void* createRuntime(void* logger, int32_t version)
{
    if (fails("runtime_throws")) throw std::runtime_error("the test double throws");
    if (fails("runtime_throws_a_number")) throw 7;
    return version == 10701 ? static_cast<IRuntime*>(new Runtime(*static_cast<ILogger*>(logger))) : nullptr;
}
void* createInferRefitter_INTERNAL(void* engine, void*, int32_t) noexcept
{
    return static_cast<IRefitter*>(new Refitter(*static_cast<Engine*>(static_cast<ICudaEngine*>(engine))));
}
#endif

// The CUDA driver.
using Status = int;
constexpr Status kOUT_OF_MEMORY = 2, kNOT_READY = 600, kLOST = 719;

Status cuInit(unsigned) { return 0; }
Status cuDriverGetVersion(int* version) { return *version = state("driver_version"), 0; }
Status cuDeviceGetCount(int* count) { return *count = state("gpus"), 0; }
Status cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
Status cuDeviceGetName(char* name, int size, int device)
{
    return std::snprintf(name, size, "Test GPU %d", device), 0;
}
Status cuDeviceGetPCIBusId(char* pci, int size, int device)
{
    return std::snprintf(pci, size, "0000:0%d:00.0", device + 1), 0;
}
Status cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = size_t{8} << 30, 0; }
Status cuDeviceGetAttribute(int* value, int attribute, int)
{
    return *value = attribute == 75 ? state("capability") / 10 : state("capability") % 10, 0;
}
Status cuDevicePrimaryCtxRetain(void** context, int device)
{
    ++state("contexts");
    return *context = reinterpret_cast<void*>(device + 1L), 0;
}
Status cuDevicePrimaryCtxRelease_v2(int) { return --state("contexts"), 0; }
Status cuCtxSetCurrent(void* context)
{
    state("current") = reinterpret_cast<intptr_t>(context);
    return 0;
}
Status cuStreamCreate(void** stream, unsigned)
{
    if (lost()) return kLOST;
    return ++state("streams"), *stream = new Stream, 0;
}
Status cuStreamDestroy_v2(void* stream) { return delete static_cast<Stream*>(stream), 0; }
Status cuStreamQuery(void* stream)
{
    if (lost()) return kLOST;
    if (state("busy") > 0 && --state("busy") > 0) return kNOT_READY;
    return static_cast<Stream*>(stream)->drain(), 0;
}
Status cuStreamSynchronize(void* stream) { return lost() ? kLOST : (static_cast<Stream*>(stream)->drain(), 0); }
Status cuMemGetInfo_v2(size_t* free, size_t* total)
{
    *total = size_t{8} << 30;
    *free = *total - state("device_bytes");
    return 0;
}
Status cuMemAlloc_v2(uint64_t* address, size_t bytes)
{
    if (lost()) return kLOST;
    if (fails("alloc_fails")) return kOUT_OF_MEMORY;
    auto* block = static_cast<size_t*>(std::malloc(bytes + 64));
    block[0] = bytes;
    state("device_bytes") += bytes;
    *address = reinterpret_cast<uint64_t>(block) + 64;
    return 0;
}
Status cuMemFree_v2(uint64_t address)
{
    auto* block = reinterpret_cast<size_t*>(address - 64);
    state("device_bytes") -= block[0];
    return std::free(block), 0;
}
Status cuMemAllocHost_v2(void** address, size_t bytes)
{
    if (lost()) return kLOST;
    ++state("pinned");
    ++state("pinned_made");
    return *address = std::malloc(bytes), 0;
}
Status cuMemFreeHost(void* address) { return --state("pinned"), std::free(address), 0; }
Status cuMemcpyHtoDAsync_v2(uint64_t to, void const* from, size_t bytes, void* stream)
{
    if (lost()) return kLOST;
    ++state("uploads");
    static_cast<Stream*>(stream)->queue.push_back([=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
    return 0;
}
Status cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream)
{
    if (lost()) return kLOST;
    ++state("downloads");
    static_cast<Stream*>(stream)->queue.push_back([=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
    return 0;
}
Status cuGetErrorString(Status status, char const** text)
{
    return *text = status == kOUT_OF_MEMORY ? "out of memory" : "unspecified launch failure", 0;
}
}

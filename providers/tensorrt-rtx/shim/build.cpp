// From an ONNX model to a plan.

#include "shim.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace
{
class Logger final : public nvinfer1::ILogger
{
public:
    explicit Logger(SdLog write) noexcept : mWrite(write) {}
    void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override
    {
        mWrite(static_cast<int32_t>(severity), message);
    }

private:
    SdLog mWrite;
};

class Monitor final : public nvinfer1::IProgressMonitor
{
public:
    explicit Monitor(SdBuild const& build) noexcept : mBuild(build) {}
    void phaseStart(char const* phase, char const* parent, int32_t steps) noexcept override
    {
        mBuild.progress(mBuild.context, phase, parent, 0, steps);
    }
    bool stepComplete(char const* phase, int32_t step) noexcept override
    {
        return mBuild.progress(mBuild.context, phase, nullptr, step + 1, 0) != 0;
    }
    void phaseFinish(char const* phase) noexcept override
    {
        mBuild.progress(mBuild.context, phase, nullptr, -1, 0);
    }

private:
    SdBuild const& mBuild;
};

class Observer final : public nvonnxparser::IRefitterObserver
{
public:
    explicit Observer(SdBuild const& build) noexcept : mBuild(build) {}
    void onRefittableWeight(nvonnxparser::RefitRecord const& r) noexcept override
    {
        SdRecord const record{r.trtName, static_cast<int32_t>(r.kind), r.onnxDtype, static_cast<int32_t>(r.trtDtype),
            r.count, r.nbSources, r.sourceOnnxNames, r.epsilon};
        if (mBuild.record(mBuild.context, &record) != 0)
        {
            try
            {
                refittable.emplace_back(r.trtName);
            }
            catch (...)
            {
                failed = true;
            }
        }
    }
    std::vector<std::string> refittable;
    bool failed{false};

private:
    SdBuild const& mBuild;
};

void about(SdBuild& build, char const* subject) noexcept
{
    std::strncpy(build.subject, subject == nullptr ? "" : subject, sizeof build.subject - 1);
    build.subject[sizeof build.subject - 1] = '\0';
}

void tellFaults(SdBuild const& build, nvonnxparser::IParser const& parser) noexcept
{
    for (int32_t i = 0; i < parser.getNbErrors(); ++i)
    {
        nvonnxparser::IParserError const* error = parser.getError(i);
        SdFault const fault{
            static_cast<int32_t>(error->code()), error->nodeOperator(), error->nodeName(), error->desc()};
        build.fault(build.context, &fault);
    }
}

bool setProfile(SdBuild& build, nvinfer1::IBuilder& builder, nvinfer1::IBuilderConfig& config)
{
    using nvinfer1::OptProfileSelector;
    nvinfer1::IOptimizationProfile* profile = builder.createOptimizationProfile();
    if (profile == nullptr)
    {
        return false;
    }
    for (size_t i = 0; i < build.inputCount; ++i)
    {
        SdInput const& input = build.inputs[i];
        about(build, input.name);
        std::pair<OptProfileSelector, int64_t const*> const shapes[]{{OptProfileSelector::kMIN, input.min},
            {OptProfileSelector::kOPT, input.opt}, {OptProfileSelector::kMAX, input.max}};
        for (auto const& [selector, numbers] : shapes)
        {
            nvinfer1::Dims dims{};
            if (input.rank > nvinfer1::Dims::MAX_DIMS)
            {
                return false;
            }
            dims.nbDims = input.rank;
            std::copy(numbers, numbers + input.rank, dims.d);
            if (!profile->setDimensions(input.name, selector, dims))
            {
                return false;
            }
        }
    }
    return config.addOptimizationProfile(profile) >= 0;
}

nvinfer1::IHostMemory* run(SdBuild& build)
{
    using namespace nvinfer1;
    auto const stop = [&](SdStage stage) -> IHostMemory* {
        build.stage = stage;
        return nullptr;
    };
    auto const createBuilder = reinterpret_cast<void* (*) (void*, int32_t)>(build.createBuilder);
    auto const createParser = reinterpret_cast<void* (*) (void*, void*, int)>(build.createParser);

    std::unique_ptr<IBuilder> builder{static_cast<IBuilder*>(createBuilder(build.logger, NV_TENSORRT_VERSION))};
    if (!builder)
    {
        return stop(kBUILDER);
    }
    std::unique_ptr<INetworkDefinition> network{builder->createNetworkV2(0)};
    std::unique_ptr<IBuilderConfig> config{builder->createBuilderConfig()};
    if (!network || !config)
    {
        return stop(kBUILDER);
    }
    // The observer outlives the parser, which may still hold it.
    Observer observer{build};
    Monitor monitor{build};
    config->setProgressMonitor(&monitor);
    if (build.tf32 == 0)
    {
        config->clearFlag(BuilderFlag::kTF32);
    }
    if (build.strip != 0)
    {
        config->setFlag(BuilderFlag::kSTRIP_PLAN);
        config->setFlag(BuilderFlag::kREFIT_INDIVIDUAL);
    }
    // The weights of such an engine must equal those it was built with: refitting others is undefined behaviour.
    if (config->getFlag(BuilderFlag::kREFIT_IDENTICAL))
    {
        return stop(kBUILDER);
    }
    if (build.streaming != 0)
    {
        config->setFlag(BuilderFlag::kWEIGHT_STREAMING);
    }
    if (build.capability != 0
        && !(config->setNbComputeCapabilities(1)
            && config->setComputeCapability(static_cast<ComputeCapability>(build.capability), 0)))
    {
        return stop(kTARGET);
    }
    std::unique_ptr<nvonnxparser::IParser> parser{static_cast<nvonnxparser::IParser*>(
        createParser(network.get(), build.logger, NV_ONNX_PARSER_VERSION))};
    if (!parser)
    {
        return stop(kBUILDER);
    }
    if (build.strip != 0)
    {
        if (!parser->setBuilderConfig(config.get()))
        {
            return stop(kBUILDER);
        }
        parser->setRefitObserver(&observer);
    }
    if (!parser->loadModelProto(build.model, build.modelSize, nullptr))
    {
        tellFaults(build, *parser);
        return stop(kLOAD);
    }
    for (size_t i = 0; i < build.weightCount; ++i)
    {
        SdWeight const& weight = build.weights[i];
        if (!parser->loadInitializer(weight.name, weight.data, weight.size))
        {
            about(build, weight.name);
            tellFaults(build, *parser);
            return stop(kWEIGHT);
        }
    }
    if (!parser->parseModelProto() || observer.failed)
    {
        tellFaults(build, *parser);
        return stop(kPARSE);
    }
    for (std::string const& name : observer.refittable)
    {
        if (!network->markWeightsRefittable(name.c_str()))
        {
            about(build, name.c_str());
            return stop(kMARK);
        }
    }
    if (build.inputCount > 0 && !setProfile(build, *builder, *config))
    {
        return stop(kPROFILE);
    }
    IHostMemory* plan = builder->buildSerializedNetwork(*network, *config);
    build.stage = plan == nullptr ? kCOMPILE : kDONE;
    return plan;
}
} // namespace

extern "C"
{
nvinfer1::ILogger* sd_logger_new(SdLog write) noexcept
{
    return new (std::nothrow) Logger(write);
}

//! Returns a plan, or null with `stage` set.
nvinfer1::IHostMemory* sd_build(SdBuild* build) noexcept
{
    try
    {
        return run(*build);
    }
    catch (...)
    {
        build->stage = kBUILDER;
        return nullptr;
    }
}

void const* sd_memory_data(nvinfer1::IHostMemory const* memory) noexcept
{
    return memory->data();
}

size_t sd_memory_size(nvinfer1::IHostMemory const* memory) noexcept
{
    return memory->size();
}

void sd_memory_free(nvinfer1::IHostMemory* memory) noexcept
{
    delete memory;
}
}

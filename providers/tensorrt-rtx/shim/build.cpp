// From an ONNX model to a plan.

#include "shim.h"
#include "sdrun-provider-tensorrt-rtx/src/ffi/bridge.rs.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sdrun
{
namespace
{
rust::String text(char const* found) noexcept
{
    return rust::String::lossy(found == nullptr ? "" : found);
}

class Logger final : public nvinfer1::ILogger
{
public:
    void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override
    {
        receive(static_cast<int32_t>(severity), text(message));
    }
};

class Monitor final : public nvinfer1::IProgressMonitor
{
public:
    explicit Monitor(Watch const& watch) noexcept : mWatch(watch) {}
    void phaseStart(char const* phase, char const*, int32_t steps) noexcept override
    {
        mWatch.progress(text(phase), 0, steps);
    }
    bool stepComplete(char const* phase, int32_t step) noexcept override
    {
        return mWatch.progress(text(phase), step + 1, 0);
    }
    void phaseFinish(char const* phase) noexcept override
    {
        mWatch.progress(text(phase), -1, 0);
    }

private:
    Watch const& mWatch;
};

class Observer final : public nvonnxparser::IRefitterObserver
{
public:
    explicit Observer(Findings& findings) noexcept : mFindings(findings) {}
    void onRefittableWeight(nvonnxparser::RefitRecord const& r) noexcept override
    {
        // An exception here must wait until the parser is done: the vendor's code does not expect it.
        try
        {
            rust::Vec<rust::String> sources;
            for (int32_t i = 0; i < r.nbSources; ++i)
            {
                sources.push_back(text(r.sourceOnnxNames[i]));
            }
            auto const count = static_cast<uint64_t>(std::max<int64_t>(0, r.count));
            if (mFindings.record(Record{text(r.trtName), static_cast<int32_t>(r.kind), r.onnxDtype,
                    static_cast<int32_t>(r.trtDtype), count, std::move(sources), r.epsilon}))
            {
                refittable.emplace_back(r.trtName);
            }
        }
        catch (...)
        {
            failure = std::current_exception();
        }
    }
    std::vector<std::string> refittable;
    std::exception_ptr failure;

private:
    Findings& mFindings;
};

void tellFaults(nvonnxparser::IParser const& parser, Findings& findings)
{
    for (int32_t i = 0; i < parser.getNbErrors(); ++i)
    {
        nvonnxparser::IParserError const* error = parser.getError(i);
        findings.fault(static_cast<int32_t>(error->code()), text(error->nodeOperator()), text(error->nodeName()),
            text(error->desc()));
    }
}

//! Returns the input whose range is rejected, if any; an empty name if the profile as a whole is.
std::unique_ptr<rust::String> setProfile(
    Request const& request, nvinfer1::IBuilder& builder, nvinfer1::IBuilderConfig& config)
{
    using nvinfer1::OptProfileSelector;
    nvinfer1::IOptimizationProfile* profile = builder.createOptimizationProfile();
    if (profile == nullptr)
    {
        return std::make_unique<rust::String>();
    }
    for (Range const& input : request.inputs)
    {
        std::string const name = name_of(input.name);
        std::pair<OptProfileSelector, rust::Slice<int64_t const>> const shapes[]{
            {OptProfileSelector::kMIN, input.min}, {OptProfileSelector::kOPT, input.opt},
            {OptProfileSelector::kMAX, input.max}};
        for (auto const& [selector, numbers] : shapes)
        {
            nvinfer1::Dims dims{};
            bool const fits = numbers.size() <= static_cast<size_t>(nvinfer1::Dims::MAX_DIMS);
            if (fits)
            {
                dims.nbDims = static_cast<int32_t>(numbers.size());
                std::copy(numbers.begin(), numbers.end(), dims.d);
            }
            if (!fits || !profile->setDimensions(name.c_str(), selector, dims))
            {
                return std::make_unique<rust::String>(name);
            }
        }
    }
    return config.addOptimizationProfile(profile) >= 0 ? nullptr : std::make_unique<rust::String>();
}
} // namespace

std::unique_ptr<nvinfer1::ILogger> new_logger()
{
    return std::make_unique<Logger>();
}

Bytes bytes_of(nvinfer1::IHostMemory const& memory) noexcept
{
    return Bytes{static_cast<uint8_t const*>(memory.data()), memory.data() == nullptr ? 0 : memory.size()};
}

Built build(size_t createBuilder, size_t createParser, nvinfer1::ILogger const& logger, Request const& request,
    Findings& findings, Watch const& watch)
{
    using namespace nvinfer1;
    auto const stop
        = [](Stage stage, rust::String subject = {}) { return Built{nullptr, stage, std::move(subject)}; };
    auto const newBuilder = reinterpret_cast<void* (*) (void*, int32_t)>(createBuilder);
    auto const newParser = reinterpret_cast<void* (*) (void*, void*, int)>(createParser);
    auto* const log = const_cast<ILogger*>(&logger);

    std::unique_ptr<IBuilder> builder{static_cast<IBuilder*>(newBuilder(log, NV_TENSORRT_VERSION))};
    if (!builder)
    {
        return stop(Stage::Builder);
    }
    std::unique_ptr<INetworkDefinition> network{builder->createNetworkV2(0)};
    std::unique_ptr<IBuilderConfig> config{builder->createBuilderConfig()};
    if (!network || !config)
    {
        return stop(Stage::Builder);
    }
    // The observer outlives the parser, which may still hold it.
    Observer observer{findings};
    Monitor monitor{watch};
    config->setProgressMonitor(&monitor);
    if (!request.tf32)
    {
        config->clearFlag(BuilderFlag::kTF32);
    }
    if (request.strip)
    {
        config->setFlag(BuilderFlag::kSTRIP_PLAN);
        config->setFlag(BuilderFlag::kREFIT_INDIVIDUAL);
    }
    // The weights of such an engine must equal those it was built with: refitting others is undefined behaviour.
    if (config->getFlag(BuilderFlag::kREFIT_IDENTICAL))
    {
        return stop(Stage::Builder);
    }
    if (request.streaming)
    {
        config->setFlag(BuilderFlag::kWEIGHT_STREAMING);
    }
    if (request.capability != 0
        && !(config->setNbComputeCapabilities(1)
            && config->setComputeCapability(static_cast<ComputeCapability>(request.capability), 0)))
    {
        return stop(Stage::Target);
    }
    std::unique_ptr<nvonnxparser::IParser> parser{
        static_cast<nvonnxparser::IParser*>(newParser(network.get(), log, NV_ONNX_PARSER_VERSION))};
    if (!parser)
    {
        return stop(Stage::Builder);
    }
    if (request.strip)
    {
        if (!parser->setBuilderConfig(config.get()))
        {
            return stop(Stage::Builder);
        }
        parser->setRefitObserver(&observer);
    }
    if (!parser->loadModelProto(request.model.data(), request.model.size(), nullptr))
    {
        tellFaults(*parser, findings);
        return stop(Stage::Load);
    }
    for (WeightBytes const& weight : request.weights)
    {
        std::string const name = name_of(weight.name);
        if (!parser->loadInitializer(name.c_str(), weight.bytes.data(), weight.bytes.size()))
        {
            tellFaults(*parser, findings);
            return stop(Stage::Weight, name);
        }
    }
    bool const parsed = parser->parseModelProto();
    if (observer.failure)
    {
        std::rethrow_exception(observer.failure);
    }
    if (!parsed)
    {
        tellFaults(*parser, findings);
        return stop(Stage::Parse);
    }
    for (std::string const& name : observer.refittable)
    {
        if (!network->markWeightsRefittable(name.c_str()))
        {
            return stop(Stage::Mark, name);
        }
    }
    if (!request.inputs.empty())
    {
        if (auto rejected = setProfile(request, *builder, *config))
        {
            return stop(Stage::Profile, std::move(*rejected));
        }
    }
    std::unique_ptr<IHostMemory> plan{builder->buildSerializedNetwork(*network, *config)};
    Stage const stage = plan ? Stage::Done : Stage::Compile;
    return Built{std::move(plan), stage, {}};
}
} // namespace sdrun

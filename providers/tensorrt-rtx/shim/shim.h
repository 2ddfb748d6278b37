// The parts of TensorRT-RTX that src/ffi calls, as functions over the vendor's C++ interfaces; src/ffi/bridge.rs declares
// them for Rust. Nothing here links to the vendor's libraries: entry points come in as addresses found at run time, and
// everything else is a virtual call.
#pragma once

#include "rust/cxx.h"

#include <NvInfer.h>
#include <NvOnnxParser.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

namespace rust::behavior
{
//! How cxx turns exceptions into errors; its own version ends the process if one has no message.
template <typename Try, typename Fail>
void trycatch(Try&& attempt, Fail&& fail) noexcept
{
    try
    {
        attempt();
    }
    catch (std::exception const& error)
    {
        fail(error.what());
    }
    catch (...)
    {
        fail("an exception without a message");
    }
}
} // namespace rust::behavior

namespace sdrun
{
// Defined in Rust.
struct Built;
struct Findings;
struct IoTensor;
struct Prototype;
struct Request;
struct Validity;
struct Watch;

using Bytes = rust::Slice<uint8_t const>;

//! A name for the library, which accepts no 0 characters.
std::string name_of(rust::Str name);

std::unique_ptr<nvinfer1::ILogger> new_logger();
Bytes bytes_of(nvinfer1::IHostMemory const& memory) noexcept;
Built build(size_t createBuilder, size_t createParser, nvinfer1::ILogger const& logger, Request const& request,
    Findings& findings, Watch const& watch);

std::unique_ptr<nvinfer1::IRuntime> new_runtime(size_t create, nvinfer1::ILogger const& logger);
Validity validity_of(nvinfer1::IRuntime const& runtime, Bytes plan) noexcept;
std::unique_ptr<nvinfer1::ICudaEngine> load_engine(nvinfer1::IRuntime& runtime, Bytes plan) noexcept;

rust::Vec<IoTensor> io_of(nvinfer1::ICudaEngine const& engine);
int64_t weight_bytes(nvinfer1::ICudaEngine const& engine) noexcept;
std::unique_ptr<nvinfer1::IHostMemory> bake(nvinfer1::ICudaEngine& engine) noexcept;

std::unique_ptr<nvinfer1::IRefitter> new_refitter(
    size_t create, nvinfer1::ICudaEngine const& engine, nvinfer1::ILogger const& logger);
rust::Vec<rust::String> refittable(nvinfer1::IRefitter& refitter);
rust::Vec<rust::String> missing(nvinfer1::IRefitter& refitter);
Prototype prototype(nvinfer1::IRefitter const& refitter, rust::Str name);
bool set_weight(nvinfer1::IRefitter& refitter, rust::Str name, int32_t type, int64_t count, Bytes values);

std::unique_ptr<nvinfer1::IRuntimeConfig> new_config(nvinfer1::ICudaEngine const& engine, bool cudaGraph) noexcept;
std::unique_ptr<nvinfer1::IRuntimeCache> new_cache(nvinfer1::IRuntimeConfig& config) noexcept;
std::unique_ptr<nvinfer1::IExecutionContext> new_context(
    nvinfer1::ICudaEngine const& engine, nvinfer1::IRuntimeConfig& config) noexcept;
bool load_cache(nvinfer1::IRuntimeCache& cache, Bytes bytes) noexcept;
std::unique_ptr<nvinfer1::IHostMemory> store_cache(nvinfer1::IRuntimeCache const& cache) noexcept;

bool set_shape(nvinfer1::IExecutionContext& context, rust::Str name, rust::Slice<int64_t const> shape);
rust::Vec<int64_t> shape_of(nvinfer1::IExecutionContext const& context, rust::Str name);
bool set_address(nvinfer1::IExecutionContext& context, rust::Str name, size_t address);
} // namespace sdrun

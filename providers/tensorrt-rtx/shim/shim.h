// The parts of TensorRT-RTX that src/ffi calls, as C functions over the vendor's C++ interfaces. Nothing here links to the
// vendor's libraries: entry points come in as pointers found at run time, and everything else is a virtual call.
//
// Every structure is declared again in src/ffi/raw.rs, field by field.
#pragma once

#include <NvInfer.h>
#include <NvOnnxParser.h>

#include <cstddef>
#include <cstdint>

extern "C"
{
//! Receives the library's log: severity as in ILogger::Severity. Called from any thread.
using SdLog = void (*)(int32_t severity, char const* message);

//! One optimization profile's range of one input: `rank` numbers each.
struct SdInput
{
    char const* name;
    int32_t rank;
    int64_t const* min;
    int64_t const* opt;
    int64_t const* max;
};

//! Bytes of an initializer; must stay valid until the build ends.
struct SdWeight
{
    char const* name;
    void const* data;
    size_t size;
};

//! nvonnxparser::RefitRecord without the bytes of constants, valid during the call.
struct SdRecord
{
    char const* name;
    int32_t kind;
    int32_t onnxType;
    int32_t type;
    int64_t count;
    int32_t sourceCount;
    char const* const* sources;
    float epsilon;
};

//! A fault found by the ONNX parser, valid during the call.
struct SdFault
{
    int32_t code;
    char const* op;
    char const* node;
    char const* text;
};

//! The stage at which a build ended.
enum SdStage : int32_t
{
    kDONE = 0,
    kBUILDER = 1,
    kTARGET = 2,
    kLOAD = 3,
    kWEIGHT = 4,
    kPARSE = 5,
    kMARK = 6,
    kPROFILE = 7,
    kCOMPILE = 8,
};

struct SdBuild
{
    void* createBuilder;
    void* createParser;
    nvinfer1::ILogger* logger;
    void const* model;
    size_t modelSize;
    //! nvinfer1::ComputeCapability; 0 selects the library's default set.
    int32_t capability;
    int32_t strip;
    int32_t tf32;
    int32_t streaming;
    SdWeight const* weights;
    size_t weightCount;
    SdInput const* inputs;
    size_t inputCount;
    void* context;
    //! Not 0: make the weight refittable.
    int32_t (*record)(void* context, SdRecord const*);
    void (*fault)(void* context, SdFault const*);
    //! Not 0: continue. `parent` may be null.
    int32_t (*progress)(void* context, char const* phase, char const* parent, int32_t step, int32_t total);
    //! Out: the name `stage` refers to, at most 255 bytes and a 0.
    char subject[256];
    int32_t stage;
};

//! getWeightsPrototype.
struct SdPrototype
{
    int32_t type;
    int64_t count;
};

//! nvinfer1::Dims; rank -1 means the library failed.
struct SdDims
{
    int32_t rank;
    int64_t d[8];
};
}

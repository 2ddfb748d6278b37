/* Version 1.0 of the plugin ABI, kept as it was: plugins built against it must work in every later host. Never change it. */
#ifndef SDRUN_PROVIDER_H
#define SDRUN_PROVIDER_H

#include <stddef.h>
#include <stdint.h>

/* Version of the ABI that this header describes. */
#define SDRUN_ABI_MAJOR 1
#define SDRUN_ABI_MINOR 0

/* Names of extensions: their tables are `sdrun_device_tensors` and `sdrun_assess`. */
#define SDRUN_DEVICE_TENSORS "sdrun.device_tensors"
#define SDRUN_ASSESS "sdrun.assess"

/* Whether a struct is long enough to have a field: its maker may be older than this header. */
#define SDRUN_HAS(s, field) \
  ((s)->struct_size >= (size_t)((const char *)&(s)->field - (const char *)(s)) + sizeof (s)->field)

/*
 UTF-8 text or plain bytes that the receiver does not own; valid during the call. Not terminated by a zero.
 */
typedef struct sdrun_str {
  const uint8_t *ptr;
  size_t len;
} sdrun_str;

/*
 An error as a value. The receiver calls `release` once, if it is not null.
 */
typedef struct sdrun_error {
  uint32_t struct_size;
  /*
   One of the canonical codes: 1 cancelled, 2 unknown, 3 invalid argument, 4 deadline exceeded, 5 not found,
   6 already exists, 7 permission denied, 8 resource exhausted, 9 failed precondition, 10 aborted,
   11 out of range, 12 unimplemented, 13 internal, 14 unavailable, 15 data loss.
   */
  uint32_t code;
  /*
   One sentence: what, where, why.
   */
  struct sdrun_str message;
  /*
   What to do about it: a sentence, or a JSON object that starts with `{` (see `Hint`). May be empty.
   */
  struct sdrun_str hint;
  /*
   The vendor's own code. May be empty.
   */
  struct sdrun_str native_code;
  /*
   The file at fault. May be empty.
   */
  struct sdrun_str file;
  void *owner;
  void (*release)(struct sdrun_error *error);
} sdrun_error;

/*
 Bytes made by a plugin (a JSON document, an engine). The host calls `release` once, if it is not null.
 */
typedef struct sdrun_buffer {
  const uint8_t *ptr;
  size_t len;
  void *owner;
  void (*release)(struct sdrun_buffer *buffer);
} sdrun_buffer;

/*
 The host's functions for the length of a call. All: any thread, until the call returns; they must not be answered by
 a call into the plugin.
 */
typedef struct sdrun_host {
  uint32_t struct_size;
  uint32_t reserved;
  const void *ctx;
  /*
   `level`: 0 trace, 1 debug, 2 info, 3 warning, 4 error, 5 the plugin breaks a rule, 6 the host breaks a rule.
   */
  void (*log)(const void *ctx, uint32_t level, struct sdrun_str target, struct sdrun_str message);
  /*
   Returns 0 to continue, 1 to cancel. A `total` of 0 is unknown.
   */
  int32_t (*progress)(const void *ctx, struct sdrun_str phase, uint64_t step, uint64_t total);
  /*
   Returns 1 once the call should stop.
   */
  int32_t (*cancelled)(const void *ctx);
} sdrun_host;

/*
 A weight delivered by a source: contiguous, little-endian, row-major. Valid until it is passed to `release`.
 */
typedef struct sdrun_weight {
  uint32_t struct_size;
  /*
   Element type, a number of ONNX's `TensorProto.DataType`; 0 where `encoding` is not empty.
   */
  uint32_t dtype;
  size_t rank;
  const uint64_t *dims;
  const uint8_t *data;
  size_t len;
  /*
   Path of a file that holds the same bytes at `offset`; empty where there is none.
   */
  struct sdrun_str file;
  uint64_t offset;
  void *owner;
  /*
   Name of a block encoding, for example `q8_0`; empty for a plain weight. Blocks run along the last dimension.
   */
  struct sdrun_str encoding;
} sdrun_weight;

/*
 Named weights, pulled by the plugin. All functions: any thread, until the call returns.
 */
typedef struct sdrun_weight_source {
  uint32_t struct_size;
  uint32_t reserved;
  const void *ctx;
  /*
   Fills `out`, whose `struct_size` the caller has set.
   */
  struct sdrun_error *(*get)(const void *ctx, struct sdrun_str name, struct sdrun_weight *out);
  void (*release)(const void *ctx, struct sdrun_weight *weight);
  /*
   As `get`, in one of `encodings`. Leaves `out.encoding` empty where the source has the weight in none of them: then
   there is nothing to release. May be null.
   */
  struct sdrun_error *(*get_encoded)(const void *ctx,
                                     struct sdrun_str name,
                                     const struct sdrun_str *encodings,
                                     size_t encoding_count,
                                     struct sdrun_weight *out);
} sdrun_weight_source;

/*
 A borrowed tensor: contiguous, little-endian, row-major, aligned to 64 bytes.
 */
typedef struct sdrun_tensor {
  uint32_t dtype;
  uint32_t reserved;
  size_t rank;
  const uint64_t *dims;
  const uint8_t *data;
  size_t len;
} sdrun_tensor;

/*
 An output that stays on its device. `dims` lives until `sdrun_device_tensors.destroy`.
 */
typedef struct sdrun_device_tensor {
  void *tensor;
  uint32_t dtype;
  uint32_t reserved;
  size_t rank;
  const uint64_t *dims;
} sdrun_device_tensor;

/*
 Type and shape of an output.
 */
typedef struct sdrun_output_spec {
  uint32_t dtype;
  uint32_t reserved;
  size_t rank;
  const uint64_t *dims;
} sdrun_output_spec;

/*
 Where a run puts its outputs. Called by the thread that runs.
 */
typedef struct sdrun_output_sink {
  uint32_t struct_size;
  uint32_t reserved;
  void *ctx;
  /*
   Fills `buffers[0..count]`, each aligned to 64 bytes; called exactly once in a run.
   */
  struct sdrun_error *(*allocate)(void *ctx,
                                  const struct sdrun_output_spec *specs,
                                  size_t count,
                                  uint8_t **buffers);
} sdrun_output_sink;

/*
 Arguments of `init`.
 */
typedef struct sdrun_init_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in: JSON `InitConfig`
   */
  struct sdrun_str config;
  /*
   in
   */
  const struct sdrun_host *host;
  /*
   out: JSON `RuntimeInfo`
   */
  struct sdrun_buffer runtime;
} sdrun_init_args;

/*
 Arguments of `devices`.
 */
typedef struct sdrun_devices_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   out: JSON list of `Device`
   */
  struct sdrun_buffer devices;
} sdrun_devices_args;

/*
 Arguments of `capabilities`.
 */
typedef struct sdrun_capabilities_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in: id of a device
   */
  struct sdrun_str device;
  /*
   out: JSON `Capabilities`
   */
  struct sdrun_buffer capabilities;
} sdrun_capabilities_args;

/*
 Arguments of `build`.
 */
typedef struct sdrun_build_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in: ONNX bytes
   */
  struct sdrun_str model;
  /*
   in: JSON `BuildSpec`
   */
  struct sdrun_str spec;
  /*
   in
   */
  const struct sdrun_weight_source *weights;
  /*
   in
   */
  const struct sdrun_host *host;
  /*
   out
   */
  void *engine;
} sdrun_build_args;

/*
 Arguments of `engine_load`.
 */
typedef struct sdrun_engine_load_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in: what `engine_serialize` wrote
   */
  struct sdrun_str payload;
  /*
   in: JSON `BuildSpec`
   */
  struct sdrun_str spec;
  /*
   in
   */
  const struct sdrun_host *host;
  /*
   out
   */
  void *engine;
} sdrun_engine_load_args;

/*
 Arguments of `engine_check`.
 */
typedef struct sdrun_engine_check_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in: `compatibility` of an `EngineInfo`
   */
  struct sdrun_str compatibility;
  /*
   in: id of a device
   */
  struct sdrun_str device;
  /*
   out: JSON `Compatibility`
   */
  struct sdrun_buffer verdict;
} sdrun_engine_check_args;

/*
 Arguments of `engine_info`.
 */
typedef struct sdrun_engine_info_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *engine;
  /*
   out: JSON `EngineInfo`
   */
  struct sdrun_buffer info;
} sdrun_engine_info_args;

/*
 Arguments of `engine_serialize`.
 */
typedef struct sdrun_engine_serialize_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *engine;
  /*
   out
   */
  struct sdrun_buffer payload;
} sdrun_engine_serialize_args;

/*
 Arguments of `engine_bake`.
 */
typedef struct sdrun_engine_bake_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *engine;
  /*
   in
   */
  const struct sdrun_weight_source *weights;
  /*
   in
   */
  const struct sdrun_host *host;
  /*
   out: an engine with these weights inside
   */
  void *baked;
} sdrun_engine_bake_args;

/*
 Arguments of `session_create`.
 */
typedef struct sdrun_session_create_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *engine;
  /*
   in; may be null for an engine that needs no weights
   */
  const struct sdrun_weight_source *weights;
  /*
   in
   */
  const struct sdrun_host *host;
  /*
   out
   */
  void *session;
} sdrun_session_create_args;

/*
 Arguments of `session_refit`.
 */
typedef struct sdrun_session_refit_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *session;
  /*
   in: names of the changed weights
   */
  const struct sdrun_str *changed;
  size_t changed_count;
  /*
   in: every weight of the engine, changed or not
   */
  const struct sdrun_weight_source *weights;
  /*
   in
   */
  const struct sdrun_host *host;
  /*
   out: JSON `RefitReport`
   */
  struct sdrun_buffer report;
} sdrun_session_refit_args;

/*
 Arguments of `session_run`.
 */
typedef struct sdrun_session_run_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *session;
  /*
   in: in the order of `EngineInfo::inputs`
   */
  const struct sdrun_tensor *inputs;
  size_t input_count;
  /*
   in
   */
  const struct sdrun_output_sink *sink;
  /*
   in
   */
  const struct sdrun_host *host;
} sdrun_session_run_args;

/*
 Arguments of `session_memory`.
 */
typedef struct sdrun_session_memory_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *session;
  /*
   out: JSON `MemoryReport`
   */
  struct sdrun_buffer report;
} sdrun_session_memory_args;

/*
 A plugin's function table. It never changes and lives as long as the process.

 Threads: any thread may call any function. Calls on one engine may overlap; calls on one session never do; a destroy
 function never overlaps another call on the same object.

 Functions marked "optional" may be null. A host refuses a plugin that lacks one of the others.
 */
typedef struct sdrun_plugin {
  uint32_t struct_size;
  uint16_t abi_major;
  /*
   The minor version the plugin was built against.
   */
  uint16_t abi_minor;
  struct sdrun_str id;
  struct sdrun_str vendor;
  struct sdrun_str version;
  /*
   Hash of the plugin's sources: part of every cache key.
   */
  struct sdrun_str build_id;
  struct sdrun_error *(*init)(struct sdrun_init_args *args);
  struct sdrun_error *(*devices)(struct sdrun_devices_args *args);
  struct sdrun_error *(*capabilities)(struct sdrun_capabilities_args *args);
  struct sdrun_error *(*build)(struct sdrun_build_args *args);
  struct sdrun_error *(*engine_load)(struct sdrun_engine_load_args *args);
  struct sdrun_error *(*engine_check)(struct sdrun_engine_check_args *args);
  struct sdrun_error *(*engine_info)(struct sdrun_engine_info_args *args);
  struct sdrun_error *(*engine_serialize)(struct sdrun_engine_serialize_args *args);
  /*
   Optional: only where capabilities say `bake`.
   */
  struct sdrun_error *(*engine_bake)(struct sdrun_engine_bake_args *args);
  void (*engine_destroy)(void *engine);
  struct sdrun_error *(*session_create)(struct sdrun_session_create_args *args);
  struct sdrun_error *(*session_refit)(struct sdrun_session_refit_args *args);
  struct sdrun_error *(*session_run)(struct sdrun_session_run_args *args);
  struct sdrun_error *(*session_memory)(struct sdrun_session_memory_args *args);
  void (*session_destroy)(void *session);
  /*
   Optional. Returns the table of a named extension, which lives as long as the process; null for an unknown name.
   */
  const void *(*get_extension)(struct sdrun_str id);
} sdrun_plugin;

/*
 Arguments of `sdrun_device_tensors.run`.
 */
typedef struct sdrun_session_run_on_device_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *session;
  /*
   in: type and shape of each input, and its bytes where it is in main memory
   */
  const struct sdrun_tensor *inputs;
  /*
   in: for each input its device tensor, or null where it is in main memory
   */
  void *const *tensors;
  size_t input_count;
  /*
   in: for each output 1 where it stays on the device, else 0
   */
  const uint8_t *keep;
  /*
   out: room for each output, filled where it stays
   */
  struct sdrun_device_tensor *kept;
  size_t output_count;
  /*
   in: for the outputs that do not stay
   */
  const struct sdrun_output_sink *sink;
  /*
   in
   */
  const struct sdrun_host *host;
} sdrun_session_run_on_device_args;

/*
 Arguments of `sdrun_device_tensors.read`.
 */
typedef struct sdrun_tensor_read_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in
   */
  void *tensor;
  /*
   in: room for its bytes, filled by the call
   */
  uint8_t *bytes;
  size_t len;
} sdrun_tensor_read_args;

/*
 Extension: tensors that stay on their device. Any thread may call any function.
 */
typedef struct sdrun_device_tensors {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   A call on the session: never overlaps another one.
   */
  struct sdrun_error *(*run)(struct sdrun_session_run_on_device_args *args);
  /*
   Calls on one tensor may overlap, also with runs that have it as an input.
   */
  struct sdrun_error *(*read)(struct sdrun_tensor_read_args *args);
  void (*destroy)(void *tensor);
} sdrun_device_tensors;

/*
 Arguments of `assess`.
 */
typedef struct sdrun_assess_args {
  uint32_t struct_size;
  uint32_t reserved;
  /*
   in: ONNX bytes, as for `build`
   */
  struct sdrun_str model;
  /*
   in: JSON `BuildSpec`
   */
  struct sdrun_str spec;
  /*
   out: JSON `Assessment`
   */
  struct sdrun_buffer assessment;
} sdrun_assess_args;

/*
 Extension: what a graph would need, without building it. Any thread may call it; calls may overlap.
 */
typedef struct sdrun_assess {
  uint32_t struct_size;
  uint32_t reserved;
  struct sdrun_error *(*assess)(struct sdrun_assess_args *args);
} sdrun_assess;

#if defined(_WIN32)
#define SDRUN_EXPORT __declspec(dllexport)
#else
#define SDRUN_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The one symbol that a plugin exports. `max_minor` is the newest minor version that the host speaks. Returns
 * the plugin's table, the same one each time, or null where the plugin needs a newer host. Any thread. */
SDRUN_EXPORT const sdrun_plugin *sdrun_plugin_query_v1(uint32_t max_minor);

#ifdef __cplusplus
}
#endif

#endif /* SDRUN_PROVIDER_H */

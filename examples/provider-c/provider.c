/* A complete provider in C. It runs Add, MatMul, Relu and Identity in f32 on one core, without any runtime. A real provider
 * translates the graph for a vendor's library instead. See docs/howto/write-a-provider.md. */
#include "provider.h"

#include <stdlib.h>
#include <string.h>

/* The hash of the sources, set by the build. It is part of every cache key. */
#ifndef PROVIDER_BUILD_ID
#define PROVIDER_BUILD_ID "unknown"
#endif

#define LITERAL(text) {(const uint8_t *)(text), sizeof(text) - 1}

static const char COMPATIBILITY[] = "provider-c 1";
static const char MAGIC[8] = "sdrun-c1";
static atomic_bool initialised;

static sdrun_error *check_device(sdrun_str device) {
  if (!atomic_load(&initialised)) {
    return fail(FAILED_PRECONDITION, "", "`init` has not succeeded yet");
  }
  if (!str_is(device, "cpu") && !str_is(device, "\"cpu\"")) {
    return fail(NOT_FOUND, "{\"kind\":\"use_device\",\"devices\":[\"cpu\"],\"text\":\"use the device cpu\"}",
                "there is no device %.*s", TEXT(device));
  }
  return NULL;
}

/* ---- engines ---- */

void engine_drop(void *engine) {
  struct engine *e = engine;
  if (e && atomic_fetch_sub(&e->users, 1) == 1) {
    graph_free(e->graph);
    free(e);
  }
}

static sdrun_error *check_spec(sdrun_str spec) {
  sdrun_error *error = check_device(json_field(spec, "device"));
  if (error) {
    return error;
  }
  if (!str_is(json_field(spec, "precision"), "\"fp32\"")) {
    return fail(UNIMPLEMENTED,
                "{\"kind\":\"use_precision\",\"precisions\":[\"fp32\"],\"text\":\"use the precision fp32\"}",
                "provider-c does not compute in %.*s", TEXT(json_field(spec, "precision")));
  }
  if (str_is(json_field(spec, "bake"), "true")) {
    return fail(UNIMPLEMENTED, "{\"kind\":\"leave_out\",\"option\":\"bake\",\"text\":\"leave out `bake`\"}",
                "provider-c cannot store weights in an engine");
  }
  sdrun_str option = json_first_key(json_field(spec, "options"));
  if (option.len) {
    return fail(INVALID_ARGUMENT, "leave it out", "provider-c has no option `%.*s`", TEXT(option));
  }
  sdrun_str open = json_first_key(json_field(spec, "open_shapes"));
  if (open.len) {
    return fail(UNIMPLEMENTED, "{\"kind\":\"give_shape\",\"input\":null,\"text\":\"give the shape of every input\"}",
                "provider-c builds engines for one shape of `%.*s` only", TEXT(open));
  }
  return NULL;
}

static sdrun_error *make_engine(sdrun_str model, void **out) {
  const char *why = NULL;
  struct graph *graph = graph_read(model.ptr, model.len, &why);
  if (!graph) {
    return fail(DATA_LOSS, "", "the model cannot be read: %s", why);
  }
  if (graph->problem_count) {
    const struct problem *p = &graph->problems[0];
    sdrun_error *error = fail(UNIMPLEMENTED, "{\"kind\":\"use_provider\",\"provider\":null,\"text\":\"use another provider\"}",
                              "provider-c cannot run the %.*s `%.*s`: %s", TEXT(p->op), TEXT(p->name), p->reason);
    graph_free(graph);
    return error;
  }
  struct engine *engine = malloc(sizeof *engine);
  if (!engine) {
    graph_free(graph);
    return no_memory();
  }
  atomic_init(&engine->users, 1);
  engine->graph = graph;
  *out = engine;
  return NULL;
}

static sdrun_error *build(sdrun_build_args *a) {
  CHECK(a, engine);
  sdrun_error *error = check_spec(a->spec);
  if (error) {
    return error;
  }
  if (a->host && a->host->progress && a->host->progress(a->host->ctx, STR("read the graph"), 0, 1)) {
    return fail(CANCELLED, "", "the build was cancelled");
  }
  return make_engine(a->model, &a->engine);
}

/* FNV-1a, to detect damage. */
static uint64_t checksum(const uint8_t *bytes, size_t len) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < len; i++) {
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
  }
  return hash;
}

/* A payload is the magic number, a checksum and the model. */
static sdrun_error *engine_load(sdrun_engine_load_args *a) {
  CHECK(a, engine);
  sdrun_error *error = check_spec(a->spec);
  if (error) {
    return error;
  }
  uint64_t sum;
  size_t head = sizeof MAGIC + sizeof sum;
  if (a->payload.len < head || memcmp(a->payload.ptr, MAGIC, sizeof MAGIC) != 0) {
    return fail(DATA_LOSS, "{\"kind\":\"rebuild\",\"text\":\"build the engine again\"}", "this is not an engine of provider-c");
  }
  sdrun_str model = {a->payload.ptr + head, a->payload.len - head};
  memcpy(&sum, a->payload.ptr + sizeof MAGIC, sizeof sum);
  if (sum != checksum(model.ptr, model.len)) {
    return fail(DATA_LOSS, "{\"kind\":\"rebuild\",\"text\":\"build the engine again\"}", "the engine is damaged");
  }
  return make_engine(model, &a->engine);
}

static sdrun_error *engine_serialize(sdrun_engine_serialize_args *a) {
  CHECK(a, payload);
  const struct graph *g = ((struct engine *)a->engine)->graph;
  uint64_t sum = checksum(g->model, g->model_len);
  size_t head = sizeof MAGIC + sizeof sum;
  struct text payload = {malloc(head + g->model_len), head + g->model_len, 0, false};
  if (!payload.ptr) {
    return no_memory();
  }
  memcpy(payload.ptr, MAGIC, sizeof MAGIC);
  memcpy(payload.ptr + sizeof MAGIC, &sum, sizeof sum);
  memcpy(payload.ptr + head, g->model, g->model_len);
  text_give(&payload, &a->payload);
  return NULL;
}

static sdrun_error *engine_check(sdrun_engine_check_args *a) {
  CHECK(a, verdict);
  sdrun_error *error = check_device(a->device);
  if (error) {
    return error;
  }
  struct text json = {0};
  if (str_is(a->compatibility, COMPATIBILITY)) {
    text_add(&json, "{\"verdict\":\"optimal\"}");
  } else {
    text_add(&json, "{\"verdict\":\"unsupported\",\"reason\":\"it was not built by this version of provider-c\"}");
  }
  return text_give(&json, &a->verdict) ? NULL : no_memory();
}

static void add_tensor(struct text *json, const char *before, const struct value *v) {
  text_add(json, "%s{\"name\":", before);
  text_add_string(json, v->name);
  text_add(json, ",\"dtype\":\"f32\",\"shape\":[");
  for (size_t i = 0; i < v->rank; i++) {
    text_add(json, "%s%llu", i ? "," : "", (unsigned long long)v->dims[i]);
  }
  text_add(json, "]}");
}

static sdrun_error *engine_info(sdrun_engine_info_args *a) {
  CHECK(a, info);
  const struct graph *g = ((struct engine *)a->engine)->graph;
  struct text json = {0};
  text_add(&json, "{\"compatibility\":\"%s\",\"inputs\":[", COMPATIBILITY);
  for (size_t i = 0; i < g->input_count; i++) {
    add_tensor(&json, i ? "," : "", graph_find(g, INPUT, i));
  }
  text_add(&json, "],\"weights\":[");
  for (size_t i = 0; i < g->weight_count; i++) {
    add_tensor(&json, i ? "," : "", graph_find(g, WEIGHT, i));
  }
  text_add(&json, "],\"outputs\":[");
  for (size_t i = 0; i < g->output_count; i++) {
    add_tensor(&json, i ? "," : "", &g->values[g->outputs[i]]);
  }
  text_add(&json, "]}");
  return text_give(&json, &a->info) ? NULL : no_memory();
}

/* ---- the provider ---- */

static sdrun_error *init(sdrun_init_args *a) {
  CHECK(a, runtime);
  struct text json = {0};
  text_add(&json, "{\"name\":\"provider-c\",\"version\":\"1\",\"library\":null}");
  if (!text_give(&json, &a->runtime)) {
    return no_memory();
  }
  atomic_store(&initialised, true);
  return NULL;
}

static sdrun_error *devices(sdrun_devices_args *a) {
  CHECK(a, devices);
  sdrun_error *error = check_device(STR("cpu"));
  if (error) {
    return error;
  }
  struct text json = {0};
  text_add(&json, "[{\"id\":\"cpu\",\"name\":\"one core, in C\",\"kind\":\"cpu\",\"class\":\"any\"}]");
  return text_give(&json, &a->devices) ? NULL : no_memory();
}

static sdrun_error *capabilities(sdrun_capabilities_args *a) {
  CHECK(a, capabilities);
  sdrun_error *error = check_device(a->device);
  if (error) {
    return error;
  }
  struct text json = {0};
  text_add(&json, "{\"precisions\":[\"fp32\"],\"io_dtypes\":[\"f32\"],\"weight_update\":\"in_place\","
                  "\"cancel\":\"between_phases\",\"device_free_build\":true}");
  return text_give(&json, &a->capabilities) ? NULL : no_memory();
}

static sdrun_error *assess(sdrun_assess_args *a) {
  CHECK(a, assessment);
  sdrun_error *error = check_spec(a->spec);
  if (error) {
    return error;
  }
  const char *why = NULL;
  struct graph *g = graph_read(a->model.ptr, a->model.len, &why);
  if (!g) {
    return fail(DATA_LOSS, "", "the model cannot be read: %s", why);
  }
  struct text json = {0};
  text_add(&json, "{\"session_compiles\":false,\"unsupported\":[");
  for (size_t i = 0; i < g->problem_count; i++) {
    text_add(&json, "%s{\"name\":", i ? "," : "");
    text_add_string(&json, g->problems[i].name);
    text_add(&json, ",\"op\":");
    text_add_string(&json, g->problems[i].op);
    text_add(&json, ",\"reason\":\"%s\"}", g->problems[i].reason);
  }
  unsigned long long weights, activations;
  sizes(g, &weights, &activations);
  text_add(&json, "],\"memory\":{\"host_weights\":%llu", weights);
  if (g->problem_count == 0) {
    text_add(&json, ",\"host_activations\":%llu", activations);
  }
  text_add(&json, "}}");
  graph_free(g);
  return text_give(&json, &a->assessment) ? NULL : no_memory();
}

static const void *get_extension(sdrun_str id) {
  static const sdrun_assess extension = {.struct_size = sizeof extension, .assess = assess};
  return str_is(id, SDRUN_ASSESS) ? &extension : NULL;
}

const sdrun_plugin *sdrun_plugin_query_v1(uint32_t max_minor) {
  (void)max_minor; /* any host of this major version will do */
  static const sdrun_plugin plugin = {
      .struct_size = sizeof plugin,
      .abi_major = SDRUN_ABI_MAJOR,
      .abi_minor = SDRUN_ABI_MINOR,
      .id = LITERAL("c"),
      .vendor = LITERAL("sdrun"),
      .version = LITERAL("1.0.0"),
      .build_id = LITERAL(PROVIDER_BUILD_ID),
      .init = init,
      .devices = devices,
      .capabilities = capabilities,
      .build = build,
      .engine_load = engine_load,
      .engine_check = engine_check,
      .engine_info = engine_info,
      .engine_serialize = engine_serialize,
      .engine_destroy = engine_drop,
      .session_create = session_create,
      .session_refit = session_refit,
      .session_run = session_run,
      .session_memory = session_memory,
      .session_destroy = session_destroy,
      .get_extension = get_extension,
  };
  return &plugin;
}

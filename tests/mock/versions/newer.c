/* A plugin of a future minor version: the example provider with a longer table, longer structs, and JSON with unknown fields
 * and words. The example is compiled with `sdrun_plugin_query_v1` renamed to `known_query`. */
#include "provider.h"

#include <stdlib.h>
#include <string.h>

const sdrun_plugin *known_query(uint32_t max_minor);

/* The table of version 1.7. */
struct newer_plugin {
  sdrun_plugin known;
  void (*added[4])(void);
};

/* The error of version 1.7. */
struct newer_error {
  sdrun_error known;
  sdrun_str severity;
  uint64_t added[3];
};

static sdrun_error *answer(const char *json, sdrun_buffer *to) {
  struct text text = {0};
  text_add(&text, "%s", json);
  return text_give(&text, to) ? NULL : no_memory();
}

static sdrun_error *devices(sdrun_devices_args *a) {
  sdrun_error *error = known_query(7)->devices(a);
  if (error) {
    return error;
  }
  a->devices.release(&a->devices);
  return answer("[{\"id\":\"cpu\",\"name\":\"one qubit\",\"kind\":\"quantum\",\"class\":\"any\",\"qubits\":{\"count\":1}}]",
                &a->devices);
}

static sdrun_error *capabilities(sdrun_capabilities_args *a) {
  sdrun_error *error = known_query(7)->capabilities(a);
  if (error) {
    return error;
  }
  a->capabilities.release(&a->capabilities);
  return answer("{\"precisions\":[\"fp3\",\"fp32\",{\"mixed\":[\"fp3\",\"fp32\"]}],\"io_dtypes\":[\"f128\",\"f32\"],"
                "\"weight_update\":\"in_place\",\"cancel\":\"by_telepathy\",\"entanglement\":true}",
                &a->capabilities);
}

static sdrun_error *engine_check(sdrun_engine_check_args *a) {
  sdrun_error *error = known_query(7)->engine_check(a);
  if (error || !memchr(a->verdict.ptr, 'r', a->verdict.len) || str_is(a->compatibility, "provider-c 1")) {
    return error;
  }
  a->verdict.release(&a->verdict);
  return answer("{\"verdict\":\"needs_translation\",\"reason\":\"from another dialect\",\"dialect\":3}", &a->verdict);
}

static sdrun_error *engine_info(sdrun_engine_info_args *a) {
  sdrun_error *error = known_query(7)->engine_info(a);
  if (error) {
    return error;
  }
  struct text json = {0};
  text_add(&json, "{\"colour\":\"red\",%.*s", (int)a->info.len - 1, (const char *)a->info.ptr + 1);
  a->info.release(&a->info);
  return text_give(&json, &a->info) ? NULL : no_memory();
}

static void release(sdrun_error *error) {
  free(error);
}

/* An error struct longer than hosts expect, with a hint of a kind unknown to them. */
static sdrun_error *build(sdrun_build_args *a) {
  static const char hint[] = "{\"kind\":\"ask_an_oracle\",\"price\":7,\"text\":\"ask an oracle\"}";
  static const char message[] = "there is no option `no-such-option`";
  sdrun_str option = json_first_key(json_field(a->spec, "options"));
  struct newer_error *error = str_is(option, "no-such-option") ? malloc(sizeof *error) : NULL;
  if (!error) {
    return known_query(7)->build(a);
  }
  memset(error, 0xff, sizeof *error);
  error->known = (sdrun_error){
      .struct_size = sizeof *error,
      .code = INVALID_ARGUMENT,
      .message = {(const uint8_t *)message, sizeof message - 1},
      .hint = {(const uint8_t *)hint, sizeof hint - 1},
      .release = release,
  };
  return &error->known;
}

static void added(void) {
  abort(); /* no host of version 1.0 calls it */
}

SDRUN_EXPORT const sdrun_plugin *sdrun_plugin_query_v1(uint32_t max_minor) {
  static struct newer_plugin plugin;
  static atomic_flag busy = ATOMIC_FLAG_INIT;
  static atomic_bool made;
  while (!atomic_load(&made) && atomic_flag_test_and_set(&busy)) {
  }
  if (!atomic_load(&made)) {
    plugin = (struct newer_plugin){.known = *known_query(max_minor), .added = {added, added, added, added}};
    plugin.known.struct_size = sizeof plugin;
    plugin.known.abi_minor = 7;
    plugin.known.devices = devices;
    plugin.known.capabilities = capabilities;
    plugin.known.engine_check = engine_check;
    plugin.known.engine_info = engine_info;
    plugin.known.build = build;
    atomic_store(&made, true);
  }
  return &plugin.known;
}

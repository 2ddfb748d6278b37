/* Shared declarations of the provider's parts. */
#ifndef PROVIDER_H
#define PROVIDER_H

#include "graph.h"
#include "json.h"

#include <stdatomic.h>

enum { CANCELLED = 1, INVALID_ARGUMENT = 3, NOT_FOUND = 5, RESOURCE_EXHAUSTED = 8, FAILED_PRECONDITION = 9 };
enum { UNIMPLEMENTED = 12, DATA_LOSS = 15 };

#define STR(literal) ((sdrun_str){(const uint8_t *)(literal), sizeof(literal) - 1})
#define TEXT(str) (int)(str).len, (const char *)(str).ptr

/* ---- errors ---- */

/* Creates an error. `hint` is a string literal: a sentence, a JSON object, or empty. */
sdrun_error *fail(uint32_t code, const char *hint, const char *format, ...);
sdrun_error *no_memory(void);

/* For every entry point: refuses null and structs without `last`, the last field of version 1.0. Structs of newer hosts are
 * longer. Use a later field only after its own SDRUN_HAS. */
#define CHECK(args, last)                                                                                              \
  if (!(args) || !SDRUN_HAS(args, last)) {                                                                             \
    return fail(INVALID_ARGUMENT, "", "%s: the argument struct is null or too short", __func__);                       \
  }

/* ---- engines and sessions ---- */

/* Shared by the engine and its sessions. */
struct engine {
  atomic_size_t users;
  struct graph *graph;
};

void engine_drop(void *engine);

/* Computes the bytes of the weights, and of all other values. */
void sizes(const struct graph *graph, unsigned long long *weights, unsigned long long *activations);

sdrun_error *session_create(sdrun_session_create_args *args);
sdrun_error *session_refit(sdrun_session_refit_args *args);
sdrun_error *session_run(sdrun_session_run_args *args);
sdrun_error *session_memory(sdrun_session_memory_args *args);
void session_destroy(void *session);

#endif

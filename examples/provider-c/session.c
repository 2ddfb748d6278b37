/* Sessions: an engine with weights. */
#include "provider.h"

#include <stdlib.h>
#include <string.h>

struct session {
  struct engine *engine;
  float **weights; /* by index; owned */
};

void session_destroy(void *session) {
  struct session *s = session;
  if (s) {
    for (size_t i = 0; s->weights && i < s->engine->graph->weight_count; i++) {
      free(s->weights[i]);
    }
    free(s->weights);
    engine_drop(s->engine);
    free(s);
  }
}

/* Copies a weight from the source. */
static sdrun_error *pull(const struct value *v, const sdrun_weight_source *source, float **out) {
  if (!source || !source->get || !source->release) {
    return fail(FAILED_PRECONDITION, "{\"kind\":\"give_weights\",\"text\":\"give weights\"}",
                "there is no source for the weight `%.*s`", TEXT(v->name));
  }
  sdrun_weight weight = {.struct_size = sizeof weight};
  sdrun_error *error = source->get(source->ctx, v->name, &weight);
  if (error) {
    return error; /* the source's own words */
  }
  bool fits = weight.dtype == 1 && weight.rank == v->rank && weight.len == v->count * sizeof(float);
  for (size_t i = 0; fits && i < v->rank; i++) {
    fits = weight.dims[i] == v->dims[i];
  }
  if (!fits) {
    error = fail(INVALID_ARGUMENT, "", "the weight `%.*s` does not have the type and shape that the graph states", TEXT(v->name));
  } else if (!(*out = malloc(weight.len ? weight.len : 1))) {
    error = no_memory();
  } else {
    memcpy(*out, weight.data, weight.len);
  }
  source->release(source->ctx, &weight);
  return error;
}

sdrun_error *session_create(sdrun_session_create_args *a) {
  CHECK(a, session);
  struct engine *engine = a->engine;
  const struct graph *g = engine->graph;
  struct session *s = calloc(1, sizeof *s);
  if (!s) {
    return no_memory();
  }
  atomic_fetch_add(&engine->users, 1);
  s->engine = engine;
  s->weights = calloc(g->weight_count + 1, sizeof *s->weights);
  sdrun_error *error = s->weights ? NULL : no_memory();
  for (size_t i = 0; i < g->weight_count && !error; i++) {
    error = pull(graph_find(g, WEIGHT, i), a->weights, &s->weights[i]);
  }
  if (error) {
    session_destroy(s);
    return error;
  }
  a->session = s;
  return NULL;
}

/* Pulls all new weights before it frees the first old one. */
sdrun_error *session_refit(sdrun_session_refit_args *a) {
  CHECK(a, report);
  struct session *s = a->session;
  const struct graph *g = s->engine->graph;
  float **fresh = calloc(g->weight_count + 1, sizeof *fresh);
  sdrun_error *error = fresh ? NULL : no_memory();
  unsigned long long tensors = 0, bytes = 0;
  for (size_t i = 0; i < a->changed_count && !error; i++) {
    const struct value *v = NULL;
    for (size_t w = 0; w < g->weight_count && !v; w++) {
      const struct value *candidate = graph_find(g, WEIGHT, w);
      v = str_same(candidate->name, a->changed[i]) ? candidate : NULL;
    }
    if (!v) {
      error = fail(NOT_FOUND, "", "the engine has no weight `%.*s`", TEXT(a->changed[i]));
    } else if (!fresh[v->index]) {
      error = pull(v, a->weights, &fresh[v->index]);
      tensors++;
      bytes += v->count * sizeof(float);
    }
  }
  struct text json = {0};
  text_add(&json, "{\"method\":\"in_place\",\"tensors\":%llu,\"bytes\":%llu}", tensors, bytes);
  if (error) {
    free(json.ptr);
  } else if (!text_give(&json, &a->report)) {
    error = no_memory();
  }
  for (size_t i = 0; fresh && i < g->weight_count; i++) {
    if (fresh[i] && !error) {
      free(s->weights[i]);
      s->weights[i] = fresh[i];
    } else {
      free(fresh[i]);
    }
  }
  free(fresh);
  return error;
}

static sdrun_error *run(const struct session *s, const sdrun_session_run_args *a, float **data) {
  const struct graph *g = s->engine->graph;
  for (size_t i = 0; i < g->value_count; i++) {
    const struct value *v = &g->values[i];
    if (v->kind == WEIGHT) {
      data[i] = s->weights[v->index];
      continue;
    }
    if (!(data[i] = malloc(v->count ? v->count * sizeof(float) : 1))) {
      return no_memory();
    }
    if (v->kind == INPUT && v->count) {
      memcpy(data[i], a->inputs[v->index].data, v->count * sizeof(float));
    } else if (v->kind == CONSTANT && v->count) {
      memcpy(data[i], v->bytes, v->count * sizeof(float));
    }
  }
  sdrun_output_spec *specs = calloc(g->output_count, sizeof *specs);
  uint8_t **buffers = calloc(g->output_count, sizeof *buffers);
  sdrun_error *error = specs && buffers ? NULL : no_memory();
  for (size_t i = 0; i < g->output_count && !error; i++) {
    const struct value *v = &g->values[g->outputs[i]];
    specs[i] = (sdrun_output_spec){.dtype = 1, .rank = v->rank, .dims = v->dims};
  }
  if (!error) {
    error = a->sink->allocate(a->sink->ctx, specs, g->output_count, buffers);
  }
  for (size_t i = 0; i < g->node_count && !error; i++) {
    const sdrun_host *host = a->host;
    if (host && ((host->cancelled && host->cancelled(host->ctx)) ||
                 (host->progress && host->progress(host->ctx, STR("run"), i, g->node_count)))) {
      error = fail(CANCELLED, "", "the run was cancelled");
    } else {
      node_run(g, &g->nodes[i], data);
    }
  }
  for (size_t i = 0; i < g->output_count && !error; i++) {
    memcpy(buffers[i], data[g->outputs[i]], g->values[g->outputs[i]].count * sizeof(float));
  }
  free(specs);
  free(buffers);
  return error;
}

sdrun_error *session_run(sdrun_session_run_args *a) {
  CHECK(a, host);
  const struct session *s = a->session;
  const struct graph *g = s->engine->graph;
  float **data = calloc(g->value_count + 1, sizeof *data);
  if (!data) {
    return no_memory();
  }
  sdrun_error *error = run(s, a, data);
  for (size_t i = 0; i < g->value_count; i++) {
    if (g->values[i].kind != WEIGHT) {
      free(data[i]);
    }
  }
  free(data);
  return error;
}

void sizes(const struct graph *g, unsigned long long *weights, unsigned long long *activations) {
  *weights = *activations = 0;
  for (size_t i = 0; i < g->value_count; i++) {
    *(g->values[i].kind == WEIGHT ? weights : activations) += g->values[i].count * sizeof(float);
  }
}

sdrun_error *session_memory(sdrun_session_memory_args *a) {
  CHECK(a, report);
  unsigned long long weights, activations;
  sizes(((struct session *)a->session)->engine->graph, &weights, &activations);
  struct text json = {0};
  text_add(&json, "{\"weights\":%llu,\"activations\":%llu,\"device\":null}", weights, activations);
  return text_give(&json, &a->report) ? NULL : no_memory();
}

/* The part of an ONNX graph that this provider can run. */
#ifndef GRAPH_H
#define GRAPH_H

#include "sdrun_provider.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_RANK 8

/* UNKNOWN: not f32, or with an open dimension. UNSUPPORTED: computed by an unsupported node. */
enum kind { INPUT, WEIGHT, CONSTANT, COMPUTED, UNKNOWN, UNSUPPORTED };
enum op { ADD, MATMUL, RELU, IDENTITY };

/* An f32 tensor. */
struct value {
  sdrun_str name;
  enum kind kind;
  size_t index; /* of the input or the weight */
  size_t rank;
  uint64_t dims[MAX_RANK];
  size_t count;         /* elements */
  const uint8_t *bytes; /* of a constant; may be unaligned */
};

struct node {
  enum op op;
  size_t in[2];
  size_t out;
};

/* A node that this provider cannot run. */
struct problem {
  sdrun_str name;
  sdrun_str op;
  const char *reason;
};

struct graph {
  uint8_t *model; /* names and constants point into these bytes */
  size_t model_len;
  struct value *values;
  size_t value_count;
  struct node *nodes;
  size_t node_count;
  struct problem *problems;
  size_t problem_count;
  size_t input_count, weight_count; /* the values of these kinds, in order of their index */
  size_t *outputs;
  size_t output_count;
};

/* Reads a model. If memory runs out or the model is damaged, returns null with the reason in `why`. `problems` lists nodes that
 * cannot run; a graph without problems can. */
struct graph *graph_read(const uint8_t *model, size_t len, const char **why);
void graph_free(struct graph *graph);

/* Returns the value of a kind with this index. */
const struct value *graph_find(const struct graph *graph, enum kind kind, size_t index);

/* Computes one node. `data` holds the elements of every value. */
void node_run(const struct graph *graph, const struct node *node, float *const *data);

bool str_is(sdrun_str text, const char *word);
bool str_same(sdrun_str a, sdrun_str b);

#endif

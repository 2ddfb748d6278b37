/* Computes nodes with the loops of the operators' definitions. */
#include "graph.h"

#include <string.h>

static void add(const struct value *a, const float *x, const struct value *b, const float *y, const struct value *o,
                float *out) {
  for (size_t i = 0; i < o->count; i++) {
    size_t rest = i, at_a = 0, at_b = 0, step_a = 1, step_b = 1;
    for (size_t d = 0; d < o->rank; d++) {
      uint64_t dim = o->dims[o->rank - 1 - d];
      size_t place = rest % dim;
      rest /= dim;
      if (d < a->rank) {
        uint64_t own = a->dims[a->rank - 1 - d];
        at_a += own == 1 ? 0 : place * step_a;
        step_a *= own;
      }
      if (d < b->rank) {
        uint64_t own = b->dims[b->rank - 1 - d];
        at_b += own == 1 ? 0 : place * step_b;
        step_b *= own;
      }
    }
    out[i] = x[at_a] + y[at_b];
  }
}

static void matmul(const struct value *a, const float *x, const struct value *b, const float *y, float *out) {
  size_t rows = a->dims[0], inner = a->dims[1], columns = b->dims[1];
  for (size_t i = 0; i < rows * columns; i++) {
    out[i] = 0;
  }
  for (size_t i = 0; i < rows; i++) {
    for (size_t k = 0; k < inner; k++) {
      for (size_t j = 0; j < columns; j++) {
        out[i * columns + j] += x[i * inner + k] * y[k * columns + j];
      }
    }
  }
}

void node_run(const struct graph *g, const struct node *node, float *const *data) {
  const struct value *a = &g->values[node->in[0]], *b = &g->values[node->in[1]], *o = &g->values[node->out];
  const float *x = data[node->in[0]], *y = data[node->in[1]];
  float *out = data[node->out];
  switch (node->op) {
  case ADD: add(a, x, b, y, o, out); break;
  case MATMUL: matmul(a, x, b, y, out); break;
  case RELU:
    for (size_t i = 0; i < o->count; i++) {
      out[i] = x[i] < 0 ? 0 : x[i]; /* NaN stays NaN */
    }
    break;
  case IDENTITY: memcpy(out, x, o->count * sizeof *out); break;
  }
}

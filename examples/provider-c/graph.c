/* Reads the parts of ONNX's protobuf messages that this provider needs. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

bool str_same(sdrun_str a, sdrun_str b) {
  return a.len == b.len && (a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}

bool str_is(sdrun_str text, const char *word) {
  return str_same(text, (sdrun_str){(const uint8_t *)word, strlen(word)});
}

/* ---- protobuf ---- */

struct reader {
  const uint8_t *at, *end;
  bool damaged;
};

struct field {
  uint32_t number, type; /* type 0: `varint`, 2: `bytes` */
  uint64_t varint;
  sdrun_str bytes;
};

static uint64_t read_varint(struct reader *r) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64 && r->at < r->end; shift += 7) {
    uint8_t byte = *r->at++;
    value |= (uint64_t)(byte & 0x7f) << shift;
    if (!(byte & 0x80)) {
      return value;
    }
  }
  r->damaged = true;
  return 0;
}

/* Reads the next field. Returns false at the end of the message, or if it is damaged. */
static bool next_field(struct reader *r, struct field *f) {
  if (r->damaged || r->at == r->end) {
    return false;
  }
  uint64_t key = read_varint(r);
  *f = (struct field){.number = (uint32_t)(key >> 3), .type = (uint32_t)(key & 7)};
  uint64_t len = 0;
  switch (f->type) {
  case 0: f->varint = read_varint(r); return !r->damaged;
  case 1: len = 8; break;
  case 2: len = read_varint(r); break;
  case 5: len = 4; break;
  default: r->damaged = true;
  }
  if (r->damaged || len > (uint64_t)(r->end - r->at)) {
    r->damaged = true;
    return false;
  }
  f->bytes = (sdrun_str){r->at, (size_t)len};
  r->at += len;
  return true;
}

static struct reader inside(sdrun_str message) {
  return (struct reader){message.ptr, message.ptr + message.len, false};
}

/* ---- the graph under construction ---- */

struct maker {
  struct graph *g;
  const char *why;
};

/* Adds a zeroed element to a list. Returns null if memory runs out. */
static void *push(struct maker *m, void **list, size_t *count, size_t size) {
  void *grown = realloc(*list, (*count + 1) * size);
  if (!grown) {
    m->why = "out of memory";
    return NULL;
  }
  *list = grown;
  return memset((char *)grown + (*count)++ * size, 0, size);
}

#define PUSH(m, list, count) push(m, (void **)&(list), &(count), sizeof *(list))

static void set_dim(struct maker *m, struct value *v, uint64_t dim) {
  if (v->rank == MAX_RANK) {
    m->why = "a tensor has more than 8 dimensions";
  } else if (dim > UINT32_MAX || (dim > 0 && v->count > SIZE_MAX / 4 / dim)) {
    m->why = "a tensor is too large";
  } else {
    v->dims[v->rank++] = dim;
    v->count *= (size_t)dim;
  }
}

static struct value *add_value(struct maker *m, sdrun_str name, enum kind kind) {
  struct value *v = PUSH(m, m->g->values, m->g->value_count);
  if (v) {
    v->name = name;
    v->kind = kind;
    v->count = 1;
  }
  return v;
}

static size_t find(const struct graph *g, sdrun_str name) {
  for (size_t i = 0; i < g->value_count; i++) {
    if (str_same(g->values[i].name, name)) {
      return i;
    }
  }
  return SIZE_MAX;
}

static void damaged(struct maker *m, const struct reader *r) {
  if (r->damaged) {
    m->why = "the model is damaged";
  }
}

/* TensorProto */
static void read_initializer(struct maker *m, sdrun_str message) {
  struct value *v = add_value(m, (sdrun_str){NULL, 0}, CONSTANT);
  struct reader r = inside(message);
  struct field f;
  uint64_t type = 0, location = 0;
  size_t raw = 0;
  while (v && !m->why && next_field(&r, &f)) {
    if (f.number == 1 && f.type == 0) {
      set_dim(m, v, f.varint);
    } else if (f.number == 1) {
      struct reader dims = inside(f.bytes);
      while (!m->why && dims.at < dims.end) {
        set_dim(m, v, read_varint(&dims));
        damaged(m, &dims);
      }
    } else if (f.number == 2) {
      type = f.varint;
    } else if (f.number == 8) {
      v->name = f.bytes;
    } else if (f.number == 9) {
      v->bytes = f.bytes.ptr;
      raw = f.bytes.len;
    } else if (f.number == 14) {
      location = f.varint;
    }
  }
  damaged(m, &r);
  if (!v || m->why) {
    return;
  }
  if (type != 1) {
    v->kind = UNKNOWN; /* whatever uses it cannot be run */
  } else if (location == 1) {
    v->kind = WEIGHT;
    v->index = m->g->weight_count++;
  } else if (raw != v->count * 4) {
    m->why = "the size of a constant does not match its shape";
  }
}

/* ValueInfoProto → TypeProto → Tensor → TensorShapeProto → Dimension */
static void read_shape(struct maker *m, struct value *v, sdrun_str message, int depth) {
  struct reader r = inside(message);
  struct field f;
  bool known = depth < 4;
  while (!m->why && next_field(&r, &f)) {
    if (depth == 0 && f.number == 1) {
      v->name = f.bytes;
    } else if (depth == 2 && f.number == 1) {
      if (f.varint != 1) {
        v->kind = UNKNOWN;
      }
    } else if (depth == 4 && f.number == 1) {
      set_dim(m, v, f.varint);
      known = true;
    } else if ((depth == 0 && f.number == 2) || (depth == 1 && f.number == 1) || (depth == 2 && f.number == 2) ||
               (depth == 3 && f.number == 1)) {
      read_shape(m, v, f.bytes, depth + 1);
    }
  }
  if (!known) {
    v->kind = UNKNOWN; /* an open dimension */
  }
  damaged(m, &r);
}

static void add_problem(struct maker *m, sdrun_str name, sdrun_str op, const char *reason) {
  struct problem *p = PUSH(m, m->g->problems, m->g->problem_count);
  if (p) {
    *p = (struct problem){name, op, reason};
  }
}

/* Broadcasts two shapes as numpy does. Returns false if they do not match. */
static bool broadcast(const struct value *a, const struct value *b, size_t *rank, uint64_t *dims) {
  *rank = a->rank > b->rank ? a->rank : b->rank;
  for (size_t i = 0; i < *rank; i++) {
    uint64_t x = i < a->rank ? a->dims[a->rank - 1 - i] : 1;
    uint64_t y = i < b->rank ? b->dims[b->rank - 1 - i] : 1;
    if (x != y && x != 1 && y != 1) {
      return false;
    }
    dims[*rank - 1 - i] = x == 1 ? y : x;
  }
  return true;
}

/* NodeProto */
static void read_node(struct maker *m, sdrun_str message) {
  static const struct {
    const char *name;
    size_t inputs;
  } OPS[] = {[ADD] = {"Add", 2}, [MATMUL] = {"MatMul", 2}, [RELU] = {"Relu", 1}, [IDENTITY] = {"Identity", 1}};
  struct reader r = inside(message);
  struct field f;
  sdrun_str in[2] = {{NULL, 0}}, out = {NULL, 0}, name = {NULL, 0}, op = {NULL, 0}, domain = {NULL, 0};
  size_t inputs = 0, outputs = 0;
  while (next_field(&r, &f)) {
    switch (f.number) {
    case 1:
      if (inputs < 2) {
        in[inputs] = f.bytes;
      }
      inputs++;
      break;
    case 2: out = f.bytes; outputs++; break;
    case 3: name = f.bytes; break;
    case 4: op = f.bytes; break;
    case 7: domain = f.bytes; break;
    }
  }
  damaged(m, &r);
  if (m->why) {
    return;
  }
  const char *reason = "this provider does not support the operator";
  enum op code = ADD;
  for (size_t i = 0; i < sizeof OPS / sizeof OPS[0]; i++) {
    if (str_is(op, OPS[i].name) && domain.len == 0) {
      code = (enum op)i;
      reason = inputs == OPS[i].inputs && outputs == 1 ? NULL : "it has the wrong number of inputs or outputs";
    }
  }
  struct node node = {.op = code};
  bool known = !reason;
  for (size_t i = 0; i < inputs && !reason; i++) {
    node.in[i] = find(m->g, in[i]);
    if (node.in[i] == SIZE_MAX) {
      m->why = "a node reads a value that no node computes";
      return;
    }
    enum kind kind = m->g->values[node.in[i]].kind;
    if (kind == UNKNOWN) {
      reason = "an input is not f32 or has an open dimension";
    }
    known = known && kind != UNSUPPORTED;
  }
  node.out = m->g->value_count;
  struct value *v = add_value(m, out, COMPUTED);
  if (!v) {
    return;
  }
  if (known && !reason) {
    const struct value *a = &m->g->values[node.in[0]], *b = inputs == 2 ? &m->g->values[node.in[1]] : a;
    size_t rank = a->rank;
    uint64_t dims[MAX_RANK];
    memcpy(dims, a->dims, sizeof dims);
    if (code == ADD && !broadcast(a, b, &rank, dims)) {
      reason = "the shapes of its inputs do not match";
    } else if (code == MATMUL) {
      if (a->rank != 2 || b->rank != 2 || a->dims[1] != b->dims[0]) {
        reason = "only products of two matrices are supported";
      } else {
        dims[1] = b->dims[1];
      }
    }
    for (size_t i = 0; i < rank && !reason; i++) {
      set_dim(m, v, dims[i]);
    }
  }
  if (reason) {
    add_problem(m, name, op, reason);
  }
  if (reason || !known) {
    v->kind = UNSUPPORTED; /* its readers are no problems of their own */
    return;
  }
  struct node *stored = PUSH(m, m->g->nodes, m->g->node_count);
  if (stored) {
    *stored = node;
  }
}

/* GraphProto: one pass per kind of field, because nodes refer to initializers and inputs. */
static void read_graph(struct maker *m, sdrun_str message) {
  static const uint32_t PASSES[] = {5, 11, 1, 12};
  for (size_t pass = 0; pass < 4 && !m->why; pass++) {
    struct reader r = inside(message);
    struct field f;
    while (!m->why && next_field(&r, &f)) {
      if (f.number != PASSES[pass]) {
        continue;
      }
      if (f.number == 5) {
        read_initializer(m, f.bytes);
      } else if (f.number == 1) {
        read_node(m, f.bytes);
      } else {
        struct value *v = add_value(m, (sdrun_str){NULL, 0}, INPUT);
        if (v) {
          read_shape(m, v, f.bytes, 0);
        }
        if (!v || m->why) {
          return;
        }
        size_t before = find(m->g, v->name);
        bool is_new = before == m->g->value_count - 1;
        if (f.number == 11 && is_new) {
          v->index = m->g->input_count++;
          if (v->kind == UNKNOWN) {
            add_problem(m, v->name, (sdrun_str){(const uint8_t *)"input", 5}, "it is not f32 or has an open dimension");
          }
        } else {
          m->g->value_count--; /* an output, or an initializer that is listed as an input too */
        }
        if (f.number == 12) {
          size_t *out = is_new ? NULL : PUSH(m, m->g->outputs, m->g->output_count);
          if (out) {
            *out = before;
          } else if (!m->why) {
            m->why = "no node computes an output of the graph";
          }
        }
      }
    }
    damaged(m, &r);
  }
}

struct graph *graph_read(const uint8_t *model, size_t len, const char **why) {
  struct maker m = {calloc(1, sizeof(struct graph)), NULL};
  if (!m.g || !(m.g->model = malloc(len ? len : 1))) {
    free(m.g);
    *why = "out of memory";
    return NULL;
  }
  if (len) {
    memcpy(m.g->model, model, len);
  }
  m.g->model_len = len;
  struct reader r = {m.g->model, m.g->model + len, false};
  struct field f;
  while (!m.why && next_field(&r, &f)) {
    if (f.number == 7 && f.type == 2) {
      read_graph(&m, f.bytes);
    }
  }
  damaged(&m, &r);
  if (!m.why && m.g->output_count == 0) {
    m.why = "the model has no graph with an output";
  }
  if (m.why) {
    *why = m.why;
    graph_free(m.g);
    return NULL;
  }
  return m.g;
}

void graph_free(struct graph *g) {
  free(g->model);
  free(g->values);
  free(g->nodes);
  free(g->problems);
  free(g->outputs);
  free(g);
}

const struct value *graph_find(const struct graph *g, enum kind kind, size_t index) {
  for (size_t i = 0; i < g->value_count; i++) {
    if (g->values[i].kind == kind && g->values[i].index == index) {
      return &g->values[i];
    }
  }
  return NULL;
}

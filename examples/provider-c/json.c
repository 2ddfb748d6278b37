#include "json.h"
#include "graph.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void text_add(struct text *text, const char *format, ...) {
  va_list list, again;
  va_start(list, format);
  va_copy(again, list);
  int needed = vsnprintf(NULL, 0, format, list);
  va_end(list);
  if (needed < 0) {
    text->failed = true;
  }
  if (!text->failed && text->len + (size_t)needed + 1 > text->room) {
    size_t room = 2 * text->room + (size_t)needed + 64;
    char *grown = realloc(text->ptr, room);
    if (grown) {
      text->ptr = grown;
      text->room = room;
    } else {
      text->failed = true;
    }
  }
  if (!text->failed) {
    vsnprintf(text->ptr + text->len, (size_t)needed + 1, format, again);
    text->len += (size_t)needed;
  }
  va_end(again);
}

void text_add_string(struct text *text, sdrun_str string) {
  text_add(text, "\"");
  for (size_t i = 0; i < string.len; i++) {
    uint8_t c = string.ptr[i];
    if (c == '"' || c == '\\') {
      text_add(text, "\\%c", c);
    } else if (c < 0x20) {
      text_add(text, "\\u%04x", c);
    } else {
      text_add(text, "%c", c);
    }
  }
  text_add(text, "\"");
}

static void release(sdrun_buffer *buffer) {
  free(buffer->owner);
  *buffer = (sdrun_buffer){0};
}

bool text_give(struct text *text, sdrun_buffer *to) {
  if (text->failed) {
    free(text->ptr);
    return false;
  }
  *to = (sdrun_buffer){(const uint8_t *)text->ptr, text->len, text->ptr, release};
  return true;
}

static size_t skip_space(sdrun_str s, size_t at) {
  while (at < s.len && (s.ptr[at] == ' ' || s.ptr[at] == '\n' || s.ptr[at] == '\t' || s.ptr[at] == '\r')) {
    at++;
  }
  return at;
}

/* Returns the position after the string that starts at `at`. */
static size_t skip_string(sdrun_str s, size_t at) {
  for (at++; at < s.len && s.ptr[at] != '"'; at++) {
    at += s.ptr[at] == '\\';
  }
  return at < s.len ? at + 1 : s.len;
}

/* Returns the position after the value that starts at `at`. */
static size_t skip_value(sdrun_str s, size_t at) {
  size_t depth = 0;
  while (at < s.len) {
    uint8_t c = s.ptr[at];
    if (depth == 0 && (c == ',' || c == '}' || c == ']')) {
      break;
    }
    depth += c == '{' || c == '[';
    depth -= c == '}' || c == ']';
    at = c == '"' ? skip_string(s, at) : at + 1;
  }
  return at;
}

/* Reads the next key and its value. Returns false at the end of the object. */
static bool next_member(sdrun_str object, size_t *at, sdrun_str *key, sdrun_str *value) {
  size_t start = skip_space(object, *at);
  if (start < object.len && (object.ptr[start] == '{' || object.ptr[start] == ',')) {
    start = skip_space(object, start + 1);
  }
  if (start >= object.len || object.ptr[start] != '"') {
    return false;
  }
  size_t end = skip_string(object, start);
  *key = (sdrun_str){object.ptr + start + 1, end - start - 2};
  size_t from = skip_space(object, end);
  from = skip_space(object, from + (from < object.len)); /* the colon */
  *at = skip_value(object, from);
  *value = (sdrun_str){object.ptr + from, *at - from};
  return true;
}

sdrun_str json_field(sdrun_str object, const char *name) {
  size_t at = 0;
  sdrun_str key, value;
  while (next_member(object, &at, &key, &value)) {
    if (str_is(key, name)) {
      return value;
    }
  }
  return (sdrun_str){NULL, 0};
}

sdrun_str json_first_key(sdrun_str object) {
  size_t at = 0;
  sdrun_str key, value;
  return next_member(object, &at, &key, &value) ? key : (sdrun_str){NULL, 0};
}

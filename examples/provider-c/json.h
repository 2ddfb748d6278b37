/* The JSON that a provider needs: a text builder, and a reader for the fields of an object. */
#ifndef JSON_H
#define JSON_H

#include "sdrun_provider.h"

#include <stdbool.h>

struct text {
  char *ptr;
  size_t len, room;
  bool failed; /* out of memory */
};

/* Appends text formatted as by printf. */
void text_add(struct text *text, const char *format, ...);
/* Appends a JSON string. */
void text_add_string(struct text *text, sdrun_str string);
/* Passes the text to the host. Returns false if memory ran out. */
bool text_give(struct text *text, sdrun_buffer *to);

/* Returns the raw text of a field of the outermost object, or an empty string if there is none. */
sdrun_str json_field(sdrun_str object, const char *name);
/* Returns the first key of an object without its quotes, or an empty string if there is none. */
sdrun_str json_first_key(sdrun_str object);

#endif

/* The little JSON that a provider needs: text that is built up, and the fields of an object. */
#ifndef JSON_H
#define JSON_H

#include "sdrun_provider.h"

#include <stdbool.h>

struct text {
  char *ptr;
  size_t len, room;
  bool failed; /* memory was short */
};

/* Appends as printf does. */
void text_add(struct text *text, const char *format, ...);
/* Appends a JSON string. */
void text_add_string(struct text *text, sdrun_str string);
/* Gives the text to the host; false where memory was short. */
bool text_give(struct text *text, sdrun_buffer *to);

/* The value of a field of the outermost object, as it is written; empty where there is none. */
sdrun_str json_field(sdrun_str object, const char *name);
/* The first key of an object, without its quotes; empty where it has none. */
sdrun_str json_first_key(sdrun_str object);

#endif

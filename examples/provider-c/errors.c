/* Errors for the ABI: values that carry their own release function. */
#include "provider.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct owned_error {
  sdrun_error raw;
  char message[512];
};

static void release_error(sdrun_error *error) {
  free(error->owner);
}

static void release_nothing(sdrun_error *error) {
  (void)error;
}

sdrun_error *no_memory(void) {
  static const char message[] = "out of memory";
  static sdrun_error error = {
      .struct_size = sizeof error,
      .code = RESOURCE_EXHAUSTED,
      .message = {(const uint8_t *)message, sizeof message - 1},
      .release = release_nothing,
  };
  return &error;
}

sdrun_error *fail(uint32_t code, const char *hint, const char *format, ...) {
  struct owned_error *error = calloc(1, sizeof *error);
  if (!error) {
    return no_memory();
  }
  va_list list;
  va_start(list, format);
  vsnprintf(error->message, sizeof error->message, format, list);
  va_end(list);
  error->raw = (sdrun_error){
      .struct_size = sizeof error->raw,
      .code = code,
      .message = {(const uint8_t *)error->message, strlen(error->message)},
      .hint = {(const uint8_t *)hint, strlen(hint)},
      .owner = error,
      .release = release_error,
  };
  return &error->raw;
}

/* Draws a picture: draw PROMPT PICTURE.png [MODEL]. Without a model it draws coloured shapes. Ctrl-C stops it.
 *
 *     cc draw.c -o draw $(pkg-config --cflags --libs sdrun)
 */

#include <sdrun.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static sdrun_cancel *cancel;

static void on_signal(int signal) {
  (void)signal;
  sdrun_cancel_set(cancel, 1);
}

static void on_progress(void *user, const char *what, uint64_t done, uint64_t of) {
  (void)user;
  if (of > 0) {
    fprintf(stderr, "%s %llu of %llu\n", what, (unsigned long long)done, (unsigned long long)of);
  }
}

/* Ends the program if a call failed. */
static void check(sdrun_failure *failure) {
  if (failure == NULL) {
    return;
  }
  const char *hint = sdrun_failure_hint(failure);
  fprintf(stderr, "error: %s\n", sdrun_failure_message(failure));
  if (hint != NULL) {
    fprintf(stderr, "hint: %s\n", hint);
  }
  sdrun_failure_free(failure);
  exit(1);
}

int main(int count, char **arguments) {
  if (count < 3) {
    fprintf(stderr, "usage: draw PROMPT PICTURE.png [MODEL]\n");
    return 2;
  }
  cancel = sdrun_cancel_new();
  signal(SIGINT, on_signal);

  sdrun_registry *registry;
  check(sdrun_registry_open(NULL, &registry));

  sdrun_calls calls = {sizeof calls};
  calls.progress = on_progress;
  calls.cancel = cancel;

  sdrun_pipeline_options options = {sizeof options};
  options.model = count > 3 ? arguments[3] : NULL;
  sdrun_pipeline *pipeline;
  check(sdrun_pipeline_open(registry, &options, &calls, &pipeline));

  sdrun_order order = {sizeof order};
  order.prompt = arguments[1];
  order.seed = 7;
  sdrun_pictures *pictures;
  check(sdrun_pipeline_generate(pipeline, &order, &calls, &pictures));
  check(sdrun_pictures_save(pictures, 0, arguments[2]));

  sdrun_pictures_free(pictures);
  sdrun_pipeline_free(pipeline);
  sdrun_registry_free(registry);
  sdrun_cancel_free(cancel);
  return 0;
}

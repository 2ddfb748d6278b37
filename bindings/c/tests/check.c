/* Calls every function, also with wrong arguments. Ends with 0 if all behave as the header says.
 *
 *     check GGML_MANIFEST FOLDER STEPS */

#include <sdrun.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(condition)                                                  \
  do {                                                                   \
    if (!(condition)) {                                                  \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
      exit(1);                                                           \
    }                                                                    \
  } while (0)

/* The call works. */
static void works(sdrun_failure *failure) {
  if (failure != NULL) {
    fprintf(stderr, "error: %s\n", sdrun_failure_message(failure));
    exit(1);
  }
}

/* The call fails with this code, and the sentence has these words. */
static void fails(sdrun_failure *failure, uint32_t code, const char *words) {
  MUST(failure != NULL);
  if (sdrun_failure_code(failure) != code || strstr(sdrun_failure_message(failure), words) == NULL) {
    fprintf(stderr, "code %u: %s\n", sdrun_failure_code(failure), sdrun_failure_message(failure));
    exit(1);
  }
  sdrun_failure_free(failure);
}

/* What the callbacks heard. */
typedef struct heard {
  int steps;
  int previews;
  int warnings;
  sdrun_cancel *cancel;
  int cancel_at;
} heard;

static void on_progress(void *user, const char *what, uint64_t done, uint64_t of) {
  heard *it = user;
  if (strcmp(what, "step") == 0 && of > 0) {
    it->steps++;
    MUST(done >= 1 && done <= of);
    if (it->steps == it->cancel_at) {
      sdrun_cancel_set(it->cancel, 1);
    }
  }
}

static void on_preview(void *user, const sdrun_image *image) {
  heard *it = user;
  MUST(image->width == 64 && image->height == 64);
  it->previews++;
}

static void on_log(void *user, uint32_t level, const char *message) {
  heard *it = user;
  MUST(level >= 1 && level <= 5 && message != NULL);
  it->warnings += level == 4;
}

static void nulls(void) {
  sdrun_registry_free(NULL);
  sdrun_devices_free(NULL);
  sdrun_session_free(NULL);
  sdrun_arrays_free(NULL);
  sdrun_pipeline_free(NULL);
  sdrun_pictures_free(NULL);
  sdrun_cancel_free(NULL);
  sdrun_cancel_set(NULL, 1);
  sdrun_failure_free(NULL);
  MUST(sdrun_failure_code(NULL) == 0 && sdrun_failure_message(NULL) == NULL && sdrun_failure_hint(NULL) == NULL);
  MUST(sdrun_devices_count(NULL) == 0 && sdrun_pictures_count(NULL) == 0 && sdrun_arrays_count(NULL) == 0);
  MUST(sdrun_session_provider(NULL) == NULL && sdrun_pipeline_family(NULL) == NULL);
  fails(sdrun_registry_open(NULL, NULL), SDRUN_INVALID_ARGUMENT, "result is null");
  sdrun_pipeline *pipeline = (sdrun_pipeline *)1;
  fails(sdrun_pipeline_open(NULL, NULL, NULL, &pipeline), SDRUN_INVALID_ARGUMENT, "null");
  sdrun_arrays *arrays;
  fails(sdrun_session_run(NULL, NULL, 0, NULL, &arrays), SDRUN_INVALID_ARGUMENT, "null");
}

static void devices(const sdrun_registry *registry) {
  sdrun_devices *found;
  works(sdrun_registry_devices(registry, NULL, &found));
  size_t count = sdrun_devices_count(found);
  MUST(count >= 1);
  sdrun_device_info info = {sizeof info};
  works(sdrun_devices_get(found, 0, &info));
  MUST(strcmp(info.provider, "ggml") == 0 && strcmp(info.id, "cpu") == 0 && strcmp(info.kind, "cpu") == 0);
  MUST(info.why_not == NULL && info.struct_size == sizeof info);
  fails(sdrun_devices_get(found, count, &info), SDRUN_OUT_OF_RANGE, "there is no device");
  info.struct_size = 0;
  fails(sdrun_devices_get(found, 0, &info), SDRUN_INVALID_ARGUMENT, "struct_size");
  /* A program from before the last fields existed. */
  sdrun_device_info old;
  memset(&old, 0x55, sizeof old);
  old.struct_size = offsetof(sdrun_device_info, id);
  works(sdrun_devices_get(found, 0, &old));
  MUST(strcmp(old.provider, "ggml") == 0 && (uintptr_t)old.id == UINTPTR_MAX / 3);
  sdrun_devices_free(found);
}

static void sessions(const sdrun_registry *registry) {
  const size_t dims[] = {1, 4, 2, 2};
  const sdrun_shape shape = {"latent_sample", dims, 4};
  sdrun_session_options options = {sizeof options};
  sdrun_session *session;
  fails(sdrun_session_open(registry, &options, NULL, &session), SDRUN_INVALID_ARGUMENT, "model is null");
  MUST(session == NULL);
  options.model = "taesd/decoderr";
  fails(sdrun_session_open(registry, &options, NULL, &session), SDRUN_NOT_FOUND, "taesd/decoderr");
  options.model = "taesd/decoder";
  options.shapes = &shape;
  options.shape_count = 1;
  options.place.precision = "fp33";
  fails(sdrun_session_open(registry, &options, NULL, &session), SDRUN_INVALID_ARGUMENT, "fp33");
  options.place.precision = "fp32";
  options.place.provider = "ggml";
  options.place.threads = 1;
  works(sdrun_session_open(registry, &options, NULL, &session));
  MUST(strcmp(sdrun_session_provider(session), "ggml") == 0 && strcmp(sdrun_session_device(session), "cpu") == 0);
  MUST(sdrun_session_input_count(session) == 1 && sdrun_session_output_count(session) == 1);
  sdrun_tensor_info input = {sizeof input};
  works(sdrun_session_input(session, 0, &input));
  MUST(strcmp(input.name, "latent_sample") == 0 && strcmp(input.dtype, "f32") == 0 && input.rank == 4);
  MUST(input.dims[0] == 1 && input.dims[1] == 4 && input.dims[3] == 2);
  sdrun_tensor_info output = {sizeof output};
  fails(sdrun_session_output(session, 1, &output), SDRUN_OUT_OF_RANGE, "there is no output 1");

  float values[4 * 2 * 2];
  for (size_t i = 0; i < 4 * 2 * 2; i++) {
    values[i] = (float)(i % 17) / 17;
  }
  sdrun_array array = {"latent_sample", "f32", dims, 4, values, sizeof values};
  sdrun_arrays *first;
  works(sdrun_session_run(session, &array, 1, NULL, &first));
  sdrun_array got;
  works(sdrun_arrays_get(first, 0, &got));
  MUST(got.rank == 4 && got.dims[1] == 3 && got.dims[2] == 16 && got.bytes == 3 * 16 * 16 * sizeof(float));
  MUST(isfinite(((const float *)got.data)[0]));
  fails(sdrun_arrays_get(first, 1, &got), SDRUN_OUT_OF_RANGE, "there is no array 1");

  size_t changed = 12345;
  works(sdrun_session_refit(session, NULL, NULL, 0, NULL, &changed));
  MUST(changed != 12345);
  sdrun_lora lora = {"/does/not/exist.safetensors", 1};
  fails(sdrun_session_refit(session, NULL, &lora, 1, NULL, NULL), SDRUN_NOT_FOUND, "exist.safetensors");
  sdrun_arrays *second;
  works(sdrun_session_run(session, &array, 1, NULL, &second));
  sdrun_array again;
  works(sdrun_arrays_get(first, 0, &got));
  works(sdrun_arrays_get(second, 0, &again));
  MUST(memcmp(got.data, again.data, got.bytes) == 0);
  sdrun_arrays_free(first);
  sdrun_arrays_free(second);

  array.bytes = 4;
  fails(sdrun_session_run(session, &array, 1, NULL, &first), SDRUN_INVALID_ARGUMENT, "latent_sample");
  MUST(first == NULL);
  array.bytes = sizeof values;
  array.dtype = "float";
  fails(sdrun_session_run(session, &array, 1, NULL, &first), SDRUN_INVALID_ARGUMENT, "use one of f32");
  array.dtype = "f32";
  array.name = "\xff";
  fails(sdrun_session_run(session, &array, 1, NULL, &first), SDRUN_INVALID_ARGUMENT, "not UTF-8");
  sdrun_session_free(session);
}

static void pictures(const sdrun_registry *registry, const char *folder, int steps) {
  heard it = {0};
  it.cancel = sdrun_cancel_new();
  sdrun_calls calls = {sizeof calls};
  calls.user = &it;
  calls.progress = on_progress;
  calls.log = on_log;
  calls.preview = on_preview;
  calls.cancel = it.cancel;

  sdrun_pipeline_options options = {sizeof options};
  options.place.provider = "ggml";
  options.place.threads = 1;
  sdrun_pipeline *pipeline;
  works(sdrun_pipeline_open(registry, &options, &calls, &pipeline));
  MUST(strlen(sdrun_pipeline_family(pipeline)) > 0);

  sdrun_order order = {sizeof order};
  sdrun_pictures *drawn;
  fails(sdrun_pipeline_generate(pipeline, &order, &calls, &drawn), SDRUN_INVALID_ARGUMENT, "prompt is null");
  order.prompt = "a red circle left of a blue zebra";
  order.seed = 7;
  order.steps = steps;
  order.count = 2;
  works(sdrun_pipeline_generate(pipeline, &order, &calls, &drawn));
  MUST(sdrun_pictures_count(drawn) == 2 && it.steps == 2 * steps && it.previews > 0 && it.warnings > 0);
  sdrun_picture_info info = {sizeof info};
  works(sdrun_pictures_get(drawn, 1, &info));
  MUST(info.seed == 8 && info.image.width == 64 && info.image.height == 64);
  char words[32];
  snprintf(words, sizeof words, "Steps: %d,", steps);
  MUST(strstr(info.parameters, words) != NULL);
  fails(sdrun_pictures_get(drawn, 2, &info), SDRUN_OUT_OF_RANGE, "there is no picture 2");

  char file[4096];
  snprintf(file, sizeof file, "%s/c.png", folder);
  works(sdrun_pictures_save(drawn, 0, file));
  snprintf(file, sizeof file, "%s/c.gif", folder);
  fails(sdrun_pictures_save(drawn, 0, file), SDRUN_INVALID_ARGUMENT, ".png");
  fails(sdrun_pictures_save(drawn, 0, "/does/not/exist/c.png"), SDRUN_NOT_FOUND, "exist");

  /* The right half anew; the left half keeps its bytes. */
  works(sdrun_pictures_get(drawn, 0, &info));
  uint8_t grey[64 * 64];
  for (int i = 0; i < 64 * 64; i++) {
    grey[i] = i % 64 < 32 ? 0 : 255;
  }
  sdrun_order change = {sizeof change};
  change.prompt = "a green star";
  change.steps = steps;
  change.image = info.image;
  change.strength = 1;
  change.mask.width = change.mask.height = 64;
  change.mask.grey = grey;
  change.mask_content = "noise";
  sdrun_pictures *changed;
  works(sdrun_pipeline_generate(pipeline, &change, &calls, &changed));
  sdrun_picture_info after = {sizeof after};
  works(sdrun_pictures_get(changed, 0, &after));
  int differs = 0;
  for (int i = 0; i < 64 * 64 * 3; i++) {
    int other = info.image.rgb[i] != after.image.rgb[i];
    MUST(!other || i / 3 % 64 >= 32);
    differs |= other;
  }
  MUST(differs);
  sdrun_pictures_free(changed);
  change.mask_content = "something";
  fails(sdrun_pipeline_generate(pipeline, &change, NULL, &changed), SDRUN_INVALID_ARGUMENT, "something");
  change.mask_content = NULL;
  change.image.rgb = NULL;
  fails(sdrun_pipeline_generate(pipeline, &change, NULL, &changed), SDRUN_INVALID_ARGUMENT, "a mask needs the image");

  /* A program from before the later fields existed draws the same picture. */
  sdrun_order old = {offsetof(sdrun_order, variation_seed)};
  old.prompt = order.prompt;
  old.seed = order.seed;
  old.steps = order.steps;
  sdrun_pictures *same;
  works(sdrun_pipeline_generate(pipeline, &old, NULL, &same));
  works(sdrun_pictures_get(same, 0, &after));
  MUST(memcmp(info.image.rgb, after.image.rgb, 64 * 64 * 3) == 0);
  sdrun_pictures_free(same);
  sdrun_pictures_free(drawn);

  /* Cancelled in the second picture: the first one is there. */
  it.steps = 0;
  it.cancel_at = steps + 1;
  fails(sdrun_pipeline_generate(pipeline, &order, &calls, &drawn), SDRUN_CANCELLED, "cancel");
  MUST(sdrun_pictures_count(drawn) == 1 && it.steps == it.cancel_at);
  sdrun_pictures_free(drawn);
  sdrun_cancel_set(it.cancel, 0);
  it.cancel_at = 0;
  works(sdrun_pipeline_generate(pipeline, &order, &calls, &drawn));
  sdrun_pictures_free(drawn);
  order.sampler = "magic";
  fails(sdrun_pipeline_generate(pipeline, &order, &calls, &drawn), SDRUN_INVALID_ARGUMENT, "no sampler");

  sdrun_pipeline_free(pipeline);
  sdrun_cancel_free(it.cancel);
}

int main(int count, char **arguments) {
  MUST(count == 4 && strlen(sdrun_version()) >= 5);
  nulls();
  const char *paths[] = {arguments[1]};
  sdrun_registry_options options = {sizeof options, paths, 1};
  sdrun_registry *registry;
  works(sdrun_registry_open(&options, &registry));
  devices(registry);
  sessions(registry);
  pictures(registry, arguments[2], atoi(arguments[3]));
  sdrun_registry_free(registry);
  puts("all as the header says");
  return 0;
}

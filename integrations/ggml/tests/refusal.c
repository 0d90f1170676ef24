/* A host whose ggml has a version that was not tried, or settings that make no sense: the plugin
 * says so in the host's log and is not loaded; the host goes on. */
#include <dlfcn.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef ggml_backend_reg_t (*init_function)(void);

static const char* version = "0.25.3";
static char logged[1000];

/* The plugin looks its host's functions up, and finds this one first. */
const char* ggml_version(void) { return version; }

static void keep(enum ggml_log_level level, const char* text, void* data) {
  (void)level, (void)data;
  strncat(logged, text, sizeof logged - strlen(logged) - 1);
}

static int is_refused(init_function init, const char* sentence) {
  logged[0] = '\0';
  if (init() != NULL || strcmp(logged, sentence) != 0) {
    fprintf(stderr, "expected '%s', got '%s'\n", sentence, logged);
    return 0;
  }
  return 1;
}

int main(int count, char** arguments) {
  void* plugin = dlopen(count > 1 ? arguments[1] : "", RTLD_NOW | RTLD_LOCAL);
  init_function init = plugin ? (init_function)dlsym(plugin, "ggml_backend_init") : NULL;
  if (init == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
  ggml_log_set(keep, NULL);
  (void)ggml_backend_dev_count(); /* a host has ggml's registry loaded */
  version = "0.99.0";
  int good = is_refused(init,
                        "pariskv: not used: expected a version of ggml that was tried (0.25.1, "
                        "0.25.3), got 0.99.0\n");
  version = "0.25.3";
  setenv("PARISKV_GGML", "top_k=many", 1);
  good &= is_refused(init,
                     "pariskv: not used: [PARISKV_GGML] top_k: expected a whole number from 1 to "
                     "8388608, got 'many'\n");
  setenv("PARISKV_GGML", "top_k=50", 1);
  good &= init() != NULL;
  return good ? 0 : 1;
}

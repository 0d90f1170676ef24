/* Every call of the library from C: one line for each test, and the number of failures as status.
 */
#include "check.h"

int failures = 0;
int checks = 0;

typedef struct {
  const char* name;
  void (*run)(void);
} Test;

static const Test kTests[] = {
    {"life", test_life},
    {"policies", test_policies},
    {"files", test_files},
    {"borrowed_rows", test_borrowed_rows},
    {"wrong_input", test_wrong_input},
    {"sizes", test_sizes},
    {"fuzzed_configs", test_fuzzed_configs},
    {"fuzzed_tensors", test_fuzzed_tensors},
    {"fuzzed_calls", test_fuzzed_calls},
    {"memory", test_memory},
    {"executor", test_executor},
    {"stop", test_stop},
    {"errors_of_threads", test_errors_of_threads},
};

/** Whether a test is among those that are asked for: all of them, or some by name. */
static int is_wanted(const char* name, int count, char** words) {
  for (int i = 1; i < count; ++i) {
    if (strcmp(words[i], name) == 0) return 1;
  }
  return count <= 1;
}

int main(int count, char** words) {
  int run = 0;
  for (size_t i = 0; i < sizeof kTests / sizeof kTests[0]; ++i) {
    if (!is_wanted(kTests[i].name, count, words)) continue;
    const int failed = failures, checked = checks;
    kTests[i].run();
    printf("%-18s %6d checks, %d failed\n", kTests[i].name, checks - checked, failures - failed);
    ++run;
  }
  if (run == 0) printf("there is no test of that name\n");
  return failures > 0 || run == 0;
}

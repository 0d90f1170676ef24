/** Checks for a program in C: a failure is printed and counted, and the test goes on. */
#pragma once

#include <stdio.h>
#include <string.h>

#include "pariskv/c.h"

extern int failures;
extern int checks;

/** A test with a name; main.c has the list. */
void test_life(void);
void test_policies(void);
void test_files(void);
void test_borrowed_rows(void);
void test_wrong_input(void);
void test_sizes(void);
void test_fuzzed_configs(void);
void test_fuzzed_tensors(void);
void test_fuzzed_calls(void);
void test_memory(void);
void test_executor(void);
void test_stop(void);
void test_errors_of_threads(void);

#define CHECK(condition)                                               \
  do {                                                                 \
    ++checks;                                                          \
    if (!(condition)) {                                                \
      ++failures;                                                      \
      printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                  \
  } while (0)

/** A call that has to succeed. */
#define OK(call)                                                                  \
  do {                                                                            \
    ++checks;                                                                     \
    if ((call) != PARISKV_OK) {                                                   \
      ++failures;                                                                 \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, pariskv_last_error()); \
    }                                                                             \
  } while (0)

/** A call that has to fail with a status, and a sentence that has these words. */
#define REFUSED(status, words, call)                                                        \
  do {                                                                                      \
    const pariskv_status got = (call);                                                      \
    ++checks;                                                                               \
    if (got != (status) || strstr(pariskv_last_error(), words) == NULL) {                   \
      ++failures;                                                                           \
      printf("%s:%d: %s: expected %s with \"%s\", got %s: %s\n", __FILE__, __LINE__, #call, \
             pariskv_status_name(status), words, pariskv_status_name(got),                  \
             got == PARISKV_OK ? "" : pariskv_last_error());                                \
    }                                                                                       \
  } while (0)

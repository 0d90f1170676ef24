/** Tensors and options, from C's structs to C++'s. */
#pragma once

#include <optional>
#include <string>

#include "pariskv/c_types.h"
#include "pariskv/cache.h"

namespace pariskv::c {

/** @param verb, argument  for errors: "[decode] q" */
TensorView view_of(const char* verb, const char* argument, const pariskv_tensor* given);

pariskv_tensor tensor_of(const TensorView& view);

/**
 * @param batch  sequences of the call
 * @param given  may be null: the defaults
 */
AttendOptions options_of(const char* verb, int64_t batch, const pariskv_attend_options* given);
PrefillOptions options_of(const char* verb, int64_t batch, const pariskv_prefill_options* given);
/** Where a prefill is to say which sequences pages do not serve; null: nowhere. */
int32_t* unserved_of(const pariskv_prefill_options* given);

/** Whether a call brings keys and values; throws where it brings one of both. */
bool brings_rows(const char* verb, const pariskv_tensor* k, const pariskv_tensor* v);

}  // namespace pariskv::c

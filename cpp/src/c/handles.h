/** The handles of C: an object of C++, and what C has to see of it. */
#pragma once

#include "c/settings.h"
#include "check.h"
#include "pariskv/cache.h"

struct pariskv_cache {
  pariskv_cache(const pariskv::Config& config, const pariskv::Resources& resources)
      : cache(config, resources), settings(cache.config()) {}

  pariskv::Cache cache;
  const pariskv::c::Settings settings;  // of its config, for pariskv_cache_config
};

struct pariskv_batch {
  pariskv::Batch batch;
};

namespace pariskv::c {

inline Cache& cache_of(const char* verb, pariskv_cache* cache) {
  if (cache == nullptr) fail("[", verb, "] cache: expected a cache, got a null pointer");
  return cache->cache;
}

inline const Cache& cache_of(const char* verb, const pariskv_cache* cache) {
  return cache_of(verb, const_cast<pariskv_cache*>(cache));
}

inline const Batch& batch_of(const char* verb, const pariskv_batch* batch) {
  if (batch == nullptr) fail("[", verb, "] batch: expected a batch, got a null pointer");
  return batch->batch;
}

/** One number for each sequence of a batch. */
inline std::vector<int64_t> numbers_of(const char* verb, const char* argument, const Batch& batch,
                                       const int64_t* numbers) {
  if (numbers == nullptr && batch.size() > 0) {
    fail("[", verb, "] ", argument, ": expected one for each of the ", batch.size(),
         " sequences, got a null pointer");
  }
  return {numbers, numbers + batch.size()};
}

}  // namespace pariskv::c

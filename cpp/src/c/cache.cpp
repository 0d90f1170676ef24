// Caches and their sequences come, change and go.
#include "c/handles.h"
#include "c/status.h"
#include "c/structs.h"

using namespace pariskv;
using pariskv::c::answer;
using pariskv::c::batch_of;
using pariskv::c::cache_of;
using pariskv::c::check_result;

namespace {

std::string path_of(const char* verb, const char* path) {
  if (path == nullptr) fail("[", verb, "] path: expected the path of a file, got a null pointer");
  return path;
}

}  // namespace

pariskv_status pariskv_cache_create(const pariskv_config* config,
                                    const pariskv_resources* resources, pariskv_cache** cache) {
  return answer([&] {
    check_result("cache_create", "cache", cache);
    *cache =
        std::make_unique<pariskv_cache>(c::config_of(config), c::resources_of(resources)).release();
  });
}

void pariskv_cache_destroy(pariskv_cache* cache) { delete cache; }

pariskv_status pariskv_cache_config(const pariskv_cache* cache, pariskv_config* config) {
  return answer([&] {
    cache_of("cache_config", cache);
    c::check_place("[cache_config] config", config);
    c::hand_out(config, cache->settings.config());
  });
}

pariskv_status pariskv_cache_add(pariskv_cache* cache, pariskv_sequence* sequence) {
  return answer([&] {
    Cache& found = cache_of("add", cache);
    check_result("add", "sequence", sequence);
    *sequence = found.add();
  });
}

pariskv_status pariskv_cache_remove(pariskv_cache* cache, pariskv_sequence sequence, void* stream) {
  return answer([&] { cache_of("remove", cache).remove(sequence, Stream{stream}); });
}

pariskv_status pariskv_cache_fork(pariskv_cache* cache, pariskv_sequence sequence, void* stream,
                                  pariskv_sequence* forked) {
  return answer([&] {
    Cache& found = cache_of("fork", cache);
    check_result("fork", "forked", forked);
    *forked = found.fork(sequence, Stream{stream});
  });
}

pariskv_status pariskv_cache_fork_prefix(pariskv_cache* cache, pariskv_sequence sequence,
                                         int64_t tokens, void* stream, pariskv_sequence* forked) {
  return answer([&] {
    Cache& found = cache_of("fork", cache);
    check_result("fork", "forked", forked);
    *forked = found.fork_prefix(sequence, tokens, Stream{stream});
  });
}

pariskv_status pariskv_batch_create(const pariskv_cache* cache, const pariskv_sequence* sequences,
                                    int64_t count, pariskv_batch** batch) {
  return answer([&] {
    const Cache& found = cache_of("batch", cache);
    check_result("batch", "batch", batch);
    constexpr int64_t kMost = int64_t{1} << 32;  // more do not fit into memory
    if (count < 0 || count > kMost) {
      fail("[batch] count: expected 0 to ", kMost, " sequences, got ", count);
    }
    if (sequences == nullptr && count > 0) {
      fail("[batch] sequences: expected ", count, " of them, got a null pointer");
    }
    Batch made = found.batch({sequences, sequences + count});
    *batch = new pariskv_batch{std::move(made)};
  });
}

void pariskv_batch_destroy(pariskv_batch* batch) { delete batch; }

pariskv_status pariskv_cache_reorder(pariskv_cache* cache, const pariskv_batch* batch,
                                     const int64_t* source, void* stream) {
  return answer([&] {
    Cache& found = cache_of("reorder", cache);
    const Batch& sequences = batch_of("reorder", batch);
    found.reorder(sequences, c::numbers_of("reorder", "source", sequences, source), Stream{stream});
  });
}

pariskv_status pariskv_cache_truncate(pariskv_cache* cache, const pariskv_batch* batch, int32_t cut,
                                      const int64_t* tokens, void* stream) {
  return answer([&] {
    Cache& found = cache_of("truncate", cache);
    const Batch& sequences = batch_of("truncate", batch);
    const auto counts =
        c::enum_of<Cut::Counts>("[truncate] cut", cut, {"drop the last ones", "keep the first"});
    found.truncate(sequences, {counts, c::numbers_of("truncate", "tokens", sequences, tokens)},
                   Stream{stream});
  });
}

pariskv_status pariskv_cache_advance(pariskv_cache* cache, const pariskv_batch* batch,
                                     void* stream) {
  return answer(
      [&] { cache_of("advance", cache).advance(batch_of("advance", batch), Stream{stream}); });
}

pariskv_status pariskv_cache_flush(pariskv_cache* cache, const pariskv_batch* batch, void* stream) {
  return answer([&] { cache_of("flush", cache).flush(batch_of("flush", batch), Stream{stream}); });
}

pariskv_status pariskv_cache_flush_all(pariskv_cache* cache, void* stream) {
  return answer([&] { cache_of("flush_all", cache).flush_all(Stream{stream}); });
}

pariskv_status pariskv_cache_save(const pariskv_cache* cache, pariskv_sequence sequence,
                                  const char* path) {
  return answer([&] { cache_of("save", cache).save(sequence, path_of("save", path)); });
}

pariskv_status pariskv_cache_load(pariskv_cache* cache, const char* path, void* stream,
                                  pariskv_sequence* sequence) {
  return answer([&] {
    Cache& found = cache_of("load", cache);
    check_result("load", "sequence", sequence);
    *sequence = found.load(path_of("load", path), Stream{stream});
  });
}

pariskv_status pariskv_cache_reserve(pariskv_cache* cache, int64_t tokens, int64_t sequences) {
  return answer([&] { cache_of("reserve", cache).reserve(tokens, sequences); });
}

pariskv_status pariskv_cache_reserve_device(pariskv_cache* cache, int64_t bytes) {
  return answer([&] { cache_of("reserve_device", cache).reserve_device(bytes); });
}

pariskv_status pariskv_cache_reserve_host(pariskv_cache* cache, int64_t bytes, int32_t background) {
  return answer([&] { cache_of("reserve_host", cache).reserve_host(bytes, background != 0); });
}

pariskv_status pariskv_cache_trim(pariskv_cache* cache) {
  return answer([&] { cache_of("trim", cache).trim(); });
}

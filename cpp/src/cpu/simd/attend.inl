// Exact attention over Lanes16; included after float_verbs.inl, by the same files.

namespace pariskv::cpu {
namespace {

/** Queries whose logits of a tile are kept at a time. */
constexpr int64_t kQueryBlock = 64;

/** Vectors of a V row that all queries take before the next ones: a tile of them stays cached. */
constexpr int kColumnBlock = 4;

/** A tile of rows, and what becomes of it for each query. */
struct Tile {
  // One half (K or V) of every row. Up to a multiple of 4, the last row stands in.
  const void* rows[kAttendTile];
  int64_t count;
  int64_t visible[kQueryBlock];
  float keep[kQueryBlock];                   // what earlier sums are multiplied by
  float weights[kQueryBlock * kAttendTile];  // logits at first
};

/**
 * Halves of rows that are wanted soon: asked for while earlier ones are worked on. Those of the
 * tile after them go to the second-level cache: more of these can be on their way at a time.
 */
struct Coming {
  const void* const* rows;
  int64_t count;
  int64_t left;  // rows of the run, from the first of these on
  int64_t bytes;

  PKV_INLINE void prefetch(int64_t row) const {
    if (row >= count) return;
    ask<_MM_HINT_T0>(row);
    if (row + kAttendTile < left) ask<_MM_HINT_T1>(row + kAttendTile);
  }

 private:
  template <_mm_hint kHint>
  PKV_INLINE void ask(int64_t row) const {
    const char* half = static_cast<const char*>(rows[row]);
    for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch(half + byte, kHint);
  }
};

constexpr Coming kNothing = {nullptr, 0, 0, 0};

/** Logits of 4 rows for kQueries queries. */
template <typename Source, int kQueries>
PKV_INLINE void dot_four(const void* const* rows, const float* query, int64_t dim, float scale,
                         float* logits) {
  Source halves[4];
  PKV_UNROLL
  for (int r = 0; r < 4; ++r) halves[r] = Source(rows[r], dim);
  Lanes16 sums[kQueries][4];
  PKV_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    PKV_UNROLL
    for (int r = 0; r < 4; ++r) sums[q][r] = all(0);
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    Lanes16 row[4];
    PKV_UNROLL
    for (int r = 0; r < 4; ++r) row[r] = halves[r].load16(d);
    PKV_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const Lanes16 x = load(query + q * dim + d);
      PKV_UNROLL
      for (int r = 0; r < 4; ++r) sums[q][r] = multiply_add(x, row[r], sums[q][r]);
    }
  }
  PKV_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    _mm_storeu_ps(logits + q * kAttendTile, _mm_mul_ps(fold4(sums[q]), _mm_set1_ps(scale)));
  }
}

template <typename Source, int kQueries>
void dot_rows(const AttendRun& run, Tile& tile, int64_t q, const Coming& coming) {
  int64_t seen = 0;
  for (int j = 0; j < kQueries; ++j) seen = greater(seen, tile.visible[q + j]);
  for (int64_t r = 0; r < seen; r += 4) {
    for (int64_t k = r; k < r + 4; ++k) coming.prefetch(k);
    dot_four<Source, kQueries>(tile.rows + r, run.query + q * run.key_dim, run.key_dim, run.scale,
                               tile.weights + q * kAttendTile + r);
  }
}

template <typename Source>
void dot_tile(const AttendRun& run, Tile& tile, const Coming& coming) {
  int64_t q = 0;
  for (; q + kQueryTile <= run.queries; q += kQueryTile) {
    dot_rows<Source, kQueryTile>(run, tile, q, q == 0 ? coming : kNothing);
  }
  for (; q < run.queries; ++q) dot_rows<Source, 1>(run, tile, q, q == 0 ? coming : kNothing);
}

/** Adds the squares of a tile's weights; what was there before counts `keep` squared times. */
PKV_INLINE void square_weights(const float* weights, int64_t visible, __m128 keep, float& squares) {
  Lanes16 total = all(0);
  for (int64_t r = 0; r < visible; r += kLanes) {
    const Lanes16 some = load_first(weights + r, lesser(kLanes, visible - r));  // then zeros
    total = multiply_add(some, some, total);
  }
  const __m128 before = _mm_mul_ss(keep, keep);
  squares = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(squares), before, _mm_set_ss(fold(total))));
}

/** The logits of query `q` to weights, under its new maximum. */
void soften(const AttendRun& run, Tile& tile, int64_t q) {
  const int64_t visible = tile.visible[q];
  float* weights = tile.weights + q * kAttendTile;
  tile.keep[q] = 1;
  if (visible == 0) return;
  if (run.shift != nullptr) {
    for (int64_t r = 0; r < visible; ++r) weights[r] = weights[r] + run.shift[q];
  }
  if (run.softcap > 0) {
    for (int64_t r = 0; r < visible; ++r) {
      weights[r] = run.softcap * tanhf(weights[r] / run.softcap);
    }
  }

  Lanes16 largest = all(-kInfinity);
  for (int64_t r = 0; r < visible; r += kLanes) {
    const int64_t count = lesser(kLanes, visible - r);
    const Lanes16 logits = load_first(weights + r, count);
    largest = select(first(count), larger(largest, logits), largest);
  }
  const float tallest = fold_largest(largest);
  const float top = run.maximum[q] > tallest ? run.maximum[q] : tallest;

  Lanes16 total = all(0);
  for (int64_t r = 0; r < visible; r += kLanes) {
    const int64_t count = lesser(kLanes, visible - r);
    const Lanes16 weight = exponential(load_first(weights + r, count) - all(top));
    store_first(weights + r, weight, count);
    total = total + select(first(count), weight, all(0));
  }
  const __m128 keep = _mm256_castps256_ps128(low(exponential(all(run.maximum[q] - top))));
  const __m128 sum = _mm_fmadd_ss(_mm_set_ss(run.sum[q]), keep, _mm_set_ss(fold(total)));
  tile.keep[q] = _mm_cvtss_f32(keep);
  run.maximum[q] = top;
  run.sum[q] = _mm_cvtss_f32(sum);
  if (run.squares != nullptr) square_weights(weights, visible, keep, run.squares[q]);
}

/** weighted = weighted * keep + weights * rows, row by row, for kVectors vectors of the rows. */
template <typename Source, int kQueries, int kVectors>
PKV_INLINE void mix_columns(const Tile& tile, int64_t q, int64_t begin, int64_t end, int64_t d,
                            int64_t dim, const float* keep, float* weighted, const Coming& coming) {
  Lanes16 sums[kQueries][kVectors];
  PKV_UNROLL
  for (int j = 0; j < kQueries; ++j) {
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[j][v] = load(weighted + (q + j) * dim + d + v * kLanes) * all(keep[j]);
    }
  }
  for (int64_t r = begin; r < end; ++r) {
    coming.prefetch(r);
    Lanes16 row[kVectors];
    const Source half(tile.rows[r], dim);
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) row[v] = half.load16(d + v * kLanes);
    PKV_UNROLL
    for (int j = 0; j < kQueries; ++j) {
      const Lanes16 weight = all(tile.weights[(q + j) * kAttendTile + r]);
      PKV_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[j][v] = multiply_add(weight, row[v], sums[j][v]);
    }
  }
  PKV_UNROLL
  for (int j = 0; j < kQueries; ++j) {
    PKV_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      store(weighted + (q + j) * dim + d + v * kLanes, sums[j][v]);
    }
  }
}

/** Vectors d to d + kVectors of all queries. */
template <typename Source, int kVectors>
void mix_block(const AttendRun& run, const Tile& tile, int64_t d, const Coming& coming) {
  const int64_t dim = run.value_dim;
  int64_t q = 0;
  for (; q + kQueryTile <= run.queries; q += kQueryTile) {
    // Rows that all of these queries see, then what each sees beyond.
    int64_t common = tile.count;
    for (int j = 0; j < kQueryTile; ++j) common = lesser(common, tile.visible[q + j]);
    mix_columns<Source, kQueryTile, kVectors>(tile, q, 0, common, d, dim, tile.keep + q,
                                              run.weighted, q == 0 ? coming : kNothing);
    for (int64_t one = q; one < q + kQueryTile; ++one) {
      if (tile.visible[one] == common) continue;
      const float as_is = 1;
      mix_columns<Source, 1, kVectors>(tile, one, common, tile.visible[one], d, dim, &as_is,
                                       run.weighted, kNothing);
    }
  }
  for (; q < run.queries; ++q) {
    mix_columns<Source, 1, kVectors>(tile, q, 0, tile.visible[q], d, dim, tile.keep + q,
                                     run.weighted, q == 0 ? coming : kNothing);
  }
}

template <typename Source>
void mix_tile(const AttendRun& run, const Tile& tile, const Coming& coming) {
  int64_t d = 0;
  for (; d + kColumnBlock * kLanes <= run.value_dim; d += kColumnBlock * kLanes) {
    mix_block<Source, kColumnBlock>(run, tile, d, d == 0 ? coming : kNothing);
  }
  for (; d < run.value_dim; d += kLanes) mix_block<Source, 1>(run, tile, d, kNothing);
}

/** Lets the tile's rows be these. */
void point(Tile& tile, const void* const* rows) {
  for (int64_t r = 0; r < (tile.count + 3) / 4 * 4; ++r) {
    tile.rows[r] = rows[lesser(r, tile.count - 1)];
  }
}

/** Lets the tile's rows be floats in scratch, made from the `dim` numbers of each of `rows`. */
template <typename Source>
void widen(const AttendRun& run, Tile& tile, const void* const* rows, int64_t dim,
           const Coming& coming) {
  for (int64_t r = 0; r < tile.count; ++r) {
    coming.prefetch(r);
    to_float_from(Source(rows[r], dim), dim, run.scratch + r * dim);
  }
  for (int64_t r = 0; r < (tile.count + 3) / 4 * 4; ++r) {
    tile.rows[r] = run.scratch + lesser(r, tile.count - 1) * dim;
  }
}

/** Whether rows are turned to floats once for all queries. */
template <typename Source>
PKV_INLINE bool widens(const AttendRun& run) {
  return Source::kBytes < 4 && run.queries > kDirectQueries;
}

/** The logits of a tile of keys, while `coming` is asked for. */
template <typename Source>
void take_keys(const AttendRun& run, Tile& tile, const void* const* keys, const Coming& coming) {
  if (widens<Source>(run)) {
    widen<Source>(run, tile, keys, run.key_dim, coming);
    dot_tile<Float32>(run, tile, kNothing);
  } else {
    point(tile, keys);
    dot_tile<Source>(run, tile, coming);
  }
}

/** The same of its values, to the weighted sums. */
template <typename Source>
void take_values(const AttendRun& run, Tile& tile, const void* const* values,
                 const Coming& coming) {
  if (widens<Source>(run)) {
    widen<Source>(run, tile, values, run.value_dim, coming);
    mix_tile<Float32>(run, tile, kNothing);
  } else {
    point(tile, values);
    mix_tile<Source>(run, tile, coming);
  }
}

/** What is done with a tile of keys and with one of values, for the types that they have. */
struct TileSteps {
  using Step = void (*)(const AttendRun&, Tile&, const void* const*, const Coming&);
  Step keys = nullptr, values = nullptr;
  int64_t key_bytes = 0, value_bytes = 0;  // of a row's numbers

  PKV_INLINE explicit TileSteps(const AttendRun& run) {
    with_source(run.key_type, [&](auto kind) {
      keys = take_keys<decltype(kind)>;
      key_bytes = decltype(kind)::bytes_of(run.key_dim);
    });
    with_source(run.value_type, [&](auto kind) {
      values = take_values<decltype(kind)>;
      value_bytes = decltype(kind)::bytes_of(run.value_dim);
    });
  }
};

/** At most kQueryBlock queries. */
void attend_block(const AttendRun& run, const TileSteps& steps) {
  int64_t deepest = 0;
  for (int64_t q = 0; q < run.queries; ++q) deepest = greater(deepest, run.limits[q]);
  deepest = lesser(deepest, run.count);

  Tile tile;
  for (int64_t begin = 0; begin < deepest; begin += kAttendTile) {
    tile.count = lesser(kAttendTile, deepest - begin);
    for (int64_t q = 0; q < run.queries; ++q) {
      tile.visible[q] = greater(0, lesser(tile.count, run.limits[q] - begin));
    }
    const void* const* keys = run.keys + begin;
    const void* const* values = run.values + begin;
    const int64_t left = deepest - begin, next = left - tile.count;
    steps.keys(run, tile, keys, {values, tile.count, left, steps.value_bytes});
    for (int64_t q = 0; q < run.queries; ++q) soften(run, tile, q);
    steps.values(run, tile, values,
                 {keys + tile.count, lesser(kAttendTile, next), next, steps.key_bytes});
  }
}

void attend(const AttendRun& run) {
  const TileSteps steps(run);
  for (int64_t q = 0; q < run.queries; q += kQueryBlock) {
    AttendRun block = run;
    block.queries = lesser(kQueryBlock, run.queries - q);
    block.query += q * run.key_dim;
    block.limits += q;
    if (run.shift != nullptr) block.shift += q;
    block.maximum += q;
    block.sum += q;
    block.weighted += q * run.value_dim;
    if (run.squares != nullptr) block.squares += q;
    attend_block(block, steps);
  }
}

}  // namespace
}  // namespace pariskv::cpu

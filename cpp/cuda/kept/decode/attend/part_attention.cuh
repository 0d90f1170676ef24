/**
 * Attention of the query heads of a kv head over kept rows, for 16-bit elements, on the tensor
 * cores. The rows of a head are cut into parts, a part into steps of 64 rows, and a step into a
 * tile of 16 rows for each warp. A warp loads keys and values of a tile at once, straight into the
 * registers where the instructions want them, and never waits for another warp until its part is
 * over: then the sums of the warps are put together in shared memory. The loads of the next tile
 * are on their way meanwhile. A part leaves the same as in device/attend.cuh: maximum, sum,
 * weighted values.
 */
#pragma once

#include <type_traits>

#include "device/direct_rows.cuh"
#include "kept/decode/context.cuh"

namespace pariskv::cuda {

using device::kDirectHeads, device::kDirectThreads, device::kDirectWarps;
constexpr int kTileRows = kStepRows / kDirectWarps;
static_assert(kTileRows == 16, "rows of an instruction that weighs values");

/** Dimensions of values of a pass. */
template <int kWords>
constexpr int kPassValues = 32 * (kWords < 8 ? kWords : 8);

/** The results of a warp for a part. */
template <int kWords>
struct WarpSums {
  float2 softmax[kDirectHeads];                                // maximum, sum
  float2 weighted[kDirectHeads][kPassValues<kWords> / 2 + 1];  // two neighbouring dimensions
};

/** Two rows come after it: the new one, as a stored one, and one of zeros. */
template <int kWords, typename Element>
struct PartSpace {
  alignas(16) device::DirectQueries<kWords, Element> query;
  alignas(16) const char* rows[kDirectWarps][kTileRows];  // of a tile: zeros where there is none
  WarpSums<kWords> sums[2][kDirectWarps];  // by turns, so that a part has one barrier
};
static_assert(sizeof(PartSpace<4, __half>) % 16 == 0);

template <int kWords, typename Element, typename Address>
class PartAttention {
 public:
  /**
   * @param blocks   that share the parts of a head, of which this is `rank`
   * @param address  address(i) is where row i lies, not asked for the new row
   */
  __device__ __forceinline__ PartAttention(const device::AttendShape& shape,
                                           PartSpace<kWords, Element>& space, HeadParts parts,
                                           int rank, int blocks,
                                           const device::NewRow<Element>& new_row,
                                           const Address& address)
      : shape_(shape),
        space_(space),
        parts_(parts),
        rank_(rank),
        blocks_(blocks),
        new_row_(new_row),
        address_(address) {}

  /**
   * All heads of the group, some at a time.
   * @param q    (group, key_dim), `stride` elements apart
   * @param out  (parts, group, 2 + value_dim)
   */
  __device__ __forceinline__ void run(const Element* q, int64_t stride, float* out) {
#pragma unroll 1
    for (int head = 0; head < shape_.group; head += kDirectHeads) {
      if (head > 0) __syncthreads();
      stage(q + head * stride, stride, head);
      __syncthreads();
#pragma unroll 1
      for (int value = 0; value < shape_.value_dim; value += kPassValues<kWords>) {
        pass(head, value, out);
      }
    }
  }

 private:
  /** Keys come with the values, unless they are too many for the registers of a warp. */
  static constexpr bool kAtOnce = kWords <= 4;
  static constexpr int kChunks = kPassValues<kWords> / 64;  // 16 bytes of a row each, of a lane
  static constexpr int kRuns = kTileRows / 8;

  using Reader = typename Address::Reader;

  __device__ __forceinline__ static int g() { return device::fragment_row(); }
  __device__ __forceinline__ static int t() { return device::fragment_pair(); }

  struct Keys {
    uint4 of[kRuns][kWords];  // of row 8 r + g the pieces t, t + 4, ...
  };
  struct Values {
    uint4 of[kRuns][2][kChunks];  // of rows 8 r + 2 t and 8 r + 2 t + 1 the pieces g, g + 8, ...
  };

  /** A warp's running softmax: `maximum` of head g % 4; `sum` of this lane's rows. */
  struct Sums {
    float maximum, sum;
    float weighted[kChunks][4][4];  // of a word of a chunk: two dimensions for two columns
  };

  /** Queries and the new row, which may lie anyhow, to where they are read in pieces. */
  __device__ __forceinline__ void stage(const Element* q, int64_t stride, int first_head) const {
    // By different warps, so that both take one trip to memory.
    constexpr int kHalf = kDirectThreads / 2;
    if (int(threadIdx.x) < kHalf) {
      device::stage_queries<kWords>(shape_, q, stride, first_head, space_.query);
    } else {
      for (int i = int(threadIdx.x) - kHalf; i < shape_.row_bytes / 16; i += kHalf) {
        reinterpret_cast<uint4*>(zeros())[i] = {};
      }
      if (new_row_.k != nullptr) device::stage_row<Reader>(shape_, new_row_, fresh());
    }
  }

  __device__ __forceinline__ char* fresh() const { return reinterpret_cast<char*>(&space_ + 1); }
  __device__ __forceinline__ char* zeros() const { return fresh() + shape_.row_bytes; }

  /** Where a row lies. */
  __device__ __forceinline__ const char* find(int row, int end) const {
    if (row >= end) return zeros();
    const bool is_new = new_row_.k != nullptr && row == new_row_.index;
    return is_new ? fresh() : address_(row);
  }

  /** A piece of a row; left as it is, which is zeros, where the row has none. */
  __device__ __forceinline__ static void load(uint4& piece, const char* half, int d, int dim) {
    if (d < dim) piece = Reader::piece(half, d);
  }

  /** Notes where the rows of a warp's tile of a step lie. */
  __device__ __forceinline__ void find_rows(int first, int end) const {
    __syncwarp();
    const int row = device::lane_id();
    if (row < kTileRows) {
      space_.rows[device::warp_id()][row] = find(first + kTileRows * device::warp_id() + row, end);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_keys(Keys& keys) const {
    const auto& rows = space_.rows[device::warp_id()];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const char* key = rows[8 * r + g()];
#pragma unroll
      for (int c = 0; c < kWords; ++c) {
        load(keys.of[r][c], key, 8 * (4 * c + t()), shape_.key_dim);
      }
    }
  }
  __device__ __forceinline__ void load_values(int first_value, Values& values) const {
    const auto& rows = space_.rows[device::warp_id()];
    const int offset = Reader::value_offset(shape_.key_dim);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const char* value = rows[8 * r + 2 * t() + i] + offset;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          load(values.of[r][i][c], value, first_value + 8 * (8 * c + g()), shape_.value_dim);
        }
      }
    }
  }

  struct KeysAndValues {
    Keys keys{};
    Values values{};
  };
  struct Nothing {};
  /** What is on its way ahead of its turn. Pieces that rows do not have stay zeros. */
  using Tile = std::conditional_t<kAtOnce, KeysAndValues, Nothing>;

  /** Logits of a run, of which `left` rows are there: of head g % 4, rows 2 t and 2 t + 1. */
  __device__ __forceinline__ float2 look_at(const uint4 (&keys)[kWords], int left) const {
    float2 logits = device::logits_of<kWords, Element, Reader>(space_.query, keys, shape_);
    if (2 * t() >= left) logits.x = -device::infinity();
    if (2 * t() + 1 >= left) logits.y = -device::infinity();
    return logits;
  }

  __device__ __forceinline__ void look_at(const Keys& keys, int left,
                                          float2 (&logits)[kRuns]) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) logits[r] = look_at(keys.of[r], left - 8 * r);
  }

  /** The tile's maximum joins, and sums so far are rescaled. Returns the shift of logits. */
  __device__ __forceinline__ static float raise(const float2 (&logits)[kRuns], Sums& sums) {
    // fmaxf leaves NaN out of the maximum, the sum keeps it.
    float top = sums.maximum;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) top = fmaxf(top, fmaxf(logits[r].x, logits[r].y));
    float shift;
    const device::ColumnScales scales(device::raise_to(top, sums, shift));
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scales.apply(sums.weighted[c][j]);
    }
    return shift;
  }

  __device__ __forceinline__ static void add(const Values& values, const float2 (&logits)[kRuns],
                                             Sums& sums) {
    const float shift = raise(logits, sums);
    uint32_t weights[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) weights[r] = device::weigh<Element>(logits[r], shift, sums);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          const uint32_t one = word(values.of[r][0][c], j), other = word(values.of[r][1][c], j);
          a[2 * r] = __byte_perm(one, other, 0x5410);
          a[2 * r + 1] = __byte_perm(one, other, 0x7632);
        }
        device::multiply<Element>(sums.weighted[c][j], a, weights[0], weights[1]);
      }
    }
  }
  __device__ __forceinline__ static uint32_t word(const uint4& four, int j) {
    return j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w;
  }

  /** A warp's tile joins its sums. `left`: rows from the tile's first one to the end of the part.
   */
  __device__ __forceinline__ void attend(const Tile& tile, int first_value, int left,
                                         Sums& sums) const {
    float2 logits[kRuns];
    if constexpr (kAtOnce) {
      look_at(tile.keys, left, logits);
      add(tile.values, logits, sums);
    } else {
      Keys keys{};
      load_keys(keys);
      look_at(keys, left, logits);
      Values values{};
      load_values(first_value, values);
      add(values, logits, sums);
    }
  }

  /** A warp's sums of a part, to where the block puts them together. */
  __device__ __forceinline__ void share(Sums& sums, WarpSums<kWords>& to) const {
    sums.sum = device::sum_of_head(sums.sum);
    if (t() == 0 && g() < kDirectHeads) to.softmax[g()] = make_float2(sums.maximum, sums.sum);
    const bool second = device::joins_second();
    const int head = 2 * (t() % 2) + second;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        to.weighted[head][4 * (8 * c + g()) + j] =
            device::join_columns(sums.weighted[c][j], second);
      }
    }
  }

  /** The results of all warps for a part, added in their order: a warp has a head. */
  __device__ __forceinline__ void leave(const WarpSums<kWords> (&from)[kDirectWarps],
                                        int first_head, int first_value, float* out) const {
    static_assert(kDirectHeads == kDirectWarps);
    const int head = device::warp_id();
    if (first_head + head >= shape_.group) return;
    float factors[kDirectWarps], top = -device::infinity(), sum = 0;
#pragma unroll
    for (int w = 0; w < kDirectWarps; ++w) top = fmaxf(top, from[w].softmax[head].x);
#pragma unroll
    for (int w = 0; w < kDirectWarps; ++w) {
      const float2 own = from[w].softmax[head];
      factors[w] = own.x == -device::infinity() ? 0.0f : device::exp_of(own.x - top);
      sum = __fmaf_rn(own.y, factors[w], sum);
    }
    float* to = out + (first_head + head) * (2 + shape_.value_dim);
    if (first_value == 0 && device::lane_id() == 0) {
      *reinterpret_cast<float2*>(to) = make_float2(top, sum);
    }
    const int pairs = min(shape_.value_dim - first_value, kPassValues<kWords>) / 2;
#pragma unroll
    for (int i = device::lane_id(); i < kPassValues<kWords> / 2; i += 32) {
      if (i >= pairs) break;
      float2 weighted{};
#pragma unroll
      for (int w = 0; w < kDirectWarps; ++w) {
        const float2 own = from[w].weighted[head][i];
        weighted.x = __fmaf_rn(own.x, factors[w], weighted.x);
        weighted.y = __fmaf_rn(own.y, factors[w], weighted.y);
      }
      *reinterpret_cast<float2*>(to + 2 + first_value + 2 * i) = weighted;
    }
  }

  /** All of the block's parts, for some heads and some dimensions of values. */
  __device__ __forceinline__ void pass(int first_head, int first_value, float* out) {
    const int64_t step = int64_t(shape_.group) * (2 + shape_.value_dim);
    int part = rank_, first = parts_.begin(part), turn = 0;
    if (part >= parts_.count) return;
    Tile tile;
    Sums sums{-device::infinity(), 0, {}};
    const auto load = [&] {
      find_rows(first, parts_.begin(part + 1));
      if constexpr (kAtOnce) {
        load_keys(tile.keys);
        load_values(first_value, tile.values);
      }
    };
    load();
#pragma unroll 1
    while (part < parts_.count) {
      const int end = parts_.begin(part + 1), own = part;
      attend(tile, first_value, end - first - kTileRows * device::warp_id(), sums);
      first += kStepRows;
      const bool over = first >= end;
      if (over) part += blocks_, first = parts_.begin(part);
      if (part < parts_.count) load();
      if (!over) continue;
      auto& shared = space_.sums[turn];
      turn ^= 1;
      share(sums, shared[device::warp_id()]);
      sums = {-device::infinity(), 0, {}};
      __syncthreads();
      leave(shared, first_head, first_value, out + own * step);
    }
    __syncthreads();  // before another pass writes where this one reads
  }

  const device::AttendShape& shape_;
  PartSpace<kWords, Element>& space_;
  const HeadParts parts_;
  const int rank_, blocks_;
  const device::NewRow<Element> new_row_;
  const Address address_;
};

}  // namespace pariskv::cuda

// Keys to summaries. A warp takes a tile of keys; while it works on one, the next one is on its
// way into shared memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "device/ptx.cuh"
#include "device/stored_rows.cuh"
#include "elements.h"
#include "kernels.h"
#include "pariskv/encode/summary.cuh"
#include "pariskv/encode/summary_careful.cuh"
#include "pariskv/error.h"
#include "runtime.h"

namespace pariskv::cuda {

namespace {

using namespace device;

struct EncodeParameters {
  const SequenceView* sequence;
  int32_t begin, end;
  int32_t segment_tokens;
  int32_t kv_heads;
  int32_t row_bytes;
  int32_t start, group;   // keys of a warp: `group` of them from start on, from start + group, ...
  int32_t block;          // keys that share a mean, which is taken off; 0: none do
  const float* gains;     // (heads, key_dim) of their channels
  const int16_t* centre;  // the same, in steps: see Balance
  const float* centre_steps;  // (heads)
  CodecTables codec;
};

constexpr int kWarps = 16;  // that a multiprocessor should hold: registers allow no more

// Keys of a warp at most. More of them hide better how a warp starts; fewer leave multiprocessors
// less time with too few warps in the end, so every place should be taken so many times.
constexpr int32_t kMostKeys = 256;
constexpr int kTurns = 3;

/**
 * How a tile of keys, one warp's work, is cut. The lanes of a key take turns with its subspaces
 * (then either one holds half of the norm's sums, whole); of more than 128 dimensions, two have
 * the first 128, two the next ones.
 */
template <typename Element_, int kRotated_, bool kLeaves_>
struct Cut {
  using Element = Element_;
  static constexpr int kRotated = kRotated_;
  static constexpr bool kLeaves = kLeaves_;        // a key less its mean is encoded, as floats
  static constexpr int kDims = 64;                 // of a lane
  static constexpr int kParts = kRotated / kDims;  // lanes of a key
  static constexpr int kKeys = 32 / kParts;
  static constexpr int kRow = kRotated * int(sizeof(Element)) / 16;  // 16 bytes, of a key
  static constexpr int kOctet = int(sizeof(Element)) / 2;            // 16 bytes, of a subspace
  static constexpr int kChunks = kRow / kParts;                      // 16 bytes, of a lane
  static constexpr int kQuads = kElementsPer16<Element> / 4;         // 4 floats, of a chunk
  static constexpr int kFactors = kLeaves                                  ? 2 * kQuads
                                  : std::is_same_v<Element, __nv_bfloat16> ? 2
                                                                           : 1;  // of a chunk
  static constexpr int kRecord = kRotated / 32;  // 16 bytes, of a key

  /** The 16 bytes of a row that are a lane's own. */
  static __device__ __forceinline__ int chunk(int part, int own) {
    const int octet = own / kOctet;
    if constexpr (kParts == 1) return own;
    return (part / 2 * 16 + octet * 2 + part % 2) * kOctet + own % kOctet;
  }
};

template <typename Cut>
struct alignas(128) Tile {
  // Apart by so much that 8 lanes that read at once meet all banks, or nearly.
  static constexpr int kPitch = Cut::kRow + (Cut::kParts == 1 ? 1 : 2 * Cut::kOctet);

  uint4 rows[Cut::kKeys * kPitch];
  uint4 records[Cut::kKeys * Cut::kRecord];
  uint4 factors[Cut::kRow * Cut::kFactors];
};

/** A warp's way through its keys, which lie in one segment, tile by tile. */
template <typename Cut>
struct Walk {
  using Element = typename Cut::Element;
  static constexpr int kPitch = Tile<Cut>::kPitch;

  const EncodeParameters& p;
  Tile<Cut>& tile;
  int first;         // position
  int32_t number;    // of the first key, in its segment's planes
  const char* rows;  // from the first one on
  uint8_t* block;
  int lane = int(threadIdx.x) % 32, key = lane / Cut::kParts, part = lane % Cut::kParts;

  __device__ __forceinline__ Walk(const EncodeParameters& parameters, Tile<Cut>& in)
      : p(parameters), tile(in), first(p.start + int(blockIdx.x) * p.group) {
    const int segment = first / p.segment_tokens, head = int(blockIdx.y);
    number = head * p.segment_tokens + (first - segment * p.segment_tokens);
    rows = row_of_segment(static_cast<const char*>(p.sequence->rows[segment]), head,
                          p.segment_tokens, first - segment * p.segment_tokens, p.row_bytes);
    block = p.sequence->summaries[segment];
  }

  __device__ __forceinline__ int key_bytes() const {
    return p.codec.head_dim * int(sizeof(Element));
  }

  /** Bit i: whether key i of a tile is asked for; one of them is. */
  __device__ __forceinline__ uint32_t present_keys(int t) const {
    const int position = first + t * Cut::kKeys;
    const int before = max(p.begin - position, 0), behind = max(position + 32 - p.end, 0);
    return kAllLanes << before & kAllLanes >> behind;
  }

  /** The keys of tile `t` that are asked for, with zeros beyond a padded row, set out. */
  __device__ __forceinline__ void fetch(int t) {
    constexpr int kAtOnce = Cut::kRow < 32 ? Cut::kRow : 32;  // chunks of a row that a step copies
    constexpr int kRows = 32 / kAtOnce;                       // rows of a step
    const int chunk = lane % kAtOnce, ahead = lane / kAtOnce, bytes = p.row_bytes;
    const char* source = rows + int64_t(t * Cut::kKeys + ahead) * bytes + chunk * 16;
    const uint32_t target = shared_address(&tile.rows[ahead * kPitch + chunk]);
    const uint32_t present = present_keys(t) >> ahead;
#pragma unroll
    for (int c = 0; c < Cut::kRow; c += kAtOnce) {
      const bool inside = (c + chunk) * 16 < key_bytes();
      const int64_t stride = kRows * bytes;
#pragma unroll
      for (int i = 0; i < Cut::kKeys; i += kRows) {
        const char* from = source + i / kRows * stride + c * 16;
        if (present >> i & 1) {
          ptx::cp_async_cg_16(target + (i * kPitch + c) * 16, from, inside);
        }
      }
    }
    ptx::cp_async_commit_group();
  }

  /** Takes off the mean of these keys' block. */
  __device__ __forceinline__ Leaving leaving() const {
    if constexpr (Cut::kLeaves) {
      const SummaryLayout layout{p.kv_heads, p.segment_tokens, Cut::kRotated, p.block};
      const int head = int(blockIdx.y), mean = (number - head * p.segment_tokens) / p.block;
      return {p.gains + head * p.codec.head_dim,
              reinterpret_cast<const int8_t*>(block + layout.means_at(head, mean)),
              *reinterpret_cast<const float*>(block + layout.steps_at(head, mean)),
              p.centre + head * p.codec.head_dim, p.centre_steps[head]};
    } else {
      return {};
    }
  }

  /**
   * Lays out the factors that take the mean off an element, with the rotation's signs: gains, then
   * shifts, of each chunk.
   */
  __device__ __forceinline__ void lay_out_gains() {
    const Leaving own_mean = leaving();
    constexpr int kElements = kElementsPer16<Element>;
    for (int i = lane; i < Cut::kRow; i += 32) {
      const int own = i / Cut::kParts, first = Cut::chunk(i % Cut::kParts, own) * kElements;
      float gains[kElements], shifts[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int d = first + e;
        const bool there = d < p.codec.head_dim;
        const float sign = p.codec.negative[d / 32] >> (d % 32) & 1 ? -1.0f : 1.0f;
        gains[e] = there ? sign * own_mean.gains[d] : 0.0f;
        shifts[e] = there ? sign * own_mean.shift(d) : 0.0f;
      }
      auto* out = reinterpret_cast<float*>(tile.factors);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const auto place = [&](int factor) {
          return ((own * Cut::kFactors + factor) * Cut::kParts + i % Cut::kParts) * 4 + e % 4;
        };
        out[place(e / 4)] = gains[e];
        out[place(Cut::kQuads + e / 4)] = shifts[e];
      }
    }
    __syncwarp();
  }

  /** Lays out the rotation's signs; a factor is 1 or -1, for bfloat16 in a word's upper half. */
  __device__ __forceinline__ void lay_out_factors() {
    for (int i = lane; i < Cut::kRow * Cut::kFactors; i += 32) {
      const int own = i / Cut::kParts;
      const uint32_t* flips = p.codec.flips + 4 * Cut::chunk(i % Cut::kParts, own / Cut::kFactors);
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t flip = flips[w];
        if constexpr (std::is_same_v<Element, float>) {
          words[w] = flip;
        } else if constexpr (std::is_same_v<Element, __half>) {
          words[w] = 0x3c003c00u | flip;
        } else {
          words[w] = 0x3f800000u | ((own % 2 == 0 ? flip << 16 : flip) & 0x80000000u);
        }
      }
      tile.factors[i] = {words[0], words[1], words[2], words[3]};
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load(uint4 (&chunks)[Cut::kChunks]) {
    ptx::cp_async_wait_group<0>();
    __syncwarp();
    const uint4* own = &tile.rows[key * kPitch + Cut::chunk(part, 0)];
#pragma unroll
    for (int c = 0; c < Cut::kChunks; ++c) chunks[c] = own[Cut::chunk(0, c)];
    __syncwarp();
  }

  /** Where 16 bytes of a key's record wait until they are written with their neighbours. */
  static __device__ __forceinline__ int record_place(int key, int c) {
    constexpr int kRecord = Cut::kRecord;
    const int turn = kRecord == 16  ? 0
                     : kRecord == 8 ? key % 4 * 2
                     : kRecord == 4 ? key / 2 % 4
                                    : key / 4 % 2;
    return key * kRecord + (c ^ turn);
  }

  __device__ __forceinline__ void store(int t, const Codes& codes) {
    const SummaryLayout layout{p.kv_heads, p.segment_tokens, Cut::kRotated, 0};
    const int start = number + t * Cut::kKeys;
#pragma unroll
    for (int plane = 0; plane < 4; ++plane) {
      const int piece = plane * Cut::kParts + part;
      const uint32_t* words = codes.record + plane * kWords;
      reinterpret_cast<uint2*>(&tile.records[record_place(key, piece / 2)])[piece % 2] = {words[0],
                                                                                          words[1]};
    }
    __syncwarp();
    const uint32_t present = present_keys(t);
    uint4* records = reinterpret_cast<uint4*>(block + layout.records_at(0, start));
#pragma unroll
    for (int step = 0; step < Cut::kKeys * Cut::kRecord / 32; ++step) {
      const int i = step * 32 + lane;
      if (present >> i / Cut::kRecord & 1) {
        records[i] = tile.records[record_place(i / Cut::kRecord, i % Cut::kRecord)];
      }
    }
    if (!(present >> key & 1)) return;
    uint2* signs = reinterpret_cast<uint2*>(block + layout.signs_at(0, start));
    signs[lane] = {codes.signs[0], codes.signs[1]};
    if (part != 0) return;
    block[layout.norms_at(0, start + key)] = codes.norm;
    *reinterpret_cast<uint16_t*>(block + layout.scales_at(0, start + key)) = codes.scale;
  }

  /** The keys of a tile that the quick way could not do; what it wrote for them is overwritten. */
  __device__ __forceinline__ void mend(int t, const Codes& codes) {
    const uint32_t broken = __ballot_sync(kAllLanes, !codes.valid);
    const uint32_t doubtful = __ballot_sync(kAllLanes, !codes.tame);
    if ((broken | doubtful) == 0) return;
    __syncwarp();  // other lanes wrote parts of these keys
    constexpr uint32_t kLanes = (1u << Cut::kParts) - 1;
    const bool anew = broken >> lane & kLanes, perhaps = doubtful >> lane & kLanes;
    if (part != 0 || !(present_keys(t) >> key & 1) || !(anew || perhaps)) return;
    const SummaryLayout layout{p.kv_heads, p.segment_tokens, Cut::kRotated, 0};
    const int own = number + t * Cut::kKeys + key;
    const char* stored = rows + int64_t(t * Cut::kKeys + key) * p.row_bytes;
    encode_carefully<RowReader<Element>>(
        stored, leaving(), p.codec, !anew,
        {block + layout.signs_at(0, own), block + layout.norms_at(0, own),
         reinterpret_cast<uint16_t*>(block + layout.scales_at(0, own)),
         block + layout.records_at(0, own)});
  }
};

/**
 * One warp to a block: then the compiler sees that its lanes stay together, which costs a tenth
 * otherwise. While a tile is in registers, the next one is on its way.
 */
template <typename Cut>
__global__ void __launch_bounds__(32, kWarps)
    encode_tiles(const __grid_constant__ EncodeParameters p) {
  __shared__ Tile<Cut> tile;
  Walk<Cut> walk(p, tile);
  int t = max(p.begin - walk.first, 0) / Cut::kKeys;
  const int end = min(p.end - walk.first + Cut::kKeys - 1, p.group) / Cut::kKeys;
  walk.fetch(t);
  if constexpr (Cut::kLeaves) {
    walk.lay_out_gains();
  } else {
    walk.lay_out_factors();
  }
  const Cells cells(p.codec);
  for (; t < end; ++t) {
    uint4 chunks[Cut::kChunks];
    walk.load(chunks);
    if (t + 1 < end) walk.fetch(t + 1);
    Codes codes;
    encode_quickly<Cut>(chunks, tile.factors, p.codec.unrotate, cells, codes);
    walk.store(t, codes);
    walk.mend(t, codes);
  }
}

template <typename Cut>
void launch_tiles(EncodeParameters& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), "encode");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "encode");
  const int64_t keys = int64_t(p.end - p.begin) * p.kv_heads;
  const int64_t places = int64_t(processors) * kWarps;
  p.group = Cut::kLeaves ? std::min(p.block, kMostKeys) : kMostKeys;
  while (p.group > Cut::kKeys && (keys < kTurns * places * p.group || p.segment_tokens % p.group)) {
    p.group /= 2;
  }
  p.start = p.begin / p.group * p.group;
  const dim3 grid(unsigned((p.end - p.start + p.group - 1) / p.group), unsigned(p.kv_heads));
  encode_tiles<Cut><<<grid, 32, 0, stream>>>(p);
  check_launch("encode");
}

template <typename Element>
void launch(EncodeParameters& parameters, cudaStream_t stream) {
  dispatch(RotatedDims{}, parameters.codec.rotated_dim, [&](auto dim) {
    constexpr int kDim = int(decltype(dim)::kValue);
    parameters.block > 0 ? launch_tiles<Cut<Element, kDim, true>>(parameters, stream)
                         : launch_tiles<Cut<Element, kDim, false>>(parameters, stream);
  });
}

CodecTables codec_tables(const RowFormat& rows, const CodecConstants& codec) {
  CodecTables tables{};
  tables.head_dim = int32_t(rows.key_dim);
  tables.rotated_dim = int32_t(codec.layout.rotated_dim);
  tables.unrotate = 1.0f / std::sqrt(float(codec.layout.rotated_dim));
  std::copy_n(codec.thresholds, 7, tables.thresholds);
  std::copy_n(codec.centres, 8, tables.centres);
  for (int cell = 0; cell < 32; ++cell) {
    tables.cell_thresholds[cell] = cell == 0  ? 0.0f
                                   : cell < 8 ? codec.thresholds[cell - 1]
                                              : std::numeric_limits<float>::infinity();
    tables.cell_centres[cell] = codec.centres[std::clamp(cell - 1, 0, 7)];
  }
  std::copy_n(codec.negative, std::size(codec.negative), tables.negative);
  const bool wide = rows.key == RowType::kFloat32;
  for (int i = 0; i < (wide ? kMaxRotatedDim : kMaxRotatedDim / 2); ++i) {
    const auto negative = [&](int d) { return codec.negative[d / 32] >> (d % 32) & 1; };
    tables.flips[i] = wide ? negative(i) << 31 : negative(2 * i) << 15 | negative(2 * i + 1) << 31;
  }
  for (int l = 0; l < 7; ++l) {
    if (!(std::fabs(codec.thresholds[l] * kCells - float(l + 1)) < 0.5f - kCellMargin)) {
      throw InternalError(
          "a threshold of the codec lies outside its cell (cpp/cuda/pariskv/encode/encode.cu)");
    }
  }
  return tables;
}

}  // namespace

void launch_encode(const EncodeCall& call, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const ModelShape& shape = call.shape;
  EncodeParameters p{call.sequence,
                     int32_t(call.begin),
                     int32_t(call.end),
                     int32_t(shape.segment_tokens),
                     int32_t(shape.kv_heads),
                     int32_t(shape.rows.bytes()),
                     0,
                     0,
                     int32_t(call.codec.layout.block),
                     call.balance.gain,
                     call.balance.centre,
                     call.balance.centre_step,
                     codec_tables(shape.rows, call.codec)};
  dispatch_element(shape.dtype, [&](auto element) { launch<decltype(element)>(p, stream); });
}

}  // namespace pariskv::cuda

// Keys to summaries. A warp takes a tile of keys; while it works on one, the next one is on its
// way into shared memory.
#include <algorithm>
#include <cmath>

#include "device/staging.cuh"
#include "device/summary.cuh"
#include "device/summary_careful.cuh"
#include "kernels.h"
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
  CodecTables codec;
};

// That a multiprocessor should hold: registers allow no more.
constexpr int kWarps = 12;

template <typename Cut>
struct alignas(128) Tile {
  uint4 rows[32 * Cut::kChunks];
  uint4 records[32 * Cut::kWords];
};

/** A warp's way through the keys of one head. */
template <typename Cut>
struct Walk {
  using Element = typename Cut::Element;
  static constexpr int kPieces = 32 / Cut::kChunks;  // parts of keys that a warp copies at once

  const EncodeParameters& p;
  Tile<Cut>& tile;
  int head;
  int lane = int(threadIdx.x) % 32;

  /** Position of the first key of tile `t`; a tile never crosses a segment's border. */
  __device__ __forceinline__ int position(int t) const { return t * Cut::kKeys; }
  __device__ __forceinline__ bool present(int position) const {
    return uint32_t(position - p.begin) < uint32_t(p.end - p.begin);
  }
  __device__ __forceinline__ int64_t row_bytes() const {
    return 2 * int64_t(p.codec.head_dim) * int64_t(sizeof(Element));
  }
  __device__ __forceinline__ const char* row(int position) const {
    const int segment = position / p.segment_tokens;
    return static_cast<const char*>(p.sequence->rows[segment]) +
           (int64_t(head - segment) * p.segment_tokens + position) * row_bytes();
  }

  /** Where chunk `c` of part `i` lies: lanes that read the same chunk of 8 parts meet all banks. */
  static __device__ __forceinline__ int place(int i, int c) {
    return i * Cut::kChunks + (c ^ (i % 8));
  }

  /** Bit i: whether key i of a tile is asked for. */
  __device__ __forceinline__ uint32_t present_keys(int first) const {
    const int before = max(p.begin - first, 0), behind = max(first + 32 - p.end, 0);
    return (0xffffffffu << before) & (0xffffffffu >> behind);
  }

  /** Starts to copy tile `t`, with zeros for what is not there. */
  __device__ __forceinline__ void fetch(int t) {
    // Part kPieces * step + piece: the two add up without a carry, so bits may be flipped apart.
    const int piece = lane / Cut::kChunks, chunk = lane % Cut::kChunks;
    const uint32_t target = shared_address(&tile.rows[place(piece, chunk)]);
    const int row_bytes = int(this->row_bytes());
    const char* source = row(position(t)) + piece / Cut::kParts * row_bytes +
                         (piece % Cut::kParts * Cut::kChunks + chunk) * 16;
    uint32_t wanted = present_keys(position(t)) >> (piece / Cut::kParts);
    if (chunk * 16 >= row_bytes / 2) wanted = 0;  // beyond a padded row
#pragma unroll
    for (int step = 0; step < Cut::kChunks; ++step) {
      const int part = step * kPieces, key = part / Cut::kParts;
      stage16((target ^ (part % 8 * 16)) + part * Cut::kChunks * 16,
              source + int64_t(key) * row_bytes + part % Cut::kParts * Cut::kChunks * 16,
              wanted >> key & 1);
    }
    close_stage();
  }

  __device__ __forceinline__ void load(uint4 (&chunks)[Cut::kChunks]) {
    await_stage<0>();
    __syncwarp();
#pragma unroll
    for (int c = 0; c < Cut::kChunks; ++c) chunks[c] = tile.rows[place(lane, c)];
    __syncwarp();
  }

  /** Where 16 bytes of a key's record wait until they are written with their neighbours. */
  static __device__ __forceinline__ int record_place(int key, int c) {
    constexpr int kRecord = Cut::kRecord;
    const int turn = kRecord == 8 ? key % 4 * 2 : kRecord == 4 ? key / 2 % 4 : key / 4 % 2;
    return key * kRecord + (c ^ turn);
  }

  __device__ __forceinline__ void store(int t, const Codes<Cut::kWords>& codes) {
    const int key = lane / Cut::kParts, part = lane % Cut::kParts;
    const int segment = position(t) / p.segment_tokens;
    const int slot = position(t) - segment * p.segment_tokens;
    uint8_t* block = p.sequence->summaries[segment];
    const BlockLayout layout{p.kv_heads, p.segment_tokens, Cut::kRotated / 8};

    const uint32_t (&words)[4 * Cut::kWords] = codes.record;
#pragma unroll
    for (int c = 0; c < Cut::kWords; ++c) {
      tile.records[record_place(key, c * Cut::kParts + part)] =
          make_uint4(words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]);
    }
    __syncwarp();
    uint4* records = reinterpret_cast<uint4*>(block + layout.records(head, slot));
#pragma unroll
    for (int step = 0; step < Cut::kWords; ++step) {
      const int i = step * 32 + lane;
      if (present(position(t) + i / Cut::kRecord)) {
        records[i] = tile.records[record_place(i / Cut::kRecord, i % Cut::kRecord)];
      }
    }
    if (!present(position(t) + key)) return;
    uint8_t* signs = block + layout.signs(head, slot + key);
    if constexpr (Cut::kWords == 4) {
      reinterpret_cast<uint4*>(signs)[part] =
          make_uint4(codes.signs[0], codes.signs[1], codes.signs[2], codes.signs[3]);
    } else {
      *reinterpret_cast<uint2*>(signs) = make_uint2(codes.signs[0], codes.signs[1]);
    }
    if (part != 0) return;
    block[layout.norms(head, slot + key)] = codes.norm;
    *reinterpret_cast<uint16_t*>(block + layout.scales(head, slot + key)) = codes.scale;
  }

  /** The keys of a tile that the quick way could not do; what it wrote for them is overwritten. */
  __device__ __forceinline__ void mend(int t, bool valid) {
    const int own = position(t) + lane / Cut::kParts;
    const bool wanted = !valid && present(own) && lane % Cut::kParts == 0;
    __syncwarp();
    if (!wanted) return;
    const int segment = own / p.segment_tokens;
    const int slot = own - segment * p.segment_tokens;
    uint8_t* block = p.sequence->summaries[segment];
    const BlockLayout layout{p.kv_heads, p.segment_tokens, Cut::kRotated / 8};
    encode_carefully(reinterpret_cast<const Element*>(row(own)), p.codec,
                     {block + layout.signs(head, slot), block + layout.norms(head, slot),
                      reinterpret_cast<uint16_t*>(block + layout.scales(head, slot)),
                      block + layout.records(head, slot)});
  }
};

/**
 * One warp to a block: then the compiler sees that its lanes stay together, which costs a tenth
 * otherwise. Half of a tile's work is in flight while the other half is in registers.
 */
template <typename Cut>
__global__ void __launch_bounds__(32, kWarps)
    encode_tiles(const __grid_constant__ EncodeParameters p) {
  __shared__ Tile<Cut> tile;
  const int end = (p.end + Cut::kKeys - 1) / Cut::kKeys;
  const Cells cells(p.codec);
  Walk<Cut> walk{p, tile, int(blockIdx.y)};
  int t = p.begin / Cut::kKeys + int(blockIdx.x);
  walk.fetch(t);
  for (; t < end; t += int(gridDim.x)) {
    uint4 chunks[Cut::kChunks];
    walk.load(chunks);
    if (t + int(gridDim.x) < end) walk.fetch(t + int(gridDim.x));
    Codes<Cut::kWords> codes;
    encode_quickly<Cut>(chunks, p.codec, cells, codes);
    walk.store(t, codes);
    walk.mend(t, codes.valid);
  }
}

template <typename Cut>
void launch_tiles(const EncodeParameters& parameters, cudaStream_t stream) {
  const auto kernel = encode_tiles<Cut>;
  int device = 0, processors = 0, resident = 0;
  check(cudaGetDevice(&device), "encode");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "encode");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32, 0), "encode");
  const int tiles = (parameters.end + Cut::kKeys - 1) / Cut::kKeys - parameters.begin / Cut::kKeys;
  const int available = std::max(1, processors * resident / parameters.kv_heads);
  const dim3 grid(unsigned(std::min(tiles, available)), unsigned(parameters.kv_heads));
  kernel<<<grid, 32, 0, stream>>>(parameters);
  check_launch("encode");
}

template <typename Element>
void launch(const EncodeParameters& parameters, cudaStream_t stream) {
  switch (parameters.codec.rotated_dim) {
    case 64:
      return launch_tiles<Cut<Element, 64>>(parameters, stream);
    case 128:
      return launch_tiles<Cut<Element, 128>>(parameters, stream);
    case 256:
      return launch_tiles<Cut<Element, 256>>(parameters, stream);
  }
}

CodecTables codec_tables(const ModelShape& shape, const CodecConstants& codec) {
  CodecTables tables{};
  tables.head_dim = int32_t(shape.head_dim);
  tables.rotated_dim = int32_t(shape.rotated_dim);
  tables.unrotate = 1.0f / std::sqrt(float(shape.rotated_dim));
  std::copy_n(codec.thresholds, 7, tables.thresholds);
  std::copy_n(codec.centres, 8, tables.centres);
  std::copy_n(codec.negative, 8, tables.negative);
  const bool wide = shape.dtype == DType::kFloat32;
  for (int i = 0; i < (wide ? 256 : 128); ++i) {
    const auto negative = [&](int d) { return codec.negative[d / 32] >> (d % 32) & 1; };
    tables.flips[i] = wide ? negative(i) << 31 : negative(2 * i) << 15 | negative(2 * i + 1) << 31;
  }
  for (int l = 0; l < 7; ++l) {
    if (!(std::fabs(codec.thresholds[l] * kCells - float(l + 1)) < 0.5f - kCellMargin)) {
      throw InternalError("a threshold of the codec lies outside its cell (cuda/encode.cu)");
    }
  }
  return tables;
}

}  // namespace

void launch_encode(const EncodeCall& call, cudaStream_t stream) {
  if (call.begin >= call.end) return;
  const ModelShape& shape = call.shape;
  const EncodeParameters p{call.sequence,           int32_t(call.begin),
                           int32_t(call.end),       int32_t(shape.segment_tokens),
                           int32_t(shape.kv_heads), codec_tables(shape, call.codec)};
  switch (shape.dtype) {
    case DType::kFloat32:
      return launch<float>(p, stream);
    case DType::kFloat16:
      return launch<__half>(p, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, stream);
  }
}

}  // namespace pariskv::cuda

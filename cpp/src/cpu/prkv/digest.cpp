// Digests of pages: the middle of a page's keys and how far they are from it, channel by channel.
#include "cpu/prkv/digest.h"

#include <algorithm>
#include <cmath>

#include "cpu/numerics.h"
#include "cpu/prkv/search.h"
#include "cpu/rows.h"
#include "policy/prkv/pages.h"

namespace pariskv::cpu {

namespace {

constexpr int64_t kMostPage = 64;
// The exponent that a page's largest number is brought to: float16 has room for its double.
constexpr int kTop = 14;
constexpr int kLeast = -100;  // smaller numbers rank nothing, and the unit stays a normal float

/** The least float16 that is not below x, which is not negative. */
uint16_t float16_above(double x) {
  const uint16_t half = float_to_float16(float(x));
  return float16_to_float(half) < x ? uint16_t(half + 1) : half;
}

}  // namespace

void digest_page(const Kernels& kernels, const ModelShape& shape, bool box, const PageKeys& keys,
                 const PageNumbers& out) {
  const int64_t dim = shape.rows.key_dim;
  alignas(64) float key[kMostPage * kMaxHeadDim];
  uint64_t live = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < kMostPage; ++i) {
    if ((keys.live >> i & 1) == 0) continue;
    float* own = key + count * dim;
    const RowPlace row = plain_row_at(shape, keys.sequence, keys.head, keys.begin + i);
    read_key(kernels, shape.rows, row.key, own);
    bool finite = true;
    for (int64_t d = 0; d < dim; ++d) finite &= std::fabs(own[d]) < INFINITY;
    if (!finite) continue;
    live |= uint64_t{1} << i;
    ++count;
  }
  *out.live = live;
  *out.unit = 0;
  if (count == 0) return;

  float low[kMaxHeadDim], high[kMaxHeadDim], sum[kMaxHeadDim] = {};
  std::copy_n(key, dim, low);
  std::copy_n(key, dim, high);
  for (int64_t r = 1; r < count; ++r) {
    const float* own = key + r * dim;
    for (int64_t d = 0; d < dim; ++d) low[d] = own[d] < low[d] ? own[d] : low[d];
    for (int64_t d = 0; d < dim; ++d) high[d] = own[d] > high[d] ? own[d] : high[d];
  }
  float largest = 0;
  for (int64_t d = 0; d < dim; ++d) {
    largest = std::max(largest, std::max(std::fabs(low[d]), std::fabs(high[d])));
  }
  int exponent = 0;
  if (largest > 0) exponent = std::max(std::ilogb(largest), kLeast);
  const float up = std::ldexp(1.0f, kTop - exponent);
  *out.unit = std::ldexp(1.0f, exponent - kTop);

  float middle[kMaxHeadDim];
  for (int64_t d = 0; d < dim; ++d) {
    out.digest[d] = float_to_float16((low[d] * up) * .5f + (high[d] * up) * .5f);
    middle[d] = float16_to_float(out.digest[d]);
  }
  if (box) {
    for (int64_t d = 0; d < dim; ++d) {
      const double reach =
          std::max(double(high[d] * up) - middle[d], middle[d] - double(low[d] * up));
      out.digest[dim + d] = float16_above(reach);
    }
    return;
  }
  for (int64_t r = 0; r < count; ++r) {
    const float* own = key + r * dim;
    for (int64_t d = 0; d < dim; ++d) sum[d] = sum[d] + std::fabs(own[d] * up - middle[d]);
  }
  for (int64_t d = 0; d < dim; ++d) out.digest[dim + d] = float_to_float16(sum[d] / float(count));
}

void PRKVSearch::digest(const DigestArgs& args, Stream) {
  const ModelShape& shape = args.shape;
  const PageLayout layout = pages_of(shape, args.rules.page);
  const int64_t size = args.rules.page;
  for (int64_t i = 0; i < args.batch; ++i) {
    const DigestJob& job = args.jobs[i];
    const int64_t first = job.begin / size, pages = (job.end - 1) / size + 1 - first;
    device_.pool.parallel_for(pages, [&](int64_t task) {
      const int64_t begin = (first + task) * size;
      // Where the sink ends within the page, the page begins there.
      uint64_t live = ~uint64_t{0} >> (64 - size);
      if (job.begin > begin) live = live >> (job.begin - begin) << (job.begin - begin);
      uint8_t* block = job.sequence.summaries[begin / shape.segment_tokens];
      const int64_t slot = begin % shape.segment_tokens / size;
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        digest_page(device_.kernels, shape, args.rules.box, {job.sequence, head, begin, live},
                    {layout.live(block, head, slot), layout.unit(block, head, slot),
                     layout.digest(block, head, slot)});
      }
    });
  }
}

}  // namespace pariskv::cpu

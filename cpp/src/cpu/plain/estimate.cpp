// The 4-bit estimate: <k, q> = |q| sum_b w_b <v_b, q_b>, from a key's summary.
#include "cpu/numerics.h"
#include "cpu/plain/plain.h"
#include "policy/pariskv/codec/summary_layout.h"

namespace pariskv::cpu::plain {

void estimate(const EstimateRun& run) {
  const SummaryLayout layout{1, 1, run.rotated_dim, 0};
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t slot = run.slots[i];
    const uint8_t* signs = run.signs + slot * layout.subspaces();
    const uint8_t* record = run.records + slot * layout.record_bytes();
    const float scale = float_of(uint32_t{run.scales[slot]} << kScaleShift);

    float value[kMaxRotatedDim];
    for (int64_t d = 0; d < run.rotated_dim; ++d) {
      int index = (signs[d / 8] >> (d % 8) & 1) * 8;
      for (int plane = 0; plane < 3; ++plane) {
        index |= (record[plane * layout.plane_bytes() + d / 8] >> (d % 8) & 1) << plane;
      }
      const uint8_t weight = record[layout.weights_offset() + d / kSubspaceDim];
      value[d] = run.centres[index] * float(weight);
    }
    for (int64_t h = 0; h < run.heads; ++h) {
      run.estimates[h * run.head_stride + i] =
          dot(value, run.query + h * run.rotated_dim, run.rotated_dim) * scale;
    }
  }
}

}  // namespace pariskv::cpu::plain

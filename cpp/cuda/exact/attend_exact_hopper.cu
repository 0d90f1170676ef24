// Exact attention of many queries, for compute capability 9.0 alone.
#include "elements.h"
#include "exact/attend_exact.h"
#include "exact/exact_wgmma.cuh"
#include "launch.h"

namespace pariskv::cuda {

namespace {

template <typename Element, int kDim>
ExactKernel kernel_of(Precision precision) {
  using namespace device;
  return {precision == Precision::kFast ? attend_exact_wgmma<Element, kDim, FastPlan<kDim>>
                                        : attend_exact_wgmma<Element, kDim, ExactPlan>,
          kWgmmaThreads,
          kWgmmaQueries,
          WgmmaMemory<kDim>::kBytes,
          kDim,
          true};
}

}  // namespace

ExactKernel hopper_kernel_of(const RowFormat& rows, Precision precision) {
  using Dims = Sizes<64, 128>;
  const bool serves = capability_major() == 9 && rows.key != RowType::kFloat32 &&
                      rows.key_dim == rows.value_dim && contains(Dims{}, rows.key_dim);
  if (!serves) return {};
  return dispatch(Dims{}, rows.key_dim, [&](auto dim) {
    constexpr int kDim = int(decltype(dim)::kValue);
    return rows.key == RowType::kFloat16 ? kernel_of<__half, kDim>(precision)
                                         : kernel_of<__nv_bfloat16, kDim>(precision);
  });
}

}  // namespace pariskv::cuda

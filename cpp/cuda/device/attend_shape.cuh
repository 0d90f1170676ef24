/** What attention of a kv head's query heads needs to know of their model. */
#pragma once

namespace pariskv::cuda::device {

struct AttendShape {
  int key_dim, value_dim;
  int group;
  int row_bytes;  // of a row that is copied: K, then V
  float scale, softcap;
};

}  // namespace pariskv::cuda::device

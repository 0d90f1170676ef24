/** What attention of a kv head's query heads needs to know of their model. */
#pragma once

namespace pariskv::cuda::device {

struct AttendShape {
  int key_dim, value_dim;
  int group;
  int row_bytes;  // K, then V; with all of its first and last vector, if it is narrow
  int row_room;   // for a copy of it
  float scale, softcap;
};

}  // namespace pariskv::cuda::device

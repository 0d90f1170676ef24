#include "gpu/early_copies.h"

namespace pariskv {

void EarlyCopies::mark(const RowsPlace& place, const std::shared_ptr<RowBlock>& rows,
                       Block target) {
  rows_.push_back({rows, place, rows->bytes()});
  under_way_bytes_ += rows->bytes();
  rows->mark_for_offload(std::move(target));
}

void EarlyCopies::start(Stream stream) {
  while (started_ < rows_.size()) started_ = start_some(rows_, started_, rows_.size(), stream);
}

void EarlyCopies::look(bool wait) {
  for (; started_ > 0; --started_) {
    const MovingRows& oldest = rows_.front();
    if (const std::shared_ptr<RowBlock> rows = oldest.rows.lock()) {
      if (wait) rows->wait_copied();
      wait = false;
      if (!rows->copied()) return;
      done_.push_back(oldest);
      done_bytes_ += oldest.bytes;
    }
    under_way_bytes_ -= oldest.bytes;
    rows_.pop_front();
  }
}

std::optional<EarlyCopies::Taken> EarlyCopies::take() {
  while (!done_.empty()) {
    MovingRows own = std::move(done_.front());
    done_.pop_front();
    done_bytes_ -= own.bytes;
    if (std::shared_ptr<RowBlock> rows = own.rows.lock()) return Taken{std::move(own), rows};
  }
  return std::nullopt;
}

void EarlyCopies::put_back(MovingRows rows) {
  done_bytes_ += rows.bytes;
  done_.push_back(std::move(rows));
}

}  // namespace pariskv

#include "page_table.h"

#include <algorithm>

#include "check.h"

namespace pariskv {

namespace {

constexpr int64_t kMostRows = 4096;

}  // namespace

PageTables::PageTables(const Verb& verb, Backend& backend, const ModelShape& shape)
    : backend_(&backend), shape_(&shape) {
  if (backend.pages().data == nullptr) refuse(verb);
}

void PageTables::refuse(const Verb& verb) {
  fail("[", verb.name, "] expected a cache on a GPU, in memory of its own (no Resources::device); ",
       "rows of this one have no page numbers");
}

PageTable PageTables::make(const Verb& verb, int64_t sequences, int64_t tokens, Stream stream) {
  if (sequences < 1 || sequences > kMostRows) {
    fail("[", verb.name, "] sequences: expected 1 to ", kMostRows, ", got ", sequences);
  }
  if (tokens < 1) fail("[", verb.name, "] tokens: expected 1 or more, got ", tokens);
  verb.check_total(tokens);
  const int64_t width = (tokens + shape_->segment_tokens - 1) / shape_->segment_tokens;
  const int64_t bytes = sequences * (width + 1) * int64_t(sizeof(int32_t));
  Block block = backend_->arena().allocate(bytes);
  backend_->zero(block.data(), block.bytes(), stream);
  block_ = std::move(block);
  auto* const lengths = block_.as<int32_t>();
  table_ = {lengths + sequences, lengths, sequences, width};
  filled_ = 0;
  return table_;
}

PagedRows PageTables::rows(const Verb& verb, const std::vector<int64_t>& rows, int64_t batch) {
  if (!rows.empty()) verb.check_batch_size("page_rows", int64_t(rows.size()), batch);
  if (batch > table_.rows) {
    fail("[", verb.name, "] page_rows: expected at most the ", table_.rows,
         " rows of the page table, got ", batch, " sequences");
  }
  numbers_.clear();
  std::vector<bool> taken(size_t(table_.rows));
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t row = rows.empty() ? i : rows[size_t(i)];
    if (row < 0 || row >= table_.rows) {
      fail("[", verb.name, "] page_rows: expected 0 to ", table_.rows - 1, ", got ", row);
    }
    if (taken[size_t(row)]) {
      fail("[", verb.name, "] page_rows: expected each once, got ", row, " twice");
    }
    taken[size_t(row)] = true;
    numbers_.push_back(int32_t(row));
    filled_ = std::max(filled_, row + 1);
  }
  return {backend_->pages(), table_.pages, table_.lengths, table_.width, numbers_.data()};
}

void PageTables::set_lengths(std::vector<int32_t> lengths, Stream stream) {
  const int64_t own = std::min(int64_t(lengths.size()), table_.rows);
  lengths.resize(size_t(std::max(own, filled_)));
  backend_->set_lengths({backend_->pages(), table_.pages, table_.lengths, table_.width, nullptr},
                        lengths.data(), int64_t(lengths.size()), stream);
  filled_ = own;
}

}  // namespace pariskv

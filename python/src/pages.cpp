// Rows as pages: arrays over the device's memory, for kernels of others.
#include <memory>
#include <utility>
#include <vector>

#include "handle.h"

namespace pariskv::python {

namespace {

using Array = nb::ndarray<nb::array_api>;

/** Arrays keep the cache that they lie in, and not the object that a property was asked of. */
constexpr auto kOwned = nb::rv_policy::automatic;

nb::capsule owner_of(const std::shared_ptr<Cache>& cache) {
  return nb::capsule(new std::shared_ptr<Cache>(cache), [](void* held) noexcept {
    delete static_cast<std::shared_ptr<Cache>*>(held);
  });
}

nb::dlpack::dtype dtype_of(DType dtype) {
  const auto code =
      dtype == DType::kBFloat16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {uint8_t(code), uint8_t(8 * size_of(dtype)), 1};
}

struct PagesOf {
  std::shared_ptr<Cache> cache;
  Pages pages;

  Array array(const TensorView& view) const {
    std::vector<size_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
    return Array(view.data, shape.size(), shape.data(), owner_of(cache), view.strides.data(),
                 dtype_of(view.dtype), nb::device::cuda::value, view.device.index);
  }
};

struct PageTableOf {
  std::shared_ptr<Cache> cache;
  PageTable table;

  Array array(int32_t* data, std::initializer_list<size_t> shape) const {
    return Array(data, shape.size(), shape.begin(), owner_of(cache), nullptr, nb::dtype<int32_t>(),
                 nb::device::cuda::value, cache->config().device.index);
  }
};

PagesOf pages(const Handle& handle, const Arguments&) {
  const std::shared_ptr<Cache> cache = handle.open();
  return {cache, unlocked(cache, [](Cache& open) { return open.pages(); })};
}

PageTableOf page_table(const Handle& handle, const Arguments& given) {
  const int64_t sequences = given.integer("sequences"), tokens = given.integer("tokens");
  const Stream queue = stream_of(given.stream(), handle);
  const std::shared_ptr<Cache> cache = handle.open();
  return {cache,
          unlocked(cache, [&](Cache& open) { return open.page_table(sequences, tokens, queue); })};
}

}  // namespace

void bind_pages(nb::module_& m, nb::class_<Handle>& cache) {
  nb::class_<PagesOf>(m, "Pages",
                      R"(Plain rows of a cache on a GPU as arrays that kernels of others read.

Arrays speak DLPack (torch.from_dlpack) and cover one range of addresses, most of which has no
memory behind it: a page may be read where a page table names it. They keep the cache's memory.)")
      .def_prop_ro(
          "rows", [](const PagesOf& of) { return of.array(of.pages.rows); }, kOwned,
          "(pages, kv_heads, tokens, head_dim + value_dim): a row is K, then V.")
      .def_prop_ro(
          "keys", [](const PagesOf& of) { return of.array(of.pages.keys()); }, kOwned,
          "(pages, tokens, kv_heads, head_dim)")
      .def_prop_ro(
          "values", [](const PagesOf& of) { return of.array(of.pages.values()); }, kOwned,
          "(pages, tokens, kv_heads, value_dim)")
      .def_prop_ro(
          "tokens", [](const PagesOf& of) { return of.pages.rows.shape[2]; }, "Of a page.");
  nb::class_<PageTableOf>(m, "PageTable",
                          R"(Which pages the sequences of a step have, on the device.

It is of the layer that was last stored to. Arrays speak DLPack and keep the cache's memory.)")
      .def_prop_ro(
          "pages",
          [](const PageTableOf& of) {
            const PageTable& table = of.table;
            return of.array(table.pages, {size_t(table.rows), size_t(table.width)});
          },
          kOwned, "(rows, width) int32: numbers of pages.")
      .def_prop_ro(
          "lengths",
          [](const PageTableOf& of) { return of.array(of.table.lengths, {size_t(of.table.rows)}); },
          kOwned, "(rows) int32: tokens, or 0 where pages do not serve the sequence.");
  define(cache, {"pages", {}, {}, {}}, &pages, "def pages(self) -> Pages",
         R"(Plain rows as pages that any paged kernel can read, on a GPU.

Work that reads pages belongs on the stream of the cache's calls.)");
  define(cache, {"page_table", {"sequences", "tokens"}, {}, {"stream"}}, &page_table,
         "def page_table(self, sequences: int, tokens: int, *, stream: int | None = None) -> "
         "PageTable",
         R"(Makes a page table for steps of so many sequences of up to so many tokens.

prefill and decode fill the rows that they are told; advance sets the lengths of the sequences that
it names, for the replay. Another call makes another table: graphs that know the last one are void.)");
}

}  // namespace pariskv::python

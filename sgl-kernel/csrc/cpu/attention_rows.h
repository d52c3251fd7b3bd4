// Rows, page tables and maps of heads, as attention takes them.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checks.h"
#include "dcprt/attention_types.h"

namespace dcprt::binding {

// Query heads in the order of their key heads, and where those of each key head begin.
class HeadMap {
 public:
  HeadMap(const int64_t* key_head_of, int64_t heads, int64_t key_heads)
      : heads_(static_cast<size_t>(heads)), offsets_(static_cast<size_t>(key_heads) + 1) {
    for (int64_t h = 0; h < heads; ++h) {
      Check(key_head_of[h] >= 0 && key_head_of[h] < key_heads, "a query head attends to a key head there is not.");
      ++offsets_[static_cast<size_t>(key_head_of[h]) + 1];
    }
    for (size_t g = 1; g < offsets_.size(); ++g) offsets_[g] += offsets_[g - 1];
    std::vector<int64_t> next(offsets_);
    for (int64_t h = 0; h < heads; ++h) heads_[static_cast<size_t>(next[static_cast<size_t>(key_head_of[h])]++)] = h;
  }

  void Describe(AttentionCall* call) const {
    call->heads = heads_.data();
    call->head_offsets = offsets_.data();
  }

 private:
  std::vector<int64_t> heads_, offsets_;
};

inline void CheckTokens(const AttentionRow& row, const AttentionCall& call) {
  Check(row.start >= 0 && row.start <= row.stop && row.stop <= call.tokens, "a row lies outside of the tokens.");
}

// Describes the pages of `call` and returns its rows. rows: [rows, 4], each start, stop, the number of keys (of the
// context if the call is causal), and the place of its first page in `pages`.
inline std::vector<AttentionRow> PagedRows(AttentionCall* call, const tvm::ffi::TensorView& rows,
                                           const tvm::ffi::TensorView& pages, const tvm::ffi::TensorView& k) {
  const int64_t* table = Ints(rows, "tables");
  Check(rows.ndim() == 2 && rows.size(1) == 4, "rows are [rows, 4].");
  call->pages = Ints(pages, "tables");
  call->page_size = k.size(1);
  Check(call->page_size > 0, "pages have no slots.");
  std::vector<AttentionRow> found;
  found.reserve(static_cast<size_t>(rows.size(0)));
  for (int64_t r = 0; r < rows.size(0); ++r, table += 4) {
    AttentionRow row{table[0], table[1], table[2], table[3], 0};
    CheckTokens(row, *call);
    Check(row.keys >= 0, "there are fewer keys than none.");
    if (call->causal) {
      row.context = row.keys;
      row.keys += row.stop - row.start;
    }
    const int64_t used = row.keys > 0 ? (row.keys + call->page_size - 1) / call->page_size : 0;
    Check(row.first_page >= 0 && used <= pages.numel() - row.first_page, "a row has fewer pages than keys.");
    for (int64_t p = row.first_page; p < row.first_page + used; ++p) {
      Check(call->pages[p] >= 0 && call->pages[p] < k.size(0), "a page lies outside of the pool.");
    }
    found.push_back(row);
  }
  return found;
}

}  // namespace dcprt::binding

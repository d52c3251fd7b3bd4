// Rows of keys and values in pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcprt {

// Rows `tokens` to rows `slots` of a pool. Rows of `from` are `new_step` bytes apart, and consist of pieces of `piece` bytes
// that are `piece_step` bytes apart; in the pool they are dense.
inline void StoreRows(const char* from, size_t new_step, size_t piece, size_t piece_step, size_t pieces,
                      const int64_t* tokens, const int64_t* slots, size_t count, char* pool) {
  for (size_t i = 0; i < count; ++i) {
    const char* row = from + static_cast<size_t>(tokens[i]) * new_step;
    char* to = pool + static_cast<size_t>(slots[i]) * piece * pieces;
    for (size_t p = 0; p < pieces; ++p) std::memcpy(to + p * piece, row + p * piece_step, piece);
  }
}

// The first `bytes` of page `from` to page `to` of a pool.
inline void CopyPage(char* pool, size_t page_bytes, size_t from, size_t to, size_t bytes) {
  std::memcpy(pool + to * page_bytes, pool + from * page_bytes, bytes);
}

}  // namespace dcprt

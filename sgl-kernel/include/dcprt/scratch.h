// Memory that a thread keeps from one call to the next.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace dcprt {

// Each has a piece of its own, so one may be held while another is asked for.
enum class Purpose { kLinearInput, kDecoded, kAttention, kNormed, kGateUp, kQkv, kQueries, kPartial, kAttended };

// At least `bytes`, aligned to 64; what it held before may be gone.
template <Purpose kPurpose>
void* Scratch(size_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local size_t held = 0;
  if (held < bytes || memory == nullptr) {
    held = bytes / 4096 * 4096 + 4096;
    memory.reset(std::aligned_alloc(64, held));
    if (memory == nullptr) throw std::bad_alloc();
  }
  return memory.get();
}

}  // namespace dcprt

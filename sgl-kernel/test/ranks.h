// Threads that stand for ranks, and the memory they meet in.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "dcprt/shm_group.h"

namespace dcprt::test {

// Zeroed memory of exactly the size of an arena.
class Arena {
 public:
  Arena(uint32_t ranks, size_t slot_bytes, bool shared)
      : ranks_(ranks), slot_bytes_(slot_bytes), bytes_(ShmArena::Bytes(ranks, slot_bytes)), shared_(shared) {
    base_ = shared ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)
                   : std::aligned_alloc(kCacheLinePair, bytes_);
    if (!shared) std::memset(base_, 0, bytes_);
  }
  ~Arena() { shared_ ? static_cast<void>(munmap(base_, bytes_)) : std::free(base_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint32_t ranks() const { return ranks_; }
  ShmGroup Group(uint32_t rank) const { return ShmGroup(base_, rank, ranks_, slot_bytes_); }

 private:
  uint32_t ranks_;
  size_t slot_bytes_, bytes_;
  bool shared_;
  void* base_;
};

// Whether `work(rank)` is true on all ranks.
using Work = std::function<bool(uint32_t)>;

inline bool OnThreads(uint32_t ranks, const Work& work) {
  std::vector<char> right(ranks, 0);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { right[rank] = work(rank); });
  for (std::thread& thread : threads) thread.join();
  return std::find(right.begin(), right.end(), 0) == right.end();
}

}  // namespace dcprt::test

// The shared memory of one group of ranks: its layout, and the rounds by which ranks meet in it.
//
// Layout (the memory starts zeroed; `Bytes` gives the size):
//
//   GroupHeader | RankHeader[ranks] | padding to 4096 | slot 0 of rank 0, slot 1 of rank 0, slot 0 of rank 1, ...
//
// A collective is a sequence of rounds, numbered from 1 without gaps and alike on every rank. In round n a rank
//
//   1. begins: waits until every rank has arrived in round n-1 (true at once, except after a broadcast at its root),
//   2. writes its `Call` and its data into its own slot n % 2,
//   3. arrives: publishes n,
//   4. waits until the ranks whose data it needs have arrived in n, reads their slots n % 2.
//
// Why two slots suffice. Rank r writes its slot n % 2 again in round n, step 2. That slot held the data of round n-2.
// By step 1 every rank s has arrived in round n-1. s does round n-2, step 4, before it arrives in round n-1, so every
// read of the old data is over. (A rank never has two rounds open: the next one begins after step 4 of the last.)
// `Call` is kept in two copies for the same reason.
//
// Why the reads see the data. s publishes by `arrived.fetch_add` (sequentially consistent, hence a release) after its
// writes. A waiter leaves step 1 or 4 when an acquire load of `arrived` shows all arrivals of the round; all changes
// of `arrived` are read-modify-writes, so they form release sequences and that load synchronizes with each of them.
// In a broadcast a rank waits for the root alone, by an acquire load of the root's `posted`, which the root stores with
// release after its writes. The reads of s in round n-2 happen before its arrival in n-1, and so, by the same chain,
// before the writes of r in round n: the buffers are reused without a race.
//
// Why the count is exact. By step 1 nobody arrives in round n before all have arrived in n-1. So in round n `arrived`
// goes from (n-1)*ranks to n*ranks, and whoever brings it to n*ranks is the last. All of this is modulo 2^32; the
// differences that are compared are at most `ranks`.
//
// Why no wake-up is lost. A sleeper adds itself to `sleepers`, loads `arrived`, checks its condition, and sleeps only
// if `arrived` still has that value (the kernel compares). A rank that arrives changes `arrived`, then loads
// `sleepers`. All four are sequentially consistent: if the arriving rank reads no sleeper, its change precedes the
// sleeper's load, which then shows the condition fulfilled. Only the last arrival of a round and the root of a
// broadcast fulfil a condition, so only they wake; the others make no system call.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "dcprt/futex.h"

namespace dcprt {

constexpr size_t kCacheLinePair = 128;  // neighbouring lines are prefetched in pairs
constexpr size_t kArenaPage = 4096;

// What a rank was asked to do; equal on all ranks, or the call is refused.
struct Call {
  uint32_t op;     // an Op
  uint32_t dtype;  // opaque tag, compared only
  uint32_t root;
  uint32_t element_bytes;
  uint64_t bytes;  // of the input on one rank

  bool operator==(const Call& other) const {
    return op == other.op && dtype == other.dtype && root == other.root && element_bytes == other.element_bytes &&
           bytes == other.bytes;
  }
};

struct alignas(kCacheLinePair) GroupHeader {
  std::atomic<uint32_t> arrived;   // arrivals over all ranks and rounds; the word that is slept on
  std::atomic<uint32_t> sleepers;  // ranks asleep on it, or about to be
};

struct alignas(kCacheLinePair) RankHeader {
  std::atomic<uint32_t> posted;  // the last round this rank has arrived in
  Call calls[2];                 // of round n at n % 2
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "the words are shared between processes");
static_assert(sizeof(GroupHeader) == kCacheLinePair && sizeof(RankHeader) == kCacheLinePair, "layout");

class ShmArena {
 public:
  static size_t HeaderBytes(size_t ranks) {
    const size_t used = sizeof(GroupHeader) + ranks * sizeof(RankHeader);
    return (used + kArenaPage - 1) / kArenaPage * kArenaPage;
  }
  static size_t Bytes(size_t ranks, size_t slot_bytes) { return HeaderBytes(ranks) + ranks * 2 * slot_bytes; }

  ShmArena(void* base, uint32_t rank, uint32_t ranks, size_t slot_bytes)
      : base_(static_cast<char*>(base)), rank_(rank), ranks_(ranks), slot_bytes_(slot_bytes) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    const bool known = sched_getaffinity(0, sizeof(cpus), &cpus) == 0;
    spins_ = known && static_cast<uint32_t>(CPU_COUNT(&cpus)) >= ranks ? kSpins : 0;
  }

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  size_t slot_bytes() const { return slot_bytes_; }
  uint32_t round() const { return round_; }

  // The slot of `rank` in the current round.
  char* Slot(uint32_t rank) const { return SlotOf(rank, round_); }
  // The own slot of the round that begins next; free to be written once all have arrived in the current round.
  char* NextSlot() const { return SlotOf(rank_, round_ + 1); }

  // Publishes `call` and what was written to `NextSlot()`, and makes that round the current one.
  // `wakes`: this arrival alone lets others go on (the root of a broadcast).
  void Arrive(const Call& call, bool wakes) {
    ++round_;
    RankHeader& own = Header(rank_);
    own.calls[round_ % 2] = call;
    own.posted.store(round_, std::memory_order_release);
    GroupHeader& group = Group();
    const uint32_t arrived = group.arrived.fetch_add(1, std::memory_order_seq_cst) + 1;
    if ((wakes || arrived == round_ * ranks_) && group.sleepers.load(std::memory_order_seq_cst) != 0) {
      FutexWakeAll(&group.arrived);
    }
  }

  // Waits until every rank has arrived in the current round. False if the deadline passed.
  bool AwaitAll(const Deadline& deadline) {
    const uint32_t full = round_ * ranks_;
    return Await(deadline, [&] {
      return static_cast<int32_t>(Group().arrived.load(std::memory_order_seq_cst) - full) >= 0;
    });
  }

  // Waits until `rank` has arrived in the current round. False if the deadline passed.
  bool AwaitOne(uint32_t rank, const Deadline& deadline) {
    return Await(deadline, [&] { return HasArrived(rank); });
  }

  bool HasArrived(uint32_t rank) const {
    return static_cast<int32_t>(Header(rank).posted.load(std::memory_order_acquire) - round_) >= 0;
  }

  // What `rank` was asked to do in the current round; it must have arrived.
  const Call& CallOf(uint32_t rank) const { return Header(rank).calls[round_ % 2]; }

 private:
  static constexpr int kSpins = 1000;
  static constexpr int kYields = 64;

  GroupHeader& Group() const { return *reinterpret_cast<GroupHeader*>(base_); }
  RankHeader& Header(uint32_t rank) const {
    return reinterpret_cast<RankHeader*>(base_ + sizeof(GroupHeader))[rank];
  }
  char* SlotOf(uint32_t rank, uint32_t round) const {
    return base_ + HeaderBytes(ranks_) + (size_t{rank} * 2 + round % 2) * slot_bytes_;
  }

  // Spins where every rank can have a core, then lets others run, then sleeps.
  template <typename Ready>
  bool Await(const Deadline& deadline, Ready ready) {
    for (int i = 0; i < spins_; ++i) {
      if (ready()) return true;
      Pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (ready()) return true;
      sched_yield();
    }
    return Sleep(deadline, ready);
  }

  template <typename Ready>
  bool Sleep(const Deadline& deadline, Ready ready) {
    GroupHeader& group = Group();
    group.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool done = false;
    for (bool in_time = true; !done && in_time;) {
      const uint32_t seen = group.arrived.load(std::memory_order_seq_cst);
      done = ready();
      if (!done) in_time = FutexWait(&group.arrived, seen, deadline);
    }
    group.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return done || ready();
  }

  char* base_;
  uint32_t rank_;
  uint32_t ranks_;
  size_t slot_bytes_;
  uint32_t round_ = 0;
  int spins_;
};

}  // namespace dcprt

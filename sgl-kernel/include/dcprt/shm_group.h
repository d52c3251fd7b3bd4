// Collectives of one group of ranks over a ShmArena.
//
// `Start` copies the first piece of the input and publishes it; `Finish` waits for the others, takes what they
// published and goes on with the remaining pieces. One call is open at a time. See shm_arena.h for the protocol.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dcprt/bfloat16.h"
#include "dcprt/shm_arena.h"
#include "dcprt/sum.h"

namespace dcprt {

enum Op : uint32_t { kAllReduce = 1, kAllGather, kReduceScatter, kAllToAll, kBroadcast, kBarrier };

// How the dtype of a call is written: the code of DLPack, and the bits of an element.
constexpr uint32_t kFloatCode = 2, kBFloatCode = 4;
constexpr uint32_t DtypeTag(uint32_t code, uint32_t bits) { return code << 16 | bits; }

enum class Status : int { kDone = 0, kTimeout = 1, kMismatch = 2 };

// N = ranks. Inputs and outputs are contiguous; `bytes` is the size of the input:
//   kAllReduce      [bytes] -> [bytes], in place allowed; float32 (4) or bfloat16 (2) by element_bytes
//   kAllGather      [bytes] -> [N, bytes]
//   kReduceScatter  [N, bytes/N] -> [bytes/N]; element types as above
//   kAllToAll       [N, bytes/N] -> [N, bytes/N], in place allowed
//   kBroadcast      [bytes] of the root -> [bytes] elsewhere; `in` and `out` are the same memory
//   kBarrier        nothing
class ShmGroup {
 public:
  ShmGroup(void* base, uint32_t rank, uint32_t ranks, size_t slot_bytes)
      : arena_(base, rank, ranks, slot_bytes), parts_(ranks) {}

  const ShmArena& arena() const { return arena_; }
  // The call that was started last, and how it ended.
  const Call& call() const { return call_; }
  Status status() const { return status_; }

  Status Run(const Call& call, const void* in, void* out, const Deadline& deadline) {
    const Status status = Start(call, in, out, deadline);
    return status == Status::kDone ? Finish(deadline) : status;
  }

  Status Start(const Call& call, const void* in, void* out, const Deadline& deadline) {
    call_ = call;
    in_ = static_cast<const char*>(in);
    out_ = static_cast<char*>(out);
    const bool scattered = call.op == kReduceScatter || call.op == kAllToAll;
    segment_ = scattered ? call.bytes / arena_.ranks() : call.bytes;
    step_ = (scattered ? arena_.slot_bytes() / arena_.ranks() : arena_.slot_bytes()) / kAlign * kAlign;
    done_ = 0;
    return status_ = Post(deadline);
  }

  Status Finish(const Deadline& deadline) { return status_ = Remaining(deadline); }

 private:
  Status Remaining(const Deadline& deadline) {
    for (;;) {
      Status status = Take(deadline);
      if (status != Status::kDone) return status;
      done_ += Piece();
      if (done_ >= segment_) return Status::kDone;
      status = Post(deadline);
      if (status != Status::kDone) return status;
    }
  }

  static constexpr size_t kAlign = 64;
  // From here on an all-reduce divides the sum among the ranks: one more round, but less to read.
  static constexpr size_t kDivideBytes = 16384;

  size_t Piece() const { return std::min(step_, segment_ - done_); }
  bool Divided() const { return arena_.ranks() > 2 && Piece() >= kDivideBytes; }

  static void Copy(void* to, const void* from, size_t bytes) {
    if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
  }

  // After a broadcast a rank has seen no more than the root: the round is completed, and compared, before the next.
  Status Complete(const Deadline& deadline) {
    if (compared_ == arena_.round()) return Status::kDone;
    if (!arena_.AwaitAll(deadline)) return Status::kTimeout;
    for (uint32_t j = 0; j < arena_.ranks(); ++j) {
      if (!(arena_.CallOf(j) == arena_.CallOf(arena_.rank()))) return Status::kMismatch;
    }
    compared_ = arena_.round();
    return Status::kDone;
  }

  Status Post(const Deadline& deadline) {
    const Status status = Complete(deadline);
    if (status != Status::kDone) return status;
    char* slot = arena_.NextSlot();
    const bool is_root = call_.op == kBroadcast && call_.root == arena_.rank();
    switch (call_.op) {
      case kReduceScatter:
      case kAllToAll:
        for (uint32_t j = 0; j < arena_.ranks(); ++j) Copy(slot + j * step_, in_ + j * segment_ + done_, Piece());
        break;
      case kAllReduce:
      case kAllGather:
        Copy(slot, in_ + done_, Piece());
        break;
      case kBroadcast:
        if (is_root) Copy(slot, in_ + done_, Piece());
        break;
      default:
        break;
    }
    arena_.Arrive(call_, is_root);
    return Status::kDone;
  }

  Status Take(const Deadline& deadline) {
    if (call_.op == kBroadcast) return TakeBroadcast(deadline);
    const Status status = Complete(deadline);
    if (status != Status::kDone) return status;
    const uint32_t rank = arena_.rank();
    switch (call_.op) {
      case kAllReduce:
        if (Divided()) return SumDivided(deadline);
        SumSlots(0, out_ + done_, Piece());
        break;
      case kReduceScatter:
        SumSlots(rank * step_, out_ + done_, Piece());
        break;
      case kAllGather:
        for (uint32_t j = 0; j < arena_.ranks(); ++j) Copy(out_ + j * segment_ + done_, arena_.Slot(j), Piece());
        break;
      case kAllToAll:
        for (uint32_t j = 0; j < arena_.ranks(); ++j) {
          Copy(out_ + j * segment_ + done_, arena_.Slot(j) + rank * step_, Piece());
        }
        break;
      default:
        break;
    }
    return Status::kDone;
  }

  Status TakeBroadcast(const Deadline& deadline) {
    if (call_.root == arena_.rank()) return Status::kDone;
    if (!arena_.AwaitOne(call_.root, deadline)) return Status::kTimeout;
    if (!(arena_.CallOf(call_.root) == call_)) return Status::kMismatch;
    Copy(out_ + done_, arena_.Slot(call_.root), Piece());
    return Status::kDone;
  }

  // Each rank sums its part of the piece into its next slot, at the same place, and collects the parts of the others.
  Status SumDivided(const Deadline& deadline) {
    const size_t piece = Piece();
    const size_t part = (piece / arena_.ranks() + kAlign - 1) / kAlign * kAlign;
    const auto begin = [&](size_t j) { return std::min(piece, j * part); };
    // The last part takes what rounding left over.
    const auto end = [&](size_t j) { return j + 1 == arena_.ranks() ? piece : begin(j + 1); };
    const uint32_t rank = arena_.rank();
    SumSlots(begin(rank), arena_.NextSlot() + begin(rank), end(rank) - begin(rank));
    arena_.Arrive(call_, false);
    const Status status = Complete(deadline);
    if (status != Status::kDone) return status;
    for (uint32_t j = 0; j < arena_.ranks(); ++j) {
      Copy(out_ + done_ + begin(j), arena_.Slot(j) + begin(j), end(j) - begin(j));
    }
    return Status::kDone;
  }

  // to = the sum over ranks, in rank order, of `bytes` bytes at `at` of every slot.
  void SumSlots(size_t at, char* to, size_t bytes) {
    for (uint32_t j = 0; j < arena_.ranks(); ++j) parts_[j] = arena_.Slot(j) + at;
    if (call_.element_bytes == sizeof(BFloat16)) {
      SumInOrder(parts_.data(), parts_.size(), reinterpret_cast<BFloat16*>(to), bytes / sizeof(BFloat16));
    } else {
      SumInOrder(parts_.data(), parts_.size(), reinterpret_cast<float*>(to), bytes / sizeof(float));
    }
  }

  ShmArena arena_;
  std::vector<const void*> parts_;
  uint32_t compared_ = 0;  // the last round in which the calls of all ranks were compared
  Call call_{};
  Status status_ = Status::kDone;
  const char* in_ = nullptr;
  char* out_ = nullptr;
  size_t segment_ = 0;  // bytes of one segment: the input, or the part of it that goes to one rank
  size_t step_ = 0;     // bytes of a segment that fit into a slot in one round
  size_t done_ = 0;     // bytes of every segment that are through
};

}  // namespace dcprt

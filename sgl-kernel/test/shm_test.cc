// Collectives over one arena, with threads and with forked processes for ranks; sums are compared bit by bit.
#include "dcprt/shm_group.h"

#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <vector>

#include "harness.h"
#include "ranks.h"

namespace dcprt::test {
namespace {

constexpr double kPatience = 60;

bool OnProcesses(uint32_t ranks, const Work& work) {
  std::vector<pid_t> children;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(work(rank) ? 0 : 1);
    children.push_back(child);
  }
  bool ok = true;
  for (const pid_t child : children) {
    int status = 1;
    ok = waitpid(child, &status, 0) == child && status == 0 && ok;
  }
  return ok;
}

// What rank `rank` puts in, the same wherever it is asked for.
Array Input(uint32_t rank, size_t count, bool narrow, int turn) {
  Array x(count, narrow);
  Random random(rank * 1000 + static_cast<uint64_t>(turn));
  random.Fill(x, 10 * (rank + 1));
  return x;
}

bool Call(ShmGroup& group, Op op, const Array& x, Array& out, uint32_t root) {
  const uint32_t width = x.narrow() ? 2 : 4;
  const dcprt::Call call{op, width, root, width, x.size() * width};
  return group.Start(call, x.data(), out.data(), Deadline::After(kPatience)) == Status::kDone &&
         group.Finish(Deadline::After(kPatience)) == Status::kDone;
}

// Element `i` of the sum over ranks, in their order, in float32.
double Sum(const std::vector<Array>& inputs, size_t i) {
  float sum = static_cast<float>(inputs[0][i]);
  for (size_t j = 1; j < inputs.size(); ++j) sum += static_cast<float>(inputs[j][i]);
  return inputs[0].narrow() ? ToFloat(ToBFloat16(sum)) : sum;
}

// Every operation on one rank, with `count` elements in a segment.
bool AllOperations(ShmGroup& group, size_t count, bool narrow, int turn) {
  const uint32_t rank = group.arena().rank(), ranks = group.arena().ranks();
  const auto inputs = [&](size_t size) {
    std::vector<Array> all;
    for (uint32_t j = 0; j < ranks; ++j) all.push_back(Input(j, size, narrow, turn));
    return all;
  };
  std::vector<Array> one = inputs(count), many = inputs(count * ranks);
  bool ok = true;

  Array sum(count, narrow);
  ok = Call(group, kAllReduce, one[rank], sum, 0) && ok;
  for (size_t i = 0; i < count; ++i) ok = ok && sum[i] == Sum(one, i);

  Array in_place = Input(rank, count, narrow, turn);
  ok = Call(group, kAllReduce, in_place, in_place, 0) && ok;
  for (size_t i = 0; i < count; ++i) ok = ok && in_place[i] == sum[i];

  Array gathered(count * ranks, narrow);
  ok = Call(group, kAllGather, one[rank], gathered, 0) && ok;
  for (size_t i = 0; i < count * ranks; ++i) ok = ok && gathered[i] == one[i / count][i % count];

  Array scattered(count, narrow);
  ok = Call(group, kReduceScatter, many[rank], scattered, 0) && ok;
  for (size_t i = 0; i < count; ++i) ok = ok && scattered[i] == Sum(many, rank * count + i);

  Array exchanged(count * ranks, narrow);
  ok = Call(group, kAllToAll, many[rank], exchanged, 0) && ok;
  for (size_t i = 0; i < count * ranks; ++i) ok = ok && exchanged[i] == many[i / count][rank * count + i % count];

  ok = Call(group, kAllToAll, many[rank], many[rank], 0) && ok;
  for (size_t i = 0; i < count * ranks; ++i) ok = ok && many[rank][i] == exchanged[i];

  const uint32_t root = static_cast<uint32_t>(turn) % ranks;
  Array sent = Input(rank, count, narrow, turn);
  ok = Call(group, kBroadcast, sent, sent, root) && ok;
  for (size_t i = 0; i < count; ++i) ok = ok && sent[i] == one[root][i];

  Array nothing(0);
  return Call(group, kBarrier, nothing, nothing, 0) && ok;
}

void TestOperations(uint32_t ranks, size_t slot_bytes, bool processes) {
  const Arena arena(ranks, slot_bytes, processes);
  const auto work = [&](uint32_t rank) {
    ShmGroup group = arena.Group(rank);
    bool ok = true;
    int turn = 0;
    for (const size_t count : {0, 1, 15, 1023, 1025, 4097, 20001}) {
      for (const bool narrow : {false, true}) ok = AllOperations(group, count, narrow, turn++) && ok;
    }
    return ok;
  };
  const bool ok = processes ? OnProcesses(ranks, work) : OnThreads(ranks, work);
  Expect(ok, Label(processes ? "operations of processes" : "operations of threads", ranks, slot_bytes));
}

// Ranks run ahead of each other by as much as the protocol lets them.
void TestManyRounds(uint32_t ranks) {
  const Arena arena(ranks, 4096, false);
  const bool ok = OnThreads(ranks, [&](uint32_t rank) {
    ShmGroup group = arena.Group(rank);
    bool right = true;
    for (int turn = 0; turn < 500; ++turn) {
      Array x(3);
      x.Fill(rank + turn);
      const bool sent = turn % 3 == 0;
      right = Call(group, sent ? kBroadcast : kAllReduce, x, x, static_cast<uint32_t>(turn) % ranks) && right;
      const uint32_t all = ranks * (ranks - 1) / 2 + ranks * static_cast<uint32_t>(turn);
      right = right && x[2] == (sent ? static_cast<uint32_t>(turn) % ranks + static_cast<uint32_t>(turn) : all);
    }
    return right;
  });
  Expect(ok, Label("many rounds", ranks));
}

void TestMissingRank() {
  const Arena arena(3, 4096, false);
  ShmGroup group = arena.Group(1);
  Array x(3);
  const dcprt::Call call{kAllReduce, 4, 0, 4, 12};
  Expect(group.Start(call, x.data(), x.data(), Deadline::After(kPatience)) == Status::kDone, "start alone");
  Expect(group.Finish(Deadline::After(0.01)) == Status::kTimeout, "two ranks are missing");
  Expect(!group.arena().HasArrived(0) && group.arena().HasArrived(1), "who is missing");
}

void TestDifferentCalls() {
  const Arena arena(2, 4096, false);
  const bool ok = OnThreads(2, [&](uint32_t rank) {
    ShmGroup group = arena.Group(rank);
    Array x(3 + rank), out(3 + rank);
    const dcprt::Call call{kAllReduce, 4, 0, 4, x.size() * 4};
    return group.Start(call, x.data(), out.data(), Deadline::After(kPatience)) == Status::kDone &&
           group.Finish(Deadline::After(kPatience)) == Status::kMismatch;
  });
  Expect(ok, "different calls");
}

}  // namespace

void TestShm() {
  for (const uint32_t ranks : {1u, 2u, 3u, 5u}) {
    for (const size_t slot_bytes : {4096, 65536}) {
      TestOperations(ranks, slot_bytes, false);
#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not see what other processes do
      TestOperations(ranks, slot_bytes, true);
#endif
    }
    TestManyRounds(ranks);
  }
  TestMissingRank();
  TestDifferentCalls();
}

}  // namespace dcprt::test

// The thread pool: every part exactly once, whoever asks, and after a fork.
#include "dcprt/threads.h"

#include <sys/wait.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

// Sums that only come out right if what a part writes is seen by the caller, and by whoever runs the part next.
bool EachPartOnce(int threads, uint32_t parts, int times) {
  const std::unique_ptr<long[]> seen(new long[parts]());
  for (int i = 0; i < times; ++i) ThreadPool::Get().Run(threads, parts, [&](uint32_t part) { seen[part] += i + 1; });
  bool ok = true;
  for (uint32_t part = 0; part < parts; ++part) ok = ok && seen[part] == static_cast<long>(times) * (times + 1) / 2;
  return ok;
}

void SeveralCallers() {
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back([&] { right += EachPartOnce(3, 7, 200) ? 1 : 0; });
  for (std::thread& caller : callers) caller.join();
  Expect(right == 4, "several callers");
}

}  // namespace

void TestThreads() {
  for (const int threads : {0, 1, 2, 3, 8}) {
    for (const uint32_t parts : {0u, 1u, 2u, 7u, 100u}) {
      Expect(EachPartOnce(threads, parts, 100), Label("parts", threads, parts));
    }
  }
  Expect(EachPartOnce(80, 300, 3), "more threads than the pool has");
  SeveralCallers();
}

void TestFork() {
  Expect(EachPartOnce(3, 16, 100), "before a fork");
  const pid_t child = fork();
  if (child == 0) _exit(EachPartOnce(3, 16, 100) ? 0 : 1);
  Expect(EachPartOnce(3, 16, 100), "beside a forked child");
  int status = 1;
  Expect(waitpid(child, &status, 0) == child && status == 0, "in a forked child");
}

}  // namespace dcprt::test

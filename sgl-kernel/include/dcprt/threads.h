// A few threads that take parts of a loop, beside the thread that calls.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>

#include "dcprt/futex.h"

namespace dcprt {

// Threads are started when first asked for, and sleep between jobs; they live as long as the process.
// One job runs at a time: a second caller meanwhile does all parts of its job itself.
class ThreadPool {
 public:
  // The pool of this process. A forked child gets a new one, since threads do not survive a fork.
  static ThreadPool& Get() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { Slot() = new ThreadPool(); }); });
    return *Slot();
  }

  // Calls `work(part)` for every part in [0, parts), on at most `threads` threads, and returns when all are done.
  // `work` must not throw.
  template <class Work>
  void Run(int threads, uint32_t parts, const Work& work) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (threads < 2 || parts < 2 || !lock.owns_lock()) {
      for (uint32_t part = 0; part < parts; ++part) work(part);
      return;
    }
    while (started_ < threads - 1 && started_ < kMost) {
      std::thread(&ThreadPool::Serve, this, started_).detach();
      ++started_;
    }
    call_ = [](const void* job, uint32_t part) { (*static_cast<const Work*>(job))(part); };
    job_ = &work;
    helpers_.store(threads - 1, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint32_t round = round_.load(std::memory_order_relaxed) + 1;
    ticket_.store(static_cast<uint64_t>(round) << 32 | parts, std::memory_order_release);
    round_.store(round, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) Wake(&round_);
    TakeParts(round);
    for (int spins = 0; done_.load(std::memory_order_acquire) != parts; ++spins) {
      if (spins < kSpins) {
        Pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kMost = 64;
  // Some ten microseconds: the next product of a layer often comes within them.
  static constexpr int kSpins = 2000;

  static ThreadPool*& Slot() {
    static ThreadPool* pool = new ThreadPool();
    return pool;
  }

  static void Sleep(std::atomic<uint32_t>* word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  }

  static void Wake(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void Serve(int index) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < kSpins && round_.load(std::memory_order_acquire) == seen; ++spins) Pause();
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      while (round_.load(std::memory_order_seq_cst) == seen) Sleep(&round_, seen);
      sleeping_.fetch_sub(1, std::memory_order_relaxed);
      seen = round_.load(std::memory_order_acquire);
      if (index < helpers_.load(std::memory_order_relaxed)) TakeParts(seen);
    }
  }

  // A part taken of a round keeps that round open, so `call_` and `job_` belong to it.
  void TakeParts(uint32_t round) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == round && static_cast<uint32_t>(ticket) > 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      call_(job_, static_cast<uint32_t>(ticket) - 1);
      done_.fetch_add(1, std::memory_order_acq_rel);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  std::mutex mutex_;
  int started_ = 0;
  void (*call_)(const void*, uint32_t) = nullptr;
  const void* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<int> helpers_{0};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
};

}  // namespace dcprt

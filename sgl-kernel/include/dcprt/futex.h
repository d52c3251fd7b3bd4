// Sleeping on a word in shared memory (Linux futex), and deadlines for it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace dcprt {

// A point on the monotonic clock.
struct Deadline {
  timespec at;

  static Deadline After(double seconds) {
    constexpr double kFarAway = 1e9;
    if (!(seconds < kFarAway)) seconds = kFarAway;
    if (seconds < 0) seconds = 0;
    Deadline deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline.at);
    const auto whole = static_cast<time_t>(seconds);
    deadline.at.tv_sec += whole;
    deadline.at.tv_nsec += static_cast<long>((seconds - static_cast<double>(whole)) * 1e9);
    if (deadline.at.tv_nsec >= 1000000000L) {
      deadline.at.tv_nsec -= 1000000000L;
      deadline.at.tv_sec += 1;
    }
    return deadline;
  }
};

// Sleeps while `word` holds `seen`, until woken. False if the deadline passed. May also wake for no reason.
// The word is shared between processes, hence no FUTEX_PRIVATE_FLAG.
inline bool FutexWait(std::atomic<uint32_t>* word, uint32_t seen, const Deadline& deadline) {
  const long rc = syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_BITSET, seen, &deadline.at, nullptr,
                          FUTEX_BITSET_MATCH_ANY);
  return rc == 0 || errno != ETIMEDOUT;
}

inline void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace dcprt

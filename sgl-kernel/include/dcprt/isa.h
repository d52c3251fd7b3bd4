// Which instruction set the kernels of this process use: the best one the processor has, or the one asked for.
#pragma once

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace dcprt {

// In rising order; each can do what those before it can. DCPRT_OF_EVERY_ISA has the object of that name in the namespace
// of each, in the same order.
#if defined(__x86_64__)
enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };
constexpr const char* kIsaNames[] = {"generic", "avx2", "avx512", "avx512bf16"};
#define DCPRT_OF_EVERY_ISA(name) {&generic::name, &avx2::name, &avx512::name, &avx512bf16::name}
#elif defined(__aarch64__)
enum class Isa : int { kGeneric = 0, kNeon = 1 };
constexpr const char* kIsaNames[] = {"generic", "neon"};
#define DCPRT_OF_EVERY_ISA(name) {&generic::name, &neon::name}
#else
enum class Isa : int { kGeneric = 0 };
constexpr const char* kIsaNames[] = {"generic"};
#define DCPRT_OF_EVERY_ISA(name) {&generic::name}
#endif

inline const char* NameOf(Isa isa) { return kIsaNames[static_cast<int>(isa)]; }

inline Isa BestIsa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kGeneric;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx2;
  }
  return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
#elif defined(__aarch64__)
  return Isa::kNeon;
#else
  return Isa::kGeneric;
#endif
}

// Names that this processor can run, slowest first.
inline std::vector<std::string> PossibleIsas() {
  return std::vector<std::string>(kIsaNames, kIsaNames + static_cast<int>(BestIsa()) + 1);
}

// The instruction set of that name; empty is the best one. Throws std::invalid_argument, naming the possible ones.
inline Isa IsaNamed(const std::string& name) {
  if (name.empty()) return BestIsa();
  const std::vector<std::string> possible = PossibleIsas();
  std::string known;
  for (size_t i = 0; i < possible.size(); ++i) {
    if (possible[i] == name) return static_cast<Isa>(i);
    known += (i == 0 ? "" : ", ") + possible[i];
  }
  throw std::invalid_argument("DCPRT_KERNEL_ISA is '" + name + "'; this processor can run " + known + ".");
}

inline std::atomic<int>& IsaWord() {
  static std::atomic<int> word{-1};
  return word;
}

// Overrides DCPRT_KERNEL_ISA from now on.
inline void SelectIsa(Isa isa) { IsaWord().store(static_cast<int>(isa), std::memory_order_relaxed); }

// DCPRT_KERNEL_ISA is read at the first call. Throws std::invalid_argument as `IsaNamed` does.
inline Isa CurrentIsa() {
  const int seen = IsaWord().load(std::memory_order_relaxed);
  if (seen >= 0) return static_cast<Isa>(seen);
  const char* name = std::getenv("DCPRT_KERNEL_ISA");
  const Isa isa = IsaNamed(name == nullptr ? "" : name);
  SelectIsa(isa);
  return isa;
}

}  // namespace dcprt

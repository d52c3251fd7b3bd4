// Sums of several arrays, element by element, in the order of the arrays.
//
// The order is part of the contract: every rank adds the same numbers in the same order and so gets the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dcprt/bfloat16.h"
#include "dcprt/multiversion.h"

namespace dcprt {

// Elements that are accumulated at a time; a block of float32 stays in the first-level cache.
constexpr size_t kSumBlock = 1024;

// out[i] = a[i] + b[i]
DCPRT_MULTIVERSION static void AddTwo(const float* __restrict a, const float* __restrict b, float* __restrict out,
                                      size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

// acc[i] += x[i]
DCPRT_MULTIVERSION static void AddTo(float* __restrict acc, const float* __restrict x, size_t count) {
  for (size_t i = 0; i < count; ++i) acc[i] += x[i];
}

DCPRT_MULTIVERSION static void Widen(const BFloat16* __restrict x, float* __restrict out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = ToFloat(x[i]);
}

DCPRT_MULTIVERSION static void AddWidened(float* __restrict acc, const BFloat16* __restrict x, size_t count) {
  for (size_t i = 0; i < count; ++i) acc[i] += ToFloat(x[i]);
}

DCPRT_MULTIVERSION static void Narrow(const float* __restrict x, BFloat16* __restrict out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = ToBFloat16(x[i]);
}

// out = parts[0] + parts[1] + ...; `out` overlaps no part. `n` is at least 1.
inline void SumInOrder(const void* const* parts, size_t n, float* out, size_t count) {
  for (size_t at = 0; at < count; at += kSumBlock) {
    const size_t block = std::min(kSumBlock, count - at);
    const auto part = [&](size_t j) { return static_cast<const float*>(parts[j]) + at; };
    if (n == 1) {
      std::memcpy(out + at, part(0), block * sizeof(float));
      continue;
    }
    AddTwo(part(0), part(1), out + at, block);
    for (size_t j = 2; j < n; ++j) AddTo(out + at, part(j), block);
  }
}

// The same for bfloat16: summed in float32, rounded once.
inline void SumInOrder(const void* const* parts, size_t n, BFloat16* out, size_t count) {
  alignas(64) float acc[kSumBlock];
  for (size_t at = 0; at < count; at += kSumBlock) {
    const size_t block = std::min(kSumBlock, count - at);
    Widen(static_cast<const BFloat16*>(parts[0]) + at, acc, block);
    for (size_t j = 1; j < n; ++j) AddWidened(acc, static_cast<const BFloat16*>(parts[j]) + at, block);
    Narrow(acc, out + at, block);
  }
}

}  // namespace dcprt

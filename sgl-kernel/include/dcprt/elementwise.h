// What lies between the matrix products: RMS norm, SiLU, rotation, the greatest logit. One call, one pass over memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "dcprt/bfloat16.h"
#include "dcprt/isa.h"
#include "dcprt/simd.h"
#include "dcprt/threads.h"

namespace dcprt {
namespace elementwise_detail {

constexpr size_t kLanes = 16;

// Elements below which a second thread costs more than it gains.
constexpr size_t kThreadedElements = 128 << 10;

#define DCPRT_FLAT inline __attribute__((always_inline))

DCPRT_FLAT float Get(float x) { return x; }
DCPRT_FLAT float Get(BFloat16 x) { return ToFloat(x); }
DCPRT_FLAT void Put(float value, float* out) { *out = value; }
DCPRT_FLAT void Put(float value, BFloat16* out) { *out = ToBFloat16(value); }

// e^x within 2 units in the last place between -87 and 88; below, the value at -87, above, infinity. NaN is NaN.
DCPRT_FLAT float Exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float low = x < -87.0f ? -87.0f : x;
  const float in = low > 88.0f ? 88.0f : low;
  const float shifted = in * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (in - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const uint32_t power = (bits << 23) + 0x3f800000u;
  float scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return x > 88.0f ? std::numeric_limits<float>::infinity() : p * scale;
}

namespace generic {
#define DCPRT_TARGET
#include "dcprt/elementwise_loops.h"
#undef DCPRT_TARGET
}  // namespace generic

#if defined(__x86_64__)
namespace avx2 {
#define DCPRT_TARGET DCPRT_TARGET_OF(DCPRT_AVX2)
#include "dcprt/elementwise_loops.h"
#undef DCPRT_TARGET
}  // namespace avx2

namespace avx512 {
#define DCPRT_TARGET DCPRT_TARGET_OF(DCPRT_AVX512)
#include "dcprt/elementwise_loops.h"
#undef DCPRT_TARGET
}  // namespace avx512
#endif

#undef DCPRT_FLAT

// Calls `work(loops)` with the loops of `isa`.
template <class Work>
void With([[maybe_unused]] Isa isa, const Work& work) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return work(avx512::Loops{});
  if (isa == Isa::kAvx2) return work(avx2::Loops{});
#endif
  work(generic::Loops{});
}

// Calls `work(row)` for all rows, on several threads where there is much to do.
template <class Work>
void Rows(size_t rows, size_t row_elements, int threads, const Work& work) {
  const size_t wanted = rows * row_elements < kThreadedElements ? 1 : static_cast<size_t>(std::max(threads, 1)) * 4;
  const size_t parts = std::max<size_t>(1, std::min(rows, wanted));
  ThreadPool::Get().Run(parts == 1 ? 1 : threads, static_cast<uint32_t>(parts), [&](uint32_t part) {
    for (size_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) work(row);
  });
}

}  // namespace elementwise_detail

// out[rows, count] = x / rms(x) * weight, x: [rows, count], rows `x_stride` elements apart.
template <class X, class W, class O>
void RmsNorm(const X* x, size_t x_stride, const W* weight, float eps, O* out, size_t rows, size_t count, Isa isa,
             int threads) {
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(rows, count, threads, [&](size_t row) {
      loops.Norm(x + row * x_stride, weight, eps, out + row * count, count);
    });
  });
}

// x += y, then out = x / rms(x) * weight; all [rows, count], dense.
template <class W, class O>
void AddRmsNorm(float* x, const float* y, const W* weight, float eps, O* out, size_t rows, size_t count, Isa isa,
                int threads) {
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(rows, count, threads, [&](size_t row) {
      loops.Add(x + row * count, y + row * count, count);
      loops.Norm(x + row * count, weight, eps, out + row * count, count);
    });
  });
}

// x += y: [count], for every row of x: [rows, count], dense.
template <class Y>
void AddToRows(float* x, const Y* y, size_t rows, size_t count, Isa isa, int threads) {
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(rows, count, threads, [&](size_t row) { loops.Add(x + row * count, y, count); });
  });
}

// Norms every head of x: [tokens, heads, dim] in place, tokens `token_stride` elements apart, heads dense.
template <class X>
void NormHeads(X* x, size_t token_stride, const X* weight, float eps, size_t tokens, size_t heads, size_t dim, Isa isa,
               int threads) {
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(tokens, heads * dim, threads, [&](size_t token) {
      for (size_t head = 0; head < heads; ++head) loops.Norm(x + token * token_stride + head * dim, weight, eps, dim);
    });
  });
}

// out[rows, count] = silu(x[:, :count]) * x[:, count:], x: [rows, 2 * count], rows `x_stride` elements apart.
template <class X>
void SiluMul(const X* x, size_t x_stride, X* out, size_t rows, size_t count, Isa isa, int threads) {
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(rows, count, threads, [&](size_t row) {
      const X* gate = x + row * x_stride;
      loops.SiluMul(gate, gate + count, out + row * count, count);
    });
  });
}

// Rotates the first 2 * half dimensions of every head of x: [tokens, heads, dim] in place, with the strides given.
// cos and sin: [tokens, half].
template <class X>
void Rotate(X* x, size_t token_stride, size_t head_stride, const float* cos, const float* sin, size_t tokens,
            size_t heads, size_t half, Isa isa, int threads) {
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(tokens, heads * half, threads, [&](size_t token) {
      for (size_t head = 0; head < heads; ++head) {
        X* at = x + token * token_stride + head * head_stride;
        loops.Rotate(at, cos + token * half, sin + token * half, half);
      }
    });
  });
}

// Place of the greatest element of each row, the first of equals, and its value; a NaN counts as the greatest of all.
// x: [rows, count], rows `x_stride` elements apart; count is at least 1.
inline void ArgMax(const float* x, size_t x_stride, int64_t* places, float* values, size_t rows, size_t count, Isa isa,
                   int threads) {
  constexpr size_t kBlock = 1024;
  elementwise_detail::With(isa, [&](auto loops) {
    elementwise_detail::Rows(rows, count, threads, [&](size_t row) {
      const float* from = x + row * x_stride;
      size_t block = 0;
      float best = loops.Max(from, std::min(kBlock, count));
      for (size_t at = kBlock; at < count && best == best; at += kBlock) {
        const float found = loops.Max(from + at, std::min(kBlock, count - at));
        if (!(found <= best)) {
          best = found;
          block = at;
        }
      }
      size_t place = block;
      while (best == best ? from[place] != best : from[place] == from[place]) ++place;
      places[row] = static_cast<int64_t>(place);
      values[row] = best;
    });
  });
}

}  // namespace dcprt

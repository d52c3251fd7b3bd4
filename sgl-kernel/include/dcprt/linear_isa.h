// What the loop of linear_tile.h needs to know of each instruction set.
//
// A bfloat16 is the upper half of a float32: where there is no product of bfloat16, pairs of them are split into those at
// even and those at odd places by a shift and a mask, and x is prepared in the same order (kSplit).
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dcprt/bfloat16.h"

namespace dcprt::linear_detail {

namespace generic {

#define DCPRT_TARGET
#include "dcprt/linear_tile.h"

// Lanes the compiler maps to what the baseline has.
template <class W>
struct Lanes {
  using Weight = W;
  using In = float;
  static constexpr size_t kStep = 16;
  static constexpr int kN = 2;
  static constexpr bool kSplit = false;
  struct Wide {
    float lane[16];
  };
  using WideIn = Wide;
  using Sum = Wide;

  static float Widen(float x) { return x; }
  static float Widen(BFloat16 x) { return ToFloat(x); }
  static void Clear(Sum* sum) { *sum = Wide{}; }
  static Wide Load(const W* from) {
    Wide out;
    for (int i = 0; i < 16; ++i) out.lane[i] = Widen(from[i]);
    return out;
  }
  static Wide LoadTail(const W* from, size_t count) {
    Wide out{};
    for (size_t i = 0; i < count; ++i) out.lane[i] = Widen(from[i]);
    return out;
  }
  static WideIn LoadIn(const float* from) {
    WideIn out;
    std::memcpy(out.lane, from, sizeof(out.lane));
    return out;
  }
  static void MultiplyAdd(const Wide& w, const WideIn& x, Sum* sum) {
    for (int i = 0; i < 16; ++i) sum->lane[i] += w.lane[i] * x.lane[i];
  }
  template <int N>
  static void Total(const Sum* acc, float* out) {
    for (int n = 0; n < N; ++n) {
      Sum sum = acc[n];
      for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sum.lane[i] += sum.lane[i + width];
      }
      out[n] = sum.lane[0];
    }
  }
};

using Fp32 = Loop<Lanes<float>>;
using Bf16 = Loop<Lanes<BFloat16>>;

#undef DCPRT_INLINE
#undef DCPRT_TARGET

}  // namespace generic

#if defined(__x86_64__)

namespace avx2 {

#define DCPRT_TARGET __attribute__((target("avx2,fma")))
#include "dcprt/linear_tile.h"

struct Base {
  using In = float;
  using Sum = __m256;
  static constexpr int kN = 2;

  DCPRT_INLINE static void Clear(Sum* sum) { *sum = _mm256_setzero_ps(); }
  template <int N>
  DCPRT_INLINE static void Total(const Sum* acc, float* out) {
    for (int n = 0; n < N; ++n) {
      __m128 half = _mm_add_ps(_mm256_castps256_ps128(acc[n]), _mm256_extractf128_ps(acc[n], 1));
      half = _mm_add_ps(half, _mm_movehl_ps(half, half));
      out[n] = _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
  }
};

struct Fp32Lanes : Base {
  using Weight = float;
  using Wide = __m256;
  using WideIn = __m256;
  static constexpr size_t kStep = 8;
  static constexpr bool kSplit = false;

  DCPRT_INLINE static Wide Load(const float* from) { return _mm256_loadu_ps(from); }
  DCPRT_INLINE static Wide LoadTail(const float* from, size_t count) {
    float whole[kStep] = {};
    std::memcpy(whole, from, count * sizeof(float));
    return _mm256_loadu_ps(whole);
  }
  DCPRT_INLINE static WideIn LoadIn(const float* from) { return _mm256_loadu_ps(from); }
  DCPRT_INLINE static void MultiplyAdd(Wide w, WideIn x, Sum* sum) { *sum = _mm256_fmadd_ps(w, x, *sum); }
};

struct Bf16Lanes : Base {
  using Weight = BFloat16;
  struct Wide {
    __m256 even, odd;
  };
  using WideIn = Wide;
  static constexpr size_t kStep = 16;
  static constexpr bool kSplit = true;

  DCPRT_INLINE static Wide Load(const BFloat16* from) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
  }
  DCPRT_INLINE static Wide LoadTail(const BFloat16* from, size_t count) {
    BFloat16 whole[kStep] = {};
    std::memcpy(whole, from, count * sizeof(BFloat16));
    return Load(whole);
  }
  DCPRT_INLINE static WideIn LoadIn(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  DCPRT_INLINE static void MultiplyAdd(const Wide& w, const WideIn& x, Sum* sum) {
    *sum = _mm256_fmadd_ps(w.even, x.even, *sum);
    *sum = _mm256_fmadd_ps(w.odd, x.odd, *sum);
  }
};

using Fp32 = Loop<Fp32Lanes>;
using Bf16 = Loop<Bf16Lanes>;

#undef DCPRT_INLINE
#undef DCPRT_TARGET

}  // namespace avx2

namespace avx512 {

#define DCPRT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#include "dcprt/linear_tile.h"
#include "dcprt/linear_avx512.h"

struct Fp32Lanes : Base {
  using Weight = float;
  using In = float;
  using Wide = __m512;
  using WideIn = __m512;
  static constexpr size_t kStep = 16;
  static constexpr bool kSplit = false;

  DCPRT_INLINE static Wide Load(const float* from) { return _mm512_loadu_ps(from); }
  DCPRT_INLINE static Wide LoadTail(const float* from, size_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
  }
  DCPRT_INLINE static WideIn LoadIn(const float* from) { return _mm512_loadu_ps(from); }
  DCPRT_INLINE static void MultiplyAdd(Wide w, WideIn x, Sum* sum) { *sum = _mm512_fmadd_ps(w, x, *sum); }
};

struct Bf16Lanes : Base {
  using Weight = BFloat16;
  using In = float;
  struct Wide {
    __m512 even, odd;
  };
  using WideIn = Wide;
  static constexpr size_t kStep = 32;
  static constexpr bool kSplit = true;

  DCPRT_INLINE static Wide Split(__m512i pairs) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i lower = (__m512i)((__v16su)pairs << 16);
    return {_mm512_castsi512_ps(lower), _mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
  }
  DCPRT_INLINE static Wide Load(const BFloat16* from) { return Split(_mm512_loadu_si512(from)); }
  DCPRT_INLINE static Wide LoadTail(const BFloat16* from, size_t count) {
    return Split(_mm512_maskz_loadu_epi16((1u << count) - 1, from));
  }
  DCPRT_INLINE static WideIn LoadIn(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}; }
  DCPRT_INLINE static void MultiplyAdd(const Wide& w, const WideIn& x, Sum* sum) {
    *sum = _mm512_fmadd_ps(w.even, x.even, *sum);
    *sum = _mm512_fmadd_ps(w.odd, x.odd, *sum);
  }
};

using Fp32 = Loop<Fp32Lanes>;
using Bf16 = Loop<Bf16Lanes>;

#undef DCPRT_INLINE
#undef DCPRT_TARGET

}  // namespace avx512

namespace avx512bf16 {

#define DCPRT_TARGET __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#include "dcprt/linear_tile.h"
#include "dcprt/linear_avx512.h"

struct Bf16Lanes : Base {
  using Weight = BFloat16;
  using In = BFloat16;
  using Wide = __m512i;
  using WideIn = __m512i;
  static constexpr size_t kStep = 32;
  static constexpr bool kSplit = false;

  DCPRT_INLINE static Wide Load(const BFloat16* from) { return _mm512_loadu_si512(from); }
  DCPRT_INLINE static Wide LoadTail(const BFloat16* from, size_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  DCPRT_INLINE static WideIn LoadIn(const BFloat16* from) { return _mm512_loadu_si512(from); }
  DCPRT_INLINE static void MultiplyAdd(Wide w, WideIn x, Sum* sum) {
    *sum = _mm512_dpbf16_ps(*sum, (__m512bh)w, (__m512bh)x);
  }
};

using Bf16 = Loop<Bf16Lanes>;

#undef DCPRT_INLINE
#undef DCPRT_TARGET

}  // namespace avx512bf16

#endif

}  // namespace dcprt::linear_detail

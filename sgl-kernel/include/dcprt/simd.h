// Vectors of float32: one struct for each instruction set, all with the same members.
//
//   kLanes        elements of a vector
//   kRows, kCols  rows, and vectors in a row, of the tile of a product that is held in registers
//   kDotRows      queries that are multiplied with four keys at a time
//   kLinearRows, kLinearPanels  rows of x and panels of 16 outputs of the tile of a matrix product
//   kPairs        whether `Pair` exists: acc + products of two bfloat16 in every lane
//   LoadPart      the first `count` elements, zeros behind; reads nothing else
//   Split         kLanes pairs of bfloat16, to the first and the second of each
//   LoadLanes     four elements each of rows[i], rows[i + 4], ... from `at` on, side by side, float32 or bfloat16
//   Transpose     of every 4 x 4 block that four such vectors hold
//   Sum4          the sums of the lanes of four vectors, side by side
//   Max(a, b)     b if either is NaN
//   Decode        the bfloat16 weights of a coded unit, see matrix_code.h; `upper`: its 16 upper bytes
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "dcprt/bfloat16.h"

#define DCPRT_PRAGMA(text) _Pragma(#text)
#if defined(DCPRT_EMULATED)  // by a driver that brings the intrinsics along
#define DCPRT_TARGET_OF(isa)
#define DCPRT_TARGET_BEGIN(isa)
#define DCPRT_TARGET_END
#elif defined(__clang__)
#define DCPRT_TARGET_OF(isa) __attribute__((target(isa)))
#define DCPRT_TARGET_BEGIN(isa) \
  DCPRT_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define DCPRT_TARGET_END DCPRT_PRAGMA(clang attribute pop)
#else
#define DCPRT_TARGET_OF(isa) __attribute__((target(isa)))
#define DCPRT_TARGET_BEGIN(isa) \
  DCPRT_PRAGMA(GCC push_options) \
  DCPRT_PRAGMA(GCC target(isa))
#define DCPRT_TARGET_END DCPRT_PRAGMA(GCC pop_options)
#endif
#define DCPRT_SIMD static inline __attribute__((always_inline))
// The sums of a tile stay in registers only if the loops over it vanish before the compiler decides what lives in memory.
#define DCPRT_UNROLL _Pragma("GCC unroll 16")

#define DCPRT_AVX2 "avx2,fma"
#define DCPRT_AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
#define DCPRT_AVX512BF16 "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma"

namespace dcprt::simd {

// Four lanes, as the compiler finds them on any processor.
struct Generic {
  typedef float Vec __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kRows = 4, kCols = 2, kDotRows = 1, kLinearRows = 2, kLinearPanels = 1;
  static constexpr bool kPairs = false;
  struct Halves {
    Vec even, odd;
  };

  DCPRT_SIMD Vec Set1(float x) { return Vec{x, x, x, x}; }
  DCPRT_SIMD Vec Load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  DCPRT_SIMD Vec Load(const BFloat16* from) {
    return Vec{ToFloat(from[0]), ToFloat(from[1]), ToFloat(from[2]), ToFloat(from[3])};
  }
  template <class T>
  DCPRT_SIMD Vec LoadPart(const T* from, int64_t count) {
    T part[kLanes] = {};
    std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
    return Load(part);
  }
  DCPRT_SIMD Halves Split(const BFloat16* pairs) {
    Ints bits;
    std::memcpy(&bits, pairs, sizeof(bits));
    const Ints even = bits << 16, odd = bits & static_cast<int32_t>(0xffff0000u);
    Halves out;
    std::memcpy(&out.even, &even, sizeof(even));
    std::memcpy(&out.odd, &odd, sizeof(odd));
    return out;
  }
  DCPRT_SIMD void Decode(const uint8_t* unit, const uint8_t* upper, BFloat16* to) {
    for (size_t step = 0; step < 4; ++step) {
      const uint8_t *lower = unit + step / 2 * 64 + step % 2 * 8, *code = unit + 128 + step % 2 * 8;
      for (size_t i = 0; i < 32; ++i, ++to) {
        const size_t at = i / 8 * 16 + i % 8;
        to->bits = static_cast<uint16_t>(upper[code[at] >> (step / 2 * 4) & 15] << 8 | lower[at]);
      }
    }
  }
  template <class T>
  DCPRT_SIMD Vec LoadLanes(const void* const* rows, int64_t at) {
    return Load(static_cast<const T*>(rows[0]) + at);
  }
  DCPRT_SIMD void Store(float* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }
  DCPRT_SIMD Vec Add(Vec a, Vec b) { return a + b; }
  DCPRT_SIMD Vec Sub(Vec a, Vec b) { return a - b; }
  DCPRT_SIMD Vec Mul(Vec a, Vec b) { return a * b; }
  DCPRT_SIMD Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
  DCPRT_SIMD Vec Max(Vec a, Vec b) { return a > b ? a : b; }
  DCPRT_SIMD Vec Min(Vec a, Vec b) { return a < b ? a : b; }
  DCPRT_SIMD Vec ZeroBelow(Vec x, Vec low, Vec y) { return x < low ? Set1(0) : y; }
  DCPRT_SIMD Vec Round(Vec x) {
    const Vec shift = Set1(12582912.0f);  // 1.5 * 2^23
    return (x + shift) - shift;
  }
  DCPRT_SIMD Vec Scale2(Vec x, Vec n) {
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    Vec power;
    std::memcpy(&power, &bits, sizeof(power));
    return x * power;
  }
  DCPRT_SIMD void Transpose(Vec& a, Vec& b, Vec& c, Vec& d) {
    const Vec w = a, x = b, y = c, z = d;
    a = Vec{w[0], x[0], y[0], z[0]};
    b = Vec{w[1], x[1], y[1], z[1]};
    c = Vec{w[2], x[2], y[2], z[2]};
    d = Vec{w[3], x[3], y[3], z[3]};
  }
  DCPRT_SIMD void Sum4(Vec a, Vec b, Vec c, Vec d, float* to) {
    Transpose(a, b, c, d);
    Store(to, (a + b) + (c + d));
  }
};

#if defined(__x86_64__)

DCPRT_TARGET_BEGIN(DCPRT_AVX2)

struct Avx2 {
  using Vec = __m256;
  static constexpr int kLanes = 8, kRows = 6, kCols = 2, kDotRows = 3, kLinearRows = 5, kLinearPanels = 1;
  static constexpr bool kPairs = false;
  struct Halves {
    Vec even, odd;
  };

  DCPRT_SIMD Vec Set1(float x) { return _mm256_set1_ps(x); }
  DCPRT_SIMD Vec Load(const float* from) { return _mm256_loadu_ps(from); }
  DCPRT_SIMD Vec Widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  DCPRT_SIMD Vec Load(const BFloat16* from) {
    return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  template <class T>
  DCPRT_SIMD Vec LoadPart(const T* from, int64_t count) {
    T part[kLanes] = {};
    std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
    return Load(part);
  }
  DCPRT_SIMD Halves Split(const BFloat16* pairs) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)), _mm256_castsi256_ps(_mm256_and_si256(bits, upper))};
  }
  DCPRT_SIMD void Decode(const uint8_t* unit, const uint8_t* upper, BFloat16* to) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)));
    const __m256i four = _mm256_set1_epi8(15);
    for (int part = 0; part < 2; ++part) {
      const auto load = [&](int at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + at + part * 32)); };
      const auto store = [&](int step, __m256i x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + step * 32 + part * 16), x);
      };
      const __m256i codes = load(128), first = load(0), second = load(64);
      const __m256i first_upper = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, four));
      const __m256i second_upper = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), four));
      store(0, _mm256_unpacklo_epi8(first, first_upper));
      store(1, _mm256_unpackhi_epi8(first, first_upper));
      store(2, _mm256_unpacklo_epi8(second, second_upper));
      store(3, _mm256_unpackhi_epi8(second, second_upper));
    }
  }
  template <class T>
  DCPRT_SIMD Vec LoadLanes(const void* const* rows, int64_t at) {
    const auto from = [&](int row) { return static_cast<const T*>(rows[row]) + at; };
    if constexpr (sizeof(T) == sizeof(BFloat16)) {
      const auto four = [&](int row) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from(row))); };
      return Widen(_mm_unpacklo_epi64(four(0), four(4)));
    } else {
      return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from(0))), _mm_loadu_ps(from(4)), 1);
    }
  }
  DCPRT_SIMD void Store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
  DCPRT_SIMD Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  DCPRT_SIMD Vec Sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  DCPRT_SIMD Vec Mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  DCPRT_SIMD Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  DCPRT_SIMD Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  DCPRT_SIMD Vec Min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  DCPRT_SIMD Vec ZeroBelow(Vec x, Vec low, Vec y) { return _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_NLT_UQ), y); }
  DCPRT_SIMD Vec Round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  DCPRT_SIMD Vec Scale2(Vec x, Vec n) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
  }
  DCPRT_SIMD void Transpose(Vec& a, Vec& b, Vec& c, Vec& d) {
    const Vec ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
    const Vec cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
    a = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
    b = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
    c = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
    d = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
  }
  DCPRT_SIMD void Sum4(Vec a, Vec b, Vec c, Vec d, float* to) {
    const Vec sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
  }
};

DCPRT_TARGET_END
DCPRT_TARGET_BEGIN(DCPRT_AVX512)

struct Avx512 {
  using Vec = __m512;
  static constexpr int kLanes = 16, kRows = 6, kCols = 4, kDotRows = 4, kLinearRows = 8, kLinearPanels = 3;
  static constexpr bool kPairs = false;
  struct Halves {
    Vec even, odd;
  };

  DCPRT_SIMD Vec Set1(float x) { return _mm512_set1_ps(x); }
  DCPRT_SIMD Vec Load(const float* from) { return _mm512_loadu_ps(from); }
  DCPRT_SIMD Vec Widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  DCPRT_SIMD Vec Load(const BFloat16* from) {
    return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  DCPRT_SIMD __mmask16 First(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  DCPRT_SIMD Vec LoadPart(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(First(count), from); }
  DCPRT_SIMD Vec LoadPart(const BFloat16* from, int64_t count) {
    return Widen(_mm256_maskz_loadu_epi16(First(count), from));
  }
  DCPRT_SIMD Halves Split(const BFloat16* pairs) {
    const __m512i bits = _mm512_loadu_si512(pairs);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_castsi512_ps(_mm512_and_si512(bits, upper))};
  }
  DCPRT_SIMD void Decode(const uint8_t* unit, const uint8_t* upper, BFloat16* to) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)));
    const __m512i four = _mm512_set1_epi8(15);
    const __m512i codes = _mm512_loadu_si512(unit + 128);
    const __m512i first = _mm512_loadu_si512(unit), second = _mm512_loadu_si512(unit + 64);
    const __m512i first_upper = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, four));
    const __m512i second_upper = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), four));
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(first, first_upper));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(first, first_upper));
    _mm512_storeu_si512(to + 64, _mm512_unpacklo_epi8(second, second_upper));
    _mm512_storeu_si512(to + 96, _mm512_unpackhi_epi8(second, second_upper));
  }
  template <class T>
  DCPRT_SIMD Vec LoadLanes(const void* const* rows, int64_t at) {
    const auto from = [&](int row) { return static_cast<const T*>(rows[row]) + at; };
    if constexpr (sizeof(T) == sizeof(BFloat16)) {
      const auto four = [&](int row) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from(row))); };
      const __m128i low = _mm_unpacklo_epi64(four(0), four(4)), high = _mm_unpacklo_epi64(four(8), four(12));
      return Widen(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
    } else {
      Vec x = _mm512_castps128_ps512(_mm_loadu_ps(from(0)));
      x = _mm512_insertf32x4(x, _mm_loadu_ps(from(4)), 1);
      x = _mm512_insertf32x4(x, _mm_loadu_ps(from(8)), 2);
      return _mm512_insertf32x4(x, _mm_loadu_ps(from(12)), 3);
    }
  }
  DCPRT_SIMD void Store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
  DCPRT_SIMD Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  DCPRT_SIMD Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  DCPRT_SIMD Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  DCPRT_SIMD Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  DCPRT_SIMD Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  DCPRT_SIMD Vec Min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  DCPRT_SIMD Vec ZeroBelow(Vec x, Vec low, Vec y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), y);
  }
  DCPRT_SIMD Vec Round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  DCPRT_SIMD Vec Scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
  DCPRT_SIMD void Transpose(Vec& a, Vec& b, Vec& c, Vec& d) {
    const Vec ab_low = _mm512_unpacklo_ps(a, b), ab_high = _mm512_unpackhi_ps(a, b);
    const Vec cd_low = _mm512_unpacklo_ps(c, d), cd_high = _mm512_unpackhi_ps(c, d);
    a = _mm512_shuffle_ps(ab_low, cd_low, 0x44);
    b = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
    c = _mm512_shuffle_ps(ab_high, cd_high, 0x44);
    d = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
  }
  DCPRT_SIMD void Sum4(Vec a, Vec b, Vec c, Vec d, float* to) {
    Transpose(a, b, c, d);
    const Vec sums = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
};

DCPRT_TARGET_END
DCPRT_TARGET_BEGIN(DCPRT_AVX512BF16)

struct Avx512Bf16 : Avx512 {
  static constexpr bool kPairs = true;

  // kLanes pairs of bfloat16, and one pair in every lane.
  DCPRT_SIMD Vec LoadBits(const BFloat16* from) { return _mm512_castsi512_ps(_mm512_loadu_si512(from)); }
  DCPRT_SIMD Vec Set1Bits(const BFloat16* pair) {
    int32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
  }
  // Two vectors rounded to bfloat16, one behind the other.
  DCPRT_SIMD Vec Narrow(Vec a, Vec b) { return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(b, a)); }
  // kLanes elements of a and of b, alternating.
  DCPRT_SIMD Vec Interleave(const BFloat16* a, const BFloat16* b) {
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    return _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
  DCPRT_SIMD Vec Pair(Vec a, Vec b, Vec acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

DCPRT_TARGET_END

#endif

}  // namespace dcprt::simd

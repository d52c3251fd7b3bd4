// The vectors of simd.h for aarch64, where NEON is part of the baseline. bfloat16 is widened.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "dcprt/simd.h"
#include "dcprt/bfloat16.h"

namespace dcprt::simd {

struct Neon {
  using Vec = float32x4_t;
  static constexpr int kLanes = 4, kRows = 6, kCols = 4, kDotRows = 4, kLinearRows = 5, kLinearPanels = 1;
  static constexpr bool kPairs = false;
  struct Halves {
    Vec even, odd;
  };

  DCPRT_SIMD Vec Set1(float x) { return vdupq_n_f32(x); }
  DCPRT_SIMD Vec Load(const float* from) { return vld1q_f32(from); }
  DCPRT_SIMD Vec Load(const BFloat16* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
  }
  template <class T>
  DCPRT_SIMD Vec LoadPart(const T* from, int64_t count) {
    T part[kLanes] = {};
    std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
    return Load(part);
  }
  DCPRT_SIMD Halves Split(const BFloat16* pairs) {
    const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(pairs)));
    const uint32x4_t odd = vandq_u32(bits, vdupq_n_u32(0xffff0000u));
    return {vreinterpretq_f32_u32(vshlq_n_u32(bits, 16)), vreinterpretq_f32_u32(odd)};
  }
  DCPRT_SIMD void Decode(const uint8_t* unit, const uint8_t* upper, BFloat16* to) {
    const uint8x16_t table = vld1q_u8(upper), four = vdupq_n_u8(15);
    for (int part = 0; part < 4; ++part, unit += 16) {
      const auto store = [&](int step, uint8x16_t x) {
        vst1q_u8(reinterpret_cast<uint8_t*>(to + step * 32 + part * 8), x);
      };
      const uint8x16_t codes = vld1q_u8(unit + 128), first = vld1q_u8(unit), second = vld1q_u8(unit + 64);
      const uint8x16_t first_upper = vqtbl1q_u8(table, vandq_u8(codes, four));
      const uint8x16_t second_upper = vqtbl1q_u8(table, vshrq_n_u8(codes, 4));
      store(0, vzip1q_u8(first, first_upper));
      store(1, vzip2q_u8(first, first_upper));
      store(2, vzip1q_u8(second, second_upper));
      store(3, vzip2q_u8(second, second_upper));
    }
  }
  template <class T>
  DCPRT_SIMD Vec LoadLanes(const void* const* rows, int64_t at) {
    return Load(static_cast<const T*>(rows[0]) + at);
  }
  DCPRT_SIMD void Store(float* to, Vec x) { vst1q_f32(to, x); }
  DCPRT_SIMD Vec Add(Vec a, Vec b) { return vaddq_f32(a, b); }
  DCPRT_SIMD Vec Sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  DCPRT_SIMD Vec Mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  DCPRT_SIMD Vec Fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  // vmaxq_f32 would give NaN if only a is.
  DCPRT_SIMD Vec Max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  DCPRT_SIMD Vec Min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  DCPRT_SIMD Vec ZeroBelow(Vec x, Vec low, Vec y) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, low)));
  }
  DCPRT_SIMD Vec Round(Vec x) { return vrndnq_f32(x); }
  DCPRT_SIMD Vec Scale2(Vec x, Vec n) {
    const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(x, vreinterpretq_f32_s32(bits));
  }
  DCPRT_SIMD Vec Lower(Vec a, Vec b) {
    return vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
  }
  DCPRT_SIMD Vec Upper(Vec a, Vec b) {
    return vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
  }
  DCPRT_SIMD void Transpose(Vec& a, Vec& b, Vec& c, Vec& d) {
    const Vec ab_even = vtrn1q_f32(a, b), ab_odd = vtrn2q_f32(a, b);
    const Vec cd_even = vtrn1q_f32(c, d), cd_odd = vtrn2q_f32(c, d);
    a = Lower(ab_even, cd_even);
    b = Lower(ab_odd, cd_odd);
    c = Upper(ab_even, cd_even);
    d = Upper(ab_odd, cd_odd);
  }
  DCPRT_SIMD void Sum4(Vec a, Vec b, Vec c, Vec d, float* to) {
    Store(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }
};

}  // namespace dcprt::simd

#endif

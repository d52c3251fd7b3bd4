// Stands in for the compiler's header where the processor has no AVX-512: SIMDe's intrinsics in plain C, and those that
// it lacks.
#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>
#include <cstring>

using __mmask16 = simde__mmask16;
#ifndef _MM_FROUND_NO_EXC
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#endif

inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  uint16_t from[16];
  uint32_t to[16];
  std::memcpy(from, &x, sizeof(from));
  for (int i = 0; i < 16; ++i) to[i] = from[i];
  __m512i out;
  std::memcpy(&out, to, sizeof(out));
  return out;
}

template <class Vec, class Element>
Vec EmulatedMaskedLoad(uint32_t mask, const void* from) {
  Element part[sizeof(Vec) / sizeof(Element)] = {};
  for (size_t i = 0; i < sizeof(Vec) / sizeof(Element); ++i) {
    if (mask >> i & 1) std::memcpy(part + i, static_cast<const Element*>(from) + i, sizeof(Element));
  }
  Vec out;
  std::memcpy(&out, part, sizeof(out));
  return out;
}
inline __m512 _mm512_maskz_loadu_ps(uint16_t mask, const void* from) { return EmulatedMaskedLoad<__m512, float>(mask, from); }
inline __m256i _mm256_maskz_loadu_epi16(uint16_t mask, const void* from) {
  return EmulatedMaskedLoad<__m256i, uint16_t>(mask, from);
}

inline __m256 _mm512_extractf32x8_ps(__m512 x, int half) {
  __m256 out;
  std::memcpy(&out, reinterpret_cast<const char*>(&x) + half * 32, sizeof(out));
  return out;
}

// To nearest, ties to even; denormal numbers are taken as zeros.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  uint32_t bits[32];
  uint16_t to[32];
  std::memcpy(bits, &lower, 64);
  std::memcpy(bits + 16, &upper, 64);
  for (int i = 0; i < 32; ++i) {
    const uint32_t x = bits[i], exponent = x & 0x7f800000u;
    if (exponent == 0) {
      to[i] = static_cast<uint16_t>(x >> 16 & 0x8000);
    } else if (exponent == 0x7f800000u) {
      to[i] = static_cast<uint16_t>(x >> 16 | ((x & 0x7fffffu) != 0 ? 0x40 : 0));
    } else {
      to[i] = static_cast<uint16_t>((x + 0x7fff + (x >> 16 & 1)) >> 16);
    }
  }
  __m512bh out;
  std::memcpy(&out, to, sizeof(out));
  return out;
}

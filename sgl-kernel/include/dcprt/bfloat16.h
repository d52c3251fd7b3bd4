// bfloat16 as bits: the upper half of a float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcprt {

enum class FloatType : int { kFloat32, kBFloat16 };

// Bytes of an element.
constexpr size_t SizeOf(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

struct BFloat16 {
  uint16_t bits;
};

inline float ToFloat(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Rounds to the nearest bfloat16, ties to even; every NaN becomes the quiet NaN 0x7fc0.
inline BFloat16 ToBFloat16(float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof(wide));
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(nan ? 0x7fc0u : rounded)};
}

}  // namespace dcprt

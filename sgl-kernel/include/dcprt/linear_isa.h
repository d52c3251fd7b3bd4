// The matrix product compiled for every instruction set.
#pragma once

#include <cstddef>
#include <cstring>

#include "dcprt/attention_neon.h"
#include "dcprt/attention_simd.h"
#include "dcprt/isa.h"
#include "dcprt/linear_types.h"

namespace dcprt::linear_detail {

using attention_detail::SimdGeneric;

namespace generic {
using Simd = SimdGeneric;
#include "dcprt/linear_tile.h"
}  // namespace generic

#if defined(__x86_64__)
DCPRT_TARGET_BEGIN(DCPRT_AVX2)
namespace avx2 {
using Simd = attention_detail::SimdAvx2;
#include "dcprt/linear_tile.h"
}  // namespace avx2
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512)
namespace avx512 {
using Simd = attention_detail::SimdAvx512;
#include "dcprt/linear_tile.h"
}  // namespace avx512
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512BF16)
namespace avx512bf16 {
using Simd = attention_detail::SimdAvx512Bf16;
#include "dcprt/linear_tile.h"
}  // namespace avx512bf16
DCPRT_TARGET_END
#elif defined(__aarch64__)
namespace neon {
using Simd = attention_detail::SimdNeon;
#include "dcprt/linear_tile.h"
}  // namespace neon
#endif

inline const LinearOps& OpsOf(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx512Bf16:
      return avx512bf16::kOps;
    case Isa::kAvx512:
      return avx512::kOps;
    case Isa::kAvx2:
      return avx2::kOps;
    default:
      break;
  }
#elif defined(__aarch64__)
  if (isa == Isa::kNeon) return neon::kOps;
#endif
  (void)isa;
  return generic::kOps;
}

}  // namespace dcprt::linear_detail

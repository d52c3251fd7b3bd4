// The matrix product compiled for every instruction set.
#pragma once

#include <cstddef>
#include <cstring>

#include "dcprt/isa.h"
#include "dcprt/linear_types.h"
#include "dcprt/matrix_code.h"
#include "dcprt/scratch.h"
#include "dcprt/simd.h"
#include "dcprt/simd_neon.h"

namespace dcprt::linear_detail {

namespace generic {
using Simd = simd::Generic;
#include "dcprt/linear_tile.h"
}  // namespace generic

#if defined(__x86_64__)
DCPRT_TARGET_BEGIN(DCPRT_AVX2)
namespace avx2 {
using Simd = simd::Avx2;
#include "dcprt/linear_tile.h"
}  // namespace avx2
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512)
namespace avx512 {
using Simd = simd::Avx512;
#include "dcprt/linear_tile.h"
}  // namespace avx512
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512BF16)
namespace avx512bf16 {
using Simd = simd::Avx512Bf16;
#include "dcprt/linear_tile.h"
}  // namespace avx512bf16
DCPRT_TARGET_END
#elif defined(__aarch64__)
namespace neon {
using Simd = simd::Neon;
#include "dcprt/linear_tile.h"
}  // namespace neon
#endif

static inline const LinearOps& OpsOf(Isa isa) {
  static constexpr const LinearOps* kEvery[] = DCPRT_OF_EVERY_ISA(kOps);
  return *kEvery[static_cast<int>(isa)];
}

}  // namespace dcprt::linear_detail

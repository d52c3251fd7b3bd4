// The attention kernel compiled for every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dcprt/attention_types.h"
#include "dcprt/isa.h"
#include "dcprt/simd.h"
#include "dcprt/simd_neon.h"

namespace dcprt::attention_detail {

namespace generic {
using Simd = simd::Generic;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace generic

#if defined(__x86_64__)
DCPRT_TARGET_BEGIN(DCPRT_AVX2)
namespace avx2 {
using Simd = simd::Avx2;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace avx2
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512)
namespace avx512 {
using Simd = simd::Avx512;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace avx512
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512BF16)
namespace avx512bf16 {
using Simd = simd::Avx512Bf16;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace avx512bf16
DCPRT_TARGET_END
#elif defined(__aarch64__)
namespace neon {
using Simd = simd::Neon;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace neon
#endif

static inline const AttentionOps& OpsOf(Isa isa) {
  static constexpr const AttentionOps* kEvery[] = DCPRT_OF_EVERY_ISA(kOps);
  return *kEvery[static_cast<int>(isa)];
}

}  // namespace dcprt::attention_detail

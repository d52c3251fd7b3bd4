// The attention kernel compiled for every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dcprt/attention_neon.h"
#include "dcprt/attention_simd.h"
#include "dcprt/attention_types.h"
#include "dcprt/isa.h"

namespace dcprt::attention_detail {

namespace generic {
using Simd = SimdGeneric;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace generic

#if defined(__x86_64__)
DCPRT_TARGET_BEGIN(DCPRT_AVX2)
namespace avx2 {
using Simd = SimdAvx2;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace avx2
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512)
namespace avx512 {
using Simd = SimdAvx512;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace avx512
DCPRT_TARGET_END

DCPRT_TARGET_BEGIN(DCPRT_AVX512BF16)
namespace avx512bf16 {
using Simd = SimdAvx512Bf16;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace avx512bf16
DCPRT_TARGET_END
#elif defined(__aarch64__)
namespace neon {
using Simd = SimdNeon;
#include "dcprt/attention_product.h"
#include "dcprt/attention_task.h"
}  // namespace neon
#endif

static inline const AttentionOps& OpsOf(Isa isa) {
  static constexpr const AttentionOps* kEvery[] = DCPRT_OF_EVERY_ISA(kOps);
  return *kEvery[static_cast<int>(isa)];
}

}  // namespace dcprt::attention_detail

// Products of a few rows with a matrix as it is stored: bound by the reading of the matrix, which is read once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "dcprt/bfloat16.h"
#include "dcprt/isa.h"
#include "dcprt/linear_isa.h"
#include "dcprt/threads.h"

namespace dcprt {

enum class LinearType { kFloat32, kBFloat16 };

// out[rows, outs] = x[rows, ins] * weight[outs, ins]^T + bias[outs]. All are dense but for the distances between rows.
// Elements are as far apart as their type is long; nothing needs to be aligned further than that.
struct LinearArgs {
  const void* x;
  LinearType x_type;
  size_t x_stride;  // elements from one row to the next
  const void* weight;
  LinearType weight_type;
  size_t weight_stride;
  const void* bias;  // in `bias_type`, or null
  LinearType bias_type;
  void* out;
  LinearType out_type;
  size_t rows, ins, outs;
};

namespace linear_detail {

// Bytes of the matrix below which a second thread costs more than it gains, and of one part of the loop.
constexpr size_t kThreadedBytes = 256 << 10;
constexpr size_t kPartBytes = 64 << 10;

// Memory for the converted rows of one call, kept by the thread for the next.
inline void* Scratch(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local size_t held = 0;
  if (held < bytes) {
    held = (bytes + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(64, held));
    if (memory == nullptr) throw std::bad_alloc();
  }
  return memory.get();
}

inline float At(const void* x, LinearType type, size_t i) {
  return type == LinearType::kFloat32 ? static_cast<const float*>(x)[i] : ToFloat(static_cast<const BFloat16*>(x)[i]);
}

// One value of x, in the type of the weights, as `In` holds it.
inline void Convert(float value, bool narrow, float* out) { *out = narrow ? ToFloat(ToBFloat16(value)) : value; }
inline void Convert(float value, bool, BFloat16* out) { *out = ToBFloat16(value); }

// Rows of x in the type and order that the loops of `V` read, with zeros up to a multiple of its step.
template <class V>
const typename V::In* Prepared(const LinearArgs& a, size_t* stride) {
  using In = typename V::In;
  const bool same = (sizeof(In) == 2) == (a.x_type == LinearType::kBFloat16);
  const bool narrow = a.weight_type == LinearType::kBFloat16 && a.x_type == LinearType::kFloat32;
  if (same && (sizeof(In) == 2 || !narrow) && !V::kSplit && a.ins % V::kStep == 0) {
    *stride = a.x_stride;
    return static_cast<const In*>(a.x);
  }
  *stride = (a.ins + V::kStep - 1) / V::kStep * V::kStep;
  In* out = static_cast<In*>(Scratch(std::max<size_t>(1, *stride * a.rows) * sizeof(In)));
  for (size_t row = 0; row < a.rows; ++row) {
    In* to = out + row * *stride;
    for (size_t i = 0; i < *stride; ++i) {
      const size_t in_step = i % V::kStep, base = i - in_step;
      const size_t place = V::kSplit ? base + in_step / 2 + in_step % 2 * (V::kStep / 2) : i;
      Convert(i < a.ins ? At(a.x, a.x_type, row * a.x_stride + i) : 0.0f, narrow, to + place);
    }
  }
  return out;
}

// sums: [rows][count] float32 of outputs from `first` on.
inline void Store(const LinearArgs& a, size_t row, size_t first, size_t count, const float* sums) {
  const size_t at = row * a.outs + first;
  for (size_t i = 0; i < count; ++i) {
    const float sum = a.bias == nullptr ? sums[i] : sums[i] + At(a.bias, a.bias_type, first + i);
    if (a.out_type == LinearType::kFloat32) {
      static_cast<float*>(a.out)[at + i] = sum;
    } else {
      static_cast<BFloat16*>(a.out)[at + i] = ToBFloat16(sum);
    }
  }
}

// Outputs [begin, end) of all rows. A tile of the matrix comes from memory once and from the cache for further rows.
template <class V>
void Outputs(const LinearArgs& a, const typename V::In* x, size_t x_stride, size_t begin, size_t end) {
  const auto* weight = static_cast<const typename V::Weight*>(a.weight);
  float sums[V::kRows * V::kOuts];
  for (size_t first = begin; first < end;) {
    const size_t outs = end - first < V::kOuts ? 1 : V::kOuts;
    for (size_t row = 0; row < a.rows;) {
      const size_t rows = std::min(a.rows - row, V::kRows);
      V::Tile(weight + first * a.weight_stride, a.weight_stride, x + row * x_stride, x_stride, a.ins, outs, rows, sums);
      for (size_t r = 0; r < rows; ++r) Store(a, row + r, first, outs, sums + r * outs);
      row += rows;
    }
    first += outs;
  }
}

template <class V>
void Run(const LinearArgs& a, int threads) {
  size_t x_stride;
  const typename V::In* x = Prepared<V>(a, &x_stride);
  const size_t row_bytes = a.ins * sizeof(typename V::Weight);
  if (threads < 2 || row_bytes * a.outs < kThreadedBytes) return Outputs<V>(a, x, x_stride, 0, a.outs);
  const size_t share = (a.outs + static_cast<size_t>(threads) * 4 - 1) / (static_cast<size_t>(threads) * 4);
  const size_t part = (std::max(share, kPartBytes / row_bytes + 1) + 7) / 8 * 8;
  const auto parts = static_cast<uint32_t>((a.outs + part - 1) / part);
  ThreadPool::Get().Run(threads, parts, [&](uint32_t i) {
    const size_t begin = (parts - 1 - i) * part;
    Outputs<V>(a, x, x_stride, begin, std::min(a.outs, begin + part));
  });
}

}  // namespace linear_detail

inline void Linear(const LinearArgs& a, Isa isa, int threads) {
  namespace detail = linear_detail;
  const bool narrow = a.weight_type == LinearType::kBFloat16;
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512Bf16:
      if (narrow) return detail::Run<detail::avx512bf16::Bf16>(a, threads);
      return detail::Run<detail::avx512::Fp32>(a, threads);
    case Isa::kAvx512:
      if (narrow) return detail::Run<detail::avx512::Bf16>(a, threads);
      return detail::Run<detail::avx512::Fp32>(a, threads);
    case Isa::kAvx2:
      if (narrow) return detail::Run<detail::avx2::Bf16>(a, threads);
      return detail::Run<detail::avx2::Fp32>(a, threads);
#endif
    default:
      if (narrow) return detail::Run<detail::generic::Bf16>(a, threads);
      return detail::Run<detail::generic::Fp32>(a, threads);
  }
}

}  // namespace dcprt

// What stands between two sums over ranks, in one call: a norm and the products behind it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "dcprt/elementwise.h"
#include "dcprt/linear.h"
#include "dcprt/scratch.h"

namespace dcprt {

// The norm of x + add, times a matrix. T is the type of the weights.
template <class T>
struct NormArgs {
  float* x;          // [rows, hidden], dense; becomes x + add
  const float* add;  // likewise, or null
  const T* weight;   // [hidden]
  float eps;
  size_t rows, hidden;
};

namespace fused_detail {

// Rows that pass all steps together: what lies between the steps stays in the caches.
constexpr size_t kRows = 384;

template <class T>
constexpr FloatType kType = sizeof(T) == 2 ? FloatType::kBFloat16 : FloatType::kFloat32;

// The normed rows [first, first + rows), in memory of this thread.
template <class T>
T* Normed(const NormArgs<T>& a, size_t first, size_t rows, Isa isa, int threads) {
  T* out = static_cast<T*>(Scratch<Purpose::kNormed>(rows * a.hidden * sizeof(T)));
  float* x = a.x + first * a.hidden;
  if (a.add == nullptr) {
    RmsNorm(x, a.hidden, a.weight, a.eps, out, rows, a.hidden, isa, threads);
  } else {
    AddRmsNorm(x, a.add + first * a.hidden, a.weight, a.eps, out, rows, a.hidden, isa, threads);
  }
  return out;
}

template <class T>
void Times(const T* x, const PackedMatrix& matrix, const T* bias, void* out, FloatType out_type, size_t rows, Isa isa,
           int threads) {
  Linear({x, kType<T>, matrix.ins, matrix, bias, kType<T>, out, out_type, rows, matrix.outs}, isa, threads);
}

}  // namespace fused_detail

// out[rows, outs] = norm(x + add) * matrix^T + bias, in the type of the weights.
template <class T>
void NormLinear(const NormArgs<T>& a, const PackedMatrix& matrix, const T* bias, T* out, Isa isa, int threads) {
  using namespace fused_detail;
  for (size_t first = 0; first < a.rows; first += kRows) {
    const size_t rows = std::min(kRows, a.rows - first);
    const T* normed = Normed(a, first, rows, isa, threads);
    Times(normed, matrix, bias, out + first * matrix.outs, kType<T>, rows, isa, threads);
  }
}

// out float32 [rows, hidden] = (silu(gate) * up) * down^T, where gate and up are the halves of
// norm(x + add) * gate_up^T + bias. Each step is rounded to the type of the weights.
template <class T>
void NormGatedMlp(const NormArgs<T>& a, const PackedMatrix& gate_up, const T* bias, const PackedMatrix& down, float* out,
                  Isa isa, int threads) {
  using namespace fused_detail;
  const size_t width = gate_up.outs / 2;
  for (size_t first = 0; first < a.rows; first += kRows) {
    const size_t rows = std::min(kRows, a.rows - first);
    const T* normed = Normed(a, first, rows, isa, threads);
    T* both = static_cast<T*>(Scratch<Purpose::kGateUp>(rows * 3 * width * sizeof(T)));
    T* gated = both + rows * 2 * width;
    Times(normed, gate_up, bias, both, kType<T>, rows, isa, threads);
    SiluMul(both, 2 * width, gated, rows, width, isa, threads);
    Times(gated, down, static_cast<const T*>(nullptr), out + first * down.outs, FloatType::kFloat32, rows, isa, threads);
  }
}

}  // namespace dcprt

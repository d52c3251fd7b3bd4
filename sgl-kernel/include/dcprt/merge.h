// Partial attention results: merged, and packed for an exchange between ranks.
//
// The formula is that of softmax over a union of key sets, as in Flash-Decoding: each part weighs exp(lse - largest lse),
// divided by the sum of the weights. What a part without weight holds is not looked at, since 0 * NaN is NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dcprt/elementwise.h"

namespace dcprt {

// Results of `items` (token, head) pairs: out of item i is [dim] at out + i * out_step, its lse at lse + i * lse_step.
struct PartialView {
  const float* out;
  size_t out_step;
  const float* lse;
  size_t lse_step;
};

constexpr size_t kMostParts = 64;

// One item from `count` parts in their order: lse_of(part) is a part's lse, out_of(part) its out[dim]. 0 and -inf where all
// are empty.
template <class LseOf, class OutOf>
void MergeItem(size_t count, const LseOf& lse_of, const OutOf& out_of, size_t dim, float* out, float* lse, Isa isa) {
  float top = -INFINITY, sum = 0;
  for (size_t part = 0; part < count; ++part) {
    const float own = lse_of(part);
    if (!(own <= top) && top == top) top = own;  // a NaN is taken too, and stays
  }
  std::fill(out, out + dim, 0.0f);
  *lse = top;
  if (top == -INFINITY) return;
  for (size_t part = 0; part < count; ++part) sum += std::exp(lse_of(part) - top);
  *lse = top + std::log(sum);
  elementwise_detail::With(isa, [&](auto loops) {
    for (size_t part = 0; part < count; ++part) {
      const float share = std::exp(lse_of(part) - top) / sum;
      if (share != 0) loops.AddScaled(out, out_of(part), share, dim);
    }
  });
}

// out[items, dim] and lse[items], dense, see MergeItem.
inline void MergePartials(const PartialView* parts, size_t count, size_t items, size_t dim, float* out, float* lse, Isa isa,
                          int threads) {
  elementwise_detail::Rows(items, dim * count, threads, [&](size_t item) {
    MergeItem(
        count, [&](size_t p) { return parts[p].lse[item * parts[p].lse_step]; },
        [&](size_t p) { return parts[p].out + item * parts[p].out_step; }, dim, out + item * dim, lse + item, isa);
  });
}

// Likewise from packed [count, items, dim + 1], lse last.
inline void MergePacked(const float* packed, size_t count, size_t items, size_t dim, float* out, float* lse, Isa isa,
                        int threads) {
  const size_t step = dim + 1;
  PartialView parts[kMostParts];
  for (size_t p = 0; p < count; ++p) {
    const float* at = packed + p * items * step;
    parts[p] = {at, step, at + dim, step};
  }
  MergePartials(parts, count, items, dim, out, lse, isa, threads);
}

// out [tokens, ranks, own, dim] and lse [tokens, ranks, own] to packed [ranks, tokens, own, dim + 1], lse last.
inline void PackPartial(const float* out, const float* lse, size_t tokens, size_t ranks, size_t own, size_t dim,
                        float* packed) {
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t token = 0; token < tokens; ++token) {
      for (size_t head = 0; head < own; ++head, packed += dim + 1) {
        const size_t item = (token * ranks + rank) * own + head;
        std::memcpy(packed, out + item * dim, dim * sizeof(float));
        packed[dim] = lse[item];
      }
    }
  }
}

}  // namespace dcprt

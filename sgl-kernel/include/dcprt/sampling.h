// A token from logits: the inverse of the cumulative distribution, likeliest first, without sorting the vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dcprt/elementwise.h"

namespace dcprt {

// Applied in this order; `top_k` 0 and `top_p` 1 and `min_p` 0 leave everything. temperature > 0.
struct DrawParams {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
};

namespace sampling_detail {

struct Candidate {
  float logit, weight;
  int64_t token;

  bool operator<(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : token < other.token;
  }
};

// Tokens whose weight is at least `cutoff`, in the order of the vocabulary; returns the sum of their weights.
inline double Collect(const float* logits, const float* weights, size_t count, float cutoff, std::vector<Candidate>* out) {
  constexpr size_t kBlock = 64;  // almost no block has a candidate
  out->clear();
  double sum = 0;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t end = std::min(count, begin + kBlock);
    bool any = false;
    for (size_t i = begin; i < end; ++i) any |= weights[i] >= cutoff;
    for (size_t i = begin; any && i < end; ++i) {
      if (weights[i] < cutoff) continue;
      out->push_back({logits[i], weights[i], static_cast<int64_t>(i)});
      sum += weights[i];
    }
  }
  return sum;
}

}  // namespace sampling_detail

// The token at `drawn` in [0, 1) of the distribution over logits[count]; -1 if their greatest is not finite. Weights are relative
// to that of the greatest, which is 1. Candidates are collected with a falling cutoff until there are enough of them, and
// only those are sorted.
inline int64_t Draw(const float* logits, size_t count, const DrawParams& params, double drawn, Isa isa) {
  using sampling_detail::Candidate;
  std::vector<float> weights(count);
  float top = 0;
  elementwise_detail::With(isa, [&](auto loops) {
    top = loops.Max(logits, count);
    // Neither 0, which would make a NaN of a logit of -inf, nor infinite, which would make one of the greatest.
    const auto factor = static_cast<float>(std::min(std::max(1 / params.temperature, 1e-37), 1e38));
    loops.Weights(logits, top, factor, weights.data(), count);
  });
  if (!std::isfinite(top)) return -1;
  double total = 0;
  for (const float weight : weights) total += weight;
  const bool limited = params.top_k > 0 && static_cast<size_t>(params.top_k) < count;
  const float least = std::max(static_cast<float>(params.min_p), std::numeric_limits<float>::min());
  const double wanted = params.top_p < 1 ? params.top_p : drawn;
  std::vector<Candidate> candidates;
  for (float cutoff = 1.0f / 64;; cutoff /= 256) {
    const bool last = cutoff <= least;
    const double sum = sampling_detail::Collect(logits, weights.data(), count, last ? least : cutoff, &candidates);
    if (last || (limited && candidates.size() >= static_cast<size_t>(params.top_k))) break;
    if (!limited && params.min_p <= 0 && sum > wanted * total) break;
  }
  std::sort(candidates.begin(), candidates.end());
  if (limited && candidates.size() > static_cast<size_t>(params.top_k)) {
    candidates.resize(static_cast<size_t>(params.top_k));
  }
  if (limited || params.min_p > 0) {
    total = 0;
    for (const Candidate& c : candidates) total += c.weight;
  }
  if (params.top_p < 1) {
    double sum = 0;
    size_t kept = 0;
    while (kept < candidates.size() && (kept == 0 || sum < params.top_p * total)) sum += candidates[kept++].weight;
    candidates.resize(kept);
    total = sum;
  }
  double sum = 0;
  for (const Candidate& c : candidates) {
    sum += c.weight;
    if (sum > drawn * total) return c.token;
  }
  return candidates.back().token;
}

}  // namespace dcprt

// Tokens drawn, against the sorted distribution in double.
#include "dcprt/sampling.h"

#include <algorithm>
#include <string>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

struct Drawn {
  double low, high;  // the token's place in the cumulative distribution
  bool kept;
};

// By the definition; a token at a limit is kept where rounding may keep it.
Drawn PlaceOf(const Array& logits, const DrawParams& params, int64_t token) {
  std::vector<size_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const auto weight = [&](size_t i) { return std::exp((logits[i] - logits[order[0]]) / params.temperature); };
  if (params.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(params.top_k)));
  while (weight(order.back()) < params.min_p * (1 - 1e-6)) order.pop_back();
  double total = 0, sum = 0;
  for (const size_t i : order) total += weight(i);
  size_t kept = params.top_p < 1 ? 0 : order.size();
  while (kept < order.size() && (kept == 0 || sum < params.top_p * total * (1 - 1e-6))) sum += weight(order[kept++]);
  if (params.top_p < 1) total = sum;
  double low = 0;
  for (size_t i = 0; i < kept; ++i) {
    const double high = low + weight(order[i]) / total;
    if (static_cast<int64_t>(order[i]) == token) return {low, high, true};
    low = high;
  }
  return {0, 0, false};
}

void Check(size_t count, const DrawParams& params, double spread) {
  Array logits(count, false, 1);
  Random random(count);
  random.Fill(logits, spread);
  if (count > 4) logits.Set(3, logits[1]), logits.Set(2, -kInfinity);
  for (const Isa isa : Isas()) {
    for (const double drawn : {0.0, 0.1, 0.5, 0.77, 0.99, 0.9999999}) {
      const int64_t token = Draw(logits.as<float>(), count, params, drawn, isa);
      const Drawn place = PlaceOf(logits, params, token);
      const std::string where = Label("draw", count, token) + " " + NameOf(isa) +
                                Label(" params", params.temperature, params.top_k, params.top_p, params.min_p, drawn);
      Expect(place.kept && place.low <= drawn + 1e-5 && drawn < place.high + 1e-5, where);
    }
  }
}

}  // namespace

void TestSampling() {
  const DrawParams all[] = {{1, 0, 1, 0},   {0.3, 0, 1, 0},  {1, 1, 1, 0},   {1, 7, 1, 0},
                            {2, 0, 0.9, 0}, {1, 0, 0.01, 0}, {1, 0, 1, 0.2}, {0.7, 40, 0.8, 0.01}};
  for (const size_t count : {1, 2, 15, 17, 63, 64, 65, 1000, 4999}) {
    for (const double spread : {1.0, 12.0}) {
      for (const DrawParams& params : all) {
        Check(count, params, spread);
      }
    }
  }
}

}  // namespace dcprt::test

// Partial results merged against the definition in double, and packed.
#include "dcprt/merge.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

// Parts of `items` results; item 0 has none, the others lack some. What a part without weight holds is NaN.
class Parts {
 public:
  Parts(size_t count, size_t items, size_t dim) : items_(items), dim_(dim) {
    Random random(count * 100 + dim);
    for (size_t p = 0; p < count; ++p) {
      arrays_.emplace_back(new Array(items * (dim + 1), false, p % 3));
      for (size_t item = 0; item < items; ++item) {
        const bool empty = item == 0 || (item + p) % 3 == 0;
        for (size_t d = 0; d < dim; ++d) arrays_[p]->Set(At(item, d), empty ? kNaN : random.Next());
        arrays_[p]->Set(At(item, dim), empty ? -kInfinity : 20 * random.Next());
      }
    }
  }

  double operator()(size_t part, size_t item, size_t d) const { return (*arrays_[part])[At(item, d)]; }
  std::vector<PartialView> Views() const {
    std::vector<PartialView> views;
    for (const auto& x : arrays_) views.push_back({x->as<float>(), dim_ + 1, x->as<float>() + dim_, dim_ + 1});
    return views;
  }

 private:
  size_t At(size_t item, size_t d) const { return item * (dim_ + 1) + d; }

  size_t items_, dim_;
  std::vector<std::unique_ptr<Array>> arrays_;
};

void Merge(size_t count, size_t items, size_t dim) {
  const Parts parts(count, items, dim);
  std::vector<Value> out, lse;
  for (size_t item = 0; item < items; ++item) {
    double top = -kInfinity, sum = 0;
    for (size_t p = 0; p < count; ++p) top = std::max(top, parts(p, item, dim));
    const auto weight = [&](size_t p) { return top == -kInfinity ? 0 : std::exp(parts(p, item, dim) - top); };
    for (size_t p = 0; p < count; ++p) sum += weight(p);
    lse.push_back({sum == 0 ? -kInfinity : top + std::log(sum), 1e-5});
    for (size_t d = 0; d < dim; ++d) {
      double value = 0;
      for (size_t p = 0; p < count; ++p) value += weight(p) == 0 ? 0 : weight(p) / sum * parts(p, item, d);
      out.push_back({value, 4e-6});
    }
  }
  const std::vector<PartialView> views = parts.Views();
  for (const Isa isa : Isas()) {
    for (const int threads : {1, 2, 3}) {
      Array found(items * dim, false, 1), found_lse(items, false, 1);
      MergePartials(views.data(), count, items, dim, found.as<float>(), found_lse.as<float>(), isa, threads);
      const std::string where = Label("merge", count, items, dim, threads) + " " + NameOf(isa);
      ExpectValues(found, out, where + " out");
      ExpectValues(found_lse, lse, where + " lse");
    }
  }
}

void Pack(size_t tokens, size_t ranks, size_t own, size_t dim) {
  const size_t items = tokens * ranks * own;
  Array out(items * dim, false, 1), lse(items, false, 1), packed(items * (dim + 1), false, 1);
  Random random(dim);
  random.Fill(out);
  random.Fill(lse);
  std::vector<Value> expected;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t token = 0; token < tokens; ++token) {
      for (size_t head = 0; head < own; ++head) {
        const size_t item = (token * ranks + rank) * own + head;
        for (size_t d = 0; d < dim; ++d) expected.push_back({out[item * dim + d], 0});
        expected.push_back({lse[item], 0});
      }
    }
  }
  PackPartial(out.as<float>(), lse.as<float>(), tokens, ranks, own, dim, packed.as<float>());
  ExpectValues(packed, expected, Label("pack", tokens, ranks, own, dim));
}

// Two heads of three elements a row, five elements apart; rows eleven elements apart.
}  // namespace

void TestMerge() {
  for (const size_t dim : {1, 7, 16, 40, 129}) {
    for (const size_t items : {0, 1, 5}) {
      for (const size_t count : {1, 2, 3, 64}) Merge(count, items, dim);
    }
  }
  Merge(2, 1500, 64);  // enough for several threads
  for (const size_t dim : {1, 8, 33}) Pack(3, 2, 5, dim), Pack(0, 2, 1, dim), Pack(1, 4, 1, dim);
}

}  // namespace dcprt::test

// Rows stored in pages, and pages copied.
#include "dcprt/pages.h"

#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

void Store(bool narrow) {
  const size_t width = narrow ? 2 : 4;
  const std::vector<int64_t> tokens{3, 0, 2}, slots{1, 6, 0};
  Array rows(3 * 11 + 8, narrow, 1), pool(7 * 6, narrow, 1);
  Random random(7);
  random.Fill(rows);
  std::vector<Value> expected(pool.size(), Value{kNaN, 0});
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (size_t at = 0; at < 6; ++at) {
      const double value = rows[static_cast<size_t>(tokens[i]) * 11 + at / 3 * 5 + at % 3];
      expected[static_cast<size_t>(slots[i]) * 6 + at] = {value, 0};
    }
  }
  StoreRows(rows.data(), 11 * width, 3 * width, 5 * width, 2, tokens.data(), slots.data(), tokens.size(), pool.data());
  ExpectValues(pool, expected, Label("store", narrow));
}

void Copy(bool narrow) {
  const size_t width = narrow ? 2 : 4;
  Array pool(5 * 12, narrow, 1);  // 5 pages of 4 slots with 3 elements
  Random random(3);
  random.Fill(pool);
  std::vector<Value> expected;
  for (size_t i = 0; i < pool.size(); ++i) expected.push_back({pool[i], 0});
  for (size_t i = 0; i < 9; ++i) expected[48 + i] = expected[12 + i];
  CopyPage(pool.data(), 12 * width, 1, 4, 9 * width);
  ExpectValues(pool, expected, Label("copy", narrow));
}

}  // namespace

void TestPages() {
  for (const bool narrow : {false, true}) Store(narrow), Copy(narrow);
}

}  // namespace dcprt::test

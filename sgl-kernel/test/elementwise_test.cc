// Norms, SiLU, rotation and the greatest element against their definitions in double.
#include "dcprt/elementwise.h"

#include <cmath>
#include <string>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

constexpr size_t kCounts[] = {1, 2, 3, 15, 16, 17, 33, 64, 127, 599};

// Calls `work` with a null pointer of the element type of x.
template <class Work>
void ByType(const Array& x, const Work& work) {
  if (x.narrow()) return work(static_cast<BFloat16*>(nullptr));
  work(static_cast<float*>(nullptr));
}
template <class T>
using Element = std::remove_pointer_t<T>;

// Within the errors of a few float32 operations on terms of that `size`, and the rounding of `out`.
Value Near(double value, double size, const Array& out) {
  return {value, size * 2e-6 + (out.narrow() ? std::fabs(value) / 256 : 0) + 1e-37};
}

template <class Work>
void ForAll(const std::string& name, const Work& work) {
  for (const Isa isa : Isas()) {
    for (const int threads : {1, 2, 3}) work(isa, threads, name + " " + NameOf(isa) + Label(" threads", threads));
  }
}

void Norm(size_t rows, size_t count, bool x_narrow, bool weight_narrow, bool out_narrow) {
  const size_t stride = count + 3, shift = count % 4;
  Array x(rows == 0 ? 0 : (rows - 1) * stride + count, x_narrow, shift), weight(count, weight_narrow, shift);
  Random random(count);
  random.Fill(x, 20);
  random.Fill(weight);
  std::vector<Value> expected;
  const Array shown(0, out_narrow);
  for (size_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (size_t i = 0; i < count; ++i) squares += x[r * stride + i] * x[r * stride + i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(count) + 1e-5f);
    for (size_t i = 0; i < count; ++i) {
      const double value = x[r * stride + i] * scale * weight[i];
      expected.push_back(Near(value, std::fabs(value), shown));
    }
  }
  ForAll(Label("norm", rows, count, x_narrow, weight_narrow, out_narrow), [&](Isa isa, int threads, const auto& where) {
    Array out(rows * count, out_narrow, shift);
    ByType(x, [&](auto* xs) {
      ByType(weight, [&](auto* ws) {
        ByType(out, [&](auto* os) {
          RmsNorm(x.as<Element<decltype(xs)>>(), stride, weight.as<Element<decltype(ws)>>(), 1e-5f,
                  out.as<Element<decltype(os)>>(), rows, count, isa, threads);
        });
      });
    });
    ExpectValues(out, expected, where);
  });
}

void AddNorm(size_t rows, size_t count, bool narrow) {
  const size_t shift = count % 3;
  Array x(rows * count, false, shift), y(rows * count, false, shift), weight(count, narrow, shift);
  Random random(count);
  random.Fill(x);
  random.Fill(y);
  random.Fill(weight);
  std::vector<Value> sums, expected;
  const Array shown(0, narrow);
  for (size_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (size_t i = r * count; i < (r + 1) * count; ++i) {
      const float sum = static_cast<float>(x[i]) + static_cast<float>(y[i]);
      sums.push_back({sum, 0});
      squares += static_cast<double>(sum) * sum;
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(count) + 1e-5f);
    for (size_t i = 0; i < count; ++i) {
      const double value = sums[r * count + i].value * scale * weight[i];
      expected.push_back(Near(value, std::fabs(value), shown));
    }
  }
  ForAll(Label("add and norm", rows, count, narrow), [&](Isa isa, int threads, const auto& where) {
    Array summed(rows * count, false, shift), out(rows * count, narrow, shift);
    for (size_t i = 0; i < x.size(); ++i) summed.Set(i, x[i]);
    ByType(weight, [&](auto* ws) {
      using T = Element<decltype(ws)>;
      AddRmsNorm(summed.as<float>(), y.as<float>(), weight.as<T>(), 1e-5f, out.as<T>(), rows, count, isa, threads);
    });
    ExpectValues(summed, sums, where + " sum");
    ExpectValues(out, expected, where);
  });
}

// Some heads of every token, in place; what lies between them stays.
void NormInPlace(size_t tokens, size_t heads, size_t dim, bool narrow) {
  const size_t token_step = heads * dim + 3, shift = dim % 4;
  Array x(tokens * token_step, narrow, shift), weight(dim, narrow, shift);
  Random random(dim);
  random.Fill(x, 20);
  random.Fill(weight);
  std::vector<Value> expected;
  for (size_t i = 0; i < x.size(); ++i) expected.push_back({x[i], 0});
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t h = 0; h < heads; ++h) {
      const size_t from = t * token_step + h * dim;
      double squares = 0;
      for (size_t i = 0; i < dim; ++i) squares += x[from + i] * x[from + i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-5f);
      for (size_t i = 0; i < dim; ++i) {
        const double value = x[from + i] * scale * weight[i];
        expected[from + i] = Near(value, std::fabs(value), x);
      }
    }
  }
  ForAll(Label("norm in place", tokens, heads, dim, narrow), [&](Isa isa, int threads, const auto& where) {
    Array normed(x.size(), narrow, shift);
    for (size_t i = 0; i < x.size(); ++i) normed.Set(i, x[i]);
    ByType(x, [&](auto* xs) {
      using T = Element<decltype(xs)>;
      NormHeads(normed.as<T>(), token_step, weight.as<T>(), 1e-5f, tokens, heads, dim, isa, threads);
    });
    ExpectValues(normed, expected, where);
  });
}

void AddBias(size_t rows, size_t count, bool narrow) {
  const size_t shift = count % 3;
  Array x(rows * count, false, shift), y(count, narrow, shift);
  Random random(count);
  random.Fill(x);
  random.Fill(y);
  std::vector<Value> expected;
  for (size_t i = 0; i < x.size(); ++i) {
    expected.push_back({static_cast<float>(x[i]) + static_cast<float>(y[i % count]), 0});
  }
  ForAll(Label("add to rows", rows, count, narrow), [&](Isa isa, int threads, const auto& where) {
    Array summed(x.size(), false, shift);
    for (size_t i = 0; i < x.size(); ++i) summed.Set(i, x[i]);
    ByType(y, [&](auto* ys) {
      AddToRows(summed.as<float>(), y.as<Element<decltype(ys)>>(), rows, count, isa, threads);
    });
    ExpectValues(summed, expected, where);
  });
}

void Silu(size_t rows, size_t count, bool narrow) {
  const size_t stride = 2 * count + 1, shift = count % 3;
  Array x(rows == 0 ? 0 : rows * stride - 1, narrow, shift);
  Random random(count);
  random.Fill(x, 100);
  std::vector<Value> expected;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < count; ++i) {
      const double gate = x[r * stride + i], up = x[r * stride + count + i];
      const double value = gate / (1 + std::exp(-gate)) * up;
      expected.push_back(Near(value, std::fabs(value), x));
      if (gate < -87) expected.back().bound += 1e-33;
    }
  }
  ForAll(Label("silu", rows, count, narrow), [&](Isa isa, int threads, const auto& where) {
    Array out(rows * count, narrow, shift);
    ByType(x, [&](auto* xs) {
      using T = Element<decltype(xs)>;
      SiluMul(x.as<T>(), stride, out.as<T>(), rows, count, isa, threads);
    });
    ExpectValues(out, expected, where);
  });
}

void Turn(size_t tokens, size_t heads, size_t half, bool narrow) {
  const size_t head_step = 2 * half + 3, token_step = heads * head_step + 2, shift = half % 3;
  Array x(tokens == 0 ? 0 : tokens * token_step - 5, narrow, shift);
  Array cos(tokens * half, false, shift), sin(tokens * half, false, shift);
  Random random(half);
  random.Fill(x);
  for (size_t i = 0; i < cos.size(); ++i) {
    const double angle = 10 * random.Next();
    cos.Set(i, std::cos(angle));
    sin.Set(i, std::sin(angle));
  }
  std::vector<Value> expected;
  for (size_t i = 0; i < x.size(); ++i) expected.push_back({x[i], 0});
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t h = 0; h < heads; ++h) {
      for (size_t i = 0; i < half; ++i) {
        const size_t at = t * token_step + h * head_step + i;
        const double a = x[at], b = x[at + half], c = cos[t * half + i], s = sin[t * half + i];
        expected[at] = Near(a * c - b * s, 1, x);
        expected[at + half] = Near(b * c + a * s, 1, x);
      }
    }
  }
  ForAll(Label("rotate", tokens, heads, half, narrow), [&](Isa isa, int threads, const auto& where) {
    Array turned(x.size(), narrow, shift);
    for (size_t i = 0; i < x.size(); ++i) turned.Set(i, x[i]);
    ByType(x, [&](auto* xs) {
      Rotate(turned.as<Element<decltype(xs)>>(), token_step, head_step, cos.as<float>(), sin.as<float>(), tokens, heads,
             half, isa, threads);
    });
    ExpectValues(turned, expected, where);
  });
}

// Row 1 has equals, row 2 a NaN, row 3 nothing but -inf.
void Greatest(size_t rows, size_t count) {
  const size_t stride = count + 2, shift = count % 3;
  Array x(rows == 0 ? 0 : rows * stride - 2, false, shift);
  Random random(count);
  random.Fill(x);
  for (size_t i = 0; i < count && rows > 3; ++i) x.Set(3 * stride + i, -kInfinity);
  if (rows > 3) {
    x.Set(stride + count / 2, 2), x.Set(stride + count - 1, 2);
    x.Set(2 * stride + count / 3, kNaN);
  }
  std::vector<size_t> places;
  std::vector<Value> expected;
  for (size_t r = 0; r < rows; ++r) {
    size_t best = 0;
    for (size_t i = 1; i < count && !std::isnan(x[r * stride + best]); ++i) {
      if (!(x[r * stride + i] <= x[r * stride + best])) best = i;
    }
    places.push_back(best);
    expected.push_back({x[r * stride + best], 0});
  }
  ForAll(Label("argmax", rows, count), [&](Isa isa, int threads, const auto& where) {
    const std::unique_ptr<int64_t[]> found(new int64_t[rows]);
    Array values(rows, false, shift);
    ArgMax(x.as<float>(), stride, found.get(), values.as<float>(), rows, count, isa, threads);
    ExpectValues(values, expected, where);
    for (size_t r = 0; r < rows; ++r) Expect(found[r] == static_cast<int64_t>(places[r]), where + Label(" row", r));
  });
}

}  // namespace

void TestElementwise() {
  for (const size_t count : kCounts) {
    for (const size_t rows : {0, 1, 5}) {
      for (int i = 0; i < 8; ++i) Norm(rows, count, (i & 1) != 0, (i & 2) != 0, (i & 4) != 0);
      for (const bool narrow : {false, true}) {
        AddNorm(rows, count, narrow);
        NormInPlace(rows, 3, count, narrow);
        AddBias(rows, count, narrow);
        Silu(rows, count, narrow);
        Turn(rows, 3, count, narrow);
      }
    }
    Greatest(0, count);
    Greatest(5, count);
  }
  for (const size_t count : {1023, 1024, 1025, 5001}) Greatest(4, count);
  for (const bool narrow : {false, true}) {  // enough for several threads
    Norm(270, 599, narrow, narrow, narrow);
    AddNorm(270, 599, narrow);
    NormInPlace(270, 9, 64, narrow);
    AddBias(270, 599, narrow);
    Silu(270, 599, narrow);
    Turn(270, 12, 41, narrow);
  }
  Greatest(30, 5001);
}

}  // namespace dcprt::test

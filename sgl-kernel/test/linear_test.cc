// Products with a packed matrix against sums in double, and the rows of the matrix.
#include "dcprt/linear.h"

#include <string>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

struct Sizes {
  size_t rows, ins, outs;
};

// Which of them are bfloat16; `bias` 2 is none.
struct Types {
  bool x, weight, out;
  int bias;
};

FloatType TypeOf(const Array& x) { return x.narrow() ? FloatType::kBFloat16 : FloatType::kFloat32; }

// `weight` [outs, ins] with rows `stride` apart, packed into memory of exactly the size that is asked for.
class Packed {
 public:
  Packed(const Array& weight, size_t stride, const Sizes& sizes, size_t shift)
      : matrix_{nullptr, TypeOf(weight), sizes.outs, sizes.ins},
        data_(matrix_.Panels() * matrix_.PanelElements(), weight.narrow(), shift) {
    matrix_.data = data_.data();
    PackMatrix(weight.data(), stride, matrix_, data_.data());
  }
  const PackedMatrix& matrix() const { return matrix_; }

 private:
  PackedMatrix matrix_;
  Array data_;
};

// [rows, count], rows `stride` apart; nothing behind the last element.
Array Matrix(size_t rows, size_t count, size_t stride, bool narrow, size_t shift) {
  return Array(rows == 0 ? 0 : (rows - 1) * stride + count, narrow, shift);
}

// x is rounded to the type of the weights, as the kernel says it does.
double Rounded(double value, bool narrow) {
  return narrow ? ToFloat(ToBFloat16(static_cast<float>(value))) : value;
}

Value Define(const Array& x, const Array& weight, const double* bias, size_t ins, bool narrow_out) {
  constexpr double kEpsilon = 1.0 / (1 << 23);
  double sum = bias == nullptr ? 0 : *bias, size = std::fabs(sum);
  for (size_t i = 0; i < ins; ++i) {
    const double term = x[i] * weight[i];
    sum += term;
    size += std::fabs(term);
  }
  const double bound = size * kEpsilon * (4 + static_cast<double>(ins) / 8) + 1e-37;
  return {sum, bound + (narrow_out ? std::fabs(sum) / 256 : 0)};
}

// The rows of the matrix, and zeros for those that it has not.
void CheckRows(const Packed& packed, const Array& weight, size_t stride) {
  const PackedMatrix& m = packed.matrix();
  std::vector<int64_t> rows{-1, static_cast<int64_t>(m.outs)};
  for (size_t r = 0; r < m.outs; r += 3) rows.push_back(static_cast<int64_t>(r));
  std::vector<Value> expected;
  for (const int64_t row : rows) {
    const bool known = row >= 0 && row < static_cast<int64_t>(m.outs);
    const size_t begin = static_cast<size_t>(row) * stride;
    for (size_t i = 0; i < m.ins; ++i) expected.push_back({known ? weight[begin + i] : 0, 0});
  }
  Array out(rows.size() * m.ins);
  PackedRows(m, rows.data(), rows.size(), out.as<float>());
  ExpectValues(out, expected, Label("rows", m.outs, m.ins));
}

void Check(const Sizes& s, const Types& types, size_t gap, size_t shift) {
  const size_t x_stride = s.ins + gap, weight_stride = s.ins + 2 * gap;
  Array x = Matrix(s.rows, s.ins, x_stride, types.x, shift);
  Array weight = Matrix(s.outs, s.ins, weight_stride, types.weight, shift);
  Array bias(s.outs, types.bias == 1, shift);
  Random random(s.ins + s.outs);
  for (size_t r = 0; r < s.rows; ++r) {
    for (size_t i = 0; i < s.ins; ++i) x.Set(r * x_stride + i, random.Next());
  }
  for (size_t r = 0; r < s.outs; ++r) {
    for (size_t i = 0; i < s.ins; ++i) weight.Set(r * weight_stride + i, random.Next());
  }
  random.Fill(bias);

  std::vector<Value> expected;
  Array row(s.ins), column(s.ins);
  for (size_t r = 0; r < s.rows; ++r) {
    for (size_t i = 0; i < s.ins; ++i) row.Set(i, Rounded(x[r * x_stride + i], types.weight));
    for (size_t o = 0; o < s.outs; ++o) {
      for (size_t i = 0; i < s.ins; ++i) column.Set(i, weight[o * weight_stride + i]);
      const double added = bias[o];
      expected.push_back(Define(row, column, types.bias == 2 ? nullptr : &added, s.ins, types.out));
    }
  }
  const Packed packed(weight, weight_stride, s, shift);
  CheckRows(packed, weight, weight_stride);
  for (const Isa isa : Isas()) {
    for (const int threads : {1, 2, 3}) {
      Array out(s.rows * s.outs, types.out, shift);
      LinearArgs args{};
      args.x = x.data();
      args.x_type = TypeOf(x);
      args.x_stride = x_stride;
      args.matrix = packed.matrix();
      args.bias = types.bias == 2 ? nullptr : bias.data();
      args.bias_type = TypeOf(bias);
      args.out = out.data();
      args.out_type = TypeOf(out);
      args.rows = s.rows;
      args.out_stride = s.outs;
      if (s.rows > 0 && s.outs > 0) Linear(args, isa, threads);
      ExpectValues(out, expected,
                   Label("linear", s.rows, s.ins, s.outs) + " " + NameOf(isa) +
                       Label(" types", types.x, types.weight, types.out, types.bias) +
                       Label(" gap", gap, shift, threads));
    }
  }
}

// A matrix for each of several heads: the same as one head after the other, and nothing between them is touched.
void CheckHeads(const Sizes& s, size_t heads, const Types& types, size_t gap) {
  const size_t x_step = s.ins + gap, out_step = s.outs + gap, x_stride = heads * x_step + 1, out_stride = heads * out_step + 1;
  const PackedMatrix shape{nullptr, types.weight ? FloatType::kBFloat16 : FloatType::kFloat32, s.outs, s.ins};
  const size_t elements = shape.Panels() * shape.PanelElements();
  Array x(s.rows * x_stride, types.x), packed(heads * elements, types.weight);
  Random random(s.ins + heads);
  random.Fill(x);
  const Array untouched(s.rows * out_stride, types.out);
  std::vector<Value> expected;
  for (size_t i = 0; i < untouched.size(); ++i) expected.push_back({untouched[i], 0});
  Array row(s.ins), column(s.ins);
  for (size_t h = 0; h < heads; ++h) {
    Array weight(s.outs * s.ins, types.weight);
    random.Fill(weight);
    PackMatrix(weight.data(), s.ins, shape, packed.data() + h * elements * SizeOf(shape.type));
    for (size_t r = 0; r < s.rows; ++r) {
      for (size_t i = 0; i < s.ins; ++i) row.Set(i, Rounded(x[r * x_stride + h * x_step + i], types.weight));
      for (size_t o = 0; o < s.outs; ++o) {
        for (size_t i = 0; i < s.ins; ++i) column.Set(i, weight[o * s.ins + i]);
        expected[r * out_stride + h * out_step + o] = Define(row, column, nullptr, s.ins, types.out);
      }
    }
  }
  for (const Isa isa : Isas()) {
    for (const int threads : {1, 2, 3}) {
      Array out(untouched.size(), types.out);
      LinearArgs args{};
      args.x = x.data();
      args.x_type = TypeOf(x);
      args.x_stride = x_stride;
      args.matrix = shape;
      args.matrix.data = packed.data();
      args.out = out.data();
      args.out_type = TypeOf(out);
      args.rows = s.rows;
      args.out_stride = out_stride;
      LinearHeads(args, heads, x_step, out_step, isa, threads);
      ExpectValues(out, expected, Label("heads", heads, s.rows, s.ins, s.outs) + " " + NameOf(isa) +
                                      Label(" types", types.x, types.weight, types.out) + Label(" gap", gap, threads));
    }
  }
}

}  // namespace

void TestLinear() {
  const Types plain{false, false, false, 2}, narrow{true, true, true, 2}, mixed{false, true, false, 0};
  for (const Types& types : {plain, narrow, mixed}) {
    for (const size_t ins : {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 129, 600}) {
      for (const size_t outs : {1, 2, 3, 4, 5, 8, 31}) {
        for (const size_t rows : {1, 2, 3, 5, 17}) Check({rows, ins, outs}, types, 0, ins % 2);
      }
    }
    Check({3, 300, 1001}, types, 0, 0);  // enough for several threads
    Check({1, 577, 500}, types, 1, 1);
    Check({40, 257, 300}, types, 0, 3);
    for (const Sizes& sizes : {Sizes{0, 5, 3}, Sizes{2, 5, 0}, Sizes{2, 0, 3}}) Check(sizes, types, 0, 0);
    for (const size_t heads : {1, 2, 5}) {
      for (const size_t rows : {1, 3, 17}) CheckHeads({rows, 24, 20}, heads, types, heads % 3);
      CheckHeads({2, 37, 5}, heads, types, 3);
    }
    CheckHeads({200, 33, 17}, 3, types, 1);  // blocks of rows, and several threads
  }
  for (int i = 0; i < 24; ++i) {
    for (const size_t ins : {32, 37, 64}) {
      Check({6, ins, 21}, {(i & 1) != 0, (i & 2) != 0, (i & 4) != 0, i / 8}, ins % 3, ins % 5);
    }
  }
}

}  // namespace dcprt::test

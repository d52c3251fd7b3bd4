// What a matrix product is made of, whatever the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dcprt/bfloat16.h"

namespace dcprt {

// A matrix [outs, ins] as products read it: panels of 16 outputs, each from its first to its last input without a gap,
// so that one row of x streams through memory and many rows need no sums across lanes.
//
//   float32   [panels, ins, 16]
//   bfloat16  [panels, (ins + 1) / 2, 16, 2]: two inputs side by side, as processors multiply them
//
// Outputs and inputs that fill up the last panel and pair are zeros. A `coded` one is kept as matrix_code.h says, in units
// of kUnitSteps steps.
struct PackedMatrix {
  const void* data;
  FloatType type;
  size_t outs, ins;
  bool coded = false;

  static constexpr size_t kPanel = 16, kUnitSteps = 4;

  size_t Width() const { return type == FloatType::kBFloat16 ? 2 : 1; }
  size_t Panels() const { return (outs + kPanel - 1) / kPanel; }
  size_t Steps() const {
    const size_t unit = coded ? kUnitSteps * Width() : Width();
    return (ins + unit - 1) / unit * (unit / Width());
  }
  size_t PanelElements() const { return Steps() * kPanel * Width(); }
  // About as many are read for a panel.
  size_t PanelBytes() const {
    const size_t plain = PanelElements() * SizeOf(type);
    return coded ? plain / 4 * 3 : plain;
  }
};

// out[rows, outs] = x[rows, ins] * matrix^T + bias[outs]. Elements of a row are dense; nothing needs to be aligned
// further than its type. x is rounded to the type of the matrix.
struct LinearArgs {
  const void* x;
  FloatType x_type;
  size_t x_stride;  // elements from one row to the next
  PackedMatrix matrix;
  const void* bias;  // in `bias_type`, or null
  FloatType bias_type;
  void* out;
  FloatType out_type;
  size_t rows;
  size_t out_stride;  // elements from one row to the next
};

namespace linear_detail {

// Some rows and panels of a product.
struct LinearPart {
  size_t row, rows, panel, panels;
};

// What every instruction set offers. `x` is in the type and with the stride that the set wants, see `pairs`.
struct LinearOps {
  bool pairs;  // whether bfloat16 x is read as it is; else both are widened and x is float32
  // A row of x, rounded to the type of the matrix, in the type that the set wants.
  void (*convert)(const LinearArgs& args, size_t row, void* to);
  void (*part)(const LinearArgs& args, const void* x, size_t x_stride, const LinearPart& part);
};

}  // namespace linear_detail
}  // namespace dcprt

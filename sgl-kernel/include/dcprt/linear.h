// Products with a matrix that was packed once: bound by the reading of the matrix for few rows, by arithmetic for many.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dcprt/bfloat16.h"
#include "dcprt/isa.h"
#include "dcprt/linear_isa.h"
#include "dcprt/linear_types.h"
#include "dcprt/pack.h"
#include "dcprt/scratch.h"
#include "dcprt/threads.h"

namespace dcprt {
namespace linear_detail {

// Bytes of the matrix times rows below which a second thread costs more than it gains.
constexpr size_t kThreadedBytes = 128 << 10;
constexpr size_t kRowBlock = 192;   // rows of one part: their inputs stay in the second cache
constexpr size_t kPanelBlock = 24;  // panels of one part where there are many rows
constexpr size_t kFewRows = 8;      // up to which the matrix is read faster than it is multiplied
constexpr size_t kPartBytes = 96 << 10;  // of a part there: who is done first waits for little

// Rows of x in the type that the loops read: x itself where it is in that type already, else a copy with zeros up to a
// whole step.
inline const void* Prepared(const LinearArgs& a, const LinearOps& ops, size_t* stride) {
  const bool as_pairs = ops.pairs && a.matrix.type == FloatType::kBFloat16;
  const bool same = as_pairs ? a.x_type == FloatType::kBFloat16 && a.matrix.ins == a.matrix.Steps() * 2
                             : a.x_type == FloatType::kFloat32 && a.matrix.type == FloatType::kFloat32;
  *stride = a.x_stride;
  if (same) return a.x;
  const size_t size = as_pairs ? sizeof(BFloat16) : sizeof(float);
  *stride = a.matrix.Steps() * a.matrix.Width();
  char* out = static_cast<char*>(Scratch<Purpose::kLinearInput>(*stride * a.rows * size));
  for (size_t row = 0; row < a.rows; ++row) {
    char* to = out + row * *stride * size;
    ops.convert(a, row, to);
    std::memset(to + a.matrix.ins * size, 0, (*stride - a.matrix.ins) * size);
  }
  return out;
}

}  // namespace linear_detail

inline void Linear(const LinearArgs& a, Isa isa, int threads) {
  using namespace linear_detail;
  const LinearOps& ops = OpsOf(isa);
  size_t stride;
  const void* x = Prepared(a, ops, &stride);
  const size_t panels = a.matrix.Panels();
  const size_t panel_bytes = a.matrix.PanelBytes();
  if (threads < 2 || panel_bytes * panels * a.rows < kThreadedBytes) {
    for (size_t row = 0; row < a.rows; row += kRowBlock) {
      ops.part(a, x, stride, {row, std::min(kRowBlock, a.rows - row), 0, panels});
    }
    return;
  }
  const size_t share = (panels + static_cast<size_t>(threads) * 4 - 1) / (static_cast<size_t>(threads) * 4);
  const size_t most = a.rows < kFewRows ? std::max<size_t>(1, kPartBytes / panel_bytes) : kPanelBlock;
  const size_t wide = (std::min(share, most) + 2) / 3 * 3;
  const size_t columns = (panels + wide - 1) / wide, cuts = (a.rows + kRowBlock - 1) / kRowBlock;
  // Rows are cut evenly, so that the last block is no small rest.
  const size_t block = (a.rows + cuts - 1) / cuts, blocks = (a.rows + block - 1) / block;
  ThreadPool::Get().Run(threads, static_cast<uint32_t>(columns * blocks), [&](uint32_t i) {
    const size_t at = columns * blocks - 1 - i;  // parts are taken from the last on
    const size_t row = at / columns * block, panel = at % columns * wide;
    ops.part(a, x, stride, {row, std::min(block, a.rows - row), panel, std::min(wide, panels - panel)});
  });
}

// The same head by head: x [rows, heads, ins], out [rows, heads, outs]. `first` is the product of the first head,
// without a bias; the matrices of the others lie behind its own, none of them coded, their x and out `x_step` and
// `out_step` elements behind.
inline void LinearHeads(const LinearArgs& first, size_t heads, size_t x_step, size_t out_step, Isa isa, int threads) {
  using namespace linear_detail;
  const PackedMatrix& m = first.matrix;
  const size_t elements = m.Panels() * m.PanelElements(), blocks = (first.rows + kRowBlock - 1) / kRowBlock;
  if (elements * SizeOf(m.type) * heads * first.rows < kThreadedBytes) threads = 1;
  const auto behind = [](const void* from, size_t count, FloatType type) {
    return static_cast<const char*>(from) + count * SizeOf(type);
  };
  ThreadPool::Get().Run(threads, static_cast<uint32_t>(heads * blocks), [&](uint32_t i) {
    const size_t head = i / blocks, row = i % blocks * kRowBlock;
    LinearArgs own = first;
    own.rows = std::min(kRowBlock, first.rows - row);
    own.x = behind(first.x, row * first.x_stride + head * x_step, first.x_type);
    own.out = const_cast<char*>(behind(first.out, row * first.out_stride + head * out_step, first.out_type));
    own.matrix.data = behind(m.data, head * elements, m.type);
    Linear(own, isa, 1);
  });
}

}  // namespace dcprt

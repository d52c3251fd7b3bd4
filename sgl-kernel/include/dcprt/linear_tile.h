// Tiles of a matrix product, for the instruction set whose struct is `Simd`: included in the namespace of each, hence
// without a guard. See linear_types.h for how matrices are packed.
//
// Every output is summed over its inputs in their order, whatever the number of rows, so a row's result does not depend
// on the rows beside it.

using Vec = Simd::Vec;
constexpr int kVecs = static_cast<int>(PackedMatrix::kPanel) / Simd::kLanes;  // vectors of a panel

// The sums of a tile stay in registers only if these loops vanish before the compiler decides what lives in memory.
#define DCPRT_UNROLL _Pragma("GCC unroll 16")

// A step of an operation multiplies kWidth inputs of a row with those of all outputs of a panel.
struct Floats {
  using Weight = float;
  using In = float;
  using Wide = Vec;
  static constexpr size_t kWidth = 1;

  DCPRT_SIMD Wide Load(const float* from) { return Simd::Load(from); }
  DCPRT_SIMD Vec Step(const float* x, const Wide& w, Vec acc) { return Simd::Fma(Simd::Set1(x[0]), w, acc); }
};

// Where processors have no product of bfloat16: the inputs at even and at odd places, widened by a shift and a mask.
struct Halves {
  using Weight = BFloat16;
  using In = float;
  using Wide = Simd::Halves;
  static constexpr size_t kWidth = 2;

  DCPRT_SIMD Wide Load(const BFloat16* from) { return Simd::Split(from); }
  DCPRT_SIMD Vec Step(const float* x, const Wide& w, Vec acc) {
    return Simd::Fma(Simd::Set1(x[1]), w.odd, Simd::Fma(Simd::Set1(x[0]), w.even, acc));
  }
};

template <class S>
struct Pairs {
  using Weight = BFloat16;
  using In = BFloat16;
  using Wide = Vec;
  static constexpr size_t kWidth = 2;

  DCPRT_SIMD Wide Load(const BFloat16* from) { return S::LoadBits(from); }
  DCPRT_SIMD Vec Step(const BFloat16* x, const Wide& w, Vec acc) { return S::Pair(S::Set1Bits(x), w, acc); }
};

// sums [R, C * 16]: R rows of x times C panels. With kFetch, the panels come from memory and not from a cache.
template <class Op, int R, int C, bool kFetch>
static void Tile(const typename Op::In* x, size_t x_stride, const typename Op::Weight* weight, size_t panel_step,
                 size_t steps, float* sums) {
  constexpr int kCols = C * kVecs;
  constexpr size_t kAhead = 4096 / sizeof(typename Op::Weight);  // panels are read once: further than a page looks ahead
  Vec acc[R][kCols];
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int c = 0; c < kCols; ++c) acc[r][c] = Simd::Set1(0);
  }
  for (size_t s = 0; s < steps; ++s) {
    typename Op::Wide w[kCols];
    DCPRT_UNROLL
    for (int c = 0; c < kCols; ++c) {
      const typename Op::Weight* from = weight + static_cast<size_t>(c / kVecs) * panel_step +
                                        (s * PackedMatrix::kPanel + static_cast<size_t>(c % kVecs * Simd::kLanes)) * Op::kWidth;
      if (kFetch) __builtin_prefetch(from + kAhead);
      w[c] = Op::Load(from);
    }
    DCPRT_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename Op::In* at = x + static_cast<size_t>(r) * x_stride + s * Op::kWidth;
      DCPRT_UNROLL
      for (int c = 0; c < kCols; ++c) acc[r][c] = Op::Step(at, w[c], acc[r][c]);
    }
  }
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int c = 0; c < kCols; ++c) Simd::Store(sums + (r * kCols + c) * Simd::kLanes, acc[r][c]);
  }
}

#undef DCPRT_UNROLL

// Writes outputs [first, first + count) of one row.
static void StoreRow(const LinearArgs& a, size_t row, size_t first, size_t count, float* sums) {
  if (a.bias != nullptr && a.bias_type == FloatType::kFloat32) {
    for (size_t i = 0; i < count; ++i) sums[i] += static_cast<const float*>(a.bias)[first + i];
  } else if (a.bias != nullptr) {
    for (size_t i = 0; i < count; ++i) sums[i] += ToFloat(static_cast<const BFloat16*>(a.bias)[first + i]);
  }
  const size_t at = row * a.matrix.outs + first;
  if (a.out_type == FloatType::kFloat32) {
    std::memcpy(static_cast<float*>(a.out) + at, sums, count * sizeof(float));
  } else {
    BFloat16* out = static_cast<BFloat16*>(a.out) + at;
    for (size_t i = 0; i < count; ++i) out[i] = ToBFloat16(sums[i]);
  }
}

// Rows [row, row + R) times C panels from `panel` on; the last of fewer than R rows by a smaller tile.
template <class Op, int R, int C>
static void RowsOf(const LinearArgs& a, const typename Op::In* x, size_t x_stride, size_t row, size_t rows, size_t panel,
                   bool fetch = true) {
  if constexpr (R > 0) {
    const size_t panel_step = a.matrix.PanelElements(), steps = a.matrix.Steps(), first = panel * PackedMatrix::kPanel;
    const auto* weight = static_cast<const typename Op::Weight*>(a.matrix.data) + panel * panel_step;
    constexpr size_t kOuts = C * PackedMatrix::kPanel;
    const size_t count = a.matrix.outs - first < kOuts ? a.matrix.outs - first : kOuts;
    alignas(64) float sums[R * kOuts];
    for (; rows >= R; rows -= R, row += R, fetch = false) {
      const auto tile = fetch ? Tile<Op, R, C, true> : Tile<Op, R, C, false>;
      tile(x + row * x_stride, x_stride, weight, panel_step, steps, sums);
      for (size_t r = 0; r < R; ++r) StoreRow(a, row + r, first, count, sums + r * kOuts);
    }
    if (rows > 0) RowsOf<Op, R - 1, C>(a, x, x_stride, row, rows, panel, fetch);
  }
}

template <class Op>
static void Part(const LinearArgs& a, const void* x, size_t x_stride, const LinearPart& part) {
  const auto* in = static_cast<const typename Op::In*>(x);
  constexpr int kPanels = Simd::kLinearPanels;
  const size_t end = part.panel + part.panels;
  size_t panel = part.panel;
  for (; panel + kPanels <= end; panel += kPanels) {
    RowsOf<Op, Simd::kLinearRows, kPanels>(a, in, x_stride, part.row, part.rows, panel);
  }
  for (; panel < end; ++panel) RowsOf<Op, Simd::kLinearRows, 1>(a, in, x_stride, part.row, part.rows, panel);
}

static void RunPart(const LinearArgs& a, const void* x, size_t x_stride, const LinearPart& part) {
  if (a.matrix.type == FloatType::kFloat32) return Part<Floats>(a, x, x_stride, part);
  if constexpr (Simd::kPairs) {
    Part<Pairs<Simd>>(a, x, x_stride, part);
  } else {
    Part<Halves>(a, x, x_stride, part);
  }
}

static void ConvertRow(const LinearArgs& a, size_t row, void* to) {
  const size_t count = a.matrix.ins;
  const float* wide = static_cast<const float*>(a.x) + row * a.x_stride;
  const BFloat16* narrow = static_cast<const BFloat16*>(a.x) + row * a.x_stride;
  const bool from_wide = a.x_type == FloatType::kFloat32;
  float* out = static_cast<float*>(to);
  if (a.matrix.type == FloatType::kFloat32) {
    for (size_t i = 0; i < count; ++i) out[i] = from_wide ? wide[i] : ToFloat(narrow[i]);
  } else if (!Simd::kPairs) {
    for (size_t i = 0; i < count; ++i) out[i] = ToFloat(from_wide ? ToBFloat16(wide[i]) : narrow[i]);
  } else {
    BFloat16* pairs = static_cast<BFloat16*>(to);
    for (size_t i = 0; i < count; ++i) pairs[i] = from_wide ? ToBFloat16(wide[i]) : narrow[i];
  }
}

static constexpr LinearOps kOps{Simd::kPairs, ConvertRow, RunPart};

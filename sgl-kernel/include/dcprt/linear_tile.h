// Tiles of a matrix product, for the instruction set whose struct is `Simd`: included in the namespace of each, hence
// without a guard. See linear_types.h for how matrices are packed.
//
// Every output is summed over its inputs in their order, whatever the number of rows, so a row's result does not depend
// on the rows beside it.

using Vec = Simd::Vec;
constexpr int kVecs = static_cast<int>(PackedMatrix::kPanel) / Simd::kLanes;  // vectors of a panel

#define DCPRT_MEMBER inline __attribute__((always_inline))

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

// C panels, step after step. With kFetch, they come from memory and not from a cache.
template <class Op, int C, bool kFetch>
struct PlainPanels {
  using Weight = typename Op::Weight;
  static constexpr size_t kSteps = 1;  // that are there after `Next`
  static constexpr size_t kAhead = 4096 / sizeof(Weight);  // panels are read once: further than a page looks ahead
  static constexpr size_t kStep = PackedMatrix::kPanel * Op::kWidth;

  PlainPanels(const Weight* weight, size_t panel_step)
      : at_(weight - kStep), end_(weight + panel_step), panel_step_(panel_step) {}
  DCPRT_MEMBER void Next() {
    at_ += kStep;
    if constexpr (kFetch) {
      // Behind the end of a panel lie the others, which are here already; behind them the next C ones.
      const Weight* ahead = at_ + kAhead + (at_ + kAhead < end_ ? 0 : (C - 1) * panel_step_);
      DCPRT_UNROLL
      for (size_t c = 0; c < C; ++c) {
        DCPRT_UNROLL
        for (size_t i = 0; i < kVecs; ++i) __builtin_prefetch(ahead + c * panel_step_ + i * Simd::kLanes * Op::kWidth);
      }
    }
  }
  DCPRT_MEMBER const Weight* At(size_t panel, size_t) const { return at_ + panel * panel_step_; }

 private:
  const Weight *at_, *end_;
  size_t panel_step_;
};

// The same of a coded matrix, unit after unit. Weights of panel c are written to `out + c * panel_step`; kKeep: all of
// them, one unit behind the other, else each in the place of the one before.
template <int C, bool kKeep>
struct CodedPanels {
  static constexpr size_t kSteps = PackedMatrix::kUnitSteps, kStep = PackedMatrix::kPanel * 2;
  static constexpr size_t kAhead = 4096;

  CodedPanels(const PackedMatrix& m, size_t panel, BFloat16* out, size_t panel_step)
      : upper_(UpperOf(m)), out_(out - (kKeep ? kUnit : 0)), panel_step_(panel_step) {
    for (size_t c = 0; c < C; ++c) panels_[c] = CodedPanel(m, panel + c);
  }
  DCPRT_MEMBER void Next() {
    if constexpr (kKeep) out_ += kUnit;
    DCPRT_UNROLL
    for (size_t c = 0; c < C; ++c) {
      const uint8_t* at = panels_[c].at();
      const uint8_t* ahead = panels_[c].Ahead(kAhead, C - 1);
      for (size_t i = 0; i < kCodedUnit; i += 64) __builtin_prefetch(ahead + i);
      BFloat16* to = out_ + c * panel_step_;
      if (__builtin_expect(panels_[c].kept(), 0)) {
        std::memcpy(to, at, kKeptUnit);
      } else {
        Simd::Decode(at, upper_, to);
      }
      panels_[c].Next();
    }
  }
  DCPRT_MEMBER const BFloat16* At(size_t panel, size_t step) const { return out_ + panel * panel_step_ + step * kStep; }

 private:
  CodedPanel panels_[C];
  const uint8_t* upper_;
  BFloat16* out_;
  size_t panel_step_;
};

// sums [R, C * 16]: R rows of x times C panels, of which `first` is before the first step.
template <class Op, int R, int C, class Panels>
static void Tile(const typename Op::In* x, size_t x_stride, const Panels& first, size_t steps, float* sums) {
  Panels panels = first;
  constexpr int kCols = C * kVecs;
  Vec acc[R][kCols];
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int c = 0; c < kCols; ++c) acc[r][c] = Simd::Set1(0);
  }
  for (size_t s = 0; s < steps; s += Panels::kSteps) {
    panels.Next();
    DCPRT_UNROLL
    for (size_t k = 0; k < Panels::kSteps; ++k) {
      typename Op::Wide w[kCols];
      DCPRT_UNROLL
      for (int c = 0; c < kCols; ++c) {
        w[c] = Op::Load(panels.At(static_cast<size_t>(c / kVecs), k) + static_cast<size_t>(c % kVecs * Simd::kLanes) * Op::kWidth);
      }
      DCPRT_UNROLL
      for (int r = 0; r < R; ++r) {
        const typename Op::In* at = x + static_cast<size_t>(r) * x_stride + (s + k) * Op::kWidth;
        DCPRT_UNROLL
        for (int c = 0; c < kCols; ++c) acc[r][c] = Op::Step(at, w[c], acc[r][c]);
      }
    }
  }
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int c = 0; c < kCols; ++c) Simd::Store(sums + (r * kCols + c) * Simd::kLanes, acc[r][c]);
  }
}

#undef DCPRT_MEMBER

// Writes outputs [first, first + count) of one row.
static void StoreRow(const LinearArgs& a, size_t row, size_t first, size_t count, float* sums) {
  if (a.bias != nullptr && a.bias_type == FloatType::kFloat32) {
    for (size_t i = 0; i < count; ++i) sums[i] += static_cast<const float*>(a.bias)[first + i];
  } else if (a.bias != nullptr) {
    for (size_t i = 0; i < count; ++i) sums[i] += ToFloat(static_cast<const BFloat16*>(a.bias)[first + i]);
  }
  const size_t at = row * a.out_stride + first;
  if (a.out_type == FloatType::kFloat32) {
    std::memcpy(static_cast<float*>(a.out) + at, sums, count * sizeof(float));
  } else {
    BFloat16* out = static_cast<BFloat16*>(a.out) + at;
    for (size_t i = 0; i < count; ++i) out[i] = ToBFloat16(sums[i]);
  }
}

// Some rows of x, in the type that the loops read.
template <class Op>
struct Rows {
  const typename Op::In* x;
  size_t stride, first, count;
};

// The rows times C panels from `panel` on, R rows at a time; the last of fewer than R rows by a smaller tile. `first` are
// the panels for the first R rows, `then` for all others.
template <class Op, int R, int C, class First, class Then>
static void TimesPanels(const LinearArgs& a, Rows<Op> rows, size_t panel, const First& first,
                        const Then& then) {
  if constexpr (R > 0) {
    const size_t steps = a.matrix.Steps(), out = panel * PackedMatrix::kPanel;
    constexpr size_t kOuts = C * PackedMatrix::kPanel;
    const size_t count = a.matrix.outs - out < kOuts ? a.matrix.outs - out : kOuts;
    alignas(64) float sums[R * kOuts];
    const auto tile = [&](const auto& panels) {
      Tile<Op, R, C>(rows.x + rows.first * rows.stride, rows.stride, panels, steps, sums);
      for (size_t r = 0; r < R; ++r) StoreRow(a, rows.first + r, out, count, sums + r * kOuts);
      rows.first += R;
      rows.count -= R;
    };
    if (rows.count < R) return TimesPanels<Op, R - 1, C>(a, rows, panel, first, then);
    tile(first);
    while (rows.count >= R) tile(then);
    if (rows.count > 0) TimesPanels<Op, R - 1, C>(a, rows, panel, then, then);
  }
}

template <class Op, int C>
static void RowsOf(const LinearArgs& a, const Rows<Op>& rows, size_t panel) {
  constexpr int R = Simd::kLinearRows;
  const PackedMatrix& m = a.matrix;
  using Cached = PlainPanels<Op, C, false>;
  if constexpr (sizeof(typename Op::Weight) == sizeof(BFloat16)) {
    if (m.coded && rows.count <= R) {
      alignas(64) BFloat16 units[C * kUnit];
      const CodedPanels<C, false> panels(m, panel, units, kUnit);
      return TimesPanels<Op, R, C>(a, rows, panel, panels, panels);
    }
    if (m.coded) {
      auto* weight = static_cast<BFloat16*>(Scratch<Purpose::kDecoded>(C * m.PanelElements() * sizeof(BFloat16)));
      const CodedPanels<C, true> first(m, panel, weight, m.PanelElements());
      return TimesPanels<Op, R, C>(a, rows, panel, first, Cached(weight, m.PanelElements()));
    }
  }
  const auto* weight = static_cast<const typename Op::Weight*>(m.data) + panel * m.PanelElements();
  const size_t step = m.PanelElements();
  TimesPanels<Op, R, C>(a, rows, panel, PlainPanels<Op, C, true>(weight, step), Cached(weight, step));
}

template <class Op>
static void Part(const LinearArgs& a, const void* x, size_t x_stride, const LinearPart& part) {
  const Rows<Op> rows{static_cast<const typename Op::In*>(x), x_stride, part.row, part.rows};
  constexpr int kPanels = Simd::kLinearPanels;
  const size_t end = part.panel + part.panels;
  size_t panel = part.panel;
  for (; panel + kPanels <= end; panel += kPanels) RowsOf<Op, kPanels>(a, rows, panel);
  for (; panel < end; ++panel) RowsOf<Op, 1>(a, rows, panel);
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

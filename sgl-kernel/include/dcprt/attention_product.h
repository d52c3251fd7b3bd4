// The products of attention, and its exponential, for the instruction set whose struct is `Simd`: included in the
// namespace of each, hence without a guard.

using Vec = Simd::Vec;
constexpr int64_t kLanes = Simd::kLanes;

// Within 2 units in the last place for -87.33 <= x <= 88; 0 below; NaN for NaN.
DCPRT_SIMD Vec Exp(Vec x) {
  const Vec low = Simd::Set1(-87.33654f);
  const Vec at = Simd::Max(low, x);
  const Vec n = Simd::Round(Simd::Mul(at, Simd::Set1(1.44269504f)));
  Vec r = Simd::Fma(n, Simd::Set1(-0.693359375f), at);
  r = Simd::Fma(n, Simd::Set1(2.12194440e-4f), r);
  Vec p = Simd::Fma(Simd::Set1(1.0f / 5040), r, Simd::Set1(1.0f / 720));
  p = Simd::Fma(p, r, Simd::Set1(1.0f / 120));
  p = Simd::Fma(p, r, Simd::Set1(1.0f / 24));
  p = Simd::Fma(p, r, Simd::Set1(1.0f / 6));
  p = Simd::Fma(p, r, Simd::Set1(0.5f));
  p = Simd::Fma(p, r, Simd::Set1(1.0f));
  p = Simd::Fma(p, r, Simd::Set1(1.0f));
  return Simd::ZeroBelow(x, low, Simd::Scale2(p, n));
}

static void ExpAll(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t part = count - i < kLanes ? count - i : kLanes;
    float y[kLanes];
    Simd::Store(y, Exp(Simd::LoadPart(x + i, part)));
    std::memcpy(out + i, y, static_cast<size_t>(part) * sizeof(float));
  }
}

// How a lane of one factor meets a lane of the other: float32 with T widened, or pairs of bfloat16.
template <class T>
struct Single {
  using Element = T;
  template <int C>
  DCPRT_SIMD void Load(const T* from, Vec* to) {
    for (int c = 0; c < C; ++c) to[c] = Simd::Load(from + c * kLanes);
  }
  DCPRT_SIMD Vec Step(Vec a, Vec b, Vec acc) { return Simd::Fma(a, b, acc); }
};

// bfloat16, widened by a shift and a mask: of every 2 * kLanes elements those at even places come first.
template <class T>
struct HalvesOf : Single<T> {
  template <int C>
  DCPRT_SIMD void Load(const T* from, Vec* to) {
    if constexpr (sizeof(T) == 2 && C % 2 == 0) {
      for (int c = 0; c < C; c += 2) {
        const auto halves = Simd::Split(from + c * kLanes);
        to[c] = halves.even;
        to[c + 1] = halves.odd;
      }
    }
  }
};

template <class S>
struct Paired : Single<float> {
  DCPRT_SIMD Vec Step(Vec a, Vec b, Vec acc) { return S::Pair(a, b, acc); }
};

// out [R, C * kLanes] = or += a [R, count] times the rows `steps` from element `at` on. With kPart, C is 1 and only
// `part` columns of the vector are read. On its own, since what is around it would take registers from the loop.
template <class Op, int R, int C, bool kAdd, bool kPart>
__attribute__((noinline)) static void Tile(const float* a, int64_t a_step, const void* const* steps, int64_t at,
                                           int64_t count, float* out, int64_t out_step, int64_t part) {
  Vec acc[R][C];
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int c = 0; c < C; ++c) {
      acc[r][c] = kAdd ? Simd::Load(out + r * out_step + c * kLanes) : Simd::Set1(0);
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    const auto* row = static_cast<const typename Op::Element*>(steps[s]) + at;
    Vec b[C];
    if constexpr (kPart) {
      b[0] = Simd::LoadPart(row, part);
    } else {
      Op::template Load<C>(row, b);
    }
    DCPRT_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec x = Simd::Set1(a[r * a_step + s]);
      DCPRT_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = Op::Step(x, b[c], acc[r][c]);
    }
  }
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int c = 0; c < C; ++c) Simd::Store(out + r * out_step + c * kLanes, acc[r][c]);
  }
}

// Vectors in a row of a tile of R rows. A sum waits for the one before it, so there are eight of them if registers allow.
template <int R>
constexpr int kColsOf = R * Simd::kCols > 4 ? Simd::kCols : 8 / R;

// `blocks` times R rows, all columns; see `Product`. What a tile reads of `steps` is read again by the block below.
template <class Op, int R, bool kAdd>
static void Blocks(int64_t blocks, const float* a, int64_t a_step, const void* const* steps, int64_t count,
                   int64_t columns, float* out, int64_t out_step) {
  int64_t at = 0;
  const auto tile = [&](auto width, auto part) {
    constexpr int C = decltype(width)::value;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t row = i * R;
      Tile<Op, R, C, kAdd, decltype(part)::value>(a + row * a_step, a_step, steps, at, count, out + row * out_step + at,
                                                  out_step, columns - at);
    }
  };
  const auto tiles = [&](auto width) {
    constexpr int64_t kWidth = decltype(width)::value * kLanes;
    for (; at + kWidth <= columns; at += kWidth) tile(width, std::false_type());
  };
  if constexpr (kColsOf<R> > Simd::kCols) tiles(std::integral_constant<int, kColsOf<R>>());
  tiles(std::integral_constant<int, Simd::kCols>());
  tiles(std::integral_constant<int, 1>());
  if (at < columns) tile(std::integral_constant<int, 1>(), std::true_type());
}

template <class Op, int R, bool kAdd>
static void LastRows(int64_t rows, const float* a, int64_t a_step, const void* const* steps, int64_t count,
                     int64_t columns, float* out, int64_t out_step) {
  if constexpr (R > 0) {
    if (rows == R) return Blocks<Op, R, kAdd>(1, a, a_step, steps, count, columns, out, out_step);
    LastRows<Op, R - 1, kAdd>(rows, a, a_step, steps, count, columns, out, out_step);
  }
}

// out [rows, columns] = or += a [rows, count] times rows `steps` [count, columns]. Rows of `out` are written up to the
// next whole vector.
template <class Op, bool kAdd>
static void Product(int64_t rows, const float* a, int64_t a_step, const void* const* steps, int64_t count,
                    int64_t columns, float* out, int64_t out_step) {
  const int64_t blocks = rows / Simd::kRows, whole = blocks * Simd::kRows;
  if (blocks > 0) Blocks<Op, Simd::kRows, kAdd>(blocks, a, a_step, steps, count, columns, out, out_step);
  LastRows<Op, Simd::kRows - 1, kAdd>(rows - whole, a + whole * a_step, a_step, steps, count, columns,
                                      out + whole * out_step, out_step);
}

// Rows that will be needed soon, fetched a few at a time. Pages lie anywhere, which no processor foresees.
struct Ahead {
  const void* const* rows;
  int64_t at, end, bytes;

  inline __attribute__((always_inline)) void Fetch(int64_t count) {
    for (; count > 0 && at < end; --count, ++at) {
      const char* row = static_cast<const char*>(rows[at]);
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
    }
  }
};

// What is fetched while a block is passed once for each of `heads` key heads.
struct Fetching {
  Ahead next;  // what the heads will read after this, all of it in this pass
  Ahead own;   // what this head is about to read
  int64_t heads;

  // `count` keys are passed for one head.
  inline __attribute__((always_inline)) void Pass(int64_t count) {
    next.Fetch((count + heads - 1) / heads);
    own.Fetch(count);
  }
};

// `work` on rows [0, rows), a few tiles at a time; meanwhile `keys` are passed.
template <class Work>
static void PassRows(int64_t rows, int64_t keys, Fetching& fetching, const Work& work) {
  constexpr int64_t kChunk = 2 * Simd::kRows;
  for (int64_t first = 0; first < rows; first += kChunk) {
    fetching.Pass((keys * kChunk + rows - 1) / rows);
    work(first, first + kChunk < rows ? first + kChunk : rows);
  }
}

// scores [R, 4]: R queries times four keys.
template <class Op, int R>
static void DotTile(const float* q, int64_t q_step, const void* const* keys, int64_t units, float* scores) {
  using Element = typename Op::Element;
  const Element* k[4];
  DCPRT_UNROLL
  for (int j = 0; j < 4; ++j) k[j] = static_cast<const Element*>(keys[j]);
  Vec acc[R][4];
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int j = 0; j < 4; ++j) acc[r][j] = Simd::Set1(0);
  }
  int64_t i = 0;
  for (; i + kLanes <= units; i += kLanes) {
    Vec x[R];
    DCPRT_UNROLL
    for (int r = 0; r < R; ++r) x[r] = Simd::Load(q + r * q_step + i);
    DCPRT_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Vec b = Simd::Load(k[j] + i);
      DCPRT_UNROLL
      for (int r = 0; r < R; ++r) acc[r][j] = Op::Step(x[r], b, acc[r][j]);
    }
  }
  if (i < units) {
    DCPRT_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Vec b = Simd::LoadPart(k[j] + i, units - i);
      DCPRT_UNROLL
      for (int r = 0; r < R; ++r) acc[r][j] = Op::Step(Simd::Load(q + r * q_step + i), b, acc[r][j]);
    }
  }
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) Simd::Sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * kMaxKeys);
}

template <class Op, int R>
static void LastDots(int64_t rows, const float* q, int64_t q_step, const void* const* keys, int64_t units,
                     float* scores) {
  if constexpr (R > 0) {
    if (rows == R) return DotTile<Op, R>(q, q_step, keys, units, scores);
    LastDots<Op, R - 1>(rows, q, q_step, keys, units, scores);
  }
}

// Scores of few queries: every key is read once, from where it lies.
template <class Op>
static void Dots(int64_t rows, const float* q, int64_t q_step, const void* const* keys, int64_t count, int64_t units,
                 Fetching& fetching, float* scores) {
  constexpr int kRows = Simd::kDotRows;
  for (int64_t j = 0; j < count; j += 4) {
    fetching.Pass(4);
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) {
      DotTile<Op, kRows>(q + r * q_step, q_step, keys + j, units, scores + r * kMaxKeys + j);
    }
    LastDots<Op, kRows - 1>(rows - r, q + r * q_step, q_step, keys + j, units, scores + r * kMaxKeys + j);
  }
}

// packed [units, kMaxKeys]: `count` rows, a multiple of kLanes, as columns; `units` is a multiple of 4.
template <class T>
static void Pack(const void* const* rows, int64_t count, int64_t units, Fetching& fetching, float* packed) {
  for (int64_t j = 0; j < count; j += kLanes) {
    fetching.own.Fetch(kLanes);
    for (int64_t i = 0; i < units; i += 4) {
      const auto load = [&](int64_t row) { return Simd::template LoadLanes<T>(rows + j + row, i); };
      Vec a = load(0), b = load(1), c = load(2), d = load(3);
      Simd::Transpose(a, b, c, d);
      float* to = packed + i * kMaxKeys + j;
      Simd::Store(to, a);
      Simd::Store(to + kMaxKeys, b);
      Simd::Store(to + 2 * kMaxKeys, c);
      Simd::Store(to + 3 * kMaxKeys, d);
    }
  }
}

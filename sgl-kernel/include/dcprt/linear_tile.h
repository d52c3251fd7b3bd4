// The loop of a matrix product, included once for each instruction set by linear_isa.h, hence without a guard.
//
// DCPRT_TARGET says what the compiler may use. Inside the namespace that includes this, a trait `L` gives the types and
// steps; `L::LoadTail` reads `count` < L::kStep weights and zeros behind them, and nothing else.

#define DCPRT_INLINE DCPRT_TARGET inline __attribute__((always_inline))

// The sums of a tile stay in registers only if these loops vanish before the compiler decides what lives in memory.
#define DCPRT_UNROLL _Pragma("GCC unroll 4")

// sums[r * N + n] = dot(x row r, weight row n), for N rows of weights and R of x. x has zeros up to a whole step.
template <class L, int N, int R>
DCPRT_TARGET void Dots(const typename L::Weight* weight, size_t weight_stride, const typename L::In* x, size_t x_stride,
                       size_t ins, float* sums) {
  typename L::Sum acc[R][N];
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) {
    DCPRT_UNROLL
    for (int n = 0; n < N; ++n) L::Clear(&acc[r][n]);
  }
  const size_t whole = ins / L::kStep * L::kStep;
  constexpr size_t ahead = 8192 / sizeof(typename L::Weight);  // rows are short: the processor does not see far enough
  for (size_t i = 0; i < whole; i += L::kStep) {
    typename L::Wide w[N];
    DCPRT_UNROLL
    for (int n = 0; n < N; ++n) {
      const typename L::Weight* from = weight + static_cast<size_t>(n) * weight_stride + i;
      __builtin_prefetch(from + ahead);
      w[n] = L::Load(from);
    }
    DCPRT_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename L::WideIn v = L::LoadIn(x + static_cast<size_t>(r) * x_stride + i);
      DCPRT_UNROLL
      for (int n = 0; n < N; ++n) L::MultiplyAdd(w[n], v, &acc[r][n]);
    }
  }
  if (whole < ins) {
    typename L::Wide w[N];
    DCPRT_UNROLL
    for (int n = 0; n < N; ++n) w[n] = L::LoadTail(weight + static_cast<size_t>(n) * weight_stride + whole, ins - whole);
    DCPRT_UNROLL
    for (int r = 0; r < R; ++r) {
      const typename L::WideIn v = L::LoadIn(x + static_cast<size_t>(r) * x_stride + whole);
      DCPRT_UNROLL
      for (int n = 0; n < N; ++n) L::MultiplyAdd(w[n], v, &acc[r][n]);
    }
  }
  DCPRT_UNROLL
  for (int r = 0; r < R; ++r) L::template Total<N>(acc[r], sums + r * N);
}

// Trait and tile together. Up to kOuts rows of weights and kRows of x at a time.
template <class L>
struct Loop : L {
  static constexpr size_t kOuts = L::kN, kRows = 4;

  static void Tile(const typename L::Weight* weight, size_t weight_stride, const typename L::In* x, size_t x_stride,
                   size_t ins, size_t outs, size_t rows, float* sums) {
    using Call = void (*)(const typename L::Weight*, size_t, const typename L::In*, size_t, size_t, float*);
    static constexpr Call kCalls[2][kRows] = {{Dots<L, 1, 1>, Dots<L, 1, 2>, Dots<L, 1, 3>, Dots<L, 1, 4>},
                                              {Dots<L, L::kN, 1>, Dots<L, L::kN, 2>, Dots<L, L::kN, 3>, Dots<L, L::kN, 4>}};
    kCalls[outs == kOuts][rows - 1](weight, weight_stride, x, x_stride, ins, sums);
  }
};

#undef DCPRT_UNROLL

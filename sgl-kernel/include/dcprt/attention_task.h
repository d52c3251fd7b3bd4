// One task of an attention call, for the instruction set whose struct is `Simd`: included in the namespace of each,
// hence without a guard. See attention_types.h for what the parts of a call mean.

template <class T>
static void WidenRow(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Simd::Store(to + i, Simd::Load(from + i));
  if (i < count) {
    float rest[kLanes];
    Simd::Store(rest, Simd::LoadPart(from + i, count - i));
    std::memcpy(to + i, rest, static_cast<size_t>(count - i) * sizeof(float));
  }
}

// Replaces `rows` by float32 copies, `dim` elements each.
template <class T>
static void WidenRows(const void** rows, int64_t count, int64_t dim, float* wide) {
  for (int64_t j = 0; j < count; ++j, wide += Padded(dim)) {
    WidenRow(static_cast<const T*>(rows[j]), dim, wide);
    rows[j] = wide;
  }
}

// Where elements of keys begin to `end` lie, for the first head.
template <class T>
static void Locate(const AttentionCall& call, const AttentionSource& source, const AttentionTask& task, int64_t begin,
                   int64_t end, const void** rows) {
  const T* base = reinterpret_cast<const T*>(source.data) + task.head * source.head_step;
  if (call.pages == nullptr) {
    base += (task.row->first_key + begin) * source.slot_step;
    for (int64_t j = 0; j < end - begin; ++j) rows[j] = base + j * source.slot_step;
  } else {
    const int64_t* page = call.pages + task.row->first_page + begin / call.page_size;
    int64_t slot = begin % call.page_size;
    for (int64_t j = 0; j < end - begin; ++page, slot = 0) {
      const T* at = base + *page * source.page_step + slot * source.slot_step;
      const int64_t left = end - begin - j, in_page = call.page_size - slot, found = left < in_page ? left : in_page;
      for (int64_t i = 0; i < found; ++i) rows[j + i] = at + i * source.slot_step;
      j += found;
    }
  }
}

// Rows of another head, `bytes` behind; places up to a multiple of 16 behind repeat the last one.
static void RowsOf(const void* const* first, int64_t bytes, int64_t count, const void** rows) {
  for (int64_t j = 0; j < count; ++j) rows[j] = static_cast<const char*>(first[j]) + bytes;
  for (int64_t j = count; j < (count + 15) / 16 * 16; ++j) rows[j] = rows[count - 1];
}

// All lanes of x, two and two.
template <class Op>
static float Fold(Vec x, const Op& op) {
  float lanes[kLanes];
  Simd::Store(lanes, x);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = op(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// The softmax of scores [0, seen) so far: scores become weights, with zeros behind up to `padded`; top and sums, those of
// the lanes, go on, and what was summed before is scaled to the new top. scale is positive.
static void Softmax(float* scores, int64_t seen, int64_t padded, float scale, float* top, float* sums, float* acc,
                    int64_t dim) {
  if (seen <= 0) {
    std::memset(scores, 0, static_cast<size_t>(padded) * sizeof(float));
    return;
  }
  for (int64_t j = seen; j < padded; ++j) scores[j] = -INFINITY;
  const int64_t whole = (seen + kLanes - 1) / kLanes * kLanes;
  Vec most = Simd::Set1(-INFINITY);
  for (int64_t j = 0; j < whole; j += kLanes) most = Simd::Max(Simd::Load(scores + j), most);
  const float best = Fold(most, [](float a, float b) { return a > b ? a : b; }) * scale, before = *top;
  if (best > before) *top = best;
  const Vec factor = Simd::Set1(scale), minus = Simd::Set1(-*top);
  Vec total = Simd::Set1(0);
  for (int64_t j = 0; j < whole; j += kLanes) {
    const Vec weight = Exp(Simd::Fma(Simd::Load(scores + j), factor, minus));
    Simd::Store(scores + j, weight);
    total = Simd::Add(total, weight);
  }
  for (int64_t j = whole; j < padded; ++j) scores[j] = 0;
  if (*top == before) {
    Simd::Store(sums, Simd::Add(Simd::Load(sums), total));
    return;
  }
  const Vec shrink = Exp(Simd::Set1(before - *top));
  Simd::Store(sums, Simd::Fma(Simd::Load(sums), shrink, total));
  for (int64_t i = 0; i < dim; i += kLanes) Simd::Store(acc + i, Simd::Mul(Simd::Load(acc + i), shrink));
}

struct Place {
  int64_t token, head;
};

// Query `index` of a row and the heads of a task.
static Place PlaceOf(const AttentionCall& call, const AttentionTask& task, int64_t index) {
  const int64_t group = GroupOf(call, task.head, task.heads);
  return {task.row->start + index / group, call.heads[call.head_offsets[task.head] + index % group]};
}

static void LoadQueries(const AttentionCall& call, const AttentionTask& task, bool paired, float* to) {
  const int64_t step = Padded(call.key_dim);
  std::memset(to, 0, static_cast<size_t>(task.count * step) * sizeof(float));
  for (int64_t i = 0; i < task.count; ++i, to += step) {
    const Place place = PlaceOf(call, task, task.first + i);
    const int64_t at = place.token * call.q_token_step + place.head * call.q_head_step;
    if (call.q_type == FloatType::kFloat32) {
      std::memcpy(to, call.q + at * 4, static_cast<size_t>(call.key_dim) * 4);
    } else if (paired) {
      std::memcpy(to, call.q + at * 2, static_cast<size_t>(call.key_dim) * 2);
    } else {
      WidenRow(reinterpret_cast<const BFloat16*>(call.q) + at, call.key_dim, to);
    }
  }
}

// `halved`: results were summed as `HalvesOf` has them.
static void StoreResults(const AttentionCall& call, const AttentionTask& task, const AttentionParts& parts,
                         const AttentionScratch& scratch, bool halved) {
  const int64_t dim = call.value_dim;
  for (int64_t i = 0; i < task.count; ++i) {
    float *out, *lse;
    if (task.part < 0) {
      const Place place = PlaceOf(call, task, task.first + i);
      lse = call.lse + place.token * call.query_heads + place.head;
      out = call.out + (place.token * call.query_heads + place.head) * dim;
    } else {
      lse = parts.lse + task.part + i;
      out = parts.out + (task.part + i) * dim;
    }
    const float* acc = scratch.acc + i * Padded(dim);
    const float sum = Fold(Simd::Load(scratch.sums + i * kMaxLanes), [](float a, float b) { return a + b; });
    const float factor = sum == 0 ? 0 : 1.0f / sum;
    if (halved) {
      for (int64_t d = 0; d < dim; d += 2 * kLanes) {
        for (int64_t j = 0; j < kLanes; ++j) {
          out[d + 2 * j] = acc[d + j] * factor;
          out[d + 2 * j + 1] = acc[d + kLanes + j] * factor;
        }
      }
    } else {
      for (int64_t d = 0; d < dim; ++d) out[d] = acc[d] * factor;
    }
    *lse = scratch.top[i] + std::log(sum);
  }
}

// scores [count of task, kMaxKeys] of the `count` keys in x.rows.
template <class T, bool kPaired>
static void Score(const AttentionCall& call, const AttentionTask& task, const AttentionScratch& x, int64_t count,
                  Fetching& fetching) {
  const int64_t units = kPaired ? call.key_dim / 2 : call.key_dim, step = Padded(call.key_dim);
  using Direct = std::conditional_t<kPaired, Paired<Simd>, Single<T>>;
  if (task.count * 8 <= units) {
    return Dots<Direct>(task.count, x.queries, step, x.rows, count, units, fetching, x.scores);
  }
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  Pack<std::conditional_t<kPaired, float, T>>(x.rows, padded, units, fetching, x.packed);
  using Packed = std::conditional_t<kPaired, Paired<Simd>, Single<float>>;
  PassRows(task.count, count, fetching, [&](int64_t first, int64_t last) {
    Product<Packed, false>(last - first, x.queries + first * step, step, x.steps, units, padded, x.scores + first * kMaxKeys,
                           kMaxKeys);
  });
}

// How many of the `count` keys from `begin` on query `i` of a task sees; never fewer than the query before.
static int64_t SeenBy(const AttentionCall& call, const AttentionTask& task, int64_t begin, int64_t count, int64_t i) {
  if (!call.causal) return count;
  const int64_t seen = task.row->context + (task.first + i) / GroupOf(call, task.head, task.heads) + 1 - begin;
  return seen < 0 ? 0 : seen < count ? seen : count;
}

// A task of more queries is bound by arithmetic: what is fetched meanwhile is spread over its queries, not over its keys.
constexpr int64_t kFewRows = 2 * Simd::kRows;

// Adds the weighted values. A weight of 0 does not hide a value that is not finite, so a query's sum leaves out the
// values of keys that it does not see: first those that all see are added, then those that a few queries see. They are
// those in x.rows.
template <class Op>
static void AddValues(const AttentionCall& call, const AttentionTask& task, const AttentionScratch& x, int64_t begin,
                      int64_t count, Fetching& fetching) {
  const int64_t step = Padded(call.value_dim);
  const auto seen = [&](int64_t i) { return SeenBy(call, task, begin, count, i); };
  const auto add = [&](int64_t first, int64_t last, int64_t from, int64_t to) {
    if (from == to) return;
    Product<Op, true>(last - first, x.scores + first * kMaxKeys + from, kMaxKeys, x.rows + from, to - from, call.value_dim,
                      x.acc + first * step, step);
  };
  const int64_t all = seen(0);
  if (task.count > kFewRows) {
    PassRows(task.count, count, fetching, [&](int64_t first, int64_t last) { add(first, last, 0, all); });
  } else {
    constexpr int64_t kPiece = 16;
    for (int64_t from = 0; from < count; from += kPiece) {
      fetching.Pass(kPiece);
      if (from < all) add(0, task.count, from, from + kPiece < all ? from + kPiece : all);
    }
  }
  if (seen(task.count - 1) == all) return;
  for (int64_t first = 0; first < task.count; first += Simd::kRows) {
    const int64_t last = first + Simd::kRows < task.count ? first + Simd::kRows : task.count, common = seen(first);
    add(first, last, all, common);
    for (int64_t i = first, next; i < last; i = next) {
      const int64_t own = seen(i);
      for (next = i + 1; next < last && seen(next) == own;) ++next;
      add(i, next, common, own);
    }
  }
}

// The same for many queries of a prompt that all see `count` keys, in products of bfloat16: weights are rounded to the
// type of the values, as x is in every other product, by 2^-9 of each at most. What is to be merged is not computed so.
template <class S>
static void AddValuePairs(const AttentionCall& call, const AttentionTask& task, const AttentionScratch& x, int64_t count) {
  const int64_t dim = call.value_dim, step = Padded(dim), pairs = (count + 1) / 2;
  static const BFloat16 kZeros[kMaxLanes] = {};
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const auto* a = static_cast<const BFloat16*>(x.rows[2 * pair]);
    const bool alone = 2 * pair + 1 == count;
    const auto* b = alone ? kZeros : static_cast<const BFloat16*>(x.rows[2 * pair + 1]);
    float* to = x.wide + pair * step;
    for (int64_t i = 0; i < dim; i += kLanes) Simd::Store(to + i, S::Interleave(a + i, alone ? b : b + i));
    x.rows[pair] = to;
  }
  for (int64_t i = 0; i < task.count; ++i) {
    float* row = x.scores + i * kMaxKeys;
    for (int64_t j = 0; j < count; j += 2 * kLanes) {
      const Vec second = j + kLanes < count ? Simd::Load(row + j + kLanes) : Simd::Set1(0);
      Simd::Store(row + j / 2, S::Narrow(Simd::Load(row + j), second));
    }
  }
  Product<Paired<S>, true>(task.count, x.scores, kMaxKeys, x.rows, pairs, dim, x.acc, step);
}

// Keys that are fetched before they are scored, where none were before.
constexpr int64_t kAhead = 32;

// A task while it runs.
template <class T, bool kPaired>
struct Running {
  const AttentionCall& call;
  const AttentionTask& task;
  const AttentionScratch& x;
  bool many, halved;  // queries multiply rounded or widened values; sums are those of `HalvesOf`

  Running(const AttentionCall& c, const AttentionTask& t, const AttentionScratch& scratch) : call(c), task(t), x(scratch) {
    many = kPaired && task.heads == 1 && task.count > kFewRows;
    halved = sizeof(T) == 2 && !many && call.value_dim % (Simd::kCols * kLanes) == 0;
  }

  // All that tokens `first` to `last` have for the heads of this task.
  Ahead Rows(const AttentionSource& source, int64_t dim, const void* const* rows, int64_t first, int64_t last) const {
    return {rows, first, last, ((task.heads - 1) * source.head_step + dim) * static_cast<int64_t>(sizeof(T))};
  }

  // What each key head does for its own queries: `work` of its task and their memory, once x.rows are its rows.
  template <class Work>
  void ForHeads(const AttentionSource& source, const void* const* rows, int64_t count, const Work& work) const {
    int64_t first = 0;
    for (int64_t i = 0; i < task.heads; ++i) {
      AttentionTask own = task;
      own.head += i;
      own.heads = 1;
      if (task.heads > 1) own.count = GroupOf(call, own.head, 1);
      if (own.count == 0) continue;
      RowsOf(rows, i * source.head_step * static_cast<int64_t>(sizeof(T)), count, x.rows);
      work(own, x.From(first, call.key_dim, call.value_dim));
      first += own.count;
    }
  }

  // Scores keys [begin, begin + count) and makes weights of them. Meanwhile their values are fetched, and at the begin of
  // the task the keys themselves.
  void Weigh(int64_t begin, int64_t count) const {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    Fetching fetching{Rows(call.v, call.value_dim, x.v, 0, count), {}, task.heads};
    if (begin == task.key_begin) fetching.own = Rows(call.k, call.key_dim, x.k, kAhead, count);
    ForHeads(call.k, x.k, count, [&](const AttentionTask& own, const AttentionScratch& mine) {
      Score<T, kPaired>(call, own, mine, count, fetching);
      for (int64_t i = 0; i < own.count; ++i) {
        Softmax(mine.scores + i * kMaxKeys, SeenBy(call, own, begin, count, i), padded, call.scale, mine.top + i,
                mine.sums + i * kMaxLanes, mine.acc + i * Padded(call.value_dim), call.value_dim);
      }
    });
  }

  // Adds up the values of keys [begin, begin + count); meanwhile the `next` keys behind are fetched.
  void Sum(int64_t begin, int64_t count, int64_t next) const {
    Fetching fetching{Rows(call.k, call.key_dim, x.k, count, count + next), {}, task.heads};
    ForHeads(call.v, x.v, count, [&](const AttentionTask& own, const AttentionScratch& mine) {
      if constexpr (kPaired) {
        if (many && call.causal && call.value_dim % kLanes == 0 && SeenBy(call, own, begin, count, 0) == count) {
          return AddValuePairs<Simd>(call, own, mine, count);
        }
        if (many) {
          WidenRows<T>(mine.rows, count, call.value_dim, mine.wide);
          return AddValues<Single<float>>(call, own, mine, begin, count, fetching);
        }
      }
      if (halved) {
        AddValues<HalvesOf<T>>(call, own, mine, begin, count, fetching);
      } else {
        AddValues<Single<T>>(call, own, mine, begin, count, fetching);
      }
    });
  }
};

template <class T, bool kPaired>
static void Attend(const AttentionCall& call, const AttentionTask& task, const AttentionParts& parts,
                   const AttentionScratch& x) {
  // With several heads, what all of them read has to stay in the first cache.
  const int64_t block = task.heads > 1 ? kMaxKeys / 4 : call.key_dim > 256 ? kMaxKeys / 2 : kMaxKeys;
  LoadQueries(call, task, kPaired, x.queries);
  std::memset(x.acc, 0, static_cast<size_t>(task.count * Padded(call.value_dim)) * sizeof(float));
  std::memset(x.sums, 0, static_cast<size_t>(task.count * kMaxLanes) * sizeof(float));
  for (int64_t i = 0; i < task.count; ++i) x.top[i] = -INFINITY;
  for (int64_t i = 0; i < call.key_dim; ++i) x.steps[i] = x.packed + i * kMaxKeys;
  const Running<T, kPaired> running(call, task, x);
  for (int64_t begin = task.key_begin; begin < task.key_end; begin += block) {
    const int64_t end = begin + block < task.key_end ? begin + block : task.key_end, count = end - begin;
    const int64_t next = end + block < task.key_end ? end + block : task.key_end;
    if (begin == task.key_begin) {
      Locate<T>(call, call.k, task, begin, end, x.k);
    } else {
      std::memmove(x.k, x.k + block, static_cast<size_t>(count) * sizeof(*x.k));
    }
    if (next > end) Locate<T>(call, call.k, task, end, next, x.k + count);
    Locate<T>(call, call.v, task, begin, end, x.v);
    running.Weigh(begin, count);
    running.Sum(begin, count, next - end);
  }
  StoreResults(call, task, parts, x, running.halved);
}

static void RunTask(const AttentionCall& call, const AttentionTask& task, const AttentionParts& parts,
                    const AttentionScratch& scratch) {
  if (call.kv_type == FloatType::kFloat32) return Attend<float, false>(call, task, parts, scratch);
  if constexpr (Simd::kPairs) {
    if (call.q_type == FloatType::kBFloat16) return Attend<BFloat16, true>(call, task, parts, scratch);
  }
  Attend<BFloat16, false>(call, task, parts, scratch);
}

template <class Q, class T>
static void OneKey(const AttentionCall& call, const AttentionRow& row) {
  const auto start = [&](const AttentionSource& source) {
    const int64_t step = call.pages ? call.pages[row.first_page] * source.page_step : row.first_key * source.slot_step;
    return reinterpret_cast<const T*>(source.data) + step;
  };
  for (int64_t head = 0; head < call.key_heads; ++head) {
    const T *k = start(call.k) + head * call.k.head_step, *v = start(call.v) + head * call.v.head_step;
    for (int64_t at = call.head_offsets[head]; at < call.head_offsets[head + 1]; ++at) {
      const int64_t place = row.start * call.query_heads + call.heads[at];
      const int64_t query = row.start * call.q_token_step + call.heads[at] * call.q_head_step;
      const Q* q = reinterpret_cast<const Q*>(call.q) + query;
      Vec acc = Simd::Set1(0);
      int64_t i = 0;
      for (; i + kLanes <= call.key_dim; i += kLanes) acc = Simd::Fma(Simd::Load(q + i), Simd::Load(k + i), acc);
      const int64_t rest = call.key_dim - i;
      if (rest > 0) acc = Simd::Fma(Simd::LoadPart(q + i, rest), Simd::LoadPart(k + i, rest), acc);
      float score[4];
      Simd::Sum4(acc, acc, acc, acc, score);
      call.lse[place] = score[0] * call.scale;
      WidenRow(v, call.value_dim, call.out + place * call.value_dim);
    }
  }
}

// A row of one token that sees only itself.
static void RunOneKey(const AttentionCall& call, const AttentionRow& row) {
  const bool wide_q = call.q_type == FloatType::kFloat32, wide = call.kv_type == FloatType::kFloat32;
  if (wide_q) return wide ? OneKey<float, float>(call, row) : OneKey<float, BFloat16>(call, row);
  return wide ? OneKey<BFloat16, float>(call, row) : OneKey<BFloat16, BFloat16>(call, row);
}

static constexpr AttentionOps kOps{RunTask, RunOneKey, ExpAll};

// What an attention call is made of, whatever the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dcprt/bfloat16.h"

namespace dcprt {

// A row: tokens [start, stop) of the queries, attending to `keys` keys. With pages, those are the first slots of the
// pages from `first_page` on in the page table; else the `keys` tokens from `first_key` on. The last of the keys are those
// of the row's own tokens if the call is causal; `context` of them lie before.
struct AttentionRow {
  int64_t start, stop, keys, first_page, first_key, context = 0;
};

// Keys or values: element (slot, head, i) is at data + page * page_step + slot * slot_step + head * head_step + i, in
// elements; without pages `slot` counts from the first token.
struct AttentionSource {
  const char* data;
  int64_t page_step, slot_step, head_step;
};

// One call. Key heads are served by query heads: those of key head g are heads[head_offsets[g]] up to
// heads[head_offsets[g + 1]].
//
//   q    [tokens, query heads, key_dim], with steps between tokens and heads
//   out  float32 [tokens, query_heads, value_dim], dense
//   lse  float32 [tokens, query_heads], dense; natural log
//
// key_dim is a multiple of 8. With `causal`, key `context + j` of a row is seen by its tokens j and later, and there are
// `context` more keys than tokens. Tokens of no row, and rows without keys, get out 0 and lse -inf.
struct AttentionCall {
  const char* q;
  int64_t q_token_step, q_head_step;
  FloatType q_type, kv_type;
  AttentionSource k, v;
  const int64_t* pages;  // null: no pages
  int64_t page_size;
  int64_t tokens, query_heads, key_heads, key_dim, value_dim;
  const int64_t *heads, *head_offsets;
  const AttentionRow* rows;
  int64_t row_count;
  bool causal;
  float scale;
  float *out, *lse;
};

namespace attention_detail {

constexpr int64_t kMaxQueries = 96;  // (token, head) pairs of one task
constexpr int64_t kMaxKeys = 128;    // keys scored at a time
constexpr int64_t kMaxLanes = 16;    // of a vector of any instruction set
constexpr int64_t kPad = 32;         // buffers' rows are padded to a multiple of it

inline int64_t Padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// Some queries of a row and of `heads` key heads from `head` on, over some of its keys. Queries are numbered token by
// token, and within a token by their place in `AttentionCall::heads`; there is but one token if there are several heads.
// With `part` >= 0 results go to that place among the partial ones.
struct AttentionTask {
  const AttentionRow* row;
  int64_t head, heads, first, count, key_begin, key_end, part;
};

// Query heads of a token in a task.
inline int64_t GroupOf(const AttentionCall& call, int64_t head, int64_t heads) {
  return call.head_offsets[head + heads] - call.head_offsets[head];
}

// Memory of one thread.
struct AttentionScratch {
  float* queries;  // [kMaxQueries, Padded(key_dim)], float32, or bfloat16 in its first half
  float* scores;   // [kMaxQueries, kMaxKeys]
  float* acc;      // [kMaxQueries, Padded(value_dim)]
  float* packed;   // [key_dim, kMaxKeys], keys side by side
  float* wide;     // [kMaxKeys, Padded(value_dim)], values in float32, or pairs of them
  float* top;          // [kMaxQueries]
  float* sums;         // [kMaxQueries, kMaxLanes], to be added up
  const void** k;      // [2 * kMaxKeys]: where the keys of the first head begin, those scored next as well
  const void** v;      // [kMaxKeys]: likewise values
  const void** rows;   // [kMaxKeys]: keys or values of one head
  const void** steps;  // [key_dim]: where packed rows begin

  static int64_t Bytes(int64_t key_dim, int64_t value_dim) {
    const int64_t k = Padded(key_dim), v = Padded(value_dim);
    const int64_t floats = kMaxQueries * (k + kMaxKeys + v + 1 + kMaxLanes) + kMaxKeys * (k + v);
    return floats * 4 + (4 * kMaxKeys + k) * 8;
  }

  AttentionScratch(char* memory, int64_t key_dim, int64_t value_dim) {
    const int64_t pk = Padded(key_dim), pv = Padded(value_dim);
    float* at = reinterpret_cast<float*>(memory);
    const auto take = [&at](int64_t count) { return (at += count) - count; };
    queries = take(kMaxQueries * pk);
    scores = take(kMaxQueries * kMaxKeys);
    acc = take(kMaxQueries * pv);
    packed = take(pk * kMaxKeys);
    wide = take(kMaxKeys * pv);
    top = take(kMaxQueries);
    sums = take(kMaxQueries * kMaxLanes);
    k = reinterpret_cast<const void**>(at);
    v = k + 2 * kMaxKeys;
    rows = v + kMaxKeys;
    steps = rows + kMaxKeys;
  }

  // The same for queries from `first` on.
  AttentionScratch From(int64_t first, int64_t key_dim, int64_t value_dim) const {
    AttentionScratch x = *this;
    x.queries += first * Padded(key_dim);
    x.scores += first * kMaxKeys;
    x.acc += first * Padded(value_dim);
    x.top += first;
    x.sums += first * kMaxLanes;
    return x;
  }
};

// Where partial results go: out [places, value_dim], lse [places].
struct AttentionParts {
  float *out, *lse;
};

// What every instruction set offers.
struct AttentionOps {
  void (*task)(const AttentionCall&, const AttentionTask&, const AttentionParts&, const AttentionScratch&);
  void (*one_key)(const AttentionCall&, const AttentionRow&);
  void (*exp)(const float*, float*, int64_t);
};

}  // namespace attention_detail
}  // namespace dcprt

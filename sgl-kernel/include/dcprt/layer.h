// A decoder layer of the Llama kind in one call, where one rank has all of it: nothing is summed or gathered inside.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dcprt/attention.h"
#include "dcprt/elementwise.h"
#include "dcprt/fused.h"
#include "dcprt/linear.h"
#include "dcprt/pages.h"
#include "dcprt/scratch.h"

namespace dcprt {

// Norms and biases are of the type of the matrices, and so are the pools.
struct LayerArgs {
  float* x;          // [tokens, hidden], dense; becomes x + add + what attention gives
  const float* add;  // likewise, or null
  float* out;        // [tokens, hidden]: what is to be added to x next; may be `add`
  size_t hidden;
  const void *norm1, *norm2;
  float eps;
  PackedMatrix qkv, o, gate_up, down;
  const void *qkv_bias, *gate_up_bias;  // or null
  const float *cos, *sin;               // [tokens, half]
  size_t half;
  const int64_t *tokens, *slots;  // which of the new tokens go to which slots of the pools: all of them
  size_t stored;
  AttentionCall attention;  // all but queries and results; causal, over pages
};

template <class T>
void DecoderLayer(const LayerArgs& a, Isa isa, int threads) {
  AttentionCall call = a.attention;
  const size_t tokens = static_cast<size_t>(call.tokens), dim = static_cast<size_t>(call.key_dim);
  const size_t heads = static_cast<size_t>(call.query_heads), key_heads = static_cast<size_t>(call.key_heads);
  const size_t width = a.qkv.outs;
  T* qkv = static_cast<T*>(Scratch<Purpose::kQkv>(tokens * width * sizeof(T)));
  const NormArgs<T> first{a.x, a.add, static_cast<const T*>(a.norm1), a.eps, tokens, a.hidden};
  NormLinear(first, a.qkv, static_cast<const T*>(a.qkv_bias), qkv, isa, threads);
  Rotate(qkv, width, dim, a.cos, a.sin, tokens, heads + key_heads, a.half, isa, threads);
  const auto store = [&](size_t head, const AttentionSource& pool) {
    const size_t bytes = key_heads * dim * sizeof(T);
    const char* from = reinterpret_cast<const char*>(qkv + head * dim);
    StoreRows(from, width * sizeof(T), bytes, bytes, 1, a.tokens, a.slots, a.stored, const_cast<char*>(pool.data));
  };
  store(heads, call.k);
  store(heads + key_heads, call.v);
  const size_t floats = tokens * (heads * (dim + 1) + a.hidden);
  float* attended = static_cast<float*>(Scratch<Purpose::kAttended>(floats * sizeof(float)));
  float* added = attended + tokens * heads * (dim + 1);
  call.q = reinterpret_cast<const char*>(qkv);
  call.q_token_step = static_cast<int64_t>(width);
  call.q_head_step = static_cast<int64_t>(dim);
  call.out = attended;
  call.lse = attended + tokens * heads * dim;
  Attention(call, isa, threads);
  Linear({attended, FloatType::kFloat32, heads * dim, a.o, nullptr, FloatType::kFloat32, added, FloatType::kFloat32, tokens},
         isa, threads);
  const NormArgs<T> second{a.x, added, static_cast<const T*>(a.norm2), a.eps, tokens, a.hidden};
  NormGatedMlp(second, a.gate_up, static_cast<const T*>(a.gate_up_bias), a.down, a.out, isa, threads);
}

}  // namespace dcprt

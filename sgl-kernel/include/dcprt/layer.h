// A decoder layer of the Llama kind in one call, with the sums and exchanges between the ranks that share it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dcprt/attention.h"
#include "dcprt/elementwise.h"
#include "dcprt/fused.h"
#include "dcprt/linear.h"
#include "dcprt/merge.h"
#include "dcprt/pages.h"
#include "dcprt/scratch.h"
#include "dcprt/shm_group.h"

namespace dcprt {

// Ranks that a layer meets; without a group this one is alone.
struct Ranks {
  ShmGroup* group = nullptr;
  double timeout_s = 0;

  size_t Size() const { return group == nullptr ? 1 : group->arena().ranks(); }

  // See ShmGroup; false if it failed, which `group->status()` explains.
  bool Run(Op op, FloatType type, const void* in, void* out, size_t bytes) const {
    const uint32_t size = static_cast<uint32_t>(SizeOf(type));
    const uint32_t tag = DtypeTag(type == FloatType::kFloat32 ? kFloatCode : kBFloatCode, 8 * size);
    return group->Run({op, tag, 0, size, bytes}, in, out, Deadline::After(timeout_s)) == Status::kDone;
  }
  bool Sum(float* x, size_t count) const {
    return group == nullptr || Run(kAllReduce, FloatType::kFloat32, x, x, count * sizeof(float));
  }
};

// The parts of a layer, in their order.
enum LayerPart {
  kBegun, kProjected, kStored, kGathered, kAttended, kExchanged, kMerged, kOutput, kOutputSummed, kGated, kGatedSummed, kLayerParts
};

// Norms and biases are of the type of the matrices, and so are the pools. Those of o and down are added to sums over ranks.
struct LayerArgs {
  float* x;          // [tokens, hidden], dense; becomes x + add + what attention gives
  const float* add;  // likewise, or null
  float* out;        // [tokens, hidden]: what is to be added to x next; may be `add`
  size_t hidden;
  const void *norm1, *norm2;
  const void *q_norm, *k_norm;  // [dim], of every head before it is turned, or null
  float eps;
  PackedMatrix qkv, o, gate_up, down;
  const void *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null
  size_t projected;        // query heads that qkv makes: the own ones, or those of all of `dcp`
  const float *cos, *sin;  // [tokens, half]
  size_t half;
  const int64_t *tokens, *slots;  // which of the new tokens go to which slots of the pools
  size_t stored;
  AttentionCall attention;  // all but queries and results, over pages, of the query heads of all of `dcp`
  Ranks world;              // among which the inputs of o and down are cut
  Ranks dcp;                // among which tokens are spread: the call is not causal then, own tokens are among the keys
  int64_t* ends;            // [kLayerParts], or null: gets when parts end, in nanoseconds of the monotonic clock

  void Note(LayerPart done) const {
    using std::chrono::nanoseconds;
    if (ends == nullptr) return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    ends[done] = static_cast<int64_t>(std::chrono::duration_cast<nanoseconds>(now).count());
  }
};

namespace layer_detail {

// The queries of all ranks [tokens, heads, dim], from the own ones at the begin of rows that are `width` apart; null if
// the group failed.
template <class T>
const T* GatherQueries(const T* rows, size_t width, size_t tokens, size_t own, const Ranks& dcp) {
  const size_t ranks = dcp.Size(), all = tokens * own;
  T* sent = static_cast<T*>(Scratch<Purpose::kQueries>(all * (1 + 2 * ranks) * sizeof(T)));
  T *parts = sent + all, *queries = parts + ranks * all;
  for (size_t t = 0; t < tokens; ++t) std::memcpy(sent + t * own, rows + t * width, own * sizeof(T));
  if (!dcp.Run(kAllGather, fused_detail::kType<T>, sent, parts, all * sizeof(T))) return nullptr;
  if (tokens == 1) return parts;
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t r = 0; r < ranks; ++r) {
      std::memcpy(queries + (t * ranks + r) * own, parts + (r * tokens + t) * own, own * sizeof(T));
    }
  }
  return queries;
}

// Attention over the slots of all ranks, where each attends to its own and the results go to the ranks of their heads:
// out [tokens, own heads, dim] and lse behind it.
inline bool AttendOverRanks(const LayerArgs& a, AttentionCall call, float* out, Isa isa, int threads) {
  const Ranks& dcp = a.dcp;
  const size_t ranks = dcp.Size(), tokens = static_cast<size_t>(call.tokens), dim = static_cast<size_t>(call.value_dim);
  const size_t places = tokens * static_cast<size_t>(call.query_heads), items = places / ranks;
  float* partial = static_cast<float*>(Scratch<Purpose::kPartial>(2 * places * (dim + 1) * sizeof(float)));
  float* packed = partial + places * (dim + 1);
  call.out = partial;
  call.lse = partial + places * dim;
  Attention(call, isa, threads);
  PackPartial(call.out, call.lse, tokens, ranks, items / tokens, dim, packed);
  a.Note(kAttended);
  if (!dcp.Run(kAllToAll, FloatType::kFloat32, packed, packed, places * (dim + 1) * sizeof(float))) return false;
  a.Note(kExchanged);
  MergePacked(packed, ranks, items, dim, out, out + items * dim, isa, threads);
  a.Note(kMerged);
  return true;
}

// Attention of the own heads, from their projections [tokens, `width`], which are normed, turned and stored: float32
// [tokens, own heads, dim] at `out`, and their lse behind.
template <class T>
bool Attend(const LayerArgs& a, T* qkv, float* out, Isa isa, int threads) {
  AttentionCall call = a.attention;
  const size_t tokens = static_cast<size_t>(call.tokens), dim = static_cast<size_t>(call.key_dim), width = a.qkv.outs;
  const size_t heads = static_cast<size_t>(call.query_heads), key_heads = static_cast<size_t>(call.key_heads);
  if (a.q_norm != nullptr) {
    NormHeads(qkv, width, static_cast<const T*>(a.q_norm), a.eps, tokens, a.projected, dim, isa, threads);
    NormHeads(qkv + a.projected * dim, width, static_cast<const T*>(a.k_norm), a.eps, tokens, key_heads, dim, isa, threads);
  }
  Rotate(qkv, width, dim, a.cos, a.sin, tokens, a.projected + key_heads, a.half, isa, threads);
  const auto store = [&](size_t head, const AttentionSource& pool) {
    const size_t bytes = key_heads * dim * sizeof(T);
    const char* from = reinterpret_cast<const char*>(qkv + head * dim);
    StoreRows(from, width * sizeof(T), bytes, bytes, 1, a.tokens, a.slots, a.stored, const_cast<char*>(pool.data));
  };
  store(a.projected, call.k);
  store(a.projected + key_heads, call.v);
  a.Note(kStored);
  const bool gathers = a.projected < heads;
  const T* queries = gathers ? GatherQueries(qkv, width, tokens, a.projected * dim, a.dcp) : qkv;
  if (queries == nullptr) return false;
  if (gathers) a.Note(kGathered);
  call.q = reinterpret_cast<const char*>(queries);
  call.q_token_step = static_cast<int64_t>(gathers ? heads * dim : width);
  call.q_head_step = static_cast<int64_t>(dim);
  if (a.dcp.group != nullptr) return AttendOverRanks(a, call, out, isa, threads);
  call.out = out;
  call.lse = out + tokens * heads * dim;
  Attention(call, isa, threads);
  a.Note(kAttended);
  return true;
}

// Sums x [tokens, hidden] over the ranks and adds the bias; false if the group failed.
template <class T>
bool SumAndAdd(const LayerArgs& a, LayerPart part, float* x, const void* bias, Isa isa, int threads) {
  const size_t tokens = static_cast<size_t>(a.attention.tokens);
  if (!a.world.Sum(x, tokens * a.hidden)) return false;
  if (bias != nullptr) AddToRows(x, static_cast<const T*>(bias), tokens, a.hidden, isa, threads);
  if (bias != nullptr || a.world.group != nullptr) a.Note(part);
  return true;
}

}  // namespace layer_detail

// False if one of the groups failed, as its status says.
template <class T>
bool DecoderLayer(const LayerArgs& a, Isa isa, int threads) {
  const size_t tokens = static_cast<size_t>(a.attention.tokens), hidden = a.hidden;
  const size_t heads = static_cast<size_t>(a.attention.query_heads) / a.dcp.Size();
  a.Note(kBegun);
  T* qkv = static_cast<T*>(Scratch<Purpose::kQkv>(tokens * a.qkv.outs * sizeof(T)));
  const NormArgs<T> first{a.x, a.add, static_cast<const T*>(a.norm1), a.eps, tokens, hidden};
  NormLinear(first, a.qkv, static_cast<const T*>(a.qkv_bias), qkv, isa, threads);
  a.Note(kProjected);
  const size_t floats = tokens * (a.o.ins + heads + hidden);
  float* attended = static_cast<float*>(Scratch<Purpose::kAttended>(floats * sizeof(float)));
  float* added = attended + tokens * (a.o.ins + heads);
  if (!layer_detail::Attend(a, qkv, attended, isa, threads)) return false;
  constexpr FloatType kWide = FloatType::kFloat32;
  Linear({attended, kWide, a.o.ins, a.o, nullptr, kWide, added, kWide, tokens, hidden}, isa, threads);
  a.Note(kOutput);
  if (!layer_detail::SumAndAdd<T>(a, kOutputSummed, added, a.o_bias, isa, threads)) return false;
  const NormArgs<T> second{a.x, added, static_cast<const T*>(a.norm2), a.eps, tokens, hidden};
  NormGatedMlp(second, a.gate_up, static_cast<const T*>(a.gate_up_bias), a.down, a.out, isa, threads);
  a.Note(kGated);
  return layer_detail::SumAndAdd<T>(a, kGatedSummed, a.out, a.down_bias, isa, threads);
}

}  // namespace dcprt

// Attention on raw pointers: how a call is cut into tasks, and how partial results become whole ones.
//
// A task is a block of queries of one row and key head, so that a key is read once for all query heads of its group and
// for several tokens. Where there are threads to feed, tasks are also cut along the keys, and the
// parts merged by their lse, as in Flash-Decoding. The cut follows from the shapes and the number of threads alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "dcprt/attention_isa.h"
#include "dcprt/attention_types.h"
#include "dcprt/merge.h"
#include "dcprt/scratch.h"
#include "dcprt/threads.h"

namespace dcprt {

namespace attention_detail {

// Multiplications below which waking a thread costs more than it saves.
constexpr double kWorthThreads = 2e5;
constexpr int64_t kTasksPerThread = 3;
constexpr int64_t kLeastKeys = 128;  // keys of a part

// Queries [first, first + count) of a row and some key heads over `keys` keys, in pieces of `size` keys; where there is more
// than one piece, their results, `count` each, begin at place `part` of the partial ones.
struct QueryBlock {
  const AttentionRow* row;
  int64_t head, heads, first, count, keys, size, part;

  int64_t Pieces() const { return (keys + size - 1) / size; }

  double Work() const { return static_cast<double>(count) * static_cast<double>(keys); }
};

// How many key heads from `head` on a block has: those of one token lie side by side, and memory gives most if it is read
// in its order.
inline int64_t HeadsTogether(const AttentionCall& call, int64_t tokens, int64_t head) {
  if (tokens > 1 || call.k.head_step != call.key_dim || call.v.head_step != call.value_dim) return 1;
  int64_t heads = 1;
  while (head + heads < call.key_heads && GroupOf(call, head, heads + 1) <= kMaxQueries) ++heads;
  return heads;
}

inline std::vector<QueryBlock> BlocksOf(const AttentionCall& call) {
  std::vector<QueryBlock> blocks;
  for (int64_t r = 0; r < call.row_count; ++r) {
    const AttentionRow& row = call.rows[r];
    const int64_t tokens = row.stop - row.start;
    if (row.keys == 0 || tokens <= 0 || (call.causal && row.keys == 1)) continue;
    for (int64_t head = 0, heads; head < call.key_heads; head += heads) {
      heads = HeadsTogether(call, tokens, head);
      const int64_t group = GroupOf(call, head, heads);
      for (int64_t first = 0; first < tokens * group; first += kMaxQueries) {
        const int64_t count = std::min(kMaxQueries, tokens * group - first);
        const int64_t keys = call.causal ? row.context + (first + count - 1) / group + 1 : row.keys;
        blocks.push_back({&row, head, heads, first, count, keys, keys, -1});
      }
    }
  }
  return blocks;
}

// Decides the pieces of each block; returns how many partial results there will be, one for each query of a piece.
inline int64_t CutKeys(std::vector<QueryBlock>& blocks, int64_t threads) {
  double total = 0;
  for (const QueryBlock& block : blocks) total += block.Work();
  const double share = total / static_cast<double>(threads * kTasksPerThread);
  int64_t parts = 0;
  for (QueryBlock& block : blocks) {
    const int64_t pieces = static_cast<int64_t>(std::ceil(block.Work() / share));
    block.size = std::min(block.keys, std::max((block.keys + pieces - 1) / pieces, kLeastKeys));
    if (block.Pieces() == 1) continue;
    block.part = parts;
    parts += block.Pieces() * block.count;
  }
  return parts;
}

inline std::vector<AttentionTask> TasksOf(const std::vector<QueryBlock>& blocks) {
  std::vector<AttentionTask> tasks;
  tasks.reserve(blocks.size());
  for (const QueryBlock& b : blocks) {
    for (int64_t i = 0; i < b.Pieces(); ++i) {
      const int64_t begin = i * b.size, end = std::min(begin + b.size, b.keys);
      tasks.push_back({b.row, b.head, b.heads, b.first, b.count, begin, end, b.part < 0 ? -1 : b.part + i * b.count});
    }
  }
  return tasks;
}

// Merges the pieces of every query of a block.
inline void MergeBlock(const AttentionCall& call, const QueryBlock& block, const AttentionParts& parts, Isa isa) {
  const int64_t begin = call.head_offsets[block.head], group = GroupOf(call, block.head, block.heads);
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t index = block.first + i;
    const int64_t place = (block.row->start + index / group) * call.query_heads + call.heads[begin + index % group];
    const auto at = [&](size_t piece) { return block.part + i + static_cast<int64_t>(piece) * block.count; };
    MergeItem(
        static_cast<size_t>(block.Pieces()), [&](size_t piece) { return parts.lse[at(piece)]; },
        [&](size_t piece) { return parts.out + at(piece) * call.value_dim; }, static_cast<size_t>(call.value_dim),
        call.out + place * call.value_dim, call.lse + place, isa);
  }
}

// Tokens of no row, and rows without keys, get an empty result.
inline void FillEmpty(const AttentionCall& call) {
  int64_t covered = 0;
  for (int64_t r = 0; r < call.row_count; ++r) {
    if (call.rows[r].keys > 0) covered += call.rows[r].stop - call.rows[r].start;
  }
  const int64_t places = call.tokens * call.query_heads;
  if (covered >= call.tokens && call.head_offsets[call.key_heads] == call.query_heads) return;
  std::fill(call.out, call.out + places * call.value_dim, 0.0f);
  std::fill(call.lse, call.lse + places, -INFINITY);
}

}  // namespace attention_detail

// Fills `out` and `lse` of the call, on up to `threads` threads.
inline void Attention(const AttentionCall& call, Isa isa, int64_t threads) {
  using namespace attention_detail;
  const AttentionOps& ops = OpsOf(isa);
  FillEmpty(call);
  std::vector<QueryBlock> blocks = BlocksOf(call);
  double work = 0;
  for (const QueryBlock& block : blocks) work += block.Work();
  if (work * static_cast<double>(call.key_dim + call.value_dim) < kWorthThreads) threads = 1;
  const int64_t count = threads > 1 ? CutKeys(blocks, threads) : 0;
  const std::vector<AttentionTask> tasks = TasksOf(blocks);
  const std::unique_ptr<float[]> memory(new float[static_cast<size_t>(count * (call.value_dim + 1))]);
  const AttentionParts parts{memory.get(), memory.get() + count * call.value_dim};
  const size_t bytes = static_cast<size_t>(AttentionScratch::Bytes(call.key_dim, call.value_dim));
  const auto run = [&](uint32_t i) {
    char* own = static_cast<char*>(Scratch<Purpose::kAttention>(bytes));
    ops.task(call, tasks[i], parts, AttentionScratch(own, call.key_dim, call.value_dim));
  };
  if (threads > 1 && tasks.size() > 1) {
    ThreadPool::Get().Run(static_cast<int>(threads), static_cast<uint32_t>(tasks.size()), run);
  } else {
    for (size_t i = 0; i < tasks.size(); ++i) run(static_cast<uint32_t>(i));
  }
  for (const QueryBlock& block : blocks) {
    if (block.part >= 0) MergeBlock(call, block, parts, isa);
  }
  for (int64_t r = 0; call.causal && r < call.row_count; ++r) {
    const AttentionRow& row = call.rows[r];
    if (row.keys == 1 && row.stop > row.start) ops.one_key(call, row);
  }
}

}  // namespace dcprt

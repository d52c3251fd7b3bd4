// Attention over pages, causal and plain, against its definition in double.
#include "dcprt/attention.h"

#include <cstdint>
#include <string>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

struct Shape {
  std::vector<int64_t> key_head_of;  // for every query head
  int64_t key_heads, key_dim, value_dim;
  bool latent;  // values are the first elements of the keys

  int64_t Heads() const { return static_cast<int64_t>(key_head_of.size()); }
};

// Over pages, without a mask; new tokens among themselves; both at once; plain keys without a mask.
enum class Form { kPaged, kCausal, kPagedCausal, kPlain };

bool HasPages(Form form) { return form == Form::kPaged || form == Form::kPagedCausal; }
bool IsCausal(Form form) { return form == Form::kCausal || form == Form::kPagedCausal; }

struct Types {
  bool q, kv;  // bfloat16
  size_t shift;
};

// What a row has: new tokens, and keys that lie before them where there is a mask.
struct Length {
  int64_t tokens, keys;
};

// Keys or values with gaps between heads, slots and pages; whatever is no row's is NaN.
struct Source {
  Array data;
  int64_t page_step, slot_step, head_step;

  static Source Make(int64_t pages, int64_t slots, int64_t heads, int64_t dim, const Types& types) {
    const int64_t head_step = dim + 3, slot_step = heads * head_step + 5, page_step = slots * slot_step + 1;
    const bool none = pages == 0 || slots == 0 || heads == 0;
    const int64_t last = (pages - 1) * page_step + (slots - 1) * slot_step + (heads - 1) * head_step;
    return {Array(none ? 0 : static_cast<size_t>(last + dim), types.kv, types.shift), page_step, slot_step, head_step};
  }
  size_t At(int64_t page, int64_t slot, int64_t head, int64_t i) const {
    return static_cast<size_t>(page * page_step + slot * slot_step + head * head_step + i);
  }
  AttentionSource View() const { return {data.data(), page_step, slot_step, head_step}; }
};

class Problem {
 public:
  Problem(const Shape& shape, Form form, const Types& types, const std::vector<Length>& lengths, int64_t page_size)
      : shape_(shape), form_(form), page_size_(page_size) {
    Lay(lengths);
    const int64_t slots = HasPages(form) ? page_size : form == Form::kCausal ? tokens_ : lengths[0].keys;
    const int64_t pages = HasPages(form) ? static_cast<int64_t>(pages_.size()) + 2 : 1;
    k_ = std::make_unique<Source>(Source::Make(pages, slots, shape.key_heads, shape.key_dim, types));
    if (!shape.latent) {
      v_ = std::make_unique<Source>(Source::Make(pages, slots, shape.key_heads, shape.value_dim, types));
    }
    const size_t head_step = static_cast<size_t>(shape.key_dim) + 2;
    q_step_ = static_cast<size_t>(shape.Heads()) * head_step;
    q_ = std::make_unique<Array>(tokens_ == 0 ? 0 : static_cast<size_t>(tokens_) * q_step_ - 2, types.q, types.shift);
    Random random(static_cast<uint64_t>(shape.key_dim + tokens_));
    random.Fill(*q_, 2);
    for (const AttentionRow& row : rows_) {
      for (int64_t j = 0; j < row.keys; ++j) FillKey(row, j, random);
    }
    out_shift_ = types.shift;
    MapHeads();
  }

  // Key and value `j` of row `r` become `value`.
  void Spoil(size_t r, int64_t j, double value) {
    for (int64_t head = 0; head < shape_.key_heads; ++head) {
      for (int64_t i = 0; i < shape_.key_dim; ++i) k_->data.Set(KeyAt(rows_[r], j, head, i), value);
      for (int64_t i = 0; i < shape_.value_dim; ++i) Values().data.Set(ValueAt(rows_[r], j, head, i), value);
    }
  }
  // Only the value.
  void SpoilValue(size_t r, int64_t j, double value) {
    for (int64_t head = 0; head < shape_.key_heads; ++head) {
      for (int64_t i = 0; i < shape_.value_dim; ++i) Values().data.Set(ValueAt(rows_[r], j, head, i), value);
    }
  }

  void Run(const std::string& name) const {
    const size_t places = static_cast<size_t>(tokens_) * static_cast<size_t>(shape_.Heads());
    const size_t dim = static_cast<size_t>(shape_.value_dim);
    std::vector<Value> exact(places * dim, Value{0, 0}), lse(places, Value{-kInfinity, 0});
    std::vector<double> sizes(places * dim, 0);
    for (const AttentionRow& row : rows_) {
      for (int64_t token = row.start; token < row.stop; ++token) {
        for (int64_t head = 0; head < shape_.Heads(); ++head) Define(row, token, head, exact, sizes, lse);
      }
    }
    for (const Isa isa : Isas()) {
      std::vector<Value> out = exact;
      // Where processors multiply bfloat16, weights may be rounded to it.
      const bool rounded = q_->narrow() && k_->data.narrow() && std::string(NameOf(isa)) == "avx512bf16";
      for (size_t i = 0; rounded && i < out.size(); ++i) out[i].bound += sizes[i] / 256;
      for (const int64_t threads : {1, 2, 5}) {
        Array found(places * dim, false, out_shift_), found_lse(places, false, out_shift_);
        Attention(Call(found, found_lse), isa, threads);
        const std::string where = name + " " + NameOf(isa) + Label(" threads", threads);
        ExpectValues(found, out, where + " out");
        ExpectValues(found_lse, lse, where + " lse");
      }
    }
  }

 private:
  const Source& Values() const { return v_ ? *v_ : *k_; }
  Source& Values() { return v_ ? *v_ : *k_; }

  // Rows one after another, pages in an order that is not theirs; the last two tokens belong to no row.
  void Lay(const std::vector<Length>& lengths) {
    for (const Length& length : lengths) {
      AttentionRow row{tokens_, tokens_ + length.tokens, length.keys, static_cast<int64_t>(pages_.size()), 0};
      if (form_ == Form::kPagedCausal) row.context = length.keys, row.keys += length.tokens;
      if (form_ == Form::kCausal) row.keys = length.tokens, row.first_key = tokens_;
      const int64_t used = HasPages(form_) ? (row.keys + page_size_ - 1) / page_size_ : 0;
      for (int64_t i = 0; i < used; ++i) pages_.push_back(0);
      rows_.push_back(row);
      tokens_ = row.stop;
    }
    if (form_ != Form::kPlain && tokens_ > 0) tokens_ += 2;
    for (size_t i = 0; i < pages_.size(); ++i) pages_[i] = static_cast<int64_t>(pages_.size() - i);
  }

  void MapHeads() {
    offsets_.push_back(0);
    for (int64_t head = 0; head < shape_.key_heads; ++head) {
      for (int64_t h = 0; h < shape_.Heads(); ++h) {
        if (shape_.key_head_of[static_cast<size_t>(h)] == head) heads_.push_back(h);
      }
      offsets_.push_back(static_cast<int64_t>(heads_.size()));
    }
  }

  size_t KeyAt(const AttentionRow& row, int64_t j, int64_t head, int64_t i) const { return At(*k_, row, j, head, i); }
  size_t ValueAt(const AttentionRow& row, int64_t j, int64_t head, int64_t i) const {
    return At(Values(), row, j, head, i);
  }
  size_t At(const Source& source, const AttentionRow& row, int64_t j, int64_t head, int64_t i) const {
    if (!HasPages(form_)) return source.At(0, row.first_key + j, head, i);
    return source.At(pages_[static_cast<size_t>(row.first_page + j / page_size_)], j % page_size_, head, i);
  }
  size_t QueryAt(int64_t token, int64_t head, int64_t i) const {
    return static_cast<size_t>(token) * q_step_ + static_cast<size_t>(head * (shape_.key_dim + 2) + i);
  }

  void FillKey(const AttentionRow& row, int64_t j, Random& random) {
    for (int64_t head = 0; head < shape_.key_heads; ++head) {
      for (int64_t i = 0; i < shape_.key_dim; ++i) k_->data.Set(KeyAt(row, j, head, i), 2 * random.Next());
      for (int64_t i = 0; v_ && i < shape_.value_dim; ++i) v_->data.Set(ValueAt(row, j, head, i), 2 * random.Next());
    }
  }

  // The definition, for one query; `sizes` are sums of absolute terms.
  void Define(const AttentionRow& row, int64_t token, int64_t head, std::vector<Value>& out,
              std::vector<double>& sizes, std::vector<Value>& lse) const {
    const int64_t seen = IsCausal(form_) ? row.context + token - row.start + 1 : row.keys;
    if (seen == 0) return;
    const int64_t key_head = shape_.key_head_of[static_cast<size_t>(head)];
    std::vector<double> weights;
    double top = -kInfinity, sum = 0, size = 0;
    for (int64_t j = 0; j < seen; ++j) {
      double score = 0, terms = 0;
      for (int64_t i = 0; i < shape_.key_dim; ++i) {
        const double term = (*q_)[QueryAt(token, head, i)] * k_->data[KeyAt(row, j, key_head, i)] * kScale;
        score += term;
        terms += std::fabs(term);
      }
      weights.push_back(score);
      top = score > top ? score : top;
      size = terms > size ? terms : size;
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    // Errors of float32: those of the scores, relative to the sums of their terms, and of the sums over keys.
    const double error = kEpsilon * (size + 8);
    const size_t place = static_cast<size_t>(token * shape_.Heads() + head);
    const double whole = top + std::log(sum);
    lse[place] = {whole, error + 4 * kEpsilon * std::fabs(whole)};
    for (int64_t d = 0; d < shape_.value_dim; ++d) {
      double value = 0, parts = 0;
      for (int64_t j = 0; j < seen; ++j) {
        const double part = weights[static_cast<size_t>(j)] / sum * Values().data[ValueAt(row, j, key_head, d)];
        value += part;
        parts += std::fabs(part);
      }
      const size_t at = place * static_cast<size_t>(shape_.value_dim) + static_cast<size_t>(d);
      out[at] = {value, 2 * error * parts};
      sizes[at] = parts;
    }
  }

  AttentionCall Call(const Array& out, const Array& lse) const {
    AttentionCall call{};
    call.q = q_->data();
    call.q_token_step = static_cast<int64_t>(q_step_);
    call.q_head_step = shape_.key_dim + 2;
    call.q_type = q_->narrow() ? FloatType::kBFloat16 : FloatType::kFloat32;
    call.kv_type = k_->data.narrow() ? FloatType::kBFloat16 : FloatType::kFloat32;
    call.k = k_->View();
    call.v = Values().View();
    call.pages = HasPages(form_) ? pages_.data() : nullptr;
    call.page_size = page_size_;
    call.tokens = tokens_;
    call.query_heads = shape_.Heads();
    call.key_heads = shape_.key_heads;
    call.key_dim = shape_.key_dim;
    call.value_dim = shape_.value_dim;
    call.heads = heads_.data();
    call.head_offsets = offsets_.data();
    call.rows = rows_.data();
    call.row_count = static_cast<int64_t>(rows_.size());
    call.causal = IsCausal(form_);
    call.scale = static_cast<float>(kScale);
    call.out = out.as<float>();
    call.lse = lse.as<float>();
    return call;
  }

  static constexpr double kScale = 0.25, kEpsilon = 1.0 / (1 << 23);

  Shape shape_;
  Form form_;
  int64_t page_size_, tokens_ = 0;
  std::vector<AttentionRow> rows_;
  std::vector<int64_t> pages_{}, heads_{}, offsets_{};
  std::unique_ptr<Source> k_, v_;
  std::unique_ptr<Array> q_;
  size_t q_step_ = 0, out_shift_ = 0;
};

const std::vector<Shape> kShapes = {
    {{0, 0, 0, 1, 1, 1}, 2, 64, 64, false},
    {{0, 0, 0, 0, 0}, 1, 72, 56, true},
    {{1, 0, 1}, 2, 24, 40, false},
    {{2, 2, 3}, 4, 8, 8, false},
    {{0, 1}, 2, 16, 128, false},
    {std::vector<int64_t>(40, 0), 1, 32, 24, false},
    {{0, 0}, 1, 288, 264, true},
};
const std::vector<Types> kTypes = {{false, false, 0}, {true, true, 0}, {false, false, 1}, {true, true, 1},
                                   {false, true, 3},  {true, false, 3}};

void TestForms(const Shape& shape, const Types& types, const std::string& name) {
  for (const int64_t page_size : {1, 4, 16}) {
    Problem(shape, Form::kPaged, types, {{3, 0}, {1, 1}, {1, 17}, {0, 5}, {2, 128}, {5, 129}}, page_size)
        .Run(name + Label(" paged", page_size));
    const std::vector<Length> lengths = {{3, 0}, {1, 0}, {1, 17}, {0, 1}, {2, 128}, {25, 110}, {0, 1}};
    Problem(shape, Form::kPagedCausal, types, lengths, page_size)
        .Run(name + Label(" paged causal", page_size));
  }
  Problem(shape, Form::kCausal, types, {{1, 0}, {7, 0}, {0, 0}, {1, 0}, {133, 0}}, 1).Run(name + " causal");
  for (const int64_t keys : {0, 1, 15, 143}) {
    Problem(shape, Form::kPlain, types, {{19, keys}}, 1).Run(name + Label(" plain", keys));
  }
  for (const Form form : {Form::kPaged, Form::kCausal, Form::kPagedCausal}) {
    Problem(shape, form, types, {}, 4).Run(name + " empty");
  }
}

// Cut along the keys, where there are threads.
void TestLong(const Types& types) {
  Problem(kShapes[0], Form::kPaged, types, {{1, 1800}, {2, 1501}}, 16).Run("long");
  Problem(kShapes[0], Form::kPagedCausal, types, {{1, 1800}, {70, 1501}}, 16).Run("long causal");
}

// What is not finite stays with the queries that see it.
void TestSpoiled(const Types& types) {
  for (const double value : {kNaN, kInfinity}) {
    for (const int64_t token : {0, 40, 132}) {
      for (const Shape& shape : {kShapes[0], kShapes[2], kShapes[4]}) {
        Problem causal(shape, Form::kCausal, types, {{1, 0}, {133, 0}, {3, 0}}, 1);
        causal.SpoilValue(1, token, value);
        causal.Run(Label("spoiled value", token));
        causal.Spoil(1, token, kNaN);
        causal.Run(Label("spoiled key", token));
      }
    }
    Problem paged(kShapes[0], Form::kPaged, types, {{1, 30}, {2, 31}, {1, 64}}, 16);
    paged.SpoilValue(1, 30, value);
    paged.Run("spoiled page");
    paged.Spoil(1, 30, kNaN);
    paged.Run("spoiled key of a page");
    Problem both(kShapes[0], Form::kPagedCausal, types, {{1, 30}, {300, 1}, {1, 64}}, 16);
    both.SpoilValue(1, 250, value);
    both.Run("spoiled value of a page, causal");
    both.Spoil(1, 250, kNaN);
    both.Run("spoiled key of a page, causal");
  }
}

void TestExp() {
  for (const Isa isa : Isas()) {
    for (const size_t count : {0, 1, 3, 8, 17, 3001}) {
      Array x(count, false, 1), out(count, false, 1);
      std::vector<Value> expected;
      for (size_t i = 0; i < count; ++i) {
        x.Set(i, -87 + 174.0 * static_cast<double>(i) / static_cast<double>(count));
        const double exact = std::exp(x[i]);
        expected.push_back({exact, exact / (1 << 22)});
      }
      attention_detail::OpsOf(isa).exp(x.as<float>(), out.as<float>(), static_cast<int64_t>(count));
      ExpectValues(out, expected, Label("exp", count) + " " + NameOf(isa));
    }
  }
}

}  // namespace

void TestAttention() {
  TestExp();
  for (const Types& types : kTypes) {
    const std::string name = Label("attention types", types.q, types.kv, types.shift);
    for (size_t s = 0; s < kShapes.size(); ++s) TestForms(kShapes[s], types, name + Label(" shape", s));
  }
  for (const Types& types : {kTypes[0], kTypes[1], kTypes[4]}) {
    TestLong(types);
    TestSpoiled(types);
  }
}

}  // namespace dcprt::test

// Attention over sizes that fill no tile, in every KV format, against double precision and, cut into single rows,
// against itself: a program of its own, for sanitizers and for instruction sets that run in an emulator.
#include <cstdio>
#include <memory>
#include <random>

#include "attention.h"
#include "rotary.h"

using namespace headstart;
using namespace headstart::HS_ISA;

namespace {

float element(const KvLayout& layout, const uint8_t* base, size_t index) {
  uint16_t half;
  float value;
  switch (layout.format) {
    case KvFormat::kFloat32: std::memcpy(&value, base + index * 4, 4); return value;
    case KvFormat::kFloat16: std::memcpy(&half, base + index * 2, 2); return half_to_float(half);
    case KvFormat::kBfloat16: std::memcpy(&half, base + index * 2, 2); return bfloat_to_float(half);
    case KvFormat::kInt8: return float(int8_t(base[index]));
    case KvFormat::kFp8: return 256.f * half_to_float(uint16_t((base[index] & 0x80) << 8 | (base[index] & 0x7f) << 7));
  }
  return 0;
}

struct Case {
  KvLayout layout;
  int num_heads, context, rows;
};

// A request in its pool; the buffers are no longer than they must be.
class Request {
 public:
  Request(ThreadPool& pool, const Case& c, uint32_t seed) : pool_(pool), c_(c), random_(seed) {
    const size_t blocks = size_t((c.context + c.layout.block_size - 1) / c.layout.block_size);
    layer_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, blocks * c.layout.block_bytes())));
    std::memset(layer_.get(), 0, blocks * c.layout.block_bytes());
    for (size_t i = 0; i < blocks; i++) table_.push_back(int64_t(blocks - 1 - i));
    write();
  }

  std::vector<float> attend(const std::vector<Span>& spans) {
    const size_t width = size_t(c_.num_heads) * size_t(c_.layout.head_dim);
    std::vector<float> out(width * size_t(c_.rows));
    const AttendArgs args{last_queries(), c_.num_heads, int(spans.size()), spans.data(), out.data(), width};
    HS_ISA::attend(pool_, c_.layout, layer_.get(), args);
    return out;
  }

  std::vector<Span> in_one_piece() const { return {Span{0, c_.rows, c_.context, table_.data()}}; }
  std::vector<Span> row_by_row() const {
    std::vector<Span> spans;
    for (int i = 0; i < c_.rows; i++) spans.push_back(Span{i, 1, c_.context - c_.rows + i + 1, table_.data()});
    return spans;
  }

  // The largest difference from double precision.
  double error(const std::vector<float>& out) const {
    double most = 0;
    for (int row = 0; row < c_.rows; row++) {
      for (int head = 0; head < c_.num_heads; head++) {
        const std::vector<double> exact = expected(row, head);
        const size_t at = (size_t(row) * size_t(c_.num_heads) + size_t(head)) * exact.size();
        for (size_t d = 0; d < exact.size(); d++) most = std::max(most, std::fabs(exact[d] - double(out[at + d])));
      }
    }
    return most;
  }

 private:
  void write() {
    const KvLayout& layout = c_.layout;
    const size_t width = size_t((c_.num_heads + 2 * layout.num_kv_heads) * layout.head_dim), rows = size_t(c_.context);
    std::vector<float> qkv(width * rows), angles(rows * size_t(layout.head_dim / 2));
    const std::vector<float> norm(size_t(layout.head_dim), 1.f);
    std::normal_distribution<float> normal;
    for (float& x : qkv) x = normal(random_);
    for (float& x : angles) x = 0.6f;
    std::vector<int64_t> slots;
    for (int i = 0; i < c_.context; i++) {
      slots.push_back(table_[size_t(i / layout.block_size)] * layout.block_size + i % layout.block_size);
    }
    queries_.resize(rows * size_t(c_.num_heads) * size_t(layout.padded_dim()));
    rotate_and_write(pool_, layout, layer_.get(),
                     RotateArgs{qkv.data(), width, c_.context, c_.num_heads, layout.num_kv_heads, layout.head_dim,
                                norm.data(), norm.data(), 1e-6f, angles.data(), angles.data(), slots.data(), 0.3f,
                                queries_.data()});
  }

  const float* last_queries() const {
    return queries_.data() + size_t(c_.context - c_.rows) * size_t(c_.num_heads) * size_t(c_.layout.padded_dim());
  }

  std::vector<double> expected(int row, int head) const {
    const KvLayout& layout = c_.layout;
    const size_t dim = size_t(layout.head_dim), size = size_t(layout.block_size), padded = size_t(layout.padded_dim());
    const int kv_head = head / (c_.num_heads / layout.num_kv_heads);
    const float* query = last_queries() + (size_t(row) * size_t(c_.num_heads) + size_t(head)) * padded;
    std::vector<double> sums(dim, 0.0);
    double total = 0;
    for (int key = 0; key <= c_.context - c_.rows + row; key++) {
      const uint8_t* block = layer_.get() + layout.head_at(table_[size_t(key) / size], kv_head);
      const size_t offset = size_t(key) % size;
      const float* scales = reinterpret_cast<const float*>(block + layout.scales_at());
      const bool scaled = is_scaled(layout.format);
      double score = 0;
      for (size_t d = 0; d < dim; d++) score += double(query[d]) * double(element(layout, block, d * size + offset));
      const double weight = std::exp2(score * (scaled ? double(scales[offset]) : 1.0));
      total += weight;
      const double factor = weight * (scaled ? double(scales[size + offset]) : 1.0);
      for (size_t d = 0; d < dim; d++) {
        sums[d] += factor * double(element(layout, block + layout.values_at(), offset * padded + d));
      }
    }
    for (double& sum : sums) sum /= total;
    return sums;
  }

  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  ThreadPool& pool_;
  const Case c_;
  std::mt19937 random_;
  std::unique_ptr<uint8_t, Free> layer_;
  std::vector<int64_t> table_;
  std::vector<float> queries_;
};

bool holds(ThreadPool& pool, const Case& c) {
  Request request(pool, c, uint32_t(c.context));
  const std::vector<float> whole = request.attend(request.in_one_piece());
  const bool same = std::memcmp(request.attend(request.row_by_row()).data(), whole.data(), whole.size() * 4) == 0;
  const double error = request.error(whole);
  if (same && error < 1e-5) return true;
  std::printf("format %d heads %d/%d dim %d block %d context %d rows %d: error %g, %s row by row\n",
              int(c.layout.format), c.num_heads, c.layout.num_kv_heads, c.layout.head_dim, c.layout.block_size,
              c.context, c.rows, error, same ? "same" : "other");
  return false;
}

}  // namespace

int main() {
  ThreadPool pool(3);
  int cases = 0, failures = 0;
  for (int format = 0; format < 5; format++) {
    for (const int block_size : {1, 7, 16, 48, 64, 80, 256}) {
      for (const int head_dim : {8, 18, 40, 64, 130}) {
        const int kv_heads = 1 + cases % 2, group = 1 + cases % 5;
        for (const int context : {1, 16, 63, 65, 140, 515 + cases % 30}) {
          const Case c{KvLayout{KvFormat(format), kv_heads, head_dim, block_size}, kv_heads * group, context,
                       std::min(context, 1 + cases % 41)};
          failures += !holds(pool, c);
          cases++;
        }
      }
    }
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures != 0;
}

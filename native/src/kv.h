// Where keys and values lie in a layer's pool of blocks. Owns the layout and nothing else.
//
// A layer is one array of blocks, a block holds its KV heads one after the other, a head of a block is: keys,
// transposed [head_dim][block_size]; values [block_size][padded_dim], the padding zero; for int8 and fp8 one float
// scale per token, for the keys, then for the values. Transposed keys let 16 of them be multiplied at once without a
// horizontal sum. A pool starts as zero bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headstart {

enum class KvFormat : int { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt8 = 3, kFp8 = 4 };

constexpr bool is_scaled(KvFormat format) { return format == KvFormat::kInt8 || format == KvFormat::kFp8; }
constexpr size_t element_bytes(KvFormat format) {
  return format == KvFormat::kFloat32 ? 4 : is_scaled(format) ? 1 : 2;
}

constexpr int kMaxHeadDim = 256;

struct KvLayout {
  KvFormat format;
  int num_kv_heads, head_dim, block_size;

  int padded_dim() const { return (head_dim + 15) / 16 * 16; }
  size_t values_at() const { return aligned(element_bytes(format) * size_t(head_dim) * size_t(block_size)); }
  size_t scales_at() const {
    return values_at() + aligned(element_bytes(format) * size_t(padded_dim()) * size_t(block_size));
  }
  size_t head_bytes() const { return scales_at() + (is_scaled(format) ? aligned(8 * size_t(block_size)) : 0); }
  size_t block_bytes() const { return size_t(num_kv_heads) * head_bytes(); }
  size_t head_at(int64_t block, int head) const {
    return (size_t(block) * size_t(num_kv_heads) + size_t(head)) * head_bytes();
  }

 private:
  static size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
};

// Rows of a projection's output [queries | keys | values] on their way to attention.
struct RotateArgs {
  const float* qkv;
  size_t qkv_stride;
  int num_rows;
  int num_heads, num_kv_heads, head_dim;
  const float* qk_norm_q;  // [head_dim] weights of an RMS norm of each head, or null
  const float* qk_norm_k;
  float qk_norm_eps;
  const float* cos;  // [rows][head_dim / 2], or null: no rotation
  const float* sin;
  const int64_t* slots;  // [rows] block * block_size + offset
  float query_scale;     // multiplied into the queries, after the rotation
  float* queries;        // [rows][num_heads][padded_dim]
};

// One request: its rows are the tokens [context_len - num_rows, context_len), and token i sees the keys 0..i.
struct Span {
  int first_row, num_rows, context_len;
  const int64_t* block_table;
};

struct AttendArgs {
  const float* queries;  // [rows][num_heads][padded_dim], scaled by softmax scale * log2(e)
  int num_heads;
  int num_spans;
  const Span* spans;  // in row order
  float* out;         // row r, head h at out + r * out_stride + h * head_dim
  size_t out_stride;
};

}  // namespace headstart

// Attention by plain C functions, for the tests and the benchmark: built alone, for one instruction set (HS_ISA).
#include "attention.h"
#include "rotary.h"

using namespace headstart;

namespace {

KvLayout layout_of(const int* shape) { return KvLayout{KvFormat(shape[0]), shape[1], shape[2], shape[3]}; }

}  // namespace

extern "C" {

ThreadPool* pool_create(int num_threads) { return new ThreadPool(num_threads); }

void pool_destroy(ThreadPool* pool) { delete pool; }

// shape: format, KV heads, head_dim, block_size
void kv_sizes(const int* shape, size_t* block_bytes, size_t* head_bytes, size_t* values_at, size_t* scales_at) {
  const KvLayout layout = layout_of(shape);
  *block_bytes = layout.block_bytes();
  *head_bytes = layout.head_bytes();
  *values_at = layout.values_at();
  *scales_at = layout.scales_at();
}

void rotate_and_write(ThreadPool* pool, const int* shape, uint8_t* layer, const float* qkv, size_t qkv_stride,
                      int num_rows, int num_heads, const float* norm_q, const float* norm_k, float eps,
                      const float* cos, const float* sin, const int64_t* slots, float query_scale, float* queries) {
  const KvLayout layout = layout_of(shape);
  const RotateArgs args{qkv, qkv_stride, num_rows, num_heads, layout.num_kv_heads, layout.head_dim, norm_q, norm_k,
                        eps, cos, sin, slots, query_scale, queries};
  HS_ISA::rotate_and_write(*pool, layout, layer, args);
}

// spans: first_row, num_rows, context_len each; span i's block table begins at tables + i * table_stride
void attend(ThreadPool* pool, const int* shape, const uint8_t* layer, const float* queries, int num_heads,
            int num_spans, const int* spans, const int64_t* tables, size_t table_stride, float* out,
            size_t out_stride) {
  const KvLayout layout = layout_of(shape);
  std::vector<Span> list;
  for (int i = 0; i < num_spans; i++) {
    list.push_back(Span{spans[3 * i], spans[3 * i + 1], spans[3 * i + 2], tables + size_t(i) * table_stride});
  }
  const AttendArgs args{queries, num_heads, num_spans, list.data(), out, out_stride};
  HS_ISA::attend(*pool, layout, layer, args);
}

}  // extern "C"

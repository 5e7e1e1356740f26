// Causal attention over paged keys and values, exact to the bit whatever is computed beside a row.
//
// Each split of 512 keys is summed on its own, tile by tile, and the splits are merged in order: one decode can be
// spread over threads, and a prefill does the same arithmetic. Compile with -ffp-contract=off: a product and a sum that
// are fused in one place and not in another would break this.
#pragma once

#include "attention_load.h"
#include "attention_plan.h"

namespace headstart {
namespace HS_ISA {

constexpr int kScratchArena = 4, kTilesArena = 5, kUnitsArena = 6, kPartialsArena = 7;

HS_INLINE size_t partial_floats_per_row(int padded_dim) { return size_t(padded_dim) + kLanes + kLanes; }

// [rows][padded_dim] sums, [rows][kLanes] lanes of weights, [rows] exponents (with room for [rows][kLanes])
HS_INLINE Partial partial_at(float* memory, int rows, int padded_dim) {
  float* lanes = memory + size_t(rows) * size_t(padded_dim);
  return Partial{memory, lanes, lanes + size_t(rows) * kLanes};
}

// A thread's memory.
struct Scratch {
  float* queries;
  float* scores;
  float* total;  // partials
  float* split;
  TileRoom room;

  static size_t floats(int rows, const KvLayout& layout) {
    const size_t dim = size_t(layout.head_dim), padded = size_t(layout.padded_dim());
    return size_t(rows) * (padded + kTileKeys + 2 * partial_floats_per_row(layout.padded_dim())) +
           kTileKeys * (dim + padded + 2) + kPanel * (dim + padded);
  }
  Scratch(float* memory, int rows, const KvLayout& layout) {
    const size_t dim = size_t(layout.head_dim), padded = size_t(layout.padded_dim()), count = size_t(rows);
    const auto take = [&memory](size_t floats) {
      float* taken = memory;
      memory += floats;
      return taken;
    };
    queries = take(count * padded);
    scores = take(count * kTileKeys);
    total = take(count * partial_floats_per_row(layout.padded_dim()));
    split = take(count * partial_floats_per_row(layout.padded_dim()));
    room.keys = take(kTileKeys * dim);
    room.values = take(kTileKeys * padded);
    room.scales = take(kTileKeys * 2);
    room.raw = reinterpret_cast<uint8_t*>(take(kPanel * (dim + padded)));
  }
};

static void attend_split(const Rows& rows, const KvView& view, int split, const Scratch& scratch,
                         const Partial& partial) {
  std::memset(partial.sums, 0, size_t(rows.count) * size_t(rows.padded_dim) * sizeof(float));
  std::memset(partial.weight_lanes, 0, size_t(rows.count) * kLanes * sizeof(float));
  std::fill_n(partial.exponents, rows.count, kNothingSeen);
  const int seen = rows.position(rows.count - 1) + 1;
  const int end = std::min(seen, (split + 1) * kSplitKeys);
  for (int key = split * kSplitKeys; key < end; key += kTileKeys) {
    const Tile tile = load_tile(view, key, std::min(kTileKeys, end - key), rows.count, scratch.room);
    attend_tile(rows, tile, key, scratch.scores, partial);
  }
}

// total = total + part, both taken to the larger exponent
static void merge(const Rows& rows, const Partial& total, const Partial& part) {
  const auto add_scaled = [](float* to, const float* from, int count, VF scale_to, VF scale_from) {
    for (int i = 0; i < count; i += kLanes) {
      store(to + i, fma(load(from + i), scale_from, mul(load(to + i), scale_to)));
    }
  };
  for (int row = 0; row < rows.count; row++) {
    const float before = total.exponents[row], other = part.exponents[row];
    if (other == kNothingSeen) continue;
    const float most = std::max(before, other);
    const VF scale_to = exp2_approx(set1(before - most)), scale_from = exp2_approx(set1(other - most));
    const size_t sums_at = size_t(row) * size_t(rows.padded_dim), lanes_at = size_t(row) * kLanes;
    add_scaled(total.sums + sums_at, part.sums + sums_at, rows.padded_dim, scale_to, scale_from);
    add_scaled(total.weight_lanes + lanes_at, part.weight_lanes + lanes_at, kLanes, scale_to, scale_from);
    total.exponents[row] = most;
  }
}

static void write_out(const Rows& rows, const Partial& total, float* out, size_t out_stride) {
  for (int row = 0; row < rows.count; row++) {
    const float* sums = total.sums + size_t(row) * size_t(rows.padded_dim);
    const float factor = 1.f / hsum(load(total.weight_lanes + size_t(row) * kLanes));
    float* to = out + size_t(row / rows.heads_per_query) * out_stride +
                size_t(row % rows.heads_per_query) * size_t(rows.head_dim);
    for (int d = 0; d < rows.head_dim; d++) to[d] = sums[d] * factor;
  }
}

// One call of attend(): what all of its items share.
class Attention {
 public:
  Attention(ThreadPool& pool, const KvLayout& layout, const uint8_t* layer, const AttendArgs& args)
      : pool_(pool), layout_(layout), layer_(layer), args_(args), group_(args.num_heads / layout.num_kv_heads),
        plan_(make_plan(args, layout.num_kv_heads, partial_floats_per_row(layout.padded_dim()), pool.size(),
                        pool.arena(0, kTilesArena), pool.arena(0, kUnitsArena))),
        partials_(pool.arena(0, kPartialsArena).reserve_for<float>(plan_.partial_floats)) {
    for (int thread = 0; thread < pool.size(); thread++) {
      pool.arena(thread, kScratchArena).reserve_for<float>(Scratch::floats(max_rows(), layout));
    }
  }

  void run() {
    pool_.parallel(plan_.num_units * layout_.num_kv_heads, [this](int item, int thread) {
      const WorkUnit& unit = plan_.units[item / layout_.num_kv_heads];
      attend_unit(unit, item % layout_.num_kv_heads, thread);
    });
  }

 private:
  int max_rows() const { return plan_.queries_per_tile * group_; }

  void attend_unit(const WorkUnit& unit, int head, int thread) {
    const size_t floats = Scratch::floats(max_rows(), layout_);
    const Scratch scratch(pool_.arena(thread, kScratchArena).reserve_for<float>(floats), max_rows(), layout_);
    const QueryTile& tile = plan_.tiles[unit.tile];
    const Rows rows = gather_queries(tile, head, scratch);
    const KvView view(layout_, layer_, head, args_.spans[tile.span].block_table);
    if (tile.divided) {
      attend_split(rows, view, unit.split, scratch, stored_partial(tile, rows, head, unit.split));
      if (plan_.remaining[unit.tile * layout_.num_kv_heads + head].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      finish(tile, rows, head, [&](int split) { return stored_partial(tile, rows, head, split); });
    } else {
      finish(tile, rows, head, [&](int split) {
        const Partial partial = partial_at(split == 0 ? scratch.total : scratch.split, rows.count, rows.padded_dim);
        attend_split(rows, view, split, scratch, partial);
        return partial;
      });
    }
  }

  // Merges the tile's splits in order, as partial_of(split) gives them, and writes the result.
  template <class F>
  void finish(const QueryTile& tile, const Rows& rows, int head, F&& partial_of) {
    const Partial total = partial_of(0);
    for (int split = 1; split < tile.num_splits(); split++) merge(rows, total, partial_of(split));
    const size_t first_row = size_t(args_.spans[tile.span].first_row + tile.first_query);
    write_out(rows, total, args_.out + first_row * args_.out_stride + size_t(head * group_) * size_t(rows.head_dim),
              args_.out_stride);
  }

  Rows gather_queries(const QueryTile& tile, int head, const Scratch& scratch) const {
    const size_t padded = size_t(layout_.padded_dim()), run = size_t(group_) * padded;
    const size_t first_row = size_t(args_.spans[tile.span].first_row + tile.first_query);
    for (size_t query = 0; query < size_t(tile.num_queries); query++) {
      const size_t from = (first_row + query) * size_t(args_.num_heads) + size_t(head * group_);
      std::memcpy(scratch.queries + query * run, args_.queries + from * padded, run * sizeof(float));
    }
    return Rows{scratch.queries, tile.num_queries * group_, group_, tile.last_position - tile.num_queries + 1,
                layout_.head_dim, layout_.padded_dim()};
  }

  Partial stored_partial(const QueryTile& tile, const Rows& rows, int head, int split) const {
    const size_t each = size_t(rows.count) * partial_floats_per_row(rows.padded_dim);
    const size_t index = size_t(head) * size_t(tile.num_splits()) + size_t(split);
    return partial_at(partials_ + tile.partials_at + index * each, rows.count, rows.padded_dim);
  }

  ThreadPool& pool_;
  const KvLayout& layout_;
  const uint8_t* layer_;
  const AttendArgs& args_;
  const int group_;
  const Plan plan_;
  float* const partials_;
};

static void attend(ThreadPool& pool, const KvLayout& layout, const uint8_t* layer, const AttendArgs& args) {
  Attention(pool, layout, layer, args).run();
}

}  // namespace HS_ISA
}  // namespace headstart

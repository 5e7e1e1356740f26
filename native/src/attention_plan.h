// How attention is cut into work items. No cut changes a result: what does is fixed (tiles of 64 keys, splits of 512).
//
// A query tile is some consecutive queries of one span, for all heads of one KV head. It is one item, which goes
// through the splits of its keys in order; or, where that would keep one thread busy while others wait, one item per
// split, and whoever finishes the last of them merges all in order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#include "kv.h"
#include "threads.h"

namespace headstart {
namespace HS_ISA {

constexpr int kSplitKeys = 512;
constexpr int kRowsPerTile = 96;   // many rows share one copy of a tile in the cache
constexpr int kFewRows = 24;
constexpr int kItemsPerThread = 4;
constexpr int kAllSplits = -1;

struct QueryTile {
  int span, first_query, num_queries;
  int last_position;
  bool divided;
  size_t partials_at;  // divided: where the partials of its first head and split begin, in floats

  int num_splits() const { return last_position / kSplitKeys + 1; }
};

struct WorkUnit {  // of each KV head
  int64_t cost;
  int tile, split;
};

struct Plan {
  QueryTile* tiles;
  WorkUnit* units;              // the dearest first
  std::atomic<int>* remaining;  // [tiles][KV heads] splits of a divided tile that are not done
  int num_tiles, num_units, queries_per_tile;
  size_t partial_floats;
};

static int count_tiles(const AttendArgs& args, int queries_per_tile) {
  int count = 0;
  for (int i = 0; i < args.num_spans; i++) {
    count += (args.spans[i].num_rows + queries_per_tile - 1) / queries_per_tile;
  }
  return count;
}

// Large tiles, but not so large that threads have nothing to do.
static int choose_queries_per_tile(const AttendArgs& args, int num_kv_heads, int num_threads) {
  const int group = args.num_heads / num_kv_heads;
  int rows = kRowsPerTile;
  while (rows > kFewRows && count_tiles(args, std::max(1, rows / group)) * num_kv_heads < 2 * num_threads) rows /= 2;
  return std::max(1, rows / group);
}

// In keys times rows; reading a key costs about as much as some rows do.
static int64_t cost_of(int num_keys, int num_rows) { return int64_t(num_keys) * (num_rows + 4); }

static int64_t make_tiles(const AttendArgs& args, int group, Plan& plan) {
  int64_t total = 0;
  plan.num_tiles = 0;
  for (int i = 0; i < args.num_spans; i++) {
    const Span& span = args.spans[i];
    for (int query = 0; query < span.num_rows; query += plan.queries_per_tile) {
      const int count = std::min(plan.queries_per_tile, span.num_rows - query);
      const int last = span.context_len - span.num_rows + query + count - 1;
      plan.tiles[plan.num_tiles++] = QueryTile{i, query, count, last, false, 0};
      total += cost_of(last + 1, count * group);
    }
  }
  return total;
}

// Decides which tiles are divided; returns the number of units.
static int divide_tiles(int64_t most, int group, int num_kv_heads, size_t floats_per_row, Plan& plan) {
  int units = 0;
  plan.partial_floats = 0;
  for (int i = 0; i < plan.num_tiles; i++) {
    QueryTile& tile = plan.tiles[i];
    const int splits = tile.num_splits(), rows = tile.num_queries * group;
    tile.divided = splits > 1 && cost_of(tile.last_position + 1, rows) > most;
    units += tile.divided ? splits : 1;
    if (!tile.divided) continue;
    tile.partials_at = plan.partial_floats;
    plan.partial_floats += size_t(num_kv_heads) * size_t(splits) * size_t(rows) * floats_per_row;
    for (int head = 0; head < num_kv_heads; head++) {
      new (&plan.remaining[i * num_kv_heads + head]) std::atomic<int>(splits);
    }
  }
  return units;
}

static void make_units(int group, Plan& plan) {
  int count = 0;
  for (int i = 0; i < plan.num_tiles; i++) {
    const QueryTile& tile = plan.tiles[i];
    const int rows = tile.num_queries * group, keys = tile.last_position + 1;
    if (!tile.divided) plan.units[count++] = WorkUnit{cost_of(keys, rows), i, kAllSplits};
    for (int split = 0; tile.divided && split < tile.num_splits(); split++) {
      const int split_keys = std::min(kSplitKeys, keys - split * kSplitKeys);
      plan.units[count++] = WorkUnit{cost_of(split_keys, rows), i, split};
    }
  }
  plan.num_units = count;
  std::sort(plan.units, plan.units + count, [](const WorkUnit& a, const WorkUnit& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.tile != b.tile ? a.tile < b.tile : a.split < b.split;
  });
}

static Plan make_plan(const AttendArgs& args, int num_kv_heads, size_t floats_per_row, int num_threads, Arena& tiles,
                      Arena& units) {
  Plan plan{};
  const int group = args.num_heads / num_kv_heads;
  plan.queries_per_tile = choose_queries_per_tile(args, num_kv_heads, num_threads);
  const size_t max_tiles = size_t(count_tiles(args, plan.queries_per_tile));
  const size_t counter_bytes = sizeof(std::atomic<int>) * size_t(num_kv_heads);
  uint8_t* memory = static_cast<uint8_t*>(tiles.reserve(max_tiles * (sizeof(QueryTile) + counter_bytes)));
  plan.tiles = reinterpret_cast<QueryTile*>(memory);
  plan.remaining = reinterpret_cast<std::atomic<int>*>(memory + max_tiles * sizeof(QueryTile));
  const int64_t total = make_tiles(args, group, plan);
  const int64_t most = num_threads == 1 ? INT64_MAX : total * num_kv_heads / (kItemsPerThread * num_threads);
  const int num_units = divide_tiles(most, group, num_kv_heads, floats_per_row, plan);
  plan.units = units.reserve_for<WorkUnit>(size_t(num_units));
  make_units(group, plan);
  return plan;
}

}  // namespace HS_ISA
}  // namespace headstart

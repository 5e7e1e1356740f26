// A persistent pool of compute threads: the calling thread works too, waiting ones spin briefly, then sleep.
//
// One caller at a time. Items are handed out one by one, and a call ends when its items are done, not when every thread
// has looked: one that the system has taken away, for another process, holds nobody up unless it has an item in hand.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

namespace headstart {

// Memory that only grows, aligned to a cache line: a step's buffers are allocated once.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // At least `bytes`; what was there before may be gone. Out of line: compiled for every machine, once.
  void* reserve(size_t bytes);
  template <class T>
  T* reserve_for(size_t count) {
    return static_cast<T*>(reserve(count * sizeof(T)));
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

class ThreadPool {
 public:
  // `cpus`: where to pin the threads, the caller first; empty: nowhere.
  explicit ThreadPool(int num_threads, std::vector<int> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls f(item, thread) for every item in [0, num_items), thread in [0, size()); returns when all are done.
  // f must not throw: memory is reserved before.
  template <class F>
  void parallel(int num_items, F&& f) {
    run(num_items, [](void* context, int item, int thread) {
      (*static_cast<std::remove_reference_t<F>*>(context))(item, thread);
    }, static_cast<void*>(&f));
  }

  // A thread's own memory number `which`, kept from call to call.
  Arena& arena(int thread, int which = 0) { return arenas_[size_t(thread) * kArenas + size_t(which)]; }
  static constexpr int kArenas = 8;

 private:
  using Function = void (*)(void*, int, int);
  void run(int num_items, Function function, void* context);
  bool take_item(uint32_t call, int& item);
  void work(uint32_t call, int thread);
  void wait_for_items(int num_items);
  void serve(int thread);

  int num_threads_;
  std::vector<int> cpus_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Arena[]> arenas_;
  bool caller_pinned_ = false;
  // The call under way. A thread that comes late may read what the next call is writing; it then fails to take an item.
  std::atomic<Function> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> num_items_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> call_{0};      // number of the call, what sleeping threads wait on
  alignas(64) std::atomic<uint64_t> next_{0};      // number of the call << 32 | next item
  alignas(64) std::atomic<uint32_t> num_done_{0};  // items of the call that are done, what the caller waits on
  alignas(64) std::atomic<int> num_sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
};

}  // namespace headstart

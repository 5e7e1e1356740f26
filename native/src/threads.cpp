#include "threads.h"

#include <algorithm>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace headstart {

namespace {

constexpr int kSpins = 8000;  // about 100 us: longer than what lies between two operations of a step
constexpr int kSpinsOfCaller = 2000;  // the last item is nearly done, or its thread wants a core to finish it on

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

void pin(int cpu) {  // as well as it can be done: a container may have lost that core meanwhile
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

void* Arena::reserve(size_t bytes) {
  if (bytes > size_) {
    std::free(data_);
    size_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data_ = std::aligned_alloc(64, size_);
    if (data_ == nullptr) {
      size_ = 0;
      throw std::bad_alloc();
    }
  }
  return data_;
}

ThreadPool::ThreadPool(int num_threads, std::vector<int> cpus)
    : num_threads_(std::max(1, num_threads)),
      cpus_(std::move(cpus)),
      arenas_(new Arena[size_t(num_threads_) * kArenas]) {
  for (int thread = 1; thread < num_threads_; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  call_.fetch_add(1);
  wake_all(call_);
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(int num_items, Function function, void* context) {
  if (num_items <= 0) return;
  if (!caller_pinned_ && !cpus_.empty()) {
    pin(cpus_[0]);
    caller_pinned_ = true;
  }
  if (num_threads_ == 1 || num_items == 1) {
    for (int item = 0; item < num_items; item++) function(context, item, 0);
    return;
  }
  const uint32_t call = call_.load(std::memory_order_relaxed) + 1;
  function_.store(function, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_items_.store(num_items, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  next_.store(uint64_t(call) << 32, std::memory_order_release);
  call_.store(call);
  if (num_sleepers_.load() > 0) wake_all(call_);
  work(call, 0);
  wait_for_items(num_items);
}

// The next item of the call, if it has one left and is still the one under way.
bool ThreadPool::take_item(uint32_t call, int& item) {
  uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    if (uint32_t(next >> 32) != call || int(uint32_t(next)) >= num_items_.load(std::memory_order_relaxed)) return false;
    if (next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      item = int(uint32_t(next));
      return true;
    }
  }
}

void ThreadPool::work(uint32_t call, int thread) {
  for (;;) {
    // Read before the item is taken: while one is left, the call is not over, and these are its own.
    const Function function = function_.load(std::memory_order_relaxed);
    void* context = context_.load(std::memory_order_relaxed);
    int item;
    if (!take_item(call, item)) return;
    const uint32_t last = uint32_t(num_items_.load(std::memory_order_relaxed));
    function(context, item, thread);
    if (num_done_.fetch_add(1) + 1 == last && caller_sleeps_.load()) wake_all(num_done_);
  }
}

void ThreadPool::wait_for_items(int num_items) {
  const uint32_t all = uint32_t(num_items);
  for (int spins = 0; spins < kSpinsOfCaller; spins++) {
    if (num_done_.load(std::memory_order_acquire) == all) return;
    relax();
  }
  caller_sleeps_.store(true);
  for (uint32_t done = num_done_.load(); done != all; done = num_done_.load()) sleep_while(num_done_, done);
  caller_sleeps_.store(false);
}

void ThreadPool::serve(int thread) {
  if (!cpus_.empty()) pin(cpus_[size_t(thread) % cpus_.size()]);
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (call_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        relax();
        continue;
      }
      num_sleepers_.fetch_add(1);
      if (call_.load() == seen) sleep_while(call_, seen);
      num_sleepers_.fetch_sub(1);
      spins = 0;
    }
    seen = call_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    work(seen, thread);
  }
}

}  // namespace headstart

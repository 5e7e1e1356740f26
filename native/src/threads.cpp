#include "threads.h"

#include <algorithm>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace headstart {

namespace {

constexpr int kSpins = 20000;       // about 100 us: longer than what lies between two operations of a step
constexpr int kSpinsOfCaller = 50000;

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
  stop_ = true;
  epoch_.fetch_add(1);
  wake_all(epoch_);
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
  function_ = function;
  context_ = context;
  num_items_ = num_items;
  next_.store(0, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  epoch_.fetch_add(1);
  if (sleepers_.load() > 0) wake_all(epoch_);
  work(0);
  int spins = 0;
  while (done_.load(std::memory_order_acquire) != num_threads_ - 1) {
    if (++spins < kSpinsOfCaller) {
      relax();
    } else {
      spins = 0;
      sched_yield();
    }
  }
}

void ThreadPool::work(int thread) {
  for (;;) {
    const int item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= num_items_) return;
    function_(context_, item, thread);
  }
}

void ThreadPool::serve(int thread) {
  if (!cpus_.empty()) pin(cpus_[size_t(thread) % cpus_.size()]);
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        relax();
        continue;
      }
      sleepers_.fetch_add(1);
      if (epoch_.load() == seen) sleep_while(epoch_, seen);
      sleepers_.fetch_sub(1);
      spins = 0;
    }
    seen++;
    if (stop_) return;
    work(thread);
    done_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace headstart

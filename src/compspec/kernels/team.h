// Threads that go through a call, or through a whole program of calls, together.

#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

#include <omp.h>

namespace compspec {

// All threads of a team leave wait() when the last one has come. It spins without PAUSE: on virtual machines loops of it
// make the host take the processor away for longer than the wait.
class Barrier {
 public:
  void wait(int threads) {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (unsigned spins = 1; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins % PATIENCE == 0) sched_yield();
    }
  }

 private:
  static constexpr unsigned PATIENCE = 1 << 14;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

// One thread's view of its team.
struct Team {
  int thread, threads;
  Barrier* barrier;

  void wait() const {
    if (threads > 1) barrier->wait(threads);
  }
  // This thread's part of `count` things.
  std::int64_t begin(std::int64_t count) const { return count * thread / threads; }
  std::int64_t end(std::int64_t count) const { return count * (thread + 1) / threads; }
};

// Calls work(team) in each of up to `threads` threads.
template <typename Work>
void in_team(int threads, const Work& work) {
  if (threads <= 1) return work(Team{0, 1, nullptr});
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}

// What a program calls: all threads of the team call it with the same arguments. Returns 0, or 1 where it failed.
using TeamFunction = int (*)(void* arguments, const Team* team);

}  // namespace compspec

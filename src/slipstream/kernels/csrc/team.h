// Threads that work on one pass together, also on machines on which other processes run.
//
// A loop of OpenMP deals out its work and waits for all: a thread that another process keeps off its core keeps
// all others waiting, who spin on theirs. Here OpenMP starts the threads once for all loops of a pass, and work is
// claimed. Who finds none spins for a moment and then offers its core to others. Where threads cost more than they
// bring, since they have no cores of their own, there are fewer of them for a while.

#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace {
namespace team {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Span = Clock::duration;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int64_t PARTS = 2;         // of its share of the work that a thread claims at once
constexpr microseconds YIELDS{20};   // anyone, before others may have the core
constexpr microseconds LATE{200};    // a part that takes so much longer than others of its loop lost its core
constexpr milliseconds WINDOW{8};    // of work, in which more than a LOSS-th of the time must not be lost
constexpr int LOSS = 4;
constexpr milliseconds SHORT{80}, LONG{2000};  // for how long there are fewer threads: at first, and at most

inline void rest() {
  for (int i = 0; i < 16; i++)
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// What a caller knows of the cores that it gets.
struct Cores {
  int fewer = 0;         // threads than it may have, until then
  Time until, back;      // when it takes all again, and when it last did
  Span left{0};          // how long there were fewer
  Span worked{0}, lost{0};  // in this window; what it lost itself
  std::vector<Span> late;   // what it waited for each other thread

  int threads(int most, Time now) {
    if (fewer && until <= now) fewer = 0, back = now, worked = lost = Span(0);
    late.resize(most);
    return std::max(1, most - fewer);
  }

  // Fewer threads, if some lost too much: twice as long as last time, if all were there for less than that since.
  void judge(int most) {
    if (worked < WINDOW) return;
    int losers = lost > worked / LOSS;
    for (Span& each : late) losers += each > worked / LOSS, each = Span(0);
    if (losers) {
      const Time now = Clock::now();
      left = now - back < left ? std::min<Span>(2 * left, LONG) : SHORT;
      fewer = std::min(most - 1, fewer + losers), until = now + left;
    }
    worked = lost = Span(0);
  }
};

// Threads within one region of OpenMP, whose first one, the caller, gives them loops.
class Team {
 public:
  Team(int threads, Cores& cores) : cores_(cores), holds_(threads) {}

  // Calls call(what, begin, end) for parts of [0, n).
  void run(int64_t n, int64_t part, void (*call)(const void*, int64_t, int64_t), const void* what) {
    const uint64_t loop = (next_.load() >> 32) + 1;
    next_.store(loop << 32 | NONE);  // nobody claims while the loop is written
    call_ = call, what_ = what, n_ = n, part_ = part, done_ = 0;
    next_.store(loop << 32);
    const Time began = Clock::now();
    Time now = began;
    Span least = Span::max(), most{0};
    while (claim(0)) {
      const Span took = Clock::now() - now;
      least = std::min(least, took), most = std::max(most, took), now += took;
    }
    if (most > 4 * least + LATE) cores_.lost += most;
    wait(uint32_t(loop), (n + part - 1) / part);
    cores_.worked += Clock::now() - began;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  // Another thread's share, until the caller has no more loops.
  void work(int number) {
    Time idle = Clock::now();
    while (!over_) {
      if (claim(number)) {
        idle = Clock::now();
        continue;
      }
      rest();
      if (Clock::now() - idle > YIELDS) std::this_thread::yield();
    }
  }

  void end() { over_ = true; }

 private:
  static constexpr uint64_t NONE = 0xffffffff;
  // The number of the next part is in the lower half, that of the loop in the upper one: so a claim holds for the
  // loop that was read before it.
  std::atomic<uint64_t> next_{NONE};
  std::atomic<int64_t> done_{0}, n_{0}, part_{1};
  std::atomic<void (*)(const void*, int64_t, int64_t)> call_{nullptr};
  std::atomic<const void*> what_{nullptr};
  std::atomic<bool> over_{false};
  Cores& cores_;
  std::vector<std::atomic<uint32_t>> holds_;  // the loop of which each thread holds a part; 0: none
  std::mutex failing_;
  std::exception_ptr error_;

  // Does a part of the loop at hand; false: all are claimed.
  bool claim(int number) {
    uint64_t at = next_;
    while (true) {
      const int64_t n = n_, part = part_, begin = int64_t(at & NONE) * part;
      const auto call = call_.load();
      const void* what = what_;
      const bool none = (at & NONE) == NONE || begin >= n;
      holds_[number] = none ? 0 : uint32_t(at >> 32);
      if (none) return false;
      if (!next_.compare_exchange_weak(at, at + 1)) continue;
      try {
        call(what, begin, std::min(n, begin + part));
      } catch (...) {
        std::lock_guard<std::mutex> guard(failing_);
        error_ = std::current_exception();
      }
      holds_[number] = 0;
      done_++;
      return true;
    }
  }

  // Until all parts are done. What this takes longer than a moment is lost by those who hold one.
  void wait(uint32_t loop, int64_t parts) {
    if (done_ == parts) return;
    const Time began = Clock::now();
    Span told{0};
    while (done_ != parts) {
      rest();
      const Span waited = Clock::now() - began;
      if (waited < YIELDS) continue;
      for (size_t i = 1; i < holds_.size(); i++)
        if (holds_[i] == loop) cores_.late[i] += waited - told;
      told = waited;
      if (waited > LATE) std::this_thread::sleep_for(YIELDS);
      else std::this_thread::yield();
    }
  }
};

thread_local Team* current = nullptr;  // of a caller in its region
thread_local bool alone = false;       // in a part of a loop, or where there is one thread: loops are not divided

template <class T>
struct Within {  // a value for the life of this
  T& place;
  T before;
  Within(T& place, T value) : place(place), before(std::exchange(place, value)) {}
  ~Within() { place = before; }
};

// Calls f(), within which all loops are divided among the same threads.
template <class F>
void region(const F& f) {
  if (alone || current || omp_in_parallel()) return f();
  static thread_local Cores cores;
  const int most = at::get_num_threads(), threads = cores.threads(most, Clock::now());
  if (threads == 1) {
    Within within(alone, true);
    return f();
  }
  Team team(threads, cores);
  std::exception_ptr error;
  Time ended;
#pragma omp parallel num_threads(threads)
  {
    if (omp_get_thread_num() == 0) {
      Within<Team*> within(current, &team);
      try {
        f();
      } catch (...) {
        error = std::current_exception();
      }
      team.end();
      ended = Clock::now();
    } else {
      Within within(alone, true);
      team.work(omp_get_thread_num());
    }
  }
  const Span leaving = Clock::now() - ended;
  if (leaving > YIELDS) cores.lost += leaving;
  cores.judge(most);
  if (error) std::rethrow_exception(error);
}

// Calls f(begin, end) for parts of [0, n) of at least `grain`, as `at::parallel_for` does.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  const int64_t threads = at::get_num_threads();
  grain = std::max<int64_t>(grain, 1);
  if (alone || n <= grain || threads == 1) return f(0, n);
  region([&] {
    if (!current) return f(0, n);
    const int64_t share = (n + threads - 1) / threads, part = std::max(grain, (share + PARTS - 1) / PARTS);
    Within within(alone, true);
    current->run(
        n, part,
        [](const void* f, int64_t begin, int64_t end) { (*static_cast<const F*>(f))(begin, end); }, &f);
  });
}

}  // namespace team
}  // namespace

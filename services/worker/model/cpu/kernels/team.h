// Threads that run one step together: all go through the same phases and take each phase's tasks one by one from a common
// counter. A phase is over when its tasks are, not when everybody has come: a thread whose core is taken by another
// process holds up the step only if it has a task in hand, or claimed.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace orca {

class Team {
 public:
  // One thread's place in the step.
  class Member {
   public:
    Member(Team& team, int index) : index(index), team_(team) {}

    // Run task(0) .. task(count - 1), each once, by whoever is free; return when all have ended.
    template <class Task>
    void each(long count, Task&& task) {
      Phase& phase = team_.phases_[next_++];
      long mine = 0;
      for (long i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) task(i);
      if (mine) phase.done.fetch_add(mine, std::memory_order_release);
      team_.until([&] { return phase.done.load(std::memory_order_acquire) >= count; });
    }

    // The same, and each task is told the one that the same member runs next; `count` if there is none.
    template <class Task>
    void each_with_next(long count, Task&& task) {
      Phase& phase = team_.phases_[next_++];
      long mine = 0;
      const auto claim = [&] { return std::min(phase.next.fetch_add(1, std::memory_order_relaxed), count); };
      for (long i = claim(); i < count; ++mine) {
        const long next = claim();
        task(i, next);
        i = next;
      }
      if (mine) phase.done.fetch_add(mine, std::memory_order_release);
      team_.until([&] { return phase.done.load(std::memory_order_acquire) >= count; });
    }

    const int index;

   private:
    Team& team_;
    size_t next_ = 0;
  };

  // A member that does everything by itself.
  struct Alone {
    const int index;

    template <class Task>
    void each(long count, Task&& task) {
      for (long i = 0; i < count; ++i) task(i);
    }
    template <class Task>
    void each_with_next(long count, Task&& task) {
      for (long i = 0; i < count; ++i) task(i, i + 1);
    }
  };

  using Job = std::function<void(Member&)>;

  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
  }

  ~Team() {
    begin(0);
    start(nullptr);
    for (auto& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Wait until nobody is in the last step any more, and make ready for one of so many phases. What the job of the last
  // step looked at must not change before.
  void begin(size_t phases) {
    until([&] { return inside_.load(std::memory_order_acquire) == 0; });
    if (phases_.size() < phases) phases_ = std::vector<Phase>(phases);
    for (auto& phase : phases_) phase.next = phase.done = 0;
  }

  // Every member goes through the job; returns when its tasks are done, though a latecomer may still be looking for some.
  void run(Job job) {
    start(std::move(job));
    Member member(*this, 0);
    job_(member);
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }

 private:
  static constexpr int SPINS = 4000;
  struct alignas(64) Phase {
    std::atomic<long> next{0}, done{0};
  };

  template <class Condition>
  void until(Condition&& condition) {
    // Whoever has the task in hand may be waiting for this core.
    for (int spins = 0; !condition(); ++spins) spins < SPINS ? _mm_pause() : (void)sched_yield();
  }

  void start(Job job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = std::move(job);
      open_ = true;
      ++round_;
    }
    wake_.notify_all();
  }

  void serve(int index) {
    for (unsigned seen = 0;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return open_ && round_ != seen; });
        seen = round_;
        if (!job_) return;
        inside_.fetch_add(1, std::memory_order_relaxed);
      }
      Member member(*this, index);
      job_(member);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<Phase> phases_;
  alignas(64) std::atomic<int> inside_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  Job job_;
  bool open_ = false;  // a thread that wakes when the step is over stays out
  unsigned round_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace orca

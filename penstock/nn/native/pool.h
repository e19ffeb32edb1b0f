// A pool of threads that share the tasks of one loop at a time.
//
// Of n threads each takes every n-th task, one by one and in order, and then what others have not begun of theirs: so a
// thread that another process keeps from running takes fewer of them, and the caller never waits for one that has not begun.
// Hence which thread computes a task must not matter for its result.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace penstock {

// Between two looks at what is waited for.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How many threads take part, the calling one included; and how many would in a loop that begins here, which inside of a
// task is one.
int threads();
int threads_here();
void set_threads(int count);

// After the next loop of the calling thread, thread t will read memory from `from` + t * apart on: when there is nothing more
// to do in that loop, it asks for some. Any address is allowed.
void read_next(const void* from, int64_t apart);

void run_tasks(int tasks, void (*task)(void*, int), void* context);

// Whether the word is there and not 0. Others may set it at any time.
inline bool is_set(const int64_t* word) { return word && __atomic_load_n(word, __ATOMIC_RELAXED); }

// As long as it lives, loops of this thread leave out what they have not begun once the word is set. Then what they were to
// compute is of no use, so whoever has such a loop looks at the word after it. A null word changes nothing.
class Stoppable {
  public:
    explicit Stoppable(const int64_t* word);
    ~Stoppable();
    Stoppable(const Stoppable&) = delete;
    Stoppable& operator=(const Stoppable&) = delete;
};

// f(task) for every task in [0, tasks), in any order and on any thread; returns when all are done. A single task, and
// loops inside of tasks or beside another caller's loop, run on the calling thread alone.
template <class F>
void parallel_for(int tasks, F&& f) {
    using Function = std::remove_reference_t<F>;
    run_tasks(tasks, [](void* context, int task) { (*static_cast<Function*>(context))(task); },
              const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace penstock

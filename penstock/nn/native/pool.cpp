#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

// Between the kernels of a step a thread waits a few microseconds, between steps much longer: it spins through the
// former and sleeps through the latter.
constexpr auto SPIN = std::chrono::microseconds(60);
constexpr int LOOKS = 64;  // between two readings of the clock

// What a waiting thread asks for, of where it will read next, and how much of that between two looks. All caches of a core's own
// have room for so much, and it is seldom that a thread waits for longer.
constexpr int64_t ASKED = 256 << 10, AT_ONCE = 512;

// The gate of a loop: its number in the upper half, whether it may still be joined, and how many workers are in it.
constexpr uint64_t OPEN = 1u << 31;
constexpr uint64_t INSIDE = OPEN - 1;
constexpr int NUMBER = 32;

thread_local bool alone = false;                // whether this thread's loops are no business of others
thread_local bool inside = false;               // of a task that others may do beside this one
thread_local const int64_t* stop = nullptr;  // of the loops that this thread calls

struct Place {
    const char* from;
    int64_t apart;  // from a thread's place to the next one's
};
thread_local Place to_read{};  // for the next loop that this thread calls

// How many tasks of a share have begun in a loop, whose number is in the upper half; in a later one, none have.
struct alignas(64) Share {
    std::atomic<uint64_t> begun{0};

    int take(uint64_t loop) {
        uint64_t before = begun.load(std::memory_order_relaxed), now;
        do {
            now = before >> NUMBER == loop ? before : loop << NUMBER;
        } while (!begun.compare_exchange_weak(before, now + 1, std::memory_order_relaxed));
        return static_cast<int>(now & UINT32_MAX);
    }
};

struct Pool {
    alignas(64) std::atomic<uint64_t> gate{0};
    alignas(64) std::atomic<bool> busy{false};
    std::atomic<int> sleeping{0};
    std::atomic<int> count{1};
    std::atomic<const char*> ahead{nullptr};  // these two only say what to ask for, so they need not belong together
    std::atomic<int64_t> apart{0};
    std::vector<Share> shares{1};  // of each thread: the tasks whose number, divided by how many threads there are, leaves its own
    int tasks = 0;
    const int64_t* stops = nullptr;  // the caller's
    void (*task)(void*, int) = nullptr;
    void* context = nullptr;
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> workers;

    // First a thread's own share, and then of the others' what has not begun.
    void work(int own, uint64_t loop) {
        const int all = static_cast<int>(shares.size());
        inside = true;
        for (int i = 0; i < all; i++) {
            const int share = (own + i) % all;
            for (int t; !is_set(stops) && (t = shares[share].take(loop) * all + share) < tasks;) task(context, t);
        }
        inside = false;
    }

    // Waiting, a thread has memory on its way that it will read.
    class Asking {
      public:
        Asking(const Pool& pool, int thread) : at_(pool.ahead.load(std::memory_order_relaxed)) {
            if (!at_) return;
            at_ += thread * pool.apart.load(std::memory_order_relaxed);
            end_ = at_ + ASKED;
        }
        void relax() {
            if (at_ >= end_) return penstock::relax();
            for (const char* until = at_ + AT_ONCE; at_ < until; at_ += 64) __builtin_prefetch(at_, 0, 2);
        }

      private:
        const char *at_, *end_ = nullptr;
    };

    // Waits for a loop other than `seen` that may be joined.
    uint64_t await(uint64_t seen, int thread) {
        const auto fresh = [&](uint64_t now) { return (now & OPEN) && (now >> NUMBER) != seen; };
        Asking asking(*this, thread);
        const auto until = Clock::now() + SPIN;
        do {
            for (int i = 0; i < LOOKS; i++) {
                const uint64_t now = gate.load(std::memory_order_acquire);
                if (fresh(now)) return now;
                asking.relax();
            }
        } while (Clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        uint64_t now;
        wake.wait(lock, [&] { return fresh(now = gate.load()); });
        sleeping.fetch_sub(1);
        return now;
    }

    void serve(int thread) {
        for (uint64_t seen = 0;;) {
            uint64_t now = await(seen, thread);
            seen = now >> NUMBER;
            if (thread >= count.load(std::memory_order_relaxed)) continue;
            bool joined = false;
            while ((now & OPEN) && (now >> NUMBER) == seen && !joined) joined = gate.compare_exchange_weak(now, now + 1);
            if (!joined) continue;
            work(thread, seen);
            gate.fetch_sub(1, std::memory_order_release);
        }
    }

    void run(int wanted, void (*function)(void*, int), void* argument) {
        tasks = wanted;
        task = function;
        context = argument;
        stops = stop;
        if (to_read.from) {
            ahead.store(to_read.from, std::memory_order_relaxed);
            apart.store(to_read.apart, std::memory_order_relaxed);
            to_read = {};
        }
        const uint64_t loop = ((gate.load(std::memory_order_relaxed) >> NUMBER) + 1) & UINT32_MAX;
        gate.store(loop << NUMBER | OPEN);
        if (sleeping.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
        work(0, loop);
        gate.fetch_and(~OPEN, std::memory_order_acq_rel);
        Asking asking(*this, 0);
        for (int looks = 0; gate.load(std::memory_order_acquire) & INSIDE; looks++) {
            if (looks < 4096) {
                asking.relax();
            } else {
                std::this_thread::yield();  // to whoever keeps the last worker from running
            }
        }
    }

    void resize(int wanted) {
        while (static_cast<int>(workers.size()) + 1 < wanted) {
            const int thread = static_cast<int>(workers.size()) + 1;
            workers.emplace_back([this, thread] { serve(thread); });
        }
        shares = std::vector<Share>(wanted);
        count.store(wanted);
    }
};

Pool& pool() {
    static Pool* const only = new Pool;  // never destroyed: its threads run until the process ends
    return *only;
}

}  // namespace

Stoppable::Stoppable(const int64_t* word) { stop = word; }
Stoppable::~Stoppable() { stop = nullptr; }

int threads() { return pool().count.load(std::memory_order_relaxed); }
int threads_here() { return alone || inside ? 1 : threads(); }

void set_threads(int count) {
    Pool& p = pool();
    while (p.busy.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    p.resize(count < 1 ? 1 : count);
    p.busy.store(false, std::memory_order_release);
}

void read_next(const void* from, int64_t apart) { to_read = {static_cast<const char*>(from), apart}; }

void run_tasks(int tasks, void (*task)(void*, int), void* context) {
    Pool& p = pool();
    const bool together = tasks > 1 && !alone && threads() > 1 && !p.busy.exchange(true, std::memory_order_acquire);
    if (!together) {
        for (int i = 0; i < tasks && !is_set(stop); i++) task(context, i);
        return;
    }
    p.run(tasks, task, context);
    p.busy.store(false, std::memory_order_release);
}

}  // namespace penstock

extern "C" {
void penstock_set_threads(int64_t count) { penstock::set_threads(count); }
int64_t penstock_threads() { return penstock::threads(); }

// From now on the calling thread computes its loops alone: those of a step, which go on beside it, have the others.
void penstock_stay_alone() { penstock::alone = true; }
}

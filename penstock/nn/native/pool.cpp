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

// The gate of a loop: its number in the upper half, whether it may still be joined, and how many workers are in it.
constexpr uint64_t OPEN = 1u << 31;
constexpr uint64_t INSIDE = OPEN - 1;
constexpr int NUMBER = 32;

thread_local bool alone = false;                // whether this thread's loops are no business of others
thread_local bool inside = false;               // of a task that others may do beside this one
thread_local const int64_t* stop = nullptr;  // of the loops that this thread calls

struct Pool {
    alignas(64) std::atomic<uint64_t> gate{0};
    alignas(64) std::atomic<int> next{0};
    alignas(64) std::atomic<bool> busy{false};
    std::atomic<int> sleeping{0};
    std::atomic<int> count{1};
    int tasks = 0;
    const int64_t* stops = nullptr;  // the caller's
    void (*task)(void*, int) = nullptr;
    void* context = nullptr;
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> workers;

    void work() {
        inside = true;
        for (int i; !is_set(stops) && (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(context, i);
        inside = false;
    }

    // Waits for a loop other than `seen` that may be joined.
    uint64_t await(uint64_t seen) {
        const auto fresh = [&](uint64_t now) { return (now & OPEN) && (now >> NUMBER) != seen; };
        const auto until = Clock::now() + SPIN;
        do {
            for (int i = 0; i < LOOKS; i++) {
                const uint64_t now = gate.load(std::memory_order_acquire);
                if (fresh(now)) return now;
                relax();
            }
        } while (Clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex);
        sleeping.fetch_add(1);
        uint64_t now;
        wake.wait(lock, [&] { return fresh(now = gate.load()); });
        sleeping.fetch_sub(1);
        return now;
    }

    void serve(int worker) {
        for (uint64_t seen = 0;;) {
            uint64_t now = await(seen);
            seen = now >> NUMBER;
            if (worker + 1 >= count.load(std::memory_order_relaxed)) continue;
            bool joined = false;
            while ((now & OPEN) && (now >> NUMBER) == seen && !joined) joined = gate.compare_exchange_weak(now, now + 1);
            if (!joined) continue;
            work();
            gate.fetch_sub(1, std::memory_order_release);
        }
    }

    void run(int wanted, void (*function)(void*, int), void* argument) {
        tasks = wanted;
        task = function;
        context = argument;
        stops = stop;
        next.store(0, std::memory_order_relaxed);
        gate.store((((gate.load(std::memory_order_relaxed) >> NUMBER) + 1) << NUMBER) | OPEN);
        if (sleeping.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
        work();
        gate.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int looks = 0; gate.load(std::memory_order_acquire) & INSIDE; looks++) {
            if (looks < 4096) {
                relax();
            } else {
                std::this_thread::yield();  // to whoever keeps the last worker from running
            }
        }
    }

    void resize(int wanted) {
        while (static_cast<int>(workers.size()) + 1 < wanted) {
            const int worker = static_cast<int>(workers.size());
            workers.emplace_back([this, worker] { serve(worker); });
        }
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

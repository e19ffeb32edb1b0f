#include "ranks.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <numeric>

#include "pool.h"
#include "vec.h"

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t PIECE = 256 << 10;  // bytes that are exchanged at once: second caches have room for several
constexpr int64_t SHARE = 16 << 10;   // bytes of one that a thread handles in the time that waking another one takes
// Ranks that compute alike come within microseconds. One that is late may be waiting for this very core.
constexpr auto SPIN = std::chrono::microseconds(50);
constexpr auto YIELD = std::chrono::milliseconds(2);
constexpr int64_t LOOK = 100;  // ms, after which one that sleeps looks whether anybody has failed
constexpr int LOOKS = 64;      // between two readings of the clock

struct Place {
    Counter met;
    alignas(64) int64_t bytes[2]{};   // of the piece in each buffer
    std::atomic<int32_t> awaits{0};   // 1 + the rank that it has been waiting for so long that it sleeps
};

}  // namespace

struct Shared {
    alignas(64) std::atomic<int32_t> failed{0};  // 1 + a rank
    Counter plans;
};

struct Ranks {
    Shared* shared;
    Place* places;
    char* buffers;
    int64_t rank, size, parent;
    uint32_t meetings = 0;
    uint32_t plans = 0;

    char* buffer(int64_t rank) const { return buffers + (rank * 2 + (meetings & 1)) * PIECE; }
};

struct PipeMemory {
    Counter put, taken;  // pieces
    alignas(64) int64_t bytes[2]{};
};

struct Pipe {
    Ranks* ranks;  // by which it is known who has failed
    PipeMemory* memory;
    char* buffers;
    int32_t other;  // 1 + the rank at the other end
    uint32_t pieces = 0;

    char* buffer() const { return buffers + (pieces & 1) * PIECE; }
};

namespace {

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec patience{LOOK / 1000, LOOK % 1000 * 1000000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &patience, nullptr, 0);
#else
    const timespec moment{0, 50000};
    if (word.load() == seen) nanosleep(&moment, nullptr);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void count_up(Counter& counter, uint32_t to) {
    counter.count.store(to);
    if (counter.sleepers.load()) wake_all(counter.count);
}

}  // namespace

void ring(Counter& counter) {
    counter.count.fetch_add(1);
    if (counter.sleepers.load()) wake_all(counter.count);
}

int64_t wait_until(Ranks& ranks, Counter& counter, bool (*there)(void*), void* context, int32_t sleeps) {
    const auto began = Clock::now();
    for (auto now = began; now < began + SPIN; now = Clock::now())
        for (int i = 0; i < LOOKS; i++) {
            if (there(context)) return MET;
            relax();
        }
    for (auto now = began; now < began + YIELD; now = Clock::now()) {
        if (there(context)) return MET;
        sched_yield();
    }
    std::atomic<int32_t>& awaits = ranks.places[ranks.rank].awaits;
    int64_t status = MET;
    awaits.store(sleeps);
    counter.sleepers.fetch_add(1);
    for (uint32_t seen; !there(context); sleep_on(counter.count, seen)) {
        seen = counter.count.load();
        if ((status = ranks.shared->failed.load()) != MET) break;
        if (ranks.parent && getppid() != ranks.parent) {
            status = ORPHANED;
            break;
        }
        if (there(context)) break;
    }
    counter.sleepers.fetch_sub(1);
    awaits.store(0);
    return status;
}

namespace {

// Until a counter has come to `wanted`.
int64_t await(Ranks& ranks, Counter& counter, uint32_t wanted, int32_t sleeps) {
    return wait_until(ranks, counter, sleeps, [&] {
        return static_cast<int32_t>(counter.count.load(std::memory_order_acquire) - wanted) >= 0;
    });
}

// What all ranks have put into their buffers, so many bytes, may be read.
int64_t meet(Ranks& ranks, int64_t bytes) {
    Place& own = ranks.places[ranks.rank];
    const int turn = ranks.meetings & 1;
    own.bytes[turn] = bytes;
    count_up(own.met, ranks.meetings + 1);
    for (int64_t r = 0; r < ranks.size; r++) {
        if (r == ranks.rank) continue;
        if (const int64_t status = await(ranks, ranks.places[r].met, ranks.meetings + 1, static_cast<int32_t>(r + 1)))
            return status;
        if (ranks.places[r].bytes[turn] != bytes) return DISAGREE;
    }
    return ranks.shared->failed.load(std::memory_order_relaxed);
}

// f(first, end) for parts of so many bytes, by several threads where that is worth it.
template <class F>
void each_share(int64_t bytes, F&& f) {
    const int64_t parts = (bytes + SHARE - 1) / SHARE;
    if (parts <= 1) return f(0, bytes);
    parallel_for(static_cast<int>(parts), [&](int i) { f(i * SHARE, std::min(bytes, (i + 1) * SHARE)); });
}

// Sums [first, end) bytes of all buffers.
template <class E>
void sum(const Ranks& ranks, char* x, int64_t first, int64_t end) {
    const int64_t until = end / static_cast<int64_t>(sizeof(E));
    int64_t i = first / static_cast<int64_t>(sizeof(E));
    const auto of = [&](int64_t r) { return reinterpret_cast<const E*>(ranks.buffer(r)); };
    E* out = reinterpret_cast<E*>(x);
    for (; i + LANES <= until; i += LANES) {
        f32x16 total = load(of(0) + i);
        for (int64_t r = 1; r < ranks.size; r++) total = total + load(of(r) + i);
        store(out + i, total);
    }
    if (i < until) {
        const int rest = static_cast<int>(until - i);
        f32x16 total = load(of(0) + i, rest);
        for (int64_t r = 1; r < ranks.size; r++) total = total + load(of(r) + i, rest);
        store(out + i, total, rest);
    }
}

void copy(char* to, const char* from, int64_t bytes) {
    each_share(bytes, [&](int64_t first, int64_t end) { std::memcpy(to + first, from + first, end - first); });
}

int64_t place_bytes(int64_t size) { return sizeof(Shared) + size * sizeof(Place); }

}  // namespace

int64_t all_reduce(Ranks& ranks, bool is_bf16, void* x, int64_t count) {
    const int64_t bytes = count * (is_bf16 ? sizeof(bf16) : sizeof(float));
    int64_t at = 0;
    do {
        char* here = static_cast<char*>(x) + at;
        const int64_t piece = std::min(PIECE, bytes - at);
        char* own = ranks.buffer(ranks.rank);
        copy(own, here, piece);
        if (const int64_t status = meet(ranks, piece)) return status;
        each_share(piece, [&](int64_t first, int64_t end) {
            is_bf16 ? sum<bf16>(ranks, here, first, end) : sum<float>(ranks, here, first, end);
        });
        ranks.meetings++;
        at += PIECE;
    } while (at < bytes);
    return MET;
}

int64_t all_gather(Ranks& ranks, const void* x, int64_t bytes, void* out) {
    int64_t at = 0;
    do {
        const int64_t piece = std::min(PIECE, bytes - at);
        std::memcpy(ranks.buffer(ranks.rank), static_cast<const char*>(x) + at, piece);
        if (const int64_t status = meet(ranks, piece)) return status;
        for (int64_t r = 0; r < ranks.size; r++)
            std::memcpy(static_cast<char*>(out) + r * bytes + at, ranks.buffer(r), piece);
        ranks.meetings++;
        at += PIECE;
    } while (at < bytes);
    return MET;
}

// Of a piece of what goes to all: how much each rank has for each is in front of it.
constexpr int64_t MOST_RANKS = 64;
constexpr int64_t TABLE = MOST_RANKS * sizeof(int64_t), STREAM = PIECE - TABLE;

// The own bytes from `at` on, as far as a piece has room.
void put_stream(Ranks& ranks, const char* x, int64_t at, int64_t total) {
    if (at < total) copy(ranks.buffer(ranks.rank) + TABLE, x + at, std::min(STREAM, total - at));
}

int64_t offer(Ranks& ranks, const int64_t* sizes, const void* x, int64_t* come) {
    std::memcpy(ranks.buffer(ranks.rank), sizes, ranks.size * sizeof(int64_t));
    put_stream(ranks, static_cast<const char*>(x), 0, std::accumulate(sizes, sizes + ranks.size, int64_t{0}));
    if (const int64_t status = meet(ranks, PIECE)) return status;
    for (int64_t r = 0; r < ranks.size; r++)
        std::memcpy(come + r, ranks.buffer(r) + ranks.rank * sizeof(int64_t), sizeof(int64_t));
    return MET;
}

int64_t take(Ranks& ranks, const int64_t* sizes, const void* x, void* out) {
    struct Stream {
        int64_t first, end, total, to;  // what of it is for this rank, and where that goes
    } streams[MOST_RANKS];
    int64_t longest = 0, to = 0;
    for (int64_t r = 0; r < ranks.size; r++) {
        int64_t of[MOST_RANKS];
        std::memcpy(of, ranks.buffer(r), ranks.size * sizeof(int64_t));
        const int64_t first = std::accumulate(of, of + ranks.rank, int64_t{0}), end = first + of[ranks.rank];
        streams[r] = {first, end, std::accumulate(of, of + ranks.size, int64_t{0}), to};
        to += end - first;
        longest = std::max(longest, streams[r].total);
    }
    const int64_t own = std::accumulate(sizes, sizes + ranks.size, int64_t{0});
    for (int64_t at = 0;;) {
        for (int64_t r = 0; r < ranks.size; r++) {
            const Stream& stream = streams[r];
            const int64_t first = std::max(stream.first, at), end = std::min(stream.end, at + STREAM);
            if (first < end)
                copy(static_cast<char*>(out) + stream.to + first - stream.first, ranks.buffer(r) + TABLE + first - at,
                     end - first);
        }
        ranks.meetings++;
        if ((at += STREAM) >= longest) return MET;
        put_stream(ranks, static_cast<const char*>(x), at, own);
        if (const int64_t status = meet(ranks, PIECE)) return status;
    }
}

int64_t send(Pipe& pipe, const void* x, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += PIECE, pipe.pieces++) {
        const int64_t piece = std::min(PIECE, bytes - at);
        if (const int64_t status = await(*pipe.ranks, pipe.memory->taken, pipe.pieces - 1, pipe.other)) return status;
        copy(pipe.buffer(), static_cast<const char*>(x) + at, piece);
        pipe.memory->bytes[pipe.pieces & 1] = piece;
        count_up(pipe.memory->put, pipe.pieces + 1);
    }
    return MET;
}

int64_t receive(Pipe& pipe, void* x, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += PIECE, pipe.pieces++) {
        const int64_t piece = std::min(PIECE, bytes - at);
        if (const int64_t status = await(*pipe.ranks, pipe.memory->put, pipe.pieces + 1, pipe.other)) return status;
        if (pipe.memory->bytes[pipe.pieces & 1] != piece) return DISAGREE;
        copy(static_cast<char*>(x) + at, pipe.buffer(), piece);
        count_up(pipe.memory->taken, pipe.pieces + 1);
    }
    return MET;
}

}  // namespace penstock

extern "C" {

using namespace penstock;

// Of the memory that so many ranks share. It begins as zeros.
int64_t penstock_ranks_bytes(int64_t size) { return place_bytes(size) + size * 2 * PIECE; }

// A rank's own view of that memory; 0 is no parent. It is never freed: a thread may be in it until the process ends.
int64_t penstock_ranks_open(void* memory, int64_t rank, int64_t size, int64_t parent) {
    char* base = static_cast<char*>(memory);
    auto* places = reinterpret_cast<Place*>(base + sizeof(Shared));
    return reinterpret_cast<int64_t>(
        new Ranks{reinterpret_cast<Shared*>(base), places, base + place_bytes(size), rank, size, parent});
}

int64_t penstock_all_reduce(Ranks* ranks, int64_t is_bf16, void* x, int64_t count) {
    return all_reduce(*ranks, is_bf16, x, count);
}
int64_t penstock_all_gather(Ranks* ranks, const void* x, int64_t bytes, void* out) {
    return all_gather(*ranks, x, bytes, out);
}

// The others may read the next plan.
void penstock_plan_post(Ranks* ranks) { count_up(ranks->shared->plans, ++ranks->plans); }

// Wait for the next plan.
int64_t penstock_plan_await(Ranks* ranks) {
    if (const int64_t status = await(*ranks, ranks->shared->plans, ranks->plans + 1, 0)) return status;
    ranks->plans++;
    return MET;
}

// Somebody begins step `number`, counted from 1.
void penstock_step_begin(Ranks* ranks, int64_t number) {
    Counter& steps = ranks->shared->plans;
    const uint32_t wanted = static_cast<uint32_t>(number);
    uint32_t seen = steps.count.load();
    while (static_cast<int32_t>(seen - wanted) < 0 && !steps.count.compare_exchange_weak(seen, wanted)) {
    }
    if (steps.sleepers.load()) wake_all(steps.count);
}

// Wait until somebody has begun step `number`.
int64_t penstock_step_await(Ranks* ranks, int64_t number) {
    return await(*ranks, ranks->shared->plans, static_cast<uint32_t>(number), 0);
}

// All-to-all: `sizes[r]` bytes of x, one rank's after the other's, go to rank r. What each has for this one is told at
// once, in `come`, and is copied to `out` then. A meeting is enough where nobody has more than a piece.
int64_t penstock_all_to_all_offer(Ranks* ranks, const int64_t* sizes, const void* x, int64_t* come) {
    return offer(*ranks, sizes, x, come);
}
int64_t penstock_all_to_all_take(Ranks* ranks, const int64_t* sizes, const void* x, void* out) {
    return take(*ranks, sizes, x, out);
}

// A rank has failed: nobody is to wait for it.
void penstock_ranks_fail(Ranks* ranks, int64_t rank) {
    int32_t none = 0;
    ranks->shared->failed.compare_exchange_strong(none, static_cast<int32_t>(rank + 1));
    wake_all(ranks->shared->plans.count);
    for (int64_t r = 0; r < ranks->size; r++) wake_all(ranks->places[r].met.count);
}

// 1 + the rank that a rank has been waiting for so long that it sleeps, or 0.
int64_t penstock_ranks_awaits(const Ranks* ranks, int64_t rank) { return ranks->places[rank].awaits.load(); }

// Of the memory of a pipe. It begins as zeros.
int64_t penstock_pipe_bytes() { return sizeof(PipeMemory) + 2 * PIECE; }

// One end of a pipe, whose other one another rank has; never freed, as ranks are not.
int64_t penstock_pipe_open(void* memory, Ranks* ranks, int64_t other) {
    char* base = static_cast<char*>(memory);
    auto* shared = reinterpret_cast<PipeMemory*>(base);
    return reinterpret_cast<int64_t>(new Pipe{ranks, shared, base + sizeof(PipeMemory), static_cast<int32_t>(other + 1)});
}

int64_t penstock_send(Pipe* pipe, const void* x, int64_t bytes) { return send(*pipe, x, bytes); }
int64_t penstock_receive(Pipe* pipe, void* x, int64_t bytes) { return receive(*pipe, x, bytes); }
}

// The ranks of one model: processes that compute it together, and exchange what they have through memory that they share.
//
// Every rank calls the same functions in the same order. A call has all ranks meet: each puts a piece into its own place,
// says that it is there, and waits until the others have. There are two places a rank, used in turns: whoever is at the
// next meeting has read what was exchanged at the last one. An exchange of nothing is a meeting too: whoever comes out of
// it knows how far all others are, as rank 0 does at the end of a step of which nothing but K and V is wanted.
//
// A rank that does not come is told by whoever watches it (`penstock_ranks_fail`). Then, and when a rank's parent has
// gone, every wait ends, and so does every later one.
//
// Beside that two ranks may have a pipe, through which one sends what the other receives.
#pragma once

#include <atomic>
#include <cstdint>

namespace penstock {

struct Ranks;

// 0 is success.
enum Meeting : int64_t { MET = 0, DISAGREE = -1, ORPHANED = -2 };  // and 1 + the rank that failed

// x[count] becomes the sum of all ranks' x, summed up in float32 in the order of ranks: the same bits on each.
int64_t all_reduce(Ranks& ranks, bool is_bf16, void* x, int64_t count);

// out[size][bytes] is what each rank has in x[bytes].
int64_t all_gather(Ranks& ranks, const void* x, int64_t bytes, void* out);

// Counts something up, for others to wait for.
struct alignas(64) Counter {
    std::atomic<uint32_t> count{0};
    std::atomic<uint32_t> sleepers{0};
};

// One more.
void ring(Counter& counter);

// Until `there(context)`, which may change whenever the counter does. `sleeps`: 1 + the rank that is waited for, is said
// when that takes long.
int64_t wait_until(Ranks& ranks, Counter& counter, bool (*there)(void*), void* context, int32_t sleeps);
template <class There>
int64_t wait_until(Ranks& ranks, Counter& counter, int32_t sleeps, const There& there) {
    const auto call = [](void* f) -> bool { return (*static_cast<const There*>(f))(); };
    return wait_until(ranks, counter, call, const_cast<There*>(&there), sleeps);
}

// One end of a pipe. Both send or receive the same numbers of bytes, in the same order. A sender is ahead by two pieces at
// most.
struct Pipe;
int64_t send(Pipe& pipe, const void* x, int64_t bytes);
int64_t receive(Pipe& pipe, void* x, int64_t bytes);

}  // namespace penstock

// Ranks that attend for each other: of a long context one rank attends to some splits itself, and posts the others, of
// which another rank, the helper, has copies of K and V. Whoever of the two comes to a split first computes it: the helper
// when it would only wait for other ranks, the owner when it has nothing else left. What comes of a split is the same bits
// whoever computes it, and splits are added up in their order by the owner.
//
// The ranks have an area of shared memory each. An owner writes there what it posts, its queries, and where sums belong; a
// helper takes posted splits, writes sums, and rings the owner's bell.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "ranks.h"

namespace penstock {

constexpr int64_t MOST_SPANS = 64, MOST_POSTED = 4096;  // of one call; what is more the owner computes
constexpr int64_t AREA_BYTES = 128 << 20;                // the same of queries and sums; found when it is used

enum Phase : uint64_t { CLOSED = 0, OPEN = 1, TAKEN = 2, DONE = 3 };

// Places in the area are bytes from its begin.
struct PostedSpan {
    int64_t rows, start;  // as `Span`
    int64_t q, ids;       // [rows, heads, dim], and of each block the helper's copy, where it has one
};

struct PostedSplit {
    std::atomic<uint64_t> state;  // number of the call, who helps, and a phase
    int64_t span, head, heads, split;
    int64_t sums;
};

struct Area {
    Counter bell;
    alignas(64) std::atomic<uint32_t> passed;  // meetings before which this rank has attended
    alignas(64) std::atomic<int64_t> posted;
    int64_t layer, heads, kv_heads;  // of the call; K and V are shared by heads / kv_heads heads
    float scale;
    PostedSpan spans[MOST_SPANS];
    PostedSplit splits[MOST_POSTED];
};

constexpr int64_t AREA_DATA = (sizeof(Area) + 63) / 64 * 64;  // where queries and sums begin

// Splits [first, end) of a call's span, of which the rank `helper` has copies: blocks[i] is that of the block
// first * SPLIT_BLOCKS + i.
struct Part {
    int64_t span, first, end, helper;
    const int64_t* blocks;
};

// A rank among those that help each other.
struct Helpers {
    Ranks* ranks;  // by which it is known who has failed: of this one number * stride + offset, and of others likewise
    char* memory;
    int64_t number, size, stride, offset;
    std::vector<Cache> copies;  // that this rank has for others, of each layer
    uint64_t calls = 0;

    Area& area(int64_t who) const { return *reinterpret_cast<Area*>(memory + who * AREA_BYTES); }
};

inline uint64_t state_of(uint64_t call, int64_t helper, Phase phase) {
    return call << 16 | static_cast<uint64_t>(helper) << 2 | phase;
}
inline Phase phase_of(uint64_t state) { return static_cast<Phase>(state & 3); }
inline int64_t helper_of(uint64_t state) { return static_cast<int64_t>(state >> 2 & 0x3fff); }

// Whether a split that is open is the caller's now.
inline bool claim(PostedSplit& split, uint64_t open) {
    return split.state.compare_exchange_strong(open, (open & ~uint64_t{3}) | TAKEN);
}

// As `attention` without a window, where others have parts of it. Returns a `Meeting`; `helped` is how many splits others
// have computed.
int64_t attention_with(Helpers& helpers, int64_t layer, const Part* parts, int64_t count, const AttentionBatch& batch,
                       const Cache& cache, const void* q, int64_t q_stride, void* out, float scale, int64_t* helped);

// A split that another rank has posted, over the copies of its layer.
void attend_for(const Area& area, const PostedSplit& split, const Cache& copies);

}  // namespace penstock

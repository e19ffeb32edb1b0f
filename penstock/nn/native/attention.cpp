#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "attention_tile.h"
#include "helpers.h"
#include "pool.h"

namespace penstock {
namespace {

constexpr int TILE = 256;         // queries (row and head) for which a block of K and V is packed once
constexpr int SHARING = 1024;     // the same where all heads share K and V: those of a few rows of many heads
constexpr int64_t APART = 8 << 20;  // floats of sums up to which threads share a long context for many queries
constexpr int64_t PACKING = 6;    // queries that reading and packing a block costs as much as
constexpr int64_t ALONE = 64;     // queries times blocks that a thread computes before another is worth waking

struct Work {
    std::vector<Item> items;  // the longest first
    std::vector<Shared> shared;
    int64_t cost = 0, floats = 0;  // all items'; of the sums that shared tiles leave
};

int64_t most_rows_of(int64_t group, bool latent) { return std::max<int64_t>(1, (latent ? SHARING : TILE) / group); }

// Whether so many queries that share K and V leave their sums of each split, so that no block is read twice.
bool is_apart(int64_t splits, int64_t queries, int64_t width) { return splits * Sums::floats(queries, width) <= APART; }

// In how many parts heads that share K and V are computed: in one, which reads each block once, unless threads had nothing
// to do then.
int64_t parts_of(const AttentionBatch& batch, int64_t width) {
    const int64_t most_rows = most_rows_of(batch.heads, true);
    int64_t tiles = 0, parts = 1;
    for (int64_t s = 0; s < batch.count; s++) {
        const Span& span = batch.spans[s];
        const int64_t splits = ceil_div(span.start + span.rows, BLOCK_TOKENS * SPLIT_BLOCKS);
        const bool apart = is_apart(splits, std::min(span.rows, most_rows) * batch.heads, width);
        tiles += ceil_div(span.rows, most_rows) * (apart ? splits : 1);
    }
    while (tiles * parts < threads() && batch.heads % (2 * parts) == 0) parts *= 2;
    return parts;
}

// Who computes what does not change what is computed, so it may depend on the number of threads.
void plan(const AttentionBatch& batch, int64_t kv_heads, int64_t window, int64_t group, int64_t width, bool latent,
          Work& work) {
    work.items.clear();
    work.shared.clear();
    work.cost = work.floats = 0;
    const int64_t most_rows = most_rows_of(group, latent);
    // heads that follow one another are neighbours in the cache: few rows read them together if there is enough to share
    const int64_t together = std::clamp<int64_t>(batch.count * kv_heads / (2 * threads()), 1, kv_heads);
    for (int64_t s = 0; s < batch.count; s++) {
        const Span& span = batch.spans[s];
        for (int64_t row = 0; row < span.rows; row += most_rows) {
            const int64_t rows = std::min(most_rows, span.rows - row), first = span.start + row, queries = rows * group;
            const int64_t to = ceil_div(first + rows, BLOCK_TOKENS);
            const int64_t from = window ? std::max<int64_t>(0, first - window + 1) / BLOCK_TOKENS : 0;
            const int64_t split_from = from / SPLIT_BLOCKS, splits = ceil_div(to, SPLIT_BLOCKS) - split_from;
            const bool few = queries <= FEW;
            const bool apart = splits > 1 && (few || (latent && is_apart(splits, queries, width)));
            const int64_t step = apart ? 1 : splits, heads = few ? together : 1;
            for (int64_t head = 0; head < kv_heads; head += heads) {
                const int64_t own = std::min(heads, kv_heads - head);
                if (apart) {
                    work.shared.push_back({work.floats, split_from, splits});
                    work.floats += splits * own * Sums::floats(queries, width);
                }
                for (int64_t split = split_from; split < split_from + splits; split += step) {
                    const int64_t end = std::min(to, (split + step) * SPLIT_BLOCKS);
                    const int64_t cost = (end - std::max(from, split * SPLIT_BLOCKS)) * own * (queries + PACKING);
                    const int64_t shared = apart ? static_cast<int64_t>(work.shared.size()) - 1 : -1;
                    work.cost += cost;
                    work.items.push_back({cost, s, row, rows, head, own, split, split + step, shared, nullptr});
                }
            }
        }
    }
    std::sort(work.items.begin(), work.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

// Memory that a thread keeps, from the start of a cache line.
float* take(std::vector<float>& memory, int64_t floats) {
    if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (-address & 63) / 4;
}

// One more split of a tile has its sums, at `left`; with the last of them they are added up.
template <class E, class C>
void finish(AttentionTile<E, C>& tile, const Call<E>& call, const Item& item, const Shared& shared, float* left,
            std::atomic<int64_t>& missing) {
    if (missing.fetch_sub(1) > 1) return;
    const int64_t queries = item.rows * call.group, sums = item.heads * Sums::floats(queries, call.width);
    for (int64_t split = 1; split < shared.splits; split++)
        for (int64_t h = 0; h < item.heads; h++)
            for (int64_t i = 0; i < queries; i++)
                merge(tile.at(left, h), tile.at(left + split * sums, h), i, call.width);
    tile.write(left);
}

// Working memory of a thread, and what a tile sums up in: all splits, and one.
template <class E, class C>
struct Room {
    float *total, *part, *scratch;

    Room(const Call<E>& call, const Item& item) {
        static thread_local std::vector<float> memory;
        const int64_t queries = item.rows * call.group, sums = item.heads * Sums::floats(queries, call.width);
        total = take(memory, 2 * sums + AttentionTile<E, C>::floats(call, queries, item.heads));
        part = total + sums, scratch = total + 2 * sums;
    }
};

template <class E, class C>
void compute(const Call<E>& call, const Item& item, const Work& work, float* left, std::atomic<int64_t>* missing) {
    const Room<E, C> room(call, item);
    AttentionTile<E, C> tile(call, item, room.scratch);
    if (item.shared < 0) {
        tile.sum(room.total, room.part);
        tile.write(room.total);
        return;
    }
    const Shared& shared = work.shared[item.shared];
    float* first = left + shared.place;
    const int64_t sums = item.heads * tile.sums_size();
    tile.sum(first + (item.from - shared.first) * sums, room.total);
    finish(tile, call, item, shared, first, missing[item.shared]);
}

// Of a call that others have parts of.
struct Posting {
    Helpers& helpers;
    int64_t layer;
    const Part* parts;
    int64_t count;
    int64_t helped = 0;

    const Part* of(const Item& item) const {
        for (const Part* part = parts; part < parts + count; part++)
            if (part->span == item.span && part->first <= item.from && item.to <= part->end) return part;
        return nullptr;
    }
};

int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Have others take splits that they have copies of. Those come last, in the order in which others do not take them.
template <class E>
void post(Posting& posting, const Call<E>& call, Work& work) {
    Area& area = posting.helpers.area(posting.helpers.number);
    char* base = reinterpret_cast<char*>(&area);
    const int64_t number = posting.helpers.calls++, dim = call.cache.dim, heads = call.batch.heads;
    area.layer = posting.layer, area.heads = heads, area.kv_heads = call.cache.kv_heads, area.scale = call.scale;
    const auto lent = std::stable_partition(work.items.begin(), work.items.end(), [&](const Item& item) {
        return item.shared < 0 || item.to > item.from + 1 || !posting.of(item);
    });
    int64_t posted = 0, at = AREA_DATA, spans = 0;
    std::vector<int64_t> place(call.batch.count, -1);  // of a span among those that are posted
    for (auto item = work.items.end(); item != lent && posted < MOST_POSTED;) {
        --item;
        const Part& part = *posting.of(*item);
        const Span& span = call.batch.spans[item->span];
        const int64_t queries = whole_lines(span.rows * heads * dim * sizeof(E)), before = part.first * SPLIT_BLOCKS;
        const int64_t ids = whole_lines(part.end * SPLIT_BLOCKS * sizeof(int64_t));
        const int64_t sums = whole_lines(item->heads * Sums::floats(item->rows * call.group, call.width) * sizeof(float));
        const bool is_new = place[item->span] < 0;
        if (item->row > 0 || item->rows < span.rows || part.end * SPLIT_BLOCKS * BLOCK_TOKENS > span.start) continue;
        if (at + sums + (is_new ? queries + ids : 0) > AREA_BYTES || (is_new && spans == MOST_SPANS)) continue;
        if (is_new) {
            for (int64_t row = 0; row < span.rows; row++)
                std::memcpy(base + at + row * heads * dim * sizeof(E), call.q + (span.row + row) * call.q_stride,
                            heads * dim * sizeof(E));
            auto* to = reinterpret_cast<int64_t*>(base + at + queries);
            std::fill(to, to + before, 0);
            std::copy(part.blocks, part.blocks + part.end * SPLIT_BLOCKS - before, to + before);
            area.spans[spans] = {span.rows, span.start, at, at + queries};
            place[item->span] = spans++;
            at += queries + ids;
        }
        PostedSplit& split = area.splits[posted++];
        split.span = place[item->span], split.head = item->head, split.heads = item->heads, split.split = item->from;
        split.sums = at;
        at += sums;
        item->posted = &split;
        split.state.store(state_of(number, part.helper, OPEN));
    }
    area.posted.store(posted);
    for (int64_t who = 0; who < posting.helpers.size; who++)
        if (who != posting.helpers.number) ring(posting.helpers.area(who).bell);
}

// Wait for the splits that others have taken, and add them up.
template <class E, class C>
int64_t collect(Posting& posting, const Call<E>& call, const Work& work, const std::vector<char>& own, float* left,
                std::atomic<int64_t>* missing) {
    Helpers& helpers = posting.helpers;
    Area& area = helpers.area(helpers.number);
    int64_t status = MET;
    for (size_t i = 0; i < work.items.size(); i++) {
        const Item& item = work.items[i];
        if (!item.posted || own[i]) continue;
        const uint64_t state = item.posted->state.load();
        if (phase_of(state) == OPEN && claim(*item.posted, state)) continue;  // the step is to end
        const int64_t who = helper_of(state) * helpers.stride + helpers.offset + 1;
        const auto done = [&] { return phase_of(item.posted->state.load()) == DONE; };
        if ((status = wait_until(*helpers.ranks, area.bell, static_cast<int32_t>(who), done)) != MET) break;
        posting.helped++;
        const Shared& shared = work.shared[item.shared];
        const int64_t sums = item.heads * Sums::floats(item.rows * call.group, call.width);
        float* first = left + shared.place;
        std::memcpy(first + (item.from - shared.first) * sums, reinterpret_cast<char*>(&area) + item.posted->sums,
                    sums * sizeof(float));
        const Room<E, C> room(call, item);
        AttentionTile<E, C> tile(call, item, room.scratch);
        finish(tile, call, item, shared, first, missing[item.shared]);
    }
    area.posted.store(0);
    return status;
}

// The widths of a query and of sums, filled up to whole vectors.
int64_t whole_vectors(int64_t width) { return ceil_div(width, 16) * 16; }

template <class E, class C>
int64_t run(const AttentionBatch& batch, Cache cache, const void* q, int64_t q_stride, void* out, float scale,
            int64_t window, Posting* posting) {
    static thread_local Work kept;
    static thread_local std::vector<float> memory;
    const int64_t q_width = whole_vectors(cache.dim), width = whole_vectors(cache.value_dim);
    const bool latent = cache.kind == 0;
    if (latent) {  // each part of the heads as if it had K and V of its own
        cache.kv_heads = parts_of(batch, width);
        cache.head = cache.scale_head = 0;
    }
    const int64_t group = batch.heads / cache.kv_heads;
    plan(batch, cache.kv_heads, window, group, width, latent, kept);
    const Work& work = kept;
    float* left = take(memory, work.floats);
    std::unique_ptr<std::atomic<int64_t>[]> missing(new std::atomic<int64_t>[work.shared.size()]);
    for (size_t i = 0; i < work.shared.size(); i++) missing[i] = work.shared[i].splits;
    const Call<E> call{batch,  cache, static_cast<const E*>(q), q_stride, static_cast<E*>(out), scale * LOG2_E,
                       window, group, q_width, width};
    if (posting) post(*posting, call, kept);
    const int count = static_cast<int>(work.items.size());
    std::vector<char> own(posting ? count : 0);  // of what is posted, what this rank has taken back
    auto task = [&](int index) {
        const Item& item = work.items[index];
        if (item.posted) {
            const uint64_t state = item.posted->state.load();
            if (phase_of(state) != OPEN || !claim(*item.posted, state)) return;
            own[index] = 1;
        }
        compute<E, C>(call, item, work, left, missing.get());
    };
    if (work.cost < ALONE)
        for (int i = 0; i < count; i++) task(i);
    else
        parallel_for(count, task);
    return posting ? collect<E, C>(*posting, call, work, own, left, missing.get()) : MET;
}

template <class E, class C>
void help_with(const Area& area, const PostedSplit& split, Cache cache) {
    char* base = reinterpret_cast<char*>(const_cast<Area*>(&area));
    const PostedSpan& posted = area.spans[split.span];
    if (cache.kind == 0) cache.head = cache.scale_head = 0;
    cache.kv_heads = area.kv_heads;
    const Span span{0, posted.rows, posted.start, -1};
    const AttentionBatch batch{&span, 1, reinterpret_cast<const int64_t*>(base + posted.ids), area.heads};
    const Call<E> call{batch, cache, reinterpret_cast<const E*>(base + posted.q), area.heads * cache.dim, nullptr,
                       area.scale, 0, area.heads / area.kv_heads, whole_vectors(cache.dim), whole_vectors(cache.value_dim)};
    const Item item{0, 0, 0, posted.rows, split.head, split.heads, split.split, split.split + 1, 0, nullptr};
    const Room<E, C> room(call, item);
    AttentionTile<E, C> tile(call, item, room.scratch);
    tile.sum(reinterpret_cast<float*>(base + split.sums), room.part);
}

}  // namespace

void attention(const AttentionBatch& batch, const Cache& cache, const void* q, int64_t q_stride, void* out, float scale,
               int64_t window) {
    const auto compute = cache.is_bf16 ? (cache.scales ? run<bf16, int8_t> : run<bf16, bf16>)
                                       : (cache.scales ? run<float, int8_t> : run<float, float>);
    compute(batch, cache, q, q_stride, out, scale, window, nullptr);
}

int64_t attention_with(Helpers& helpers, int64_t layer, const Part* parts, int64_t count, const AttentionBatch& batch,
                       const Cache& cache, const void* q, int64_t q_stride, void* out, float scale, int64_t* helped) {
    const auto compute = cache.is_bf16 ? (cache.scales ? run<bf16, int8_t> : run<bf16, bf16>)
                                       : (cache.scales ? run<float, int8_t> : run<float, float>);
    Posting posting{helpers, layer, parts, count};
    const int64_t status = compute(batch, cache, q, q_stride, out, scale, 0, &posting);
    *helped = posting.helped;
    return status;
}

void attend_for(const Area& area, const PostedSplit& split, const Cache& copies) {
    const auto help = copies.is_bf16 ? (copies.scales ? help_with<bf16, int8_t> : help_with<bf16, bf16>)
                                     : (copies.scales ? help_with<float, int8_t> : help_with<float, float>);
    help(area, split, copies);
}

}  // namespace penstock

extern "C" void penstock_attention(const penstock::Span* spans, int64_t count, const int64_t* ids,
                                   const penstock::Cache* cache, int64_t heads, const void* q, int64_t q_stride,
                                   void* out, float scale, int64_t window) {
    penstock::attention({spans, count, ids, heads}, *cache, q, q_stride, out, scale, window);
}

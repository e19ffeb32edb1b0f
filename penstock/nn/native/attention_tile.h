// Attention of some rows of a sequence and some heads over its positions, block by block.
#pragma once

#include <limits>

#include "attention_block.h"
#include "attention_few.h"
#include "helpers.h"

namespace penstock {
namespace {

constexpr int SPLIT_BLOCKS = 16;  // positions are summed up in pieces of so many blocks, then the pieces are
constexpr int FEW = 4;            // queries for which threads share a long context
constexpr int MOST = 6;           // queries whose sums are in registers together
constexpr float SLACK = 8;        // powers of 2 that a weight may reach before sums are rescaled to the largest score
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr float LEAST = 1e-30f;  // numbers of which the largest is less become 0: its inverse may be none

// Weighted sums of V over some positions, of several queries: sum exp(score - most) v, and of the weights, as 16 parts.
struct Sums {
    float *most, *weight, *value;  // [queries], [queries, 16], [queries, width]

    static int64_t floats(int64_t queries, int64_t width) { return queries * (32 + width); }

    Sums(float* memory, int64_t queries) : most(memory), weight(memory + 16 * queries), value(memory + 32 * queries) {}

    void clear(int64_t queries, int64_t width) const {
        std::fill(most, most + queries, NOTHING);
        std::fill(weight, weight + queries * (16 + width), 0.0f);
    }
};

// Add one query's sums to those of the positions before.
void merge(const Sums& total, const Sums& part, int64_t query, int64_t width) {
    const float before = total.most[query], now = part.most[query];
    if (now == NOTHING) return;
    const f32x16 most = max(splat(before), splat(now));
    const f32x16 keep = exp2(splat(before) - most), add = exp2(splat(now) - most);
    total.most[query] = most[0];
    auto combine = [&](float* a, const float* b) { store(a, fma(load(a), keep, load(b) * add)); };
    combine(total.weight + 16 * query, part.weight + 16 * query);
    for (int64_t d = 0; d < width; d += 16) combine(total.value + query * width + d, part.value + query * width + d);
}

// What all items of a call share.
template <class E>
struct Call {
    const AttentionBatch& batch;
    const Cache& cache;
    const E* q;
    int64_t q_stride;
    E* out;
    float scale;  // with log2(e), since weights are powers of 2
    int64_t window, group, q_width, width;  // of a query and of sums, filled up to whole vectors
};

// What a thread computes at once: some heads' splits [from, to) of a tile, which is some rows of a sequence. Where
// `shared` is not negative, other items compute the tile's other splits, each leaves its sums, and the one that ends
// last adds them up.
struct Item {
    int64_t cost, span, row, rows, head, heads, from, to, shared;
    PostedSplit* posted = nullptr;  // where others may take it
};

// A tile whose splits are computed apart; their sums lie one after the other.
struct Shared {
    int64_t place, first, splits;
};

// Queries are numbered row * group + head of the group, for each head of K and V by itself. Rows are of E, and the cache of C.
template <class E, class C>
class AttentionTile {
    using U = UnitOf<C>;

   public:
    AttentionTile(const Call<E>& call, const Item& item, float* scratch)
        : call_(call),
          cache_(call.cache),
          span_(call.batch.spans[item.span]),
          item_(item),
          position_(span_.start + item.row),
          queries_(item.rows * call.group),
          packed_(scratch, cache_.dim, call.width),
          wide_(scratch + Packed<C>::floats(cache_.dim, call.width)),
          q_scales_(wide_ + (WIDENED<C> ? item.heads * queries_ * call.q_width : 0)) {
        if constexpr (IN_TILES<C>) {
            for (int64_t h = 0; h < item.heads; h++) put_queries(h);
        } else if constexpr (SCALED<C>) {
            for (int64_t h = 0; h < item.heads; h++)
                for (int64_t i = 0; i < queries_; i++) q_scales_[h * queries_ + i] = put_query(query(h, i), wide(h, i));
        } else if constexpr (WIDENED<C>) {
            for (int64_t h = 0; h < item.heads; h++)
                for (int64_t i = 0; i < queries_; i++)
                    for (int64_t d = 0; d < cache_.dim; d++) wide(h, i)[d] = widen(query(h, i)[d]);
        }
    }

    // Of working memory.
    static int64_t floats(const Call<E>& call, int64_t queries, int64_t heads) {
        return Packed<C>::floats(call.cache.dim, call.width) +
               heads * queries * ((WIDENED<C> ? call.q_width : 0) + (SCALED<C> ? 1 : 0)) +
               (IN_TILES<C> ? heads * std::max<int64_t>(queries, LANES) * call.cache.dim / U::EACH : 0);
    }

    int64_t sums_size() const { return Sums::floats(queries_, call_.width); }

    // Each split by itself and then together, in order. `total` and `part` have room for every head's sums, one after
    // the other; `part` is where a split is summed up that is not the first.
    void sum(float* total, float* part) {
        for (int64_t split = item_.from; split < item_.to; split++) {
            float* sums = split == item_.from ? total : part;
            for (int64_t h = 0; h < item_.heads; h++) at(sums, h).clear(queries_, call_.width);
            add_split(split, sums);
            if (sums == total) continue;
            for (int64_t h = 0; h < item_.heads; h++)
                for (int64_t i = 0; i < queries_; i++) merge(at(total, h), at(part, h), i, call_.width);
        }
    }

    Sums at(float* sums, int64_t head) const { return Sums(sums + head * sums_size(), queries_); }

    void write(float* total) const {
        const int64_t dim = cache_.value_dim, out_stride = call_.batch.heads * dim;
        for (int64_t h = 0; h < item_.heads; h++) {
            const Sums sums = at(total, h);
            for (int64_t i = 0; i < queries_; i++) {
                const f32x16 share = splat(1.0f / sum_lanes(load(sums.weight + 16 * i)));
                E* to = call_.out + (span_.row + item_.row + i / call_.group) * out_stride +
                        ((item_.head + h) * call_.group + i % call_.group) * dim;
                const float* from = sums.value + i * call_.width;
                for (int64_t d = 0; d < dim; d += 32) {
                    f32x16 values[2] = {load(from + d)};
                    if (d + 16 < call_.width) {
                        values[1] = load(from + d + 16);
                        if constexpr (U::EACH == 2) in_order(values);  // as V was interleaved
                    }
                    for (int64_t n = 0; n < 2 && d + 16 * n < dim; n++) {
                        const int64_t left = dim - d - 16 * n;
                        if (left >= 16)
                            store(to + d + 16 * n, values[n] * share);
                        else
                            store(to + d + 16 * n, values[n] * share, static_cast<int>(left));
                    }
                }
            }
        }
    }

   private:
    const E* query(int64_t h, int64_t i) const {
        return call_.q + (span_.row + item_.row + i / call_.group) * call_.q_stride +
               ((item_.head + h) * call_.group + i % call_.group) * cache_.dim;
    }

    float* wide(int64_t h, int64_t i) const { return wide_ + (h * queries_ + i) * call_.q_width; }

    // A query as units. Returns what a product with it is to be multiplied by, which is no number where the query is none.
    float put_query(const E* from, float* to) const {
        const int64_t dim = cache_.dim;
        f32x16 most{}, nothing{};
        for (int64_t d = 0; d < dim; d += 16) {
            const f32x16 x = d + 16 <= dim ? load(from + d) : load(from + d, static_cast<int>(dim - d));
            store(to + d, x);
            most = max(most, max(x, -x));
            nothing = fma(x, f32x16{}, nothing);
        }
        const float top = max_lanes(most)[0], largest = U::largest(dim), inverse = top < LEAST ? 0.0f : largest / top;
        // a unit is half as long as two floats, so nothing is overwritten that is still to be read
        for (int64_t d = 0; d < dim; d += 16) U::put(load(to + d), inverse, reinterpret_cast<uint32_t*>(to) + d / 2);
        return top / largest + sum_lanes(nothing);
    }

    int64_t slot(int64_t block) const {
        return span_.place >= 0 ? span_.place + block : call_.batch.ids[block - 1 - span_.place];
    }

    const C* keys(int64_t h, int64_t block) const {
        return static_cast<const C*>(cache_.values) + slot(block) * cache_.block + (item_.head + h) * cache_.head;
    }

    // The scales of a block's tokens, of those that are not there 0.
    void take_scales(int64_t h, int64_t block, int64_t count) {
        const float* from = cache_.scales + slot(block) * cache_.scale_block + (item_.head + h) * cache_.scale_head;
        for (auto* to : {&key_scales_, &value_scales_}) {
            if (cache_.scale_token == 1) {
                std::memcpy(*to, from, BLOCK_TOKENS * sizeof(float));
            } else {
                for (int64_t token = 0; token < count; token++) (*to)[token] = from[token * cache_.scale_token];
            }
            std::fill(*to + count, *to + BLOCK_TOKENS, 0.0f);
            from += cache_.scale_kind;
        }
    }

    void add_split(int64_t split, float* sums) {
        const int64_t end = std::min((split + 1) * SPLIT_BLOCKS, ceil_div(position_ + item_.rows, BLOCK_TOKENS));
        const int64_t lowest = call_.window ? std::max<int64_t>(0, position_ - call_.window + 1) / BLOCK_TOKENS : 0;
        const int64_t begin = std::max(split * SPLIT_BLOCKS, lowest);
        if constexpr (IN_TILES<C>) {
            if (queries_ <= LANES) return visit_few(begin, end, sums);
        }
        for (int64_t block = begin; block < end; block++) {
            for (int64_t h = 0; h < item_.heads; h++) {
                Source<C> source = source_of(h, block);
                const C* next = h + 1 < item_.heads ? keys(h + 1, block) : block + 1 < end ? keys(0, block + 1) : source.keys;
                source.next = next - source.keys;
                if constexpr (SCALED<C>) take_scales(h, block, source.count);
                visit(h, block, source, at(sums, h));
            }
        }
    }

    Source<C> source_of(int64_t h, int64_t block) const {
        const C* here = keys(h, block);
        const int64_t left = std::min<int64_t>(BLOCK_TOKENS, position_ + item_.rows - block * BLOCK_TOKENS);
        return {here, here + cache_.kind, cache_.token, cache_.dim, cache_.value_dim, static_cast<int>(left), 0};
    }

    // Queries that see some of a block.
    std::pair<int64_t, int64_t> seeing(int64_t block) const {
        const int64_t first = block * BLOCK_TOKENS, from = std::max<int64_t>(0, first - position_);
        const int64_t to =
            call_.window ? std::min(item_.rows, first + BLOCK_TOKENS - 1 + call_.window - position_) : item_.rows;
        return {from * call_.group, to * call_.group};
    }

    void visit(int64_t h, int64_t block, const Source<C>& source, const Sums& sums) {
        const int64_t first = block * BLOCK_TOKENS;
        const auto [begin, end] = seeing(block);
        if constexpr (IN_TILES<C>) return visit_in_tiles(h, begin, end, first, source, sums);
        if (queries_ <= FEW)  // which read K and V where they are
            return dispatch<FEW>(end - begin, [&](auto count) { attend<count()>(h, begin, first, source, sums); });
        packed_.fill(source);
        const int64_t groups = ceil_div(end - begin, MOST);  // about equal ones: a small one is slow
        for (int64_t g = 0, i = begin; g < groups; g++) {
            const int64_t next = begin + (end - begin) * (g + 1) / groups;
            dispatch<MOST>(next - i, [&](auto count) { attend<count()>(h, i, first, packed_, sums); });
            i = next;
        }
    }

#if defined(PENSTOCK_TILES)
    // --- in tiles

    // A head's queries: few as columns of words, [words][16], and more as rows.
    uint32_t* tiled_queries(int64_t h) const {
        const int64_t words = cache_.dim / U::EACH;
        return reinterpret_cast<uint32_t*>(wide_) + h * std::max<int64_t>(queries_, LANES) * words;
    }

    void put_queries(int64_t h) const {
        const int64_t words = cache_.dim / U::EACH;
        uint32_t* to = tiled_queries(h);
        if (queries_ > TILE_ROWS) {
            for (int64_t i = 0; i < queries_; i++) std::memcpy(to + i * words, query(h, i), words * 4);
            return;
        }
        for (int64_t word = 0; word < words; word += LANES) {
            f32x16 columns[LANES];
            for (int64_t i = 0; i < LANES; i++)
                columns[i] = i < queries_ ? load_units(query(h, i) + word * U::EACH, words - word) : f32x16{};
            transpose(columns);
            for (int64_t i = 0; i < std::min<int64_t>(LANES, words - word); i++)
                store(reinterpret_cast<float*>(to + (word + i) * LANES), columns[i]);
        }
    }

    // Many queries, with a block that is packed.
    void visit_in_tiles(int64_t h, int64_t begin, int64_t end, int64_t first, const Source<C>& source, const Sums& sums) {
        alignas(64) Scores scores[2 * TILE_ROWS];
        packed_.fill(source);
        const int64_t words = packed_.units, strips = ceil_div(end - begin, 2 * TILE_ROWS);
        for (int64_t t = 0, i = begin; t < strips; t++) {
            const int64_t next = begin + (end - begin) * (t + 1) / strips, rows = next - i;
            const char* q = reinterpret_cast<const char*>(tiled_queries(h) + i * words);
            const Line* keys = reinterpret_cast<const Line*>(packed_.keys);
            const int together = tile_groups(rows);
            for (int g = 0; g < BLOCK_TOKENS / LANES; g += together)
                add_words<false>(registers_, rows, together, {q, words * 4, keys + g, BLOCK_TOKENS / LANES, 0, nullptr}, words,
                                 scores[0] + g * LANES, BLOCK_TOKENS, true);
            for (int64_t r = 0; r < rows; r++) {
                hide(scores[r], position(i + r) - first);
                weigh(scores[r], i + r, sums, weights_[0][r]);
            }
            add_packed(i, static_cast<int>(rows), sums);
            i = next;
        }
    }

    // What is read next, in lines of 64 bytes: K of some blocks, then their V, head by head.
    struct Ahead {
        const AttentionTile& tile;
        int64_t begin, end;
        int64_t h = 0, some = begin, block = begin, line = 0, left = 0;
        bool values = false;
        const char* at = nullptr;

        void ask(int64_t lines) {
            while (lines > 0 && (left > 0 || next())) {
                const int64_t now = std::min(lines, left);
                const char* from = at;
                at += now * 64, left -= now, lines -= now;
                for (int64_t i = 0; i < now; i++) __builtin_prefetch(from + i * 64, 0, 2);
            }
        }
        bool next() {
            if (h == tile.item_.heads) return false;
            const Source<C> source = tile.source_of(h, block);
            at = reinterpret_cast<const char*>(values ? source.values : source.keys);
            left = ceil_div(source.count * source.stride * static_cast<int64_t>(sizeof(C)), 64);
            if (++block < std::min(end, some + BLOCKS_AT_ONCE)) return true;
            if (values) some = block;
            if (values && some == end) some = begin, h++;
            values = !values;
            block = some;
            return true;
        }
    };

    // All heads over blocks [begin, end), some of a head's at once.
    void visit_few(int64_t begin, int64_t end, float* sums) {
        Ahead ahead{*this, begin, end};
        ahead.ask(LEAD);
        for (int64_t h = 0; h < item_.heads; h++)
            for (int64_t block = begin; block < end; block += BLOCKS_AT_ONCE)
                visit_some(h, block, static_cast<int>(std::min<int64_t>(BLOCKS_AT_ONCE, end - block)), ahead, at(sums, h));
    }

    void visit_some(int64_t h, int64_t block, int count, Ahead& ahead, const Sums& sums) {
        alignas(64) float columns[BLOCKS_AT_ONCE][BLOCK_TOKENS][LANES];
        alignas(64) Scores scores[TILE_ROWS];
        Source<C> blocks[BLOCKS_AT_ONCE];
        for (int b = 0; b < count; b++) {
            blocks[b] = source_of(h, block + b);
            multiply_keys_of(registers_, blocks[b], tiled_queries(h), columns[b], [&] { ahead.ask(TILE_ROWS); });
        }
        for (int b = 0; b < count; b++) {
            const auto [begin, end] = seeing(block + b);
            for (int64_t i = begin; i < end; i++) {
                gather_scores(columns[b], i, scores[i]);
                hide(scores[i], position(i) - (block + b) * BLOCK_TOKENS);
                weigh(scores[i], i, sums, weights_[b][i - begin]);
            }
            add_values_of(registers_, blocks[b], weights_[b], static_cast<int>(end - begin), sums.value + begin * call_.width,
                          call_.width, [&] { ahead.ask(2 * cache_.value_dim / 32); });
        }
    }

    static void gather_scores(const float (*columns)[LANES], int64_t i, Scores& to) {
        const __m512i rows = _mm512_mullo_epi32(as<__m512i>(lane_numbers()), _mm512_set1_epi32(LANES));
        for (int token = 0; token < BLOCK_TOKENS; token += LANES)
            store(to + token, _mm512_i32gather_ps(rows, columns[token] + i, 4));
    }

    // Adds a block's V, which is packed, for up to 32 queries from the i-th on.
    void add_packed(int64_t i, int rows, const Sums& sums) {
        const Line* values = reinterpret_cast<const Line*>(packed_.values);
        const int groups = static_cast<int>(call_.width / LANES), most = tile_groups(rows);
        for (int g = 0; g < groups; g += most)
            add_words<false>(registers_, rows, std::min(most, groups - g),
                             {reinterpret_cast<const char*>(weights_), sizeof weights_[0][0], values + g, groups, 0, nullptr},
                             BLOCK_TOKENS / U::EACH, sums.value + i * call_.width + g * LANES, call_.width, false);
    }

    alignas(64) uint32_t weights_[BLOCKS_AT_ONCE][TILE_ROWS][WEIGHT_WORDS];
    TileRegisters registers_;
#else
    void put_queries(int64_t) const {}
    void visit_in_tiles(int64_t, int64_t, int64_t, int64_t, const Source<C>&, const Sums&) {}
    void visit_few(int64_t, int64_t, float*) {}
#endif

    int64_t position(int64_t i) const { return position_ + i / call_.group; }

    // f(count), which is at most R, as a constant.
    template <int R, class F>
    static void dispatch(int64_t count, const F& f) {
        if constexpr (R > 1) {
            if (count < R) return dispatch<R - 1>(count, f);
        }
        f(std::integral_constant<int, R>{});
    }

    // A block's part of R queries from the i-th on.
    template <int R, class B>
    void attend(int64_t h, int64_t i, int64_t first, const B& block, const Sums& sums) {
        const uint32_t* units[R];
        for (int r = 0; r < R; r++) {
            const void* q = query(h, i + r);
            if constexpr (WIDENED<C>) q = wide(h, i + r);
            units[r] = static_cast<const uint32_t*>(q);
        }
        const int64_t seen = std::min<int64_t>(BLOCK_TOKENS, position(i + R - 1) + 1 - first);  // by the last of them
        alignas(64) Scores scores[R];
        multiply_keys<C, R>(block, units, seen, scores);
        alignas(64) uint32_t weights[R][BLOCK_TOKENS / U::EACH * U::WORDS];
        float factors[R];
        for (int r = 0; r < R; r++) {
            if constexpr (SCALED<C>) {
                const f32x16 q_scale = splat(q_scales_[h * queries_ + i + r]);
                for (int n = 0; n < BLOCK_TOKENS; n += 16)
                    store(scores[r] + n, load(scores[r] + n) * (load(key_scales_ + n) * q_scale));
            }
            hide(scores[r], position(i + r) - first);
            factors[r] = weigh(scores[r], i + r, sums, weights[r]);
            units[r] = weights[r];
        }
        int64_t d = 0;
        float* to = sums.value + i * call_.width;
        auto ahead = values_ahead(block, call_.width);
        constexpr int N = ACROSS<R>;
        for (; d + 16 * N <= call_.width; d += 16 * N) add_values<R, N>(block, units, factors, seen, d, to, ahead);
        if constexpr (N > 2)
            if (d + 32 <= call_.width) {
                add_values<R, 2>(block, units, factors, seen, d, to, ahead);
                d += 32;
            }
        if constexpr (N > 1)
            if (d < call_.width) add_values<R, 1>(block, units, factors, seen, d, to, ahead);
    }

    // Nothing is left of positions after the row's own, which is `at` counted from the block's first, and too far back.
    void hide(Scores& scores, int64_t at) const {
        const int64_t before = call_.window ? std::max<int64_t>(0, at + 1 - call_.window) : 0;
        if (at >= BLOCK_TOKENS - 1 && before == 0) return;
        for (int token = 0; token < BLOCK_TOKENS; token += 16) {
            const i32x16 tokens = lane_numbers() + token;
            const i32x16 hidden = (tokens > static_cast<int>(at)) | (tokens < static_cast<int>(before));
            store(scores + token, where(hidden, splat(NOTHING), load(scores + token)));
        }
    }

    // Scores become weights, as units: 2^(score - most), where `most` is near the largest score so far: it stays while
    // weights are small enough, so that sums are seldom rescaled. Returns what products with them are to be multiplied by.
    float weigh(const Scores& scores, int64_t i, const Sums& sums, uint32_t* to) const {
        const f32x16 scale = splat(call_.scale);
        f32x16 x[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) x[n] = load(scores + 16 * n);
        const f32x16 top = max(max(x[0], x[1]), max(x[2], x[3]));
        if (!below(fma(top, scale, -splat(sums.most[i])), SLACK)) raise(max_lanes(top * scale), i, sums);
        const f32x16 less = -splat(sums.most[i]);
        f32x16 sum = load(sums.weight + 16 * i);
        float factor = 1;
        if constexpr (SCALED<C>) {
            f32x16 most{};
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                const f32x16 weight = rough_exp2(fma(x[n], scale, less));
                x[n] = weight * load(value_scales_ + 16 * n);
                sum = fma(x[n], f32x16{}, sum + weight);  // where a scale is no number, neither is the sum
                most = max(most, x[n]);
            }
            const float largest = max_lanes(most)[0], inverse = largest < LEAST ? 0.0f : 32767.0f / largest;
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) U::put(x[n], inverse, to + 8 * n);
            factor = largest / 32767.0f;
        } else {
#pragma GCC unroll 2
            for (int n = 0; n < 4; n += 2)
                sum = U::put_weights(fma(x[n], scale, less), fma(x[n + 1], scale, less), to + 16 * n / U::EACH * U::WORDS, sum);
        }
        store(sums.weight + 16 * i, sum);
        return factor;
    }

    void raise(f32x16 top, int64_t i, const Sums& sums) const {
        const f32x16 before = splat(sums.most[i]), now = max(before, top);
        sums.most[i] = now[0];
        if (before[0] == NOTHING) return;  // sums are 0
        const f32x16 keep = exp2(before - now);
        float *weight = sums.weight + 16 * i, *value = sums.value + i * call_.width;
        store(weight, load(weight) * keep);
        for (int64_t d = 0; d < call_.width; d += 16) store(value + d, load(value + d) * keep);
    }

    template <int R, int N, class B, class Next>
    void add_values(const B& block, const uint32_t* const* weights, const float* factors, int64_t seen, int64_t d,
                    float* to, Next& ahead) const {
        f32x16 found[R][N];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                found[r][n] = SCALED<C> ? f32x16{} : load(to + r * call_.width + d + 16 * n);
        for (int64_t token = 0; token < seen; token += U::EACH) {
            f32x16 columns[N];
            values_at<N>(block, token, d, columns);
            ahead.done(16 * N * U::EACH);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int n = 0; n < N; n++)
                    found[r][n] = U::madd(found[r][n], weights[r] + token / U::EACH * U::WORDS, columns[n]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                float* sum = to + r * call_.width + d + 16 * n;
                store(sum, SCALED<C> ? fma(U::value(found[r][n]), splat(factors[r]), load(sum)) : found[r][n]);
            }
        }
    }

    const Call<E>& call_;
    const Cache& cache_;
    const Span& span_;
    const Item& item_;
    const int64_t position_, queries_;
    Packed<C> packed_;
    float *wide_, *q_scales_;
    alignas(64) float key_scales_[BLOCK_TOKENS], value_scales_[BLOCK_TOKENS];  // of the block that is visited
};

}  // namespace
}  // namespace penstock

#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"
#include "pool.h"
#include "vec.h"

namespace penstock {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t MANY = 1 << 15;  // logits that are worth waking a thread for

// f(first id, 16 logits times `scale`, lanes that there are) over a row. Lanes that are not there hold -inf.
template <class F>
inline void each_sixteen(const float* row, int64_t vocab, float scale, F&& f) {
    int64_t id = 0;
    for (; id + LANES <= vocab; id += LANES) f(id, load(row + id) * splat(scale), 0xffffu);
    if (id == vocab) return;
    float rest[LANES];
    std::fill(rest, rest + LANES, -INF);
    std::copy(row + id, row + vocab, rest);
    f(id, load(rest) * splat(scale), (1u << (vocab - id)) - 1);
}

// f(id, value) of every lane whose bit is set.
template <class F>
inline void each_bit(unsigned bits, int64_t id, f32x16 values, F&& f) {
    if (!bits) return;
    float held[LANES];
    store(held, values);
    for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        f(id + lane, held[lane]);
    }
}

float largest(const float* row, int64_t vocab, float scale) {
    f32x16 most = splat(-INF);
    each_sixteen(row, vocab, scale, [&](int64_t, f32x16 x, unsigned) { most = max(x, most); });
    return max_lanes(most)[0];
}

int64_t first_of(const float* row, int64_t vocab, float value) {
    int64_t id = 0;
    for (; id + LANES <= vocab; id += LANES)
        if (const unsigned found = bits_of(load(row + id) == splat(value))) return id + __builtin_ctz(found);
    for (; id < vocab; id++)
        if (row[id] == value) return id;
    return 0;
}

// The first k of the row that are at least `floor`, in no order.
void first_candidates(const float* row, int64_t vocab, float scale, float floor, int64_t k,
                      std::vector<Candidate>& found) {
    found.clear();
    const size_t room = 2 * k + 256;
    float least = floor;
    bool full = false;  // then only what is more than `least` comes before what is there already
    auto cut = [&] {
        std::nth_element(found.begin(), found.begin() + (k - 1), found.end());
        found.resize(k);
        least = found.back().value;
        full = true;
    };
    each_sixteen(row, vocab, scale, [&](int64_t id, f32x16 x, unsigned there) {
        const unsigned in = bits_of(full ? x > splat(least) : x >= splat(least)) & there;
        each_bit(in, id, x, [&](int64_t token, float value) { found.push_back({value, token}); });
        if (found.size() >= room) cut();
    });
    if (static_cast<int64_t>(found.size()) > k) cut();
}

// Relative to that of the largest.
double weight_of(float value, float most) { return exp2(splat((value - most) * LOG2_E))[0]; }

// The nucleus of a row of which any part may be kept: weights are summed up by how far values are from the largest, and only
// values that are as far as the last one kept are put in order.
class Weights {
   public:
    static constexpr int EACH = 64, NATS = 16, BUCKETS = EACH * NATS + 1;  // the last is of all that are further
    static constexpr int COPIES = 4;                                       // so that additions need not wait

    Candidate last_within(const float* row, int64_t vocab, float scale, float floor, float most, double share) {
        std::fill(sums_, sums_ + BUCKETS * COPIES, 0.0);
        each_sixteen(row, vocab, scale, [&](int64_t, f32x16 x, unsigned there) {
            const unsigned in = bits_of(x >= splat(floor)) & there;
            if (!in) return;
            float weights[LANES];
            int32_t buckets[LANES];
            store(weights, exp2((x - splat(most)) * splat(LOG2_E)));
            const i32x16 which = bucket(x, most);
            put(buckets, which);
            if (in == 0xffffu)
                for (int i = 0; i < LANES; i++) sums_[buckets[i] * COPIES + i % COPIES] += weights[i];
            else
                for (unsigned bits = in; bits; bits &= bits - 1) {
                    const int i = __builtin_ctz(bits);
                    sums_[buckets[i] * COPIES + i % COPIES] += weights[i];
                }
        });
        double total = 0;
        for (int b = 0; b < BUCKETS; b++) total += of(b);
        const double target = total * share;
        double before = 0;
        int b = 0;
        while (b + 1 < BUCKETS && !(before + of(b) >= target)) before += of(b++);
        listed_.clear();
        each_sixteen(row, vocab, scale, [&](int64_t id, f32x16 x, unsigned there) {
            const unsigned in = bits_of((bucket(x, most) == b) & (x >= splat(floor))) & there;
            each_bit(in, id, x, [&](int64_t token, float value) { listed_.push_back({value, token}); });
        });
        std::sort(listed_.begin(), listed_.end());
        Candidate last{floor, vocab};
        for (const Candidate& c : listed_) {
            if (before >= target) break;
            before += weight_of(c.value, most);
            last = c;
        }
        return last;
    }

   private:
    static i32x16 bucket(f32x16 x, float most) {
        const f32x16 far = max((splat(most) - x) * splat(EACH), splat(0.0f));
        return to_i32(where(far < splat(BUCKETS - 1), far, splat(BUCKETS - 1)));
    }

    double of(int b) const {
        const double* sums = sums_ + b * COPIES;
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    double sums_[BUCKETS * COPIES];
    std::vector<Candidate> listed_;
};

// Standard Gumbel noise: SplitMix64's finaliser over the row's key and the token, as ops/gumbel says it.
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

template <class T>
T mixed(T x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return (x ^ (x >> 31)) >> 32;
}

float noise(int64_t key, int64_t token) {
    const uint64_t bits = mixed(static_cast<uint64_t>(key) + static_cast<uint64_t>(token + 1) * GOLDEN);
    const float uniform = std::min((static_cast<float>(bits) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    return -std::log(-std::log1p(-uniform));
}

// The kept token with the largest sum of value and noise. What noise can be at most is cheap: -log(u) is more than
// -log(-log(1 - u)), and the bits of a float are nearly its logarithm. Few are above the best one so far even so.
int64_t race(const float* row, int64_t vocab, float scale, const Candidate& last, int64_t key) {
    const u64x8 step = u64x8{1, 2, 3, 4, 5, 6, 7, 8} * GOLDEN;
    float best = -INF;
    int64_t winner = 0;
    each_sixteen(row, vocab, scale, [&](int64_t id, f32x16 x, unsigned there) {
        unsigned in = bits_of(x >= splat(last.value)) & there;
        if (!in) return;
        const uint64_t base = static_cast<uint64_t>(key) + static_cast<uint64_t>(id) * GOLDEN;
        u32x8 drawn[2];
        drawn[0] = __builtin_convertvector(mixed(base + step), u32x8);
        drawn[1] = __builtin_convertvector(mixed(base + 8 * GOLDEN + step), u32x8);
        const i32x16 bits = as<i32x16>(to_f32(get<u32x16>(drawn)));
        constexpr float LN_2 = 0.69314718f;
        const f32x16 most = splat(159 * LN_2 + 1e-3f) - to_f32(bits) * splat(LN_2 * 0x1p-23f);
        in &= bits_of(x + most >= splat(best));
        each_bit(in, id, x, [&](int64_t token, float value) {
            if (value == last.value && token > last.id) return;
            const float sum = value + noise(key, token);
            if (sum > best) best = sum, winner = token;
        });
    });
    return winner;
}

int64_t race(const std::vector<Candidate>& listed, int64_t key) {
    float best = -INF;
    int64_t winner = listed.empty() ? 0 : listed.front().id;
    for (const Candidate& c : listed) {
        const float sum = c.value + noise(key, c.id);
        if (sum > best) best = sum, winner = c.id;
    }
    return winner;
}

// The draw among those that top_k keeps, which are at least `floor`.
int64_t draw_of(std::vector<Candidate>& listed, const Draw& draw, float most) {
    std::sort(listed.begin(), listed.end());
    if (draw.top_p < 1) {
        double total = 0, before = 0;
        for (const Candidate& c : listed) total += weight_of(c.value, most);
        size_t kept = 0;
        while (kept < listed.size() && (kept == 0 || before < total * draw.top_p))
            before += weight_of(listed[kept++].value, most);
        listed.resize(kept);
    }
    return race(listed, draw.key);
}

float floor_of(const Draw& draw, float most) {
    return draw.min_p > 0 ? most + std::log(static_cast<float>(draw.min_p)) : -INF;
}

int64_t sample_row(const float* row, int64_t vocab, const Draw& draw) {
    static thread_local std::vector<Candidate> listed;
    static thread_local Weights weights;
    if (draw.temperature == 0) return first_of(row, vocab, largest(row, vocab, 1.0f));
    const float scale = 1.0f / static_cast<float>(draw.temperature);
    const bool few = draw.top_k > 0 && draw.top_k < vocab, cut = draw.top_p < 1;
    const float most = cut || draw.min_p > 0 ? largest(row, vocab, scale) : 0;
    const float floor = floor_of(draw, most);
    if (!few) {
        Candidate last{floor, vocab};
        if (cut) last = weights.last_within(row, vocab, scale, floor, most, draw.top_p);
        return race(row, vocab, scale, last, draw.key);
    }
    first_candidates(row, vocab, scale, floor, draw.top_k, listed);
    return draw_of(listed, draw, most);
}

template <class F>
void each_row(int64_t rows, int64_t vocab, F&& f) {
    if (rows * vocab < MANY)
        for (int64_t row = 0; row < rows; row++) f(row);
    else
        parallel_for(static_cast<int>(rows), f);
}

}  // namespace

void mask_logits(float* logits, int64_t vocab, const int64_t* rows, int64_t count, const uint32_t* masks,
                 int64_t words) {
    each_row(count, vocab, [&](int64_t i) {
        float* x = logits + rows[i] * vocab;
        const uint32_t* mask = masks + i * words;
        for (int64_t id = 0; id < vocab; id += 32) {  // mostly all of them are in, or none
            const uint32_t bits = mask[id / 32];
            const int64_t end = std::min<int64_t>(32, vocab - id);
            if (bits == 0)
                std::fill(x + id, x + id + end, -INF);
            else if (bits != ~0u)
                for (int64_t lane = 0; lane < end; lane++)
                    if (!(bits >> lane & 1)) x[id + lane] = -INF;
        }
    });
}

void argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* tokens, uint8_t* finite) {
    each_row(rows, vocab, [&](int64_t row) {
        const float* x = logits + row * vocab;
        f32x16 most = splat(-INF), wrong = f32x16{};
        each_sixteen(x, vocab, 1.0f, [&](int64_t, f32x16 y, unsigned there) {
            most = max(y, most);
            if (there == 0xffffu) wrong = wrong + y * splat(0.0f);
        });
        float rest = 0;
        for (int64_t id = vocab / LANES * LANES; id < vocab; id++) rest += x[id] * 0.0f;
        tokens[row] = first_of(x, vocab, max_lanes(most)[0]);
        finite[row] = sum_lanes(wrong) + rest == 0;
    });
}

void sample(const float* logits, int64_t rows, int64_t vocab, const Draw* draws, int64_t* tokens) {
    each_row(rows, vocab, [&](int64_t row) { tokens[row] = sample_row(logits + row * vocab, vocab, draws[row]); });
}

int64_t sample(std::vector<Candidate>& likeliest, const Draw& draw) {
    if (draw.temperature == 0) return std::min_element(likeliest.begin(), likeliest.end())->id;
    const float scale = 1.0f / static_cast<float>(draw.temperature);
    for (Candidate& c : likeliest) c.value *= scale;
    const float most = std::min_element(likeliest.begin(), likeliest.end())->value, floor = floor_of(draw, most);
    const auto low = [&](const Candidate& c) { return !(c.value >= floor); };
    likeliest.erase(std::remove_if(likeliest.begin(), likeliest.end(), low), likeliest.end());
    if (static_cast<int64_t>(likeliest.size()) > draw.top_k) {
        std::nth_element(likeliest.begin(), likeliest.begin() + (draw.top_k - 1), likeliest.end());
        likeliest.resize(draw.top_k);
    }
    return draw_of(likeliest, draw, most);
}

}  // namespace penstock

extern "C" {

void penstock_mask_logits(float* logits, int64_t vocab, const int64_t* rows, int64_t count, const uint32_t* masks,
                          int64_t words) {
    penstock::mask_logits(logits, vocab, rows, count, masks, words);
}

void penstock_argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* tokens, uint8_t* finite) {
    penstock::argmax(logits, rows, vocab, tokens, finite);
}

void penstock_sample(const float* logits, int64_t rows, int64_t vocab, const penstock::Draw* draws, int64_t* tokens) {
    penstock::sample(logits, rows, vocab, draws, tokens);
}
}

#include "bounded_logits.h"

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace penstock {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LARGEST = 1e15f;  // length of a row; the product of two, and what it is multiplied with, are finite
constexpr float TINY = 1e-30f;    // below it nothing is divided into codes
constexpr double UNSEEN = 1e-16;  // more than the length of what is lost where squares are too small for a float
constexpr int MOST_CODE = 127, MOST_FAR = 127 * 256 + 127, OFFSET = 128;
constexpr int64_t LEAST_FAR = 16;            // steps of a row, or a sixteenth of them
constexpr int64_t MOST_INS = 1 << 15;        // so that sums of 32 bits hold
constexpr int64_t AHEAD = 8192 / sizeof(Line);
constexpr int64_t TASK = 8192;               // lines
constexpr int64_t EXACT = 16;                // groups of 16 outputs that a task computes
constexpr int64_t FEW = 128;                 // that are computed as soon as they are bounded

// Rounded up: what floats have lost on the way to it is less than a millionth.
float over(double x) { return static_cast<float>(x * (1 + 1e-6)); }

// Four bytes of a row, as sums of products with codes read them: as they are where there is an instruction for that, else
// as two words of two numbers of 16 bits, the first and the third and the others.
struct Bytes {
#if defined(__AVX512VNNI__)
    uint32_t words[1] = {};
#else
    uint32_t words[2] = {};
#endif

    void set(const int8_t (&bytes)[4]) {
        if constexpr (sizeof words == 4) {
            std::memcpy(words, bytes, 4);
        } else {
            const int16_t pairs[4] = {bytes[0], bytes[2], bytes[1], bytes[3]};
            std::memcpy(words, pairs, sizeof pairs);
        }
    }
};

// Four inputs that are far from 0, in 16 bits.
struct Far {
    int64_t step;
    Bytes high, low;
};

// An input row: in 8 bits, but for the few words that would leave the others little of them.
struct Input {
    std::vector<Bytes> words;  // of a step each, 0 where it is far
    std::vector<Far> far;
    int32_t near_sum = 0, high_sum = 0, low_sum = 0;  // of bytes
    float near_factor = 0, far_factor = 0;            // x = near_factor * word, or far_factor * (256 * high + low)
    float length = 0;                                 // |x|
    float doubt = 0;  // what a weight's length is multiplied with for a part of how far a logit can be away
    bool usable = false;
    const uint32_t* allowed = nullptr;  // a bit for each output that it may take; null is all
};

// The bits of a group's outputs.
inline unsigned bits_of(const uint32_t* allowed, int64_t group) {
    return allowed[group * LANES / 32] >> (group * LANES % 32) & 0xffffu;
}

// The nearest whole multiple of `factor`, up to `most` of them; `lost` is added the square of what is left.
inline int multiple(double value, float factor, int most, double* lost) {
    const int whole = factor > 0 ? static_cast<int>(std::lrint(value / factor)) : 0;
    const int bounded = std::max(-most, std::min(most, whole));
    const double rest = value - static_cast<double>(factor) * bounded;
    *lost += rest * rest;
    return bounded;
}

// The steps whose inputs are furthest from 0, in order.
std::vector<Far> furthest(const float* x, int64_t steps) {
    std::vector<std::pair<float, int64_t>> most(steps);
    for (int64_t step = 0; step < steps; step++) {
        const float* of = x + step * 4;
        most[step] = {std::max(std::max(std::fabs(of[0]), std::fabs(of[1])), std::max(std::fabs(of[2]), std::fabs(of[3]))), step};
    }
    const int64_t count = std::min(steps, std::max(LEAST_FAR, steps / 16));
    std::nth_element(most.begin(), most.begin() + (count - 1), most.end(), std::greater<>());
    std::vector<Far> far(count);
    for (int64_t i = 0; i < count; i++) far[i].step = most[i].second;
    std::sort(far.begin(), far.end(), [](const Far& a, const Far& b) { return a.step < b.step; });
    return far;
}

// Of values [ins], which is filled up with zeros to whole steps.
Input quantised(const float* x, int64_t ins) {
    const int64_t steps = (ins + 3) / 4;
    Input input;
    input.words.resize(steps);
    double squares = 0, lost = 0;
    for (int64_t i = 0; i < ins; i++) squares += static_cast<double>(x[i]) * x[i];
    input.length = over(std::sqrt(squares));
    input.usable = input.length < LARGEST;  // not if it is a NaN
    if (!input.usable) return input;
    input.far = furthest(x, steps);
    std::vector<char> is_far(steps);
    for (const Far& far : input.far) is_far[far.step] = 1;
    float near = 0, most = 0;
    for (int64_t i = 0; i < ins; i++) (is_far[i / 4] ? most : near) = std::max(is_far[i / 4] ? most : near, std::fabs(x[i]));
    input.near_factor = near < TINY ? 0 : near / MOST_CODE;
    input.far_factor = most < TINY ? 0 : most / MOST_FAR;
    for (int64_t step = 0; step < steps; step++) {
        if (is_far[step]) continue;
        int8_t bytes[4];
        for (int i = 0; i < 4; i++) {
            bytes[i] = static_cast<int8_t>(multiple(x[step * 4 + i], input.near_factor, MOST_CODE, &lost));
            input.near_sum += bytes[i];
        }
        input.words[step].set(bytes);
    }
    for (Far& far : input.far) {
        int8_t high[4], low[4];
        for (int i = 0; i < 4; i++) {
            const int whole = multiple(x[far.step * 4 + i], input.far_factor, MOST_FAR, &lost), above = (whole + 128) >> 8;
            high[i] = static_cast<int8_t>(above);
            low[i] = static_cast<int8_t>(whole - above * 256);
            input.high_sum += high[i];
            input.low_sum += low[i];
        }
        far.high.set(high);
        far.low.set(low);
    }
    const double rounding = (2 * ins + 64) * 0x1p-24;
    input.doubt = over(std::sqrt(lost) + rounding * input.length);
    return input;
}

// Of every row and group of 16 outputs, what the largest of its logits is at most and at least: [rows][groups] each.
struct Bounds {
    std::vector<float> most, least;
};

// What is summed at once in registers: ROWS rows by a panel's groups, or by one where registers have room for fewer.
#if defined(__AVX512VNNI__)
constexpr int ROWS = 6;
#else
constexpr int ROWS = 4;
#endif
#if defined(__AVX512F__)
constexpr int AT_ONCE = GROUPS;
#else
constexpr int AT_ONCE = 1;
#endif

// A line's codes.
struct Codes {
#if defined(__AVX512VNNI__)
    i32x16 all;

    PENSTOCK_INLINE explicit Codes(const Line& line) : all(get<i32x16>(line.words)) {}
    PENSTOCK_INLINE i32x16 add(i32x16 sum, const Bytes& bytes) const {
        return reinterpret_cast<i32x16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                            reinterpret_cast<__m512i>(all),
                                                            _mm512_set1_epi32(bytes.words[0])));
    }
#else
    i16x32 even, odd;

    PENSTOCK_INLINE explicit Codes(const Line& line) {
        const u32x16 words = get<u32x16>(line.words);
        even = as<i16x32>(words & 0x00ff00ff), odd = as<i16x32>(words >> 8 & 0x00ff00ff);
    }
    PENSTOCK_INLINE i32x16 add(i32x16 sum, const Bytes& bytes) const {
        sum = dot_i16(sum, even, as<i16x32>(splat_i32(bytes.words[0])));
        return dot_i16(sum, odd, as<i16x32>(splat_i32(bytes.words[1])));
    }
#endif
};

// The sum of codes times bytes, from that of codes + OFFSET times bytes, whose own sum is `bytes`.
PENSTOCK_INLINE f32x16 without_offset(i32x16 sum, int32_t bytes) { return to_f32(sum - OFFSET * bytes); }

// The lanes whose bits are set.
PENSTOCK_INLINE i32x16 choice_of(unsigned bits) {
#if defined(__AVX512F__)
    return reinterpret_cast<i32x16>(_mm512_movm_epi32(bits));
#else
    constexpr int32_t POWERS[LANES] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                       1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const i32x16 powers = get<i32x16>(POWERS);
    return (splat_i32(bits) & powers) == powers;
#endif
}

// One row's sums over a group, whose lines are `apart` from one another, become bounds.
inline void bound(const BoundedLogits& quantized, const Input& input, int64_t group, i32x16 near, const Line* lines,
                  int64_t apart, float* most, float* least) {
    const int64_t lanes = quantized.codes.groups() * LANES, first = group * LANES;
    const float *scale = quantized.bounds + first, *error = scale + lanes, *norm = error + lanes;
    i32x16 high{}, low{};
    for (const Far& far : input.far) {
        const Codes codes(lines[far.step * apart]);
        high = codes.add(high, far.high);
        low = codes.add(low, far.low);
    }
    const f32x16 fine = fma(without_offset(high, input.high_sum), splat(256.0f), without_offset(low, input.low_sum));
    const f32x16 sum = fma(without_offset(near, input.near_sum), splat(input.near_factor), fine * splat(input.far_factor));
    const f32x16 value = sum * load(scale);
    const f32x16 doubt = fma(load(error), splat(input.length), load(norm) * splat(input.doubt)) + splat(1e-30f);
    i32x16 there = lane_numbers() < static_cast<int32_t>(std::min<int64_t>(LANES, quantized.codes.outs - first));
    if (input.allowed) there &= choice_of(bits_of(input.allowed, group));
    *most = max_lanes(where(there, value + doubt, splat(-INF)))[0];
    *least = max_lanes(where(there, value - doubt, splat(-INF)))[0];
}

// Rows [row, row + M) over G groups of a panel, from group `first` on. In each step FETCH lines from `ahead` on are asked
// for.
template <int M, int G, int FETCH>
void tile(const BoundedLogits& quantized, const std::vector<Input>& inputs, int64_t row, int64_t first,
          const Line* ahead, Bounds& bounds) {
    const int64_t steps = quantized.codes.steps(), groups = quantized.codes.groups();
    int64_t apart;
    const Line* lines = quantized.codes.group(first, &apart);
    const Bytes* words[M];
    for (int m = 0; m < M; m++) words[m] = inputs[row + m].words.data();
    i32x16 sums[M][G];  // in registers, which needs every loop over them unrolled
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) sums[m][g] = i32x16{};
    for (int64_t step = 0; step < steps; step++) {
        const Line* here = lines + step * (AT_ONCE == GROUPS ? G : apart);
        for (int f = 0; f < FETCH; f++) __builtin_prefetch(ahead + step * FETCH + f, 0, 3);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            const Codes codes(here[g]);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][g] = codes.add(sums[m][g], words[m][step]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            const int64_t at = (row + m) * groups + first + g;
            bound(quantized, inputs[row + m], first + g, sums[m][g], lines + g, apart, &bounds.most[at], &bounds.least[at]);
        }
}

using Tile = void (*)(const BoundedLogits&, const std::vector<Input>&, int64_t, int64_t, const Line*, Bounds&);

template <int G, int FETCH>
Tile tile_of_rows(int64_t rows) {
    static constexpr Tile TILES[] = {tile<1, G, FETCH>, tile<2, G, FETCH>, tile<3, G, FETCH>, tile<4, G, FETCH>,
#if defined(__AVX512VNNI__)
                                     tile<5, G, FETCH>, tile<6, G, FETCH>
#endif
    };
    static_assert(sizeof TILES / sizeof *TILES == ROWS);
    return TILES[rows - 1];
}

// `fetch` is 0, 1, 2 or GROUPS; only whole panels ask for lines.
Tile tile_of(int64_t rows, int64_t groups, int64_t fetch) {
    if constexpr (AT_ONCE > 1) {
        switch (groups) {
            case 1: return tile_of_rows<1, 0>(rows);
            case 2: return tile_of_rows<2, 0>(rows);
            case 3: return tile_of_rows<3, 0>(rows);
        }
    }
    switch (fetch) {
        case 0: return tile_of_rows<AT_ONCE, 0>(rows);
        case 1: return tile_of_rows<AT_ONCE, 1>(rows);
        case 2: return tile_of_rows<AT_ONCE, 2>(rows);
        default: return tile_of_rows<AT_ONCE, GROUPS>(rows);
    }
}

// Panels [first, last). Where tiles share a panel, they ask for the next one's lines together, each for some of every
// step's; a first one, and one alone, asks for what it is about to use.
void some_panels(const BoundedLogits& quantized, const std::vector<Input>& inputs, int64_t first, int64_t last, Bounds& bounds) {
    const int64_t rows = inputs.size(), steps = quantized.codes.steps(), tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t panel = first; panel < last; panel++) {
        int64_t groups;
        const Line *here = quantized.codes.group(panel * GROUPS, &groups), *next = here + GROUPS * steps;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
            const bool streams = t == 0 && (tiles == 1 || panel == first);
            const int64_t from = streams ? 0 : GROUPS * t / tiles, until = streams ? GROUPS : GROUPS * (t + 1) / tiles;
            const Line* ahead = streams ? here + AHEAD : next + from * steps;
            const int64_t fetch = streams || panel + 1 < last ? until - from : 0;
            const int64_t together = AT_ONCE == GROUPS ? groups : 1;
            for (int64_t g = 0; g < groups; g += together)
                tile_of(count, together, g == 0 && groups == GROUPS ? fetch : 0)(quantized, inputs, row,
                                                                                 panel * GROUPS + g, ahead, bounds);
        }
    }
}

Bounds bounds_of(const BoundedLogits& quantized, const std::vector<Input>& inputs) {
    const int64_t groups = quantized.codes.groups(), panels = (groups + GROUPS - 1) / GROUPS;
    const int64_t rows = inputs.size(), per_task = std::max<int64_t>(1, TASK / (quantized.codes.steps() * GROUPS));
    Bounds bounds{std::vector<float>(rows * groups), std::vector<float>(rows * groups)};
    parallel_for(static_cast<int>((panels + per_task - 1) / per_task), [&](int task) {
        some_panels(quantized, inputs, task * per_task, std::min(panels, (task + 1) * per_task), bounds);
    });
    return bounds;
}

// The groups that can hold one of the k largest of a row, in order, from what its groups are at most and at least.
void find_groups(const float* most, const float* least, int64_t groups, int64_t k, std::vector<int64_t>& found) {
    std::vector<float> largest(std::min(k, groups));
    std::partial_sort_copy(least, least + groups, largest.begin(), largest.end(), std::greater<float>());
    float floor = k <= groups ? largest.back() : -INF;
    floor -= std::fabs(floor) * 0x1p-20f;  // what temperature makes equal to the last is wanted too
    for (int64_t group = 0; group < groups; group++)
        if (most[group] >= floor && most[group] > -INF) found.push_back(group);
}

// The groups of which a row may take an output, unless they are more than `FEW`.
std::vector<int64_t> few_groups(const uint32_t* allowed, int64_t outs) {
    std::vector<int64_t> found;
    for (int64_t group = 0; group * LANES < outs; group++) {
        if (!bits_of(allowed, group)) continue;
        if (found.size() == FEW) return {};
        found.push_back(group);
    }
    return found;
}

}  // namespace

// f(row, candidates) for each row, in order: the logits that can matter, or none where they cannot be told.
template <class T, class F>
void each_likeliest(const Packed<T>& weight, const BoundedLogits& quantized, const T* x, int64_t x_stride, int64_t rows,
                    const Draw* draws, const RowMasks& masks, F&& f) {
    const int64_t groups = weight.groups(), width = weight.steps() * Packed<T>::IN_WORD;
    std::vector<T> padded(rows * width, T{});
    std::vector<Input> inputs(rows), bounded;
    std::vector<std::vector<int64_t>> few(rows);
    for (int64_t i = 0; i < masks.count; i++) inputs[masks.rows[i]].allowed = masks.masks + i * masks.words;
    const auto prepare = [&](int64_t row) {
        std::memcpy(&padded[row * width], x + row * x_stride, weight.ins * sizeof(T));
        std::vector<float> values((weight.ins + 3) / 4 * 4);
        for (int64_t i = 0; i < weight.ins; i++) values[i] = widen(padded[row * width + i]);
        const uint32_t* allowed = inputs[row].allowed;
        inputs[row] = quantised(values.data(), weight.ins);
        inputs[row].allowed = allowed;
        if (allowed) few[row] = few_groups(allowed, weight.outs);
    };
    if (rows < 4)
        for (int64_t row = 0; row < rows; row++) prepare(row);
    else
        parallel_for(static_cast<int>(rows), prepare);
    for (int64_t row = 0; row < rows; row++)
        if (few[row].empty()) bounded.push_back(inputs[row]);
    const Bounds bounds = bounds_of(quantized, bounded);
    std::vector<int64_t> found, ends(rows);  // groups of all rows, one row's after another's
    for (int64_t row = 0, at = 0; row < rows; row++) {
        const int64_t k = draws[row].temperature == 0 ? 1 : draws[row].top_k;
        if (inputs[row].usable && few[row].empty())
            find_groups(&bounds.most[at], &bounds.least[at], groups, k, found);
        else if (inputs[row].usable)
            found.insert(found.end(), few[row].begin(), few[row].end());
        if (few[row].empty()) at += groups;
        ends[row] = found.size();
    }
    std::vector<float> logits(found.size() * LANES);
    std::vector<std::array<int64_t, 3>> parts;  // row, first and end of groups that one task computes
    for (int64_t row = 0, from = 0; row < rows; from = ends[row++])
        for (int64_t part = from; part < ends[row]; part += EXACT)
            parts.push_back({row, part, std::min(ends[row], part + EXACT)});
    parallel_for(static_cast<int>(parts.size()), [&](int task) {
        const auto [row, from, end] = parts[task];
        outputs(weight, &padded[row * width], &found[from], end - from, &logits[from * LANES]);
    });
    std::vector<Candidate> likeliest;
    for (int64_t row = 0, from = 0; row < rows; from = ends[row++]) {
        likeliest.clear();
        const uint32_t* allowed = inputs[row].allowed;
        for (int64_t i = from; i < ends[row]; i++)
            for (int64_t id = found[i] * LANES; id < std::min(weight.outs, (found[i] + 1) * LANES); id++)
                if (!allowed || allowed[id / 32] >> (id % 32) & 1) likeliest.push_back({logits[i * LANES + id % LANES], id});
        f(row, likeliest);
    }
}

template <class T>
void choose(const Packed<T>& weight, const BoundedLogits& quantized, const T* x, int64_t x_stride, int64_t rows, const Draw* draws,
            const RowMasks& masks, int64_t* tokens) {
    each_likeliest(weight, quantized, x, x_stride, rows, draws, masks, [&](int64_t row, std::vector<Candidate>& likeliest) {
        tokens[row] = likeliest.empty() ? -1 : sample(likeliest, draws[row]);
    });
}

// Which are the likeliest is decided by what `sample` compares: logits that temperature has made equal come by their ids.
template <class T>
void candidates(const Packed<T>& weight, const BoundedLogits& quantized, const T* x, int64_t x_stride, int64_t rows, const Draw* draws,
                int64_t most, float* values, int64_t* outputs) {
    each_likeliest(weight, quantized, x, x_stride, rows, draws, {}, [&](int64_t row, std::vector<Candidate>& likeliest) {
        const Draw& draw = draws[row];
        const bool greedy = draw.temperature == 0;
        const float scale = greedy ? 1.0f : 1.0f / static_cast<float>(draw.temperature);
        const size_t wanted = std::min<size_t>(likeliest.size(), std::min(most, greedy ? 1 : draw.top_k));
        const auto before = [&](const Candidate& a, const Candidate& b) {
            return Candidate{a.value * scale, a.id} < Candidate{b.value * scale, b.id};
        };
        std::partial_sort(likeliest.begin(), likeliest.begin() + wanted, likeliest.end(), before);
        for (int64_t i = 0; i < most; i++) {
            const bool there = i < static_cast<int64_t>(wanted);
            values[row * most + i] = there ? likeliest[i].value : 0.0f;
            outputs[row * most + i] = there ? likeliest[i].id : i == 0 ? -2 : -1;
        }
    });
}

// Codes and bounds of a group of 16 outputs. Returns whether all of its weights are usable.
template <class T>
bool quantize_group(const Packed<T>& weight, const Packed<uint8_t>& codes, int64_t group, float* bounds) {
    constexpr int IN_WORD = Packed<T>::IN_WORD;
    int64_t apart, codes_apart;
    const Line* lines = weight.group(group, &apart);
    Line* to = const_cast<Line*>(codes.group(group, &codes_apart));
    const auto input = [&](int64_t i) {  // of all 16 outputs
        const f32x16 words = get<f32x16>(&lines[i / IN_WORD * apart]);
        return IN_WORD == 1 ? words : i % 2 ? second_of_two(words) : first_of_two(words);
    };
    f32x16 most = {}, squares = {}, lost = {};
    for (int64_t i = 0; i < weight.ins; i++) {
        const f32x16 w = input(i), size = where(w < f32x16{}, -w, w);
        most = max(size, most);
        squares = fma(w, w, squares);
    }
    const i32x16 tiny = most < splat(TINY);  // all of it is left
    const f32x16 scale = where(tiny, f32x16{}, most * splat(1.0f / MOST_CODE));
    const f32x16 inverse = where(tiny, f32x16{}, splat(MOST_CODE) / most);
    for (int64_t step = 0; step < codes.steps(); step++) {
        u32x16 word = {};
        for (int64_t i = 0; i < 4; i++) {
            f32x16 whole = {};
            if (step * 4 + i < weight.ins) {
                const f32x16 w = input(step * 4 + i);
                whole = (w * inverse + splat(12582912.0f)) - splat(12582912.0f);  // the sum has no room for fractions
                const f32x16 rest = fma(-whole, scale, w);
                lost = fma(rest, rest, lost);
            }
            word |= (as<u32x16>(to_i32(whole) + OFFSET) & 255) << (8 * static_cast<int>(i));
        }
        put(&to[step * codes_apart], word);
    }
    const int64_t lanes = codes.groups() * LANES;
    bool usable = true;
    for (int lane = 0; lane < LANES; lane++) {
        const double norm = std::sqrt(squares[lane]) * 1.001 + UNSEEN;
        const double rest = std::sqrt(lost[lane]) * 1.001 + norm * 1e-6 + UNSEEN;
        bounds[group * LANES + lane] = scale[lane];
        bounds[lanes + group * LANES + lane] = over(rest);
        bounds[2 * lanes + group * LANES + lane] = over(norm + rest);
        usable &= norm < LARGEST;  // not if it is a NaN
    }
    return usable;
}

template <class T>
bool quantize(const Packed<T>& weight, uint8_t* codes, float* bounds) {
    const Packed<uint8_t> to{reinterpret_cast<const Line*>(codes), weight.outs, weight.ins};
    std::vector<char> usable(weight.groups());
    const int64_t panels = (weight.groups() + GROUPS - 1) / GROUPS;
    parallel_for(static_cast<int>(panels), [&](int panel) {
        for (int64_t group = panel * GROUPS; group < std::min(weight.groups(), (panel + 1) * int64_t{GROUPS}); group++)
            usable[group] = quantize_group(weight, to, group, bounds);
    });
    return std::find(usable.begin(), usable.end(), 0) == usable.end();
}

}  // namespace penstock

extern "C" {

using namespace penstock;

// Whether no sum can be too large.
int64_t penstock_can_bound_logits(int64_t ins) { return ins <= MOST_INS; }

#define BOUNDED_LOGITS(SUFFIX, T)                                                                                             \
    int64_t penstock_bounded_logits_##SUFFIX(const void* lines, int64_t outs, int64_t ins, uint8_t* codes, float* bounds) {   \
        return quantize<T>({static_cast<const Line*>(lines), outs, ins}, codes, bounds);                                \
    }                                                                                                                 \
    void penstock_choose_##SUFFIX(const void* lines, int64_t outs, int64_t ins, const void* codes,                    \
                                  const float* bounds, const T* x, int64_t x_stride, int64_t rows, const Draw* draws, \
                                  const int64_t* masked, int64_t count, const uint32_t* masks, int64_t words,         \
                                  int64_t* tokens) {                                                                  \
        choose<T>({static_cast<const Line*>(lines), outs, ins}, {{static_cast<const Line*>(codes), outs, ins}, bounds}, \
                  x, x_stride, rows, draws, {masked, count, masks, words}, tokens);                                   \
    }                                                                                                                 \
    void penstock_candidates_##SUFFIX(const void* lines, int64_t outs, int64_t ins, const void* codes,                \
                                      const float* bounds, const T* x, int64_t x_stride, int64_t rows,                \
                                      const Draw* draws, int64_t most, float* values, int64_t* outputs) {             \
        candidates<T>({static_cast<const Line*>(lines), outs, ins},                                                   \
                      {{static_cast<const Line*>(codes), outs, ins}, bounds}, x, x_stride, rows, draws, most, values, \
                      outputs);                                                                                       \
    }
BOUNDED_LOGITS(bf16, bf16)
BOUNDED_LOGITS(f32, float)
#undef BOUNDED_LOGITS

// The tokens of rows, from [rows][count] candidates of all ranks: -1 are none, -2 that none can be told.
void penstock_choose_among(const float* values, const int64_t* ids, int64_t rows, int64_t count, const Draw* draws,
                           int64_t* tokens) {
    std::vector<Candidate> likeliest;
    for (int64_t row = 0; row < rows; row++) {
        likeliest.clear();
        bool known = true;
        for (int64_t i = row * count; i < (row + 1) * count; i++) {
            known &= ids[i] != -2;
            if (ids[i] >= 0) likeliest.push_back({values[i], ids[i]});
        }
        tokens[row] = known && !likeliest.empty() ? sample(likeliest, draws[row]) : -1;
    }
}
}

#include "sketch.h"

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
constexpr int MOST_CODE = 127, MOST_INPUT = 127 * 256 + 127, OFFSET = 128;
constexpr int64_t MOST_INS = 1 << 15;        // so that sums of 32 bits hold
constexpr int64_t AHEAD = 8192 / sizeof(Line);
constexpr int64_t TASK = 8192;               // lines
constexpr int64_t EXACT = 16;                // groups of 16 outputs that a task computes

// Rounded up: what floats have lost on the way to it is less than a millionth.
float over(double x) { return static_cast<float>(x * (1 + 1e-6)); }

// An input row in 16 bits: words of four high bytes and of four low ones, in turns.
struct Input {
    std::vector<uint32_t> words;
    int32_t high = 0, low = 0;  // sums of its bytes
    float factor = 0;           // x = factor * (256 * high + low) + what is left
    float length = 0;           // |x|
    float doubt = 0;            // what a weight's length is multiplied with for a part of how far a logit can be away
    bool usable = false;
};

template <class T>
Input quantised(const T* x, int64_t ins) {
    Input input;
    input.words.resize((ins + 3) / 4 * 2);
    double squares = 0, lost = 0;
    float most = 0;
    for (int64_t i = 0; i < ins; i++) {
        const float value = widen(x[i]);
        squares += static_cast<double>(value) * value;
        most = std::max(most, std::fabs(value));
    }
    input.length = over(std::sqrt(squares));
    input.usable = input.length < LARGEST;  // not if it is a NaN
    if (!input.usable) return input;
    input.factor = most / MOST_INPUT;
    char* bytes = reinterpret_cast<char*>(input.words.data());
    for (int64_t i = 0; i < ins; i++) {
        const double value = widen(x[i]);
        int whole = input.factor > 0 ? static_cast<int>(std::lrint(value / input.factor)) : 0;
        whole = std::max(-MOST_INPUT, std::min(MOST_INPUT, whole));
        const int high = (whole + 128) >> 8, low = whole - high * 256;
        const double rest = value - static_cast<double>(input.factor) * whole;
        lost += rest * rest;
        input.high += high;
        input.low += low;
        bytes[i / 4 * 8 + i % 4] = static_cast<char>(high);
        bytes[i / 4 * 8 + 4 + i % 4] = static_cast<char>(low);
    }
    const double rounding = (2 * ins + 64) * 0x1p-24;
    input.doubt = over(std::sqrt(lost) + rounding * input.length);
    return input;
}

// Of every row and group of 16 outputs, what the largest of its logits is at most and at least: [rows][groups] each.
struct Bounds {
    std::vector<float> most, least;
};

#if defined(__AVX512VNNI__)

constexpr int ROWS = 3;  // by GROUPS groups by two halves of an input: what is summed at once in registers

// One row's sums over a group become bounds.
void bound(const Sketch& sketch, const Input& input, int64_t group, __m512i high, __m512i low, float* most, float* least) {
    const int64_t lanes = sketch.codes.groups() * LANES, first = group * LANES;
    const float *scale = sketch.bounds + first, *error = scale + lanes, *norm = error + lanes;
    high = _mm512_sub_epi32(high, _mm512_set1_epi32(OFFSET * input.high));
    low = _mm512_sub_epi32(low, _mm512_set1_epi32(OFFSET * input.low));
    const f32x16 sum = fma(_mm512_cvtepi32_ps(high), splat(256.0f), _mm512_cvtepi32_ps(low));
    const f32x16 value = sum * (load(scale) * splat(input.factor));
    const f32x16 doubt = fma(load(error), splat(input.length), load(norm) * splat(input.doubt)) + splat(1e-30f);
    const i32x16 there = lane_numbers() < static_cast<int32_t>(std::min<int64_t>(LANES, sketch.codes.outs - first));
    *most = max_lanes(where(there, value + doubt, splat(-INF)))[0];
    *least = max_lanes(where(there, value - doubt, splat(-INF)))[0];
}

// Rows [row, row + M) over a panel of G groups. FETCH: asks for the lines that it will use.
template <int M, int G, bool FETCH>
void tile(const Sketch& sketch, const std::vector<Input>& inputs, int64_t row, int64_t panel, Bounds& bounds) {
    const int64_t steps = sketch.codes.steps(), groups = sketch.codes.groups(), first = panel * GROUPS;
    int64_t apart;
    const Line* lines = sketch.codes.group(first, &apart);
    const uint32_t* words[M];
    for (int m = 0; m < M; m++) words[m] = inputs[row + m].words.data();
    __m512i high[M][G], low[M][G];  // in registers, which needs every loop over them unrolled
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) high[m][g] = low[m][g] = _mm512_setzero_si512();
    for (int64_t step = 0; step < steps; step++, lines += G) {
        if (FETCH)
            for (int g = 0; g < G; g++) __builtin_prefetch(lines + AHEAD + g, 0, 3);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const __m512i above = _mm512_set1_epi32(words[m][2 * step]), below = _mm512_set1_epi32(words[m][2 * step + 1]);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                const __m512i codes = _mm512_load_si512(lines[g].words);
                high[m][g] = _mm512_dpbusd_epi32(high[m][g], codes, above);
                low[m][g] = _mm512_dpbusd_epi32(low[m][g], codes, below);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            const int64_t at = (row + m) * groups + first + g;
            bound(sketch, inputs[row + m], first + g, high[m][g], low[m][g], &bounds.most[at], &bounds.least[at]);
        }
}

template <int M, bool FETCH>
void tile_of_groups(int64_t groups, const Sketch& sketch, const std::vector<Input>& inputs, int64_t row, int64_t panel,
                    Bounds& bounds) {
    switch (groups) {
        case 1: return tile<M, 1, FETCH>(sketch, inputs, row, panel, bounds);
        case 2: return tile<M, 2, FETCH>(sketch, inputs, row, panel, bounds);
        case 3: return tile<M, 3, FETCH>(sketch, inputs, row, panel, bounds);
        default: return tile<M, GROUPS, FETCH>(sketch, inputs, row, panel, bounds);
    }
}

template <bool FETCH>
void some_rows(int64_t rows, int64_t groups, const Sketch& sketch, const std::vector<Input>& inputs, int64_t row,
               int64_t panel, Bounds& bounds) {
    switch (rows) {
        case 1: return tile_of_groups<1, FETCH>(groups, sketch, inputs, row, panel, bounds);
        case 2: return tile_of_groups<2, FETCH>(groups, sketch, inputs, row, panel, bounds);
        default: return tile_of_groups<ROWS, FETCH>(groups, sketch, inputs, row, panel, bounds);
    }
}

Bounds bounds_of(const Sketch& sketch, const std::vector<Input>& inputs) {
    const int64_t rows = inputs.size(), groups = sketch.codes.groups(), panels = (groups + GROUPS - 1) / GROUPS;
    const int64_t per_task = std::max<int64_t>(1, TASK / (sketch.codes.steps() * GROUPS));
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    Bounds bounds{std::vector<float>(rows * groups), std::vector<float>(rows * groups)};
    parallel_for(static_cast<int>((panels + per_task - 1) / per_task), [&](int task) {
        for (int64_t panel = task * per_task; panel < std::min(panels, (task + 1) * per_task); panel++) {
            const int64_t count = std::min<int64_t>(GROUPS, groups - panel * GROUPS);
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t row = rows * t / tiles, end = rows * (t + 1) / tiles;
                (t == 0 ? some_rows<true> : some_rows<false>)(end - row, count, sketch, inputs, row, panel, bounds);
            }
        }
    });
    return bounds;
}

#else

Bounds bounds_of(const Sketch&, const std::vector<Input>&) { __builtin_unreachable(); }  // nobody has a sketch

#endif

// The groups that can hold one of the k largest of a row, in order, from what its groups are at most and at least.
void find_groups(const float* most, const float* least, int64_t groups, int64_t k, std::vector<int64_t>& found) {
    std::vector<float> largest(std::min(k, groups));
    std::partial_sort_copy(least, least + groups, largest.begin(), largest.end(), std::greater<float>());
    float floor = k <= groups ? largest.back() : -INF;
    floor -= std::fabs(floor) * 0x1p-20f;  // what temperature makes equal to the last is wanted too
    for (int64_t group = 0; group < groups; group++)
        if (most[group] >= floor) found.push_back(group);
}

}  // namespace

template <class T>
void choose(const Packed<T>& weight, const Sketch& sketch, const T* x, int64_t x_stride, int64_t rows, const Draw* draws,
            int64_t* tokens) {
    const int64_t groups = weight.groups(), width = weight.steps() * Packed<T>::IN_WORD;
    std::vector<T> padded(rows * width, T{});
    std::vector<Input> inputs(rows);
    for (int64_t row = 0; row < rows; row++) {
        std::memcpy(&padded[row * width], x + row * x_stride, weight.ins * sizeof(T));
        inputs[row] = quantised(&padded[row * width], weight.ins);
    }
    const Bounds bounds = bounds_of(sketch, inputs);
    std::vector<int64_t> found, ends(rows);  // groups of all rows, one row's after another's
    for (int64_t row = 0; row < rows; row++) {
        const int64_t k = draws[row].temperature == 0 ? 1 : draws[row].top_k, at = row * groups;
        if (inputs[row].usable) find_groups(&bounds.most[at], &bounds.least[at], groups, k, found);
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
        for (int64_t i = from; i < ends[row]; i++)
            for (int64_t id = found[i] * LANES; id < std::min(weight.outs, (found[i] + 1) * LANES); id++)
                likeliest.push_back({logits[i * LANES + id % LANES], id});
        tokens[row] = likeliest.empty() ? -1 : sample(likeliest, draws[row]);
    }
}

// Codes and bounds of a group of 16 outputs. Returns whether all of its weights are usable.
template <class T>
bool sketch_group(const Packed<T>& weight, const Packed<uint8_t>& codes, int64_t group, float* bounds) {
    constexpr int IN_WORD = Packed<T>::IN_WORD;
    int64_t apart, codes_apart;
    const Line* lines = weight.group(group, &apart);
    Line* to = const_cast<Line*>(codes.group(group, &codes_apart));
    const auto input = [&](int64_t i) {  // of all 16 outputs
        u32x16 words;
        std::memcpy(&words, &lines[i / IN_WORD * apart], sizeof words);
        if (IN_WORD == 1) return reinterpret_cast<f32x16>(words);
        return reinterpret_cast<f32x16>(i % 2 ? words & 0xffff0000 : words << 16);
    };
    f32x16 most = {}, squares = {}, lost = {};
    for (int64_t i = 0; i < weight.ins; i++) {
        const f32x16 w = input(i), size = where(w < f32x16{}, -w, w);
        most = max(size, most);
        squares = fma(w, w, squares);
    }
    const i32x16 tiny = most < splat(1e-30f);  // all of it is left
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
            const i32x16 code = __builtin_convertvector(whole, i32x16) + OFFSET;
            word |= (reinterpret_cast<u32x16>(code) & 255) << (8 * i);
        }
        std::memcpy(&to[step * codes_apart], &word, sizeof word);
    }
    const int64_t lanes = codes.groups() * LANES;
    bool usable = true;
    for (int lane = 0; lane < LANES; lane++) {
        const double norm = std::sqrt(squares[lane]) * 1.001, rest = std::sqrt(lost[lane]) * 1.001 + norm * 1e-6;
        bounds[group * LANES + lane] = scale[lane];
        bounds[lanes + group * LANES + lane] = over(rest);
        bounds[2 * lanes + group * LANES + lane] = over(norm + rest);
        usable &= norm < LARGEST;  // not if it is a NaN
    }
    return usable;
}

template <class T>
bool sketch(const Packed<T>& weight, uint8_t* codes, float* bounds) {
    const Packed<uint8_t> to{reinterpret_cast<const Line*>(codes), weight.outs, weight.ins};
    std::vector<char> usable(weight.groups());
    const int64_t panels = (weight.groups() + GROUPS - 1) / GROUPS;
    parallel_for(static_cast<int>(panels), [&](int panel) {
        for (int64_t group = panel * GROUPS; group < std::min(weight.groups(), (panel + 1) * int64_t{GROUPS}); group++)
            usable[group] = sketch_group(weight, to, group, bounds);
    });
    return std::find(usable.begin(), usable.end(), 0) == usable.end();
}

}  // namespace penstock

extern "C" {

using namespace penstock;

// Whether there are instructions for it, and no sum can be too large.
int64_t penstock_can_sketch(int64_t ins) {
#if defined(__AVX512VNNI__)
    return ins <= MOST_INS;
#else
    return 0;
#endif
}

#define SKETCH(SUFFIX, T)                                                                                             \
    int64_t penstock_sketch_##SUFFIX(const void* lines, int64_t outs, int64_t ins, uint8_t* codes, float* bounds) {   \
        return sketch<T>({static_cast<const Line*>(lines), outs, ins}, codes, bounds);                                \
    }                                                                                                                 \
    void penstock_choose_##SUFFIX(const void* lines, int64_t outs, int64_t ins, const void* codes,                    \
                                  const float* bounds, const T* x, int64_t x_stride, int64_t rows, const Draw* draws, \
                                  int64_t* tokens) {                                                                  \
        choose<T>({static_cast<const Line*>(lines), outs, ins}, {{static_cast<const Line*>(codes), outs, ins}, bounds}, \
                  x, x_stride, rows, draws, tokens);                                                                  \
    }
SKETCH(bf16, bf16)
SKETCH(f32, float)
#undef SKETCH
}

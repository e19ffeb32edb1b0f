#include "quantised.h"

#include <cmath>
#include <vector>

#include "lanes.h"
#include "pool.h"
#include "tiles.h"

namespace penstock {
namespace {

constexpr int GROUPS_AT_ONCE = QUANTISED_GROUPS;
static_assert(GROUPS_AT_ONCE == 1 || GROUPS_AT_ONCE == 4);
constexpr int PANEL = GROUPS_AT_ONCE * LANES;
constexpr int MOST_ROWS = 6;                          // of a tile
constexpr int64_t ROWS_AT_ONCE = 32 * MOST_ROWS;
// Lines that are asked for before they are used, into the second cache: more of them can be on their way there than into
// the first, and so few are still in it when their turn comes. Tiles use 64 at once.
constexpr int64_t AHEAD = 3072 / sizeof(Line), AHEAD_OF_TILES = 8192 / sizeof(Line);
constexpr int64_t ALONE = 2048;                       // lines times rows that are not worth waking another thread for
constexpr int64_t TASK = 8192;                        // lines that a task has at most, where there are many
constexpr int64_t VALUES = 1 << 14;                   // that are worth waking another thread for
constexpr int64_t BLOCK = 256;                        // lines for one tile after the other, which a first cache has room for
constexpr int MOST_HELD = 12;                         // totals in registers beside as many sums

// --- what codes lie like

// Inputs whose codes lie together, and the lines of 16 outputs that they fill. They become lines of bytes, four inputs
// of each output, or of e4m3 the first and third, then the second and fourth.
template <int BITS>
struct Chunk {
    static constexpr int INS = BITS == 3 ? 32 : BITS == 0 ? 4 : 32 / BITS;
    static constexpr int LINES = BITS == 3 ? 3 : 1;
};

// f(Chunk) of some bits.
template <class F>
auto with_bits(int64_t bits, F&& f) {
    switch (bits) {
        case 2: return f(std::integral_constant<int, 2>{});
        case 3: return f(std::integral_constant<int, 3>{});
        case 4: return f(std::integral_constant<int, 4>{});
        case 8: return f(std::integral_constant<int, 8>{});
        default: return f(std::integral_constant<int, 0>{});
    }
}

PENSTOCK_INLINE u32x16 load_line(const Line& line) { return get<u32x16>(line.words); }

// Bytes number `i` of what a chunk becomes.
template <int BITS>
PENSTOCK_INLINE u32x16 bytes_of(const u32x16 (&lines)[Chunk<BITS>::LINES], int i) {
    if constexpr (BITS == 4) return lines[0] >> (4 * i) & 0x0f0f0f0f;
    if constexpr (BITS == 2) return lines[0] >> (2 * i) & 0x03030303;
    if constexpr (BITS == 3) return (lines[i / 4] >> (i % 4 * 2) & 0x03030303) | (lines[2] >> i & 0x01010101) << 2;
    return lines[0];
}

// The words of one output in a chunk's lines; codes are bytes, INS of them.
template <int BITS>
void encode(const uint8_t* codes, uint32_t (&words)[Chunk<BITS>::LINES]) {
    const auto word = [&](int i) {
        uint32_t bytes;
        std::memcpy(&bytes, codes + 4 * i, 4);
        return bytes;
    };
    if constexpr (BITS == 0) {
        words[0] = codes[0] | codes[2] << 8 | codes[1] << 16 | static_cast<uint32_t>(codes[3]) << 24;
    } else if constexpr (BITS == 3) {
        words[0] = words[1] = words[2] = 0;
        for (int i = 0; i < 8; i++) {
            words[i / 4] |= (word(i) & 0x03030303) << (i % 4 * 2);
            words[2] |= (word(i) >> 2 & 0x01010101) << i;
        }
    } else {
        words[0] = 0;
        for (int i = 0; i < 8 / BITS; i++) words[0] |= word(i) << (BITS * i);
    }
}

template <int BITS>
void decode(const uint32_t (&words)[Chunk<BITS>::LINES], uint8_t* codes) {
    u32x16 lines[Chunk<BITS>::LINES];
    for (int l = 0; l < Chunk<BITS>::LINES; l++) lines[l] = as<u32x16>(splat_i32(static_cast<int32_t>(words[l])));
    for (int i = 0; i < Chunk<BITS>::INS / 4; i++) {
        const uint32_t bytes = bytes_of<BITS>(lines, i)[0];
        std::memcpy(codes + 4 * i, &bytes, 4);
    }
    if constexpr (BITS == 0) std::swap(codes[1], codes[2]);
}

// How many lines of 16 outputs what lies in.
struct Layout {
    int64_t chunk_ins, chunk_lines;
    int64_t head;  // bytes of scales and zeros of a group of inputs

    explicit Layout(const Quantised& weight)
        : head(LANES * (1 + (weight.has_zeros != 0)) * (weight.scales == FLOAT32 ? 4 : 2)) {
        with_bits(weight.bits, [&](auto bits) {
            chunk_ins = Chunk<bits>::INS;
            chunk_lines = Chunk<bits>::LINES;
        });
    }
};

// Up to RUN inputs of one group, from the weight's `first` on; of 16 outputs, how many lines of codes come before it and
// before its group, and how many chunks it is; of a row, the words that come before.
struct Run {
    int64_t first, count, group, lines, lines_of_group, chunks, word;
};

// All of a weight's, and how many groups, lines of codes and words of a row they have together.
struct Runs {
    std::vector<Run> all;
    int64_t groups = 0, lines = 0, words = 0;

    void divide(const Quantised& weight, const Layout& layout, int64_t words_of_chunk) {
        all.clear();
        groups = lines = words = 0;
        for (int64_t begin = 0; begin < weight.ins; begin += weight.width(), groups++) {
            const int64_t end = std::min(weight.ins, begin + weight.width()), before = lines;
            for (int64_t first = begin; first < end; first += RUN) {
                const int64_t count = std::min(RUN, end - first), chunks = (count + layout.chunk_ins - 1) / layout.chunk_ins;
                all.push_back({first, count, groups, lines, before, chunks, words});
                lines += chunks * layout.chunk_lines;
                words += chunks * words_of_chunk;
            }
        }
    }
};

// `apart` groups of 16 outputs, which share lines.
struct Panel {
    const Line* lines;
    int64_t apart, heads;  // heads: lines of scales and zeros of a group of inputs

    Panel(const Quantised& weight, const Layout& layout, const Runs& runs, int64_t panel)
        : lines(weight.lines + panel * lines_of(layout, runs, GROUPS_AT_ONCE)),
          apart(std::min<int64_t>(GROUPS_AT_ONCE, weight.groups() - panel * GROUPS_AT_ONCE)),
          heads(heads_of(layout, apart)) {}

    static int64_t heads_of(const Layout& layout, int64_t apart) { return (apart * layout.head + 63) / 64; }
    static int64_t lines_of(const Layout& layout, const Runs& runs, int64_t apart) {
        return heads_of(layout, apart) * runs.groups + apart * runs.lines;
    }

    // [apart][16] scales, and as many zeros behind them.
    const char* head(const Run& run) const {
        return reinterpret_cast<const char*>(lines + heads * run.group + apart * run.lines_of_group);
    }
    const Line* codes(const Run& run) const { return lines + heads * (run.group + 1) + apart * run.lines; }
};

// 16 scales or zeros.
PENSTOCK_INLINE f32x16 load_scales(int64_t type, const char* from) {
    if (type == FLOAT32) return load(reinterpret_cast<const float*>(from));
    if (type == BFLOAT16) return load(reinterpret_cast<const bf16*>(from));
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    return two<f32xR>(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
#else
    const u32x16 bits = widen_u16(get<u16x16>(from)), size = bits & 0x7fff;
    const f32x16 small = to_f32(size) * splat(0x1p-24f), normal = as<f32x16>((size << 13) + (112u << 23));
    const f32x16 value = where(as<i32x16>(size) < 0x400, small, normal);
    return as<f32x16>(as<u32x16>(value) | (bits & 0x8000) << 16);
#endif
}

// --- what a step of a sum multiplies: of each output, and of a row, some inputs

// Of a kind, ROWS are as many as a tile has at most. Where TOGETHER is not 0, so many steps are summed up in parts of less
// room first.

PENSTOCK_INLINE u32x16 splat_word(uint32_t word) { return as<u32x16>(splat_i32(static_cast<int32_t>(word))); }

// Four codes, which are bytes, with four whole numbers of 8 bits.
#if defined(__AVX512VNNI__)
struct Whole {
    using Sum = i32x16;  // not __m512i, between which and this gcc 12 moves registers
    using Factor = u32x16;
    static constexpr int INS = 4, ROWS = 6, WORDS = 1, TOGETHER = 0;
    static constexpr bool WHOLE = true;
    static Factor factor(u32x16 line) { return line; }
    static Sum add(Sum sum, Factor codes, const uint32_t* x) {
        return as<Sum>(_mm512_dpbusd_epi32(as<__m512i>(sum), as<__m512i>(codes), as<__m512i>(splat_word(*x))));
    }
};
using Small = Whole;
#else
// Both are widened: of a row the first and third of four, then the second and fourth.
struct Whole {
    using Sum = i32x16;
    struct Factor {
        i16x32 even, odd;
    };
    static constexpr int INS = 4, ROWS = 4, WORDS = 2, TOGETHER = 0;
    static constexpr bool WHOLE = true;
    static Factor factor(u32x16 line) { return {as<i16x32>(line & 0x00ff00ff), as<i16x32>(line >> 8 & 0x00ff00ff)}; }
    static Sum add(Sum sum, const Factor& codes, const uint32_t* x) {
        return dot_i16(dot_i16(sum, codes.even, as<i16x32>(splat_word(x[0]))), codes.odd, as<i16x32>(splat_word(x[1])));
    }
};
#if defined(__AVX512BW__) || defined(__AVX2__)
#if defined(__AVX512BW__)
PENSTOCK_INLINE i16x32 dot_u8(u32x16 codes, u32x16 x) {
    return as<i16x32>(_mm512_maddubs_epi16(as<__m512i>(codes), as<__m512i>(x)));
}
#else
PENSTOCK_INLINE i16x32 dot_u8(u32x16 codes, u32x16 x) {
    return two((i16xR)_mm256_maddubs_epi16((__m256i)codes.lo, (__m256i)x.lo),
               (i16xR)_mm256_maddubs_epi16((__m256i)codes.hi, (__m256i)x.hi));
}
#endif
// Of codes below 16, 16 bits have room for the sums of 16 products.
struct Small {
    using Sum = i32x16;
    using Narrow = i16x32;
    using Factor = u32x16;
    static constexpr int INS = 4, ROWS = 4, WORDS = 1, TOGETHER = 8;
    static constexpr bool WHOLE = true;
    static Factor factor(u32x16 line) { return line; }
    static Narrow add(Narrow sum, Factor codes, const uint32_t* x) { return sum + dot_u8(codes, splat_word(*x)); }
    static Sum fold(Sum sum, Narrow some) { return dot_i16(sum, some, as<i16x32>(splat_i32(0x00010001))); }
};
#else
using Small = Whole;
#endif
#endif

#if defined(__AVX512BF16__)
// Two bf16.
struct Pairs {
    using Sum = f32x16;
    using Factor = u32x16;
    static constexpr int INS = 2, ROWS = 6, WORDS = 1, TOGETHER = 0;
    static constexpr bool WHOLE = false;
    static Factor factor(u32x16 line) { return line; }
    static Sum add(Sum sum, Factor weights, const uint32_t* x) {
        return _mm512_dpbf16_ps(sum, as<__m512bh>(splat_word(*x)), as<__m512bh>(weights));
    }
};
#endif

// One float32.
struct Floats {
    using Sum = f32x16;
    using Factor = f32x16;
    static constexpr int INS = 1, ROWS = QUANTISED_GROUPS > 1 ? 6 : 4, WORDS = 1, TOGETHER = 0;
    static constexpr bool WHOLE = false;
    static Factor factor(u32x16 line) { return as<f32x16>(line); }
    static Sum add(Sum sum, Factor weights, const uint32_t* x) { return fma(as<f32x16>(splat_word(*x)), weights, sum); }
};

// What codes of some bits are multiplied as, with rows of T.
template <int BITS, class T>
struct KindOf {
    using Type = Small;
};
template <class T>
struct KindOf<8, T> {
    using Type = Whole;
};
template <class T>
struct KindOf<0, T> {
    using Type = Floats;
};
#if defined(__AVX512BF16__)
template <>
struct KindOf<0, bf16> {
    using Type = Pairs;
};
#endif

// --- floats of 8 bits: a sign, four bits of an exponent that 7 is subtracted from, three of a fraction

inline float widen_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float value = exponent ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                                 : std::ldexp(static_cast<float>(fraction), -9);
    return code & 128 ? -value : value;
}

// As the first or the second half of the words of a line of codes, in the upper byte of 16 bits, to what is multiplied.
#if defined(__AVX512BF16__)
PENSTOCK_INLINE __m512i to_bf16(__m512i codes) {
    alignas(64) static const uint16_t SMALL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i size = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f00));
    const __m512i normal = _mm512_add_epi16(_mm512_srli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x0800));
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(size, 8), _mm512_load_si512(SMALL));
    return _mm512_or_si512(value, _mm512_and_si512(codes, _mm512_set1_epi16(-0x8000)));
}
#endif

// Codes number `i` of each word's four, as float32.
PENSTOCK_INLINE f32x16 to_floats(u32x16 codes, int i) {
    const int at = i == 1 ? 16 : i == 2 ? 8 : 8 * i;
    const u32x16 size = codes >> at & 127, sign = (codes >> at & 128) << 24;
    const f32x16 small = to_f32(as<i32x16>(size)) * splat(0x1p-9f), normal = as<f32x16>((size << 20) + (120u << 23));
    return as<f32x16>(as<u32x16>(where(as<i32x16>(size) < 8, small, normal)) | sign);
}

// --- rows, ready to be multiplied

}  // namespace

struct Inputs {
    Runs runs;
    std::vector<uint32_t> words;   // [rows][words of runs]
    std::vector<float> factors;    // [rows][runs], of whole numbers
    std::vector<float> sums;       // the same, of what is multiplied with codes
    std::vector<int32_t> starts;   // the same: what a sum begins with, where all zeros are one
};

namespace {

// Whole numbers from -127 to 127, and zeros up to whole vectors; returns what they are multiplied by, which is no number
// where one of the values is none.
template <class T>
float quantise(const T* x, int64_t count, int8_t* to, int32_t* sum) {
    f32x16 values[RUN / LANES], most{}, nothing{};
    const int64_t vectors = (count + LANES - 1) / LANES;
    for (int64_t v = 0; v < vectors; v++) {
        const int64_t rest = count - v * LANES;
        values[v] = rest >= LANES ? load(x + v * LANES) : load(x + v * LANES, static_cast<int>(rest));
        most = max(most, max(values[v], -values[v]));
        nothing = fma(values[v], f32x16{}, nothing);
    }
    const float largest = max_lanes(most)[0];
    const f32x16 inverse = splat(largest < 1e-30f ? 0.0f : 127.0f / largest);
    i32x16 total{};
    for (int64_t v = 0; v < vectors; v++) {
        const i32x16 whole = to_whole(values[v] * inverse);
        store_i8(to + v * LANES, whole);
        total += whole;
    }
    *sum = 0;
    for (int i = 0; i < LANES; i++) *sum += total[i];
    return largest / 127.0f + sum_lanes(nothing);
}

// One run of a row to `words`, as many as its chunks have room for, which are zeros.
template <class Kind, class T>
void prepare(const T* x, const Run& run, uint32_t* words, float* factor, int32_t* sum) {
    if constexpr (Kind::WHOLE) {
        int8_t bytes[RUN + 4];
        *factor = quantise(x, run.count, bytes, sum);
        if constexpr (Kind::WORDS == 1) {
            std::memcpy(words, bytes, run.count);
        } else {
            std::memset(bytes + run.count, 0, 4);
            for (int64_t i = 0; i < run.count; i += 4) {
                const int16_t halves[4] = {bytes[i], bytes[i + 2], bytes[i + 1], bytes[i + 3]};
                std::memcpy(words + i / 2, halves, sizeof halves);
            }
        }
    } else if constexpr (Kind::INS == 2) {
        std::memcpy(words, x, run.count * sizeof(T));
    } else {
        for (int64_t i = 0; i < run.count; i++) {
            const float value = widen(x[i]);
            std::memcpy(words + i, &value, 4);
        }
    }
}

template <class Kind, class T>
void prepare_row(const Quantised& weight, const T* x, int64_t row, Inputs& inputs) {
    const int64_t runs = inputs.runs.all.size();
    uint32_t* words = &inputs.words[row * inputs.runs.words];
    T ordered[RUN];
    for (int64_t p = 0; p < runs; p++) {
        const Run& run = inputs.runs.all[p];
        const T* from = x + run.first;
        if (weight.order) {
            for (int64_t i = 0; i < run.count; i++) ordered[i] = x[weight.order[run.first + i]];
            from = ordered;
        }
        int32_t sum = 0;
        prepare<Kind>(from, run, words + run.word, &inputs.factors[row * runs + p], &sum);
        inputs.sums[row * runs + p] = static_cast<float>(sum);
        inputs.starts[row * runs + p] = -static_cast<int32_t>(weight.zero) * sum;
    }
}

template <class Kind, class T>
void prepare_rows(const Quantised& weight, const Layout& layout, const T* x, int64_t x_stride, int64_t rows, Inputs& inputs) {
    inputs.runs.divide(weight, layout, layout.chunk_ins / Kind::INS * Kind::WORDS);
    const int64_t runs = inputs.runs.all.size();
    inputs.words.assign(rows * inputs.runs.words, 0);
    inputs.factors.resize(rows * runs);
    inputs.sums.resize(rows * runs);
    inputs.starts.resize(rows * runs);
    const int64_t together = std::max<int64_t>(1, VALUES / weight.ins);
    parallel_for(static_cast<int>((rows + together - 1) / together), [&](int task) {
        const int64_t end = std::min(rows, (task + 1) * together);
        for (int64_t row = task * together; row < end; row++) prepare_row<Kind>(weight, x + row * x_stride, row, inputs);
    });
}

// --- products

// What BITS become when they are multiplied: step `i` of a chunk.
template <int BITS, class Kind>
PENSTOCK_INLINE u32x16 widened(const u32x16 (&lines)[Chunk<BITS>::LINES], int i) {
    if constexpr (Kind::WHOLE) {
        return bytes_of<BITS>(lines, i);
#if defined(__AVX512BF16__)
    } else if constexpr (Kind::INS == 2) {
        const __m512i codes = as<__m512i>(lines[0]);
        return as<u32x16>(to_bf16(i ? codes : _mm512_slli_epi16(codes, 8)));
#endif
    } else {
        return as<u32x16>(to_floats(lines[0], i));
    }
}

constexpr int READY = -1;  // instead of bits: lines are what is multiplied

// How many lines a tile reads at once of 16 outputs, and how many steps they are.
template <int BITS, class Kind>
struct Reads {
    static constexpr int LINES = Chunk<BITS>::LINES, STEPS = Chunk<BITS>::INS / Kind::INS;
};
template <class Kind>
struct Reads<READY, Kind> {
    static constexpr int LINES = 1, STEPS = 1;
};

// What a tile does: runs [from, to) of some rows.
struct Work {
    const Quantised& weight;
    const Panel& panel;
    const Inputs& inputs;
    int64_t from, to;
    int64_t row;        // the first one
    float* totals;      // [rows][PANEL] from there on; run 0 begins them
    const Line* lines;  // what is multiplied, run after run, if it is not the panel's
    int64_t steps;      // of a chunk of these
    bool alone;         // no other tile reads these lines
    const Line* ahead;
    int64_t fetch;  // of lines from `ahead` on, in each read, where others do
};

// Adds to sums what is read at once.
template <int BITS, class Kind, int M, int G, class Sum>
PENSTOCK_INLINE void add_read(const Line* lines, const uint32_t* words, int64_t stride, Sum (&sums)[M][G]) {
    using Read = Reads<BITS, Kind>;
    u32x16 coded[G][Read::LINES];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int l = 0; l < Read::LINES; l++) coded[g][l] = load_line(lines[g * Read::LINES + l]);
#pragma GCC unroll 8
    for (int i = 0; i < Read::STEPS; i++) {
        typename Kind::Factor factors[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            if constexpr (BITS == READY)
                factors[g] = Kind::factor(coded[g][0]);
            else
                factors[g] = Kind::factor(widened<BITS, Kind>(coded[g], i));
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int g = 0; g < G; g++)
                sums[m][g] = Kind::add(sums[m][g], factors[g], words + m * stride + i * Kind::WORDS);
    }
}

template <class Kind>
PENSTOCK_INLINE typename Kind::Sum beginning(int32_t start) {
    if constexpr (Kind::WHOLE)
        return splat_i32(start);
    else
        return typename Kind::Sum{};
}

template <int BITS, class Kind, int M, int G>
void tile(const Work& work) {
    using Read = Reads<BITS, Kind>;
    constexpr bool HELD = M * G <= MOST_HELD;
    const Runs& runs = work.inputs.runs;
    const int64_t count = runs.all.size(), stride = runs.words, first = work.row * count;
    const uint32_t* inputs = &work.inputs.words[work.row * stride];
    const float *factors = &work.inputs.factors[first], *input_sums = &work.inputs.sums[first];
    const int32_t* starts = &work.inputs.starts[first];
    const int64_t type = work.weight.scales, has_zeros = work.weight.has_zeros, bytes = LANES * (type == FLOAT32 ? 4 : 2);
    const int64_t steps = BITS == READY ? work.steps : 1, fetch = work.fetch;
    const Line *lines = work.lines, *ahead = work.ahead;
    f32x16 held[M][G];  // in registers, which needs every loop over them unrolled
    if constexpr (HELD) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) held[m][g] = work.from ? load(work.totals + m * PANEL + g * LANES) : f32x16{};
    }
    for (int64_t r = work.from; r < work.to; r++) {
        const Run& run = runs.all[r];
        const char* head = work.panel.head(run);
        if (BITS != READY) lines = work.panel.codes(run);
        if (work.alone && run.lines == run.lines_of_group)
            for (int64_t h = 0; h < work.panel.heads; h++) __builtin_prefetch(head + (AHEAD + h) * sizeof(Line), 0, 2);
        const uint32_t* words = inputs + run.word;
        typename Kind::Sum sums[M][G];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) sums[m][g] = beginning<Kind>(starts[m * count + r]);
        const auto read = [&](auto& into) __attribute__((always_inline)) {
            if (BITS != READY && work.alone) {
#pragma GCC unroll 12
                for (int l = 0; l < G * Read::LINES; l++) __builtin_prefetch(lines + AHEAD + l, 0, 2);
            } else {
                for (int64_t f = 0; f < fetch; f++) __builtin_prefetch(ahead++, 0, 3);
            }
            add_read<BITS, Kind>(lines, words, stride, into);
            lines += G * Read::LINES;
            words += Read::STEPS * Kind::WORDS;
        };
        int64_t reads = run.chunks * steps;
        if constexpr (Kind::TOGETHER > 0) {
            while (reads > 0) {
                typename Kind::Narrow some[M][G] = {};
                int64_t now = std::min<int64_t>(reads, Kind::TOGETHER / Read::STEPS);
                for (reads -= now; now > 0; now--) read(some);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) sums[m][g] = Kind::fold(sums[m][g], some[m][g]);
            }
        } else {
            for (; reads > 0; reads--) read(sums);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            const f32x16 scale = load_scales(type, head + g * bytes);
            f32x16 zero{};
            if (has_zeros) zero = -load_scales(type, head + (G + g) * bytes);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                f32x16 value, by = scale;
                if constexpr (Kind::WHOLE) {
                    value = to_f32(sums[m][g]);
                    if (has_zeros) value = fma(zero, splat(input_sums[m * count + r]), value);
                    by *= splat(factors[m * count + r]);
                } else {
                    value = sums[m][g];
                }
                float* total = work.totals + m * PANEL + g * LANES;
                if constexpr (HELD)
                    held[m][g] = fma(value, by, held[m][g]);
                else
                    store(total, fma(value, by, r ? load(total) : f32x16{}));
            }
        }
    }
    if constexpr (HELD) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) store(work.totals + m * PANEL + g * LANES, held[m][g]);
    }
}

#if defined(PENSTOCK_TILES)
// From how many rows on, and of how many inputs that share a scale, whole numbers are multiplied in tiles, whose sums are
// the same; and of how many rows.
constexpr int64_t TILED_FROM = 16, TILED_WIDTH = 64, TILED_ROWS = 2 * TILE_ROWS;

// Adds a run's products of G groups, which are in `sums`, to the totals.
template <int G, bool ZEROS>
void add_products(const Work& work, const Run& run, int64_t r, int rows, const int32_t (*sums)[PANEL]) {
    const int64_t count = work.inputs.runs.all.size(), first = work.row * count + r;
    const float *factors = &work.inputs.factors[first], *input_sums = &work.inputs.sums[first];
    const int32_t* starts = &work.inputs.starts[first];
    const int64_t type = work.weight.scales, bytes = LANES * (type == FLOAT32 ? 4 : 2);
    const char* head = work.panel.head(run);
    f32x16 scales[G], zeros[G];
    for (int g = 0; g < G; g++) {
        scales[g] = load_scales(type, head + g * bytes);
        if (ZEROS) zeros[g] = -load_scales(type, head + (G + g) * bytes);
    }
    for (int m = 0; m < rows; m++) {
        const f32x16 factor = splat(factors[m * count]), input_sum = splat(input_sums[m * count]);
        const i32x16 start = splat_i32(starts[m * count]);
        float* totals = work.totals + m * PANEL;
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            f32x16 value = to_f32(get<i32x16>(sums[m] + g * LANES) + start);
            if (ZEROS) value = fma(zeros[g], input_sum, value);
            store(totals + g * LANES, fma(value, scales[g] * factor, r ? load(totals + g * LANES) : f32x16{}));
        }
    }
}

// `tile` of READY lines, or of the panel's where these are bytes.
template <int G>
void tile_in_tiles(const Work& work, int rows, TileRegisters& registers) {
    alignas(64) int32_t sums[TILED_ROWS][PANEL];
    const Runs& runs = work.inputs.runs;
    const Line* lines = work.lines;
    const int most = tile_groups(rows);
    const int64_t fetch = work.alone ? G * TILE_WORDS : 0;
    for (int64_t r = work.from; r < work.to; r++) {
        const Run& run = runs.all[r];
        const int64_t words = run.chunks * work.steps;
        if (!work.lines) lines = work.panel.codes(run);
        const char* x = reinterpret_cast<const char*>(&work.inputs.words[work.row * runs.words + run.word]);
        for (int g = 0; g < G; g += most)
            add_words<true>(registers, rows, std::min(most, G - g),
                            {x, runs.words * 4, lines + g, G, g ? 0 : fetch, lines + AHEAD_OF_TILES}, words, sums[0] + g * LANES,
                            PANEL, true);
        lines += words * G;
        work.weight.has_zeros ? add_products<G, true>(work, run, r, rows, sums)
                              : add_products<G, false>(work, run, r, rows, sums);
    }
}
#endif

using Tile = void (*)(const Work&);

template <int BITS, class Kind, int G>
Tile tile_of_rows(int64_t rows) {
    if constexpr (Kind::ROWS == 6) {
        static constexpr Tile TILES[] = {tile<BITS, Kind, 1, G>, tile<BITS, Kind, 2, G>, tile<BITS, Kind, 3, G>,
                                         tile<BITS, Kind, 4, G>, tile<BITS, Kind, 5, G>, tile<BITS, Kind, 6, G>};
        return TILES[rows - 1];
    } else {
        static constexpr Tile TILES[] = {tile<BITS, Kind, 1, G>, tile<BITS, Kind, 2, G>, tile<BITS, Kind, 3, G>,
                                         tile<BITS, Kind, 4, G>};
        static_assert(Kind::ROWS == 4);
        return TILES[rows - 1];
    }
}

// Of all groups of a panel; READY ones also where there are fewer.
template <int BITS, class Kind>
Tile tile_of(int64_t rows, int64_t groups) {
    if constexpr (BITS == READY && GROUPS_AT_ONCE > 1) {
        switch (groups) {
            case 1: return tile_of_rows<BITS, Kind, 1>(rows);
            case 2: return tile_of_rows<BITS, Kind, 2>(rows);
            case 3: return tile_of_rows<BITS, Kind, 3>(rows);
        }
    }
    return tile_of_rows<BITS, Kind, GROUPS_AT_ONCE>(rows);
}

// Chunks of `apart` groups become lines as tiles want them, [steps][apart].
template <int BITS, class Kind>
void unpack(const Line* from, int64_t chunks, int64_t apart, Line* to) {
    using Read = Reads<BITS, Kind>;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t g = 0; g < apart; g++) {
            u32x16 coded[Read::LINES];
#pragma GCC unroll 4
            for (int l = 0; l < Read::LINES; l++) coded[l] = load_line(*from++);
#pragma GCC unroll 8
            for (int i = 0; i < Read::STEPS; i++)
                put(to[(chunk * Read::STEPS + i) * apart + g].words, widened<BITS, Kind>(coded, i));
        }
}

// Sums of rows over panels, before a bias.
template <int BITS, class Kind>
struct Product {
    static constexpr int ROWS = Kind::ROWS;
    static constexpr int STEPS = Chunk<BITS>::INS / Kind::INS;
    // Tiles for which it is less to widen codes as they are multiplied than once before.
    static constexpr int64_t MOST_DIRECT = BITS == 8 ? ROWS_AT_ONCE : GROUPS_AT_ONCE > 1 && Kind::WHOLE ? 4 : 1;
    const Quantised& weight;
    const Layout& layout;
    const Inputs& inputs;

    // Rows [row, row + rows), at most ROWS_AT_ONCE, to totals [rows][PANEL].
    void operator()(int64_t row, int64_t rows, int64_t number, float* totals) const {
        const Panel panel(weight, layout, inputs.runs, number);
#if defined(PENSTOCK_TILES)
        const bool tiled = Kind::WHOLE && rows >= TILED_FROM && weight.width() >= TILED_WIDTH;
#else
        const bool tiled = false;
#endif
        const int64_t runs = inputs.runs.all.size(), tiles = (rows + ROWS - 1) / ROWS;
        const bool ready = tiled || panel.apart < GROUPS_AT_ONCE || tiles > MOST_DIRECT;
        Work work{weight, panel, inputs, 0, runs, row, totals, nullptr, STEPS, tiles == 1, nullptr, 0};
        if (!ready && work.alone) {
            tile_of<BITS, Kind>(rows, panel.apart)(work);
            return;
        }
        for (; work.from < runs; work.from = work.to) {
            take(work, ready);
            if (ready && !(tiled && BITS == 8)) unpack_some(work);
            if (tiled)
                add_in_tiles(work, rows);
            else
                add(work, rows, tiles, ready);
        }
    }

    // As many runs as there is room for.
    void take(Work& work, bool ready) const {
        int64_t taken = 0;
        for (work.to = work.from; work.to < static_cast<int64_t>(inputs.runs.all.size()); work.to++) {
            taken += inputs.runs.all[work.to].chunks * (ready ? STEPS : layout.chunk_lines) * work.panel.apart;
            if (taken > BLOCK && work.to > work.from) break;
        }
    }

    void unpack_some(Work& work) const {
        alignas(64) static thread_local Line unpacked[std::max<int64_t>(BLOCK, RUN / Kind::INS * GROUPS_AT_ONCE)];
        Line* to = unpacked;
        for (int64_t r = work.from; r < work.to; r++) {
            const Run& run = inputs.runs.all[r];
            unpack<BITS, Kind>(work.panel.codes(run), run.chunks, work.panel.apart, to);
            to += run.chunks * STEPS * work.panel.apart;
        }
        work.lines = unpacked;
    }

    void add_in_tiles(Work work, int64_t rows) const {
#if defined(PENSTOCK_TILES)
        if constexpr (Kind::WHOLE) {
            TileRegisters registers;
            const int64_t row = work.row, tiles = (rows + TILED_ROWS - 1) / TILED_ROWS;
            float* totals = work.totals;
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t first = rows * t / tiles;
                work.row = row + first;
                work.totals = totals + first * PANEL;
                work.alone = BITS == 8 && t == 0;  // the first one reads from memory
                const int count = static_cast<int>(rows * (t + 1) / tiles - first);
                switch (work.panel.apart) {
                    case 1: tile_in_tiles<1>(work, count, registers); break;
                    case 2: tile_in_tiles<2>(work, count, registers); break;
                    case 3: tile_in_tiles<3>(work, count, registers); break;
                    default: tile_in_tiles<4>(work, count, registers);
                }
            }
        }
#endif
    }

    // Tiles share the lines of the next block, to ask for them.
    void add(Work work, int64_t rows, int64_t tiles, bool ready) const {
        const Run &begin = inputs.runs.all[work.from], &last = inputs.runs.all[work.to - 1];
        const Line* here = work.panel.codes(begin);
        const Line* next = work.panel.codes(last) + last.chunks * layout.chunk_lines * work.panel.apart;
        int64_t reads = 0;
        for (int64_t r = work.from; r < work.to; r++) reads += inputs.runs.all[r].chunks * (ready ? STEPS : 1);
        const int64_t fetch = (next - here + reads - 1) / reads;  // in each read, by all tiles
        const int64_t row = work.row;
        float* totals = work.totals;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first, from = fetch * t / tiles;
            work.row = row + first;
            work.totals = totals + first * PANEL;
            work.ahead = next + from * reads;
            work.fetch = fetch * (t + 1) / tiles - from;
            (ready ? tile_of<READY, Kind>(count, work.panel.apart) : tile_of<BITS, Kind>(count, work.panel.apart))(work);
        }
    }
};

template <class T, class Out>
void finish(const float* totals, const T* bias, Out* out, int64_t out_stride, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t count = std::min<int64_t>(LANES, columns - c);
            f32x16 sum = load(totals + r * PANEL + c);
            Out* to = out + r * out_stride + c;
            if (count == LANES) {
                if (bias) sum += load(bias + c);
                store(to, sum);
            } else {
                if (bias) sum += load(bias + c, count);
                store(to, sum, count);
            }
        }
}

// Tasks take turns between as many ranges of panels as there are threads, so that each of these mostly stays in one.
struct Ranges {
    int64_t panels, count, each;  // panels of a range

    Ranges(const Quantised& weight, int64_t lines, int64_t rows)
        : panels((weight.groups() + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE) {
        count = panels * lines * rows <= ALONE ? 1 : std::min<int64_t>(threads(), panels);
        each = (panels + count - 1) / count;
    }
};

// f(row, rows, panel) for all blocks of rows and all panels of so many lines.
template <class F>
void each_block(const Quantised& weight, int64_t lines, int64_t rows, int64_t multiple, F&& f) {
    const Ranges all(weight, lines, rows);
    const int64_t panels = all.panels, ranges = all.count, range = all.each;
    const int64_t blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t block = ((rows + blocks - 1) / blocks + multiple - 1) / multiple * multiple;
    const int64_t per_task = ranges == 1 ? range : std::max<int64_t>(1, std::min(TASK / lines, range * blocks / 8));
    const int64_t chunks = (range + per_task - 1) / per_task;
    parallel_for(static_cast<int>(chunks * ranges * blocks), [&](int task) {
        const int64_t row = task / (chunks * ranges) * block, chunk = task % (chunks * ranges) / ranges;
        const int64_t from = task % ranges * range, until = std::min(panels, from + range);
        const int64_t first = from + chunk * per_task, last = std::min(until, first + per_task);
        if (row < rows)
            for (int64_t panel = first; panel < last; panel++) f(row, std::min(block, rows - row), panel);
    });
}

}  // namespace

namespace {

// Some rows by one panel, from the output on that it begins with.
template <int BITS, class Kind, class T, class Out>
void multiply(const Product<BITS, Kind>& product, int64_t row, int64_t rows, int64_t panel, const T* bias, Out* out,
              int64_t out_stride) {
    alignas(64) static thread_local float totals[ROWS_AT_ONCE * PANEL];
    const int64_t column = panel * PANEL;
    product(row, rows, panel, totals);
    finish(totals, bias ? bias + column : nullptr, out + column, out_stride, rows,
           std::min<int64_t>(PANEL, product.weight.outs - column));
}

}  // namespace

template <class T>
const Inputs& prepare(const Quantised& kind, const T* x, int64_t x_stride, int64_t rows) {
    static thread_local Inputs inputs;  // whose memory is used again
    Inputs& mine = inputs;              // other threads have their own
    const Layout layout(kind);
    with_bits(kind.bits, [&](auto bits) {
        prepare_rows<typename KindOf<bits, T>::Type>(kind, layout, x, x_stride, rows, mine);
    });
    return mine;
}

template <class T, class Out>
void linear(const Quantised& weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, Out* out,
            int64_t out_stride) {
    if (rows == 0) return;
    const Layout layout(weight);
    const Inputs& inputs = prepare(weight, x, x_stride, rows);
    with_bits(weight.bits, [&](auto bits) {
        using Kind = typename KindOf<bits, T>::Type;
        const Product<bits, Kind> product{weight, layout, inputs};
        const int64_t lines = Panel::lines_of(layout, inputs.runs, GROUPS_AT_ONCE);
        each_block(weight, lines, rows, Kind::ROWS, [&](int64_t row, int64_t count, int64_t panel) {
            multiply(product, row, count, panel, bias, out + row * out_stride, out_stride);
        });
    });
}

void read_next(const Quantised& weight) {
    static thread_local Runs runs;
    const Layout layout(weight);
    runs.divide(weight, layout, 0);
    const int64_t lines = Panel::lines_of(layout, runs, GROUPS_AT_ONCE);
    read_next(weight.lines, Ranges(weight, lines, 1).each * lines * static_cast<int64_t>(sizeof(Line)));
}

template <class T>
void linear(const Quantised& weight, const Inputs& inputs, int64_t row, int64_t rows, T* out, int64_t out_stride) {
    const Layout layout(weight);
    with_bits(weight.bits, [&](auto bits) {
        const Product<bits, typename KindOf<bits, T>::Type> product{weight, layout, inputs};
        for (int64_t panel = 0; panel * PANEL < weight.outs; panel++)
            for (int64_t from = 0; from < rows; from += ROWS_AT_ONCE)
                multiply(product, row + from, std::min(ROWS_AT_ONCE, rows - from), panel, static_cast<const T*>(nullptr),
                         out + from * out_stride, out_stride);
    });
}

template void linear(const Quantised&, const float*, int64_t, int64_t, const float*, float*, int64_t);
template void linear(const Quantised&, const bf16*, int64_t, int64_t, const bf16*, bf16*, int64_t);
template void linear(const Quantised&, const bf16*, int64_t, int64_t, const bf16*, float*, int64_t);
template void linear(const Quantised&, const Inputs&, int64_t, int64_t, float*, int64_t);
template void linear(const Quantised&, const Inputs&, int64_t, int64_t, bf16*, int64_t);
template const Inputs& prepare(const Quantised&, const float*, int64_t, int64_t);
template const Inputs& prepare(const Quantised&, const bf16*, int64_t, int64_t);

namespace {

template <int BITS>
float value_of(uint8_t code, float scale, float zero) {
    if constexpr (BITS == 0) return scale * widen_e4m3(code);
    return scale * (static_cast<float>(code) - zero);
}

// Where an output is in its panel.
struct Place {
    Panel panel;
    int64_t within;  // of groups of 16
    int lane;
    int64_t bytes;  // of 16 scales

    Place(const Quantised& weight, const Layout& layout, const Runs& runs, int64_t output)
        : panel(weight, layout, runs, output / PANEL),
          within(output % PANEL / LANES),
          lane(static_cast<int>(output % LANES)),
          bytes(layout.head / (1 + (weight.has_zeros != 0))) {}

    // 16 scales (0) or zeros (1).
    const char* head(const Run& run, int64_t kind) const {
        return panel.head(run) + (kind * panel.apart + within) * bytes;
    }
    // The lines of a chunk: those of bytes alternate, others lie together.
    const Line* chunk(const Run& run, const Layout& layout, int64_t chunk) const {
        return panel.codes(run) + (chunk * panel.apart + within) * layout.chunk_lines;
    }
};

template <int BITS, class T>
void dequantise(const Quantised& weight, const Layout& layout, const Runs& runs, int64_t output, T* out) {
    constexpr int INS = Chunk<BITS>::INS, LINES = Chunk<BITS>::LINES;
    const Place place(weight, layout, runs, output);
    for (const Run& run : runs.all) {
        const float scale = load_scales(weight.scales, place.head(run, 0))[place.lane];
        const float zero =
            weight.has_zeros ? load_scales(weight.scales, place.head(run, 1))[place.lane] : static_cast<float>(weight.zero);
        for (int64_t chunk = 0; chunk < run.chunks; chunk++) {
            uint32_t words[LINES];
            uint8_t codes[INS];
            for (int l = 0; l < LINES; l++) words[l] = place.chunk(run, layout, chunk)[l].words[place.lane];
            decode<BITS>(words, codes);
            for (int64_t i = 0; i < std::min<int64_t>(INS, run.count - chunk * INS); i++) {
                const int64_t input = run.first + chunk * INS + i;
                const float value = value_of<BITS>(codes[i], scale, zero);
                T& to = out[weight.order ? weight.order[input] : input];
                if constexpr (sizeof(T) == 2)
                    to = narrow(value);
                else
                    to = value;
            }
        }
    }
}

// An output's scales and zeros, [groups of inputs], and its codes, a byte each, [ins] in the weight's order.
template <int BITS>
void put(const Quantised& weight, const Layout& layout, const Runs& runs, int64_t output, const uint8_t* codes,
         const char* scales, const char* zeros) {
    constexpr int INS = Chunk<BITS>::INS, LINES = Chunk<BITS>::LINES;
    const Place place(weight, layout, runs, output);
    const int64_t size = place.bytes / LANES;
    const auto set = [&](const char* head, const char* from) {
        std::memcpy(const_cast<char*>(head) + place.lane * size, from, size);
    };
    for (const Run& run : runs.all) {
        set(place.head(run, 0), scales + run.group * size);
        if (weight.has_zeros) set(place.head(run, 1), zeros + run.group * size);
        for (int64_t chunk = 0; chunk < run.chunks; chunk++) {
            uint8_t some[INS] = {};
            std::memcpy(some, codes + run.first + chunk * INS, std::min<int64_t>(INS, run.count - chunk * INS));
            uint32_t words[LINES];
            encode<BITS>(some, words);
            Line* lines = const_cast<Line*>(place.chunk(run, layout, chunk));
            for (int l = 0; l < LINES; l++) lines[l].words[place.lane] = words[l];
        }
    }
}

}  // namespace

template <class T>
void gather(const Quantised& weight, const int64_t* tokens, int64_t count, T* out) {
    const Layout layout(weight);
    Runs runs;
    runs.divide(weight, layout, 0);
    const int64_t together = std::max<int64_t>(1, VALUES / weight.ins);
    parallel_for(static_cast<int>((count + together - 1) / together), [&](int task) {
        for (int64_t i = task * together; i < std::min(count, (task + 1) * together); i++)
            with_bits(weight.bits,
                      [&](auto bits) { dequantise<bits>(weight, layout, runs, tokens[i], out + i * weight.ins); });
    });
}

template void gather(const Quantised&, const int64_t*, int64_t, float*);
template void gather(const Quantised&, const int64_t*, int64_t, bf16*);

}  // namespace penstock

extern "C" {

using namespace penstock;

// Groups of a panel.
int64_t penstock_quantised_groups() { return QUANTISED_GROUPS; }

int64_t penstock_quantised_bytes(const Quantised* weight) {
    const Layout layout(*weight);
    Runs runs;
    runs.divide(*weight, layout, 0);
    const int64_t whole = weight->groups() / GROUPS_AT_ONCE, rest = weight->groups() % GROUPS_AT_ONCE;
    const int64_t lines = whole * Panel::lines_of(layout, runs, GROUPS_AT_ONCE) + Panel::lines_of(layout, runs, rest);
    return lines * static_cast<int64_t>(sizeof(Line));
}

// Outputs [first, first + count): codes [count, ins], a byte each and in the weight's order; scales and zeros
// [count, groups of inputs], as they are kept.
void penstock_quantised_put(const Quantised* weight, int64_t first, int64_t count, const uint8_t* codes, const char* scales,
                            const char* zeros) {
    const Layout layout(*weight);
    Runs runs;
    runs.divide(*weight, layout, 0);
    const int64_t panels = first / PANEL, row = runs.groups * (weight->scales == FLOAT32 ? 4 : 2);
    parallel_for(static_cast<int>((first + count + PANEL - 1) / PANEL - panels), [&](int task) {
        const int64_t begin = std::max(first, (panels + task) * PANEL);
        const int64_t end = std::min(first + count, (panels + task + 1) * PANEL);
        for (int64_t output = begin; output < end; output++) {
            const int64_t at = output - first;
            with_bits(weight->bits, [&](auto bits) {
                put<bits>(*weight, layout, runs, output, codes + at * weight->ins, scales + at * row,
                          zeros ? zeros + at * row : nullptr);
            });
        }
    });
}

void penstock_quantised_gather_f32(const Quantised* weight, const int64_t* tokens, int64_t count, float* out) {
    gather(*weight, tokens, count, out);
}
void penstock_quantised_gather_bf16(const Quantised* weight, const int64_t* tokens, int64_t count, bf16* out) {
    gather(*weight, tokens, count, out);
}

#define LINEAR(NAME, T, OUT)                                                                                           \
    void NAME(const Quantised* weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, OUT* out,           \
              int64_t out_stride) {                                                                                    \
        linear<T, OUT>(*weight, x, x_stride, rows, bias, out, out_stride);                                             \
    }
LINEAR(penstock_quantised_linear_f32, float, float)
LINEAR(penstock_quantised_linear_bf16, bf16, bf16)
LINEAR(penstock_quantised_linear_bf16_wide, bf16, float)
#undef LINEAR
}

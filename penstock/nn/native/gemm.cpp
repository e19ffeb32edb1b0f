#include "gemm.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <vector>

#include "pack.h"
#include "pool.h"

namespace penstock {
namespace {

// What is summed at once in registers: ROWS rows by GROUPS groups of outputs.
#if defined(__AVX512F__)
constexpr int ROWS = 6;
#else
constexpr int ROWS = 3;
#endif
constexpr int PANEL = GROUPS * LANES;
constexpr int64_t FEW_STEPS = 128 / GROUPS;    // 8 KiB of lines, for two tiles
constexpr int64_t SOME_STEPS = 512 / GROUPS;   // 32 KiB
constexpr int64_t MANY_STEPS = 4096 / GROUPS;  // 256 KiB, which second caches have room for
constexpr int64_t MANY_TILES = 8;
constexpr int64_t ROWS_AT_ONCE = 32 * ROWS;
constexpr int64_t AHEAD = 8192 / sizeof(Line);  // lines that are asked for before they are used
constexpr int64_t ALONE = 2048;                 // lines times rows that are not worth waking another thread for
constexpr int64_t TASK = 16384;                 // lines that a task has at most, where there are many

inline uint32_t word_at(const char* x) {
    uint32_t word;
    std::memcpy(&word, x, 4);
    return word;
}

template <class T>
f32x16 multiply_add(f32x16 sum, uint32_t word, const Line& line);

template <>
inline f32x16 multiply_add<float>(f32x16 sum, uint32_t word, const Line& line) {
    float x;
    std::memcpy(&x, &word, 4);
    return fma(splat(x), load(reinterpret_cast<const float*>(line.words)), sum);
}

template <>
inline f32x16 multiply_add<bf16>(f32x16 sum, uint32_t word, const Line& line) {
#if defined(__AVX512BF16__)
    const __m512i weights = _mm512_load_si512(line.words);
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(word)), reinterpret_cast<__m512bh>(weights));
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    // in halves, because gcc 12 fails on the vectors of 64 bytes below
    const __m256 even = _mm256_castsi256_ps(_mm256_set1_epi32(word << 16));
    const __m256i high = _mm256_set1_epi32(0xffff0000);
    const __m256 odd = _mm256_castsi256_ps(_mm256_set1_epi32(word & 0xffff0000));
    __m256 sums[2];
    std::memcpy(sums, &sum, sizeof sums);
    for (int i = 0; i < 2; i++) {
        const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i*>(line.words) + i);
        sums[i] = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(weights, 16)), sums[i]);
        sums[i] = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(weights, high)), sums[i]);
    }
    std::memcpy(&sum, sums, sizeof sums);
    return sum;
#else
    u32x16 weights;
    std::memcpy(&weights, line.words, sizeof weights);
    const u32x16 even = u32x16{} + (word << 16), odd = u32x16{} + (word & 0xffff0000);
    sum = fma(reinterpret_cast<f32x16>(even), reinterpret_cast<f32x16>(weights << 16), sum);
    return fma(reinterpret_cast<f32x16>(odd), reinterpret_cast<f32x16>(weights & 0xffff0000), sum);
#endif
}

// Adds `steps` words of M rows times G groups to sums [M][PANEL], which begin as zeros if `first`. In each step FETCH
// lines from `ahead` on are asked for.
template <class T, int M, int G, int FETCH>
void tile(const char* x, int64_t stride, const Line* lines, int64_t steps, float* sums, bool first, const Line* ahead) {
    f32x16 sum[M][G];  // in registers, which needs every loop over it unrolled
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) sum[m][g] = first ? f32x16{} : load(sums + m * PANEL + g * LANES);
    for (int64_t step = 0; step < steps; step++) {
        for (int f = 0; f < FETCH; f++) __builtin_prefetch(ahead + f, 0, 3);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const uint32_t word = word_at(x + m * stride);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) sum[m][g] = multiply_add<T>(sum[m][g], word, lines[g]);
        }
        x += 4;
        lines += G;
        ahead += FETCH;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) store(sums + m * PANEL + g * LANES, sum[m][g]);
}

using Tile = void (*)(const char*, int64_t, const Line*, int64_t, float*, bool, const Line*);

template <class T, int G, int FETCH>
Tile tile_of_rows(int rows) {
    static constexpr Tile TILES[] = {
        tile<T, 1, G, FETCH>,
        tile<T, 2, G, FETCH>,
        tile<T, 3, G, FETCH>,
#if defined(__AVX512F__)
        tile<T, 4, G, FETCH>,
        tile<T, 5, G, FETCH>,
        tile<T, 6, G, FETCH>,
#endif
    };
    static_assert(sizeof TILES / sizeof *TILES == ROWS);
    return TILES[rows - 1];
}

// `fetch` is 0, 1, 2 or `groups`.
template <class T>
Tile tile_of(int rows, int groups, int fetch) {
    if (groups == GROUPS) {
        switch (fetch) {
            case 0: return tile_of_rows<T, GROUPS, 0>(rows);
            case 1: return tile_of_rows<T, GROUPS, 1>(rows);
            case 2: return tile_of_rows<T, GROUPS, 2>(rows);
            default: return tile_of_rows<T, GROUPS, GROUPS>(rows);
        }
    }
    if constexpr (GROUPS > 2) {
        if (groups == 2) return tile_of_rows<T, 2, 0>(rows);
        if (groups == 3) return tile_of_rows<T, 3, 0>(rows);
    }
    return tile_of_rows<T, 1, 0>(rows);
}

template <class T, class Out>
struct Product {
    const Packed<T>& weight;
    const char* x;
    int64_t x_stride;  // bytes
    const T* bias;
    Out* out;
    int64_t out_stride;

    // Rows [row, row + rows), at most ROWS_AT_ONCE, of panels [first, last). `begins`: nobody has asked for the first
    // panel's lines. Those up to panel `until` are asked for here: whoever does this is likely to go on with them.
    void operator()(int64_t row, int64_t rows, int64_t first, int64_t last, bool begins, int64_t until) const {
        const Line* end = weight.lines + until * GROUPS * weight.steps();
        const Tiles warm(rows, false), cold(rows, true);
        for (int64_t panel = first; panel < last; panel++)
            one(row, panel, begins && panel == first ? cold : warm, warm, end);
    }

    // How tiles share rows, and of each step's lines of the next block those that they ask for.
    struct Tiles {
        struct Part {
            int64_t first, rows, from, lines;
        };
        Part parts[ROWS_AT_ONCE / ROWS];
        int64_t count, rows;
        bool streams;  // the first one reads from memory itself, and asks for what it is about to use

        Tiles(int64_t rows, bool cold) : count((rows + ROWS - 1) / ROWS), rows(rows), streams(cold || count == 1) {
            const int64_t shares = count - streams;
            for (int64_t t = 0; t < count; t++) {
                const int64_t first = rows * t / count, share = t - streams;
                const int64_t from = share < 0 ? 0 : GROUPS * share / shares;
                parts[t] = {first, rows * (t + 1) / count - first, from,
                            share < 0 ? GROUPS : GROUPS * (share + 1) / shares - from};
            }
        }
    };

    // Lines come from memory once, also when several tiles use them: a block of them stays in a cache while one tile
    // after the other adds it to its sums, and all along the next block is on its way, which may be the next panel's.
    // `opening` is for the first block, `tiles` for the others; `end` is where nobody will have use for lines.
    void one(int64_t row, int64_t panel, const Tiles& opening, const Tiles& tiles, const Line* end) const {
        alignas(64) static thread_local float sums[ROWS_AT_ONCE * PANEL];
        const int64_t steps = weight.steps();
        int64_t groups;
        const Line* lines = weight.group(panel * GROUPS, &groups);
        const int64_t most = tiles.count == 1            ? steps
                             : tiles.count == 2          ? FEW_STEPS
                             : tiles.count < MANY_TILES ? SOME_STEPS
                                                        : MANY_STEPS;
        const int64_t blocks = (steps + most - 1) / most, block = (steps + blocks - 1) / blocks;
        for (int64_t from = 0; from < steps; from += block) {
            const int64_t count = std::min(block, steps - from);
            const Line *here = lines + from * groups, *next = here + count * groups;
            const Tiles& now = from == 0 ? opening : tiles;
            for (int64_t t = 0; t < now.count; t++) {
                const auto& part = now.parts[t];
                const bool stream = now.streams && t == 0;
                const Line* ahead = stream ? here + AHEAD : next + part.from * count;
                tile_of<T>(part.rows, groups, stream || ahead < end ? part.lines : 0)(
                    x + (row + part.first) * x_stride + from * 4, x_stride, here, count, sums + part.first * PANEL,
                    from == 0, ahead);
            }
        }
        finish(sums, row, tiles.rows, panel * PANEL);
    }

    void finish(const float* sums, int64_t row, int64_t rows, int64_t column) const {
        const int64_t columns = std::min<int64_t>(PANEL, weight.outs - column);
        for (int64_t r = 0; r < rows; r++) {
            Out* to = out + (row + r) * out_stride + column;
            for (int64_t c = 0; c < columns; c += LANES) {
                const int64_t count = std::min<int64_t>(LANES, columns - c);
                f32x16 sum = load(sums + r * PANEL + c);
                if (count == LANES) {
                    if (bias) sum += load(bias + column + c);
                    store(to + c, sum);
                } else {
                    if (bias) sum += load(bias + column + c, count);
                    store(to + c, sum, count);
                }
            }
        }
    }
};

}  // namespace

template <class T, class Out>
void linear(const Packed<T>& weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, Out* out,
            int64_t out_stride) {
    const int64_t steps = weight.steps(), ins = steps * Packed<T>::IN_WORD;
    std::vector<T> padded;
    if (ins != weight.ins) {  // the last word must not reach into the next row, which may be no number
        padded.resize(rows * ins, T{});
        for (int64_t r = 0; r < rows; r++) std::memcpy(&padded[r * ins], x + r * x_stride, weight.ins * sizeof(T));
        x = padded.data();
        x_stride = ins;
    }
    const Product<T, Out> product{
        weight, reinterpret_cast<const char*>(x), x_stride * static_cast<int64_t>(sizeof(T)), bias, out, out_stride};
    const int64_t panels = (weight.outs + PANEL - 1) / PANEL, lines = steps * GROUPS;
    const int64_t blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t block = blocks ? ((rows + blocks - 1) / blocks + ROWS - 1) / ROWS * ROWS : 0;
    // Tasks take turns between as many ranges of panels as there are threads, so that each of these mostly stays in one.
    const int64_t ranges = panels * lines * rows <= ALONE ? 1 : std::min<int64_t>(threads(), panels);
    const int64_t range = (panels + ranges - 1) / ranges;
    const int64_t per_task = ranges == 1 ? range : std::max<int64_t>(1, std::min(TASK / lines, range * blocks / 8));
    const int64_t chunks = (range + per_task - 1) / per_task;
    parallel_for(chunks * ranges * blocks, [&](int task) {
        const int64_t row = task / (chunks * ranges) * block, chunk = task % (chunks * ranges) / ranges;
        const int64_t from = task % ranges * range, until = std::min(panels, from + range);
        const int64_t first = from + chunk * per_task, last = std::min(until, first + per_task);
        if (row < rows && first < last) product(row, std::min(block, rows - row), first, last, chunk == 0, until);
    });
}

template void linear(const Packed<float>&, const float*, int64_t, int64_t, const float*, float*, int64_t);
template void linear(const Packed<bf16>&, const bf16*, int64_t, int64_t, const bf16*, bf16*, int64_t);
template void linear(const Packed<bf16>&, const bf16*, int64_t, int64_t, const bf16*, float*, int64_t);

namespace {

// N groups at once, because each sum waits for itself.
template <class T, int N>
void some_outputs(const Packed<T>& weight, const T* x, const int64_t* groups, float* out) {
    const Line* lines[N];
    int64_t apart[N];
    f32x16 sums[N] = {};
    for (int n = 0; n < N; n++) lines[n] = weight.group(groups[n], &apart[n]);
    const char* words = reinterpret_cast<const char*>(x);
    for (int64_t step = 0; step < weight.steps(); step++) {
        const uint32_t word = word_at(words + step * 4);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            sums[n] = multiply_add<T>(sums[n], word, *lines[n]);
            lines[n] += apart[n];
        }
    }
    for (int n = 0; n < N; n++) store(out + n * LANES, sums[n]);
}

}  // namespace

template <class T>
void outputs(const Packed<T>& weight, const T* x, const int64_t* groups, int64_t count, float* out) {
    for (; count >= 4; count -= 4, groups += 4, out += 4 * LANES) some_outputs<T, 4>(weight, x, groups, out);
    for (; count > 0; count--, groups++, out += LANES) some_outputs<T, 1>(weight, x, groups, out);
}

template void outputs(const Packed<float>&, const float*, const int64_t*, int64_t, float*);
template void outputs(const Packed<bf16>&, const bf16*, const int64_t*, int64_t, float*);

template <class T>
void gather(const Packed<T>& weight, const int64_t* tokens, int64_t count, T* out) {
    const int64_t steps = weight.steps();
    const auto one = [&](int i) {
        int64_t apart;
        const Line* line = weight.group(tokens[i] / LANES, &apart);
        const int64_t lane = tokens[i] % LANES;
        char* to = reinterpret_cast<char*>(out + i * weight.ins);
        const int64_t whole = weight.ins / Packed<T>::IN_WORD;
        for (int64_t step = 0; step < whole; step++) std::memcpy(to + step * 4, &line[step * apart].words[lane], 4);
        if (whole < steps) std::memcpy(to + whole * 4, &line[whole * apart].words[lane], sizeof(T));
    };
    if (count * steps * LANES <= ALONE * 8) {
        for (int i = 0; i < count; i++) one(i);
    } else {
        parallel_for(count, one);
    }
}

template void gather(const Packed<float>&, const int64_t*, int64_t, float*);
template void gather(const Packed<bf16>&, const int64_t*, int64_t, bf16*);

// Steps [step, to), at most 16, of rows [begin, end), which are all of one group; the first is at `row`.
template <class T>
void pack_tile(const Packed<T>& weight, const T* row, int64_t begin, int64_t end, int64_t step, int64_t to) {
    int64_t apart;
    Line* lines = const_cast<Line*>(weight.group(begin / LANES, &apart));
    const int64_t lane = begin % LANES, lanes = end - begin, whole = weight.ins / Packed<T>::IN_WORD;
    const int64_t count = std::min(to, whole) - step;
    if (lanes == LANES && count > 0) {
        f32x16 words[LANES];
        for (int i = 0; i < LANES; i++) words[i] = load_units(row + i * weight.ins + step * Packed<T>::IN_WORD, count);
        transpose(words);
        for (int64_t i = 0; i < count; i++) std::memcpy(&lines[(step + i) * apart], &words[i], sizeof(Line));
        step += count;
    }
    for (; step < to; step++)
        for (int64_t i = 0; i < lanes; i++) {
            uint32_t word = 0;
            std::memcpy(&word, row + i * weight.ins + step * Packed<T>::IN_WORD, step < whole ? 4 : sizeof(T));
            lines[step * apart].words[lane + i] = word;
        }
}

// Rows [first, first + rows) of a weight that has weight.outs of them, into its lines. A panel is written from its first
// line to its last.
template <class T>
void pack(const Packed<T>& weight, const T* from, int64_t first, int64_t rows) {
    const int64_t steps = weight.steps(), last = first + rows;
    parallel_for((last + PANEL - 1) / PANEL - first / PANEL, [&](int task) {
        const int64_t panel = (first / PANEL + task) * PANEL;
        for (int64_t step = 0; step < steps; step += LANES)
            for (int64_t group = panel; group < panel + PANEL; group += LANES) {
                const int64_t begin = std::max(first, group), end = std::min(last, group + LANES);
                if (begin >= end) continue;
                pack_tile(weight, from + (begin - first) * weight.ins, begin, end, step, std::min(steps, step + LANES));
            }
    });
}

}  // namespace penstock

extern "C" {

using namespace penstock;

// Groups of a panel.
int64_t penstock_panel_groups() { return GROUPS; }

// Memory that is read from end to end in every step is better off with large pages. To be called before it is touched.
void penstock_advise_large_pages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20, begin = reinterpret_cast<uintptr_t>(memory), end = begin + bytes;
    const uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // may fail, is only advice
#endif
}

void penstock_pack_bf16(void* lines, int64_t outs, int64_t ins, const void* from, int64_t first, int64_t rows) {
    pack<bf16>({static_cast<Line*>(lines), outs, ins}, static_cast<const bf16*>(from), first, rows);
}
void penstock_pack_f32(void* lines, int64_t outs, int64_t ins, const void* from, int64_t first, int64_t rows) {
    pack<float>({static_cast<Line*>(lines), outs, ins}, static_cast<const float*>(from), first, rows);
}

void penstock_gather_bf16(const void* lines, int64_t outs, int64_t ins, const int64_t* tokens, int64_t count, void* out) {
    gather<bf16>({static_cast<const Line*>(lines), outs, ins}, tokens, count, static_cast<bf16*>(out));
}
void penstock_gather_f32(const void* lines, int64_t outs, int64_t ins, const int64_t* tokens, int64_t count, void* out) {
    gather<float>({static_cast<const Line*>(lines), outs, ins}, tokens, count, static_cast<float*>(out));
}

#define LINEAR(NAME, T, OUT)                                                                                          \
    void NAME(const void* lines, int64_t outs, int64_t ins, const T* x, int64_t x_stride, int64_t rows, const T* bias, \
              OUT* out, int64_t out_stride) {                                                                         \
        linear<T, OUT>({static_cast<const Line*>(lines), outs, ins}, x, x_stride, rows, bias, out, out_stride);       \
    }
LINEAR(penstock_linear_f32, float, float)
LINEAR(penstock_linear_bf16, bf16, bf16)
LINEAR(penstock_linear_bf16_wide, bf16, float)
#undef LINEAR
}

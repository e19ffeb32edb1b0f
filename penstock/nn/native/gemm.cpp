#include "gemm.h"

#include <algorithm>
#include <vector>

#include "pack.h"
#include "pool.h"
#include "tiles.h"

namespace penstock {
namespace {

// What is summed at once in registers: ROWS rows by all groups of a panel, or, where registers have room for fewer, by one
// of them; of FEW_ROWS by both.
// Of bfloat16 that are multiplied in tiles, ROWS by as many groups as there is room for (tiles.h).
template <class T>
#if defined(PENSTOCK_TILES)
constexpr bool IN_TILES = sizeof(T) == 2;
#else
constexpr bool IN_TILES = false;
#endif
template <class T>
constexpr int ROWS = IN_TILES<T> ? 32 : 6;
template <class T>
constexpr int STREAMED = IN_TILES<T> ? 16 : 6;  // rows that need each line once
template <class T>
constexpr int64_t WORDS = IN_TILES<T> ? 16 : 1;  // that sums are made of at once
#if defined(__AVX512F__)
constexpr bool WIDE = true;
#else
constexpr bool WIDE = false;
#endif
constexpr int FEW_ROWS = 3;
constexpr int PANEL = GROUPS * LANES;
constexpr int64_t FEW_STEPS = 128 / GROUPS;    // 8 KiB of lines, for two tiles
constexpr int64_t SOME_STEPS = 512 / GROUPS;   // 32 KiB
constexpr int64_t MANY_STEPS = 4096 / GROUPS;  // 256 KiB, which second caches have room for
constexpr int64_t TILED_STEPS = 256 / GROUPS;  // 16 KiB, beside which a first cache has room for a tile's inputs
constexpr int64_t MANY_TILES = 8;
template <class T>
constexpr int64_t ROWS_AT_ONCE = IN_TILES<T> ? 256 : 192;
constexpr int64_t AHEAD = 8192 / sizeof(Line);  // lines that are asked for before they are used
constexpr int64_t ALONE = 2048;                 // lines times rows that are not worth waking another thread for
constexpr int64_t TASK = 16384;                 // lines that a task has at most, where there are many

// Whether weights are widened, and inputs before them: tiles of M rows, [step][IN_WORD][M] floats each. Where there are
// instructions for a word, inputs stay as they are.
template <class T>
#if defined(__AVX512BF16__)
constexpr bool TILED = false;
#elif defined(__AVX512F__)
constexpr bool TILED = sizeof(T) == 2;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool TILED = sizeof(T) == 4;
#else
constexpr bool TILED = true;
#endif
template <class T>
constexpr int64_t WIDENING = sizeof(float) / sizeof(T);
constexpr int64_t TILED_BYTES = 16 << 20;   // of inputs that are widened at once
constexpr int64_t CACHED_BYTES = 384 << 10;  // of them, that every panel in turn is multiplied with

inline uint32_t word_at(const char* x) {
    uint32_t word;
    std::memcpy(&word, x, 4);
    return word;
}

// What each output's weight of a word's first or second input is.
template <class T>
PENSTOCK_INLINE f32x16 weights_of(const Line& line, int input) {
    const f32x16 words = get<f32x16>(line.words);
    if constexpr (sizeof(T) == 4) return words;
    return input ? second_of_two(words) : first_of_two(words);
}

template <class T>
PENSTOCK_INLINE f32x16 multiply_add(f32x16 sum, uint32_t word, const Line& line) {
    if constexpr (sizeof(T) == 2) {
#if defined(__AVX512BF16__)
        const __m512i weights = _mm512_load_si512(line.words);
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(word)),
                                reinterpret_cast<__m512bh>(weights));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(__AVX512F__)
        return dot_bf16(sum, as<f32x16>(splat_i32(word)), get<f32x16>(line.words));
#else
        const f32x16 x = as<f32x16>(splat_i32(word));
        sum = fma(first_of_two(x), weights_of<T>(line, 0), sum);
        return fma(second_of_two(x), weights_of<T>(line, 1), sum);
#endif
    } else {
        float x;
        std::memcpy(&x, &word, 4);
        return fma(splat(x), weights_of<T>(line, 0), sum);
    }
}

// Adds `steps` words of M rows times G groups to sums [M][PANEL], which begin as zeros if `first`. A group's lines are
// `apart` from one another. In each step FETCH lines from `ahead` on are asked for. Where inputs are not tiled, those of
// rows are `stride` bytes apart; where they are, those of the next tile at `then` are asked for.
template <class T, int M, int G, int FETCH>
void tile(const char* x, int64_t stride, const Line* lines, int64_t apart, int64_t steps, float* sums, bool first,
          const Line* ahead, const char* then) {
    f32x16 sum[M][G];  // in registers, which needs every loop over it unrolled
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) sum[m][g] = first ? f32x16{} : load(sums + m * PANEL + g * LANES);
    for (int64_t step = 0; step < steps; step++) {
        for (int f = 0; f < FETCH; f++) __builtin_prefetch(ahead + f, 0, 3);
        if constexpr (TILED<T>) {
            if constexpr (M > FEW_ROWS) __builtin_prefetch(then, 0, 3);
            then += Packed<T>::IN_WORD * M * sizeof(float);
#pragma GCC unroll 2
            for (int i = 0; i < Packed<T>::IN_WORD; i++) {
                f32x16 weights[G];
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) weights[g] = weights_of<T>(lines[g], i);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    const f32x16 input = splat(reinterpret_cast<const float*>(x)[i * M + m]);
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) sum[m][g] = fma(input, weights[g], sum[m][g]);
                }
            }
            x += Packed<T>::IN_WORD * M * sizeof(float);
        } else {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const uint32_t word = word_at(x + m * stride);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) sum[m][g] = multiply_add<T>(sum[m][g], word, lines[g]);
            }
            x += 4;
        }
        lines += WIDE ? G : apart;
        ahead += FETCH;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) store(sums + m * PANEL + g * LANES, sum[m][g]);
}

using Tile = void (*)(const char*, int64_t, const Line*, int64_t, int64_t, float*, bool, const Line*,
                      const char*);

template <class T, int G, int FETCH>
Tile tile_of_rows(int rows) {
    if constexpr (WIDE || G == 1) {
        static constexpr Tile TILES[] = {tile<T, 1, G, FETCH>, tile<T, 2, G, FETCH>, tile<T, 3, G, FETCH>,
                                         tile<T, 4, G, FETCH>, tile<T, 5, G, FETCH>, tile<T, 6, G, FETCH>};
        static_assert(sizeof TILES / sizeof *TILES == ROWS<float>);
        return TILES[rows - 1];
    } else {
        static constexpr Tile TILES[] = {tile<T, 1, G, FETCH>, tile<T, 2, G, FETCH>, tile<T, 3, G, FETCH>};
        return TILES[rows - 1];
    }
}

template <class T, int G>
Tile tile_that_fetches(int rows, int fetch) {
    switch (fetch) {
        case 0: return tile_of_rows<T, G, 0>(rows);
        case 1: return tile_of_rows<T, G, 1>(rows);
        case 2: return tile_of_rows<T, G, 2>(rows);
        default: return tile_of_rows<T, G, GROUPS>(rows);
    }
}

// How many groups of a panel's a tile of so many rows takes at once.
template <class T>
int at_once(int rows, int groups) {
#if defined(PENSTOCK_TILES)
    if (IN_TILES<T>) return std::min(groups, tile_groups(rows));
#endif
#if defined(__AVX512F__)
    return rows ? groups : 0;
#else
    return rows <= FEW_ROWS ? groups : 1;
#endif
}

// `fetch` is 0, 1, 2 or GROUPS, and 0 for some groups of a panel that has fewer.
template <class T>
Tile tile_of(int rows, int groups, int fetch) {
    if (groups == GROUPS) return tile_that_fetches<T, GROUPS>(rows, fetch);
    if constexpr (GROUPS > 2) {
        if (groups == 2) return tile_of_rows<T, 2, 0>(rows);
        if (groups == 3) return tile_of_rows<T, 3, 0>(rows);
        return tile_of_rows<T, 1, 0>(rows);
    }
    return tile_that_fetches<T, 1>(rows, fetch);
}

template <class T, class Out>
struct Product {
    const Packed<T>& weight;
    const char* x;     // as rows, or as tiles (see TILED)
    int64_t x_stride;  // bytes that a row has, or a tile for each of its rows
    const T* bias;
    Out* out;
    int64_t out_stride;

    // Rows [row, row + rows), at most ROWS_AT_ONCE<T>, of panels [first, last). `begins`: nobody has asked for the first
    // panel's lines. Those up to panel `until` are asked for here: whoever does this is likely to go on with them.
    void operator()(int64_t row, int64_t rows, int64_t first, int64_t last, bool begins, int64_t until) const {
        const Line* end = weight.lines + until * GROUPS * weight.steps();
        const Tiles warm(rows, false), cold(rows, true);
#if defined(PENSTOCK_TILES)
        TileRegisters registers;
#else
        const int registers = 0;
#endif
        for (int64_t panel = first; panel < last; panel++)
            one(row, panel, begins && panel == first ? cold : warm, warm, end, registers);
    }

    // How tiles share rows, and of each step's lines of the next block those that they ask for.
    struct Tiles {
        struct Part {
            int64_t first, rows, from, lines;
        };
        Part parts[ROWS_AT_ONCE<T> / ROWS<T>];
        int64_t count, rows;
        bool streams;  // the first one reads from memory itself, and asks for what it is about to use

        Tiles(int64_t rows, bool cold) : count((rows + ROWS<T> - 1) / ROWS<T>), rows(rows), streams(cold || rows <= STREAMED<T>) {
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
    template <class Registers>
    void one(int64_t row, int64_t panel, const Tiles& opening, const Tiles& tiles, const Line* end,
             Registers& registers) const {
        alignas(64) static thread_local float sums[ROWS_AT_ONCE<T> * PANEL];
        const int64_t steps = weight.steps();
        int64_t groups;
        const Line* lines = weight.group(panel * GROUPS, &groups);
        const int64_t most = tiles.count == 1 && at_once<T>(tiles.rows, groups) == groups ? steps
                             : TILED<T>                                               ? TILED_STEPS
                             : IN_TILES<T>                                            ? SOME_STEPS
                             : tiles.count <= 2                                       ? FEW_STEPS
                             : tiles.count < MANY_TILES                               ? SOME_STEPS
                                                                                      : MANY_STEPS;
        const int64_t blocks = (steps + most - 1) / most, even = (steps + blocks - 1) / blocks;
        const int64_t block = (even + WORDS<T> - 1) / WORDS<T> * WORDS<T>;
        for (int64_t from = 0; from < steps; from += block) {
            const int64_t count = std::min(block, steps - from);
            const Line *here = lines + from * groups, *next = here + count * groups;
            const Tiles& now = from == 0 ? opening : tiles;
            for (int64_t t = 0; t < now.count; t++) {
                const auto& part = now.parts[t];
                const bool stream = now.streams && t == 0;
                const Line* ahead = stream ? here + AHEAD : next + part.from * count;
                const int64_t fetch = stream || ahead < end ? part.lines : 0;
                const char* inputs = inputs_of(row, part, from);
                const char* then = t + 1 < now.count ? inputs_of(row, now.parts[t + 1], from)
                                                     : inputs_of(row, now.parts[0], from + count < steps ? from + count : 0);
                const int together = at_once<T>(part.rows, groups);
#if defined(PENSTOCK_TILES)
                if constexpr (IN_TILES<T>) {
                    const int64_t passes = (groups + together - 1) / together, each = fetch * TILE_WORDS / passes;
                    for (int64_t pass = 0; pass < passes; pass++) {
                        const int g = pass * together;
                        const TileInputs at{inputs, x_stride, here + g, groups, each, ahead + pass * each * (count / TILE_WORDS)};
                        add_words<false>(registers, part.rows, std::min<int>(together, groups - g), at, count,
                                         sums + part.first * PANEL + g * LANES, PANEL, from == 0);
                    }
                    continue;
                }
#endif
                for (int g = 0; g < groups; g += together)
                    tile_of<T>(part.rows, together, g == 0 ? fetch : 0)(
                        inputs, x_stride, here + g, groups, count, sums + part.first * PANEL + g * LANES, from == 0,
                        ahead, then);
            }
        }
        finish(sums, row, tiles.rows, panel * PANEL);
    }

    // Of a tile, from a step on.
    const char* inputs_of(int64_t row, const typename Tiles::Part& part, int64_t step) const {
        return x + (row + part.first) * x_stride + step * 4 * (TILED<T> ? part.rows * WIDENING<T> : 1);
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

namespace {

// Some rows, from the first on, become a tile. Inputs that fill up the last word are zeros.
template <class T>
void widen_rows(const T* x, int64_t x_stride, int64_t rows, int64_t ins, int64_t width, float* to) {
    if (rows == 1) {
        int64_t d = 0;
        for (; d + LANES <= ins; d += LANES) store(to + d, load(x + d));
        for (; d < ins; d++) to[d] = widen(x[d]);
    } else {
        for (int64_t r = 0; r < rows; r++) {
            const T* from = x + r * x_stride;
            for (int64_t d = 0; d < ins; d++) to[d * rows + r] = widen(from[d]);
        }
    }
    std::fill(to + ins * rows, to + width * rows, 0.0f);
}

// How rows are shared: in blocks of `block`.
struct Blocks {
    int64_t count, block;

    // Of at most so many rows, and whole tiles.
    Blocks(int64_t rows, int64_t most, int64_t tile) : count((rows + most - 1) / most) {
        block = count ? ((rows + count - 1) / count + tile - 1) / tile * tile : 0;
    }
};

// Tasks take turns between as many ranges of panels as there are threads, so that each of these mostly stays in one.
struct Ranges {
    int64_t panels, lines, count, each;  // lines of a panel; panels of a range

    template <class T>
    Ranges(const Packed<T>& weight, int64_t rows)
        : panels((weight.outs + PANEL - 1) / PANEL), lines(weight.steps() * GROUPS) {
        count = panels * lines * rows <= ALONE ? 1 : std::min<int64_t>(threads_here(), panels);
        each = (panels + count - 1) / count;
    }
};

template <class T, class Out>
void multiply(const Product<T, Out>& product, int64_t rows, const Blocks& blocks) {
    const Ranges all(product.weight, rows);
    const int64_t ranges = all.count, range = all.each;
    const int64_t most = std::max<int64_t>(1, std::min(TASK / all.lines, range * blocks.count / 8));
    const int64_t per_task = ranges == 1 ? range : most;
    const int64_t chunks = (range + per_task - 1) / per_task;
    parallel_for(chunks * ranges * blocks.count, [&](int task) {
        const int64_t row = task / (chunks * ranges) * blocks.block, chunk = task % (chunks * ranges) / ranges;
        const int64_t from = task % ranges * range, until = std::min(all.panels, from + range);
        const int64_t first = from + chunk * per_task, last = std::min(until, first + per_task);
        if (row < rows && first < last)
            product(row, std::min(blocks.block, rows - row), first, last, chunk == 0, until);
    });
}

template <class T, class Out>
void multiply_tiled(const Packed<T>& weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, Out* out,
                    int64_t out_stride) {
    static thread_local std::vector<float> tiles;
    const int64_t width = weight.steps() * Packed<T>::IN_WORD;
    const int64_t cached = CACHED_BYTES / (width * static_cast<int64_t>(sizeof(float))) / ROWS<T> * ROWS<T>;
    const Blocks blocks(rows, std::clamp<int64_t>(cached, 2 * ROWS<T>, ROWS_AT_ONCE<T>), ROWS<T>);
    if (static_cast<int64_t>(tiles.size()) < rows * width) tiles.resize(rows * width);
    float* to = tiles.data();
    const int64_t most = blocks.block / ROWS<T>;
    const auto widen_tile = [&](int64_t task) {
        const int64_t row = task / most * blocks.block, count = std::min(blocks.block, rows - row), t = task % most;
        const int64_t parts = (count + ROWS<T> - 1) / ROWS<T>;
        if (t >= parts) return;
        const int64_t first = row + count * t / parts, last = row + count * (t + 1) / parts;
        widen_rows(x + first * x_stride, x_stride, last - first, weight.ins, width, to + first * width);
    };
    if (rows <= ROWS<T>)
        widen_tile(0);
    else
        parallel_for(static_cast<int>(blocks.count * most), widen_tile);
    multiply<T, Out>({weight, reinterpret_cast<const char*>(to), width * static_cast<int64_t>(sizeof(float)), bias, out,
                      out_stride},
                     rows, blocks);
}

}  // namespace

template <class T, class Out>
void linear(const Packed<T>& weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, Out* out,
            int64_t out_stride) {
    const int64_t ins = weight.steps() * Packed<T>::IN_WORD;
    if constexpr (TILED<T>) {
        const int64_t fit = TILED_BYTES / sizeof(float) / ins / ROWS_AT_ONCE<T> * ROWS_AT_ONCE<T>;
        const int64_t most = std::max<int64_t>(ROWS_AT_ONCE<T>, fit);
        for (int64_t row = 0; row < rows; row += most)
            multiply_tiled(weight, x + row * x_stride, x_stride, std::min(most, rows - row), bias,
                           out + row * out_stride, out_stride);
        return;
    }
    std::vector<T> padded;
    if (ins != weight.ins) {  // the last word must not reach into the next row, which may be no number
        padded.resize(rows * ins, T{});
        for (int64_t r = 0; r < rows; r++) std::memcpy(&padded[r * ins], x + r * x_stride, weight.ins * sizeof(T));
        x = padded.data();
        x_stride = ins;
    }
    multiply<T, Out>({weight, reinterpret_cast<const char*>(x), x_stride * static_cast<int64_t>(sizeof(T)), bias, out,
                      out_stride},
                     rows, Blocks(rows, ROWS_AT_ONCE<T>, ROWS<T>));
}

template void linear(const Packed<float>&, const float*, int64_t, int64_t, const float*, float*, int64_t);
template void linear(const Packed<bf16>&, const bf16*, int64_t, int64_t, const bf16*, bf16*, int64_t);
template void linear(const Packed<bf16>&, const bf16*, int64_t, int64_t, const bf16*, float*, int64_t);

template <class T>
void read_next(const Packed<T>& weight) {
    const Ranges all(weight, 1);
    read_next(weight.lines, all.each * all.lines * static_cast<int64_t>(sizeof(Line)));
}

template void read_next(const Packed<float>&);
template void read_next(const Packed<bf16>&);

template <class T>
void head_linear(const Line* lines, int64_t heads, int64_t outs, int64_t ins, const T* x, int64_t x_stride, int64_t x_head,
                 int64_t rows, T* out, int64_t out_stride, int64_t out_head) {
    const Packed<T> first{lines, outs, ins};
    const int64_t each = first.groups() * first.steps();
    parallel_for(static_cast<int>(heads), [&](int h) {
        const Packed<T> own{lines + h * each, outs, ins};
        linear<T, T>(own, x + h * x_head, x_stride, rows, nullptr, out + h * out_head, out_stride);
    });
}

template void head_linear(const Line*, int64_t, int64_t, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t,
                          int64_t);
template void head_linear(const Line*, int64_t, int64_t, int64_t, const bf16*, int64_t, int64_t, int64_t, bf16*, int64_t,
                          int64_t);

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
#if defined(PENSTOCK_TILES)
    if constexpr (IN_TILES<T>) {
        TileRegisters registers;
        for (int64_t g = 0; g < count; g++) {
            int64_t apart;
            const Line* lines = weight.group(groups[g], &apart);
            const TileInputs from{reinterpret_cast<const char*>(x), 0, lines, apart, TILE_WORDS, lines + 4 * TILE_WORDS};
            add_words<false>(registers, 1, 1, from, weight.steps(), out + g * LANES, LANES, true);
        }
        return;
    }
#endif
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

#define HEAD_LINEAR(NAME, T)                                                                                            \
    void NAME(const void* lines, int64_t heads, int64_t outs, int64_t ins, const T* x, int64_t x_stride, int64_t x_head, \
              int64_t rows, T* out, int64_t out_stride, int64_t out_head) {                                              \
        head_linear(static_cast<const Line*>(lines), heads, outs, ins, x, x_stride, x_head, rows, out, out_stride,       \
                    out_head);                                                                                           \
    }
HEAD_LINEAR(penstock_head_linear_f32, float)
HEAD_LINEAR(penstock_head_linear_bf16, bf16)
#undef HEAD_LINEAR
}

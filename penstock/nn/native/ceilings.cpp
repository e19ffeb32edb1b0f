// What this machine can do at most, for kernels to be measured against.
#include <algorithm>
#include <atomic>

#include "pool.h"
#include "tiles.h"
#include "vec.h"

namespace penstock {
namespace {

std::atomic<float> unread;  // keeps what is computed from being optimised away

constexpr int64_t AHEAD = 2048;  // bytes; later than that, and earlier, it is slower

u32x16 read(const char* from, int64_t bytes) {
    u32x16 sums[4] = {};
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) __builtin_prefetch(from + i + AHEAD + j * 64, 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[j] ^= get<u32x16>(from + i + j * 64);
    }
    return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}

constexpr int PIECES = 16;  // for each thread: one that wakes late still gets its share
// Sums that do not wait for one another, of so many lanes as a register has: more than any multiplication takes cycles
// times how many begin in one, and few enough for the registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int SUMS = 12;
#else
constexpr int SUMS = 24;
#endif

template <class V, class Step>
void repeat(int64_t times, Step step) {
    parallel_for(PIECES * threads(), [&](int) {
        V sums[SUMS];  // all different, or a compiler computes one for all
#pragma GCC unroll 32
        for (int j = 0; j < SUMS; j++) sums[j] = V{} + static_cast<float>(j);
        for (int64_t i = 0; i < times / PIECES; i++)
#pragma GCC unroll 32
            for (int j = 0; j < SUMS; j++) sums[j] = step(sums[j]);
        V all{};
#pragma GCC unroll 32
        for (int j = 0; j < SUMS; j++) all += sums[j];
        unread = all[0];
    });
}

}  // namespace
}  // namespace penstock

extern "C" {

using namespace penstock;

// Reads memory once, on all threads.
void penstock_read(const void* memory, int64_t bytes) {
    constexpr int64_t PIECE = 1 << 20;
    parallel_for((bytes + PIECE - 1) / PIECE, [&](int task) {
        const int64_t first = task * PIECE, count = std::min(bytes - first, PIECE);
        unread = as<f32x16>(read(static_cast<const char*>(memory) + first, count))[0];
    });
}

// On every thread, `times` (a multiple of PIECES) * SUMS instructions, or four of tiles, that multiply and add numbers of
// float32, or of bfloat16 where there are instructions for that. Returns how many multiplications that is for a thread.
int64_t penstock_multiply(int64_t times, int64_t is_bf16) {
#if defined(PENSTOCK_TILES)
    if (is_bf16) {
        parallel_for(PIECES * threads(), [&](int) {
            TileRegisters registers;
            registers.shape(2 * TILE_ROWS);
            for (int64_t i = 0; i < times / PIECES; i++) {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        });
        return times * 4 * TILE_ROWS * TILE_WORDS * 2 * LANES;
    }
#endif
#if defined(__AVX512BF16__)
    if (is_bf16) {
        const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi32(times));
        repeat<f32x16>(times, [&](f32x16 sum) -> f32x16 { return _mm512_dpbf16_ps(sum, one, one); });
        return times * SUMS * 2 * LANES;
    }
#endif
#if defined(__AVX512F__)
    using Register = f32x16;
#else
    using Register = f32xR;
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (is_bf16) {
        const f32xR one = as<f32xR>(i32xR{} + static_cast<int32_t>(times));
        repeat<f32xR>(times, [&](f32xR sum) { return dot_bf16(sum, one, one); });
        return times * SUMS * 2 * (sizeof one / sizeof(float));
    }
#endif
#endif
    const Register one = Register{} + static_cast<float>(times);
    repeat<Register>(times, [&](Register sum) { return fma(one, one, sum); });
    return times * SUMS * static_cast<int64_t>(sizeof(Register) / sizeof(float));
}
}

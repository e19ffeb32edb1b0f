// What this machine can do at most, for kernels to be measured against.
#include <atomic>

#include "pool.h"
#include "vec.h"

namespace penstock {
namespace {

std::atomic<float> unread;  // keeps what is computed from being optimised away

f32x16 read(const char* from, int64_t bytes) {
    u32x16 sums[4] = {};
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
        __builtin_prefetch(from + i + 8192, 0, 2);
        __builtin_prefetch(from + i + 8192 + 64, 0, 2);
        __builtin_prefetch(from + i + 8192 + 128, 0, 2);
        __builtin_prefetch(from + i + 8192 + 192, 0, 2);
        for (int j = 0; j < 4; j++) {
            u32x16 x;
            std::memcpy(&x, from + i + j * 64, sizeof x);
            sums[j] ^= x;
        }
    }
    return reinterpret_cast<f32x16>(sums[0] ^ sums[1] ^ sums[2] ^ sums[3]);
}

constexpr int PIECES = 16;  // for each thread: one that wakes late still gets its share

template <class Step>
void repeat(int64_t times, Step step) {
    parallel_for(PIECES * threads(), [&](int) {
        f32x16 sums[16];  // all different, or a compiler computes one for all
        for (int j = 0; j < 16; j++) sums[j] = splat(static_cast<float>(j));
        for (int64_t i = 0; i < times / PIECES; i++)
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) sums[j] = step(sums[j]);
        f32x16 all{};
        for (const f32x16& sum : sums) all += sum;
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
        const int64_t first = task * PIECE, count = bytes - first < PIECE ? bytes - first : PIECE;
        unread = read(static_cast<const char*>(memory) + first, count)[0];
    });
}

// On every thread, `times` (a multiple of PIECES) * 16 multiplications and additions of 16 lanes of float32, or of 32 of bfloat16 where there
// are instructions for that. Returns how many of those one instruction counts for.
int64_t penstock_multiply(int64_t times, int64_t is_bf16) {
#if defined(__AVX512BF16__)
    if (is_bf16) {
        const __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi32(times));
        repeat(times, [&](f32x16 sum) -> f32x16 { return _mm512_dpbf16_ps(sum, one, one); });
        return 2 * LANES;
    }
#endif
    const f32x16 one = splat(static_cast<float>(times));
    repeat(times, [&](f32x16 sum) { return fma(one, one, sum); });
    return LANES;
}
}

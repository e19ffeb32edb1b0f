// x @ weight.T + bias over packed weights.
//
// Packed, a weight [outs, ins] is a row of panels of GROUPS * 16 outputs, the last of as many groups as are left. A
// panel is [steps][groups] lines of 64 bytes, and is read from its first byte to its last. A line holds, for 16 outputs,
// what one 32-bit word of an input row is multiplied with: one float32, or two neighbouring bfloat16. Outputs and inputs
// that fill up a line are zeros.
//
// Every output is one sum in float32 over the inputs in their order, however many rows there are: a row's results do not
// depend on the others, to the bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace penstock {

#if defined(__AVX512F__)
constexpr int GROUPS = 4;
#else
constexpr int GROUPS = 2;
#endif

struct alignas(64) Line {
    uint32_t words[LANES];
};

// A weight of T, float or bf16, as it is packed.
template <class T>
struct Packed {
    static constexpr int IN_WORD = 4 / sizeof(T);  // inputs in a 32-bit word

    const Line* lines;
    int64_t outs, ins;

    int64_t steps() const { return (ins + IN_WORD - 1) / IN_WORD; }
    int64_t groups() const { return (outs + LANES - 1) / LANES; }

    // Where a group of 16 outputs has its first line, and how many lines its next is away.
    const Line* group(int64_t group, int64_t* apart) const {
        const int64_t panel = group / GROUPS;
        *apart = std::min<int64_t>(GROUPS, groups() - panel * GROUPS);
        return lines + panel * GROUPS * steps() + group % GROUPS;
    }
};

// Rows of x, row by row `x_stride` elements apart, to rows of out, of T or float. `bias` may be null.
template <class T, class Out>
void linear(const Packed<T>& weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, Out* out,
            int64_t out_stride);

// The product after the next loop is with this weight (read_next).
template <class T>
void read_next(const Packed<T>& weight);

// For each head its own product: the weights [heads][outs, ins], packed one after the other, and of x [rows, heads, ins] and
// out [rows, heads, outs] the strides of rows and of heads.
template <class T>
void head_linear(const Line* lines, int64_t heads, int64_t outs, int64_t ins, const T* x, int64_t x_stride, int64_t x_head,
                 int64_t rows, T* out, int64_t out_stride, int64_t out_head);

// What `linear` makes of one row for some groups of 16 outputs, [count][16], without a bias. The row is as long as its
// last word, filled up with zeros.
template <class T>
void outputs(const Packed<T>& weight, const T* x, const int64_t* groups, int64_t count, float* out);

// Rows of the weight, as an embedding looks them up: [tokens] -> [tokens, ins].
template <class T>
void gather(const Packed<T>& weight, const int64_t* tokens, int64_t count, T* out);

}  // namespace penstock

// Kernels against sums that are written out, for processors that only an emulator has here: see test_native.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "pack.h"
#include "pool.h"
#include "quantised.h"
#include "rows.h"
#include "sample.h"

using namespace penstock;

extern "C" {
void penstock_pack_bf16(void*, int64_t, int64_t, const void*, int64_t, int64_t);
void penstock_pack_f32(void*, int64_t, int64_t, const void*, int64_t, int64_t);
void penstock_argmax(const float*, int64_t, int64_t, int64_t*, uint8_t*);
int64_t penstock_bounded_logits_bf16(const void*, int64_t, int64_t, uint8_t*, float*);
void penstock_choose_bf16(const void*, int64_t, int64_t, const void*, const float*, const bf16*, int64_t, int64_t,
                          const Draw*, const int64_t*, int64_t, const uint32_t*, int64_t, int64_t*);
int64_t penstock_quantised_bytes(const Quantised*);
void penstock_quantised_put(const Quantised*, int64_t, int64_t, const uint8_t*, const char*, const char*);
}

namespace {

int failures = 0;
std::mt19937 generator(1);

void check(bool holds, const char* what) {
    if (!holds) std::printf("wrong: %s\n", what), failures++;
}
bool near(double a, double b, double tolerance) { return std::fabs(a - b) <= tolerance * (1 + std::fabs(b)); }

template <class T>
T from(float x) {
    if constexpr (sizeof(T) == 2)
        return narrow(x);
    else
        return x;
}
template <class T>
std::vector<T> noise(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<T> found(count);
    for (T& x : found) x = from<T>(normal(generator));
    return found;
}
// A number that float16 and bfloat16 have both, below the smallest normal one of float16 too, and its bits there.
struct Half {
    float value;
    uint16_t float16;

    explicit Half(uint32_t random) {
        const int fraction = random & 127, exponent = random >> 7 & 15;
        float16 = static_cast<uint16_t>(exponent << 10 | fraction << 3 | (random >> 11 & 1) << 15);
        const float size = exponent ? std::ldexp(128.0f + fraction, exponent - 22) : std::ldexp(1.0f * fraction, -21);
        value = float16 & 0x8000 ? -size : size;
    }
};
template <class T>
bool equal(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Lines {
    std::vector<Line> memory;
    template <class T>
    Lines(const std::vector<T>& weight, int64_t outs, int64_t ins) {
        const Packed<T> shape{nullptr, outs, ins};
        memory.resize(shape.groups() * shape.steps(), Line{});
        (sizeof(T) == 2 ? penstock_pack_bf16 : penstock_pack_f32)(memory.data(), outs, ins, weight.data(), 0, outs);
    }
};

template <class T>
void products(int64_t outs, int64_t ins) {
    const auto weight = noise<T>(outs * ins), x = noise<T>(200 * ins);
    const Lines lines(weight, outs, ins);
    const Packed<T> packed{lines.memory.data(), outs, ins};
    std::vector<float> whole(200 * outs);
    linear<T, float>(packed, x.data(), ins, 200, nullptr, whole.data(), outs);
    for (int64_t row = 0; row < 200; row += 7)
        for (int64_t out = 0; out < outs; out++) {
            double sum = 0;
            for (int64_t i = 0; i < ins; i++)
                sum += static_cast<double>(widen(x[row * ins + i])) * widen(weight[out * ins + i]);
            check(near(whole[row * outs + out], sum, 1e-3), "a product");
        }
    for (int64_t rows = 1; rows < 40; rows++) {
        std::vector<float> some(rows * outs);
        linear<T, float>(packed, x.data(), ins, rows, nullptr, some.data(), outs);
        check(std::memcmp(some.data(), whole.data(), some.size() * 4) == 0, "a row's bits among others");
    }
    std::vector<T> found(ins);
    const int64_t token = outs - 1;
    gather<T>(packed, &token, 1, found.data());
    check(std::memcmp(found.data(), &weight[token * ins], ins * sizeof(T)) == 0, "a row of a weight");
}

template <class E, class C>
void attends(int64_t rows, int64_t kv_heads, int64_t group, int64_t dim, int64_t window) {
    const int64_t blocks = (rows + 63) / 64, heads = kv_heads * group;
    std::vector<C> values(blocks * 2 * kv_heads * 64 * dim);
    std::vector<float> scales;
    std::normal_distribution<float> normal;
    if constexpr (sizeof(C) == 1) {
        for (C& value : values) value = static_cast<C>(generator() % 255) - 127;
        for (int64_t i = 0; i < blocks * 2 * kv_heads * 64; i++) scales.push_back(0.01f + (generator() % 100) * 1e-4f);
    } else {
        values = noise<C>(values.size());
    }
    const int64_t head = 64 * dim, kind = kv_heads * head, block = 2 * kind;
    const Cache cache{values.data(), block, kind, head, dim, scales.empty() ? nullptr : scales.data(), 2 * kv_heads * 64,
                      kv_heads * 64, 64, 1, kv_heads, dim, sizeof(E) == 2, 0};
    const auto value = [&](int64_t token, int64_t k, int64_t h, int64_t d) {
        const double scale = scales.empty() ? 1 : scales[((token / 64 * 2 + k) * kv_heads + h) * 64 + token % 64];
        const C& x = values[token / 64 * block + k * kind + h * head + token % 64 * dim + d];
        if constexpr (sizeof(C) == 1)
            return scale * x;
        else
            return scale * widen(x);
    };
    const auto q = noise<E>(rows * heads * dim);
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    std::vector<E> whole(q.size()), apart(q.size());
    const Span all{0, rows, 0, 0};
    attention({&all, 1, nullptr, heads}, cache, q.data(), heads * dim, whole.data(), scale, window);
    for (int64_t row = 0; row < rows; row += 13)
        for (int64_t h = 0; h < heads; h++) {
            std::vector<double> sums(dim);
            double total = 0;
            for (int64_t t = window ? std::max<int64_t>(0, row + 1 - window) : 0; t <= row; t++) {
                double score = 0;
                for (int64_t d = 0; d < dim; d++) score += widen(q[(row * heads + h) * dim + d]) * value(t, 0, h / group, d);
                const double weight = std::exp(score * scale);
                total += weight;
                for (int64_t d = 0; d < dim; d++) sums[d] += weight * value(t, 1, h / group, d);
            }
            for (int64_t d = 0; d < dim; d++)
                check(near(widen(whole[(row * heads + h) * dim + d]), sums[d] / total, sizeof(E) == 2 || sizeof(C) == 1 ? 2e-2 : 1e-4),
                      "attention");
        }
    for (int64_t row = 0; row < rows;) {
        const int64_t count = std::min<int64_t>(rows - row, 1 + row % 5 * (row % 7) * 20);
        const Span span{0, count, row, 0};
        attention({&span, 1, nullptr, heads}, cache, &q[row * heads * dim], heads * dim, &apart[row * heads * dim], scale,
                  window);
        row += count;
    }
    check(equal(whole, apart), "attention's bits in chunks");
}

float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(1.0f * fraction, -9);
    return code & 128 ? -size : size;
}

// Of few bits: rows of the weight, and products with inputs, which are rounded to 8 bits where codes are whole.
template <class T>
void quantised(int64_t outs, int64_t ins, int64_t bits, int64_t group, Scales type, bool has_zeros, bool ordered) {
    Quantised weight{nullptr, outs, ins, group, bits, type, has_zeros, has_zeros ? 0 : int64_t{1} << (bits ? bits - 1 : 0), nullptr};
    const int64_t width = weight.width(), groups = (ins + width - 1) / width, size = type == FLOAT32 ? 4 : 2;
    std::vector<int32_t> order(ins);
    for (int64_t i = 0; i < ins; i++) order[i] = static_cast<int32_t>((i * 7 + 3) % ins);
    if (ordered) weight.order = order.data();
    std::vector<uint8_t> codes(outs * ins);
    for (uint8_t& code : codes) {
        code = static_cast<uint8_t>(generator() & ((1 << (bits ? bits : 8)) - 1));
        if (!bits && (code & 127) == 127) code = 0;  // no number
    }
    std::vector<float> heads[2];
    std::vector<char> bytes[2];
    for (int kind = 0; kind < 2; kind++)
        for (int64_t i = 0; i < outs * groups; i++) {
            const Half half(generator());
            const bf16 narrowed = narrow(half.value);
            const void* from = type == FLOAT32 ? static_cast<const void*>(&half.value) : type == FLOAT16 ? &half.float16
                                                                                                          : static_cast<const void*>(&narrowed);
            heads[kind].push_back(half.value);
            bytes[kind].insert(bytes[kind].end(), static_cast<const char*>(from), static_cast<const char*>(from) + size);
        }
    std::vector<Line> lines(penstock_quantised_bytes(&weight) / sizeof(Line), Line{});
    weight.lines = lines.data();
    penstock_quantised_put(&weight, 0, outs, codes.data(), bytes[0].data(), has_zeros ? bytes[1].data() : nullptr);

    std::vector<float> dense(outs * ins), found(outs * ins);  // in x's order
    std::vector<int64_t> all(outs);
    for (int64_t out = 0; out < outs; out++) {
        all[out] = out;
        for (int64_t i = 0; i < ins; i++) {
            const int64_t at = out * groups + i / width;
            const float zero = has_zeros ? heads[1][at] : weight.zero, code = codes[out * ins + i];
            dense[out * ins + (ordered ? order[i] : i)] = heads[0][at] * (bits ? code - zero : e4m3(codes[out * ins + i]));
        }
    }
    gather(weight, all.data(), outs, found.data());
    for (size_t i = 0; i < dense.size(); i++) check(near(found[i], dense[i], 1e-6), "a weight of few bits");

    const int64_t rows = 70;
    auto x = noise<T>(rows * ins);
    std::vector<float> whole(rows * outs);
    linear(weight, x.data(), ins, rows, static_cast<const T*>(nullptr), whole.data(), outs);
    for (int64_t row = 0; row < rows; row += 7) {
        std::vector<float> rounded(ins);
        for (int64_t begin = 0; begin < ins; begin += width)
            for (int64_t first = begin; first < std::min(ins, begin + width); first += RUN) {
                const int64_t end = std::min({ins, begin + width, first + RUN});
                const auto input = [&](int64_t i) { return widen(x[row * ins + (ordered ? order[i] : i)]); };
                float most = 0;
                for (int64_t i = first; i < end; i++) most = std::max(most, std::fabs(input(i)));
                for (int64_t i = first; i < end; i++)
                    rounded[ordered ? order[i] : i] = bits ? std::nearbyint(input(i) * (127.0f / most)) * (most / 127.0f) : input(i);
            }
        for (int64_t out = 0; out < outs; out++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < ins; i++) {
                sum += static_cast<double>(rounded[i]) * dense[out * ins + i];
                size += std::fabs(rounded[i] * dense[out * ins + i]);
            }
            check(std::fabs(whole[row * outs + out] - sum) <= 1e-4 * size, "a product of few bits");
        }
    }
    for (int64_t some = 1; some < 15; some++) {
        std::vector<float> apart(some * outs);
        linear(weight, x.data(), ins, some, static_cast<const T*>(nullptr), apart.data(), outs);
        check(std::memcmp(apart.data(), whole.data(), apart.size() * 4) == 0, "a row's bits among others, of few bits");
    }
}

void rows_of_numbers() {
    const int64_t width = 333;
    const auto x = noise<bf16>(3 * width), weight = noise<bf16>(width);
    std::vector<bf16> out(x.size());
    rms_norm(true, x.data(), width, {weight.data(), false}, 1e-6f, out.data(), width, 3, width);
    for (int64_t row = 0; row < 3; row++) {
        double squares = 0;
        for (int64_t d = 0; d < width; d++) squares += std::pow(widen(x[row * width + d]), 2);
        for (int64_t d = 0; d < width; d++)
            check(near(widen(out[row * width + d]), widen(x[row * width + d]) / std::sqrt(squares / width) * widen(weight[d]), 2e-2),
                  "a norm");
    }
    const auto gates = noise<float>(2 * width);
    std::vector<float> gated(width);
    gate_mul(false, 0, gates.data(), 2 * width, gated.data(), 1, width);
    for (int64_t d = 0; d < width; d++)
        check(near(gated[d], gates[d] / (1 + std::exp(-gates[d])) * gates[width + d], 1e-5), "a gate");
}

// What is chosen from bounds is what is the largest of all.
void chooses(int64_t outs, int64_t ins) {
    const auto weight = noise<bf16>(outs * ins), x = noise<bf16>(9 * ins);
    const Lines lines(weight, outs, ins);
    const Packed<uint8_t> shape{nullptr, outs, ins};
    std::vector<Line> codes(shape.groups() * shape.steps());
    std::vector<float> bounds(3 * shape.groups() * LANES), logits(9 * outs);
    check(penstock_bounded_logits_bf16(lines.memory.data(), outs, ins, reinterpret_cast<uint8_t*>(codes.data()), bounds.data()),
          "bounds");
    const Packed<bf16> packed{lines.memory.data(), outs, ins};
    linear<bf16, float>(packed, x.data(), ins, 9, nullptr, logits.data(), outs);
    std::vector<Draw> greedy(9, Draw{});
    std::vector<int64_t> tokens(9), largest(9);
    std::vector<uint8_t> finite(9);
    penstock_argmax(logits.data(), 9, outs, largest.data(), finite.data());
    penstock_choose_bf16(lines.memory.data(), outs, ins, codes.data(), bounds.data(), x.data(), ins, 9, greedy.data(), nullptr,
                         0, nullptr, 0, tokens.data());
    check(equal(tokens, largest), "the largest logit");
}

}  // namespace

int main() {
    set_threads(2);
    for (auto [outs, ins] : {std::pair{130, 333}, {64, 64}, {33, 1030}, {1, 7}}) {
        products<bf16>(outs, ins);
        products<float>(outs, ins);
    }
    for (int64_t window : {0, 100}) {
        attends<bf16, bf16>(300, 2, 3, 24, window);
        attends<bf16, bf16>(150, 1, 1, 128, window);
        attends<bf16, int8_t>(300, 2, 2, 80, window);
        attends<float, float>(200, 2, 2, 16, window);
        attends<float, int8_t>(200, 1, 8, 8, window);
    }
    for (int64_t bits : {0, 2, 3, 4, 8})
        for (int64_t group : {0, 32, 128})
            for (Scales type : {FLOAT32, FLOAT16, BFLOAT16}) {
                const bool zeros = bits && type != BFLOAT16;
                quantised<bf16>(130, 333, bits, group, type, zeros, false);
                quantised<float>(33, 256, bits, group, type, bits && !zeros, true);
            }
    rows_of_numbers();
    chooses(700, 70);
    if (!failures) std::puts("fine");
    return failures != 0;
}

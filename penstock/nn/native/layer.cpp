#include "layer.h"

#include <algorithm>

#include "gemm.h"
#include "rows.h"

namespace penstock {
namespace {

template <class T>
constexpr bool IS_BF16 = sizeof(T) == 2;

template <class T>
void project(const Projection& p, const T* x, int64_t rows, T* out) {
    linear<T, T>({static_cast<const Line*>(p.lines), p.outs, p.ins}, x, p.ins, rows, static_cast<const T*>(p.bias), out,
                 p.outs);
}

template <class T>
void embed(const Decoder& decoder, const Rows& rows, T* out) {
    const int64_t width = decoder.hidden;
    if (decoder.embedding_is_packed) {
        gather<T>({static_cast<const Line*>(decoder.embedding), decoder.vocab, width}, rows.tokens, rows.rows, out);
        return;
    }
    for (int64_t r = 0; r < rows.rows; r++)
        std::memcpy(out + r * width, static_cast<const T*>(decoder.embedding) + rows.tokens[r] * width, width * sizeof(T));
}

// Moves rows to the front.
template <class T>
void keep(const Rows& rows, T* x, int64_t width) {
    for (int64_t i = 0; i < rows.kept_count; i++) std::memmove(x + i * width, x + rows.kept[i] * width, width * sizeof(T));
}

template <class T>
void compute(const Decoder& decoder, const Rows& rows, const AttentionBatch& batch, T* scratch, T* out) {
    const int64_t hidden = decoder.hidden;
    int64_t count = rows.rows;
    const Cache& cache = batch.cache;
    T *x = out, *residual = scratch, *wide = residual + count * hidden;
    embed(decoder, rows, x);
    std::fill_n(residual, count * hidden, T{});
    const auto normed = [&](const void* weight) {
        add_rms_norm(IS_BF16<T>, x, residual, weight, decoder.eps, x, residual, count, hidden);
    };
    for (int64_t i = 0; i < decoder.count; i++) {
        const Layer& layer = decoder.layers[i];
        normed(layer.input_norm);
        T *qkv = wide, *heads = qkv + count * layer.qkv.outs;
        project(layer.qkv, x, count, qkv);
        qkv_to_cache(cache, i, qkv, layer.qkv.outs, batch.heads, layer.q_norm, layer.k_norm, decoder.eps, rows.cos,
                     rows.sin, rows.blocks, rows.offsets, count);
        attention(batch, i, qkv, layer.qkv.outs, heads, decoder.scale, layer.window);
        if (rows.kept && i == decoder.count - 1) {
            keep(rows, heads, layer.o.ins);
            keep(rows, residual, hidden);
            count = rows.kept_count;
        }
        project(layer.o, heads, count, x);
        normed(layer.post_norm);
        T *gate_up = wide, *gated = gate_up + count * layer.gate_up.outs;
        project(layer.gate_up, x, count, gate_up);
        silu_mul(IS_BF16<T>, gate_up, layer.gate_up.outs, gated, count, layer.down.ins);
        project(layer.down, gated, count, x);
    }
    normed(decoder.norm);
}

}  // namespace

int64_t scratch_width(const Decoder& decoder) {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder.count; i++) {
        const Layer& layer = decoder.layers[i];
        widest = std::max({widest, layer.qkv.outs + layer.o.ins, layer.gate_up.outs + layer.down.ins});
    }
    return decoder.hidden + widest;
}

void step(const Decoder& decoder, const Rows& rows, const AttentionBatch& batch, void* scratch, void* out) {
    if (batch.cache.is_bf16) {
        compute(decoder, rows, batch, static_cast<bf16*>(scratch), static_cast<bf16*>(out));
    } else {
        compute(decoder, rows, batch, static_cast<float*>(scratch), static_cast<float*>(out));
    }
}

}  // namespace penstock

extern "C" {

using namespace penstock;

int64_t penstock_scratch_width(const Decoder* decoder) { return scratch_width(*decoder); }

void penstock_step(const Decoder* decoder, const Rows* rows, const Span* spans, int64_t count, const int64_t* ids,
                   const Cache* cache, int64_t heads, void* scratch, void* out) {
    step(*decoder, *rows, {spans, count, ids, *cache, heads}, scratch, out);
}
}

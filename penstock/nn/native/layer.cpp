#include "layer.h"

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "pool.h"

namespace penstock {
namespace {

template <class T>
constexpr bool IS_BF16 = sizeof(T) == 2;

template <class T>
void project(const Projection& p, const T* x, int64_t rows, T* out) {
    const T* bias = static_cast<const T*>(p.bias);
    if (p.quantised)
        linear<T, T>(*p.quantised, x, p.ins, rows, bias, out, p.outs);
    else
        linear<T, T>(Packed<T>{static_cast<const Line*>(p.lines), p.outs, p.ins}, x, p.ins, rows, bias, out, p.outs);
}

template <class T>
void embed(const Decoder& decoder, const int64_t* tokens, int64_t rows, T* out) {
    const int64_t width = decoder.hidden;
    if (decoder.quantised_embedding)
        gather<T>(*decoder.quantised_embedding, tokens, rows, out);
    else if (decoder.embedding_is_packed)
        gather<T>(Packed<T>{static_cast<const Line*>(decoder.embedding), decoder.vocab, width}, tokens, rows, out);
    else
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(out + r * width, static_cast<const T*>(decoder.embedding) + tokens[r] * width, width * sizeof(T));
    if (decoder.embedding_scale != 1) scale(IS_BF16<T>, out, decoder.embedding_scale, rows, width);
}

// Zeros for tokens that other ranks have.
template <class T>
void embed_own(const Decoder& decoder, const Rows& rows, T* out) {
    std::vector<int64_t> own(rows.tokens, rows.tokens + rows.rows);
    const auto has = [&](int64_t token) { return token >= 0 && token < decoder.vocab; };
    for (int64_t& token : own) token -= decoder.first_token;
    std::vector<int64_t> tokens(own);
    for (int64_t& token : tokens) token = has(token) ? token : 0;
    embed(decoder, tokens.data(), rows.rows, out);
    for (int64_t r = 0; r < rows.rows; r++)
        if (!has(own[r])) std::fill_n(out + r * decoder.hidden, decoder.hidden, T{});
}

// Moves rows to the front.
template <class T>
void keep(const Rows& rows, T* x, int64_t width) {
    for (int64_t i = 0; i < rows.kept_count; i++) std::memmove(x + i * width, x + rows.kept[i] * width, width * sizeof(T));
}

// A step up to where it is. Of scratch, the residual stream comes first; then for a while [rows, qkv.outs] q, k and v and
// [rows, o.ins] what attention makes of them, or what the gated layer has.
template <class T>
struct Progress {
    const Decoder& decoder;
    const Rows& rows;
    T *residual, *x;         // [rows, hidden]
    int64_t status = MET;  // once it is something else nothing more is computed

    Progress(const Decoder& decoder, const Rows& rows, void* scratch, void* out)
        : decoder(decoder), rows(rows), residual(static_cast<T*>(scratch)), x(static_cast<T*>(out)) {}

    T* qkv() const { return residual + rows.rows * decoder.hidden; }
    T* heads(const Layer& layer) const { return qkv() + rows.rows * layer.qkv.outs; }

    Norm norm(const void* weight) const { return {weight, decoder.wide_norms}; }

    void normed(const void* weight, int64_t count) const {
        add_rms_norm(IS_BF16<T>, x, residual, norm(weight), decoder.eps, x, residual, count, decoder.hidden);
    }

    void post_normed(const void* weight, int64_t count) const {
        const int64_t width = decoder.hidden;
        if (weight) rms_norm(IS_BF16<T>, x, width, norm(weight), decoder.eps, x, width, count, width);
    }

    // Of what each rank has computed in x.
    void sum_up(int64_t count) {
        if (decoder.ranks) status = all_reduce(*decoder.ranks, IS_BF16<T>, x, count * decoder.hidden);
    }

    // Whether to compute no further. What a loop has left out must not reach the cache: it may be no number, and rows of
    // other steps read what is behind them there, with a weight of 0.
    bool over() {
        if (!status && is_set(rows.stop)) status = INTERRUPTED;
        return status;
    }

    void until_attention(int64_t i, const Cache* caches, int64_t query_heads) {
        const Layer& layer = decoder.layers[i];
        if (i == 0 && (decoder.embedding || decoder.quantised_embedding)) {
            if (decoder.ranks)
                embed_own(decoder, rows, x);
            else
                embed(decoder, rows.tokens, rows.rows, x);
            sum_up(rows.rows);
            std::fill_n(residual, rows.rows * decoder.hidden, T{});
        }
        if (over()) return;
        normed(layer.mixer_norm, rows.rows);
        project(layer.qkv, x, rows.rows, qkv());
        if (over()) return;
        const Table& table = rows.tables[caches[i].group];
        qkv_to_cache(caches[i], qkv(), layer.qkv.outs, query_heads, norm(layer.q_norm), norm(layer.k_norm), decoder.eps,
                     rows.rotations[layer.rotation], table.blocks, table.offsets, rows.rows);
    }

    // `attended`: [rows, o.ins], which is overwritten.
    void after_attention(int64_t i, T* attended) {
        const Layer& layer = decoder.layers[i];
        const bool last = i == decoder.count - 1;
        const int64_t count = last && rows.kept ? rows.kept_count : rows.rows;
        if (last && rows.kept) {
            keep(rows, attended, layer.o.ins);
            keep(rows, residual, decoder.hidden);
        }
        if (over()) return;
        project(layer.o, attended, count, x);
        sum_up(count);
        if (over()) return;
        post_normed(layer.mixer_post_norm, count);
        normed(layer.feed_forward_norm, count);
        T *gate_up = qkv(), *gated = gate_up + count * layer.gate_up.outs;
        project(layer.gate_up, x, count, gate_up);
        if (over()) return;
        gate_mul(IS_BF16<T>, decoder.activation, gate_up, layer.gate_up.outs, gated, count, layer.down.ins);
        project(layer.down, gated, count, x);
        sum_up(count);
        if (over()) return;
        post_normed(layer.feed_forward_post_norm, count);
        if (last && decoder.norm) normed(decoder.norm, count);
    }
};

template <class F>
void with_type(const Cache* caches, F&& f) {
    if (caches->is_bf16)
        f(bf16{});
    else
        f(float{});
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

}  // namespace penstock

extern "C" {

using namespace penstock;

int64_t penstock_scratch_width(const Decoder* decoder) { return scratch_width(*decoder); }

// A whole step, with a cache for each layer: `out` becomes [rows, hidden], after the last norm; what is wanted comes first,
// and nothing else is of any use. `heads` are those of q. Returns MET, or why ranks have not met, or INTERRUPTED.
// Without an embedding, `out` and the residual stream, which is what scratch begins with, are what the stage before has
// left of them; and without a norm these are what the next one goes on with.
int64_t penstock_step(const Decoder* decoder, const Rows* rows, const Cache* caches, int64_t heads, void* scratch,
                      void* out) {
    int64_t status = MET;
    const Stoppable stoppable(rows->stop);
    with_type(caches, [&](auto type) {
        Progress<decltype(type)> step(*decoder, *rows, scratch, out);
        for (int64_t i = 0; i < decoder->count && !step.status; i++) {
            const Layer& layer = decoder->layers[i];
            step.until_attention(i, caches, heads);
            if (step.status) break;
            const Table& table = rows->tables[caches[i].group];
            const AttentionBatch batch{table.spans, table.count, table.ids, heads};
            attention(batch, caches[i], step.qkv(), layer.qkv.outs, step.heads(layer), decoder->scale, layer.window);
            step.after_attention(i, step.heads(layer));
        }
        status = step.status;
    });
    return status;
}

// The same in parts, layer by layer, for who computes attention otherwise: between these two, from the q in scratch
// behind [rows, hidden], as [rows, qkv.outs] with k and v, to `attended`, [rows, o.ins], which is overwritten.
int64_t penstock_until_attention(const Decoder* decoder, const Rows* rows, const Cache* caches, int64_t heads, void* scratch,
                                 void* out, int64_t layer) {
    int64_t status = MET;
    const Stoppable stoppable(rows->stop);
    with_type(caches, [&](auto type) {
        Progress<decltype(type)> step(*decoder, *rows, scratch, out);
        step.until_attention(layer, caches, heads);
        status = step.status;
    });
    return status;
}

int64_t penstock_after_attention(const Decoder* decoder, const Rows* rows, const Cache* caches, void* attended, void* scratch,
                                 void* out, int64_t layer) {
    int64_t status = MET;
    const Stoppable stoppable(rows->stop);
    with_type(caches, [&](auto type) {
        using T = decltype(type);
        Progress<T> step(*decoder, *rows, scratch, out);
        step.after_attention(layer, static_cast<T*>(attended));
        status = step.status;
    });
    return status;
}
}

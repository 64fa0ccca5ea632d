// What kernels for ggml's blocks share: a run of whole blocks, a decoder a type.
//
// A decoder has the number of bytes and elements of a block, and numbers<N>(block, at, table, v): the N elements of a block from
// `at` on, which N divides. The order of operations is that of the decoders in quant-router.
#pragma once
#include "flat.cuh"

struct Blocks {
    Run run;
};

// A type that looks nothing up.
struct Plain {
    static constexpr u32 ENTRIES = 1;
    STATIC void prepare(const u32*) {}
    STATIC void prepare(u32*) {}
};

// A decoder as a format of flat.cuh.
template <class D> struct Ggml : ElementByElement {
    static constexpr u32 ELEMENTS = D::ELEMENTS, BYTES = D::BYTES, ENTRIES = D::ENTRIES;
    STATIC void prepare(const Blocks&, u32* table) { D::prepare(table); }
    template <u32 N>
    STATIC void decode(const Blocks&, const u32* table, Bytes tile, u32 place, u32, float (&v)[N]) {
        Bytes block = {tile.words, tile.at + place / ELEMENTS * BYTES};
        D::template numbers<N>(block, place % ELEMENTS, table, v);
    }
};

#define BLOCKS(NAME, DECODER) FLAT(NAME, Blocks, Ggml<DECODER>)

// N nibbles as bytes: the low ones of N bytes, or their high ones.
template <u32 N> DEVICE void nibbles(Bytes block, u32 index, bool high, u32 (&codes)[N / 4]) {
    block.template take<N>(index, codes);
    for (u32 i = 0; i < N / 4; ++i) codes[i] = codes[i] >> (high ? 4 : 0) & 0x0f0f0f0f;
}

// factor · (code − less), in bytes.
template <u32 N> DEVICE void scaled(float factor, const u32 (&codes)[N / 4], float less, float (&v)[N]) {
    for (u32 i = 0; i < N; ++i) v[i] = factor * byte_less(codes[i / 4], i % 4, less);
}
// factor · code + add.
template <u32 N> DEVICE void scaled_plus(float factor, const u32 (&codes)[N / 4], float add, float (&v)[N]) {
    for (u32 i = 0; i < N; ++i) v[i] = factor * byte_less(codes[i / 4], i % 4, 0.0f) + add;
}

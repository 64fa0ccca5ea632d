// The 4-bit formats of bitsandbytes: indexes into 16 numbers, times the largest number of their block, which may be quantized itself.
#include "flat.cuh"

// A run whose first element begins a block, and a block of blocks.
struct Bnb {
    Run run;
    u64 scale;     // an f32 a block, or an index of a byte
    u64 codebook;  // 16 f32
    u64 indexed;   // 256 f32 that packed scales are indexes of; 0: scales are f32
    u64 nested;    // an f32 for each block of scales
    Divider block;
    Divider nested_block;
    u32 offset;  // the bits of the f32 that is added to packed scales
    u32 unused;
};

DEVICE float scale_of(const Bnb& p, u32 block) {
    if (!p.indexed) return load((const float*)p.scale + block);
    float number = load((const float*)p.indexed + load((const u8*)p.scale + block));
    return number * load((const float*)p.nested + p.nested_block.quotient(block)) + float_of(p.offset);
}

struct Indexes : ElementByElement {
    static constexpr u32 ELEMENTS = 2, BYTES = 1, ENTRIES = 16;

    STATIC void prepare(const Bnb& p, u32* table) {
        if (threadIdx.x < 16) table[threadIdx.x] = bits_of(load((const float*)p.codebook + threadIdx.x));
    }

    template <u32 N>
    STATIC void decode(const Bnb& p, const u32* table, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        u32 word[1];
        tile.template take<4>(place / 2, word);
        // The first of two is in the upper half of their byte.
        for (u32 i = 0; i < N; ++i) v[i] = float_of(table[word[0] >> 4 * (i ^ 1) & 15]);
        u32 block = p.block.quotient(element), within = element - block * p.block.divisor;
        if (within + N <= p.block.divisor) {
            float scale = scale_of(p, block);
            for (u32 i = 0; i < N; ++i) v[i] = v[i] * scale;
            return;
        }
        for (u32 i = 0; i < N && element + i < p.run.end; ++i) {
            v[i] = v[i] * scale_of(p, p.block.quotient(element + i));
        }
    }
};

FLAT(bnb4, Bnb, Indexes)

// The IQ types of ggml of one to three bits: 256 elements in groups with a scale; each four or eight neighbours are a vector of a
// codebook, with signs. Codebooks stay packed in shared memory, 16 bits a vector, and one instruction makes four values of them.
#include "ggml.cuh"
#include "grids.cuh"

// A codebook of `COUNT` packed vectors, two a word.
template <u32 COUNT> struct Codebook {
    static constexpr u32 ENTRIES = COUNT / 2;
    STATIC void copy(const u16* grid, u32* table) {
        for (u32 i = threadIdx.x; i < COUNT / 2; i += THREADS) {
            table[i] = (u32)grid[2 * i] | (u32)grid[2 * i + 1] << 16;
        }
    }
    STATIC u32 vector(const u32* table, u32 index) { return ((const u16*)table)[index]; }
};

// Four two-bit fields as the nibbles that choose from four bytes.
DEVICE u32 four_of(u32 values, u32 fields) {
    fields = (fields | fields << 4) & 0x0f0f;
    return choose(values, 0, (fields | fields << 2) & 0x3333);
}
// N values of a vector of eight two-bit fields.
template <u32 N> DEVICE void expand(u32 values, u32 vector, u32 at, u32 (&codes)[N / 4]) {
    for (u32 i = 0; i < N / 4; ++i) codes[i] = four_of(values, vector >> 2 * (at % 8 + 4 * i) & 255);
}

// The eight signs that seven bits stand for: the eighth makes the number of minuses even.
DEVICE u32 even_signs(u32 bits) {
    bits &= 127;
    return bits | (count_ones(bits) & 1) << 7;
}
// scale · value, with signs from the lowest bit on.
template <u32 N> DEVICE void with_signs(float scale, const u32 (&codes)[N / 4], u32 signs, float (&v)[N]) {
    for (u32 i = 0; i < N; ++i) {
        float number = scale * byte_less(codes[i / 4], i % 4, 0.0f);
        v[i] = float_of(bits_of(number) ^ (signs >> i & 1) << 31);
    }
}
// The nibble with this number, low ones first.
DEVICE float nibble(Bytes block, u32 from, u32 index) {
    return integer(block.byte(from + index / 2) >> index % 2 * 4 & 15);
}

// 8, 25, 43.
constexpr u32 IQ2_VALUES = 0x002b1908;

// d f16; eight times four indexes (u8) and a word of four times seven signs and a scale.
struct IQ2_XXS : Codebook<256> {
    static constexpr u32 ELEMENTS = 256, BYTES = 66;
    STATIC void prepare(u32* table) { copy(GRID_IQ2_XXS, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 group = at / 32, place = at % 32 / 8, word = block.word(6 + 8 * group), codes[N / 4];
        float scale = block.half(0) * (0.5f + integer(word >> 28)) * 0.25f;
        expand<N>(IQ2_VALUES, vector(table, block.byte(2 + 8 * group + place)), at, codes);
        with_signs<N>(scale, codes, even_signs(word >> 7 * place) >> at % 8, v);
    }
};

// d f16, 32 words of an index (9 bits) and seven signs, 16 nibbles of scales.
struct IQ2_XS : Codebook<512> {
    static constexpr u32 ELEMENTS = 256, BYTES = 74;
    STATIC void prepare(u32* table) { copy(GRID_IQ2_XS, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 index = at / 8, word = block.pair(2 + 2 * index), codes[N / 4];
        float scale = block.half(0) * (0.5f + nibble(block, 66, index / 2)) * 0.25f;
        expand<N>(IQ2_VALUES, vector(table, word & 511), at, codes);
        with_signs<N>(scale, codes, even_signs(word >> 9) >> at % 8, v);
    }
};

// d f16, 32 low bytes of indexes, 32 bytes of signs, 8 bytes of pairs of high bits, 16 nibbles of scales.
struct IQ2_S : Codebook<1024> {
    static constexpr u32 ELEMENTS = 256, BYTES = 82;
    STATIC void prepare(u32* table) { copy(GRID_IQ2_S, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 index = at / 8, high = block.byte(66 + index / 4) >> index % 4 * 2 & 3, codes[N / 4];
        float scale = block.half(0) * (0.5f + nibble(block, 74, index / 2)) * 0.25f;
        expand<N>(IQ2_VALUES, vector(table, block.byte(2 + index) | high << 8), at, codes);
        with_signs<N>(scale, codes, block.byte(34 + index) >> at % 8, v);
    }
};

// d f16, 64 indexes, eight words of four times seven signs and a scale.
struct IQ3_XXS : Codebook<256> {
    static constexpr u32 ELEMENTS = 256, BYTES = 98;
    STATIC void prepare(u32* table) { copy(GRID_IQ3_XXS, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 word = block.word(66 + at / 32 * 4), codes[N / 4];
        float scale = block.half(0) * (0.5f + integer(word >> 28)) * 0.5f;
        for (u32 i = 0; i < N / 4; ++i) {
            // 4, 12, 20, 28, 36, 44, 52, 62.
            codes[i] = choose(0x1c140c04, 0x3e342c24, vector(table, block.byte(2 + at / 4 + i)));
        }
        with_signs<N>(scale, codes, even_signs(word >> at % 32 / 8 * 7) >> at % 8, v);
    }
};

// d f16, 64 low bytes of indexes, 8 bytes of high bits, 32 bytes of signs, 8 nibbles of scales: d · (1 + 2 · scale).
struct IQ3_S : Codebook<512> {
    static constexpr u32 ELEMENTS = 256, BYTES = 110;
    STATIC void prepare(u32* table) { copy(GRID_IQ3_S, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 codes[N / 4], high = block.byte(66 + at / 32) >> at % 32 / 4;
        float scale = block.half(0) * (1.0f + 2.0f * nibble(block, 106, at / 32));
        for (u32 i = 0; i < N / 4; ++i) {
            u32 index = block.byte(2 + at / 4 + i) | (high >> i & 1) << 8;
            // 1, 3, 5 to 15.
            codes[i] = choose(0x07050301, 0x0f0d0b09, vector(table, index));
        }
        with_signs<N>(scale, codes, block.byte(74 + at / 8) >> at % 8, v);
    }
};

// scale · (value ± 1/8), where values are −1, 0, 1.
template <u32 N> DEVICE void with_offset(float scale, u32 vector, u32 at, bool minus, float (&v)[N]) {
    u32 codes[N / 4];
    expand<N>(0x01020100, vector, at, codes);
    float offset = minus ? -0.125f : 0.125f;
    for (u32 i = 0; i < N; ++i) v[i] = scale * (byte_less(codes[i / 4], i % 4, 1.0f) + offset);
}

// d f16, 32 low bytes of indexes, eight words of four times three high bits, a scale and the sign of the offset.
struct IQ1_S : Codebook<2048> {
    static constexpr u32 ELEMENTS = 256, BYTES = 50;
    STATIC void prepare(u32* table) { copy(GRID_IQ1, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 index = at / 8, word = block.pair(34 + index / 4 * 2), high = word >> index % 4 * 3 & 7;
        float scale = block.half(0) * (2.0f * integer(word >> 12 & 7) + 1.0f);
        with_offset<N>(scale, vector(table, block.byte(2 + index) | high << 8), at, word & 0x8000, v);
    }
};

// 32 low bytes of indexes, 32 nibbles of three high bits and the sign of the offset, four words of four scales. Their high nibbles
// together are d f16.
struct IQ1_M : Codebook<2048> {
    static constexpr u32 ELEMENTS = 256, BYTES = 56;
    STATIC void prepare(u32* table) { copy(GRID_IQ1, table); }
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 words[2], index = at / 8, high = block.byte(32 + index / 2) >> index % 2 * 4 & 15;
        block.template take<8>(48, words);
        u32 d = (words[0] >> 12 & 15) | (words[0] >> 28) << 4 | (words[1] >> 12 & 15) << 8 | (words[1] >> 28) << 12;
        u32 word = (index < 16 ? words[0] : words[1]) >> index / 8 % 2 * 16;
        float scale = from_half(d) * (2.0f * integer(word >> index / 2 % 4 * 3 & 7) + 1.0f);
        with_offset<N>(scale, vector(table, block.byte(index) | (high & 7) << 8), at, high & 8, v);
    }
};

BLOCKS(iq1_s, IQ1_S)
BLOCKS(iq1_m, IQ1_M)
BLOCKS(iq2_xxs, IQ2_XXS)
BLOCKS(iq2_xs, IQ2_XS)
BLOCKS(iq2_s, IQ2_S)
BLOCKS(iq3_xxs, IQ3_XXS)
BLOCKS(iq3_s, IQ3_S)

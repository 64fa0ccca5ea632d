// The K types of ggml: 256 elements with a half-precision scale, in groups with small integer scales of their own.
#include "ggml.cuh"

// N two-bit numbers as bytes.
template <u32 N> DEVICE void pairs_of_bits(Bytes block, u32 index, u32 shift, u32 (&codes)[N / 4]) {
    block.template take<N>(index, codes);
    for (u32 i = 0; i < N / 4; ++i) codes[i] = codes[i] >> shift & 0x03030303;
}

// 16 bytes of scale and minimum nibbles, 64 bytes of two-bit numbers, d f16, dmin f16: d · scale · q − dmin · minimum.
struct Q2_K : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 84;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 packed = block.byte(at / 16), codes[N / 4];
        float scale = block.half(80) * integer(packed & 15), minimum = block.half(82) * integer(packed >> 4);
        pairs_of_bits<N>(block, 16 + at / 128 * 32 + at % 32, at / 32 % 4 * 2, codes);
        scaled_plus<N>(scale, codes, -minimum, v);
    }
};

// 32 bytes of high bits, 64 bytes of two-bit numbers, 12 bytes of six-bit scales, d f16: d · (scale − 32) · q, where q is lower by 4
// if its high bit is not set.
struct Q3_K : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 110;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 group = at / 16, row = at / 32, codes[N / 4], high[N / 4];
        u32 low = block.byte(96 + group % 8) >> group / 8 * 4 & 15;
        u32 bits = low | (block.byte(104 + group % 4) >> group / 4 * 2 & 3) << 4;
        float scale = block.half(108) * (integer(bits) - 32.0f);
        pairs_of_bits<N>(block, 32 + row / 4 * 32 + at % 32, row % 4 * 2, codes);
        block.template take<N>(at % 32, high);
        for (u32 i = 0; i < N / 4; ++i) codes[i] |= (high[i] >> row & 0x01010101) << 2;
        scaled<N>(scale, codes, 4.0f, v);
    }
};

// Scale and minimum of one of eight groups. The low six bits of bytes 0 to 3 and 4 to 7 are those of the first four; of the others
// the low nibbles are in bytes 8 to 11, and the high bits on top of the first four's.
DEVICE void scale_and_minimum(Bytes block, u32 group, float& scale, float& minimum) {
    u32 index = group % 4, first = block.byte(4 + index), second = block.byte(8 + index);
    u32 small = first & 63, least = second & 63;
    if (group >= 4) {
        u32 low = block.byte(12 + index);
        small = (low & 15) | (first >> 2 & 0x30);
        least = low >> 4 | (second >> 2 & 0x30);
    }
    scale = block.half(0) * integer(small);
    minimum = block.half(2) * integer(least);
}

// d f16, dmin f16, 12 bytes of six-bit scales and minima, 128 bytes of nibbles: d · scale · q − dmin · minimum.
struct Q4_K : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 144;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        float scale, minimum;
        scale_and_minimum(block, at / 32, scale, minimum);
        nibbles<N>(block, 16 + at / 64 * 32 + at % 32, at % 64 >= 32, codes);
        scaled_plus<N>(scale, codes, -minimum, v);
    }
};

// As before, with 32 bytes of fifth bits in front of the nibbles.
struct Q5_K : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 176;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4], fifth[N / 4];
        float scale, minimum;
        scale_and_minimum(block, at / 32, scale, minimum);
        nibbles<N>(block, 48 + at / 64 * 32 + at % 32, at % 64 >= 32, codes);
        block.template take<N>(16 + at % 32, fifth);
        for (u32 i = 0; i < N / 4; ++i) codes[i] |= (fifth[i] >> at / 32 & 0x01010101) << 4;
        scaled_plus<N>(scale, codes, -minimum, v);
    }
};

// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, d f16: d · scale · (q − 32). Halves of 128 elements are four
// rows of 32: the low nibbles of 64 bytes, then their high ones.
struct Q6_K : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 210;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 half = at / 128, row = at % 128 / 32, codes[N / 4], high[N / 4];
        nibbles<N>(block, half * 64 + row % 2 * 32 + at % 32, row >= 2, codes);
        pairs_of_bits<N>(block, 128 + half * 32 + at % 32, row * 2, high);
        for (u32 i = 0; i < N / 4; ++i) codes[i] |= high[i] << 4;
        scaled<N>(block.half(208) * signed_byte(block.byte(192 + at / 16), 0), codes, 32.0f, v);
    }
};

// d f32, 256 signed bytes, 16 sums of 16 numbers each.
struct Q8_K : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 292;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        block.template take<N>(4 + at, codes);
        float d = float_of(block.word(0));
        for (u32 i = 0; i < N; ++i) v[i] = d * signed_byte(codes[i / 4], i % 4);
    }
};

BLOCKS(q2_k, Q2_K)
BLOCKS(q3_k, Q3_K)
BLOCKS(q4_k, Q4_K)
BLOCKS(q5_k, Q5_K)
BLOCKS(q6_k, Q6_K)
BLOCKS(q8_k, Q8_K)

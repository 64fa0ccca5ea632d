// Types of ggml whose block is a scale, perhaps a minimum, and the numbers: w = d · q, or d · q + m.
#include "ggml.cuh"

// d f16, 16 bytes of nibbles: low ones are elements 0 to 15, high ones the others.
struct Q4_0 : Plain {
    static constexpr u32 ELEMENTS = 32, BYTES = 18;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        nibbles<N>(block, 2 + at % 16, at >= 16, codes);
        scaled<N>(block.half(0), codes, 8.0f, v);
    }
};

// d f16, m f16, 16 bytes of nibbles.
struct Q4_1 : Plain {
    static constexpr u32 ELEMENTS = 32, BYTES = 20;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        nibbles<N>(block, 4 + at % 16, at >= 16, codes);
        scaled_plus<N>(block.half(0), codes, block.half(2), v);
    }
};

// Adds a fifth bit to each nibble.
template <u32 N> DEVICE void fifth_bits(u32 bits, u32 (&codes)[N / 4]) {
    for (u32 i = 0; i < N / 4; ++i) codes[i] |= spread_bits(bits >> 4 * i) << 4;
}

// d f16, 4 bytes of fifth bits, 16 bytes of nibbles.
struct Q5_0 : Plain {
    static constexpr u32 ELEMENTS = 32, BYTES = 22;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        nibbles<N>(block, 6 + at % 16, at >= 16, codes);
        fifth_bits<N>(block.word(2) >> at, codes);
        scaled<N>(block.half(0), codes, 16.0f, v);
    }
};

// d f16, m f16, 4 bytes of fifth bits, 16 bytes of nibbles.
struct Q5_1 : Plain {
    static constexpr u32 ELEMENTS = 32, BYTES = 24;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        nibbles<N>(block, 8 + at % 16, at >= 16, codes);
        fifth_bits<N>(block.word(4) >> at, codes);
        scaled_plus<N>(block.half(0), codes, block.half(2), v);
    }
};

// A scale, and signed bytes from FIRST on.
template <u32 ALL, u32 FIRST> struct Q8 : Plain {
    static constexpr u32 ELEMENTS = 32, BYTES = ALL;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 codes[N / 4];
        block.template take<N>(FIRST + at, codes);
        float d = block.half(0);
        for (u32 i = 0; i < N; ++i) v[i] = signed_byte(codes[i / 4], i % 4) * d;
    }
};
// d f16, 32 signed bytes.
typedef Q8<34, 2> Q8_0;
// d f16, d · (sum of the numbers) f16, 32 signed bytes.
typedef Q8<36, 4> Q8_1;

// d f16, 16 bytes of signs: d where the bit is set, else −d.
struct Q1_0 : Plain {
    static constexpr u32 ELEMENTS = 128, BYTES = 18;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 bits = block.byte(2 + at / 8) >> at % 8, d = bits_of(block.half(0));
        for (u32 i = 0; i < N; ++i) v[i] = float_of(d ^ (~(bits >> i) & 1) << 31);
    }
};

// d f16, 16 bytes of two-bit numbers, four neighbours a byte: d · (q − 1).
struct Q2_0 : Plain {
    static constexpr u32 ELEMENTS = 64, BYTES = 18;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        float d = block.half(0);
        for (u32 i = 0; i < N; ++i) {
            u32 code = block.byte(2 + (at + i) / 4) >> 2 * (i % 4) & 3;
            v[i] = (integer(code) - 1.0f) * d;
        }
    }
};

BLOCKS(q4_0, Q4_0)
BLOCKS(q4_1, Q4_1)
BLOCKS(q5_0, Q5_0)
BLOCKS(q5_1, Q5_1)
BLOCKS(q8_0, Q8_0)
BLOCKS(q8_1, Q8_1)
BLOCKS(q1_0, Q1_0)
BLOCKS(q2_0, Q2_0)

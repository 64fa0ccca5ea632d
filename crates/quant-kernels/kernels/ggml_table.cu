// Types of ggml whose four-bit numbers are looked up: a table of 16 values, times the scale of a group. The table lies in shared
// memory as 16 numbers, one a bank, so that no two threads of a warp wait for each other.
#include "ggml.cuh"

// The values of non-linear four-bit numbers.
TABLE signed char NON_LINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice the values of four-bit floats (E2M1).
TABLE signed char E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct NonLinear {
    static constexpr u32 ENTRIES = 16;
    STATIC void prepare(u32* table) {
        if (threadIdx.x < 16) table[threadIdx.x] = bits_of((float)NON_LINEAR[threadIdx.x]);
    }
};
struct Doubled {
    static constexpr u32 ENTRIES = 16;
    STATIC void prepare(u32* table) {
        if (threadIdx.x < 16) table[threadIdx.x] = bits_of((float)E2M1_DOUBLED[threadIdx.x]);
    }
};

// Values of nibbles times a scale.
template <u32 N>
DEVICE void looked_up(float scale, Bytes block, u32 index, bool high, const u32* table, float (&v)[N]) {
    u32 codes[N / 4];
    nibbles<N>(block, index, high, codes);
    for (u32 i = 0; i < N; ++i) v[i] = scale * float_of(table[codes[i / 4] >> 8 * (i % 4) & 15]);
}

// d f16, 16 bytes of nibbles.
struct IQ4_NL : NonLinear {
    static constexpr u32 ELEMENTS = 32, BYTES = 18;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        looked_up<N>(block.half(0), block, 2 + at % 16, at >= 16, table, v);
    }
};

// d f16, 2 bytes of high bits of scales, 4 bytes of low nibbles of scales, 128 bytes of nibbles: d · (scale − 32) · value.
struct IQ4_XS : NonLinear {
    static constexpr u32 ELEMENTS = 256, BYTES = 136;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 group = at / 32, low = block.byte(4 + group / 2) >> group % 2 * 4 & 15;
        u32 bits = low | (block.pair(2) >> group * 2 & 3) << 4;
        float scale = block.half(0) * (integer(bits) - 32.0f);
        looked_up<N>(scale, block, 8 + group * 16 + at % 16, at % 32 >= 16, table, v);
    }
};

// An exponent (E8M0), 16 bytes of nibbles (E2M1).
struct MXFP4 : Doubled {
    static constexpr u32 ELEMENTS = 32, BYTES = 17;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 exponent = block.byte(0);
        // Half of 2^(exponent − 127), since the table holds doubled values; the two lowest are subnormal.
        float scale = float_of(exponent < 2 ? 0x00200000 << exponent : (exponent - 1) << 23);
        looked_up<N>(scale, block, 1 + at % 16, at >= 16, table, v);
    }
};

// Half of an E4M3 number; the sign is not looked at, and NaN is 0, as ggml reads scales.
DEVICE float half_of_e4m3(u32 byte) {
    float half = float_of((byte & 0x7f) << 20) * float_of((127 + 119) << 23);
    return byte == 0x7f ? 0.0f : half;
}

// Four scales (E4M3, without sign), four times 8 bytes of nibbles (E2M1).
struct NVFP4 : Doubled {
    static constexpr u32 ELEMENTS = 64, BYTES = 36;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32* table, float (&v)[N]) {
        u32 group = at / 16;
        float scale = half_of_e4m3(block.byte(group));
        looked_up<N>(scale, block, 4 + group * 8 + at % 8, at % 16 >= 8, table, v);
    }
};

BLOCKS(iq4_nl, IQ4_NL)
BLOCKS(iq4_xs, IQ4_XS)
BLOCKS(mxfp4, MXFP4)
BLOCKS(nvfp4, NVFP4)

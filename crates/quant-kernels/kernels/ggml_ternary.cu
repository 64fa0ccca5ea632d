// Types of ggml whose numbers are −1, 0 or 1.
#include "ggml.cuh"

// 48 bytes of five base-3 digits each, 4 bytes of four, d f16: d · (digit − 1). A byte is the number of its digits in 256ths of 3^5;
// multiplied by a power of 3 modulo 256, the next digit is on top. 32 bytes are five rows of 32 digits, 16 five rows of 16, 4 four
// rows of 4.
struct TQ1_0 : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 54;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        float d = block.half(52);
#pragma unroll
        for (u32 first = 0; first < N; first += 4) {
            u32 place = at + first, row, index;
            if (place < 160) {
                row = place / 32;
                index = place % 32;
            } else if (place < 240) {
                row = (place - 160) / 16;
                index = 32 + place % 16;
            } else {
                row = (place - 240) / 4;
                index = 48;
            }
            // 1, 3, 9, 27, 81.
            u32 power = row == 4 ? 81 : choose(0x1b090301, 0, 0x4440 | row), bytes[1];
            block.template take<4>(index, bytes);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                u32 digit = ((bytes[0] >> 8 * i) * power & 255) * 3 >> 8;
                v[first + i] = d * (integer(digit) - 1.0f);
            }
        }
    }
};

// 64 bytes of two-bit numbers, d f16: d · (q − 1). 32 bytes hold four rows of 32.
struct TQ2_0 : Plain {
    static constexpr u32 ELEMENTS = 256, BYTES = 66;
    template <u32 N> STATIC void numbers(Bytes block, u32 at, const u32*, float (&v)[N]) {
        u32 row = at / 32, codes[N / 4];
        block.template take<N>(row / 4 * 32 + at % 32, codes);
        for (u32 i = 0; i < N / 4; ++i) codes[i] = codes[i] >> row % 4 * 2 & 0x03030303;
        scaled<N>(block.half(64), codes, 1.0f, v);
    }
};

BLOCKS(tq1_0, TQ1_0)
BLOCKS(tq2_0, TQ2_0)

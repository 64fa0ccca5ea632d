// The integers of compressed-tensors: words of a row lie beside each other, as do the scales and zero points of its groups.
#include "packed_rows.cuh"

struct ColumnsBeside {
    STATIC u32 row(u32 thread) { return thread / UNITS; }
    STATIC u32 unit(u32 thread) { return thread % UNITS; }
    template <u32 BITS> STATIC void words(const PackedInt& p, u32 row, u32 first, u32* words) {
        const u32* from = (const u32*)p.data + (u64)row * p.column_words + first;
        if (BITS % 4 == 0 && (u64)from % 16 == 0 && first + BITS <= p.column_words) {
#pragma unroll
            for (u32 i = 0; i + 4 <= BITS; i += 4) {
                Vector loaded = load_vector(from + i);
                words[i] = loaded.x, words[i + 1] = loaded.y, words[i + 2] = loaded.z, words[i + 3] = loaded.w;
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < BITS; ++i) words[i] = first + i < p.column_words ? load(from + i) : 0;
    }
    template <u32 BITS> STATIC Row place(const PackedInt& p, u32 row) {
        return row_of_rows(p, row, row * BITS / 32, row * BITS % 32);
    }
};

BY_ROWS(compressed2, ColumnsBeside, 2)
BY_ROWS(compressed3, ColumnsBeside, 3)
BY_ROWS(compressed4, ColumnsBeside, 4)
BY_ROWS(compressed8, ColumnsBeside, 8)

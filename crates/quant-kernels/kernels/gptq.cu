// GPTQ: words of rows that follow each other lie beside each other, as do their scales and zero points.
#include "packed_rows.cuh"

struct RowsBeside {
    // The row of a tile whose words a thread reads, and which 32 columns.
    STATIC u32 row(u32 thread) { return thread % ROWS; }
    STATIC u32 unit(u32 thread) { return thread / ROWS; }
    template <u32 BITS> STATIC void words(const PackedInt& p, u32 row, u32 first, u32* words) {
        const u32* from = (const u32*)p.data + (u64)first * p.rows + row;
        u32 count = first + BITS <= p.column_words ? BITS : p.column_words - first;
#pragma unroll
        for (u32 i = 0; i < BITS; ++i) words[i] = i < count ? load(from + (u64)i * p.rows) : 0;
    }
    template <u32 BITS> STATIC Row place(const PackedInt& p, u32 row) {
        return row_of_groups(p, row, row * BITS / 32, row * BITS % 32);
    }
};

BY_ROWS(gptq2, RowsBeside, 2)
BY_ROWS(gptq3, RowsBeside, 3)
BY_ROWS(gptq4, RowsBeside, 4)
BY_ROWS(gptq8, RowsBeside, 8)

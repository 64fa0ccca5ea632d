// W4A8: numbers of 4 bits that stand for INT8 numbers, which stand for the weight's.
#include "flat.cuh"

// A run whose first element begins a row.
struct W4A8 {
    Run run;
    u64 groups;      // by row and group
    u64 scales;      // by row, from the run's first on
    u64 codebook;    // 16 levels; 0: -8 to 7
    u64 correction;  // by group and row; 0: there is none
    u64 rows;
    Divider columns;
    Divider group;
    u32 row;  // of the run's first element
    u32 row_groups;
    u32 groups_kind;
    u32 scales_kind;
    u32 codebook_kind;
    u32 correction_kind;
};

// Level × factor, rounded to the nearest of -127 … 127, × the row's scale, plus the correction.
DEVICE float number_of(float level, float factor, float scale) {
    float number = to_even(level * factor);
    number = number < -127.0f ? -127.0f : number;
    return (number > 127.0f ? 127.0f : number) * scale;
}

struct Levels : ElementByElement {
    static constexpr u32 ELEMENTS = 2, BYTES = 1, ENTRIES = 16;

    STATIC void prepare(const W4A8& p, u32* table) {
        u32 code = threadIdx.x;
        if (code >= 16) return;
        table[code] = bits_of(p.codebook ? number_at(p.codebook, p.codebook_kind, code) : integer(code) - 8.0f);
    }

    template <u32 N>
    STATIC void decode(const W4A8& p, const u32* table, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        u32 word[1];
        tile.template take<4>(place / 2, word);
        for (u32 i = 0; i < N; ++i) v[i] = float_of(table[word[0] >> 4 * i & 15]);
        u32 row = p.columns.quotient(element), column = element - row * p.columns.divisor;
        u32 index = p.group.quotient(column), within = column - index * p.group.divisor;
        if (within + N <= p.group.divisor && column + N <= p.columns.divisor) {
            u64 absolute = (u64)p.row + row;
            float factor = number_at(p.groups, p.groups_kind, absolute * p.row_groups + index);
            float scale = number_at(p.scales, p.scales_kind, absolute);
            for (u32 i = 0; i < N; ++i) v[i] = number_of(v[i], factor, scale);
            if (p.correction) {
                float add = number_at(p.correction, p.correction_kind, index * p.rows + absolute);
                for (u32 i = 0; i < N; ++i) v[i] = v[i] + add;
            }
            return;
        }
        for (u32 i = 0; i < N && element + i < p.run.end; ++i) {
            u32 mine = p.columns.quotient(element + i), beside = element + i - mine * p.columns.divisor;
            u32 other = p.group.quotient(beside);
            u64 absolute = (u64)p.row + mine;
            float factor = number_beside(p.groups, p.groups_kind, absolute * p.row_groups + other);
            v[i] = number_of(v[i], factor, number_beside(p.scales, p.scales_kind, absolute));
            if (p.correction) v[i] = v[i] + number_beside(p.correction, p.correction_kind, other * p.rows + absolute);
        }
    }
};

FLAT(w4a8, W4A8, Levels)

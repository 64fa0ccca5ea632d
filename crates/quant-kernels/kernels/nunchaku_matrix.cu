// Architecture: compute_80
// SVDQ by matrix instructions, as bf16 or f16: the product of the two narrow matrices is summed in f32, in steps of 16 ranks, and added
// to number × (scale × factors) × (1 / smooth), rounded once a step. Numbers are within one step of the decoder's, which has all of it in f64.
//
// A block decodes a tile of 128 rows × 64 columns, a warp 16 rows of it. Nunchaku packs for the same instructions: what a thread needs of
// the packed numbers and of the matrix `up` are 16 bytes that follow each other.
#include "nunchaku.cuh"

// Columns of a tile, and steps of 16 ranks that shared memory holds.
constexpr u32 COLUMNS = 64, STEPS = 2;
// Words of shared memory for 8 columns of a step, two columns a word: 16 ranks × 4, and what keeps threads off each other's banks.
constexpr u32 EIGHT = 80;

// Where shared memory has a word of `down`: of a step and 32 columns, columns 2 pair and 2 pair + 1 of the eight that are 8 quarter
// behind the first. So the instruction's eight columns are pairs, 8 apart, and its results a thread's eight neighbours.
DEVICE u32 down_place(u32 step, u32 half, u32 pair, u32 rank, u32 quarter) {
    return ((step * 2 + half) * 4 + pair) * EIGHT + rank * 4 + quarter;
}

#ifdef __CUDACC__

// A kernel of which a multiprocessor runs so many blocks at once: registers for fewer would leave it waiting for memory.
#define CROWDED_KERNEL(NAME, BLOCKS, PARAMS, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const PARAMS params) { __VA_ARGS__(params); }

// Four 8 × 8 matrices out of shared memory, turned: each thread names a row.
DEVICE void load_turned(u32 (&words)[4], const u32* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
// 16 bytes that other warps or tiles read too.
DEVICE Vector load_kept(const void* address) {
    Vector v;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}
// The product of 16 × 16 and 16 × 8 numbers, added.
template <bool BRAIN> DEVICE void multiply_add(float* upper, float* lower, const Vector& a, u32 first, u32 second) {
    if (BRAIN) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
            : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(first), "r"(second));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
            : "r"(a.x), "r"(a.z), "r"(a.y), "r"(a.w), "r"(first), "r"(second));
    }
}

// What a thread has of a step of `up`.
typedef Vector Factors;
DEVICE Factors fetch_up(u64 from) { return load_kept((const void*)(from + threadIdx.x % 32 * 16)); }

// A step for a thread's 2 × 2 × 8 numbers: 32 columns apart, and 8 rows.
template <bool BRAIN> DEVICE void multiply_step(const u32* down, u32 step, const Factors& up, float* sums) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 pair = 0; pair < 4; pair += 2) {
            u32 turned[4];
            load_turned(turned, down + down_place(step, half, pair + lane / 16, lane % 16, 0));
            float* upper = sums + half * 16 + pair * 2;
            multiply_add<BRAIN>(upper, upper + 8, up, turned[0], turned[1]);
            multiply_add<BRAIN>(upper + 2, upper + 10, up, turned[2], turned[3]);
        }
    }
}

DEVICE float add_product(float a, float b, float sum) { return __fmaf_rn(a, b, sum); }
// 1 / x, to the last bit or the one beside it.
DEVICE float inverse_of(float x) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

// Two numbers at a time, by the instruction that there is since Ampere.
struct Rounded {
    static constexpr u32 SIZE = 2;
    STATIC u32 pack(const float* v) {
        u32 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(v[1]), "f"(v[0]));
        return packed;
    }
    STATIC void wide(u64 address, const float* v) {
        store_vector((void*)address, {pack(v), pack(v + 2), pack(v + 4), pack(v + 6)});
    }
    STATIC void one(u64 address, float v) { Brain::one(address, v); }
};

#else

#define CROWDED_KERNEL(NAME, BLOCKS, PARAMS, ...) KERNEL(NAME, PARAMS, __VA_ARGS__)

// The same for a C++ compiler: a thread finds its numbers' factors where the instructions have them from, those of the other threads of its
// rows too, and adds in the order of ranks.
struct Factors {
    Vector of[4];
};
DEVICE Vector load_kept(const void* address) { return load_vector(address); }
DEVICE Factors fetch_up(u64 from) {
    Factors up;
    for (u32 i = 0; i < 4; ++i) up.of[i] = load_vector((const void*)(from + (threadIdx.x % 32 / 4 * 4 + i) * 16));
    return up;
}

template <bool BRAIN> DEVICE float factor_of(u32 bits) {
    return BRAIN ? float_of(bits << 16) : from_half(bits & 0xffff);
}
template <bool BRAIN> DEVICE void multiply_step(const u32* down, u32 step, const Factors& up, float* sums) {
    for (u32 rank = 0; rank < 16; ++rank) {
        // A thread has two neighbouring ranks, and two that are 8 behind.
        const Vector& v = up.of[rank % 8 / 2];
        u32 rows[2] = {rank < 8 ? v.x : v.y, rank < 8 ? v.z : v.w};
        for (u32 i = 0; i < 32; ++i) {
            u32 column = i % 8, word = down[down_place(step, i / 16, column / 2, rank, threadIdx.x % 4)];
            float factor = factor_of<BRAIN>(rows[i / 8 % 2] >> 16 * (rank % 2));
            sums[i] += factor * factor_of<BRAIN>(word >> 16 * (column % 2));
        }
    }
}

DEVICE float add_product(float a, float b, float sum) { return fmaf(a, b, sum); }
DEVICE float inverse_of(float x) { return 1.0f / x; }
typedef Brain Rounded;

#endif

// A step of 16 ranks of both narrow matrices: `up` for the thread itself, `down` into shared memory. There a thread puts two columns of
// two ranks 8 apart, and of the columns that are 8 behind.
DEVICE void fetch_steps(const Nunchaku& p, u32* down, Factors* up, u32 row_tile, u32 column, u32 rank) {
    u32 across = p.rank / 16, first = rank / 16, left = across - first;
    u64 mine = (u64)(row_tile * 8 + threadIdx.x / 32) * across + first;
#pragma unroll
    for (u32 step = 0; step < STEPS; ++step) {
        if (step < left) up[step] = fetch_up(p.up + (mine + step) * 512);
    }
    u32 step = threadIdx.x / 128, sixteen = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    if (step < left) {
        u64 tile = (u64)(column / 16 + sixteen) * across + first + step;
        Vector v = load_kept((const void*)(p.down + tile * 512 + lane * 16));
        u32* to = down + down_place(step, sixteen / 2, lane % 4, lane / 4, sixteen % 2 * 2);
        to[0] = v.x, to[1] = v.y;
        to[32] = v.z, to[33] = v.w;
    }
}

// Eight neighbours of the packed part, added to their products.
//
// Of integers the sign is the highest bit. Bits that are higher up in a word make numbers 16 times as large, exactly. `floor` is
// INTEGER.
DEVICE void add_integers(u32 codes, u32 floor, const float* inverse, const float (&scales)[4], const float* sums, float* v) {
    codes ^= 0x88888888;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        u32 place = i % 4 * 4, four = i < 4 ? codes : codes >> 16;
        float number = float_of((four & 15u << place) | floor) - (ZERO + (float)(8u << place));
        v[i] = add_product(number * scales[i % 4], inverse[i], sums[i]);
    }
}
DEVICE void add_floats(u32 codes, const float* inverse, float scale, const float* sums, float* v) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[i] = add_product(e2m1_above(codes << (28 - 4 * i)) * scale, inverse[i], sums[i]);
}

// A number of 16 bits.
DEVICE float short_number(u32 kind, u32 bits) { return kind == BF16 ? float_of(bits << 16) : from_half(bits); }

// What the scales of a thread's two rows are stored as: one of 16 bits each, or four of 8. As scale_place and small_scale_place have it,
// for what a thread knows.
template <bool FP4> DEVICE void fetch_scales(const Nunchaku& p, u64 pack, u32 (&scales)[2]) {
    u32 warp = threadIdx.x / 32, below = threadIdx.x % 32 / 4;
    if (FP4) {
        const u32* from = (const u32*)p.scale + pack * 128 + (below * 16 + warp % 2 * 8 + warp / 2);
        scales[0] = load(from), scales[1] = load(from + 4);
    } else {
        const u16* from = (const u16*)p.scale + pack * 128 + (warp * 16 + below / 2 * 4 + below % 2);
        scales[0] = load(from), scales[1] = load(from + 2);
    }
}

// A thread's numbers in one row: eight, and eight that are 32 behind.
template <bool FP4, class T>
DEVICE void finish_row(const Nunchaku& p, u32 row, u32 column, u32 scales, const u32* codes, const float* inverse, const float* sums) {
    float factor = p.global ? number_at(p.global, p.global_kind, 0) : 1.0f;
    if (p.row_scale) factor = number_at(p.row_scale, p.row_scale_kind, scale_place(1, row, 0)) * factor;
    // The compiler would write the constant into each instruction, and make two of each.
    u32 floor = INTEGER | p.tiles >> 31;
    u64 to = p.out + ((u64)(row - p.first) * p.columns + column) * T::SIZE;
    float v[16];
    if (FP4) {
        // Of 16 columns each.
        u32 mine = scales >> column % 32 / 16 * 8;
        add_floats(codes[0], inverse, e4m3(mine & 255) * factor, sums, v);
        add_floats(codes[1], inverse + 32, e4m3(mine >> 16 & 255) * factor, sums + 16, v + 8);
    } else {
        float scale = short_number(p.scale_kind, scales) * factor;
        float parts[4] = {scale, scale * 0x1p-4f, scale * 0x1p-8f, scale * 0x1p-12f};
        add_integers(codes[0], floor, inverse, parts, sums, v);
        add_integers(codes[1], floor, inverse + 32, parts, sums + 16, v + 8);
    }
    if (p.out % 16 == 0) {
        T::wide(to, v);
        T::wide(to + 32 * T::SIZE, v + 8);
    } else {
#pragma unroll
        for (u32 i = 0; i < 16; ++i) T::one(to + (i / 8 * 32 + i % 8) * T::SIZE, v[i]);
    }
}

template <bool FP4, class T> DEVICE void svdq(const Nunchaku& p) {
    SHARED(u32, down, STEPS * 8 * EIGHT);
    SHARED(float, inverse, COLUMNS);
    LOCAL(float, sums, 32);
    LOCAL(u32, codes, 4);
    LOCAL(u32, scales, 2);
    LOCAL(Factors, up, STEPS);
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        u32 below = p.across.quotient(tile), beside = tile - below * p.across.divisor, column = beside * COLUMNS;
        u32 row_tile = (u32)p.row_tiles + below;
        // All that comes from far away is asked for before the first of it is waited for.
        EACH_THREAD {
            u64 pack = (u64)row_tile * p.across.divisor + beside;
            Vector v = load_vector((const void*)(p.data + (pack * THREADS + threadIdx.x) * 16));
            MINE(codes)[0] = v.x, MINE(codes)[1] = v.y, MINE(codes)[2] = v.z, MINE(codes)[3] = v.w;
            fetch_scales<FP4>(p, pack, MINE(scales));
            u32 smooth = 0;
            if (threadIdx.x < COLUMNS) smooth = load((const u16*)p.smooth + scale_place(1, column + threadIdx.x, 0));
            if (p.rank != 0) fetch_steps(p, down, MINE(up), row_tile, column, 0);
            if (threadIdx.x < COLUMNS) inverse[threadIdx.x] = inverse_of(short_number(p.smooth_kind, smooth));
#pragma unroll
            for (u32 i = 0; i < 32; ++i) MINE(sums)[i] = 0.0f;
        }
        BARRIER();
#pragma unroll 1
        for (u32 rank = 0; rank < p.rank; rank += STEPS * 16) {
            if (rank != 0) {
                BARRIER();
                EACH_THREAD { fetch_steps(p, down, MINE(up), row_tile, column, rank); }
                BARRIER();
            }
            EACH_THREAD {
#pragma unroll
                for (u32 step = 0; step < STEPS; ++step) {
                    if (rank + step * 16 < p.rank) {
                        if (p.up_kind == BF16) {
                            multiply_step<true>(down, step, MINE(up)[step], MINE(sums));
                        } else {
                            multiply_step<false>(down, step, MINE(up)[step], MINE(sums));
                        }
                    }
                }
            }
        }
        EACH_THREAD {
            u32 row = row_tile * 128 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, eight = threadIdx.x % 4 * 8;
#pragma unroll
            for (u32 high = 0; high < 2; ++high) {
                u32 mine = row + high * 8;
                if (mine >= p.first && mine < p.end) {
                    finish_row<FP4, T>(p, mine, column + eight, MINE(scales)[high], MINE(codes) + high * 2, inverse + eight,
                                       MINE(sums) + high * 8);
                }
            }
        }
        BARRIER();
    }
}

CROWDED_KERNEL(svdq_int4_bf16, 4, Nunchaku, svdq<false, Rounded>)
CROWDED_KERNEL(svdq_int4_f16, 4, Nunchaku, svdq<false, Half>)
// In the registers of four blocks it would keep two numbers in memory.
CROWDED_KERNEL(svdq_fp4_bf16, 3, Nunchaku, svdq<true, Rounded>)
CROWDED_KERNEL(svdq_fp4_f16, 4, Nunchaku, svdq<true, Half>)

// The frame of kernels whose packed numbers follow each other in the order of the weight.
//
//   packed bytes  ── 16 bytes a thread ──▶  shared memory  ── a few bytes a thread, at any place ──▶  16 bytes of numbers a thread
//
// Loads and stores are as wide and as regular as they can be, whatever the size of blocks; what is irregular happens in shared
// memory. A thread's numbers are 4 or 8 neighbours, so that in most formats they share a scale.
#pragma once
#include "numbers.cuh"

// Times that each thread writes 16 bytes for one filling of shared memory.
constexpr u32 ROUNDS = 4;

// A run of elements. They are counted from the one that `data` begins with.
struct Run {
    u64 data;   // the packed bytes
    u64 out;    // where element `first` goes
    u32 bytes;  // packed bytes that may be read
    u32 begin;  // where tiles begin: a multiple of 16, at most `first`
    u32 first;  // the first element that is wanted
    u32 end;    // behind the last one
    u32 tiles;
    u32 unused;
};

// Packed bytes in shared memory, from any place on.
struct Bytes {
    const u32* words;
    u32 at;

    MEMBER u32 byte(u32 index) const { return ((const u8*)words)[at + index]; }
    MEMBER u32 pair(u32 index) const { return byte(index) | byte(index + 1) << 8; }
    MEMBER u32 word(u32 index) const {
        u32 place = at + index;
        return shifted(words[place / 4], words[place / 4 + 1], place % 4 * 8);
    }
    MEMBER float half(u32 index) const { return from_half(pair(index)); }
    // N bytes as words.
    template <u32 N> MEMBER void take(u32 index, u32 (&taken)[N / 4]) const {
        u32 place = (at + index) / 4, bits = (at + index) % 4 * 8;
        u32 low = words[place];
        for (u32 i = 0; i < N / 4; ++i) {
            u32 high = words[place + 1 + i];
            taken[i] = shifted(low, high, bits);
            low = high;
        }
    }
};

// Brings at most MOST packed bytes into shared memory. Vectors that reach over either end are read by bytes, so that nothing outside is
// read. A thread loads all of its vectors before it stores the first, so that it waits for memory once.
template <u32 MOST> DEVICE void fetch(u32* stage, u64 from, u32 count) {
    constexpr u32 LOADS = (MOST + 30) / 16 / THREADS + 1;
    u32 shift = (u32)from & 15, end = shift + count;
    u64 base = from - shift;
    Vector loaded[LOADS];
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        u32 at = 16 * (threadIdx.x + i * THREADS);
        if (at >= shift && at + 16 <= end) loaded[i] = load_vector((const void*)(base + at));
    }
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        u32 at = 16 * (threadIdx.x + i * THREADS);
        if (at >= shift && at + 16 <= end) {
            *(Vector*)(stage + at / 4) = loaded[i];
        } else if (at < end) {
#pragma unroll 1
            for (u32 byte = at; byte < at + 16; ++byte) {
                if (byte >= shift && byte < end) ((u8*)stage)[byte] = load((const u8*)(base + byte));
            }
        }
    }
}

// A format that has nothing to work out for a whole tile.
struct ElementByElement {
    template <class P> STATIC void enter(const P&, u32*, u32, u32) {}
};

// A format F packs F::ELEMENTS numbers in F::BYTES bytes. F::prepare(params, table) fills F::ENTRIES words that a block shares,
// F::enter(params, table, begin, count) those of them that a tile needs;
// F::decode<N>(params, table, tile, place, element, v) makes N numbers: `tile` are packed bytes, `place` says which element of
// them is the first, `element` which one of the run. N divides `place`.
template <class F, class T, class P> DEVICE void flat(const P& params) {
    constexpr u32 N = WIDE<T>, TILE = THREADS * N * ROUNDS, MOST = TILE / F::ELEMENTS * F::BYTES;
    const Run& run = params.run;
    // A vector more at either end, since words are read in pairs.
    SHARED(u32, stage, MOST / 4 + 12);
    SHARED(u32, table, F::ENTRIES);
    EACH_THREAD { F::prepare(params, table); }
    // Where element 0 would go, if it did.
    u64 out = run.out - (u64)run.first * T::SIZE;
    bool wide = out % 16 == 0;
    for (u32 tile = blockIdx.x; tile < run.tiles; tile += gridDim.x) {
        u32 begin = run.begin + tile * TILE, start = begin / F::ELEMENTS * F::BYTES;
        u32 left = run.bytes - start;
        u64 from = run.data + start;
        EACH_THREAD {
            fetch<MOST>(stage, from, left < MOST ? left : MOST);
            F::enter(params, table, begin, TILE);
        }
        BARRIER();
        bool whole = wide && begin >= run.first && begin + TILE <= run.end;
        EACH_THREAD {
            // A round is whole words and blocks: where a thread's numbers lie in them is the same in each, and worked out once.
            constexpr u32 ROUND = THREADS * N, WORDS = ROUND / F::ELEMENTS * F::BYTES / 4;
            static_assert(ROUND % F::ELEMENTS == 0 && ROUND / F::ELEMENTS * F::BYTES % 4 == 0, "a round is no whole words");
            u32 place = threadIdx.x * N;
#pragma unroll 1
            for (u32 round = 0; round < ROUNDS; ++round) {
                Bytes packed = {stage + round * WORDS, (u32)from & 15};
                u32 element = begin + round * ROUND + place;
                if (!whole && (element >= run.end || element + N <= run.first)) continue;
                float v[N];
                F::template decode<N>(params, table, packed, place, element, v);
                if (whole || (wide && element >= run.first && element + N <= run.end)) {
                    T::wide(out + (u64)element * T::SIZE, v);
                } else {
                    for (u32 i = 0; i < N; ++i) {
                        if (element + i >= run.first && element + i < run.end) {
                            T::one(out + ((u64)element + i) * T::SIZE, v[i]);
                        }
                    }
                }
            }
        }
        BARRIER();
    }
}

// The kernels of a format, one a type of target.
#define FLAT(NAME, PARAMS, FORMAT)                                                                                             \
    KERNEL(NAME##_f32, PARAMS, flat<FORMAT, Float>)                                                                            \
    KERNEL(NAME##_bf16, PARAMS, flat<FORMAT, Brain>)                                                                           \
    KERNEL(NAME##_f16, PARAMS, flat<FORMAT, Half>)

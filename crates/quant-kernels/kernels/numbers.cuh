// Small numbers as f32, exactly, and f32 numbers as the target's.
#pragma once
#include "device.cuh"

// Codes of at most 23 bits become numbers as the fraction of 2^23: `code | INTEGER`, less 2^23 and what is to be subtracted.
constexpr u32 INTEGER = 0x4b000000;
constexpr float ZERO = 8388608.0f;

// A small integer as a number.
DEVICE float integer(u32 code) { return float_of(code | INTEGER) - ZERO; }
// One of a word's bytes, and 2^23.
DEVICE float byte_above(u32 word, u32 index) { return float_of(choose(word, INTEGER, 0x7440 | index)); }
// One of a word's bytes, less a small integer; the subtraction is exact.
DEVICE float byte_less(u32 word, u32 index, float less) { return byte_above(word, index) - (ZERO + less); }
// One of a word's bytes with a sign.
DEVICE float signed_byte(u32 word, u32 index) { return byte_less(word ^ 0x80808080, index, 128.0f); }
// Four bits, lowest first, as the low bits of four bytes.
DEVICE u32 spread_bits(u32 bits) { return (bits & 15) * 0x00204081 & 0x01010101; }

// FP8 with four bits of exponent, in the upper byte of a word. Shifted to where an f32 has its exponent it is smaller by 2^120,
// subnormal or not. There is no infinity; what would be 480 is no number.
DEVICE float e4m3_above(u32 word) {
    float number = float_of((u32)((int)word >> 4) & 0x87f00000) * float_of((127 + 120) << 23);
    return fabsf(number) == 480.0f ? float_of(0x7fffffff) : number;
}
DEVICE float e4m3(u32 byte) { return e4m3_above(byte << 24); }
// FP8 with five bits of exponent: the upper half of an f16.
DEVICE float e5m2(u32 byte) { return from_half((byte & 255) << 8); }
// A number of 4 bits in the upper ones of a word, the sign first: smaller by 2^126 in place.
DEVICE float e2m1_above(u32 word) {
    return float_of((u32)((int)word >> 6) & 0x81c00000) * float_of((127 + 126) << 23);
}
DEVICE float e2m1(u32 code) { return e2m1_above(code << 28); }
// A power of two.
DEVICE float e8m0(u32 byte) {
    return float_of(byte == 0 ? 1u << 22 : byte == 255 ? 0x7fc00000 : byte << 23);
}

// How the numbers of a part are stored.
enum Kind : u32 { F32, F16, BF16, E4M3, E5M2, E8M0, U8, I8 };

// A number of a part that is one of the first three.
DEVICE float float_at(u64 address, u32 kind, u64 index) {
    if (kind == F32) return load((const float*)address + index);
    u32 bits = load((const u16*)address + index);
    return kind == F16 ? from_half(bits) : float_of(bits << 16);
}

// A number of a part.
DEVICE float number_at(u64 address, u32 kind, u64 index) {
    switch (kind) {
        case F32: return load((const float*)address + index);
        case F16: return from_half(load((const u16*)address + index));
        case BF16: return float_of((u32)load((const u16*)address + index) << 16);
        default: break;
    }
    u32 byte = load((const u8*)address + index);
    switch (kind) {
        case E4M3: return e4m3(byte);
        case E5M2: return e5m2(byte);
        case E8M0: return e8m0(byte);
        case U8: return integer(byte);
        default: return signed_byte(byte, 0);
    }
}

// As number_at, where the numbers of one thread do not share what they are multiplied with.
RARE float number_beside(u64 address, u32 kind, u64 index) { return number_at(address, kind, index); }

// To the nearest bf16, ties to even, as the upper half of a word whose lower half is open. Not for NaN, which may wrap around.
DEVICE u32 bf16_of_number(float number) {
    u32 bits = bits_of(number);
    return bits + (0x7fff + (bits >> 16 & 1));
}
// As before, and NaN stays NaN.
DEVICE u32 bf16_above(float number) { return number != number ? 0x7fffffff : bf16_of_number(number); }
// Rounded to a part's type, if that is one that models compute in.
DEVICE float rounded_to(float number, u32 kind) {
    if (kind == BF16) return float_of(bf16_above(number) & 0xffff0000);
    return kind == F16 ? from_half(to_half(number)) : number;
}

// Types of targets: how many numbers are 16 bytes, and how they are packed.
struct Float {
    using Stored = u32;
    static constexpr u32 SIZE = 4;
    STATIC Vector packed(const float* v) { return {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])}; }
    STATIC void wide(u64 address, const float* v) { store_vector((void*)address, packed(v)); }
    STATIC void one(u64 address, float v) { *(float*)address = v; }
};
struct Brain {
    using Stored = u16;
    static constexpr u32 SIZE = 2;
    STATIC u32 pack(u32 low, u32 high) { return choose(low, high, 0x7632); }
    STATIC Vector packed(const float* v) {
        // No number if one of them is none, or where infinities meet: one look for all eight.
        float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        Vector packed;
        if (sum == sum) {
            packed.x = pack(bf16_of_number(v[0]), bf16_of_number(v[1]));
            packed.y = pack(bf16_of_number(v[2]), bf16_of_number(v[3]));
            packed.z = pack(bf16_of_number(v[4]), bf16_of_number(v[5]));
            packed.w = pack(bf16_of_number(v[6]), bf16_of_number(v[7]));
        } else {
            packed.x = pack(bf16_above(v[0]), bf16_above(v[1]));
            packed.y = pack(bf16_above(v[2]), bf16_above(v[3]));
            packed.z = pack(bf16_above(v[4]), bf16_above(v[5]));
            packed.w = pack(bf16_above(v[6]), bf16_above(v[7]));
        }
        return packed;
    }
    STATIC void wide(u64 address, const float* v) { store_vector((void*)address, packed(v)); }
    STATIC void one(u64 address, float v) { *(u16*)address = (u16)(bf16_above(v) >> 16); }
};
struct Half {
    using Stored = u16;
    static constexpr u32 SIZE = 2;
    STATIC u32 pack(const float* v) { return to_half(v[0]) | to_half(v[1]) << 16; }
    STATIC Vector packed(const float* v) { return {pack(v), pack(v + 2), pack(v + 4), pack(v + 6)}; }
    STATIC void wide(u64 address, const float* v) { store_vector((void*)address, packed(v)); }
    STATIC void one(u64 address, float v) { *(u16*)address = (u16)to_half(v); }
};
// Numbers of 16 bytes.
template <class T> constexpr u32 WIDE = 16 / T::SIZE;

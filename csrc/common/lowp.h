// bf16 and fp16 to fp32 and back, without branches so that loops over them vectorise. Rounding is to nearest, ties to even;
// not-a-number stays not-a-number.
#pragma once

#include <cstdint>
#include <cstring>

namespace ds {

#define DS_INLINE static inline __attribute__((always_inline))

DS_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

DS_INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct F32 {
    float value;
    DS_INLINE float get(const F32& x) { return x.value; }
    DS_INLINE F32 make(float x) { return {x}; }
};

struct BF16 {
    uint16_t bits;
    DS_INLINE float get(const BF16& x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
    DS_INLINE BF16 make(float x) {
        const uint32_t b = as_bits(x);
        const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
        // Rounding would carry a large payload of a not-a-number into infinity or the sign.
        const bool nan = (b & 0x7fffffffu) > 0x7f800000u;
        return {static_cast<uint16_t>(nan ? 0x7fc0u : rounded)};
    }
};

struct F16 {
    uint16_t bits;
    DS_INLINE float get(const F16& x) {
        const uint32_t b = x.bits;
        // Shifted into place the exponent is 112 too small; the product repairs it, for subnormal numbers too.
        const uint32_t magnitude = as_bits(as_float((b & 0x7fffu) << 13) * as_float(0x77800000u));
        const uint32_t special = (b & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
        return as_float(magnitude | special | ((b & 0x8000u) << 16));
    }
    DS_INLINE F16 make(float x) {
        const uint32_t b = as_bits(x), sign = (b >> 16) & 0x8000u, m = b & 0x7fffffffu;
        // Subnormal in fp16: adding 0.5 makes the hardware round at the right bit.
        const uint32_t small = as_bits(as_float(m) + 0.5f) - 0x3f000000u;
        const uint32_t normal = (m + 0xc8000fffu + ((m >> 13) & 1u)) >> 13;
        const uint32_t finite = m < 0x38800000u ? small : normal;
        const uint32_t large = m > 0x7f800000u ? 0x7e00u : 0x7c00u;
        return {static_cast<uint16_t>((m >= 0x477ff000u ? large : finite) | sign)};
    }
};

}  // namespace ds

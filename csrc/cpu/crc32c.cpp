// CRC-32C (Castagnoli) of host memory: the checksum instruction in three interleaved streams, or tables of eight bytes a step.
//
// In the reflected form used here the top bit of a 32-bit value is the coefficient of x^0, and a register is the remainder of what it
// has seen. Appending n zero bytes multiplies it by x^(8n); that joins the streams, and the checksums of neighbouring ranges.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define DS_CRC_HARDWARE 1
#define DS_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define DS_CRC_HARDWARE 1
#define DS_CRC_TARGET
#endif

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // 0x1EDC6F41, bits reversed, without x^32
constexpr int64_t kStream = 2048;              // bytes of one of the three streams of a round
constexpr int64_t kBlock = 6 * kStream;        // bytes copied at a time: both sides stay in the first-level cache

// a * b modulo the polynomial.
uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
    }
    return product;
}

// x^(8 * bytes).
uint32_t zeros(int64_t bytes) {
    uint32_t power = 1u << 23, result = 1u << 31;  // x^8 and 1
    for (uint64_t left = static_cast<uint64_t>(bytes); left; left >>= 1) {
        if (left & 1) result = multiply(power, result);
        power = multiply(power, power);
    }
    return result;
}

struct Tables {
    uint32_t step[8][256];   // step[k][b]: byte b followed by k zero bytes
    uint32_t shift[4][256];  // shift[k][b]: b in byte k of a register, followed by kStream zero bytes

    Tables() {
        const uint32_t stream = zeros(kStream);
        for (uint32_t b = 0; b < 256; ++b) {
            uint32_t value = b;
            for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
            step[0][b] = value;
            for (int k = 0; k < 4; ++k) shift[k][b] = multiply(b << (8 * k), stream);
        }
        for (int k = 1; k < 8; ++k)
            for (uint32_t b = 0; b < 256; ++b) step[k][b] = (step[k - 1][b] >> 8) ^ step[0][step[k - 1][b] & 255];
    }
};

const Tables& tables() {
    static const Tables made;
    return made;
}

uint64_t load(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

using Update = uint32_t (*)(const uint8_t*, int64_t, uint32_t);

uint32_t by_tables(const uint8_t* at, int64_t n, uint32_t state) {
    const auto& t = tables().step;
    for (; n >= 8; at += 8, n -= 8) {
        const uint64_t v = load(at) ^ state;
        state = t[7][v & 255] ^ t[6][v >> 8 & 255] ^ t[5][v >> 16 & 255] ^ t[4][v >> 24 & 255] ^ t[3][v >> 32 & 255] ^
                t[2][v >> 40 & 255] ^ t[1][v >> 48 & 255] ^ t[0][v >> 56];
    }
    for (; n > 0; ++at, --n) state = (state >> 8) ^ t[0][(state ^ *at) & 255];
    return state;
}

#ifdef DS_CRC_HARDWARE

DS_CRC_TARGET inline uint64_t eight(uint64_t state, uint64_t value) {
#if defined(__x86_64__)
    return _mm_crc32_u64(state, value);
#else
    return __crc32cd(static_cast<uint32_t>(state), value);
#endif
}

DS_CRC_TARGET inline uint32_t one(uint32_t state, uint8_t value) {
#if defined(__x86_64__)
    return _mm_crc32_u8(state, value);
#else
    return __crc32cb(state, value);
#endif
}

uint32_t past_stream(uint64_t state) {
    const auto& t = tables().shift;
    return t[0][state & 255] ^ t[1][state >> 8 & 255] ^ t[2][state >> 16 & 255] ^ t[3][state >> 24 & 255];
}

// The instruction takes three cycles and starts one every cycle: three chains keep it busy.
DS_CRC_TARGET uint32_t by_instruction(const uint8_t* at, int64_t n, uint32_t state) {
    uint64_t a = state;
    for (; n >= 3 * kStream; at += 3 * kStream, n -= 3 * kStream) {
        uint64_t b = 0, c = 0;
        for (int64_t i = 0; i < kStream; i += 8) {
            a = eight(a, load(at + i));
            b = eight(b, load(at + kStream + i));
            c = eight(c, load(at + 2 * kStream + i));
        }
        a = past_stream(past_stream(a) ^ b) ^ c;
    }
    for (; n >= 8; at += 8, n -= 8) a = eight(a, load(at));
    state = static_cast<uint32_t>(a);
    for (; n > 0; ++at, --n) state = one(state, *at);
    return state;
}

#endif

Update choose() {
#ifdef DS_CRC_HARDWARE
    const char* wanted = std::getenv("DS_CPU_ISA");
    if (wanted && !std::strcmp(wanted, "plain")) return by_tables;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("sse4.2")) return by_tables;
#endif
    return by_instruction;
#else
    return by_tables;
#endif
}

uint32_t update(const uint8_t* at, int64_t n, uint32_t state) {
    static const Update chosen = choose();
    return chosen(at, n, state);
}

}  // namespace

extern "C" {

// Checksum of n bytes that follow those of checksum crc; 0 for none.
uint32_t ds_crc32c(const void* data, int64_t n, uint32_t crc) { return ~update(static_cast<const uint8_t*>(data), n, ~crc); }

// The same, and the bytes go to dst, which does not overlap them: one pass over memory.
uint32_t ds_crc32c_copy(void* dst, const void* src, int64_t n, uint32_t crc) {
    const uint8_t* from = static_cast<const uint8_t*>(src);
    uint8_t* to = static_cast<uint8_t*>(dst);
    uint32_t state = ~crc;
    for (int64_t at = 0; at < n; at += kBlock) {
        const int64_t size = n - at < kBlock ? n - at : kBlock;
        state = update(from + at, size, state);
        std::memcpy(to + at, from + at, static_cast<size_t>(size));
    }
    return ~state;
}

// Checksum of two neighbouring ranges, a and b of theirs, the second of length_b bytes.
uint32_t ds_crc32c_combine(uint32_t a, uint32_t b, int64_t length_b) { return multiply(zeros(length_b), a) ^ b; }
}
